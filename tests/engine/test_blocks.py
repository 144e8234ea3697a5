"""The pool of KV blocks and the prefix cache, without an engine."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.native.forward_pass import BLOCK
from headrace.engine.native.kv_cache import Blocks, Prefixes

ROOT = (0, "", 0)
TEXT = tuple(range(100, 200))


def cached(text=TEXT, blocks=8, root=ROOT) -> tuple[Blocks, Prefixes, list[int]]:
    """A pool in which `text` was computed by somebody who has left."""
    pool = Blocks(blocks)
    prefixes = Prefixes(pool)
    return pool, prefixes, compute(pool, prefixes, text, root)


def compute(pool: Blocks, prefixes: Prefixes, text: tuple[int, ...], root=ROOT) -> list[int]:
    match = prefixes.find(root, text)
    pool.hold(match.blocks)
    table = match.blocks + [pool.take() for _ in range(-(-len(text) // BLOCK) - len(match.blocks))]
    for node in prefixes.promise("somebody", match, text, table):
        node.owner = None
    pool.release(table)
    return table


def check(pool: Blocks, prefixes: Prefixes, held: Iterable[int] = ()) -> None:
    pool.integrity(held)
    prefixes.integrity()


# --- the pool ----------------------------------------------------------------------------------------------------------


def test_blocks_are_taken_in_the_order_in_which_they_were_let_go():
    pool = Blocks(3)
    first, second, third = pool.take(), pool.take(), pool.take()
    assert pool.free == 0 and {first, second, third} == {0, 1, 2}
    with pytest.raises(AssertionError, match="looks at `free` first"):
        pool.take()
    pool.hold([second])
    pool.release([second])
    assert pool.free == 0, "it was held twice"
    pool.release([first, second])
    pool.integrity([third])
    assert pool.free == 2 and pool.held == 1


def test_the_accounting_notices_what_does_not_add_up():
    pool = Blocks(4)
    table = [pool.take(), pool.take()]
    pool.integrity(table)
    for wrong in (table[:1], [*table, 3], [*table, table[0]]):
        with pytest.raises(AssertionError, match="as often as it is referred to"):
            pool.integrity(wrong)


def test_a_tainted_block_is_cleared_when_its_last_holder_lets_go_and_is_remembered_by_nobody():
    pool, prefixes, table = cached()
    pool.hold(table)
    pool.hold(table[:1])
    serials = [pool.serials[block] for block in table]
    pool.taint(table)
    assert prefixes.find(ROOT, TEXT).tokens == 0, "nor cached for anybody"
    pool.release(table)
    assert sorted(pool.dirty()) == sorted(table[1:]) and pool.dirty() == []
    pool.release(table[:1])
    assert pool.dirty() == table[:1]
    assert all(pool.serials[block] > serial for block, serial in zip(table, serials, strict=True))
    check(pool, prefixes)


# --- the prefix cache --------------------------------------------------------------------------------------------------


def test_what_is_cached_is_found_but_for_the_last_token():
    pool, prefixes, table = cached()  # 100 tokens: three blocks and four tokens of a fourth
    match = prefixes.find(ROOT, TEXT)
    assert match.blocks == table[:3] and match.tail.block == table[3] and match.tokens == 99
    match = prefixes.find(ROOT, (*TEXT, 1, 2, 3))
    assert match.blocks == table[:3] and match.tokens == 100
    match = prefixes.find(ROOT, TEXT[:96])
    assert match.blocks == table[:2] and match.tail.block == table[2] and match.shared == 31
    match = prefixes.find(ROOT, (*TEXT[:40], 1, 2))
    assert match.blocks == table[:1] and match.tail.block == table[1] and match.shared == 8
    assert prefixes.find(ROOT, (1, *TEXT)).tokens == 0
    check(pool, prefixes)


@pytest.mark.parametrize("root", [(1, "", 0), (0, "north", 0)])
def test_nothing_is_found_that_other_weights_computed(root):
    pool, prefixes, _ = cached()
    assert prefixes.find(root, TEXT).tokens == 0
    other = compute(pool, prefixes, TEXT, root)
    assert prefixes.find(root, TEXT).blocks == other[:3]


def test_a_swap_cuts_everything_and_an_adapters_swap_what_it_computed():
    pool, prefixes, table = cached(blocks=20)
    north = compute(pool, prefixes, TEXT, (0, "north", 3))
    prefixes.cut("north")
    assert prefixes.find((0, "north", 3), TEXT).tokens == 0 and prefixes.find(ROOT, TEXT).tokens == 99
    check(pool, prefixes)
    assert not set(north) & set(table)
    prefixes.cut()
    assert prefixes.find(ROOT, TEXT).tokens == 0
    check(pool, prefixes)


def test_blocks_of_swapped_weights_are_taken_before_those_that_were_never_used():
    pool, prefixes, table = cached(blocks=20)
    check(pool, prefixes)
    assert pool.take() not in table, "what the cache may find again is kept as long as there are others"
    prefixes.cut()
    assert {pool.take() for _ in table} == set(table)


def test_the_end_of_a_text_is_given_away_before_its_beginning():
    pool, prefixes, table = cached(blocks=4)
    for left in (96, 64, 32, 0):
        block = pool.take()
        assert block == table[left // BLOCK]
        found = prefixes.find(ROOT, TEXT)
        assert found.tokens == left
        check(pool, prefixes, table[left // BLOCK :])


def test_who_comes_while_a_prompt_is_computed_is_told_by_whom():
    pool, prefixes = Blocks(8), Prefixes(Blocks(8))
    prefixes = Prefixes(pool)
    table = [pool.take() for _ in range(4)]
    nodes = prefixes.promise("first", prefixes.find(ROOT, TEXT), TEXT, table)
    assert prefixes.find(ROOT, TEXT).awaits == "first"
    assert prefixes.find(ROOT, TEXT[:34]).awaits == "first", "all of it is being computed"
    assert prefixes.find(ROOT, TEXT[:20]).awaits == "first"
    other = prefixes.find(ROOT, (*TEXT[:20], *range(60)))
    assert other.awaits is None and other.tokens == 0, "a few tokens in common are not worth waiting for"
    for node in nodes:
        node.remove(pool)  # the first one was cancelled
    assert prefixes.find(ROOT, TEXT).awaits is None
    check(pool, prefixes, table)


def test_a_node_is_renamed_when_its_block_fills_and_removed_with_all_behind_it():
    pool, prefixes = Blocks(4), None
    prefixes = Prefixes(pool)
    table = [pool.take(), pool.take()]
    (tail,) = prefixes.promise("a", prefixes.find(ROOT, TEXT[:10]), TEXT[:10], table[:1])
    tail.owner = None
    tail.rename(TEXT[:32])
    assert prefixes.find(ROOT, TEXT[:11]).shared == 10
    behind = prefixes.keep(tail, TEXT[32:40], table[1])
    assert behind is not None and prefixes.find(ROOT, TEXT[:60]).tokens == 40
    assert prefixes.keep(tail, TEXT[32:36], 3) is None, "what a longer one covers is not kept twice"
    tail.remove(pool)
    assert not tail.alive and not behind.alive and pool.nodes == [None] * 4
    check(pool, prefixes, table)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 80), st.integers(0, 3), st.integers(0, 40)), max_size=25), st.integers(3, 12))
def test_what_is_found_was_computed_from_the_same_tokens(texts, blocks):
    """Texts that begin alike, in a pool that is too small for them. `content` is what a real cache would hold."""
    pool = Blocks(blocks)
    prefixes = Prefixes(pool)
    content: dict[int, tuple[int, ...]] = {}
    for length, kind, fork in texts:
        text = tuple(i if i < fork else i + 1000 * kind for i in range(length))
        match = prefixes.find(ROOT, text)
        found = [*match.blocks, *([match.tail.block] if match.tail else [])]
        tokens = tuple(token for block in found for token in content[block])[: match.tokens]
        assert tokens == text[: match.tokens] and match.tokens < length
        for place, block in enumerate(compute(pool, prefixes, text)):
            if block not in match.blocks:
                content[block] = text[place * BLOCK : (place + 1) * BLOCK]
        check(pool, prefixes)
