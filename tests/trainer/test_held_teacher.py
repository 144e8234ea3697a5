"""A teacher that the trainer holds, against float64 autograd on whole logits of Hugging Face's own models: any objective, temperature, mask, and packing."""

from __future__ import annotations

import math
import random
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from headrace.algo.config import AlgoConfig
from headrace.algo.objective import objective_of
from headrace.algo.policy.tokens import Tokens
from headrace.algo.recipe_parts import Distill
from headrace.algo.training_rows import algorithm_of
from headrace.core.batches import Batch, Group, Row
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.types import Completion, Episode, Prompt, Scored, Turn, VersionSpan
from headrace.models.lora import LoraConfig
from headrace.trainer.config import TrainConfig
from headrace.trainer.forward.divergence import HeadOf, divergence, most_probable
from headrace.trainer.forward.head import BLOCK_ELEMENTS, Scale
from headrace.trainer.packing import Kept
from headrace.trainer.step.learner import Assignment
from headrace.trainer.step.teacher import _marks
from headrace.trainer.step.trainer import TorchTrainer
from support import plain_trainer, tiny_models
from support.few import few

K, BETA = 5, 0.3
MORE_ROWS = 104
"""Rows of the teacher's logits; the student has 96."""
_made = TemporaryDirectory(prefix="headrace-teachers-")


@cache
def teacher(rows: int = MORE_ROWS) -> tuple[Any, Path]:
    """Another family, with more rows of logits, which are not of zero probability."""
    model, directory = tiny_models.make("qwen3", seed=3, vocab_size=rows, hidden_size=16), Path(_made.name) / f"{rows}"
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return plain_trainer.plain(model), directory


class Asked(NamedTuple):
    kind: str
    over: str
    temperature: float = 1.0
    sampling: float = 1.0
    """The temperature of sampling."""
    masks: bool = False

    def algo(self, **more: Any) -> AlgoConfig:
        settings: dict[str, Any] = {"kind": self.kind, "over": self.over, "model": str(teacher()[1]), "coef": 1.5}
        settings |= {"temperature": self.temperature} if self.temperature != 1 else {}
        settings |= {"k": K} if self.over != "vocabulary" else {}
        settings |= {"beta": BETA} if self.kind == "jsd" else {}
        return AlgoConfig("gkd", distill=settings, **more)


CASES = [
    Asked("forward", "vocabulary"),
    Asked("reverse", "vocabulary", 2.0, 0.7, True),
    Asked("jsd", "vocabulary", 0.6),
    Asked("reverse", "student_top", 1.0, 0.7, True),
    Asked("jsd", "student_top", 2.0),
    Asked("forward", "student_top", 0.8, 0.8),
    Asked("forward", "teacher_top", 1.5, 1.0, True),
    Asked("reverse", "teacher_top"),
]


def rows(masks: bool = False, top: int = 0, rewarded: bool = False) -> list[Row]:
    made = plain_trainer.rows(random.Random(0), masks=masks, top=top)
    return made if rewarded else [replace(row, advantages=(0.0,) * len(row.tokens)) for row in made]


def made(algo: AlgoConfig, budget: int, path: str = "torch", **more: Any) -> TorchTrainer:
    train = TrainConfig(device="cpu", dtype="float32", path=path, microbatch_tokens=budget)
    return TorchTrainer(tiny_models.saved("llama"), train, algo, seed=0, **more)


def gradient(trainer: TorchTrainer, given: list[Row], sampling: float) -> tuple[Any, dict[str, Tensor], int]:
    """(the sums of the step, the gradient, the number of microbatches)."""
    batch = Batch(0, (Group(0, Prompt("p", "", (1,)), (), tuple(given)),), temperature=sampling)
    (plan,) = trainer._plans(batch)
    sums = trainer._gradient(batch.temperature).fill(plan)
    parameters = trainer._learners[""].parameters
    return sums, {name: p.grad for name, p in parameters.items() if p.grad is not None}, len(plan.packs)


class Reference(NamedTuple):
    """float64, at every loss token."""

    weights: dict[str, Tensor]
    student: Tensor
    """[M, 96] logits, with gradient by the weights."""
    teacher: Tensor
    """[M, 104]"""


def reference(given: list[Row]) -> Reference:
    model = plain_trainer.plain(plain_trainer.model_of("llama"))
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    at = [(b, len(given[b].prompt) + t - 1) for b, t in plain_trainer.places(given)[0]]
    own, other = plain_trainer.logits(model, weights, given), plain_trainer.logits(teacher()[0], {}, given).detach()
    return Reference(weights, *(torch.stack([found[b, t] for b, t in at]) for found in (own, other)))


