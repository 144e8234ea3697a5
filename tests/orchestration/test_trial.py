"""The trial of C3: every trained value is changed for a moment, and what an engine has not loaded shows in its log-probs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.algo.config import AlgoConfig
from headrace.core.errors import IdentityError
from headrace.core.reports import TrialScores
from headrace.core.types import Completion, VersionSpan
from headrace.core.weights import trial_version
from headrace.facts.facts import IdentityChecked, TrialChecked
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.evaluation import ROUNDING, IdentityProbe, pieces_of
from headrace.models.lora import LoraConfig
from headrace.trainer.config import TrainConfig
from headrace.trainer.step.learner import Assignment
from headrace.trainer.step.trainer import TorchTrainer
from headrace.trainer.step.trial import Trial, hypotheses, kind_of
from support import tiny_models
from support.few import few

TRIAL = trial_version(0)

MODELS = [
    "llama",
    "llama-tied-biased",
    "qwen2-sliding",
    "qwen3",
    "gemma3_text",
    "mixtral",
    "qwen3_moe",
    "gpt2",
    "gpt_neox",
]
"""Tied and not, with biases and without, grouped keys, windows, norms of heads, mixtures."""


def trainer_of(name: str, dtype: str = "float32", **more: Any) -> TorchTrainer:
    return TorchTrainer(tiny_models.saved(name), TrainConfig(dtype=dtype), AlgoConfig(name="grpo"), seed=0, **more)  # type: ignore[arg-type]


def tokens_of(name: str, pieces: int = 2) -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(3, 96, (pieces, 100), generator=draw).tolist()


class HuggingFaceEngine:
    """As much of protocol `Engine` as a probe asks for: the model of transformers, with the weights that it is given."""

    def __init__(self, name: str, version: int = TRIAL) -> None:
        self.model, self.version = tiny_models.reference(name), version
        self.off = 0.0
        """Added to every log-prob."""

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter_name, parameter in self.model.named_parameters():
                parameter.copy_(weights[parameter_name])

    async def score(self, tokens: Sequence[int], adapter: str = "") -> Completion:
        with torch.no_grad():
            logits = self.model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        found = logits[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])] + self.off
        spans = (VersionSpan(0, self.version, self.version),)
        return Completion((), (), spans, "stop", prompt_logprobs=tuple(found.tolist()))


def probe_of(pieces: Sequence[Sequence[int]], dtype: str = "float32") -> tuple[IdentityProbe, list[Any]]:
    facts: list[Any] = []
    telemetry = Telemetry(facts.append, lambda: 0.0, Waits(facts.append, lambda: 0.0, 1e9, 2e9))
    return IdentityProbe(pieces[0], 1, dtype, telemetry, trial=pieces), facts


# -- the change ---------------------------------------------------------------------------------------------------------------

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), DTYPES, st.booleans()), min_size=1, max_size=6),
    st.randoms(),
)
def test_every_value_changes_and_is_what_it_was_afterwards(
    shapes: list[tuple[int, int, torch.dtype, bool]], random: Any
) -> None:
    draw = torch.Generator().manual_seed(random.randrange(1 << 30))
    parameters = {}
    for number, (rows, columns, dtype, zero) in enumerate(shapes):
        size = (rows, columns) if rows else (columns,)
        values = torch.zeros(size) if zero else torch.randn(size, generator=draw) + 0.01
        parameters[f"layers.{number}.w"] = torch.nn.Parameter(values.to(dtype))
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    same = lambda name: torch.equal(parameters[name], before[name])  # noqa: E731
    trial = Trial(parameters)
    for name, parameter in parameters.items():
        assert bool((parameter != before[name]).all()) and bool(parameter.isfinite().all())
        relative = ((parameter - before[name]) / before[name]).abs()[before[name] != 0]
        assert bool((relative < 0.13).all()), "a model under trial is still a model"
    for label in trial.kept():
        kept = hypotheses(list(parameters))[label]
        assert all(same(name) is (name in kept) for name in parameters)
    trial.end()
    assert all(map(same, parameters))


def test_kinds_and_blocks() -> None:
    names = [
        "embed.weight",
        *(f"model.layers.{n}.mlp.experts.{e}.up.weight" for n in range(10) for e in range(2)),
        "norm.weight",
    ]
    found = hypotheses(names)
    assert kind_of(names[1]) == "model.layers.*.mlp.experts.*.up.weight"
    assert list(found)[:3] == ["embed.weight", kind_of(names[1]), "norm.weight"]
    assert list(found)[3:] == ["layers 0 to 2", "layers 3 to 5", "layers 6 to 9"]
    assert sorted(name for label in list(found)[3:] for name in found[label]) == sorted(names[1:-1]), "each layer once"


@pytest.mark.parametrize("name", few(["llama-tied-biased", "mixtral"], keep=1))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainer_goes_on_from_the_weights_that_it_had(name: str, dtype: str) -> None:
    """Weights that kernels have packed are packed again."""
    trainer, (tokens, _) = trainer_of(name, dtype), tokens_of(name)
    before, weights = trainer.score(tokens), {n: one.detach().clone() for n, one in trainer.parameters()}
    trainer.begin_trial()
    assert trainer.version == trainer.version_of("") == TRIAL
    assert all(not torch.equal(one, weights[n]) for n, one in trainer.parameters())
    scores = trainer.end_trial([tokens])
    assert trainer.version == 0 and trainer.score(tokens) == before
    assert all(torch.equal(one, weights[n]) for n, one in trainer.parameters())
    assert scores.changed != before and all(kept != scores.changed for kept in scores.kept.values())


def test_an_adapter_is_tried_alone() -> None:
    assignment = Assignment(TrainConfig(dtype="float32"), AlgoConfig(name="grpo"), LoraConfig(rank=4))
    trainer = trainer_of("qwen3", adapters={"policy": assignment})
    before, (tokens, _) = {n: one.clone() for n, one in trainer.parameters("policy")}, tokens_of("qwen3")
    assert any(not one.any() for one in before.values()), "half of a new adapter is zero"
    trainer.begin_trial("policy")
    assert trainer.version_of("policy") == TRIAL and trainer.version == 0
    assert all(bool((one != before[n]).all()) for n, one in trainer.parameters("policy"))
    scores = trainer.end_trial([tokens], "policy")
    assert all(torch.equal(one, before[n]) for n, one in trainer.parameters("policy"))
    assert {label.split(".")[-2] for label in scores.kept if "lora" in label} == {"lora_A", "lora_B"}


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[TrialScores, int]]:
    """Does a trial of a new trainer whose effects are worth keeping. Returns its scores, and how often it computed log-probs."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr("headrace.trainer.step.trainer.WORTH", 0)

    def tried(trainer: TorchTrainer, pieces: Sequence[Sequence[int]], most: int = 0) -> tuple[TrialScores, int]:
        count, score = itertools.count(), trainer.score
        monkeypatch.setattr(trainer, "score", lambda *given: (next(count), score(*given))[1])
        trainer.begin_trial()
        return trainer.end_trial(pieces, most=most), next(count)

    return tried


