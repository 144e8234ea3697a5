"""The simulator: engines and trainers by closed form, the real pipeline in virtual time, contracts on random scenarios."""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.algo.config import AlgoConfig
from headrace.commands.plan.measure import Scenario, planned_world, predict
from headrace.commands.plan.parts.engine import Shared, SimulatedEngine
from headrace.commands.plan.parts.pool import Replicas
from headrace.commands.plan.rates import from_run
from headrace.commands.plan.rates.rates import EngineRates, Rates, TrainerRates, load_rates, save_rates
from headrace.core.errors import ConfigError, IdentityError
from headrace.core.reports import EngineStats
from headrace.core.steps import StepOutput, Transcript, write_down
from headrace.core.types import Completion, Request
from headrace.episodes.rollout import RolloutConfig, seed_of
from headrace.facts.facts import StepTrained, WeightsLive
from headrace.loop.partial import PartialConfig
from headrace.loop.staleness import StalenessConfig
from headrace.loop.world import surroundings, virtual_time
from headrace.loop.world.surroundings import (
    Distribution,
    SimulatedScorer,
    SimulatedTask,
    TurnShape,
    completion_tokens,
    empirical,
    fixed,
    parse,
    prompt_tokens,
)
from headrace.loop.world.world import FactList
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.fake_trainer import FakeTrainer
from headrace.testing.makers import request, update
from support.fake_world import FakeWorld
from support.few import few

FLAT = EngineRates(((1.0, 0.01), (64.0, 0.01)), max_running=64)
"""10 ms a pass, however many run."""


def sized(name: str, length: int, prompt: int = 1, **more: Any) -> Request:
    """The engine below makes the seed of a request the length of its completion."""
    tokens = more.pop("tokens", prompt_tokens(seed_of(name) % 1000, prompt, 0.5))
    return request(name, tokens, 64, seed=length, **more)


def engine(rates: EngineRates = FLAT, grain: int = 1, shared: Shared | None = None, **more: Any) -> SimulatedEngine:
    return SimulatedEngine(
        rates=rates,
        length=lambda one: (one.sampling.seed, False),
        shared=shared or Shared(),
        grain=grain,
        expected=more.pop("expected", 10.0),
        **more,
    )


def in_virtual_time(work: Any) -> Any:
    """`work(now)`, and the virtual seconds that it took."""

    async def timed() -> Any:
        clock = asyncio.get_running_loop().time
        return await work(clock), clock()

    return virtual_time.run(timed())


# -- one engine -----------------------------------------------------------------------------------------------------------


def test_a_completion_takes_a_pass_a_token_and_its_prompt():
    one = engine(msgspec.structs.replace(FLAT, prefill=0.002))

    async def work(now: Any) -> Completion:
        await one.load(update(0, "simulated"))
        return await one.generate(sized("a", 7, prompt=5))

    completion, seconds = in_virtual_time(work)
    assert seconds == pytest.approx(7 * 0.01 + 5 * 0.002)
    assert completion.stop == "stop" and len(completion.tokens) == 7 and completion.tokens[0] == 7
    assert completion.versions() == [0] * 7


def test_a_group_computes_its_prompt_once_and_again_after_a_swap():
    one, tokens = engine(msgspec.structs.replace(FLAT, prefill=0.1)), prompt_tokens(1, 10, 0.5)

    async def work(now: Any) -> int:
        await one.load(update(0, "simulated"))
        first = [asyncio.ensure_future(one.generate(sized(f"a{i}", 5, tokens=tokens))) for i in range(4)]
        await asyncio.sleep(1.001)
        assert one.snapshot().prompt_tokens == 10
        await one.load(update(1, "simulated"))
        await one.generate(sized("late", 1, tokens=tokens))
        await asyncio.gather(*first)
        return one.snapshot().prompt_tokens

    assert in_virtual_time(work)[0] == 20