def by_hand(asked: Asked, student: Tensor, other: Tensor) -> Tensor:
    """[M] the divergence, from logits."""
    student, other = student / asked.temperature, other / asked.temperature
    common = student.shape[1]
    if asked.over == "vocabulary":
        p, q = other[:, :common].softmax(1), student.softmax(1)
    else:
        chosen = student if asked.over == "student_top" else other[:, :common]
        ids = torch.argsort(chosen, 1, descending=True)[:, :K]
        p, q = (logits.softmax(1).gather(1, ids) for logits in (other, student))
        p, q = (torch.cat([x, 1 - x.sum(1, keepdim=True)], 1) for x in (p, q))
    if asked.kind == "forward":
        return (p * (p / q).log()).sum(1)
    if asked.kind == "reverse":
        return (q * (q / p).log()).sum(1)
    m = BETA * p + (1 - BETA) * q
    return BETA * (p * (p / m).log()).sum(1) + (1 - BETA) * (q * (q / m).log()).sum(1)


def near(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 2e-4) -> None:
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        assert (found[name].double() - one).abs().max() <= tolerance * one.abs().max(), name


@pytest.mark.parametrize("asked", few(CASES, keep=5))
@pytest.mark.parametrize("budget", few([14, 1000], keep=1))
def test_value_and_gradient_are_those_of_whole_logits_in_float64(asked: Asked, budget: int) -> None:
    given = rows(asked.masks)
    wanted = reference(given)
    value = by_hand(asked, wanted.student, wanted.teacher)
    slopes = torch.autograd.grad(1.5 * value.mean(), list(wanted.weights.values()))
    sums, found, packs = gradient(made(asked.algo(), budget), given, asked.sampling)
    assert (packs > 2) == (budget < 100) and sums.tokens == len(value)
    assert sums.divergence / sums.tokens == pytest.approx(value.mean().item(), rel=1e-5)
    assert sums.loss == pytest.approx(1.5 * value.mean().item(), rel=1e-5)
    near(found, dict(zip(wanted.weights, slopes, strict=True)))


@pytest.mark.parametrize("masks", [False, True])
def test_the_sampled_token_has_the_temperature_and_the_mask_of_sampling_under_both(masks: bool) -> None:
    """A(t) = log T(t) - log S(t), both among what was kept for t at the temperature of sampling; the sampler's own log-probs are the anchor."""
    given, sampling = rows(masks), 0.7
    wanted = reference(given)
    scaled, other = (padded(given, x / sampling) for x in (wanted.student, wanted.teacher))
    logprob, taught = plain_trainer.logprobs(scaled, given), plain_trainer.logprobs(other, given)
    algo = AlgoConfig("opd", distill={"model": str(teacher()[1])})
    sampled = plain_trainer.column(given, lambda row: row.logprobs)
    zeros = torch.zeros_like(sampled)
    tokens = Tokens(logprob, sampled, zeros, zeros.long(), zeros, teacher=taught)
    loss = objective_of(algo)(tokens).loss.mean()
    slopes = torch.autograd.grad(loss, list(wanted.weights.values()))
    sums, found, _ = gradient(made(algo, 14), given, sampling)
    assert sums.teacher_kl / sums.taught == pytest.approx((logprob - taught).mean().item(), rel=1e-4)
    assert sums.loss == pytest.approx(loss.item(), rel=1e-4)
    near(found, dict(zip(wanted.weights, slopes, strict=True)))


