"""Packs: what is forwarded, where logits are taken, and that no tree, split or rank loses or repeats anything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.algo.objective import seq_mean_token_mean, token_mean
from headrace.core.batches import Batch, Group, Row
from headrace.core.types import Prompt, RoutingTrace, SamplingMask, TeacherTrace, TopLogprobs
from headrace.trainer.dealing.row_paths import picked_rows
from headrace.trainer.packing import (
    ROOT,
    Kept,
    Pack,
    PickedNumbers,
    Segment,
    StepPlan,
    StepRows,
    pack_rows,
    pack_sequence,
    split_ranks,
)

NAN, INF = math.nan, math.inf


def row(
    prompt: tuple[int, ...],
    tokens: tuple[int, ...],
    mask: str = "",
    logprobs: tuple[float, ...] = (),
    versions: tuple[int, ...] = (),
    routes: list[int] | None = None,
    kept: list[list[int]] | None = None,
    teacher: TeacherTrace | None = None,
) -> Row:
    """`mask` as in "110"; everything trains by default. `routes`: one layer, one expert a position."""
    count = len(tokens)
    return Row(
        prompt,
        tokens,
        logprobs or tuple(-0.5 * t for t in tokens),
        (float(count),) * count,
        tuple(c == "1" for c in mask or "1" * count),
        versions or (0,) * count,
        None if kept is None else sampling_mask(kept),
        None if routes is None else RoutingTrace(1, 1, 1, bytes(routes)),
        teacher,
    )


def sampling_mask(kept: list[list[int]]) -> SamplingMask:
    offsets = np.cumsum([0, *map(len, kept)]).astype(np.int64)
    return SamplingMask(np.array([i for ids in kept for i in ids], np.int32).tobytes(), offsets.tobytes())


def plan_of(rows: list[Row], budget: int = 1000, *, least_saved: int = 1, **options: Any) -> StepPlan:
    return pack_rows(StepRows(rows, token_mean, constant=0, budget=budget, step=5, **options), least_saved=least_saved)


def only(rows: list[Row], budget: int = 1000, **options: object) -> Pack:
    (pack,) = plan_of(rows, budget, **options).packs
    return pack


# -- trees ------------------------------------------------------------------------------------------------------------------


def test_the_pack_of_the_module_docstring():
    pack = only([row((1, 2, 3), (4, 5, 6)), row((1, 2, 3), (7, 8))])
    assert pack.tokens.tolist() == [1, 2, 3, 4, 5, 7]
    assert pack.positions.tolist() == [0, 1, 2, 3, 4, 3]
    assert pack.segments == (Segment(0, 3, ROOT), Segment(3, 2, 0), Segment(5, 1, 0))
    assert pack.predictor.tolist() == [2, 3, 4, 2, 5]
    assert pack.target.tolist() == [4, 5, 6, 7, 8]
    assert pack.sampled.tolist() == [-2, -2.5, -3, -3.5, -4]
    assert pack.advantage.tolist() == [3, 3, 3, 2, 2]
    assert pack.sequence.tolist() == [0, 0, 0, 1, 1]
    torch.testing.assert_close(pack.weight, torch.full((5,), 0.2))
    assert (pack.kept, pack.routing, pack.teacher, pack.top_ids, pack.top_logprobs) == (None,) * 5


def test_masked_and_non_finite_tokens_are_context_without_weight():
    plan = plan_of([row((1,), (2, 3, 4, 5, 6), "10110", (-1, -1, NAN, -1, -INF))])
    (pack,) = plan.packs
    assert pack.tokens.tolist() == [1, 2, 3, 4]  # 5 is predicted from 4; 5 and 6 predict nothing that counts
    assert pack.target.tolist() == [2, 5] and pack.predictor.tolist() == [0, 3]
    assert plan.dropped_tokens == 1  # 4; the log-prob of 6 is not looked at, it is masked
    torch.testing.assert_close(pack.weight, torch.full((2,), 0.5))


def test_a_row_without_loss_tokens_is_in_no_pack_and_no_denominator():
    plan = pack_rows(
        StepRows(
            [row((1,), (2, 3)), row((1,), (4, 5), "00"), row((1,), ())],
            seq_mean_token_mean,
            constant=0,
            budget=100,
            step=0,
        )
    )
    assert [pack.tokens.tolist() for pack in plan.packs] == [[1, 2]]
    torch.testing.assert_close(plan.packs[0].weight, torch.full((2,), 0.5))
    assert plan_of([row((1,), (4, 5), "00")]).packs == ()


def test_turns_of_an_episode_are_forwarded_once():
    """Turn 1 is in the loss of the first row alone and context of the other two, which fork behind the tool's answer 8 8."""
    rows = [
        row((1, 2), (5, 6), "11"),
        row((1, 2), (5, 6, 8, 8, 7, 9), "000011"),
        row((1, 2), (5, 6, 8, 8, 3, 4, 9), "0000111"),
    ]
    pack = only(rows)
    assert pack.tokens.tolist() == [1, 2, 5, 6, 8, 8, 7, 3, 4]
    assert pack.segments == (Segment(0, 3), Segment(3, 3, 0), Segment(6, 1, 1), Segment(7, 2, 1))
    assert pack.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 6, 7]
    assert pack.predictor.tolist() == [1, 2, 5, 6, 5, 7, 8]
    assert pack.target.tolist() == [5, 6, 7, 9, 3, 4, 9]
    assert pack.sequence.tolist() == [0, 0, 1, 1, 2, 2, 2]


