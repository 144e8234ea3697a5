"""A share of a step is sent as raw columns, and the rank that receives it has the microbatches that it would make of the whole step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headrace.algo.objective import AGGREGATIONS
from headrace.algo.training_rows import trajectories_of
from headrace.core.batches import Batch, Group, Row
from headrace.core.sampling_masks import encode_set
from headrace.core.types import Prompt, RoutingTrace, SamplingMask, TeacherTrace, TopLogprobs
from headrace.trainer.dealing.deal import Dealing
from headrace.trainer.dealing.share import PackedShare, RowBlock, ShareHead, dealt_of, received, shares_of
from headrace.trainer.dealing.trees import first_fit
from headrace.trainer.packing import DealtRows, StepPlan, StepRows, pack_rows, plan_of, split_ranks

SETS = tuple(encode_set(np.frombuffer(bytes(bits), np.uint8)) for bits in ([3, 1], [255], [0, 9]))


def some_row(chance: random.Random, template: tuple[int, ...], before: Sequence[Row], routed: int) -> Row:
    """Rows begin alike now and then, have holes, and any of the columns that a row may have. `routed`: bytes of an expert's number, or 0."""
    prompt = template + tuple(chance.randrange(9) for _ in range(chance.randrange(3)))
    tokens = tuple(chance.randrange(9) for _ in range(chance.randrange(25)))
    if before and chance.random() < 0.3:
        tokens = before[-1].tokens[: chance.randrange(20)] + tokens
    count = len(tokens)
    versions = tuple(sorted(chance.randrange(6) for _ in tokens))
    constant = (chance.choice([0.0, -0.0, 1 / 3]),) * count
    k = chance.choice([0, 1, 3])
    places = len(prompt) + count
    return Row(
        prompt,
        tokens,
        tuple(chance.choice([-chance.random(), float("nan")]) for _ in tokens),
        tuple(chance.gauss(0, 1) for _ in tokens) if chance.random() < 0.3 else constant,
        tuple(chance.random() < 0.7 for _ in tokens),
        versions,
        sampling_mask=some_mask(chance, count) if chance.random() < 0.4 else None,
        routing=some_routes(chance, chance.randrange(places + 1), routed) if routed and chance.random() < 0.8 else None,
        teacher=some_teacher(chance, count, k) if chance.random() < 0.4 else None,
        kv_versions=tuple(max(0, v - chance.randrange(2)) for v in versions) if chance.random() < 0.5 else (),
        temperature=chance.choice([0.0, 0.0, 0.7]),
    )


def some_mask(chance: random.Random, count: int) -> SamplingMask:
    kept = [sorted(chance.sample(range(60), chance.randrange(4))) for _ in range(count)]
    set_of = [-1 if ids else chance.randrange(-1, 3) for ids in kept]
    ids = np.array([i for row in kept for i in row], np.int32).tobytes()
    offsets = np.cumsum([0, *map(len, kept)]).astype(np.int64).tobytes()
    return SamplingMask(ids, offsets, SETS, np.array(set_of, np.int32).tobytes())


def some_routes(chance: random.Random, places: int, width: int) -> RoutingTrace:
    experts = np.array([chance.randrange(3) for _ in range(4 * places)], np.uint8 if width == 1 else np.uint16)
    return RoutingTrace(2, 2, width, experts.tobytes())


def some_teacher(chance: random.Random, count: int, k: int) -> TeacherTrace:
    ids = np.array([chance.randrange(60) for _ in range(count * k)], np.int32).tobytes()
    logprobs = np.array([chance.choice([-0.5, -np.inf, np.nan]) for _ in range(count * k)], np.float32).tobytes()
    return TeacherTrace(
        "t", (0,) * count, tuple(chance.choice([-0.3, np.nan]) for _ in range(count)), TopLogprobs(k, ids, logprobs)
    )


