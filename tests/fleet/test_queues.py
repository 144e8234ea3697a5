"""Groups stay together in a fleet, and no member idles beside a queue that it could shorten."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fleet import LENGTH, TOKEN, Flock, engine, flock, places, rollout, run, started, undisturbed

from headrace.core.reports import EngineStats
from headrace.core.types import Request, RolloutKey
from headrace.engine.fleet.member import Member
from headrace.loop.world import virtual_time
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.makers import request

ROWS = 4
WHOLE = LENGTH * TOKEN
"""Seconds that a completion takes."""


def small(rows: int = ROWS, **options: Any) -> FakeEngine:
    return engine(rows=rows, **options)


def group(ticket: int, size: int, first: int = 0, prompt: int = 2) -> list[Request]:
    return [
        request(str(RolloutKey(ticket, index)), (ticket, *range(1, prompt)), LENGTH)
        for index in range(first, first + size)
    ]


def counts(flock: Flock) -> list[dict[int, int]]:
    """The number of requests of each group, by member."""
    keys = [[RolloutKey.read(name) for name in names] for names in places(flock)]
    return [dict(Counter(key.ticket for key in of if key)) for of in keys]


# -- when a request comes ---------------------------------------------------------------------------------------------------


def test_what_does_not_fit_goes_to_members_that_idle() -> None:
    async def case(flock: Flock) -> None:
        tasks = started(flock, *group(0, 10))
        await asyncio.sleep(TOKEN)
        assert counts(flock) == [{0: 4}, {0: 4}, {0: 2}]
        async with asyncio.timeout(WHOLE + TOKEN):
            await asyncio.gather(*tasks)

    run(case, small(), small(), small())


def test_a_group_that_fits_stays_together() -> None:
    async def case(flock: Flock) -> None:
        tasks = started(flock, *group(0, 4), *group(1, 3), *group(1, 1, first=3))
        await asyncio.sleep(TOKEN)
        assert counts(flock) == [{0: 4}, {1: 4}, {}]
        await asyncio.gather(*tasks)

    run(case, small(), small(), small())


def test_nothing_changes_where_all_are_busy() -> None:
    """Both have a queue nearly to the end."""

    async def case(flock: Flock) -> None:
        tasks = started(flock, *group(0, 4), *group(1, 4), *group(0, 8, first=4), *group(1, 8, first=4))
        for _ in range(2):
            await asyncio.sleep(WHOLE)
            assert [set(of) for of in counts(flock)] == [{0}, {1}]
        await asyncio.gather(*tasks)
        assert sum(len(one.requests) for one in flock.engines) == 24, "nothing was moved"

    run(case, small(), small())


def test_a_long_prompt_is_not_computed_again_for_a_short_wait() -> None:
    async def case(flock: Flock) -> None:
        tasks = started(flock, *group(0, ROWS + 2, prompt=3 * LENGTH))
        await asyncio.sleep(TOKEN)
        assert counts(flock) == [{0: ROWS + 2}, {}], "two wait, for less than the prompt takes"
        tasks += started(flock, *group(0, 2, first=ROWS + 2, prompt=3 * LENGTH))
        await asyncio.sleep(TOKEN)
        assert counts(flock) == [{0: ROWS + 3}, {0: 1}], "the fourth would wait longer"
        await asyncio.gather(*tasks)

    run(case, small(), small())


def test_a_member_that_has_the_prompt_is_taken_before_one_that_has_not() -> None:
    async def case(flock: Flock) -> None:
        tasks = started(flock, *group(0, ROWS + 1), *group(1, 2))
        await asyncio.sleep(TOKEN)
        assert counts(flock) == [{0: 4}, {0: 1}, {1: 2}]
        tasks += started(flock, *group(2, 1), *group(0, 1, first=7))
        await asyncio.sleep(TOKEN)
        assert counts(flock) == [{0: 4}, {0: 2, 2: 1}, {1: 2}]
        await asyncio.gather(*tasks)

    run(case, small(), small(), small())


def test_later_turns_go_where_the_rollout_is() -> None:
    async def case(flock: Flock) -> None:
        await asyncio.gather(*started(flock, *group(0, ROWS + 2)))
        turn = request(str(RolloutKey(0, ROWS + 1, turn=1)), range(40), LENGTH)
        first = request(str(RolloutKey(0, 0, turn=1)), range(40), LENGTH)
        tasks = started(flock, turn, first)
        await asyncio.sleep(TOKEN)
        assert places(flock) == [{first.id}, {turn.id}]
        await asyncio.gather(*tasks)

    run(case, small(), small())


def test_cache_counts_like_rows() -> None:
    """Memory for the prompt and one completion beside it."""

    async def case(flock: Flock) -> None:
        for one in flock.engines:
            one.capabilities = msgspec.structs.replace(one.capabilities, kv_tokens=12)
        tasks = started(flock, *group(0, 1, prompt=10))
        await asyncio.sleep(5.5 * TOKEN)
        tasks += started(flock, *group(0, 1, first=1, prompt=10))
        await asyncio.sleep(TOKEN)
        assert counts(flock) == [{0: 1}, {0: 1}]
        await asyncio.gather(*tasks)

    run(case)


# -- when a member has room ---------------------------------------------------------------------------------------------------


def test_a_member_that_gets_room_takes_from_a_queue() -> None:
    async def case(flock: Flock) -> None:
        requests = [*group(1, ROWS), *group(0, 2 * ROWS)]
        soon = started(flock, *(msgspec.structs.replace(one, sampling=short(one)) for one in requests[:ROWS]))
        tasks = started(flock, *requests[ROWS:])
        await asyncio.sleep(TOKEN)
        assert counts(flock) == [{1: 4}, {0: 8}]
        await asyncio.gather(*soon)
        await asyncio.sleep(TOKEN)
        assert counts(flock) == [{0: 4}, {0: 4}], "what waited has moved; what ran has stayed"
        done = await asyncio.gather(*tasks)
        for one, completion in zip(requests[ROWS:], done, strict=True):
            assert completion.tokens == await undisturbed(one)
            assert tuple(flock.told(one.id)) == completion.tokens, "each token is told once"

    run(case, small(), small())


def short(one: Request) -> Any:
    return msgspec.structs.replace(one.sampling, max_tokens=3)


def test_a_member_that_comes_back_takes_from_a_queue() -> None:
    async def case(flock: Flock) -> None:
        flock.engines[1].vanish("was killed")
        await asyncio.sleep(0.1)
        tasks = started(flock, *group(0, 2 * ROWS))
        await asyncio.sleep(TOKEN)
        assert counts(flock) == [{0: 8}, {}]
        flock.engines[1].reappear()
        await asyncio.sleep(TOKEN)
        assert counts(flock) == [{0: 4}, {0: 4}]
        await asyncio.gather(*tasks)

    run(case, small(), small())


class Undeclared(FakeEngine):
    """Says in its statistics alone that requests wait, as a server does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.capabilities = msgspec.structs.replace(self.capabilities, rows=0)