def test_identical_completions_are_forwarded_once_and_predicted_as_often_as_they_come():
    pack = only([row((1, 2), (3, 4))] * 3)
    assert pack.tokens.tolist() == [1, 2, 3] and pack.segments == (Segment(0, 3),)
    assert pack.predictor.tolist() == [1, 2] * 3 and pack.target.tolist() == [3, 4] * 3


def test_different_prompts_share_the_template_before_them():
    pack = only([row((9, 9, 9, 1), (2, 3)), row((9, 9, 9, 4), (2, 3))])
    assert pack.tokens.tolist() == [9, 9, 9, 1, 2, 4, 2]
    assert pack.segments == (Segment(0, 3), Segment(3, 2, 0), Segment(5, 2, 0))


@pytest.mark.parametrize(("least", "forwarded"), [(4, 8), (5, 12)])
def test_completions_that_share_little_go_apart(least, forwarded):
    """Three of four completions share two tokens: a split saves four of them."""
    rows = [*(row((1, 2), (7, 7, i, 0)) for i in (3, 4, 5)), row((1, 2), (8, 0))]
    assert len(only(rows, least_saved=least).tokens) == forwarded


def test_a_short_prompt_is_shared_all_the_same():
    assert len(only([row((1,), (2, 3)), row((1,), (4, 5))], least_saved=100).tokens) == 3


def test_a_row_that_ends_where_others_go_on():
    pack = only([row((1,), (2, 3, 4, 5, 6)), row((1,), (2, 3, 4)), row((1,), (2, 3, 4))])
    assert pack.tokens.tolist() == [1, 2, 3, 4, 5] and pack.segments == (Segment(0, 3), Segment(3, 2, 0))
    assert Counter(pack.predictor.tolist()) == {0: 3, 1: 3, 2: 3, 3: 1, 4: 1}


def test_rows_apart_when_nothing_is_shared():
    rows = [row((1, 2, 3), (4, 5, 6)), row((1, 2, 3), (7, 8))]
    pack = only(rows, share=False)
    assert pack.segments == (Segment(0, 5), Segment(5, 4))
    assert pack.tokens.tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 7] and pack.target.tolist() == [4, 5, 6, 7, 8]


@pytest.mark.slow
def test_very_deep_trees():
    """An episode that forks at every one of 1,050 turns: more than Python may recurse."""
    trunk = tuple(range(10, 1060))
    rows = [row((1,), (*trunk[:depth], 2, 3), "0" * depth + "11") for depth in range(1050)]
    assert len(only(rows, 10_000).tokens) == 1 + 1049 + 1050
    assert max(len(pack.tokens) for pack in plan_of(rows, 2000).packs) <= 2000


# -- budgets ----------------------------------------------------------------------------------------------------------------


def test_a_tree_above_the_budget_repeats_its_prompt():
    rows = [row((1, 2), (i, 4, 3)) for i in range(10, 14)]  # prompt 2, two forwarded tokens a row
    assert [len(pack.tokens) for pack in plan_of(rows, 6).packs] == [6, 6]
    assert [len(pack.tokens) for pack in plan_of(rows, 10).packs] == [10]


