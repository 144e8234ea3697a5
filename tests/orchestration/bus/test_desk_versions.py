"""C1 at the run's end of a bus: which answers are taken, by the versions of their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.types import Completion, Episode, Prompt, Request, Sampling, Scored, Turn
from headrace.facts.facts import Warned
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.own_groups import PlayedGroup, Suspects
from headrace.loop.world import virtual_time
from headrace.loop.world.world import FactList
from headrace.run.hosts.bus.bus_port import Posting
from headrace.run.hosts.bus_messages import Errand, ErrandLetter, ErrandReply, GroupErrand, RequestErrand, letter_of
from headrace.run.hosts.bus_run import AUDIT, LOOK, BusDesk
from headrace.testing.memory_bus import MemoryBus, MemoryServer
from support.spans import spans_of

Form = Literal["group", "request"]


def completion(versions: Sequence[int]) -> Completion:
    count = len(versions)
    return Completion((1,) * count, (0.0,) * count, spans_of(versions, versions), "stop")


def errand(form: Form, at_least: int) -> Errand:
    if form == "group":
        return GroupErrand(7, Prompt("p", "", (1,)), at_least)
    return RequestErrand(Request("r", (1,), Sampling(max_tokens=8)), at_least)


def reply(form: Form, versions: Sequence[int], asked: ErrandLetter) -> bytes:
    """The tokens of a group lie in the second rollout: the first one is of the newest version throughout."""
    done, names = completion(versions), {"session": asked.session, "asked": asked.asked}
    if form == "request":
        return msgspec.msgpack.encode(ErrandReply("host-1", completion=done, **names))
    turns = [Turn((), completion(versions[-1:])), Turn((), done)]
    scored = [Scored(Episode((turn,)), 1.0, {}) for turn in turns]
    return msgspec.msgpack.encode(ErrandReply("host-1", PlayedGroup(tuple(scored)), **names))


def answered(
    form: Form, at_least: int, newest: int, versions: Sequence[int], early: bool = False, said: Form | None = None
) -> tuple[bool, str]:
    """Whether the answer is taken, and the warning. One that is not taken is off the bus, and its errand on it again.
    `early`: an earlier process of the run has posted the errand, and the answer comes before this process asks. `said`: the form of the
    answer, if it is another one."""

    async def case() -> tuple[bool, str]:
        bus, facts, clock = MemoryBus(MemoryServer()), FactList(), asyncio.get_running_loop().time
        telemetry = Telemetry(facts.record, clock, Waits(facts.record, clock, 1e5, 1e6))

        async def nothing() -> None:
            pass

        desk = BusDesk(bus, "session", telemetry, nothing, Suspects(3))
        own = letter_of("session", errand(form, at_least))
        first = letter_of("earlier", errand(form, 0)) if early else own
        answer = Posting("answers", "7", reply(said or form, versions, first))
        if early:
            await bus.post(answer)
        await desk.begin()
        desk.announced(newest)
        desk.expect(["7"] if early else [])
        working = asyncio.ensure_future(desk.run())
        if early:
            await asyncio.sleep(2 * LOOK)
        asking = asyncio.ensure_future(desk.ask("7", errand(form, at_least)))
        await asyncio.sleep(2 * LOOK)
        if not early:
            [letter] = await bus.claim("tickets", "host-1", most=9)
            await bus.settle("tickets", [letter.id], then=answer)
        await asyncio.sleep(2 * LOOK)
        taken = asking.done()
        if not taken:
            assert await bus.unsettled("answers") == set(), "what is thrown away does not come again"
            await asyncio.sleep(3 * AUDIT)
            [letter] = await bus.claim("tickets", "host-2", most=9)
            assert msgspec.msgpack.decode(letter.body, type=ErrandLetter) == own
            await bus.settle("tickets", [letter.id], then=Posting("answers", "7", reply(form, [newest], own)))
            await asyncio.wait_for(asking, 2 * LOOK)
        working.cancel()
        return taken, "".join(fact.message for fact in facts.of(Warned) if "is thrown away" in fact.message)

    return virtual_time.run(case())


@settings(max_examples=60)
@given(
    form=st.sampled_from(["group", "request"]),
    at_least=st.integers(0, 4),
    ahead=st.integers(0, 3),
    versions=st.lists(st.integers(0, 8), min_size=1, max_size=4).map(sorted),
)
def test_an_answer_is_taken_if_each_token_is_of_a_version_from_its_draw_on(
    form: Form, at_least: int, ahead: int, versions: list[int]
) -> None:
    newest = at_least + ahead
    allowed = all(at_least <= version <= newest for version in versions)
    taken, said = answered(form, at_least, newest, versions)
    assert taken == allowed and bool(said) != allowed


@pytest.mark.parametrize("versions", [[2, 3], [3, 5]], ids=["older than its draw", "not published"])
@pytest.mark.parametrize("form", ["group", "request"])
def test_what_is_thrown_away_is_said_with_the_versions(form: Form, versions: list[int]) -> None:
    first, last = versions
    assert answered(form, 3, 4, versions) == (
        False,
        f"host-1 answered errand 7 with tokens of versions {first} to {last}, and only 3 to 4 are allowed; the answer is thrown away, and the "
        "errand posted again",
    )


@pytest.mark.parametrize(("versions", "taken"), [([1, 4], True), ([1, 5], False)])
def test_an_answer_to_an_earlier_process_may_be_older_than_this_one_began_with(
    versions: list[int], taken: bool
) -> None:
    """The ticket keeps the version of its draw, which only the letter has. None may be newer than what this process has published."""
    assert answered("group", 3, 4, versions, early=True)[0] is taken


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("form", "said"), [("group", "request"), ("request", "group")])
def test_an_answer_to_something_else_is_thrown_away(form: Form, said: Form, early: bool) -> None:
    assert answered(form, 3, 4, [3, 4], early=early, said=said) == (
        False,
        "host-1 answered errand 7 with something else than it was asked; the answer is thrown away, and the errand posted again",
    )


@pytest.mark.parametrize("known", [False, True], ids=["drawn anew", "in flight at the kill"])
def test_an_earlier_process_answers_up_to_the_version_that_this_one_began_with(known: bool) -> None:
    """A run that goes on from a checkpoint makes other weights under the numbers behind it. A host that hears of that late has sampled with the
    first ones."""

    async def taken(versions: Sequence[int]) -> bool:
        bus, clock = MemoryBus(MemoryServer()), asyncio.get_running_loop().time
        telemetry = Telemetry(lambda fact: None, clock, Waits(lambda fact: None, clock, 1e5, 1e6))

        async def nothing() -> None:
            pass

        desk = BusDesk(bus, "session", telemetry, nothing, Suspects(3))
        await desk.begin()
        for version in (7, 8, 9):
            desk.announced(version)
        desk.expect(["7"] if known else [])
        working = asyncio.ensure_future(desk.run())
        asking = asyncio.ensure_future(desk.ask("7", errand("group", 7)))
        await asyncio.sleep(2 * LOOK)
        late = letter_of("earlier", errand("group", 6))
        await bus.post(Posting("answers", "7", reply("group", versions, late)))
        await asyncio.sleep(2 * LOOK)
        working.cancel()
        return asking.done()

    assert virtual_time.run(taken([7, 7]))
    assert virtual_time.run(taken([6, 7])) is known
    assert not virtual_time.run(taken([7, 9])), "version 9 of the earlier process"


def test_an_answer_to_another_prompt_under_the_same_ticket_is_thrown_away() -> None:
    """A run that goes on from a checkpoint with other rows, or another order of them, draws other prompts under the same tickets."""

    async def case() -> None:
        bus, facts, clock = MemoryBus(MemoryServer()), FactList(), asyncio.get_running_loop().time
        telemetry = Telemetry(facts.record, clock, Waits(facts.record, clock, 1e5, 1e6))

        async def nothing() -> None:
            pass

        desk = BusDesk(bus, "session", telemetry, nothing, Suspects(3))
        await desk.begin()
        desk.announced(3)
        desk.expect([])
        working = asyncio.ensure_future(desk.run())
        asking = asyncio.ensure_future(desk.ask("7", errand("group", 3)))
        other = letter_of("session", GroupErrand(7, Prompt("p", "", (1,), {"answer": "5"}), 3))
        await bus.post(Posting("answers", "7", reply("group", [3], other)))
        await asyncio.sleep(2 * LOOK)
        assert not asking.done() and await bus.unsettled("answers") == set()
        assert ["something else than it was asked" in fact.message for fact in facts.of(Warned)] == [True]
        working.cancel()

    virtual_time.run(case())
