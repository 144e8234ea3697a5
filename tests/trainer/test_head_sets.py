"""The head among sets that constraints left: against full logits in float64."""

from __future__ import annotations

import pytest
import torch
from test_head import by_hand, csr, problem

from headrace.trainer.forward.head import dense_logprobs, token_logprobs
from headrace.trainer.packing import Kept
from support.few import few


def languages(target: torch.Tensor, vocabulary: int) -> tuple[Kept, list[list[int]]]:
    """Places with a set (of one token, of half of them, of all but one), with a row of ids, and with everything; the allowed ids of each."""
    generator = torch.Generator().manual_seed(3)
    tables = [torch.rand(vocabulary, generator=generator) < share for share in (0.5, 0.001, 0.9999)]
    tables.append(torch.zeros(vocabulary, dtype=torch.bool))
    tables[3][int(target[4])] = True
    rows, allowed, which = [], [], []
    for place, label in enumerate(target.tolist()):
        kind = place % 5 if place != 4 else 3
        rows.append([label] if kind == 4 else [])
        which.append(kind if kind < 4 else -1)
        allowed.append(tables[kind].nonzero()[:, 0].tolist() if kind < 4 else rows[-1])
    bits = torch.zeros(4, -(-vocabulary // 8) * 8, dtype=torch.uint8)
    for row, table in zip(bits, tables, strict=True):
        row[:vocabulary] = table
    packed = (bits.view(4, -1, 8) << torch.arange(8, dtype=torch.uint8)).sum(-1).to(torch.uint8)
    plain = csr(rows)
    return Kept(plain.ids, plain.offsets, packed, torch.tensor(which)), allowed


@pytest.mark.parametrize("temperature", few([1.0, 0.6], keep=1))
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("biased", [False, True])
def test_log_probs_entropies_and_gradients_equal_full_logits(temperature, softcap, biased):
    vocabulary, places = 3001, 600
    hidden, weight, bias, predictor, target = problem(vocabulary, places)
    kept, allowed = languages(target, vocabulary)
    inputs = [hidden.requires_grad_(), weight.requires_grad_(), *([bias.requires_grad_()] if biased else [])]
    coefficients, others = torch.randn(2, len(predictor), dtype=torch.float64)
    logits = hidden @ weight.T + (bias if biased else 0)
    logprobs, entropies, outside = by_hand(logits, predictor, target, temperature, softcap, allowed)
    expected = torch.autograd.grad((logprobs * coefficients + entropies * others).sum(), inputs)
    assert outside > 50
    head = token_logprobs(
        hidden,
        weight,
        bias if biased else None,
        predictor,
        target,
        temperature=temperature,
        dtype=torch.float64,
        kept=kept,
        softcap=softcap,
    )
    assert head.outside == outside
    assert torch.allclose(head.logprob.double(), logprobs, atol=1e-4)
    assert torch.allclose(head.entropy.double(), entropies, atol=1e-4)
    found = torch.autograd.grad((head.logprob * coefficients + head.entropy * others).sum(), inputs)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-4 * float(other.abs().max()))


def test_logits_that_a_model_has_made_equal_the_chunked_head():
    hidden, weight, _, predictor, target = problem(3001, 40)
    kept, allowed = languages(target, 3001)
    logits = hidden @ weight.T
    head = dense_logprobs(logits, predictor, target, kept, 0.7)
    logprobs, entropies, outside = by_hand(logits, predictor, target, 0.7, 0.0, allowed)
    assert head.outside == outside
    assert torch.allclose(head.logprob.double(), logprobs, atol=1e-5)
    assert torch.allclose(head.entropy.double(), entropies, atol=1e-5)


def test_parts_and_choices_of_places_keep_their_sets():
    target = torch.arange(12)
    kept, _ = languages(target, 64)
    assert kept.rows(3, 9).set_of.tolist() == kept.set_of[3:9].tolist()
    assert kept.chosen(torch.tensor([8, 2])).set_of.tolist() == kept.set_of[[8, 2]].tolist()
    assert kept.padded(2).set_of.tolist() == [*kept.set_of.tolist(), -1, -1]
    assert kept.to(torch.device("cpu")).sets is not None
