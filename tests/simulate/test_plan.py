"""`headrace plan`: rates from data sheets, from runs and from this machine; sweeps; what is printed and drawn."""

from __future__ import annotations

import dataclasses
import json
import re
import xml.dom.minidom
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace import cli
from headrace.algo.config import AlgoConfig
from headrace.algo.training_rows import algorithm_of
from headrace.commands.plan.answer import Answer, PlanRequest, answer, unused_memory, with_sizes
from headrace.commands.plan.command import draw
from headrace.commands.plan.measure import Scenario
from headrace.commands.plan.parts.engine import Shared
from headrace.commands.plan.parts.simulated_trainer import SimulatedTrainer
from headrace.commands.plan.rates import hardware
from headrace.commands.plan.rates.calibrate import calibrate
from headrace.commands.plan.rates.from_run import rates_of_run
from headrace.commands.plan.rates.hardware import (
    GPUS,
    engine_rates,
    fits_one,
    replica_gpus,
    shared_rates,
    trainer_gpus,
    trainer_memory,
    trainer_mesh,
    trainer_rates,
    trainer_traffic,
    with_beside,
)
from headrace.commands.plan.rates.rates import EngineRates, Rates, TrainerRates, save_rates
from headrace.commands.plan.rates.shapes import SHAPES, Beside, shape_of
from headrace.commands.plan.sweep import Option, bias, bottleneck, recommended, sweep
from headrace.core.batches import Batch, Group
from headrace.core.errors import ConfigError
from headrace.core.reports import EngineStats, LoadReport, TrainReport
from headrace.core.types import Completion, Episode, Prompt, Scored, Turn, VersionSpan
from headrace.core.weights import WeightUpdate
from headrace.durable.spelling import encode
from headrace.episodes.rollout import as_tree
from headrace.facts.facts import EngineSample, GroupEnded, Waited, WeightsLive
from headrace.facts.recorder import Recorder
from headrace.facts.records import METRICS, StepRow, read_metrics
from headrace.loop.world import virtual_time
from headrace.loop.world.surroundings import TurnShape, fixed, parse, real_tokens
from headrace.run.config import dump_config, load_config
from headrace.run.rehearsal.memory_needs import read_shape


def config_of(**sections: dict[str, Any]) -> Any:
    return load_config(
        {
            "name": "planned",
            "model": {"path": "somewhere"},
            "task": {"kind": "reasoning_gym", "name": "chain_sum"},
            "reward": {"function": "reasoning_gym"},
            "rollout": {"group_size": 4, "max_tokens": 100},
            "staleness": {"groups_per_step": 4, "max_lag": 1},
            "engine": {"max_running": 16, "context_length": 256},
            **sections,
        }
    )


def silent(line: str) -> None:
    pass


RATES = Rates(
    EngineRates(((1.0, 0.01), (64.0, 0.02)), 1e-4, max_running=16),
    TrainerRates(1e-3, 0.1, 0.05),
    completions=parse("lognormal:mean=40,sigma=0.5"),
    prompts=fixed(20),
    source="a test",
    model="somewhere",
)


# -- data sheets ----------------------------------------------------------------------------------------------------------


def test_a_roofline_by_hand():
    """An H100 with a 7B model: 15.24 GB at 80 % of 3.35 TB/s, 2 · 7.62e9 operations a token at 50 % of 989 TFLOP/s."""
    one = engine_rates(GPUS["h100"], SHAPES["7b"], gpus=1, max_running=256)
    read, compute = 15.24e9 / 2.68e12, 2 * 7.62e9 / 494.5e12
    assert one.pass_seconds(1) == pytest.approx(hardware.FIXED + read)
    assert one.pass_seconds(1024) == pytest.approx(hardware.FIXED + 1024 * compute)
    assert one.prefill == pytest.approx(compute)
    assert SHAPES["7b"].cache_bytes == 57_344 and one.context == pytest.approx(57_344 / 2.68e12)
    assert one.kv_tokens == int((72e9 - 15.24e9) / 57_344)


@pytest.mark.parametrize("context", [2000, 4000, 6000])
def test_rooflines_are_near_what_is_known(context: int):
    """About 6,300 tokens/s are quoted of vLLM with a 7B model on one H100: within a factor of two, wherever contexts fill the memory."""
    one = engine_rates(GPUS["h100"], SHAPES["7b"], gpus=1, max_running=256)
    running = min(256, int(one.kv_tokens / context))
    assert 6300 / 2 < one.tokens_per_second(running, context) < 6300 * 2


def test_pools_are_as_large_as_the_model_needs():
    h100 = GPUS["h100"]
    assert [replica_gpus(h100, SHAPES[name]) for name in ("0.5b", "7b", "32b", "72b")] == [1, 1, 2, 4]
    assert [trainer_gpus(h100, SHAPES[name]) for name in ("0.5b", "7b", "32b", "72b")] == [1, 2, 16, 32]
    small, large = (trainer_rates(h100, SHAPES["7b"], gpus) for gpus in (8, 64))
    assert small.token / large.token == pytest.approx(8 * hardware.DOUBLING**3)