@pytest.mark.parametrize("name", ["llama-tied-biased", "mixtral"])
def test_effects_that_an_earlier_process_computed_are_taken(name: str, counted: Callable[..., tuple[TrialScores, int]]) -> None:  # fmt: skip
    pieces = tokens_of(name)
    computed, often = counted(trainer_of(name), pieces)
    trainer = trainer_of(name)
    before = trainer.score(pieces[0])
    known, rarely = counted(trainer, pieces)
    assert known == computed and rarely == len(pieces) < often
    assert trainer.version == 0 and trainer.score(pieces[0]) == before, "the weights are as they were"


@pytest.mark.slow
def test_effects_of_anything_else_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: Callable[..., tuple[TrialScores, int]]) -> None:  # fmt: skip
    name = "mixtral"
    pieces = tokens_of(name)
    counted(trainer_of(name), pieces)
    (file,) = (tmp_path / "trials").iterdir()
    whole = file.read_bytes()
    for data in (b"", whole[:-1], whole[:40] + bytes([whole[40] ^ 1]) + whole[41:]):
        file.write_bytes(data)
        assert counted(trainer_of(name), pieces)[1] > len(pieces), "damaged"
    known = msgspec.msgpack.decode(whole[16:], type=TrialScores)
    others = msgspec.msgpack.encode(
        msgspec.structs.replace(known, changed=[known.changed[0] + 1e-6, *known.changed[1:]])
    )
    file.write_bytes(xxhash.xxh3_128_digest(others) + others)
    assert counted(trainer_of(name), pieces)[1] > len(pieces), "other log-probs under the same name"
    assert counted(trainer_of(name), pieces)[1] == len(pieces)
    assert counted(trainer_of(name), pieces, 5)[1] > len(pieces), "fewer tokens"
    assert counted(trainer_of(name), [pieces[0][:-1], *pieces[1:]])[1] > len(pieces), "another text"
    assert counted(trainer_of(name, "bfloat16"), pieces)[1] > len(pieces), "another dtype"
    for parameter in ("weight", "buffer"):
        trainer = trainer_of(name)
        held = dict(trainer._model.named_parameters() if parameter == "weight" else trainer._model.named_buffers())
        with torch.no_grad():
            list(held.values())[-1].view(-1)[0] += 1e-4
        assert counted(trainer, pieces)[1] > len(pieces), "one other value"
    monkeypatch.setattr("headrace.trainer.step.trial.__version__", "0.0")
    assert counted(trainer_of(name), pieces)[1] > len(pieces), "another version of headrace"
    monkeypatch.setattr("headrace.trainer.step.trial.MOST", 2)
    counted(trainer_of(name), pieces, 6)
    assert len(list((tmp_path / "trials").iterdir())) == 2


