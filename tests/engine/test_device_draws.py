"""Draws as a device makes them, on tensors of the CPU: the kept sets and the tokens are those of the sampler, whatever the number of candidates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.native.draws import DrawDetails, Drawn, Settings
from headrace.engine.native.sampler import PendingDraw, sample
from support.sampling import random_logits, same


def wanted(rows: int, left: np.ndarray | None = None) -> DrawDetails:
    return DrawDetails(masks=np.arange(rows) % 3 != 2, tops=np.zeros(rows, np.int64), left=left)


def as_on_a_device(logits: torch.Tensor, asked: Settings, candidates: int, left: np.ndarray | None = None) -> Drawn:
    pending = PendingDraw(logits, asked, wanted(len(logits), left), candidates)
    drawn, told = pending.result()
    if told:
        assert pending.tokens.tolist() == drawn.tokens.tolist()
    return drawn


def check(found: Drawn, expected: Drawn) -> None:
    good = expected.finite
    assert (found.finite == good).all()
    assert found.tokens[good].tolist() == expected.tokens[good].tolist()
    np.testing.assert_allclose(found.logprobs[good], expected.logprobs[good], rtol=0, atol=1e-12)
    assert found.mask is not None and expected.mask is not None
    assert found.mask.offsets.tolist() == expected.mask.offsets.tolist()
    assert found.mask.token_ids.tolist() == expected.mask.token_ids.tolist()
    assert found.mask.token_ids.dtype == np.int32 and found.mask.offsets.dtype == np.int64


@settings(max_examples=200)
@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.sampled_from([2, 7, 64, 257, 900, 5000]),
    columns=st.lists(
        st.tuples(
            st.sampled_from([0.0, 1.0, 0.6, 2.5]),
            st.one_of(st.just(0), st.integers(0, 40), st.integers(0, 1000)),
            st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
            st.sampled_from([0.0, 1e-4, 0.02, 0.3, 1.0]),
        ),
        min_size=1,
        max_size=6,
    ),
    spread=st.sampled_from([0.01, 0.5, 2.0, 8.0]),
    rounded=st.booleans(),
    forbidden=st.booleans(),
    candidates=st.sampled_from([1, 8, 100, 10_000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_kept_sets_and_tokens_are_those_of_the_sampler(
    seed, vocabulary, columns, spread, rounded, forbidden, candidates, dtype
):
    rows = len(columns)
    logits = random_logits(rows, vocabulary, seed, spread)
    if rounded:  # many ties, as bfloat16 logits have
        logits = (logits * 4 / spread).round() * spread / 4
    if forbidden:
        logits[:, seed % 3 :: 3] = -torch.inf
        logits[:, seed % vocabulary] = 0.0
    logits = logits.to(dtype)
    temperature, top_k, top_p, min_p = (np.array(column) for column in zip(*columns, strict=True))
    asked = same(
        rows, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=np.arange(rows) + seed, counter=seed
    )
    left = np.where(np.arange(rows) % 2, vocabulary, max(1, vocabulary // 3))
    expected = sample(logits.clone(), asked, wanted(rows).masks, left=left)
    check(as_on_a_device(logits, asked, candidates, left), expected)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_told_and_hurts_nobody(poison):
    logits = random_logits(4, 900)
    logits[1] = poison
    logits[2, 7] = np.nan
    asked = same(4, top_p=[0.9, 0.9, 1.0, 0.9], top_k=[0, 5, 0, 5], seed=np.arange(4))
    expected = sample(logits.clone(), asked, wanted(4).masks)
    assert expected.finite.tolist() == [True, False, False, True]
    check(as_on_a_device(logits, asked, 64), expected)


def test_a_row_that_keeps_more_than_was_looked_at_is_drawn_again_and_says_so():
    logits = random_logits(3, 5000, spread=0.01)
    asked = same(3, top_p=[0.9, 1.0, 1.0], top_k=[0, 0, 3], seed=np.arange(3))
    pending = PendingDraw(logits, asked, wanted(3), candidates=100)
    drawn, told = pending.result()
    assert not told
    check(drawn, sample(logits, asked, wanted(3).masks))
    assert drawn.mask is not None and drawn.mask.offsets[1] > 4000


def test_a_row_has_the_same_bits_in_any_batch():
    logits = random_logits(6, 3000)
    asked = same(6, temperature=0.8, top_p=0.9, top_k=[0, 5, 0, 50, 0, 7], min_p=0.001, seed=np.arange(6))
    together = as_on_a_device(logits, asked, 256)
    for row in range(6):
        alone = as_on_a_device(
            logits[row : row + 1],
            same(1, temperature=0.8, top_p=0.9, top_k=asked.top_k[row], min_p=0.001, seed=row),
            256,
        )
        assert (alone.tokens[0], alone.logprobs[0]) == (together.tokens[row], together.logprobs[row])


def test_top_p_is_a_share_of_all_that_tie_with_the_last_of_top_k():
    """Of 501 tokens that top-k 3 keeps, the first alone has less than half of the probability; of the first eight it has nearly all."""
    logits = torch.full((1, 900), -9.0)
    logits[0, 1:501], logits[0, 700] = 0.0, 5.0
    asked = same(1, top_k=3, top_p=0.5)
    drawn = as_on_a_device(logits, asked, 8)
    assert drawn.mask is not None and len(drawn.mask.token_ids) == 501
    check(drawn, sample(logits, asked, wanted(1).masks))