def test_models_beside_the_policy_take_memory_of_its_ranks(tiny_llama: Path) -> None:
    """An 8B policy has 131 GB of training state, and its reference 16.4 GB: with both of 64 GB each, three GPUs, so four. A critic has 16 bytes a parameter, a
    teacher two, and its head whole on each rank."""
    h100, policy, other = GPUS["h100"], SHAPES["8b"], read_shape(tiny_llama)
    beside = lambda algo, adapted=False: with_beside(policy, algo, adapted=adapted)  # noqa: E731
    kl = AlgoConfig(kl={"coef": 0.01})
    assert beside(AlgoConfig()) == policy == beside(kl, adapted=True)
    assert beside(kl).beside.split == pytest.approx(2 * 8.19e9)
    moving = AlgoConfig(kl={"coef": 0.01, "every": 4})
    assert beside(moving).beside.split == pytest.approx(2 * 8.19e9 + 2 * 1.24e9)
    critic = beside(AlgoConfig("ppo", critic={"model": str(tiny_llama)})).beside
    assert critic == Beside(16 * other.parameters, 0.0, other)
    teacher = beside(AlgoConfig("gkd", distill={"model": str(tiny_llama)})).beside
    assert teacher == Beside(2 * other.parameters, 2 * other.vocabulary * other.hidden)
    large = dataclasses.replace(policy, beside=Beside(16 * 8.19e9, 1e9))
    assert [trainer_gpus(h100, one) for one in (policy, large)] == [4, 8]
    mesh = trainer_mesh(h100, large, 8)
    more = trainer_memory(large, mesh).held - trainer_memory(policy, mesh).held
    assert more == pytest.approx(16 * 8.19e9 / mesh.split + 1e9)
    small = SHAPES["1.5b"]
    full = dataclasses.replace(small, beside=Beside(split=40e9))
    assert fits_one(h100, small) and not fits_one(h100, full)
    rooms = [shared_rates(GPUS["h200"], one, 16).engine.kv_tokens for one in (small, full)]
    assert rooms[0] - rooms[1] == pytest.approx(40e9 / small.cache_bytes, abs=1)


def test_a_plan_with_too_few_gpus_for_a_critic_says_so(tiny_llama: Path) -> None:
    algo = {"name": "ppo", "critic": {"model": str(tiny_llama)}}
    with pytest.raises(
        ConfigError, match=r"trained, with [\d.e-]+ GB of other models beside it, needs at least 3 GPUs"
    ):
        answer(PlanRequest(config=config_of(algo=algo), hardware="h100", model="7b", gpus=2), silent)


def test_the_mesh_is_within_a_machine_where_that_holds_it():
    """16 bytes a parameter: 122 GB of a 7B model are 15 a rank; 1,130 of a 70B model are 141 in a machine of eight, 35 on 32 ranks."""
    h100 = GPUS["h100"]
    mesh = lambda name, gpus: trainer_mesh(h100, SHAPES[name], gpus)  # noqa: E731
    assert [(one.shard, one.replicate) for one in (mesh("7b", 4), mesh("7b", 8), mesh("7b", 48))] == [
        (4, 1),
        (8, 1),
        (8, 6),
    ]
    assert [(one.shard, one.replicate) for one in (mesh("70b", 32), mesh("70b", 64))] == [(32, 1), (32, 2)]


def test_ranks_of_a_context_hold_the_model_together_and_wait_for_attention():
    """An 8B model on eight GPUs: 131 GB are 16.4 a rank, whatever the context. A token brings three quarters of twice 32 queries, keys and
    values of 8 heads each, and 32 results, of 128 elements, in each of 36 layers."""
    h100, model = GPUS["h100"], SHAPES["8b"]
    mesh = trainer_mesh(h100, model, 8, context=4)
    assert (mesh.shard, mesh.context, mesh.replicate, mesh.ranks) == (2, 4, 1, 8)
    assert trainer_memory(model, mesh) == trainer_memory(model, trainer_mesh(h100, model, 8, 16_384))
    moved = trainer_traffic(model, mesh)
    assert moved.attended == pytest.approx(0.75 * 2 * (32 + 2 * 8 + 32) * 128 * 2 * 36)
    alone, together = (trainer_rates(h100, model, 8, 16_384, context=context).token for context in (1, 4))
    assert together - alone == pytest.approx(moved.attended / (0.8 * 450e9) / 8)
    wide = trainer_mesh(h100, model, 48, context=4)
    assert (wide.shard, wide.context, wide.replicate) == (2, 4, 6)