@given(st.integers(0, 10**6))
def test_the_version_of_a_trial_has_a_packed_buffer_of_its_own(version: int) -> None:
    """An engine that sleeps loads its weights again from the buffer that it had."""
    assert trial_version(version) < -1 and trial_version(version) % 2 != version % 2


# -- what it finds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", few(MODELS, keep=3))
def test_each_kind_of_parameter_that_keeps_old_values_is_found_and_named(name: str) -> None:
    trainer, pieces = trainer_of(name), tokens_of(name)
    old = {n: one.detach().clone() for n, one in trainer.parameters()}
    trainer.begin_trial()
    new = {n: one.detach().clone() for n, one in trainer.parameters()}
    scores = trainer.end_trial(pieces)
    engine = HuggingFaceEngine(name)

    def tried(kept: Sequence[str]) -> TrialChecked:
        engine.load(new | {n: old[n] for n in kept})
        probe, facts = probe_of(pieces)
        try:
            asyncio.run(probe.try_weights(engine, TRIAL, scores))  # type: ignore[arg-type]
        except IdentityError as error:
            assert facts[0].stale in str(error) and not facts[0].ok
        return facts[0]

    assert tried([]).ok
    for label, names in hypotheses(list(old)).items():
        found = tried(names)
        if label in found.unseen:
            assert label.endswith("k_proj.bias") or "c_attn.bias" in label or "key" in label, (
                "a bias of keys changes no attention"
            )
            continue
        assert found.stale == label, (label, found)


@pytest.mark.parametrize("name", few(["llama-tied-biased", "mixtral"], keep=1))
def test_a_few_tokens_decide_only_where_nothing_has_kept_old_values(name: str) -> None:
    """Whatever kept them, and also where it shows only in tokens of which no effect was computed."""
    trainer, pieces = trainer_of(name), tokens_of(name)
    few = len(pieces[0]) // 2
    old = {n: one.detach().clone() for n, one in trainer.parameters()}
    trainer.begin_trial()
    new = {n: one.detach().clone() for n, one in trainer.parameters()}
    scores = trainer.end_trial(pieces, most=few)
    assert {len(kept) for kept in scores.kept.values()} == {few - 1}
    trainer.begin_trial()
    whole = trainer.end_trial(pieces)
    assert whole.changed == scores.changed and list(whole.kept) == list(scores.kept)
    engine = HuggingFaceEngine(name)

    def decided(kept: Sequence[str]) -> bool:
        engine.load(new | {n: old[n] for n in kept})
        probe, facts = probe_of(pieces)
        done = asyncio.run(probe.try_weights(engine, TRIAL, scores))  # type: ignore[arg-type]
        assert bool(facts) is done, "what is not decided is not recorded"
        return done

    unseen = [label for label, kept in whole.kept.items() if np.abs(np.subtract(kept, whole.changed)).max() < 1e-4]
    sound = msgspec.structs.replace(
        scores, kept={label: scores.kept[label] for label in scores.kept if label not in unseen}
    )
    assert decided([]) is not bool(unseen)
    for label, names in hypotheses(list(old)).items():
        assert label in unseen or not decided(names), label
    late = list(scores.changed)
    late[few + 2] += 1.0  # of a row of the embedding, say, that only this token reads
    probe, _ = probe_of([range(len(late) + 1)])
    assert asyncio.run(probe.try_weights(Told(scores.changed), TRIAL, sound))  # type: ignore[arg-type]
    assert not asyncio.run(probe.try_weights(Told(late), TRIAL, sound))  # type: ignore[arg-type]


