"""States that sequences keep beside their blocks: found, shared, forked, moved on, and computed again."""

from __future__ import annotations

from headrace.engine.native.forward_pass import BLOCK
from headrace.engine.native.kv_cache import Blocks
from headrace.engine.native.state_slots import StateSlots
from headrace.testing.makers import request
from support.fake_engine_model import CoreDriver, RecurrentRunner, prompt

# --- slots -------------------------------------------------------------------------------------------------------------


def slots(count: int) -> tuple[StateSlots, list[int]]:
    """Slots, and blocks that somebody holds."""
    blocks = Blocks(4)
    return StateSlots(count, blocks), [blocks.take() for _ in range(4)]


def test_the_nearest_state_is_the_longest_that_fits():
    states, blocks = slots(6)
    for place, seen in ((0, 32), (2, 5), (2, 9)):
        assert states.keep(blocks[place], states._blocks.serials[blocks[place]], seen) >= 0
    found = [states.nearest(blocks, tokens) for tokens in (0, 31, 32, 68, 69, 72, 73, 128)]
    assert found == [0, 0, 32, 32, 69, 69, 73, 73]
    assert slots(0)[0].nearest(blocks, 77) == 77, "without states, any place is one"


def test_states_that_were_unused_for_longest_make_room_and_those_of_blocks_given_away_before():
    states, blocks = slots(3)
    serials = states._blocks.serials
    for block in blocks[:3]:
        states.keep(block, serials[block], 7)
    row = states.start(blocks, 7)  # of the first block: used now
    states.integrity([row])
    assert [states.nearest([block], 7) for block in blocks[:3]] == [7, 0, 7]
    states._blocks.release(blocks[:1])
    assert states._blocks.take() == blocks[0], "it goes to another"
    assert states.nearest(blocks, 7) == 0
    assert states.start(blocks, 0) >= 0 and states.nearest([blocks[2]], 7) == 7
    assert states.keep(blocks[3], serials[blocks[3]], 1) >= 0 and states.nearest([blocks[2]], 7) == 0
    assert states.keep(blocks[3], serials[blocks[3]] - 1, 2) == -1, "that block is another by now"


def test_copies_are_made_in_the_order_in_which_slots_change_hands():
    states, blocks = slots(2)
    first = states.start(blocks, 0)
    states.keep_copy(first, blocks, 40)
    second = states.start(blocks, 40)  # takes the very slot of what it goes on from
    assert states.copies() == [(first, second)] and states.copies() == []
    states.leave(first, blocks, 50)
    assert states.nearest(blocks, 60) == 50
    states.leave(second, blocks, 0)
    states.integrity([])
    states.clear()
    assert states.nearest(blocks, 60) == 0


# --- the schedule, over a fake model whose states can be read ---------------------------------------------------------------


def test_what_parts_from_a_cached_prompt_leaves_a_state_where_it_parts():
    """The second of three prompts that begin alike computes their beginning again; the third goes on from there."""
    engine = CoreDriver(blocks=40, prefill_chunk=64, runner=RecurrentRunner())
    common = prompt(2 * BLOCK + 3)
    told = []
    for number in range(3):
        engine.run(request(f"r{number}", common + prompt(9, number), 4))
        engine.check(f"r{number}")
        told.append((engine.engine.stats().recomputed_tokens, engine.engine.stats().cached_tokens))
    assert told == [(0, 0), (2 * BLOCK + 3, 0), (2 * BLOCK + 6, 2 * BLOCK)]


def test_two_states_of_one_pass_for_which_there_is_one_slot():
    """Where a prompt parts from a cached one, and its end: the later one has it."""
    engine = CoreDriver(blocks=40, max_running=1, prefill_chunk=128, runner=RecurrentRunner())
    common = prompt(2 * BLOCK + 3)
    asked = [common + prompt(9, 1), common + prompt(9, 2), common + prompt(9, 2)]
    engine.run(*(request(f"r{i}", text, 4, seed=i) for i, text in enumerate(asked)))
    for i in range(3):
        engine.check(f"r{i}")
