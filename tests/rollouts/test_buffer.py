"""The buffer by hand: slots, order, counters, what a checkpoint holds, each with literal values."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from headrace.core.batches import Failure, Group
from headrace.facts.facts import Accounting
from headrace.loop.buffer import Buffer
from headrace.loop.staleness import StalenessConfig
from headrace.loop.world import virtual_time
from headrace.testing.makers import group, prompt, row

PACED = StalenessConfig(groups_per_step=2, max_lag=1)
"""Four slots."""


def a_buffer(config: StalenessConfig = PACED, wanted: int = 100) -> Buffer:
    return Buffer(config, wanted)


def start(buffer: Buffer, count: int) -> None:
    """Admits the next `count` prompts."""
    for _ in range(count):
        ticket = buffer.state().next_ticket
        buffer.start(ticket, prompt(ticket))


def finish(buffer: Buffer, *tickets: int) -> None:
    for ticket in tickets:
        buffer.put(group(ticket, row([5])))


def train(buffer: Buffer, tickets: list[int], version: int) -> None:
    buffer.take_again(tickets)
    buffer.trained(tickets, version)


def any_age(one: Group) -> Group:
    return one


def may_draw(buffer: Buffer) -> bool:
    """Whether `draw` returns at once."""

    async def ask() -> bool:
        asked = asyncio.ensure_future(buffer.draw())
        await asyncio.sleep(1)
        try:
            return asked.done()
        finally:
            asked.cancel()

    return virtual_time.run(ask())


def story(work: Coroutine[Any, Any, Any]) -> Any:
    return virtual_time.run(work)


# --- slots -------------------------------------------------------------------------------------------------------------------


def test_slots_come_back_with_the_weights_that_their_groups_made_and_not_before():
    buffer = a_buffer()
    start(buffer, 4)
    finish(buffer, 0, 1, 2, 3)
    train(buffer, [0, 1], version=1)
    train(buffer, [2, 3], version=2)
    assert buffer.outstanding == 4 and not may_draw(buffer)
    buffer.release(0)
    assert buffer.outstanding == 4 and not may_draw(buffer), "version 0 was made by none of them"
    buffer.release(1)
    assert buffer.outstanding == 2 and may_draw(buffer), "groups 2 and 3 made version 2, which is not live yet"
    buffer.release(2)
    assert buffer.outstanding == 0


def test_a_later_version_releases_the_slots_of_earlier_ones_too():
    buffer = a_buffer()
    start(buffer, 4)
    finish(buffer, 0, 1, 2, 3)
    train(buffer, [0, 1], version=1)
    train(buffer, [2, 3], version=2)
    buffer.release(2)  # version 1 was never loaded: the engine took the newest
    assert buffer.outstanding == 0


@pytest.mark.parametrize("change", ["release", "end", "want", "close"])
def test_whoever_waits_for_a_slot_is_woken_by_each_change_that_frees_one(change: str):
    async def go() -> int | None:
        buffer = a_buffer(wanted=4 if change == "want" else 100)
        start(buffer, 4)
        finish(buffer, 0, 1)
        train(buffer, [0, 1], version=1)
        waiting = asyncio.ensure_future(buffer.draw())
        if change == "want":
            buffer.release(1)
        await asyncio.sleep(1)
        assert not waiting.done()
        match change:
            case "release":
                buffer.release(1)
            case "end":
                buffer.end(2, "dropped", "no_contrast")
            case "want":
                buffer.want(5)
            case "close":
                buffer.close()
        await asyncio.sleep(1)
        assert waiting.done(), "nobody woke it"
        return waiting.result()

    assert story(go()) == (None if change == "close" else 4)


def test_no_more_prompts_are_drawn_than_the_run_will_train():
    buffer = a_buffer(wanted=3)
    start(buffer, 2)
    assert may_draw(buffer)
    start(buffer, 1)
    assert not may_draw(buffer), "three are wanted, and three are on their way"
    buffer.end(1, "failed", "reward_raised")
    assert may_draw(buffer), "another one in its place"


def test_tickets_are_given_in_order():
    buffer = a_buffer()
    with pytest.raises(AssertionError, match="ticket 1 is drawn after -1"):
        buffer.start(1, prompt(1))


def test_generation_that_is_not_paced_is_held_by_its_own_bounds():
    config = StalenessConfig(groups_per_step=1, max_lag=1, overdue="drop", in_flight=2, stored=3)
    buffer = a_buffer(config)
    start(buffer, 2)
    assert not may_draw(buffer), "in_flight = 2"
    finish(buffer, 0)
    assert may_draw(buffer), "a finished group holds no place among those in flight"
    start(buffer, 1)
    finish(buffer, 1)
    start(buffer, 1)
    finish(buffer, 2)
    start(buffer, 1)
    assert not may_draw(buffer), "in_flight = 2 again, beside three that are stored"
    finish(buffer, 3)
    assert not may_draw(buffer), "four are stored and one is in flight: stored + in_flight = 5"
    buffer.end(0, "dropped", "overdue")
    assert may_draw(buffer)


def test_nothing_is_admitted_while_the_live_weights_are_too_old_themselves():
    config = StalenessConfig(groups_per_step=1, max_lag=1, overdue="drop", in_flight=10)
    buffer = a_buffer(config)
    start(buffer, 3)
    finish(buffer, 0, 1, 2)
    train(buffer, [0], version=1)
    assert may_draw(buffer), "one step behind: what is sampled now may be trained at the next step"
    train(buffer, [1], version=2)
    assert not may_draw(buffer), "two steps behind, and max_lag is 1"
    buffer.release(1)
    assert may_draw(buffer)


# --- order -------------------------------------------------------------------------------------------------------------------


def taken(buffer: Buffer, count: int) -> list[int] | None:
    """Tickets that `take` gives at once; None where it waits."""

    async def go() -> list[int] | None:
        taking = asyncio.ensure_future(buffer.take(count, any_age))
        await asyncio.sleep(1)
        if not taking.done():
            taking.cancel()
            return None
        groups = taking.result()
        return None if groups is None else [one.ticket for one in groups]

    return story(go())


def test_a_window_of_one_takes_groups_in_the_order_of_admission():
    buffer = a_buffer()
    start(buffer, 4)
    finish(buffer, 2, 1)
    assert taken(buffer, 1) is None, "ticket 0 is still in flight"
    finish(buffer, 0)
    assert taken(buffer, 3) == [0, 1, 2]


@pytest.mark.parametrize(("order", "expected"), [("stalest", [1, 2]), ("finished", [2, 1])])
def test_a_window_lets_finished_groups_pass_a_slow_one_so_far_and_no_further(order: Any, expected: list[int]):
    config = StalenessConfig(groups_per_step=2, max_lag=2, window=3, order=order)
    buffer = a_buffer(config)
    start(buffer, 4)
    finish(buffer, 3, 2, 1)
    assert taken(buffer, 2) == expected
    assert taken(buffer, 1) is None, "ticket 3 lies three places behind ticket 0, and the window is 3"
    finish(buffer, 0)
    assert taken(buffer, 2) == [0, 3], "0 anchors the window until it is taken, whichever was finished first"


def test_what_the_judge_ended_is_replaced_by_the_next():
    buffer = a_buffer()
    start(buffer, 3)
    finish(buffer, 0, 1, 2)

    def judge(one: Group) -> Group | None:
        if one.ticket != 1:
            return one
        buffer.end(1, "dropped", "overdue")
        return None

    groups = story(buffer.take(2, judge))
    assert [one.ticket for one in groups] == [0, 2]
    assert buffer.accounting().dropped == {"overdue": 1}


def test_what_was_taken_for_a_step_that_never_comes_is_ready_again():
    async def go() -> Buffer:
        buffer = a_buffer()
        start(buffer, 4)
        finish(buffer, 0, 3, 1)
        taking = asyncio.ensure_future(buffer.take(3, any_age))
        await asyncio.sleep(1)
        assert [one.ticket for one in buffer.finished] == [3], "0 and 1 are taken, and 3 waits for 2"
        buffer.close()
        assert await taking is None
        return buffer

    buffer = story(go())
    assert [one.ticket for one in buffer.finished] == [0, 1, 3] and buffer.accounting().balance() == 0


# --- counters ----------------------------------------------------------------------------------------------------------------

FAILED = Failure("reward_raised", "KeyError")


def test_failed_rollouts_are_counted_inside_groups_that_go_on_and_not_in_groups_that_fail():
    """A group that fails is one failure, counted as a group: its rollouts would be counted a second time."""
    buffer = a_buffer()
    start(buffer, 4)
    buffer.put(group(0, row([5]), failures=(FAILED, FAILED)))
    buffer.end(1, "dropped", "no_contrast", ["reward_raised"])
    buffer.end(2, "failed", "reward_raised", ["reward_raised", "reward_raised", "reward_raised"])
    counted = buffer.accounting()
    assert counted.rollout_failures == {"reward_raised": 3}, "two of the ready group, one of the dropped one"
    assert counted == Accounting(
        drawn=4,
        dropped={"no_contrast": 1},
        failed={"reward_raised": 1},
        in_pipeline=2,
        rollout_failures={"reward_raised": 3},
    )


@pytest.mark.parametrize("place", ["ready", "taken"])
def test_failures_of_a_finished_group_are_counted_once(place: str):
    buffer = a_buffer()
    start(buffer, 1)
    buffer.put(group(0, row([5]), failures=(FAILED,)))
    if place == "taken":
        buffer.take_again([0])
    buffer.end(0, "dropped", "overdue", ["reward_raised"])
    assert buffer.accounting().rollout_failures == {"reward_raised": 1}
    assert buffer.outstanding == 0 and buffer.accounting().balance() == 0


def test_outcomes_have_two_names_and_a_ticket_ends_once():
    buffer = a_buffer()
    start(buffer, 1)
    with pytest.raises(AssertionError):
        buffer.end(0, "lost", "somehow")
    buffer.end(0, "dropped", "no_contrast")
    with pytest.raises(StopIteration):
        buffer.end(0, "dropped", "no_contrast")


# --- checkpoints -------------------------------------------------------------------------------------------------------------


def test_what_a_checkpoint_holds_is_what_a_resumed_buffer_has():
    """Groups in the step under way are among the finished ones, before the others: they are taken first again."""
    first = a_buffer()
    start(first, 4)
    first.put(group(1, row([5]), failures=(FAILED,)))
    finish(first, 0)
    first.take_again([0])
    first.end(2, "failed", "engine_error")
    state = first.state()
    assert state.next_ticket == 4 and [one.ticket for one in state.ready] == [0, 1] and list(state.in_flight) == [3]
    assert state.accounting == Accounting(
        drawn=4, failed={"engine_error": 1}, in_checkpoint=3, rollout_failures={"reward_raised": 1}
    )
    second = a_buffer()
    second.restore(state)
    assert second.state() == state
    assert second.accounting() == Accounting(
        drawn=4, failed={"engine_error": 1}, in_pipeline=3, rollout_failures={"reward_raised": 1}
    )
    assert second.ready == (0, 1) and second.in_flight == {3: prompt(3)} and second.outstanding == 3
    with pytest.raises(AssertionError, match="before the first draw"):
        second.restore(state)