@pytest.mark.parametrize("masks", [False, True])
def test_ids_that_the_teacher_has_no_row_for_are_read_as_its_last_and_get_no_word_of_it(masks: bool) -> None:
    """Rows behind the tokenizer's last id, of which a larger student may have more, and may sample one."""
    given, fewer = rows(masks), 60
    other, directory = teacher(fewer)
    read = [replace(row, prompt=below(row.prompt, fewer), tokens=below(row.tokens, fewer)) for row in given]
    at = [(b, len(row.prompt) + t - 1) for b, row in enumerate(given) for t, own in enumerate(row.mask) if own]
    logits = plain_trainer.logits(other, {}, read).detach() / 0.7
    ids = [row.tokens[t] for row in given for t, own in enumerate(row.mask) if own]
    wanted = [
        logits[b, t].log_softmax(0)[id_] if id_ < fewer else math.nan for (b, t), id_ in zip(at, ids, strict=True)
    ]
    trainer = made(AlgoConfig("opd", distill={"model": str(directory)}), 1000)
    (plan,) = trainer._plans(Batch(0, (Group(0, Prompt("p", "", (1,)), (), tuple(given)),), temperature=0.7))
    found = torch.cat([trainer._gradient(0.7)._scores(pack, taught=True).taught.teacher for pack in plan.packs])
    assert found.isnan().sum() == sum(id_ >= fewer for id_ in ids) > 3
    if not masks:
        assert sorted(found[found.isfinite()].tolist()) == pytest.approx(
            sorted(x for x in map(float, wanted) if x == x), rel=1e-4
        )
    sums, slopes, _ = gradient(trainer, given, 0.7)
    assert sums.taught == found.isfinite().sum() and math.isfinite(sums.loss)
    assert all(one.isfinite().all() for one in slopes.values())


def below(ids: tuple[int, ...], rows: int) -> tuple[int, ...]:
    return tuple(min(one, rows - 1) for one in ids)


def padded(given: list[Row], at: Tensor) -> Tensor:
    """[B, T, V] with the logits [M, V] of the loss tokens at their places."""
    places, _ = plain_trainer.places(given)
    longest = max(len(row.prompt) + len(row.tokens) for row in given)
    index = torch.tensor([b * longest + len(given[b].prompt) + t - 1 for b, t in places])
    return at.new_zeros(len(given) * longest, at.shape[1]).index_copy(0, index, at).view(len(given), longest, -1)


def test_a_served_teacher_s_top_tokens_are_compared_at_temperature_1_whatever_is_sampled() -> None:
    given = rows(masks=True, top=3)
    wanted = reference(given)
    value = plain_trainer.forward_kl(padded(given, wanted.student), given).mean()
    slopes = torch.autograd.grad(value, list(wanted.weights.values()))
    algo = AlgoConfig("opd_topk", distill={"kind": "forward", "k": 3})
    sums, found, _ = gradient(made(algo, 14), given, 0.7)
    assert sums.loss == pytest.approx(value.item(), rel=1e-5)
    near(found, dict(zip(wanted.weights, slopes, strict=True)))


@pytest.mark.parametrize("over", ["vocabulary", "student_top"])
def test_a_teacher_that_is_the_student_teaches_nothing(over: str) -> None:
    """In bfloat16, by the kernels: both are rounded alike."""
    same = {"model": str(tiny_models.saved_with_tokenizer("llama")), "over": over, "kind": "reverse"}
    train = TrainConfig(device="cpu", dtype="bfloat16", microbatch_tokens=14)
    trainer = TorchTrainer(tiny_models.saved("llama"), train, AlgoConfig("gkd", distill=same), seed=0)
    sums, found, _ = gradient(trainer, rows(), 1.0)
    assert abs(sums.divergence / sums.tokens) < 1e-6
    assert max(float(one.abs().max()) for one in found.values()) < 1e-4


@pytest.mark.parametrize("path", ["torch", "auto"])
def test_an_adapter_learns_from_it_beside_rewards_and_a_reference(path: str) -> None:
    """The gradient of the sum is the sum of gradients; the head is frozen."""
    asked, given = Asked("jsd", "vocabulary"), rows(rewarded=True)

    def slopes(algo: AlgoConfig) -> dict[str, Tensor]:
        train = TrainConfig(device="cpu", dtype="float32", path=path, microbatch_tokens=14)
        trainer = TorchTrainer(
            tiny_models.saved("llama"), train, algo, seed=0, adapters={"": Assignment(train, algo, LoraConfig(rank=2))}
        )
        generator = torch.Generator().manual_seed(0)
        for parameter in trainer._learners[""].parameters.values():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        return gradient(trainer, given, 1.0)[1]

    rewarded: dict[str, Any] = {"name": "dr_grpo", "aggregation": "token_mean", "kl": {"coef": 0.1}}
    distill = {"kind": "jsd", "over": "vocabulary", "beta": BETA, "coef": 1.5, "model": str(teacher()[1])}
    both, one, other = (
        slopes(AlgoConfig(**rewarded, distill=distill)),
        slopes(AlgoConfig(**rewarded)),
        slopes(asked.algo()),
    )
    assert max(float(x.abs().max()) for x in other.values()) > 0
    near(both, {name: one[name].double() + other[name].double() for name in both}, 1e-4)