def test_the_batch_curve_is_followed_as_sequences_leave():
    """10, 20 and 40 tokens at 1, 2, 3 ms a pass with 1, 2, 3 running: 10·3 + 10·2 + 20·1 ms."""
    one = engine(EngineRates(((1.0, 0.001), (3.0, 0.003)), max_running=8))

    async def work(now: Any) -> list[float]:
        await one.load(update(0, "simulated"))
        ends: list[float] = []

        async def generate(length: int) -> None:
            await one.generate(sized(f"r{length}", length))
            ends.append(now())

        await asyncio.gather(*(generate(length) for length in (40, 10, 20)))
        return ends

    ends, _ = in_virtual_time(work)
    assert ends == pytest.approx([0.03, 0.05, 0.07])


def test_growing_caches_make_passes_slower_by_the_closed_form():
    """Σ over passes of (a + c · tokens in caches), as an integral: P a + c (n C P + n P² / 2)."""
    a, c, n, prompt, length = 0.01, 1e-5, 4, 100, 200
    one = engine(EngineRates(((1.0, a),), context=c, max_running=8))

    async def work(now: Any) -> None:
        await one.load(update(0, "simulated"))
        await asyncio.gather(*(one.generate(sized(f"r{i}", length, prompt=prompt)) for i in range(n)))

    _, seconds = in_virtual_time(work)
    stepwise = sum(a + c * n * (prompt + done + 0.5) for done in np.arange(length, dtype=np.float64))
    assert seconds == pytest.approx(stepwise, rel=1e-9)


def test_rows_and_room_are_limited_and_priority_goes_first():
    one = engine(msgspec.structs.replace(FLAT, max_running=2))
    order: list[str] = []

    async def work(now: Any) -> None:
        await one.load(update(0, "simulated"))

        async def generate(name: str, priority: int) -> None:
            await one.generate(sized(name, 10, priority=priority))
            order.append(name)

        await asyncio.gather(*(generate(f"p{priority}", priority) for priority in (5, 4, 3, 2, 1)))

    _, seconds = in_virtual_time(work)
    assert order == ["p1", "p2", "p3", "p4", "p5"] or sorted(order[:2]) == ["p1", "p2"]
    assert seconds == pytest.approx(3 * 0.1)
    small = engine(msgspec.structs.replace(FLAT, kv_tokens=25.0), expected=10.0)

    async def crowded(now: Any) -> None:
        await small.load(update(0, "simulated"))
        await asyncio.gather(*(small.generate(sized(f"r{i}", 10, prompt=2)) for i in range(4)))

    assert in_virtual_time(crowded)[1] == pytest.approx(2 * 0.1), "12 tokens each: two at a time"


def test_a_swap_in_the_middle_shows_in_spans_and_stands_still():
    one = engine(msgspec.structs.replace(FLAT, swap=0.5))

    async def work(now: Any) -> Completion:
        await one.load(update(0, "simulated"))
        running = asyncio.ensure_future(one.generate(sized("a", 10)))
        await asyncio.sleep(0.035)
        await one.load(update(1, "simulated"))
        return await running

    completion, seconds = in_virtual_time(work)
    assert completion.versions() == [0] * 4 + [1] * 6, "the pass under way ends under the weights it began with"
    assert [span.kv_version for span in completion.spans] == [0, 0]
    assert seconds == pytest.approx(0.1 + 0.5)


def test_streamed_parts_are_told_as_mixed():
    one = engine(msgspec.structs.replace(FLAT, verify=0.04))

    async def work(now: Any) -> Completion:
        await one.load(update(0, "simulated"))
        running = asyncio.ensure_future(one.generate(sized("a", 12)))
        await one.load(update(1, "simulated"), parts=4)
        return await running

    completion, _ = in_virtual_time(work)
    assert [(span.start, span.version, span.mixed) for span in completion.spans] == [
        (0, 0, False),
        (1, 0, True),
        (4, 1, False),
    ]