def some_batch(chance: random.Random, groups: int) -> Batch:
    template, routed = tuple(chance.randrange(9) for _ in range(chance.randrange(1, 4))), chance.choice([0, 0, 1, 2])
    made = []
    for ticket in range(groups):
        rows: list[Row] = []
        for number in range(chance.randrange(1, 4)):
            row = some_row(chance, template, rows, routed)
            apart = tuple(number + chance.randrange(2) for _ in row.tokens)
            together = len(row.tokens) < 2 or chance.random() < 0.6
            rows.append(msgspec.structs.replace(row, trajectories=(number,) if together else apart))
        pairs = ((0, 1),) if ticket % 2 else ()
        made.append(Group(ticket, Prompt("p", "", (1,)), (), tuple(rows), pairs=pairs))
    return Batch(3, tuple(made), adapter="math", skippable=False, steps=9)


def sent(share: PackedShare, tokens: int) -> tuple[ShareHead, list[RowBlock]]:
    """What arrives, from bytes."""
    head = msgspec.msgpack.decode(msgspec.msgpack.encode(share.head), type=ShareHead)
    return head, [
        msgspec.msgpack.decode(msgspec.msgpack.encode(block), type=RowBlock) for block in share.blocks(tokens)
    ]


def bits(value: Any) -> Any:
    """A plan as values that are equal if and only if all of its bits are."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.numpy().tobytes()
    if is_dataclass(value):
        return [bits(getattr(value, field.name)) for field in fields(value)]
    return [bits(item) for item in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("seed", range(60))
def test_a_rank_makes_of_its_share_what_it_would_make_of_the_whole_step(seed: int) -> None:
    chance = random.Random(seed)
    batch, ranks = some_batch(chance, chance.randrange(7)), chance.choice([1, 2, 3, 5])
    budget, share = chance.choice([1, 8, 40, 1000]), chance.random() < 0.7
    aggregation, own = AGGREGATIONS[chance.choice(sorted(AGGREGATIONS))], trajectories_of(batch.groups)
    whole = StepRows(batch.rows, aggregation, constant=8, budget=budget, step=3, share=share, trajectories=own)
    alone = seed % 5 == 0  # one device, which is no mesh of one rank
    expected = [pack_rows(whole)] if alone else split_ranks(whole, ranks)
    dealing = Dealing(budget=budget, ranks=1 if alone else ranks, by_cost=not alone, share=share)
    shares = shares_of(batch, dealing)
    for plan, packed in zip(expected, shares, strict=True):
        given = received(*sent(packed, chance.choice([1, 30, 10_000])))
        assert (given.head.adapter, given.head.skippable, given.head.steps) == ("math", False, 9)
        made = plan_of(DealtRows(given.minibatches[0], aggregation, constant=8, step=3))
        assert bits(made) == bits(plan)


@pytest.mark.parametrize("seed", range(12))
def test_the_minibatches_of_a_step_are_whole_groups_that_arrive_as_they_were_dealt(seed: int) -> None:
    """Each is what a step of its groups alone would be, but for the weights' denominators, which are its own as well."""
    chance = random.Random(seed)
    batch, ranks, share = some_batch(chance, 6), chance.choice([1, 2, 3]), chance.random() < 0.7
    dealing = Dealing(budget=40, ranks=ranks, share=share, minibatches=3)
    shares = shares_of(batch, dealing)
    everyone = [received(*sent(packed, chance.choice([1, 30, 10_000]))) for packed in shares]
    for given, dealt in zip(everyone, dealt_of(batch, dealing), strict=True):
        for minibatch, made in zip(given.minibatches, dealt, strict=True):
            plans = [
                plan_of(DealtRows(one, AGGREGATIONS["token_mean"], constant=8, step=3)) for one in (minibatch, made)
            ]
            assert bits(plans[0]) == bits(plans[1])
    for number in range(3):
        groups = batch.groups[2 * number : 2 * number + 2]
        alone = split_ranks(_rows_of(groups, share), ranks)
        for given, plan in zip(everyone, alone, strict=True):
            made = plan_of(DealtRows(given.minibatches[number], AGGREGATIONS["token_mean"], constant=8, step=3))
            assert bits([pack.tokens for pack in made.packs]) == bits([pack.tokens for pack in plan.packs])
            assert bits([pack.weight for pack in made.packs]) == bits([pack.weight for pack in plan.packs])
            assert made.split == plan.split
        own = np.frombuffer(everyone[0].head.pairs[number], np.int64)
        assert len(own) == 2 * sum(len(group.pairs) for group in groups)