def test_a_mixture_waits_for_what_its_ranks_gather():
    """All 30.5e9 weights travel for the 3.3e9 that a token passes: twice in bfloat16, and the gradients in float32. Within a machine experts
    stay, and 786,432 elements of a token travel four times."""
    h100, mixture = GPUS["h100"], SHAPES["30b-a3b"]
    received = 15 / 16 * (2 * 2 * 29.878e9 + 4 * 0.622e9 + 4 * 30.5e9)
    assert trainer_rates(h100, mixture, 16).token == pytest.approx(received / (8 * 40e9) / (16 * 2048), rel=1e-6)
    assert trainer_mesh(h100, mixture, 8).expert == 8
    moved = trainer_traffic(mixture, trainer_mesh(h100, mixture, 8))
    received = 7 / 8 * (2 * 2 * 0.878e9 + 4 * 0.622e9 + 4 * 1.5e9 + 2048 * 4 * 2 * 786_432)
    assert moved.microbatch(2048) == pytest.approx(received, rel=1e-6)
    assert trainer_rates(h100, mixture, 8).token == pytest.approx(6 * 3.3e9 / (0.15 * 989e12 * 8))


def test_few_tokens_are_computed_together():
    """With 128 tokens a microbatch, eight ranks would receive 57 GB of weights for each. In a tensor group they receive hidden states instead: per
    token and layer two in bfloat16 and five gradients in float32, twice 7/8 of each; and they wait for them."""
    h100, model = GPUS["h100"], SHAPES["8b"]
    mesh = trainer_mesh(h100, model, 8, 128)
    assert (mesh.shard, mesh.tensor) == (1, 8)
    received = 2 * 7 / 8 * (36 * 4096 * (2 * 2 + 5 * 4) + 4 * 4096 + 4 * (4096 + 4))
    assert trainer_traffic(model, mesh).together(128) == pytest.approx(128 * received)
    expected = 6 * 8.19e9 / (0.4 * 989e12 * 8) + received / (0.8 * 450e9)
    assert trainer_rates(h100, model, 8, 128).token == pytest.approx(expected)
    assert trainer_mesh(h100, model, 8, 2048).tensor == 1
    assert trainer_mesh(h100, SHAPES["30b-a3b"], 8, 128).tensor == 1


def test_mixtures_of_experts_read_little_with_few_sequences():
    one = engine_rates(GPUS["h200"], SHAPES["30b-a3b"], gpus=1, max_running=64)
    assert one.pass_seconds(1) < one.pass_seconds(8) < one.pass_seconds(16) == pytest.approx(one.pass_seconds(64))


@pytest.mark.parametrize("name", ["seven", "7", "0b", "5000b", "7b-a1"])
def test_strange_models_are_refused(name: str):
    with pytest.raises(ConfigError, match="--model"):
        shape_of(name)


def test_other_sizes_have_the_shape_of_the_nearest():
    assert shape_of("9B").cache_bytes == SHAPES["8b"].cache_bytes and shape_of("9b").parameters == 9e9


# -- a run's metrics ------------------------------------------------------------------------------------------------------


def write_run(directory: Path, steps: int = 12) -> Path:
    """An engine of 5 ms a pass, 0.5 ms a token and 0.1 ms a prompt token; a trainer of 0.2 s and 2 ms a token."""
    Recorder(directory).close()
    facts: list[Any] = []
    passes = sampled = prompt = 0
    for i in range(2 * steps):
        passes, sampled, prompt = passes + 50 + i, sampled + 600 - 13 * i, prompt + (100 if i % 3 else 400)
        busy = 5e-3 * passes + 5e-4 * sampled + 1e-4 * prompt
        stats = EngineStats(sampled_tokens=sampled, prompt_tokens=prompt, steps=passes, busy_seconds=busy)
        facts.append(EngineSample(float(i), stats))
    for i in range(steps):
        tokens = 300 + 40 * (i % 4)  # 46 of them in completions, the others in the prompt of the one group
        report = TrainReport(i, i + 1, forward_tokens=tokens, loss_tokens=tokens, seconds=0.2 + 2e-3 * tokens)
        facts += [
            GroupEnded(2.0 * i, i, f"p{i}", "ready", lengths=(10, 12, 14, 10)),
            GroupEnded(2.0 * i, 100 + i, f"q{i}", "ready" if i % 2 else "dropped", "" if i % 2 else "no_contrast", lengths=(5,)),
            Waited(2.0 * i, "rollouts", "the scorer", 0.02),
            Waited(2.0 * i, "controller", "the trainer (step)", report.seconds + 0.03),
            Waited(2.0 * i, "controller", "the trainer (publish)", 0.07),
            Waited(2.0 * i, "delivery", "the trainer (the published weights)", 0.05),
            StepRow(2.0 * i, report, {0: tokens}, 0.5, 0.1, 0.5, 0.0, (i,), {}, (10, 12, 14, 10), 0),
            WeightsLive(2.0 * i, WeightUpdate(version=i + 1, kind="full", fingerprint="f", nbytes=0, seconds=0.06), LoadReport(i + 1, 0.11, 0.004)),
        ]  # fmt: skip
    (directory / METRICS).write_bytes(b"".join(encode(fact) + b"\n" for fact in facts))
    (directory / "config.toml").write_text(dump_config(config_of()))
    return directory