def test_a_selection_over_the_step_keeps_the_divergence_of_all_tokens() -> None:
    """The objective is then computed on all microbatches at once, from numbers that carry its slopes."""
    given, asked = rows(rewarded=True), Asked("reverse", "student_top")
    select = {"kind": "entropy", "fraction": 0.5}
    settings = {"kind": "reverse", "over": "student_top", "k": K, "model": str(teacher()[1])}
    algo = AlgoConfig("dr_grpo", aggregation="token_mean", select=select, distill=settings)
    (split, found, packs), (whole, wanted, _) = (gradient(made(algo, budget), given, 1.0) for budget in (14, 1000))
    assert packs > 2 and split.loss == pytest.approx(whole.loss, rel=1e-5)
    near(found, {name: one.double() for name, one in wanted.items()}, 1e-4)
    value = by_hand(asked, *reference(given)[1:]).mean()
    assert split.divergence / split.tokens == pytest.approx(value.item(), rel=1e-5)


def test_a_step_trains_and_the_teacher_stays_and_a_model_that_shows_logits_only_is_refused() -> None:
    trainer = made(CASES[0].algo(), 14)
    held = trainer._teacher
    assert held is not None
    before = [parameter.clone() for parameter in held.parameters()]
    batch = Batch(0, (Group(0, Prompt("p", "", (1,)), (), tuple(rows())),))
    first = trainer.step(batch).divergence
    reports = [trainer.step(Batch(step, batch.groups)) for step in range(1, 4)]
    assert 0 < reports[-1].divergence < first and math.isfinite(reports[-1].loss)
    assert all(torch.equal(*pair) for pair in zip(before, held.parameters(), strict=True))
    with pytest.raises(ConfigError, match=r"the policy, shows its logits only; use \[\[teachers\]\]"):
        TorchTrainer(tiny_models.saved("granite"), TrainConfig(device="cpu"), CASES[0].algo(), seed=0)
    own = {"kind": "jsd", "over": "vocabulary", "model": str(tiny_models.saved_with_tokenizer("granite"))}
    with pytest.raises(ConfigError, match=r"algo.distill.model = .* shows its logits only, one row at a time"):
        made(AlgoConfig("gkd", distill=own), 14)


def test_a_checkpoint_knows_the_teacher_s_weights_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    shutil.copytree(teacher()[1], tmp_path / "t")
    algo = AlgoConfig("gkd", distill={"model": str(tmp_path / "t")})
    batches = [Batch(step, (Group(0, Prompt("p", "", (1,)), (), tuple(rows())),)) for step in range(2)]
    first = made(algo, 14)
    first.step(batches[0])
    first.save(tmp_path / "saved")
    again = made(algo, 14)
    again.restore(tmp_path / "saved")
    assert first.step(batches[1]).grad_norm == again.step(batches[1]).grad_norm
    assert all(torch.equal(*pair) for pair in zip(first._model.parameters(), again._model.parameters(), strict=True))
    changed = tiny_models.make("qwen3", seed=4, vocab_size=MORE_ROWS, hidden_size=16)
    changed.save_pretrained(tmp_path / "t")
    with pytest.raises(CheckpointError, match=r"the weights of algo.distill.model = .* have changed since"):
        made(algo, 14).restore(tmp_path / "saved")
    made(CASES[0].algo(), 14).restore(tmp_path / "saved")  # another name is another teacher


