"""The chunked head against full logits in float64: temperature, sampling masks, soft-caps, and what it holds in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.trainer.forward.head import BLOCK_ELEMENTS, Head, _blocks, dense_logprobs, token_logprobs
from headrace.trainer.packing import Kept
from support.few import few


def csr(rows: list[list[int]]) -> Kept:
    flat = [i for row in rows for i in row]
    counts = torch.tensor([0, *map(len, rows)])
    return Kept(torch.tensor(flat, dtype=torch.int64), counts.cumsum(0))


def by_hand(
    logits: Tensor, predictor: Tensor, target: Tensor, temperature: float, softcap: float, rows: list[list[int]]
) -> tuple[Tensor, Tensor, int]:
    """From [N, V] in float64, with the mask written out: log-probs, entropies, labels outside."""
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    mine = (logits / temperature)[predictor]
    allowed, outside = torch.ones_like(mine, dtype=torch.bool), 0
    for i, label in enumerate(target.tolist()):
        if label in rows[i]:
            allowed[i] = False
            allowed[i, rows[i]] = True
        outside += bool(rows[i]) and label not in rows[i]
    probs = torch.softmax(mine, 1)
    logprobs = mine.masked_fill(~allowed, -torch.inf).log_softmax(1).gather(1, target[:, None])[:, 0]
    return logprobs, -(probs * probs.log()).sum(1), outside


def problem(vocabulary: int, places: int, width: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, bias in float64; predictor (some places predict several targets) and target."""
    torch.manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, dtype=torch.float64) for shape in ((places, width), (vocabulary, width), (vocabulary,))
    )
    predictor = torch.cat([torch.randperm(places), torch.tensor([3, 0, 3, 3])])
    target = torch.randint(vocabulary, (len(predictor),))
    target[-4:] = torch.tensor([vocabulary - 1, 1, 0, 0])
    return hidden, weight, bias, predictor, target