def test_an_aborted_request_goes_on_from_its_prefix_and_costs_its_prefill():
    one = engine(msgspec.structs.replace(FLAT, prefill=0.001))

    async def work(now: Any) -> tuple[Completion, Completion]:
        await one.load(update(0, "simulated"))
        running = asyncio.ensure_future(one.generate(sized("a", 20, prompt=100)))
        await asyncio.sleep(0.1 + 0.0801)
        await one.abort()
        first = await running
        return first, await one.generate(sized("a", 20, prompt=100, prefix=first.tokens))

    (first, second), seconds = in_virtual_time(work)
    assert first.stop == "interrupted" and len(first.tokens) == 8
    assert second.stop == "stop" and len(first.tokens) + len(second.tokens) == 20
    assert seconds == pytest.approx(0.1801 + 0.108 + 0.12)


def test_drain_and_cancel():
    one = engine(msgspec.structs.replace(FLAT, max_running=2))

    async def work(now: Any) -> list[float]:
        await one.load(update(0, "simulated"))
        running = [asyncio.ensure_future(one.generate(sized(f"r{i}", 10 + i))) for i in range(3)]
        await asyncio.sleep(0.05)
        await asyncio.sleep(0.01)
        await one.drain()
        drained = now()
        await asyncio.sleep(0)  # those that ended are told
        assert not running[2].done() and running[0].done() and running[1].done()
        running[2].cancel()
        await one.resume()
        await asyncio.sleep(1.0)
        assert one.burden == 0
        return [drained]

    (drained,), _ = in_virtual_time(work)
    assert drained == pytest.approx(0.11, abs=0.011)


def test_listeners_and_unfinished_say_the_same_as_the_completion():
    one = engine(grain=4)
    told: list[StepOutput] = []

    async def work(now: Any) -> tuple[Any, Completion]:
        one.listen(told.append)
        await one.load(update(0, "simulated"))
        running = asyncio.ensure_future(one.generate(sized("a", 40)))
        await asyncio.sleep(0.1599)
        await one.load(update(1, "simulated"))
        await asyncio.sleep(0.04)
        so_far = one.unfinished()["a"]
        return so_far, await running

    (so_far, completion), _ = in_virtual_time(work)
    assert len(completion.tokens) == 10 and completion.tokens == completion_tokens(40, 4)
    assert tuple(so_far.tokens) == completion.tokens[:5]
    assert so_far.completion().versions() == completion.versions()[:5] == [0, 0, 0, 0, 1]
    transcript = Transcript(request=sized("a", 40))
    for output in told:
        write_down(output, {"a": transcript}.get)
    assert tuple(transcript.tokens) == completion.tokens and transcript.so_far().versions() == completion.versions()
    assert [end.stop for output in told for end in output.finished] == ["stop"]


def test_forged_weights_and_adapters_are_refused():
    one = engine()

    async def work(now: Any) -> None:
        with pytest.raises(IdentityError):
            await one.load(msgspec.structs.replace(update(0, "simulated"), fingerprint="forged"))

    in_virtual_time(work)


def test_replicas_share_the_load_and_keep_groups_together():
    shared = Shared()
    engines = [engine(msgspec.structs.replace(FLAT, prefill=0.1), shared=shared) for _ in range(4)]
    pool = Replicas(engines)

    async def work(now: Any) -> tuple[list[int], EngineStats]:
        await pool.load(update(0, "simulated"))
        prompts = [prompt_tokens(i, 10, 0.5) for i in range(8)]
        requests = [sized(f"{i}/{j}", 10, tokens=prompts[i]) for i in range(8) for j in range(3)]
        await asyncio.gather(*(pool.generate(one) for one in requests))
        return [one.snapshot().prompt_tokens for one in engines], pool.snapshot()

    (prompted, stats), seconds = in_virtual_time(work)
    assert prompted == [20] * 4, "each prompt once, two prompts each"
    assert seconds == pytest.approx(2 * 1.0 + 0.1)
    assert stats.sampled_tokens == 240 and stats.busy_seconds == pytest.approx(2.1)