def test_rates_of_a_run_are_those_that_made_its_metrics(tmp_path: Path):
    rates, contrast = rates_of_run(write_run(tmp_path), config_of())
    assert rates.engine.pass_seconds(1) == pytest.approx(5.5e-3, rel=1e-6)
    assert rates.engine.pass_seconds(16) == pytest.approx(13e-3, rel=1e-6)
    assert rates.prompts == fixed(314)
    assert rates.engine.prefill * 314 == pytest.approx(1e-4 * (16 * 100 + 8 * 400) / 24, rel=0.02), (
        "what was computed anew"
    )
    assert (rates.engine.verify, rates.engine.swap) == (0.11, 0.004)
    assert rates.trainer.token == pytest.approx(2e-3)
    assert (rates.trainer.publish, rates.trainer.send, rates.trainer.send_slows) == (0.07, 0.05, 1.0)
    assert 0.2 <= rates.trainer.step <= 0.34, "and what messages take beside it"
    assert rates.overhead == 0.02 and contrast == pytest.approx(18 / 24)
    assert rates.completions is not None and rates.completions.values[-1] == 14


def test_completions_last_longer_than_the_passes_of_their_engine(tmp_path: Path):
    """Two groups at a time waited for the engine in 18 of the 23 s between its first sample and its last, 1 s of which a swap held them."""
    run = write_run(tmp_path)
    facts = read_metrics(run)
    stats = [fact.stats for fact in facts if isinstance(fact, EngineSample)]
    waits = [Waited(t, "rollouts", "the engine", seconds) for t, seconds in ((10.0, 10.0), (8.0, 6.0), (30.0, 15.0))]
    waits += [Waited(t, "rollouts", "the engine, or players", 5.0) for t in (12.0, 14.0)]
    live = next(i for i, fact in enumerate(facts) if isinstance(fact, WeightsLive) and fact.t > 0)
    facts[live] = msgspec.structs.replace(facts[live], pause=1.0)
    (run / METRICS).write_bytes(b"".join(encode(fact) + b"\n" for fact in [*facts, *waits]))
    busy = stats[-1].busy_seconds - stats[0].busy_seconds
    rates, _ = rates_of_run(run, config_of())
    assert rates.engine.pass_seconds(1) == pytest.approx(5.5e-3 * max(1.0, 17 / busy), rel=1e-6) and busy < 16


def test_the_long_waits_of_a_run_count(tmp_path: Path):
    """A run takes the sum of its waits. What was slow in its first step alone is not counted."""
    run = write_run(tmp_path)
    facts = [
        msgspec.structs.replace(fact, seconds=9.0 if fact.t == 0 else 0.43 if fact.t == 2 else 0.07)
        if isinstance(fact, Waited) and "publish)" in fact.what
        else fact
        for fact in read_metrics(run)
    ]
    (run / METRICS).write_bytes(b"".join(encode(fact) + b"\n" for fact in facts))
    assert rates_of_run(run, config_of())[0].trainer.publish == pytest.approx(0.07 + 0.36 / 11)


def test_rates_of_a_run_of_several_turns(tmp_path: Path):
    """Rollouts of two and four turns, whose tools took 3 s and 2 s each time, and whose results had 30 tokens."""
    Recorder(tmp_path).close()
    facts = read_metrics(write_run(tmp_path))
    several = {"turns": (2, 4, 2, 2), "read": (30, 90, 30, 30), "between": (3.0, 6.0, 3.0, 3.0)}
    groups = [isinstance(fact, GroupEnded) and len(fact.lengths) == 4 for fact in facts]
    changed = [
        msgspec.structs.replace(fact, **several) if ours else fact for fact, ours in zip(facts, groups, strict=True)
    ]
    (tmp_path / METRICS).write_bytes(b"".join(encode(fact) + b"\n" for fact in changed))
    rates, _ = rates_of_run(tmp_path, config_of())
    assert rates.turns is not None and rates.tools is not None and rates.results is not None
    assert sorted(set(rates.turns.values)) == [1, 2, 4] and rates.turns.values.count(4) == 12
    assert sorted(set(rates.tools.values)) == [2, 3] and rates.tools.values.count(2) == 36, "three gaps each"
    assert set(rates.results.values) == {30}
    assert rates.completions is not None and set(rates.completions.values) == {5, 3, 7}, "tokens of a turn"
    assert rates.prompts == fixed(314 - 90), "on average 90 of the tokens forwarded for a group lay between turns"