def _rows_of(groups: Sequence[Group], share: bool) -> StepRows:
    rows = [row for group in groups for row in group.rows]
    more = {"constant": 8, "budget": 40, "step": 3, "share": share, "trajectories": trajectories_of(groups)}
    return StepRows(rows, AGGREGATIONS["token_mean"], **more)


def test_a_rank_is_sent_its_own_rows_and_the_beginnings_that_it_shares() -> None:
    """Eight groups of one template, which is repeated where the tree is cut."""
    groups = tuple(
        Group(g, Prompt("p", "", (1,)), (), tuple(plain((9,) * 50 + (g,) * 10, 100, 200 * g + i) for i in range(4)))
        for g in range(8)
    )
    shares = shares_of(Batch(0, groups), Dealing(budget=600, ranks=4))
    trained = [sorted(path.number for path in share.paths if len(path.loss)) for share in shares]
    assert sorted(number for rank in trained for number in rank) == list(range(32)), "each on one rank"
    tokens = [sum(len(path.tokens) for path in share.paths) for share in shares]
    assert sum(tokens) <= 1.05 * 32 * 159
    size = sum(len(msgspec.msgpack.encode(part)) for share in shares for part in (share.head, *share.blocks()))
    assert size / (32 * 160) < 14


def plain(prompt: tuple[int, ...], count: int, seed: int) -> Row:
    chance = random.Random(seed)
    tokens = tuple(chance.randrange(150_000) for _ in range(count))
    logprobs = tuple(-chance.random() for _ in range(count))
    return Row(
        prompt, tokens, logprobs, (0.25,) * count, (True,) * count, (3,) * (count // 2) + (4,) * (count - count // 2)
    )


def test_a_share_without_one_of_its_blocks_is_refused() -> None:
    group = Group(0, Prompt("p", "", (1,)), (), tuple(plain((1,), 10, i) for i in range(4)))
    (share,) = shares_of(Batch(0, (group,)), Dealing(budget=100))
    head, blocks = sent(share, 5)
    with pytest.raises(ValueError, match="has 4 rows, and 3 were received"):
        received(head, blocks[1:])


@pytest.mark.parametrize("room", [-1, 5, 20])
def test_the_first_bin_with_room_is_found(room: int) -> None:
    """The tree of rooms against a search from the first bin on."""
    for seed in range(200):
        chance = random.Random(seed)
        sizes = [chance.randrange(1, 25) for _ in range(chance.randrange(20))]
        bins: list[list[int]] = []
        for size in sorted(sizes, reverse=True):
            place = next((number for number, held in enumerate(bins) if sum(held) + size <= room), None)
            if place is None:
                bins.append([size])
            else:
                bins[place].append(size)
        assert first_fit(sizes, lambda size: size, room) == bins


def test_the_plan_of_a_share_says_what_was_dropped_once() -> None:
    hole = msgspec.structs.replace(plain((1,), 4, 0), logprobs=(-1.0, float("nan"), -1.0, -1.0))
    group = Group(0, Prompt("p", "", (1,)), (), (hole, plain((2,), 4, 1)))
    plans = [sent_plan(share) for share in shares_of(Batch(0, (group,)), Dealing(budget=100, ranks=2))]
    assert [plan.dropped_tokens for plan in plans] == [1, 0]


def sent_plan(share: PackedShare) -> StepPlan:
    given = received(*sent(share, 100))
    return plan_of(DealtRows(given.minibatches[0], AGGREGATIONS["token_mean"], constant=0, step=0))


def test_ranks_order_trees_by_cost_and_a_device_alone_does_not() -> None:
    """Two trees of nine tokens: two short rows attend to less than a long one. A journal is replayed with the order that its run had."""
    rows = [plain((1,), 5, 0), plain((1,), 5, 1), plain((2,), 9, 2)]
    given = StepRows(rows, AGGREGATIONS["token_mean"], constant=0, budget=9, step=0)
    assert [pack.row.unique().tolist() for pack in pack_rows(given).packs] == [[0, 1], [2]]
    (mesh,) = split_ranks(given, 1)
    assert [pack.row.unique().tolist() for pack in mesh.packs] == [[2], [0, 1]]