def test_a_tree_is_cut_where_least_is_repeated():
    """Two groups behind a template of two tokens: each fits with it, both do not."""
    rows = [row((8, 8, group, group, group), (i, 0)) for group in (1, 2) for i in range(10, 13)]
    packs = plan_of(rows, 10).packs
    assert [len(pack.tokens) for pack in packs] == [8, 8]
    assert [sorted(set(pack.tokens.tolist()))[0] for pack in packs] == [1, 2]


def test_a_row_above_the_budget_is_not_lost():
    plan = plan_of([row((1, 2, 3), (4, 5, 6)), row((9,), (8,))], 2)
    assert sorted(len(pack.tokens) for pack in plan.packs) == [1, 5]


def test_a_sequence_is_scored_from_its_second_token():
    pack = pack_sequence([5, 6, 7])
    assert pack.tokens.tolist() == [5, 6] and pack.predictor.tolist() == [0, 1] and pack.target.tolist() == [6, 7]


# -- what rows carry --------------------------------------------------------------------------------------------------------


def test_lag_and_swapped():
    rows = [row((1,), (2, 3, 4), versions=(3, 3, 5)), row((1,), (5, 6, 7), "101", versions=(4, 2, 4))]
    pack = only(rows)
    assert pack.lag.tolist() == [2, 2, 0, 1, 1]
    assert pack.apart.tolist() == [1] * 3 + [0] * 2  # 6 was not sampled: its version is nobody's


def test_masks_of_loss_tokens():
    rows = [
        row((1,), (2, 3, 4), "101", kept=[[2, 9], [3], [4, 5, 6]]),
        row((7,), (8,)),
        row((7,), (8, 8), kept=[[], [1, 8]]),
    ]
    kept = only(rows).kept
    assert kept is not None
    assert kept.ids.tolist() == [2, 9, 4, 5, 6, 1, 8] and kept.offsets.tolist() == [0, 2, 5, 5, 5, 7]
    middle = kept.rows(1, 4)
    assert middle.ids.tolist() == [4, 5, 6] and middle.offsets.tolist() == [0, 3, 3, 3]
    assert kept.padded(2).offsets.tolist() == [0, 2, 5, 5, 5, 7, 7, 7]
    assert only([row((7,), (8, 8), kept=[[], []])]).kept is None


def test_teachers_of_loss_tokens():
    ids = np.array([[2, 9], [3, 1], [4, 0]], np.int32).tobytes()
    logprobs = np.array([[-0.1, -3], [-0.2, -2], [-0.3, -INF]], np.float32).tobytes()
    taught = TeacherTrace("big", (0,) * 3, (-0.5, NAN, -0.7), TopLogprobs(2, ids, logprobs))
    brief = TeacherTrace("big", (0,), (-0.9,), TopLogprobs(1, ids[:4], logprobs[:4]))
    rows = [row((1,), (2, 3, 4), "011", teacher=taught), row((7,), (8,), teacher=brief), row((6,), (5,))]
    pack = only(rows)
    assert pack.teacher is not None and pack.top_ids is not None and pack.top_logprobs is not None
    torch.testing.assert_close(pack.teacher, torch.tensor([NAN, -0.7, -0.9, NAN]), equal_nan=True)
    assert pack.top_ids.tolist() == [[3, 1], [4, 0], [2, 0], [0, 0]]
    expected = torch.tensor([[-0.2, -2], [-0.3, -INF], [-0.1, -INF], [-INF, -INF]])
    torch.testing.assert_close(pack.top_logprobs, expected)


def test_routes_decide_what_is_shared():
    first = row((1, 2), (5, 6, 7), routes=[0, 1, 2, 3])
    assert only([first, row((1, 2), (5, 6, 8), routes=[0, 1, 2, 3])]).tokens.tolist() == [1, 2, 5, 6]
    pack = only([first, row((1, 2), (5, 6, 8), routes=[0, 1, 2, 4])])  # 6 went elsewhere
    assert pack.tokens.tolist() == [1, 2, 5, 6, 6] and pack.routing is not None
    assert pack.routing.flatten().tolist() == [0, 1, 2, 3, 4]
    pack = only([first, row((1, 2), (5, 6, 8), routes=[0, 1, 2])])  # 6 was not recorded
    assert pack.tokens.tolist() == [1, 2, 5, 6, 6] and pack.routing is not None
    assert pack.routing.flatten().tolist() == [0, 1, 2, 3, -1]


