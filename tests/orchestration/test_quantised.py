"""A sampler with quantised weights: what is measured at every version, what ends a run, and which settings cannot be beside it."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

import headrace
from headrace.algo.config import AlgoConfig
from headrace.algo.recipes import RECIPES
from headrace.core.errors import ConfigError, IdentityError
from headrace.core.types import Completion, VersionSpan
from headrace.engine.config import EngineConfig
from headrace.facts.facts import IdentityChecked
from headrace.facts.records import read_metrics
from headrace.facts.run_state import RunState
from headrace.facts.telemetry import Telemetry
from headrace.facts.verdicts import identity
from headrace.facts.waits import Waits
from headrace.loop.evaluation import MEASURED, IdentityProbe, Quantised, sampled_pieces
from headrace.loop.world import virtual_time
from headrace.run.auto.candidates import candidates
from headrace.run.config import check, read_config
from headrace.run.learning_problems import correction_of, quantised_words
from headrace.run.rehearsal.memory_needs import engine_needs, read_shape
from headrace.serve.config import ServeConfig
from headrace.settings.process_config import WatchConfig
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.fake_trainer import FakeTrainer
from headrace.testing.makers import row
from headrace.trainer.config import TrainConfig
from support.fake_world import FakeWorld
from support.tiny_run import tiny_config

TEXT = Quantised("int8", 0.1, [[1, 2, 3, 4], [5, 6]])


class Scores:
    """Of both protocols, as much as a probe asks for: token t has the log-prob -t / 100, and something more."""

    def __init__(self, more: float = 0.0, version: int = 3) -> None:
        self.more, self.version = more, version

    def of(self, tokens: Sequence[int]) -> list[float]:
        return [-token / 100 + self.more * (-1) ** token for token in tokens[1:]]


class ScoringTrainer(Scores):
    async def score(self, tokens: Sequence[int], adapter: str = "") -> list[float]:
        return self.of(tokens)


class ScoringEngine(Scores):
    async def score(self, tokens: Sequence[int], adapter: str = "") -> Completion:
        spans = (VersionSpan(0, self.version, self.version),)
        return Completion((), (), spans, "stop", prompt_logprobs=tuple(self.of(tokens)))


def measured(trainer: Any, engine: Any, rows: Sequence[Any] = (), quantised: Quantised = TEXT) -> IdentityChecked:
    facts: list[Any] = []
    probe = IdentityProbe(
        [1, 2], 10, "bfloat16", Telemetry(facts.append, lambda: 0.0, Waits(facts.append, lambda: 0.0, 1e9, 2e9)),
        quantised=quantised,
    )  # fmt: skip

    async def both() -> None:
        probe.saw(rows)
        expected = await probe.trainer_side(trainer, 3)
        probe.saw([row((90, 91))])  # of the next step, while version 3 is on its way
        await probe.engine_side(engine, 3, expected)

    try:
        asyncio.run(both())
    finally:
        (fact,) = facts or [None]
    return fact


# --- what is measured --------------------------------------------------------------------------------------------------


def test_tokens_that_were_sampled_are_compared_and_no_others():
    rows = [row((3, 4, 5, 6), mask=(True, False, True, True)), row((7, 8))]
    fact = measured(ScoringTrainer(), ScoringEngine(0.05), rows)
    assert (fact.tokens, fact.weights, fact.tolerance, fact.ok) == (5, "int8", 0.1, True)
    assert fact.mean_abs_diff == pytest.approx(0.05)
    gaps = [-0.05 * (-1) ** token for token in (3, 5, 6, 7, 8)]  # trainer's less sampler's
    assert fact.kl == pytest.approx(sum(math.exp(gap) - 1 - gap for gap in gaps) / 5)


def test_before_anything_was_sampled_a_text_is_compared():
    assert measured(ScoringTrainer(), ScoringEngine()).tokens == 4


def test_rows_are_taken_evenly_until_there_are_enough_tokens():
    rows = [row([place] * 40) for place in range(48)]
    pieces = sampled_pieces(rows)
    assert [piece.tokens[-1] for piece in pieces] == [0, 3, 6, 9, 12, 15, 18]
    assert MEASURED <= sum(sum(piece.counted) for piece in pieces) < MEASURED + 40
    assert all(len(piece.counted) == len(piece.tokens) - 1 for piece in pieces)
    assert sampled_pieces([row((1, 2), mask=(False, False))]) == [] == sampled_pieces([])


@pytest.mark.parametrize("more", [0.11, -0.2, float("nan"), float("inf")])
def test_above_the_bound_the_run_ends_with_what_to_do(more: float):
    with pytest.raises(
        IdentityError, match=r'watch.mismatch = 0.1 is allowed.* Resume with engine.weights = "published"'
    ):
        measured(ScoringTrainer(), ScoringEngine(more))


def test_every_version_is_measured_whatever_the_probes_are_set_to(tmp_path: Path):
    world = FakeWorld(tmp_path, steps=5, identity_every=100, quantised=TEXT)
    virtual_time.run(world.run())
    facts = world.facts.of(IdentityChecked)
    assert [fact.version for fact in facts] == [0, 1, 2, 3, 4, 5]
    assert facts[0].tokens == 4, "the text"
    trained = [batch.rows for batch in world.trainer.batches]
    assert [fact.tokens for fact in facts[1:]] == [
        sum(sum(piece.counted) for piece in sampled_pieces(rows)) for rows in trained
    ]


class Drifting(FakeTrainer):
    async def score(self, tokens: Sequence[int], adapter: str = "") -> list[float]:
        return [one - 0.3 * (self.version >= 2) for one in await super().score(tokens, adapter)]


def test_a_run_whose_sampler_drifts_away_ends_and_one_without_quantised_weights_goes_on(tmp_path: Path):
    world = FakeWorld(tmp_path / "one", trainer=Drifting(), engine=FakeEngine(), steps=5, quantised=TEXT)
    with pytest.raises(IdentityError, match="at version 2 the engine, which has int8 weights"):
        virtual_time.run(world.run())
    assert not world.facts.of(IdentityChecked)[-1].ok
    virtual_time.run(FakeWorld(tmp_path / "two", steps=5).run())


def test_the_summary_says_which_two_policies_were_compared():
    state = RunState()
    fact = IdentityChecked(t=1.0, version=1, mean_abs_diff=0.02, max_abs_diff=0.1, tolerance=0.1, ok=True)
    state.fold(msgspec.structs.replace(fact, weights="int8", tokens=256, kl=4e-4))
    assert "between the sampler with int8 weights and the policy that is trained, KL 4.0e-04" in identity(state).detail


# --- what corrects for it ----------------------------------------------------------------------------------------------

UNCORRECTED = {"kimi", "topr", "topr_token", "aspo", "ce", "dpo", "ipo_pairs", "simpo", "cpo", "orpo", "kto"}


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_has_a_correction_or_is_known_to_have_none(name: str):
    assert bool(correction_of(AlgoConfig(name=name))) == (name not in UNCORRECTED)


def test_corrections_are_called_by_their_names():
    assert correction_of(AlgoConfig(name="tis")) == "truncated importance sampling (TIS) by token, weights of 0 to 2"
    assert correction_of(AlgoConfig(name="mis")).startswith("masked importance sampling (MIS) by sequence")
    assert correction_of(AlgoConfig()).startswith("the ratio in algo.loss = ppo_clip")
    words = quantised_words(EngineConfig(weights="int8"), AlgoConfig(name="tis"), WatchConfig(mismatch=0.05))
    assert "(TIS)" in words and "0.05 nats a token" in words
    assert quantised_words(EngineConfig(), AlgoConfig(), WatchConfig()) == ""


# --- what cannot be beside it ------------------------------------------------------------------------------------------


def problems(tmp_path: Path, *sets: str, weights: str = "int8") -> list[str]:
    dtype = ["engine.dtype=bfloat16"] if weights == "fp8" else []
    return check(read_config(tiny_config(tmp_path, tmp_path), (f"engine.weights={weights}", *dtype, *sets)))


@pytest.mark.parametrize(
    "given, words, remedy",
    [
        (["train.parity=bitwise"], 'train.parity = "off"', ["train.parity=off"]),
        (["watch.identity_every=0"], "set it to 1", ["watch.identity_every=1"]),
        (["engine.path=fused"], 'set engine.path = "kernels"', ["engine.path=kernels"]),
        (["engine.device=cuda"], 'set engine.device = "cpu"', ["engine.device=cpu"]),
        (["algo.name=kimi"], "use algo.name = grpo, tis or mis", ["algo.name=tis"]),
        (["algo.name=kimi"], 'algo.correction.mode = "none" to train without', ["algo.correction.mode=none"]),
        (["algo.name=dpo"], 'algo.correction.mode = "none" to train without', ["algo.correction.mode=none"]),
        (["algo.old=trainer"], 'set algo.correction.mode = "truncate" (TIS)', ["algo.correction.mode=truncate"]),
        (["algo.old=trainer"], 'or "mask" (MIS)', ["algo.correction.mode=mask"]),
        (["algo.old=trainer"], 'or algo.correction.mode = "none"', ["algo.correction.mode=none"]),
        (["engine.kind=headrace"], 'set engine.kind = "native"', ["engine.kind=native"]),
        (["engine.kind=headrace"], 'or engine.weights = "published"', ["engine.weights=published"]),
    ],
)  # fmt: skip
def test_what_it_excludes_is_refused_with_a_remedy_that_works(given, words, remedy, tmp_path):
    (problem,) = problems(tmp_path, *given)
    assert 'engine.weights = "int8"' in problem and words in problem
    assert problems(tmp_path, *given, *remedy) == []


@pytest.mark.parametrize(
    "given, words, remedy",
    [
        (["algo.name=kimi"], "use algo.name = grpo, tis or mis", ["algo.name=tis"]),
        (["engine.path=kernels"], 'set engine.path = "fused"', ["engine.path=fused"]),
        (["engine.device=cpu"], 'set engine.device = "cuda"', ["engine.device=cuda"]),
        (["engine.device=cpu"], 'engine.weights = "int8", or', ["engine.weights=int8"]),
        (["engine.dtype=float32"], 'set engine.dtype = "bfloat16"', ["engine.dtype=bfloat16"]),
        (["engine.kind=vllm"], 'engine.kind = "vllm" is a server; set engine.kind = "native"', ["engine.kind=native"]),
    ],
)  # fmt: skip
def test_what_fp8_excludes_is_refused_with_a_remedy_that_works(given, words, remedy, tmp_path):
    (problem,) = problems(tmp_path, *given, weights="fp8")
    assert 'engine.weights = "fp8"' in problem and words in problem
    assert problems(tmp_path, *given, *remedy, weights="fp8") == []


@pytest.mark.parametrize("words", ['["--quantization", "fp8"]', '["--quantization=fp8"]', '["-q", "fp8"]'])
def test_a_server_that_quantises_by_itself_is_refused_with_remedies_that_work(words: str, tmp_path: Path):
    sets = ["engine.kind=vllm", "engine.dtype=bfloat16"]
    (problem,) = problems(tmp_path, *sets, f"engine.server_args={words}", weights="published")
    assert "which no run measures on a server; remove it, or" in problem
    assert problems(tmp_path, *sets, weights="published") == []
    assert problems(tmp_path, "engine.kind=native", weights="fp8") == []


def test_int8_on_a_gpu_leads_to_fp8(tmp_path: Path):
    (problem,) = problems(tmp_path, "engine.device=cuda")
    assert 'engine.weights = "fp8"' in problem
    assert problems(tmp_path, "engine.device=cuda", weights="fp8") == []


def test_what_scores_the_policy_is_not_quantised():
    assert EngineConfig(weights="int8", exact=True).for_worker == EngineConfig(exact=True).for_worker


def test_auto_chooses_among_ways_that_serve_it():
    engine = [one for one in candidates(EngineConfig(weights="int8"), TrainConfig()) if one.part == "engine"]
    assert {(one.dtype, one.path) for one in engine} == {("bfloat16", "kernels"), ("float32", "kernels")}
    engine = [one for one in candidates(EngineConfig(weights="fp8"), TrainConfig()) if one.part == "engine"]
    assert {(one.dtype, one.path) for one in engine} == {("bfloat16", "fused")}


def test_a_server_measures_nothing_and_serves_no_quantised_weights():
    with pytest.raises(ConfigError, match='set engine.weights = "published"'):
        ServeConfig(model="m", engine=EngineConfig(weights="int8"))
    ServeConfig(model="m", engine=EngineConfig(weights="published"))


def test_the_plan_of_memory_has_a_byte_for_each_weight(tiny_llama: Path):
    shape = read_shape(tiny_llama)
    sizes = {
        weights: engine_needs("engine", shape, EngineConfig(weights=weights), "cpu")[1].bytes for weights in ("published", "int8", "fp8")
    }  # fmt: skip
    linear = sum(rows * columns for _, rows, columns in shape.matrices)
    assert sizes["int8"] == shape.parameters + 2 * (shape.parameters - linear) and linear > 0
    assert sizes["published"] == 2 * shape.parameters
    assert sizes["fp8"] == linear + 2 * (shape.parameters - linear), "the head stays as it is published"


# --- whole -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # three starts of a run: 30 CPU s
@pytest.mark.parametrize("remedy", [{"engine": {"weights": "published"}}, {"watch": {"mismatch": 0.1}}])
def test_a_run_with_int8_weights_ends_above_its_bound_and_goes_on_as_the_message_says(
    remedy: dict[str, Any], tmp_path: Path, tiny_llama: Path
):
    config = AutoConfig.from_pretrained(tiny_llama)
    config.head_dim = 16  # as wide as the kernels need them
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    settings = tiny_config(tmp_path, model, engine={"weights": "int8"}, train={"steps": 2})
    with pytest.raises(IdentityError, match="at version 0 the engine, which has int8 weights"):
        headrace.train({**settings, "name": "one", "watch": {"mismatch": 1e-7}})
    changed = {name: {**settings.get(name, {}), **table} for name, table in remedy.items()}
    assert headrace.train({**settings, **changed, "name": "other"}).step == 2
    checked = [fact for fact in read_metrics(tmp_path / "runs" / "other") if isinstance(fact, IdentityChecked)]
    quantised = "engine" not in remedy
    assert all((fact.weights == "int8") == quantised for fact in checked)
    assert [fact.version for fact in checked] == ([0, 1, 2] if quantised else [0])