def test_a_run_that_is_too_short_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="too few"):
        rates_of_run(write_run(tmp_path, steps=2), config_of())


# -- answers --------------------------------------------------------------------------------------------------------------


def question(tmp_path: Path, **more: Any) -> PlanRequest:
    file = tmp_path / "rates.json"
    save_rates(more.pop("measured", RATES), file)
    return PlanRequest(config=more.pop("config", None) or config_of(), rates=file, **more)


def test_a_plan_from_measured_rates(tmp_path: Path):
    found = answer(question(tmp_path, steps=8), silent)
    assert found.recommended is None and not found.notes
    assert found.asked.prediction.lag_max == 1 and found.asked.prediction.gpus == 2
    other = answer(question(tmp_path, steps=8, measured=msgspec.structs.replace(RATES, model="another")), silent)
    assert "measured with another" in other.notes[0]


@pytest.mark.slow
def test_a_sweep_recommends_the_least_lag_that_is_nearly_as_fast(tmp_path: Path):
    """The trainer is the bottleneck from max_lag 1 on: more depth buys nothing."""
    found = answer(
        question(tmp_path, sweep=True, config=config_of(staleness={"groups_per_step": 4, "max_lag": 4})), silent
    )
    assert found.recommended is not None
    by_lag = {choice.scenario.staleness.max_lag: choice.prediction.tokens_per_second for choice in found.choices}
    assert set(by_lag) == {0, 1, 2, 4}
    assert found.recommended.scenario.staleness.max_lag in (1, 2)
    assert found.recommended.prediction.tokens_per_second >= 0.98 * max(by_lag.values())
    assert len({choice.name for choice in found.choices}) == len(found.choices), "nothing is tried twice"


@pytest.mark.slow
def test_pools_are_split_where_neither_waits(tmp_path: Path):
    given = config_of(
        rollout={"group_size": 4, "max_tokens": 2000},
        engine={"max_running": 256, "context_length": 4000},
        staleness={"groups_per_step": 8, "max_lag": 2},
    )
    asked = PlanRequest(
        config=given, hardware="h100", model="7b", gpus=10, steps=4, lengths="1000", prompts="100", sweep=True
    )
    found = answer(asked, silent)
    assert found.recommended is not None
    pools = {(choice.scenario.replicas, choice.scenario.rates.trainer.gpus) for choice in found.choices}
    assert len(pools) >= 6 and all(engines + trainer == 10 for engines, trainer in pools)
    best = max(choice.prediction.tokens_per_second for choice in found.choices)
    worst = min(choice.prediction.tokens_per_second for choice in found.choices)
    assert found.recommended.prediction.tokens_per_second >= 0.98 * best > 1.5 * worst


@pytest.mark.slow
def test_one_gpu_holds_both_pools_of_a_small_model_and_is_counted_once():
    asked = PlanRequest(
        config=config_of(), hardware="h100", model="1.5b", gpus=1, steps=4, lengths="200", prompts="100", sweep=True
    )
    found = answer(asked, silent)
    apart = answer(dataclasses.replace(asked, gpus=2, sweep=False), silent).asked
    shared, rates = found.asked, found.asked.scenario.rates
    assert shared.scenario.gpus == shared.prediction.gpus == 1 and shared.scenario.replicas == 1
    assert rates.engine.kv_tokens < apart.scenario.rates.engine.kv_tokens, "training takes room from the cache"
    assert shared.prediction.tokens_per_second < apart.prediction.tokens_per_second
    assert shared.prediction.cost(2.0, 1) == pytest.approx(shared.prediction.seconds_per_step / 3600 * 2.0)
    with pytest.raises(ConfigError, match="at least 3 GPUs of h100"):
        answer(PlanRequest(config=config_of(), hardware="h100", model="7b", gpus=1), silent)


def test_a_pool_too_small_for_the_model_is_refused():
    with pytest.raises(ConfigError, match="at least 18 GPUs of h100"):
        answer(PlanRequest(config=config_of(), hardware="h100", model="32b", gpus=8), silent)
    with pytest.raises(ConfigError, match="--model"):
        answer(PlanRequest(config=config_of(), hardware="h100", gpus=8), silent)
    with pytest.raises(ConfigError, match="not known"):
        answer(PlanRequest(config=config_of(), hardware="tpu", model="7b", gpus=8), silent)
    with pytest.raises(ConfigError, match="leaves one of the pools too small"):
        answer(PlanRequest(config=config_of(), hardware="h100", model="7b", gpus=8, trainer_gpus=8), silent)


TURNS = {"function": "env.py:play", "max_turns": 6, "episode_seconds": 90.0}