def test_in_prompts_the_first_route_stays_and_conflicts_are_counted():
    rows = [
        row((1, 2), (5, 6), routes=[9]),
        row((1, 2), (7, 8), routes=[0, 1, 2]),
        row((1, 2), (7, 7), routes=[3, 1, 2]),
    ]
    plan = plan_of(rows)
    (pack,) = plan.packs
    assert pack.tokens.tolist() == [1, 2, 5, 7] and pack.routing is not None
    assert pack.routing.tolist() == [[[9]], [[1]], [[-1]], [[2]]]  # what the first row lacks, the second one tells
    assert plan.routing_conflicts == 2
    assert plan_of(rows, share=False).routing_conflicts == 0


def test_wide_experts_and_several_layers():
    experts = np.arange(12, dtype=np.uint16).reshape(2, 3, 2) + 300
    one = row((1,), (2, 3, 4))
    one = Row(
        *(getattr(one, name) for name in one.__struct_fields__[:6]), routing=RoutingTrace(3, 2, 2, experts.tobytes())
    )
    routing = only([one]).routing
    assert routing is not None and routing.dtype == torch.int16
    assert routing[:2].tolist() == experts.tolist() and (routing[2:] == -1).all() and routing.shape == (3, 3, 2)


def test_a_pack_moves_with_all_that_it_holds():
    rows = [row((1,), (2, 3), kept=[[2], []], routes=[0, 1], teacher=TeacherTrace("t", (0, 0), (-1.0, -1.0)))]
    moved = only(rows).to(torch.device("meta"))
    assert moved.kept is not None and moved.kept.ids.is_meta and moved.segments == (Segment(0, 2),)
    there = [getattr(moved, f.name) for f in fields(moved)]
    assert all(x.is_meta for x in there if isinstance(x, torch.Tensor))
    assert moved.top_ids is None and moved.routing is not None


# -- properties -------------------------------------------------------------------------------------------------------------


@st.composite
def rows_strategy(draw: st.DrawFn) -> list[Row]:
    """Few different tokens, so that rows begin alike; with masks, holes, versions, sampling masks and teachers."""
    rows = []
    for _ in range(draw(st.integers(0, 8))):
        length = draw(st.integers(0, 7))
        token = st.sampled_from(draw(st.sampled_from([(0, 1), tuple(range(50))])))
        tokens = tuple(draw(st.lists(token, min_size=length, max_size=length)))
        bits = draw(st.lists(st.sampled_from("110"), min_size=length, max_size=length))
        logprobs = draw(st.lists(st.sampled_from([-0.5, -1.0, NAN]), min_size=length, max_size=length))
        versions = sorted(draw(st.lists(st.integers(0, 5), min_size=length, max_size=length)))
        prompt = draw(st.sampled_from([(1,), (1, 0), (1, 0, 1), (3, 4, 5, 6)]))
        kept = draw(st.none() | st.lists(st.lists(st.integers(0, 50), max_size=3), min_size=length, max_size=length))
        teacher = TeacherTrace("t", (0,) * length, tuple(float(t) for t in tokens)) if draw(st.booleans()) else None
        rows.append(
            row(prompt, tokens, "".join(bits), tuple(logprobs), tuple(versions), kept=kept, teacher=teacher)
            if length
            else row(prompt, ())
        )
    return rows


def path_of(pack: Pack, place: int) -> list[int]:
    """Places of all that a token sees, itself the last."""
    number = next(i for i, s in enumerate(pack.segments) if s.start <= place < s.end)
    seen = list(range(pack.segments[number].start, place + 1))
    while (number := pack.segments[number].parent) != ROOT:
        above = pack.segments[number]
        seen = [*range(above.start, above.end), *seen]
    return seen


Token = tuple[tuple[int, ...], int, float, float, float, bool, tuple[int, ...], str]
"""Context, token, sampled, advantage, lag, swapped, kept, teacher."""


def expected_tokens(one: Row) -> tuple[Token, ...]:
    sampled = {v for v, m in zip(one.versions, one.mask, strict=True) if m}
    found = []
    for i, token in enumerate(one.tokens):
        if one.mask[i] and math.isfinite(one.logprobs[i]):
            kept: tuple[int, ...] = ()
            if one.sampling_mask is not None:
                offsets = np.frombuffer(one.sampling_mask.offsets, np.int64)
                kept = tuple(np.frombuffer(one.sampling_mask.token_ids, np.int32)[offsets[i] : offsets[i + 1]].tolist())
            teacher = "nan" if one.teacher is None else str(one.teacher.logprobs[i])
            lag = float(5 - one.versions[i])
            numbers = (one.logprobs[i], one.advantages[i], lag, len(sampled) > 1, kept, teacher)
            found.append(((*one.prompt, *one.tokens[:i]), token, *numbers))
    return tuple(found)