def test_statistics_show_a_queue_where_no_rows_are_declared() -> None:
    async def case(flock: Flock) -> None:
        tasks = started(flock, *group(0, 2 * ROWS))
        await asyncio.sleep(TOKEN)
        assert counts(flock) == [{0: 8}, {}], "nobody has said yet that requests wait"
        await asyncio.sleep(1.0)
        assert counts(flock) == [{0: 4}, {0: 4}]
        await asyncio.gather(*tasks)

    two = (Undeclared(seconds_per_token=TOKEN, length=lambda rng: LENGTH, rows=ROWS) for _ in range(2))
    run(case, *two)


def test_a_drained_fleet_moves_nothing() -> None:
    """Else a request that goes on from its tokens would begin at a member that has drained."""

    async def case(flock: Flock) -> None:
        held = [msgspec.structs.replace(one, prefix=(1, 2)) for one in group(0, 2 * ROWS)]
        soon = started(flock, *(msgspec.structs.replace(one, sampling=short(one)) for one in group(1, ROWS)))
        tasks = started(flock, *held)
        await asyncio.sleep(TOKEN)
        draining = asyncio.ensure_future(flock.fleet.drain())
        await asyncio.gather(*soon)
        await asyncio.sleep(TOKEN)
        assert counts(flock) == [{}, {0: 8}]
        await flock.fleet.resume()
        await asyncio.gather(draining, *tasks)

    run(case, small(), small())