@pytest.mark.slow
def test_several_turns_are_planned(tmp_path: Path):
    config = config_of(environment=TURNS, reward={"function": ""})
    guessed = answer(question(tmp_path, config=config, steps=8), silent)
    (note,) = guessed.notes
    assert "3 turns, half of environment.max_turns, 1 s between two turns, 100 tokens" in note
    assert "set --turns, --tool-seconds, --result-tokens" in note
    given = {"turns": "2", "tools": "pareto:mean=20,alpha=1.5", "results": "30"}
    found = answer(question(tmp_path, config=config, steps=8, **given), silent)
    assert not found.notes and found.asked.scenario.shape == TurnShape(
        turns=fixed(2), tools=parse(given["tools"]), results=fixed(30), most=6, seconds=90.0
    )
    assert found.asked.prediction.seconds_per_step > guessed.asked.prediction.seconds_per_step
    measured = msgspec.structs.replace(RATES, turns=fixed(4), tools=fixed(2), results=fixed(9))
    of_run = answer(question(tmp_path, config=config, steps=8, measured=measured), silent).asked.scenario.shape
    assert (of_run.turns, of_run.tools, of_run.results) == (fixed(4), fixed(2), fixed(9))
    with pytest.raises(ConfigError, match="--tool-seconds is for rollouts of several turns"):
        answer(question(tmp_path, tools="3"), silent)


def test_what_was_assumed_is_said():
    found = answer(PlanRequest(config=config_of(), hardware="h100", model="7b", gpus=4, steps=4), silent)
    assert any("--lengths" in note for note in found.notes) and any("--prompts" in note for note in found.notes)


def choices_of(tmp_path: Path) -> list[Option]:
    found = answer(question(tmp_path, steps=6), silent)
    return sweep(found.asked.scenario, None, silent)


@pytest.mark.slow
def test_reasons_name_who_waits(tmp_path: Path):
    one = choices_of(tmp_path)[0].prediction
    replace = msgspec.structs.replace
    assert "trainer is the bottleneck" in bottleneck(replace(one, trainer_idle=0.01, engine_idle=0.5))
    assert "generation is the bottleneck" in bottleneck(replace(one, trainer_idle=0.5, engine_idle=0.01))
    assert "both pools are busy" in bottleneck(replace(one, trainer_idle=0.01, engine_idle=0.01))
    assert "waits for the other" in bottleneck(replace(one, trainer_idle=0.5, engine_idle=0.5))
    assert bias(replace(one, drawn_length=100.0, trained_length=99.0)) == ""
    assert "12% shorter" in bias(replace(one, drawn_length=100.0, trained_length=88.0))


@pytest.mark.slow
def test_the_picture_is_a_whole_page(tmp_path: Path):
    found = answer(question(tmp_path, sweep=True), silent)
    page = draw(found, "a <name>", price=2.0)
    assert "a &lt;name&gt;" in page and "<name>" not in page
    drawings = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(drawings) >= 4
    for drawing in drawings:
        whole = xml.dom.minidom.parseString(drawing)
        assert whole.getElementsByTagName("rect") or whole.getElementsByTagName("path")
    assert page.count("<tr>") == len(found.choices) + 1


# -- the command ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "planned.toml").write_text(
        '[model]\npath = "somewhere"\n[task]\nkind = "reasoning_gym"\nname = "chain_sum"\n[reward]\n'
        'function = "reasoning_gym"\n[rollout]\nmax_tokens = 100\ngroup_size = 4\n[engine]\nmax_running = 16\n'
        "[staleness]\ngroups_per_step = 4\n"
    )
    save_rates(RATES, tmp_path / "rates.json")
    return tmp_path / "planned.toml"