def packed_tokens(pack: Pack) -> Iterator[tuple[Token, ...]]:
    """Row after row."""
    sequences = pack.sequence.tolist()
    assert sequences == sorted(sequences) and set(sequences) == set(range(max(sequences, default=-1) + 1))
    kept = pack.kept or Kept(torch.empty(0, dtype=torch.int64), torch.zeros(len(sequences) + 1, dtype=torch.int64))
    for sequence in sorted(set(sequences)):
        found = []
        for i in (pack.sequence == sequence).nonzero()[:, 0].tolist():
            seen = path_of(pack, int(pack.predictor[i]))
            assert pack.positions[seen].tolist() == list(range(len(seen)))
            numbers = [float(column[i]) for column in (pack.sampled, pack.advantage, pack.lag)]
            teacher = "nan" if pack.teacher is None else str(float(pack.teacher[i]))
            ids = tuple(kept.rows(i, i + 1).ids.tolist())
            found.append(
                (tuple(pack.tokens[seen].tolist()), int(pack.target[i]), *numbers, bool(pack.apart[i]), ids, teacher)
            )
        yield tuple(found)


def check_layout(pack: Pack) -> None:
    """Segments lie one behind the other in preorder, and none is empty."""
    ends = [0, *(s.end for s in pack.segments)]
    assert [s.start for s in pack.segments] == ends[:-1] and ends[-1] == len(pack.tokens)
    chain: list[int] = []
    for number, segment in enumerate(pack.segments):
        assert segment.length
        while chain and chain[-1] != segment.parent:
            chain.pop()
        assert segment.parent == (chain[-1] if chain else ROOT)
        chain.append(number)


@settings(max_examples=100)
@given(rows_strategy(), st.integers(1, 40), st.booleans(), st.integers(1, 8))
def test_every_row_whole_once_with_its_own_context_and_numbers(rows, budget, share, least):
    plan = plan_of(rows, budget, share=share, least_saved=least)
    expected = Counter(tokens for one in rows if (tokens := expected_tokens(one)))
    assert Counter(packed_token for pack in plan.packs for packed_token in packed_tokens(pack)) == expected
    for pack in plan.packs:
        check_layout(pack)
        leaves = set(range(len(pack.segments))) - {segment.parent for segment in pack.segments}
        assert len(pack.tokens) <= budget or len(leaves) == 1
    weights = sum(float(pack.weight.sum()) for pack in plan.packs)
    assert math.isclose(weights, 1 if expected else 0, rel_tol=1e-5)


@settings(max_examples=100)
@given(rows_strategy())
def test_what_is_forwarded_is_the_trie_of_all_rows(rows):
    prefixes = set()
    for one in rows:
        if tokens := expected_tokens(one):
            last = tokens[-1][0]
            prefixes |= {last[: i + 1] for i in range(len(last))}
    assert sum(len(pack.tokens) for pack in plan_of(rows).packs) == len(prefixes)


@settings(max_examples=50)
@given(rows_strategy(), st.integers(1, 40))
def test_packing_is_deterministic(rows, budget):
    first, second = (plan_of(rows, budget) for _ in range(2))
    assert [p.tokens.tolist() for p in first.packs] == [p.tokens.tolist() for p in second.packs]
    assert [p.segments for p in first.packs] == [p.segments for p in second.packs]


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), max_size=9)), max_size=7
    )
)
def test_every_row_gets_the_routes_that_it_recorded(given_rows):
    """But in the prompt, where conflicts are counted. Recorded routes may end early."""
    rows = []
    for prompt, pairs in given_rows:
        tokens = (7,) * prompt + tuple(token for token, _ in pairs)
        rows.append(row(tokens[:prompt], tokens[prompt:], routes=[route for _, route in pairs]))
    plan = plan_of(rows)
    used = Counter(
        (tuple(pack.tokens[path].tolist()), tuple(pack.routing[path].flatten().tolist()))
        for pack in plan.packs
        for last in {int(pack.predictor[pack.sequence == i][-1]) for i in set(pack.sequence.tolist())}
        if (path := path_of(pack, last)) and pack.routing is not None
    )
    for (prompt, pairs), one in zip(given_rows, rows, strict=True):
        if one.tokens:
            tokens = (*one.prompt, *one.tokens[:-1])
            routes = ([route for _, route in pairs] + [-1] * len(tokens))[: len(tokens)]
            assert any(tokens == t and r[prompt:] == tuple(routes[prompt:]) for t, r in used)