def test_engine_and_trainer_slow_each_other_down_while_both_work():
    """2 s of training and 100 passes of 10 ms; together each takes twice its time. The engine is done after 2 s, half of the
    trainer's work then; the other half takes 1 s."""
    shared = Shared(engine_slowed=2.0, trainer_slowed=2.0)
    one = engine(shared=shared)

    async def work(now: Any) -> tuple[float, float]:
        await one.load(update(0, "simulated"))
        ends: dict[str, float] = {}

        async def generate() -> None:
            await one.generate(sized("a", 100))
            ends["engine"] = now()

        async def train() -> None:
            await shared.train(2.0)
            ends["trainer"] = now()

        await asyncio.gather(generate(), train())
        return ends["engine"], ends["trainer"]

    assert in_virtual_time(work)[0] == pytest.approx((2.0, 3.0))


def test_new_weights_are_verified_beside_generation_and_each_slows_the_other():
    """0.1 s of verification and 50 passes of 10 ms, each twice as slow beside the other: the swap comes at 0.2 s, after 10 of them."""
    one = engine(msgspec.structs.replace(FLAT, verify=0.1, verify_slows=2.0))

    async def work(now: Any) -> tuple[Completion, float]:
        await one.load(update(0, "simulated"))
        started = now()
        running = asyncio.ensure_future(one.generate(sized("a", 50)))
        await asyncio.sleep(0)
        await one.load(update(1, "simulated"))
        live = now() - started
        return await running, live

    (completion, live), seconds = in_virtual_time(work)
    assert live == pytest.approx(0.2) and completion.versions() == [0] * 10 + [1] * 40
    assert seconds == pytest.approx(0.1 + 0.2 + 0.4)


# -- distributions and fits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mean", "median"),
    [
        ("800", 800, 800),
        ("lognormal:mean=1000,sigma=1", 1000, 1000 * math.exp(-0.5)),
        ("pareto:mean=300,alpha=3", 300, 200 * 2 ** (1 / 3)),
    ],
)
def test_distributions_have_the_mean_that_is_asked_for(text: str, mean: float, median: float):
    made = parse(text)
    assert made.quantile(0.5) == pytest.approx(median)
    assert made.mean_below(math.inf, grid=200_000) == pytest.approx(mean, rel=0.02)


@pytest.mark.parametrize(
    "text", ["", "abc", "lognormal:mean=3", "pareto:mean=3,alpha=1", "uniform:mean=3", "fixed:mean=-1"]
)
def test_what_is_no_distribution_is_refused(text: str):
    with pytest.raises(ConfigError):
        parse(text)


def test_correlation_makes_rollouts_of_a_prompt_alike():
    rng = np.random.default_rng(0)
    for correlation in (0.0, 0.5, 1.0):
        made = Distribution("lognormal", mean=100.0, sigma=0.2, correlation=correlation)
        groups = [[made.draw(u, z) for u in rng.uniform(size=8)] for z in rng.normal(size=400)]
        assert from_run.alike(groups) == pytest.approx(correlation, abs=0.06)


def test_empirical_draws_are_those_measured():
    made = empirical([5, 3, 9, 3])
    assert sorted(made.draw((i + 0.5) / 4) for i in range(4)) == [3, 3, 5, 9]
    assert surroundings.empirical([1, 2]).mean_below(1.5) == pytest.approx(1.25)


def test_prompts_that_are_harder_are_solved_less_often_and_the_mean_is_as_asked():
    async def rewards() -> list[float]:
        task = SimulatedTask(fixed(10), 0)
        scorer = SimulatedScorer(latency=fixed(0), workers=1, seed=0, solved=0.3)
        found = []
        for _ in range(3000):
            scored = await scorer.score(task.draw(), [None] * 4)  # type: ignore[list-item]
            found.append(statistics.mean(rollout.reward for rollout in scored))  # type: ignore[union-attr]
        return found

    means = virtual_time.run(rewards())
    assert statistics.mean(means) == pytest.approx(0.3, abs=0.02)
    assert sum(mean in (0.0, 1.0) for mean in means) > 900, "many prompts are too hard or too easy for contrast"