def test_the_command_tells_and_draws(recipe: Path, capsys: pytest.CaptureFixture[str]):
    rates, picture = f"cpu:{recipe.parent / 'rates.json'}", recipe.parent / "plan.html"
    arguments = ["plan", str(recipe), "--hardware", rates, "--steps", "6", "--price", "2"]
    assert cli.main([*arguments, "--sweep", "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    for word in ("rates: a test", "a step", "idle", "lag of trained tokens", "recommended:", "cost"):
        assert word in out
    assert "<svg" in picture.read_text()
    assert cli.main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["choices"][0]["lag_max"] == 1 and told["recommended"] is None


def test_the_command_says_what_is_missing(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HEADRACE_CACHE", str(recipe.parent / "cache"))
    assert cli.main(["plan", str(recipe)]) == cli.BAD_INPUT
    assert "--calibrate" in capsys.readouterr().err
    assert cli.main(["plan", str(recipe), "--hardware", "cpu"]) == cli.BAD_INPUT
    assert cli.main(["plan", str(recipe), "--hardware", "h100", "--model", "7b", "--lengths", "x"]) == cli.BAD_INPUT
    assert "lognormal" in capsys.readouterr().err


@pytest.mark.slow
def test_calibration_measures_a_tiny_model(tiny_llama: Path, tmp_path: Path):
    """Two real processes. Rates are positive, the same rates plan the run, and nothing of it depends on how fast they are."""
    rows = [{"prompt": f"{i} + {i}?", "answer": str(2 * i)} for i in range(200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = load_config(
        {
            "model": {"path": str(tiny_llama)},
            "task": {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl"), "held_out": 4},
            "rollout": {"group_size": 4, "max_tokens": 8},
            "train": {"steps": 4, "dtype": "float32"},
            "engine": {"dtype": "float32", "kv_gib": 0.01, "context_length": 64, "max_running": 4},
            "staleness": {"groups_per_step": 2},
            "eval": {"prompts": 4},
        }
    )
    messages: list[str] = []
    rates = calibrate(
        config, messages.append, lambda completions, **columns: list(map(float, map(len, completions))), 0.2
    )
    assert [n for n, _ in rates.engine.decode] == [1.0, 2.0, 4.0] and min(s for _, s in rates.engine.decode) > 0
    assert rates.trainer.token + rates.trainer.step > 0 and rates.trainer.publish > 0 and len(messages) >= 4
    assert rates.engine_slowed >= 1 and rates.trainer_slowed >= 1
    assert rates.completions is not None and 1 <= rates.completions.values[0] <= rates.completions.values[-1] <= 8
    save_rates(rates, tmp_path / "rates.json")
    found = answer(PlanRequest(config=config, rates=tmp_path / "rates.json", steps=4), silent)
    assert found.asked.prediction.tokens_per_second > 0 and recommended([found.asked]) is found.asked


def forked(**forks: Any) -> Any:
    return config_of(
        environment={**TURNS, "episode_seconds": 0.0},
        reward={"function": ""},
        rollout={"group_size": 4, "max_tokens": 100, "forks": forks},
    )


@pytest.mark.slow
def test_forks_are_planned(tmp_path: Path):
    """Four turns of 20 tokens. Two alternatives from the last turn sample two turns more, from the first one eight; and they wait for
    the tools of their own turns alone."""
    given: dict[str, Any] = {"turns": "4", "tools": "20", "results": "30", "lengths": "20", "steps": 8}
    plain, last, first = (
        answer(question(tmp_path, config=forked(**forks), **given), silent).asked.prediction
        for forks in ({}, {"alternatives": 2, "turn": "last"}, {"alternatives": 2, "turn": "first"})
    )
    assert [one.drawn_length for one in (plain, last, first)] == pytest.approx([80, 120, 240])
    assert last.seconds_per_step < 1.2 * plain.seconds_per_step < 1.8 * plain.seconds_per_step < first.seconds_per_step


def test_a_run_with_forks_says_nothing_of_the_turns_of_one_rollout(tmp_path: Path):
    """Its metrics count the turns of all ends."""
    run = write_run(tmp_path)
    several = {"turns": (4, 5, 4, 4), "read": (30, 90, 30, 30), "between": (3.0, 6.0, 3.0, 3.0)}
    facts = [msgspec.structs.replace(f, **several) if isinstance(f, GroupEnded) and len(f.lengths) > 1 else f for f in read_metrics(run)]  # fmt: skip
    (run / METRICS).write_bytes(b"".join(encode(fact) + b"\n" for fact in facts))
    assert rates_of_run(run, config_of())[0].turns is not None
    (run / "config.toml").write_text(dump_config(forked(alternatives=2)))
    rates, _ = rates_of_run(run, config_of())
    assert (rates.turns, rates.tools, rates.results) == (None, None, None)


def test_the_trainer_forwards_the_turns_before_a_fork_once():
    """Prompt of 50 tokens; a turn of 20, a result of 30, and three ends of 10, 11 and 12 tokens."""

    def end(length: int) -> Scored:
        turns = (
            Turn((0, 50, 0), sampled(20)),
            Turn((30, 7), sampled(length), parents=(0,)),
        )
        return Scored(Episode(turns), float(length), {})

    def sampled(length: int) -> Completion:
        return Completion((length, *(0,) * (length - 1)), (-1.0,) * length, (VersionSpan(0, 0, 0),), "stop")

    prompt = Prompt("p", "", (0, 50, 0))
    alone, tree = end(9), as_tree([end(10), end(11), end(12)], 1)
    rows = algorithm_of(AlgoConfig("reinforce"), 100).rows(prompt, [alone, tree])
    assert [real_tokens(row, 1) for row in rows] == [59, 60, 61, 62]
    trainer = SimulatedTrainer(TrainerRates(0.0, 0.0, 0.0), Shared())
    report = virtual_time.run(trainer.step(Batch(0, (Group(0, prompt, (alone, tree), rows),))))
    assert report.forward_tokens == 50 + 59 + (20 + 30 + 10 + 11 + 12)
    assert report.loss_tokens == 20 + 9 + 20 + 10 + 11 + 12


@pytest.mark.parametrize(
    ("algo", "updates", "ahead"),
    [("grpo", 4, 0), ("tis", 4, 1), ("tis", 1, 0), ("ppo", 4, 1), ("ppo", 1, 0)],
)
def test_a_step_of_several_updates_has_its_pass_ahead_and_demonstrations_their_tokens(algo, updates, ahead):
    """Rows of 100 tokens of which all are forwarded, at a second for a token."""
    scenario = Scenario(rates=RATES, completions=fixed(1), algo=AlgoConfig(algo), epochs=2 if updates > 1 else 1)
    rollout = Scored(
        Episode((Turn((0, 50, 0), Completion((9, *(0,) * 8), (-1.0,) * 9, (VersionSpan(0, 0, 0),), "stop")),)), 1.0, {}
    )
    rows = algorithm_of(AlgoConfig("reinforce"), 100).rows(prompt := Prompt("p", "", (0, 50, 0)), [rollout])
    trainer = SimulatedTrainer(
        TrainerRates(1.0, 0.0, 0.0),
        Shared(),
        epochs=scenario.epochs,
        minibatches=updates // scenario.epochs,
        looks_ahead=scenario.looks_ahead,
        given=20.0,
    )
    report = virtual_time.run(trainer.step(Batch(0, (Group(0, prompt, (rollout,), rows),))))
    assert report.forward_tokens == scenario.epochs * (59 + 20)
    assert report.seconds == pytest.approx(scenario.epochs * 79 + ahead * 59 / 3)


def test_a_plan_counts_demonstrations_and_says_that_a_warm_start_is_not_in_it(tmp_path):
    path = str(tmp_path / "answers.jsonl")

    def planned(**tables: dict[str, Any]) -> Any:
        return answer(question(tmp_path, config=config_of(**tables), steps=4, prompts="70", lengths="30"), silent)

    plain = planned()
    given = planned(demonstrations={"path": path, "rows_per_step": 6}, algo={"name": "chord"})
    assert (plain.asked.scenario.given, given.asked.scenario.given) == (0.0, 600.0)
    assert any("6 demonstrations of a step are assumed" in note for note in given.notes)
    again = planned(algo={"experience": {"rollouts": 3}})
    assert again.asked.scenario.given == 3 * again.asked.scenario.staleness.groups_per_step * 30
    warm = planned(warm_start={"path": path})
    assert [any("before the first rollout" in note for note in one.notes) for one in (plain, warm)] == [False, True]


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_cache_that_the_settings_give_is_the_one_that_is_planned_with(gpus: int) -> None:
    def planned(**engine: Any) -> Answer:
        how = {"hardware": "h100", "model": "135m", "gpus": gpus, "steps": 4, "lengths": "400", "prompts": "100"}
        return answer(PlanRequest(config=config_of(engine={"max_running": 64, **engine}), **how), silent)

    found = {kv_gib: planned(**({"kv_gib": kv_gib} if kv_gib else {})).asked for kv_gib in (None, 16.0, 0.05)}
    room, large, small = (one.scenario.rates.engine.kv_tokens for one in found.values())
    assert small == pytest.approx(0.05 * 2**30 / shape_of("135m").cache_bytes) and room >= large > 100 * small
    assert found[None].prediction == found[16.0].prediction, "both hold all that decodes at once"
    assert found[0.05].prediction.running < found[16.0].prediction.running / 2


def test_sizes_that_are_left_open_are_those_of_the_chip_and_what_stays_unused_is_said():
    def asked(gpus: int, **tables: dict[str, Any]) -> PlanRequest:
        return PlanRequest(config=config_of(**{"engine": {}, **tables}), hardware="h100", model="135m", gpus=gpus)

    idle = with_sizes(asked(1))
    assert 2 <= idle.config.engine.sizes.kv_gib < 10 and idle.config.engine.prefill_chunk == 8192
    assert idle.config.train.microbatch_tokens == 16_384 and "of 80 GB of the GPU are unused" in unused_memory(idle)
    many = {"staleness": {"groups_per_step": 512}, "rollout": {"group_size": 32, "max_tokens": 4000}}
    full = with_sizes(asked(1, **many, engine={"context_length": 8000}))
    assert full.config.engine.sizes.max_running > 900 and unused_memory(full) == ""
    apart = with_sizes(asked(2, **many, engine={"context_length": 8000}))
    assert apart.config.engine.sizes.kv_gib > full.config.engine.sizes.kv_gib
    assert with_sizes(asked(1, engine={"max_running": 7, "kv_gib": 1.0})).config.engine.sizes[:2] == (1.0, 7)
    assert with_sizes(full) == full