def test_weights_that_are_ignored_altogether_are_found() -> None:
    trainer, pieces = trainer_of("llama-tied-biased"), tokens_of("")
    engine = HuggingFaceEngine("llama-tied-biased")
    engine.load({n: one.detach().clone() for n, one in trainer.parameters()})
    trainer.begin_trial()
    scores = trainer.end_trial(pieces)
    with pytest.raises(IdentityError, match="a trial update changed every trained value"):
        asyncio.run(probe_of(pieces)[0].try_weights(engine, TRIAL, scores))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(100))  # not drawn: a chance of a thousandth is left
def test_what_is_neither_found_nor_named_as_unseen_has_arrived(seed: int) -> None:
    """Whatever the size of an effect beside that of rounding: here it is missing, and rounding takes a tenth of it away."""
    rounding = 0.003 * 1000 ** (seed / 99)
    draw = torch.Generator().manual_seed(seed)
    changed, effect, noise = (torch.randn(200, generator=draw, dtype=torch.float64) for _ in range(3))
    found = (changed + 0.9 * effect + rounding * noise).tolist()
    engine, (probe, facts) = Told(found), probe_of([range(201)])
    scores = TrialScores(changed.tolist(), {"kind": (changed + effect).tolist()})
    with contextlib.suppress(IdentityError):
        asyncio.run(probe.try_weights(engine, TRIAL, scores))  # type: ignore[arg-type]
    assert facts[0].stale == "kind" or facts[0].unseen == ("kind",)


@pytest.mark.parametrize(("rounding", "dtype"), [(1e-7, "float32"), (0.03, "bfloat16")])
@pytest.mark.parametrize("seed", range(50))
def test_rounding_alone_is_never_taken_for_weights_that_stayed(seed: int, rounding: float, dtype: str) -> None:
    """Kinds may change log-probs by much less than rounding does (a product that a norm takes away). The rounding of the trainer's own log-probs
    is in both differences that are compared, which looks like a share of a half."""
    draw = torch.Generator().manual_seed(seed)
    normal = lambda: torch.randn(254, generator=draw, dtype=torch.float64)  # noqa: E731
    rounded = lambda values: (values + rounding * normal()).tolist()  # noqa: E731
    changed = 3 * normal()
    sizes = 10 ** (torch.rand(12, generator=draw, dtype=torch.float64) * 6 - 4)
    kept = {f"kind {n}": rounded(changed + float(by) * rounding * normal()) for n, by in enumerate(sizes)}
    engine, (probe, facts) = Told(rounded(changed)), probe_of([range(255)], dtype)
    asyncio.run(probe.try_weights(engine, TRIAL, TrialScores(rounded(changed), kept)))  # type: ignore[arg-type]
    assert facts[0].ok and all(f"kind {n}" in facts[0].unseen for n, by in enumerate(sizes) if by < 0.3)
    assert not any(f"kind {n}" in facts[0].unseen for n, by in enumerate(sizes) if by > 20)


class Told:
    """An engine that says these log-probs."""

    def __init__(self, logprobs: Sequence[float]) -> None:
        self._logprobs = tuple(logprobs)

    async def score(self, tokens: Sequence[int], adapter: str = "") -> Completion:
        return Completion((), (), (VersionSpan(0, TRIAL, TRIAL),), "stop", prompt_logprobs=self._logprobs)


def test_log_probs_that_are_no_numbers_are_no_pass() -> None:
    trainer, pieces = trainer_of("llama"), tokens_of("")
    trainer.begin_trial()
    engine = HuggingFaceEngine("llama")
    engine.load({n: one.detach().clone() for n, one in trainer.parameters()})
    scores, engine.off = trainer.end_trial(pieces), float("nan")
    with pytest.raises(IdentityError):
        asyncio.run(probe_of(pieces)[0].try_weights(engine, TRIAL, scores))  # type: ignore[arg-type]