def test_scorers_make_rollouts_wait_for_a_worker():
    async def seconds(workers: int) -> float:
        scorer = SimulatedScorer(latency=fixed(2), workers=workers, seed=0)
        await scorer.score(SimulatedTask(fixed(10), 0).draw(), [None] * 6)  # type: ignore[list-item]
        return asyncio.get_running_loop().time()

    assert [virtual_time.run(seconds(workers)) for workers in (1, 3, 6, 100)] == [12.0, 4.0, 2.0, 2.0]


def test_least_squares_without_negative_coefficients():
    rng = np.random.default_rng(1)
    x = rng.uniform(1, 10, size=(50, 3))
    assert from_run.nonnegative(x, x @ np.array([0.2, 0.0, 3.0])) == pytest.approx([0.2, 0.0, 3.0], abs=1e-9)
    assert from_run.nonnegative(x, x @ np.array([0.5, -1.0, 3.0])).min() >= 0
    assert from_run.line([(10.0, 7.0), (20.0, 12.0), (40.0, 22.0)]) == pytest.approx((2.0, 0.5))


def test_rates_are_read_back(tmp_path: Path):
    rates = Rates(FLAT, TrainerRates(0.1), completions=parse("lognormal:mean=5,sigma=0.1"), source="here", model="m")
    save_rates(rates, tmp_path / "deep" / "rates.json")
    assert load_rates(tmp_path / "deep" / "rates.json") == rates
    with pytest.raises(ConfigError, match="--calibrate"):
        load_rates(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read as rates"):
        load_rates(tmp_path / "bad.json")


# -- the whole ------------------------------------------------------------------------------------------------------------


def scenario(**more: Any) -> Scenario:
    given = {
        "rates": Rates(FLAT, TrainerRates(0.001, publish=0.03)),
        "completions": fixed(20),
        "staleness": StalenessConfig(groups_per_step=4, max_lag=more.pop("max_lag", 0), window=more.pop("window", 1)),
        "rollout": RolloutConfig(group_size=4, max_tokens=more.pop("max_tokens", 64)),
        "algo": AlgoConfig(name="dr_grpo"),
        "prompts": fixed(10),
        "steps": 12,
    }
    return Scenario(**{**given, **more})


def test_a_synchronous_step_is_the_sum_of_its_parts():
    """20 passes of 10 ms, 16 · 20 + 4 · 10 tokens trained at 1 ms, 30 ms to publish."""
    found = predict(scenario(max_lag=0))
    assert found.seconds_per_step == pytest.approx(0.2 + 0.36 + 0.03)
    assert found.tokens_per_second == pytest.approx(320 / 0.59)
    assert found.engine_idle == pytest.approx(0.39 / 0.59) and found.trainer_idle == pytest.approx(0.2 / 0.59)
    assert found.lags == {0: 1.0}


def test_an_asynchronous_step_takes_what_the_slower_part_takes():
    found = predict(scenario(max_lag=1))
    assert found.seconds_per_step == pytest.approx(0.39)
    assert found.trainer_idle == pytest.approx(0.0, abs=1e-9)
    generating = scenario(max_lag=1, rates=Rates(msgspec.structs.replace(FLAT, max_running=16), TrainerRates(1e-5)))
    assert predict(generating).seconds_per_step == pytest.approx(0.2, rel=0.02)


THREE = TurnShape(turns=fixed(3), results=fixed(5), tools=fixed(2.0), most=8)


def test_turns_and_tools_are_part_of_a_step():
    """Three times 20 passes of 10 ms, twice 2 s, 16 · 70 + 4 · 10 tokens trained at 1 ms of which 16 · 60 were sampled, 30 ms to publish."""
    found = predict(scenario(shape=THREE))
    assert found.seconds_per_step == pytest.approx(0.6 + 4 + 1.16 + 0.03)
    assert found.tokens_per_second == pytest.approx(16 * 60 / 5.79)
    assert found.engine_idle == pytest.approx((4 + 1.19) / 5.79), "who waits for a tool holds no slot of the engine"
    assert found.trained_length == pytest.approx(60)


def test_a_turn_computes_what_is_new_and_all_of_it_after_a_swap():
    """1 ms a prompt token: four prompts of 10, then 16 results of 5 in each of two turns. With weights that go live between two turns all
    that precedes the second is computed."""
    slow = msgspec.structs.replace(FLAT, prefill=1e-3)
    found = predict(scenario(shape=THREE, rates=Rates(slow, TrainerRates(0.001, publish=0.03))))
    assert found.seconds_per_step == pytest.approx(5.79 + 0.04 + 2 * 0.08)

    async def work(now: Any) -> list[float]:
        one, times = engine(slow), []
        await one.load(update(0, "simulated"))
        first = sized("t0/0", 20, 10)
        done = await one.generate(first)
        for version, length in ((0, 5), (1, 5)):
            if version:
                await one.load(update(version, "simulated"))
            context = (*first.prompt, *done.tokens, length, version)
            before = now()
            await one.generate(sized(f"t0/0.{version + 1}", 20, tokens=context))
            times.append(now() - before)
        return times

    times, _ = in_virtual_time(work)
    assert times == pytest.approx([0.2 + 5e-3, 0.2 + 35e-3])


def test_an_episode_that_is_over_its_seconds_is_cut_off():
    """Turns end after 0.2, 2.4 and 4.6 s; the next would begin after 6.6."""
    shape = TurnShape(turns=fixed(8), results=fixed(5), tools=fixed(2.0), most=8, seconds=5.0)
    found = predict(scenario(shape=shape))
    assert found.trained_length == pytest.approx(60) and found.seconds_per_step == pytest.approx(6.6 + 1.16 + 0.03)


@pytest.mark.parametrize("max_lag", few([0, 1, 3], keep=1))
def test_the_plan_of_several_turns_is_what_a_run_over_fakes_takes(max_lag: int):
    """The same environments, with tools of a heavy tail, over an engine that is simulated token by token."""
    shape = TurnShape(
        turns=parse("lognormal:mean=3,sigma=0.5,correlation=0.3"),
        results=fixed(7),
        tools=parse("pareto:mean=2,alpha=1.5"),
        most=6,
    )
    rates = Rates(FLAT, TrainerRates(0.0, step=0.5))
    planned = predict(
        scenario(shape=shape, rates=rates, completions=fixed(12), max_lag=max_lag, max_tokens=16, steps=16)
    )
    staleness = StalenessConfig(groups_per_step=4, max_lag=max_lag)
    world = FakeWorld(
        None,
        staleness,
        engine=FakeEngine(seconds_per_token=0.01, script=lambda one: (1,) * 12),
        trainer=FakeTrainer(seconds_per_step=0.5),
        task=SimulatedTask(fixed(10), 0),
        environment=shape.kind(),
        rollout=RolloutConfig(group_size=4, max_tokens=16),
        steps=16,
    )
    virtual_time.run(world.run())
    ends = [fact.t for fact in world.facts.of(StepTrained)]
    found = [after - before for before, after in itertools.pairwise(ends)]
    assert planned.step_seconds == pytest.approx(tuple(found), abs=0.03), "three passes"
    assert len({round(one, 1) for one in found}) > 3, "the tail shows"


@pytest.mark.parametrize("grain", [1, 8])
def test_several_turns_with_coarse_tokens_take_as_long(grain: int):
    shape = TurnShape(turns=parse("lognormal:mean=3,sigma=0.5"), results=fixed(40), tools=fixed(1.0), most=6)
    lengths = parse("lognormal:mean=200,sigma=0.6")
    rates = Rates(msgspec.structs.replace(FLAT, prefill=1e-4, context=1e-7), TrainerRates(1e-5, publish=0.03))
    exact, coarse = (
        predict(scenario(shape=shape, rates=rates, completions=lengths, max_tokens=1000, max_lag=1, grain=one))
        for one in (1, grain)
    )
    assert coarse.seconds_per_step == pytest.approx(exact.seconds_per_step, rel=1e-6)
    assert coarse.tokens_per_second == pytest.approx(exact.tokens_per_second, rel=1e-6)


@pytest.mark.parametrize("grain", [1, 8])
def test_coarse_tokens_change_no_time(grain: int):
    lengths = parse("lognormal:mean=200,sigma=0.6,correlation=0.3")
    exact = predict(scenario(completions=lengths, max_tokens=1000, max_lag=1, grain=1))
    coarse = predict(scenario(completions=lengths, max_tokens=1000, max_lag=1, grain=grain))
    assert coarse.seconds_per_step == pytest.approx(exact.seconds_per_step, rel=1e-9)
    assert coarse.tokens_per_second == pytest.approx(exact.tokens_per_second, rel=1e-9)
    assert coarse.lag_mean == pytest.approx(exact.lag_mean, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "minutes"),
    [(6300.0, {2048: 3, 8192: 11, 32768: 45}), (1200.0, {2048: 14, 8192: 56, 32768: 3.7 * 60})],
)
def test_the_known_arithmetic_of_grpo_on_one_gpu(rate: float, minutes: dict[int, float]):
    """512 rollouts of 2k, 8k and 32k tokens at what vLLM gives a 7B (6,300 tokens/s) and a 32B model (1,200) on one H100."""
    saturated = EngineRates(((1.0, 1 / rate), (512.0, 512 / rate)), max_running=512)
    for length, expected in minutes.items():
        one = scenario(
            rates=Rates(saturated, TrainerRates(0.0)), completions=fixed(length), max_tokens=length, steps=3,
            rollout=RolloutConfig(group_size=16, max_tokens=length),
            staleness=StalenessConfig(groups_per_step=32, max_lag=0),
        )  # fmt: skip
        seconds = predict(one, skip=1, tail=0).seconds_per_step
        assert seconds == pytest.approx(512 * length / rate, rel=1e-6)
        assert seconds / 60 == pytest.approx(expected, rel=0.1)