def test_a_checkpoint_sees_that_one_kind_of_matrices_has_changed(tmp_path: Path) -> None:
    """As where an adapter of the attention was merged: an eighth of a layer, far from the file's ends and its middle."""
    layers, layer = 10, 1 << 20
    values = bytearray(layers * layer)
    (tmp_path / "model.safetensors").write_bytes(values)
    before = _marks("t", tmp_path)
    for start in range(layer // 8, len(values), layer):
        values[start : start + layer // 8] = b"x" * (layer // 8)
    (tmp_path / "model.safetensors").write_bytes(values)
    assert (_marks("t", tmp_path) != before).tolist() == [False, True]


def test_rollouts_that_no_engine_scored_are_trained() -> None:
    """Where teachers are served they are left out, and a group of such is dropped."""
    scored = Scored(
        Episode((Turn((1, 2), Completion((3, 4), (-1.0, -2.0), (VersionSpan(0, 0, 0),), "stop")),)), 0.0, {}
    )
    for algo, reason in ((CASES[0].algo(), ""), (AlgoConfig("opd_topk"), "no_teacher")):
        algorithm = algorithm_of(algo, 8)
        made = algorithm.rows(Prompt("p", "?", (1, 2)), (scored,))
        assert (made[0].mask, algorithm.barren(made)) == ((not reason,) * 2, reason)


# --- the head itself -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_in_blocks_with_bias_and_cap(kind: str, softcap: float) -> None:
    torch.manual_seed(0)
    places, vocabulary, rows = 600, 3000, 2990
    assert places * vocabulary > BLOCK_ELEMENTS["cpu"]
    tensors = [torch.randn(*shape, dtype=torch.float64) for shape in ((places, 4), (vocabulary, 4), (vocabulary,))]
    hidden, weight, bias = (tensor.requires_grad_() for tensor in tensors)
    states, matrix = torch.randn(places, 3, dtype=torch.float64), torch.randn(rows, 3, dtype=torch.float64)
    rule, scale = Distill(kind, beta=BETA, over="vocabulary"), Scale(0.8, softcap)  # type: ignore[arg-type]
    given = [HeadOf(hidden, weight, bias, scale, torch.float64), HeadOf(states, matrix, None, scale, torch.float64)]
    found = divergence(*given, rule)
    logits = (hidden @ weight.T + bias)[:, :rows], states @ matrix.T
    capped = [softcap * torch.tanh(one / softcap) if softcap else one for one in logits]
    wanted = by_hand(Asked(kind, "vocabulary", 0.8), *capped)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-5)
    pushes = torch.randn(places, dtype=torch.float64)
    slopes = [torch.autograd.grad((one * pushes).sum(), tensors, retain_graph=True) for one in (found, wanted)]
    for own, other in zip(*slopes, strict=True):
        assert (own - other).abs().max() <= 3e-5 * other.abs().max()
    assert slopes[0][1][rows:].count_nonzero() == 0


def test_certainty_and_tokens_of_no_probability_stay_finite() -> None:
    """Logits of ±1e4: probabilities of 0 and 1 in float32."""
    hidden, weight = torch.tensor([[1e2], [-1e2]], requires_grad=True), torch.tensor([[1e2], [0.0], [-1e2]])
    other = HeadOf(-hidden.detach(), weight, None, Scale(), torch.float32)
    for kind in ("forward", "reverse", "jsd"):
        rule = Distill(kind, over="vocabulary")  # type: ignore[arg-type]
        found = divergence(HeadOf(hidden, weight, None, Scale(), torch.float32), other, rule)
        (slope,) = torch.autograd.grad(found.sum(), hidden)
        assert found.isfinite().all() and slope.isfinite().all() and (found > 0.5).all()


def test_in_bfloat16_states_and_heads_are_rounded_and_logits_are_not() -> None:
    """A logit of 20 is known to 1/16 in bfloat16. Autocast would round products to it."""
    torch.manual_seed(0)
    tensors = [10 * torch.randn(40, 4), torch.randn(300, 4), 10 * torch.randn(40, 3), torch.randn(300, 3)]
    low = [tensor.bfloat16().double() for tensor in tensors]
    rule = Distill("reverse", over="vocabulary")
    hidden, weight, states, matrix = tensors
    hidden.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        given = [HeadOf(*pair, None, Scale(), torch.bfloat16) for pair in ((hidden, weight), (states, matrix))]
        found = divergence(*given, rule)
        found.sum().backward()
    own = low[0].requires_grad_()
    wanted = by_hand(Asked("reverse", "vocabulary"), own @ low[1].T, low[2] @ low[3].T)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
    (slope,) = torch.autograd.grad(wanted.sum(), own)
    assert hidden.grad is not None and (hidden.grad - slope).abs().max() < 0.02 * slope.abs().max()


def test_the_most_probable_of_all_blocks_below_a_row() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(600, 4), torch.randn(3000, 4)
    head = HeadOf(hidden, weight, None, Scale(), torch.float32)
    assert torch.equal(most_probable(head, 7, 2500), (hidden @ weight.T)[:, :2500].topk(7).indices)
    assert most_probable(head._replace(hidden=hidden[:2]), 9, 4).sort().values.tolist() == [[0, 1, 2, 3]] * 2


def test_kept_ids_below_a_row() -> None:
    kept = Kept(torch.tensor([3, 9, 1, 8, 9, 2]), torch.tensor([0, 2, 2, 5, 6]))
    found = kept.below(9)
    assert (found.ids.tolist(), found.offsets.tolist()) == ([3, 1, 8, 2], [0, 1, 1, 3, 4])
    assert np.array_equal(kept.below(10).offsets, kept.offsets)
