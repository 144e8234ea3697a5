"""Packs: what is forwarded, where logits are taken, and that no split loses or repeats anything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.algo.aggregate import seq_mean_token_mean, token_mean
from headrace.packing import ROOT, Pack, Segment, pack_rows, pack_sequence
from headrace.types import Row


def row(prompt: tuple[int, ...], tokens: tuple[int, ...], mask: str = "", logprobs: tuple[float, ...] = ()) -> Row:
    """`mask` as in "110"; everything trains by default."""
    count = len(tokens)
    kept = tuple(c == "1" for c in mask or "1" * count)
    return Row(prompt, tokens, logprobs or tuple(-0.5 * t for t in tokens), (float(count),) * count, kept, (0,) * count)


def test_the_pack_of_the_module_docstring():
    (pack,) = pack_rows([row((1, 2, 3), (4, 5, 6)), row((1, 2, 3), (7, 8))], token_mean, 0, 100, 0).packs
    assert pack.tokens.tolist() == [1, 2, 3, 4, 5, 7]
    assert pack.positions.tolist() == [0, 1, 2, 3, 4, 3]
    assert pack.segments == (Segment(0, 3, ROOT), Segment(3, 2, 0), Segment(5, 1, 0))
    assert pack.predictor.tolist() == [2, 3, 4, 2, 5]
    assert pack.target.tolist() == [4, 5, 6, 7, 8]
    assert pack.sampled.tolist() == [-2, -2.5, -3, -3.5, -4]
    assert pack.advantage.tolist() == [3, 3, 3, 2, 2]
    torch.testing.assert_close(pack.weight, torch.full((5,), 0.2))


def test_masked_and_non_finite_tokens_are_context_without_weight():
    nan, inf = math.nan, math.inf
    plan = pack_rows([row((1,), (2, 3, 4, 5, 6), "10110", (-1, -1, nan, -1, -inf))], token_mean, 0, 100, 0)
    (pack,) = plan.packs
    assert pack.tokens.tolist() == [1, 2, 3, 4]  # 5 is predicted from 4; 5 and 6 predict nothing that counts
    assert pack.target.tolist() == [2, 5] and pack.predictor.tolist() == [0, 3]
    assert plan.dropped_tokens == 1  # 4; the log-prob of 6 is not looked at, it is masked
    torch.testing.assert_close(pack.weight, torch.full((2,), 0.5))


def test_a_row_without_loss_tokens_is_in_no_pack_and_no_denominator():
    plan = pack_rows([row((1,), (2, 3)), row((1,), (4, 5), "00"), row((1,), ())], seq_mean_token_mean, 0, 100, 0)
    assert [pack.tokens.tolist() for pack in plan.packs] == [[1, 2]]
    torch.testing.assert_close(plan.packs[0].weight, torch.full((2,), 0.5))
    assert pack_rows([row((1,), (4, 5), "00")], token_mean, 0, 100, 0).packs == ()


def test_a_tree_above_the_budget_repeats_its_prompt():
    rows = [row((1, 2), (i, 4, 3)) for i in range(10, 14)]  # prompt 2, two forwarded tokens a row
    plan = pack_rows(rows, token_mean, 0, 6, 0)
    assert [len(pack.tokens) for pack in plan.packs] == [6, 6]
    assert [len(pack.tokens) for pack in pack_rows(rows, token_mean, 0, 10, 0).packs] == [10]


def test_a_row_above_the_budget_is_not_lost():
    plan = pack_rows([row((1, 2, 3), (4, 5, 6)), row((9,), (8,))], token_mean, 0, 2, 0)
    assert sorted(len(pack.tokens) for pack in plan.packs) == [1, 5]


def test_rows_apart_when_prompts_are_not_shared():
    rows = [row((1, 2, 3), (4, 5, 6)), row((1, 2, 3), (7, 8))]
    (pack,) = pack_rows(rows, token_mean, 0, 100, 0, share=False).packs
    assert pack.segments == (Segment(0, 5), Segment(5, 4))
    assert pack.tokens.tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 7] and pack.target.tolist() == [4, 5, 6, 7, 8]


def test_a_sequence_is_scored_from_its_second_token():
    pack = pack_sequence([5, 6, 7])
    assert pack.tokens.tolist() == [5, 6] and pack.predictor.tolist() == [0, 1] and pack.target.tolist() == [6, 7]


@st.composite
def rows_strategy(draw: st.DrawFn) -> list[Row]:
    prompts = st.sampled_from([(1,), (1, 2), (3, 4, 5, 6)])
    logprob = st.sampled_from([-0.5, -1.0, math.nan])
    rows = []
    for _ in range(draw(st.integers(0, 8))):
        length = draw(st.integers(0, 6))
        tokens = tuple(draw(st.lists(st.integers(0, 50), min_size=length, max_size=length)))
        mask = "".join(draw(st.lists(st.sampled_from("110"), min_size=length, max_size=length)))
        logprobs = tuple(draw(st.lists(logprob, min_size=length, max_size=length)))
        rows.append(row(draw(prompts), tokens, mask, logprobs))
    return rows


def contexts(pack: Pack) -> Iterator[tuple[tuple[int, ...], int]]:
    """For each loss token: all that its predictor sees, in order of position, and the token."""
    for predictor, target in zip(pack.predictor.tolist(), pack.target.tolist(), strict=True):
        (segment,) = (s for s in pack.segments if s.start <= predictor < s.end)
        seen = list(range(segment.start, predictor + 1))
        while segment.parent != ROOT:
            segment = pack.segments[segment.parent]
            seen = [*range(segment.start, segment.end), *seen]
        assert pack.positions[seen].tolist() == list(range(len(seen)))
        yield tuple(pack.tokens[seen].tolist()), target


@settings(max_examples=200, deadline=None)
@given(rows_strategy(), st.integers(1, 40), st.booleans())
def test_every_loss_token_once_with_its_own_context_and_weight(rows, budget, share):
    plan = pack_rows(rows, token_mean, 0, budget, 0, share)
    expected = Counter(
        ((*r.prompt, *r.tokens[:i]), r.tokens[i])
        for r in rows
        for i in range(len(r.tokens))
        if r.mask[i] and math.isfinite(r.logprobs[i])
    )
    assert Counter(pair for pack in plan.packs for pair in contexts(pack)) == expected
    for pack in plan.packs:
        assert sum(segment.length for segment in pack.segments) == len(pack.tokens)
        families = sum(segment.parent == ROOT for segment in pack.segments)
        assert len(pack.tokens) <= budget or families == 1
        assert all(segment.length for segment in pack.segments)
    weights = sum(float(pack.weight.sum()) for pack in plan.packs)
    assert math.isclose(weights, 1 if expected else 0, rel_tol=1e-5)


@given(rows_strategy(), st.integers(1, 40))
def test_packing_is_deterministic(rows, budget):
    first, second = (pack_rows(rows, token_mean, 0, budget, 0) for _ in range(2))
    assert [p.tokens.tolist() for p in first.packs] == [p.tokens.tolist() for p in second.packs]