@pytest.mark.slow
def test_stragglers_set_the_pace_of_synchronous_steps_alone():
    """With a heavy tail the longest of a synchronous step decides; asynchronously the mean does."""
    tail = parse("pareto:mean=100,alpha=1.5")
    engine_rates = msgspec.structs.replace(FLAT, max_running=1000)
    pools = Rates(engine_rates, TrainerRates(1e-6))

    def step(completions: Distribution, max_lag: int) -> float:
        return predict(
            scenario(rates=pools, completions=completions, max_tokens=4000, max_lag=max_lag, steps=60)
        ).seconds_per_step

    even, heavy = step(fixed(100), 0), step(tail, 0)
    assert even == pytest.approx(1.0, rel=0.01), "100 passes"
    assert heavy > 3 * even, "the same number of tokens, in the time of the longest"
    assert step(tail, 8) < heavy / 3


def test_every_model_of_interrupts_runs():
    lengths = parse("lognormal:mean=40,sigma=0.5")
    found = {}
    for mode in ("inflight", "stream", "abort_resume", "save_resume", "drain", "barrier"):
        one = scenario(completions=lengths, max_lag=2, partial=PartialConfig(mode=mode), steps=14)
        found[mode] = predict(one)
        assert found[mode].lag_max <= 2 and not found[mode].dropped
    assert found["barrier"].tokens_per_second <= found["inflight"].tokens_per_second * 1.001
    cancelled = scenario(completions=lengths, max_lag=2, partial=PartialConfig(mode="cancel_group"), steps=14)
    assert predict(cancelled).dropped.keys() <= {"interrupted"}


