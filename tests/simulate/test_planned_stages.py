"""The stages of a planned step by closed form: new weights on their way, prompts that share a beginning, passes that a trained token costs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.algo.config import AlgoConfig
from headrace.commands.plan.answer import Answer, PlanRequest, answer
from headrace.commands.plan.command import text
from headrace.commands.plan.measure import Scenario, predict
from headrace.commands.plan.parts.engine import Shared, SimulatedEngine
from headrace.commands.plan.parts.simulated_trainer import SimulatedTrainer
from headrace.commands.plan.rates import hardware
from headrace.commands.plan.rates.calibrate import Publishing, time_publishing
from headrace.commands.plan.rates.from_run import newly_computed, rotated
from headrace.commands.plan.rates.hardware import GPUS, PASSES, Gpu, engine_rates, passes_of, trainer_rates
from headrace.commands.plan.rates.rates import EngineRates, Rates, TrainerRates, save_rates
from headrace.commands.plan.rates.shapes import SHAPES
from headrace.core.batches import Batch
from headrace.episodes.rollout import RolloutConfig
from headrace.loop.staleness import StalenessConfig
from headrace.loop.world import virtual_time
from headrace.loop.world.surroundings import fixed, prompt_tokens
from headrace.run.config import load_config
from headrace.run.rehearsal.memory_needs import read_shape
from headrace.testing.makers import request, update
from headrace.trainer.config import TrainConfig

FLAT = EngineRates(((1.0, 0.01), (64.0, 0.01)), max_running=64)
"""10 ms a pass, however many run."""


def planned(max_lag: int, trainer: TrainerRates, engine: EngineRates = FLAT) -> Any:
    """A step trains 16 completions of 20 tokens, which take 0.2 s to generate."""
    return predict(
        Scenario(
            rates=Rates(engine, trainer),
            completions=fixed(20),
            staleness=StalenessConfig(groups_per_step=4, max_lag=max_lag),
            rollout=RolloutConfig(group_size=4, max_tokens=64),
            algo=AlgoConfig(name="dr_grpo"),
            prompts=fixed(10),
            steps=12,
        )
    )


# -- new weights ----------------------------------------------------------------------------------------------------------


def test_a_synchronous_step_waits_for_all_of_a_publish():
    """0.2 s of passes, a step of 0.3 s, 30 ms to copy, 70 to send, 50 to verify, and a swap that stops nothing."""
    found = planned(0, TrainerRates(0.0, 0.3, 0.03, send=0.07), msgspec.structs.replace(FLAT, verify=0.05, swap=0.02))
    assert found.seconds_per_step == pytest.approx(0.2 + 0.3 + 0.03 + 0.07 + 0.05)
    assert found.trainer_idle == pytest.approx((0.2 + 0.07 + 0.05) / 0.65), "it waits while its thread sends"


@pytest.mark.parametrize(("slows", "longer"), [(1.0, 0.0), (1.5, 0.035)])
def test_an_asynchronous_trainer_sends_beside_its_next_step(slows: float, longer: float):
    """The next step waits for the copy alone. Beside a step, 70 ms take 70 · 1.5, in which the step does 70 ms of its work."""
    found = planned(1, TrainerRates(0.0, 0.5, 0.03, send=0.07, send_slows=slows))
    assert found.seconds_per_step == pytest.approx(0.5 + 0.03 + longer)


def test_a_send_is_slowed_by_the_step_that_is_beside_it_only():
    """Each takes 1.4 times as long beside the other: 0.35 s of sending end after 0.49, when 0.35 s of the step are done."""

    async def work() -> tuple[float, float, float]:
        clock = asyncio.get_running_loop().time
        trainer = SimulatedTrainer(TrainerRates(0.0, 1.0, send=0.35, send_slows=1.4), Shared())
        sent: list[float] = []

        async def send() -> None:
            await trainer.publish()
            sent.append(clock())

        await asyncio.gather(send(), trainer.step(Batch(0, ())))
        stepped, begun = clock(), clock()
        await trainer.publish()
        return sent[0], stepped, clock() - begun

    assert virtual_time.run(work()) == pytest.approx((0.35 * 1.4, 0.35 * 1.4 + 0.65, 0.35))


@pytest.mark.parametrize("slows", [1.0, 1.4])
def test_what_is_measured_of_a_publish_is_what_it_takes(slows: float):
    """On simulated parts the measurement finds the rates with which they were made, also those of what happens at the same time."""
    trainer_rates = TrainerRates(0.0, 1.0, 0.03, send=0.2, send_slows=slows)
    engine_rates = msgspec.structs.replace(FLAT, verify=0.05, verify_slows=1.5)

    async def work() -> Publishing:
        shared = Shared()
        one, trainer = engine_of(engine_rates, shared), SimulatedTrainer(trainer_rates, shared)
        await one.load(await trainer.publish())

        @contextlib.asynccontextmanager
        async def generating() -> AsyncIterator[None]:
            running = asyncio.ensure_future(one.generate(request("r", prompt_tokens(1, 10, 0.5), 4000, seed=4000)))
            await asyncio.sleep(0.1)
            yield
            running.cancel()

        async def step() -> None:
            await trainer.step(Batch(0, ()))

        clock = asyncio.get_running_loop().time
        return await time_publishing(one, trainer, step=step, generating=generating, rounds=3, clock=clock)

    assert tuple(virtual_time.run(work())) == pytest.approx((0.03, 0.2, slows, 0.05, 1.5, 0.0))


def engine_of(rates: EngineRates, shared: Shared) -> SimulatedEngine:
    """The seed of a request is the length of its completion."""
    return SimulatedEngine(
        rates=rates, length=lambda one: (one.sampling.seed, False), shared=shared, grain=1, expected=10.0
    )


# -- measurements ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("together", "computed"), [(1, 50), (4, 30 + 4 * 20), (24, 30 + 24 * 20)])
def test_a_common_beginning_is_computed_once_for_the_prompts_of_a_version(together: int, computed: int):
    """24 prompts of 50 tokens, the first 30 of which are the same in all."""
    assert newly_computed(30 + 24 * 20, [50] * 24, together) == pytest.approx(computed / (50 * together))


def test_prompts_without_a_common_beginning_are_computed_whole():
    assert newly_computed(1200, [50] * 24, 4) == 1 and newly_computed(1300, [50] * 24, 4) == 1
    assert newly_computed(10, [50], 4) == 1, "of one prompt nothing can be said"


def test_every_sequence_costs_its_request():
    """Five sequences of 20 tokens: 20 passes of 10 ms, and 3 ms for each."""

    async def work() -> float:
        one = engine_of(msgspec.structs.replace(FLAT, request=0.003), Shared())
        await one.load(update(0, "simulated"))
        prompt = prompt_tokens(1, 10, 0.5)
        await asyncio.gather(*(one.generate(request(f"r{i}", prompt, 64, seed=20)) for i in range(5)))
        return asyncio.get_running_loop().time()

    assert virtual_time.run(work()) == pytest.approx(20 * 0.01 + 5 * 0.003)


def test_steps_are_measured_on_other_groups_each_time():
    assert [list(one) for one in rotated("abcde", [2, 1, 4])] == [["a", "b"], ["c"], ["d", "e", "a", "b"]]


# -- data sheets ----------------------------------------------------------------------------------------------------------


def test_a_trained_token_costs_what_is_forwarded_for_it():
    """A third more if activations are computed again, and another third with a reference model in the loss."""
    plain, kl = AlgoConfig(name="dr_grpo"), AlgoConfig(kl={"coef": 0.01})
    again = TrainConfig(gradient_checkpointing=True)
    assert [passes_of(TrainConfig(), plain), passes_of(again, plain), passes_of(again, kl)] == [3, 4, 5]
    rates = [trainer_rates(GPUS["h100"], SHAPES["8b"], 8, 16_384, passes=passes).token for passes in (PASSES, 4, 5)]
    assert rates[1] / rates[0] == pytest.approx(4 / 3) and rates[2] / rates[0] == pytest.approx(5 / 3)


def test_a_critic_s_own_model_costs_as_many_passes_as_it_has_parameters_of_the_policy_s(tiny_llama: Path) -> None:
    critic = AlgoConfig("ppo", critic={"model": str(tiny_llama)})
    policy = dataclasses.replace(SHAPES["8b"], active=2 * read_shape(tiny_llama).parameters)
    assert passes_of(TrainConfig(), critic, policy) == pytest.approx(3 * 1.5)
    assert passes_of(TrainConfig(), critic) == passes_of(TrainConfig(), AlgoConfig("ppo"), policy) == 3


def test_a_teacher_that_the_trainer_holds_costs_one_pass_of_its_own_and_six_of_its_head_over_the_vocabulary(
    tiny_llama: Path,
) -> None:
    shape, plain = read_shape(tiny_llama), {"model": str(tiny_llama)}
    policy = dataclasses.replace(SHAPES["8b"], active=2 * shape.parameters)
    head = shape.vocabulary * shape.hidden / policy.active
    top, whole = (AlgoConfig(name, distill=plain) for name in ("opd_student_topk", "gkd"))
    assert [passes_of(TrainConfig(), algo, policy) - 3 for algo in (top, whole)] == pytest.approx([0.5, 0.5 + 6 * head])


def test_mixtures_train_at_the_share_of_the_peak_that_was_measured_of_them():
    one = trainer_rates(GPUS["h100"], SHAPES["30b-a3b"], 8, 16_384).token
    assert one == pytest.approx(6 * 3.3e9 / (hardware.TRAINS_MIXTURE * 989e12 * 8))


GH200 = Gpu(96e9, 4.0e12, 989e12, 450e9, "GH200")


@pytest.mark.parametrize(
    ("chip", "running", "context", "measured"),
    [(GPUS["h200"], 8, 96, 0.833 / 128), (GH200, 1, 1500, 1 / 165.8), (GH200, 100, 1500, 100 / 7591)],
    ids=["vllm", "nim", "nim, 100 at once"],
)
def test_passes_are_near_those_that_others_measured(chip: Gpu, running: int, context: int, measured: float):
    """Of 8B models (benchmarks/published.py); none of these made a constant of the roofline."""
    engine = engine_rates(chip, SHAPES["8b"], 1, 256)
    assert abs(math.log(running / engine.tokens_per_second(running, context) / measured)) < math.log(1.4)


# -- a trainer that lends its GPUs ----------------------------------------------------------------------------------------


def asked(lengths: str, *, trainer: int, lag: int = 0, running: int = 256) -> PlanRequest:
    config = load_config(
        {
            "name": "planned",
            "model": {"path": "somewhere"},
            "task": {"kind": "reasoning_gym", "name": "chain_sum"},
            "reward": {"function": "reasoning_gym"},
            "rollout": {"group_size": 16, "max_tokens": 8000},
            "staleness": {"groups_per_step": 16, "max_lag": lag},
            "engine": {"max_running": running, "context_length": 9000},
        }
    )
    return PlanRequest(
        config=config,
        hardware="h100",
        model="8b",
        gpus=8,
        trainer_gpus=trainer,
        steps=4,
        lengths=lengths,
        prompts="100",
    )


def lent(request: PlanRequest) -> Answer:
    return answer(request, lambda line: None)


@pytest.mark.slow
def test_lending_pays_where_rows_are_short_of_engines():
    """Two engines with 16 rows each for 256 rollouts, which six more would take at once; the trainer waits for most of a step."""
    found = lent(asked("4000", trainer=6, running=16))
    assert found.lending and found.asked.prediction.trainer_idle > 0.5
    assert found.lending.seconds_per_step < 0.5 * found.lending.apart
    assert (
        found.lending.words.endswith("it pays")
        and "orchestration.lend does that for a trainer in one process" in found.lending.words
    )
    assert any("lending" in line for line in text(found, asked("4000", trainer=6), 0.0).splitlines())


@pytest.mark.slow
def test_lending_hardly_pays_where_passes_read_weights_alone():
    """Few rows that all run at once: a pass on eight engines takes nearly as long as one on four, and nearly as long again while the trainer
    has four of them."""
    found = lent(asked("lognormal:mean=600,sigma=1", trainer=4, lag=1))
    assert found.lending and 0.9 < found.lending.seconds_per_step / found.lending.apart < 1.05
    assert "hardly" in found.lending.words


@pytest.mark.slow
def test_nothing_is_lent_by_a_trainer_that_hardly_waits_or_has_no_gpus(tmp_path: Path):
    assert lent(asked("400", trainer=4, lag=2)).lending is None
    rates = Rates(FLAT, TrainerRates(0.0, 0.01), completions=fixed(20), prompts=fixed(10), model="somewhere")
    save_rates(rates, tmp_path / "rates.json")
    measured = {"hardware": "", "model": "", "gpus": 0, "rates": tmp_path / "rates.json"}
    found = lent(dataclasses.replace(asked("20", trainer=0), **measured))
    assert found.asked.prediction.trainer_idle > 0.5 and found.lending is None, "the engine has its cores anyway"