def test_pieces_fit_the_engine() -> None:
    assert [len(piece) for piece in pieces_of(range(1000), 100)] == [100, 100, 56]
    assert [len(piece) for piece in pieces_of(range(129), 4096)] == [128], "one token alone has no log-prob"


# -- the floor ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_allowed_later_follows_from_the_first_version(dtype: str) -> None:
    """The engine is off by the same amount for all tokens. Its floor decides what counts, at most the tolerance of before."""
    trainer, pieces = trainer_of("llama"), tokens_of("")
    expected, engine = trainer.score(pieces[0]), HuggingFaceEngine("llama", version=0)

    def checked(first: float, later: float) -> float:
        probe, facts = probe_of(pieces, dtype)
        engine.off = first
        asyncio.run(probe.engine_side(engine, 0, expected, first=True))  # type: ignore[arg-type]
        engine.off = later
        asyncio.run(probe.engine_side(engine, 0, expected))  # type: ignore[arg-type]
        allowed: list[IdentityChecked] = facts
        assert allowed[0].tolerance == ROUNDING[dtype].most
        return allowed[1].tolerance

    most, least, above = ROUNDING[dtype]
    assert checked(0.0, 0.5 * least) == least
    assert checked(0.8 * least, 0.8 * least) == pytest.approx(above * 0.8 * least, rel=0.1)
    assert checked(0.9 * most, 0.9 * most) == most
    with pytest.raises(IdentityError, match="times as much as at the first version"):
        checked(0.8 * least, 1.3 * above * 0.8 * least)
    with pytest.raises(IdentityError, match="on average"):
        checked(0.0, 2 * least)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("off", [float("nan"), float("inf"), -float("inf")])
def test_log_probs_that_are_no_numbers_pass_no_probe(off: float, first: bool) -> None:
    """Of the engine, and of the trainer."""
    trainer, pieces = trainer_of("llama"), tokens_of("")
    expected, engine = trainer.score(pieces[0]), HuggingFaceEngine("llama", version=0)
    probe, facts = probe_of(pieces)

    def check(expected: Sequence[float], first: bool) -> None:
        asyncio.run(probe.engine_side(engine, 0, list(expected), first=first))  # type: ignore[arg-type]

    if not first:
        check(expected, True)
    with pytest.raises(IdentityError, match="differ from the trainer's"):
        check([*expected[:-1], off], first)
    engine.off = off
    with pytest.raises(IdentityError, match="differ from the trainer's"):
        check(expected, first)
    assert [fact.ok for fact in facts[-2:]] == [False, False]


def test_a_probe_that_is_scored_under_another_version_is_no_pass() -> None:
    """Though its log-probs are right: they would be a proof of weights that nobody asked about."""
    trainer, pieces = trainer_of("llama"), tokens_of("")
    expected, (probe, facts) = trainer.score(pieces[0]), probe_of(pieces)
    for version in (2, 4):
        engine = HuggingFaceEngine("llama", version=version)
        with pytest.raises(
            IdentityError, match=f"to score the probe under version 3, and did it under version {version}"
        ):
            asyncio.run(probe.engine_side(engine, 3, expected))  # type: ignore[arg-type]
    assert not facts, "nothing was compared"
    asyncio.run(probe.engine_side(HuggingFaceEngine("llama", version=3), 3, expected))  # type: ignore[arg-type]


def test_members_that_round_differently_have_floors_of_their_own() -> None:
    """The first one to answer decides nothing for the others."""
    trainer, pieces = trainer_of("llama"), tokens_of("")
    expected, probe = trainer.score(pieces[0]), probe_of(pieces, "bfloat16")[0]
    fine, coarse = (HuggingFaceEngine("llama", version=0) for _ in range(2))
    coarse.off = 0.04

    def check(engine: HuggingFaceEngine, first: bool) -> None:
        asyncio.run(probe.engine_side(engine, 0, expected, first=first))  # type: ignore[arg-type]

    check(fine, True)
    check(coarse, True)
    check(coarse, False)
    fine.off = 0.04
    with pytest.raises(IdentityError, match="on average"):
        check(fine, False)