# -- ranks ------------------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(rows_strategy(), st.integers(1, 40), st.integers(1, 5))
def test_ranks_have_the_whole_step_between_them_and_equally_many_microbatches(rows, budget, ranks):
    plans = split_ranks(StepRows(rows, token_mean, constant=0, budget=budget, step=5), ranks)
    assert len(plans) == ranks and len({len(plan.packs) for plan in plans}) == 1
    packs = [pack for plan in plans for pack in plan.packs]
    expected = Counter(tokens for one in rows if (tokens := expected_tokens(one)))
    assert Counter(packed_token for pack in packs for packed_token in packed_tokens(pack)) == expected
    weights = sum(float(pack.weight.sum()) for pack in packs)
    assert math.isclose(weights, 1 if expected else 0, rel_tol=1e-5)
    assert (
        sum(plan.dropped_tokens for plan in plans)
        == pack_rows(StepRows(rows, token_mean, constant=0, budget=budget, step=5)).dropped_tokens
    )
    assert all(len(pack.tokens) == 1 for pack in packs if not len(pack.target))
    assert all(
        any(len(pack.target) for pack in together) for together in zip(*(plan.packs for plan in plans), strict=True)
    )


def test_one_rank_does_what_a_device_alone_does():
    rows = [row((1, 2), (i, i, 3)) for i in range(5)] + [row((4,), (5,) * 9)]
    (alone,) = split_ranks(StepRows(rows, token_mean, constant=0, budget=8, step=5), 1)
    expected = pack_rows(StepRows(rows, token_mean, constant=0, budget=8, step=5))
    assert [pack.tokens.tolist() for pack in alone.packs] == [pack.tokens.tolist() for pack in expected.packs]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_have_equally_much_to_do(ranks):
    """Though a template that all prompts share makes one tree of the step."""
    rows = [row((9,) * 20 + (g,) * 10, tuple(range(100 + i, 130 + i + 3 * g))) for g in range(12) for i in range(4)]
    sizes = [
        sum(len(pack.tokens) for pack in plan.packs)
        for plan in split_ranks(StepRows(rows, token_mean, constant=0, budget=10_000, step=5), ranks)
    ]
    assert max(sizes) <= 1.2 * sum(sizes) / ranks
    assert sum(sizes) <= 1.1 * sum(
        len(pack.tokens) for pack in pack_rows(StepRows(rows, token_mean, constant=0, budget=10_000, step=5)).packs
    )


# -- numbers of single tokens ---------------------------------------------------------------------------------------------


def test_numbers_return_to_the_places_of_their_tokens_up_to_a_budget():
    rows = [row((1,), (5, 6, 7), "101"), row((1,), (8,)), row((2,), (9, 9)), row((2,), (4, 4, 4))]
    groups = tuple(Group(30 + i, Prompt("p", "", (1,)), (), tuple(rows[2 * i : 2 * i + 2])) for i in range(2))

    def picked(step: int, most: int) -> list[tuple[int, int, list[float], list[float]]]:
        numbers = PickedNumbers(picked_rows(Batch(step, groups), most))
        for pack in plan_of(rows, budget=4).packs:
            numbers.add(pack, -pack.target.float(), pack.target.float() / 4)
        return [
            (one.ticket, one.row, *(np.frombuffer(data, np.float32).tolist() for data in (one.logprobs, one.entropies)))
            for one in numbers.report()
        ]

    assert picked(1, most=5) == [(31, 0, [-9.0] * 2, [2.25] * 2), (31, 1, [-4.0] * 3, [1.0] * 3)]
    ((*_, logprobs, entropies), second, _, _) = picked(2, most=99)
    np.testing.assert_equal(logprobs, [-5.0, NAN, -7.0])
    np.testing.assert_equal(entropies, [1.25, NAN, 1.75])
    assert second == (30, 1, [-8.0], [2.0])
    assert [one[:2] for one in picked(0, most=1)] == [(30, 0)], "one row, whatever its length"