def masks(target: Tensor, vocabulary: int) -> list[list[int]]:
    """A third of the rows empty; labels inside and outside; a row with the label alone; one with the whole vocabulary."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for i, label in enumerate(target.tolist()):
        some = set(torch.randint(vocabulary, (i % 9,), generator=generator).tolist())
        rows.append([] if i % 3 == 0 else sorted(some | {label}) if i % 5 else sorted(some - {label}))
    rows[1], rows[2] = [int(target[1])], list(range(vocabulary))
    return rows


@pytest.mark.parametrize("temperature", few([1.0, 0.6], keep=1))
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("biased", few([False, True], keep=1))
@pytest.mark.parametrize("masked", [False, True])
def test_log_probs_entropies_and_gradients_equal_full_logits(temperature, softcap, biased, masked):
    vocabulary, places = 3000, 600
    assert len(_blocks(places, vocabulary, torch.arange(vocabulary))) == 2
    hidden, weight, bias, predictor, target = problem(vocabulary, places)
    rows = masks(target, vocabulary) if masked else [[] for _ in target]
    inputs = [hidden.requires_grad_(), weight.requires_grad_(), *([bias.requires_grad_()] if biased else [])]
    coefficients, others = torch.randn(2, len(predictor), dtype=torch.float64)
    logits = hidden @ weight.T + (bias if biased else 0)
    logprobs, entropies, outside = by_hand(logits, predictor, target, temperature, softcap, rows)
    expected = torch.autograd.grad((logprobs * coefficients).sum(), inputs, retain_graph=True)
    with_entropy = torch.autograd.grad((logprobs * coefficients + entropies * others).sum(), inputs, retain_graph=True)
    alone = torch.autograd.grad((entropies * others).sum(), inputs)

    low = [x.detach().float().requires_grad_() for x in inputs]
    kept = csr(rows) if masked else None
    head = token_logprobs(
        low[0],
        low[1],
        low[2] if biased else None,
        predictor,
        target,
        temperature=temperature,
        dtype=torch.float32,
        kept=kept,
        softcap=softcap,
    )
    torch.testing.assert_close(head.logprob, logprobs.float(), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(head.entropy, entropies.float(), atol=2e-5, rtol=1e-5)
    assert head.outside == outside and (outside > 20) == masked
    for loss, reference in (
        (head.logprob * coefficients, expected),
        (head.logprob * coefficients + head.entropy * others, with_entropy),
        (head.entropy * others, alone),
    ):
        for actual, one in zip(torch.autograd.grad(loss.sum(), low, retain_graph=True), reference, strict=True):
            torch.testing.assert_close(actual, one.float(), atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("masked", [False, True])
def test_a_models_own_logits_give_the_same(masked):
    hidden, weight, _, predictor, target = problem(500, 30)
    rows = masks(target, 500) if masked else [[] for _ in target]
    logits = (hidden @ weight.T).requires_grad_()
    logprobs, entropies, outside = by_hand(logits, predictor, target, 0.7, 0.0, rows)
    head = dense_logprobs(logits, predictor, target, csr(rows) if masked else None, 0.7)
    torch.testing.assert_close(head.logprob, logprobs.float(), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(head.entropy.double(), entropies, atol=2e-5, rtol=1e-5)
    assert head.outside == outside
    (expected,) = torch.autograd.grad(logprobs.sum() + 3 * entropies.sum(), logits)
    (actual,) = torch.autograd.grad(head.logprob.sum() + 3 * head.entropy.sum(), logits)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 19), st.sets(st.integers(0, 19))), max_size=12))
def test_any_mask(rows):
    """(place, label, kept): the kept probabilities sum to one whenever the label is among them."""
    hidden, weight, *_ = (x.float() for x in problem(20, 6))
    predictor, target = (torch.tensor([row[i] for row in rows], dtype=torch.int64) for i in range(2))
    kept = [sorted(row[2]) for row in rows]
    head = token_logprobs(hidden, weight, None, predictor, target, temperature=1.0, dtype=torch.float32, kept=csr(kept))
    assert len(head.logprob) == len(rows)
    logits = (hidden @ weight.T).double()
    for i, (place, label, mine) in enumerate(rows):
        among = logits[place, sorted(mine)] if label in mine else logits[place]
        assert float(head.logprob[i]) == pytest.approx(float(logits[place, label] - among.logsumexp(0)), abs=1e-5)
    assert head.outside == sum(bool(mine) and label not in mine for _, label, mine in rows)


def test_a_mask_leaves_gradient_at_kept_ids_only():
    hidden, weight, _, _, _ = problem(50, 6)
    weight = weight.float().requires_grad_()
    head = token_logprobs(
        hidden.float(),
        weight,
        None,
        torch.tensor([2]),
        torch.tensor([7]),
        temperature=1.0,
        dtype=torch.float32,
        kept=csr([[3, 7, 40]]),
    )
    head.logprob.sum().backward()
    assert weight.grad is not None and weight.grad.abs().sum(1).nonzero()[:, 0].tolist() == [3, 7, 40]


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[1000.0], [-1000.0]], requires_grad=True)
    weight = torch.linspace(-1, 1, 11)[:, None]
    places, labels = torch.tensor([0, 1, 0]), torch.tensor([10, 0, 0])
    head = token_logprobs(
        hidden, weight, None, places, labels, temperature=1.0, dtype=torch.float32, kept=csr([[9, 10], [], [0, 1]])
    )
    assert head.logprob.tolist() == [0, 0, pytest.approx(-200)]
    assert head.entropy.tolist() == [0, 0, 0]
    (head.logprob.sum() + head.entropy.sum()).backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()


def test_no_loss_token_is_a_gradient_of_zero():
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(10, 4, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    head = token_logprobs(hidden, weight, None, none, none, temperature=1.0, dtype=torch.float32)
    head.logprob.sum().backward()
    for one in (hidden, weight):
        assert one.grad is not None and not one.grad.any()


def test_a_frozen_head_gets_no_gradient_and_changes_nothing_else():
    hidden, weight, _, predictor, target = problem(100, 6)
    grads = []
    for frozen in (False, True):
        low = hidden.float().requires_grad_()
        matrix = weight.float().requires_grad_(not frozen)
        token_logprobs(
            low, matrix, None, predictor, target, temperature=1.0, dtype=torch.float32
        ).logprob.sum().backward()
        assert (matrix.grad is None) == frozen
        grads.append(low.grad)
    assert torch.equal(*grads)


class Largest(TorchDispatchMode):
    """Sees every tensor that any operation makes, backward included."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors(out):
            self.elements = max(self.elements, tensor.numel())
        return out


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors(one)


def scored(vocabulary: int, places: int, masked: bool, chunked: bool) -> int:
    """Elements of the largest tensor in a pass forward and back."""
    hidden, weight, _, predictor, target = (
        x.float() if x.is_floating_point() else x for x in problem(vocabulary, places)
    )
    hidden.requires_grad_()
    kept = csr([[int(label)] for label in target]) if masked else None
    with Largest() as largest:
        head: Head
        if chunked:
            head = token_logprobs(
                hidden, weight, None, predictor, target, temperature=0.8, dtype=torch.float32, kept=kept, softcap=30.0
            )
        else:
            head = dense_logprobs(hidden @ weight.T, predictor, target, kept, 0.8)
        head.logprob.sum().backward()
    return largest.elements


@pytest.mark.parametrize("masked", [False, True])
def test_all_logits_at_once_never_exist(masked):
    vocabulary, places = 40_000, 100
    assert scored(vocabulary, places, masked, chunked=True) <= BLOCK_ELEMENTS["cpu"] < vocabulary * places / 3
    assert scored(vocabulary, places, masked, chunked=False) >= vocabulary * places  # the same eyes see it where it is