def test_a_request_goes_back_only_after_its_earlier_member_was_heard() -> None:
    """The member that it moved to is lost at once, and the one that it came from has not answered yet: what that has sent before must not be
    taken for what it sends now."""
    answers = asyncio.Event()
    answers.set()

    class Slow(FakeEngine):
        async def stats(self) -> EngineStats:
            await answers.wait()
            return await super().stats()

    async def case(flock: Flock) -> None:
        soon = started(flock, *(msgspec.structs.replace(one, sampling=short(one)) for one in group(1, ROWS)))
        tasks = started(flock, *group(0, ROWS + 1))
        await asyncio.sleep(TOKEN)
        answers.clear()
        await asyncio.gather(*soon)
        await asyncio.sleep(TOKEN)
        assert counts(flock) == [{0: 1}, {0: 4}]
        flock.engines[0].vanish("was killed")
        await asyncio.sleep(1.0)
        assert places(flock)[1] == {f"t0/{i}" for i in range(ROWS)}, "the fifth waits for an answer"
        answers.set()
        await asyncio.sleep(1.0)
        assert "t0/4" in places(flock)[1]
        for one, task in zip(group(0, ROWS + 1), tasks, strict=True):
            assert (await task).tokens == await undisturbed(one) == tuple(flock.told(one.id))

    run(case, small(), Slow(seconds_per_token=TOKEN, length=lambda rng: LENGTH, rows=ROWS))


# -- always ---------------------------------------------------------------------------------------------------------------------

arrival = st.tuples(st.integers(0, 5), st.integers(1, 9), st.sampled_from([0.0, 0.0, 0.35, 2.0, 9.0]))
loads = st.fixed_dictionaries(
    {
        "rows": st.lists(st.integers(1, 4), min_size=2, max_size=4),
        "arrivals": st.lists(arrival, min_size=1, max_size=8),
        "speeds": st.lists(st.sampled_from([0.1, 0.1, 0.4]), min_size=4, max_size=4),
        "away": st.lists(st.tuples(st.integers(0, 3), st.floats(0, 9, allow_nan=False)), max_size=3),
    }
)


@pytest.mark.slow
@settings(max_examples=150)
@given(loads)
def test_no_member_idles_beside_a_queue_and_no_token_is_lost(s: dict[str, Any]) -> None:
    """Prompts are short here, so that any wait costs more than a prompt."""

    async def case() -> None:
        engines = [
            FakeEngine(speed, 0.0, lambda rng: rng.randint(3, LENGTH), rows=rows)
            for rows, speed in zip(s["rows"], s["speeds"], strict=False)
        ]
        made, sizes, tasks = await flock(engines), Counter[int](), list[asyncio.Task[Any]]()
        watching = asyncio.ensure_future(_watch(made.fleet.members))
        for number, at in s["away"]:
            asyncio.get_running_loop().call_later(at, _away, engines[number % len(engines)])
        asked: list[Request] = []
        for ticket, size, pause in s["arrivals"]:
            asked += (new := group(ticket, size, first=sizes[ticket]))
            tasks += started(made, *new)
            sizes[ticket] += size
            await asyncio.sleep(pause)
        done = await asyncio.gather(*tasks)
        watching.cancel()
        for one, completion in zip(asked, done, strict=True):
            assert tuple(made.told(one.id)) == completion.tokens, "each token is told once"
        assert not made.fleet._rotation.requests._echoes and not made.fleet._rotation.requests._waiting
        if watching.done() and not watching.cancelled():
            watching.result()
        await made.fleet.close()

    virtual_time.run(case())


def _away(one: FakeEngine) -> None:
    one.vanish("was killed")
    asyncio.get_running_loop().call_later(1.5, one.reappear)


async def _watch(members: list[Member]) -> None:
    while True:
        await asyncio.sleep(0.05)
        serving = [member for member in members if member.serves]
        queued = [one.name for one in serving if any(attempt.waits for attempt in one.attempts.values()) and one.queue]
        idle = [one.name for one in serving if not one.attempts]
        assert not (queued and idle), f"{idle} idle beside the queues of {queued}"


@pytest.mark.parametrize("size", [8, 16])
def test_a_fleet_with_fewer_groups_than_members_samples_with_all_of_them(size: int) -> None:
    """Four groups on eight members of seven rows: together each would wait twice or more."""

    async def case(flock: Flock) -> None:
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*started(flock, *(one for ticket in range(3) for one in group(ticket, size))))
        assert asyncio.get_running_loop().time() - began < WHOLE + TOKEN

    run(case, *(small(7) for _ in range(8)))


def test_rollouts_are_named_as_in_a_run() -> None:
    assert rollout(3, 1).id == group(3, 1, first=1)[0].id