def test_pacing_has_no_length_bias_and_dropping_has():
    """A heavy tail, correlated with the prompt; the trainer is fast, so that long groups see many versions."""
    lengths = Distribution("pareto", mean=100.0, alpha=1.6, correlation=0.8)
    rates = Rates(msgspec.structs.replace(FLAT, max_running=1000), TrainerRates(1e-6))
    given = {"rates": rates, "completions": lengths, "max_tokens": 2000, "steps": 80}
    waiting = predict(scenario(**given, max_lag=2))
    assert waiting.trained_length == pytest.approx(waiting.drawn_length, rel=0.02)
    overdue = StalenessConfig(groups_per_step=4, max_lag=2, overdue="drop", in_flight=24)
    dropping = predict(scenario(**given | {"staleness": overdue}))
    assert dropping.dropped["overdue"] > 0 and dropping.lag_max <= 2
    assert dropping.trained_length < 0.9 * dropping.drawn_length


@pytest.mark.slow
@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    groups=st.integers(1, 4),
    max_lag=st.integers(0, 3),
    window=st.integers(1, 5),
    mode=st.sampled_from(["inflight", "stream", "abort_resume", "save_resume", "drain", "barrier"]),
    lengths=st.sampled_from(["12", "lognormal:mean=20,sigma=1", "pareto:mean=15,alpha=1.2,correlation=0.5"]),
    trainer=st.sampled_from([1e-5, 1e-3, 1e-2]),
    replicas=st.integers(1, 3),
    grain=st.sampled_from([1, 4]),
)
def test_contracts_hold_in_random_scenarios(
    seed: int,
    groups: int,
    max_lag: int,
    window: int,
    mode: Any,
    lengths: str,
    trainer: float,
    replicas: int,
    grain: int,
):
    staleness = StalenessConfig(groups_per_step=groups, max_lag=max_lag, window=min(window, max_lag * groups + 1))
    rates = Rates(
        EngineRates(((1.0, 0.01), (8.0, 0.02)), 1e-4, 1e-5, max_running=8, verify=0.03, verify_slows=2.0, swap=0.01),
        TrainerRates(trainer, 0.01, 0.02), 1.3, 1.2,
    )  # fmt: skip
    one = Scenario(
        rates=rates, completions=parse(lengths), staleness=staleness, rollout=RolloutConfig(group_size=3, max_tokens=80), algo=AlgoConfig(name="dr_grpo"),
        partial=PartialConfig(mode=mode), steps=7, replicas=replicas, prompts=fixed(9), solved=0.5, seed=seed, grain=grain,
    )  # fmt: skip
    world = planned_world(one, FactList())
    virtual_time.run(world.run())
    steps = world.facts.of(StepTrained)
    assert [fact.report.version for fact in steps] == list(range(1, 8))
    assert max(lag for fact in steps for lag in fact.lags) <= max_lag, "C1"
    tickets = [group.ticket for fact in steps for group in fact.groups]
    assert len(tickets) == len(set(tickets)) == 7 * groups
    for fact in steps:
        for group in fact.groups:
            for row in group.rows:
                assert list(row.versions) == sorted(row.versions), "C4"
                assert row.tokens == completion_tokens(row.tokens[0], grain), "nothing sampled twice, nothing lost"
    live = [fact.update.version for fact in world.facts.of(WeightsLive)]
    assert live == sorted(set(live)), "versions go live once, in order"


@pytest.mark.slow
def test_a_thousand_gpus_go_through_the_same_pipeline():
    """256 replicas, 4,096 rollouts a step; billions of tokens a few thousand at a time. (How long it takes: docs/plan.md.)"""
    rates = Rates(
        EngineRates(((1.0, 0.02), (64.0, 0.03)), 1e-5, 1e-9, max_running=64, verify=1.0, swap=0.02, gpus=2),
        TrainerRates(1e-6, 1.0, 1.0, gpus=512),
    )
    one = Scenario(
        rates=rates, completions=parse("lognormal:mean=4000,sigma=0.7"),
        staleness=StalenessConfig(groups_per_step=256, max_lag=1, window=64), rollout=RolloutConfig(group_size=16, max_tokens=16384),
        algo=AlgoConfig(name="dr_grpo"), steps=3, replicas=256, prompts=fixed(500),
    )  # fmt: skip
    found = predict(one, skip=1, tail=0)
    assert found.gpus == 1024 and found.rollouts >= 3 * 4096
    assert found.lag_max <= 1 and found.trained_length == pytest.approx(4000 * 0.97, rel=0.05)
