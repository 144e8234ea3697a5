"""Tickets that end the engines that work on them: who is charged, who waits for a turn, and who is given up. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from headrace.core.errors import PoisonedRequest, WorkerDied
from headrace.core.protocols import Job
from headrace.core.reports import Capabilities
from headrace.core.steps import Finished, StepOutput
from headrace.core.types import Completion, Request, RolloutKey, Sampling
from headrace.facts.facts import Warned, WorkerLost
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.own_groups import Suspects, ticket_of
from headrace.loop.world import virtual_time
from headrace.loop.world.world import FactList
from headrace.processes.wire import unpack
from headrace.run.clients.process_engine import ProcessEngine
from headrace.run.worker.worker_messages import EngineStart
from headrace.testing.fake_worker import Died, FakeLauncher, FakeProcess


def test_requests_of_a_ticket_share_its_fate_and_others_have_their_own() -> None:
    assert ticket_of("t12/0") == ticket_of("t12/3.2~5e01") == "t12" != ticket_of("math:t12/0") == "math:t12"
    assert ticket_of("eval::0/3/1") == "eval::0/3/1"


def test_who_was_there_at_every_death_is_given_up_and_suspects_take_turns() -> None:
    suspects, freed = Suspects(3), list[str]()
    suspects.listen(lambda: freed.append("free"))
    assert suspects.charge(["a", "b", "a"]) == [] and suspects.suspects == []
    assert suspects.charge(["a", "b", "c"]) == [] and suspects.suspects == ["a", "b"]
    assert suspects.may_begin("c", "c0") and suspects.may_begin("a", "a0") and suspects.may_begin("a", "a1")
    assert not suspects.may_begin("b", "b0")
    suspects.ended("a0")
    assert not freed and not suspects.may_begin("b", "b0")
    suspects.ended("a1")
    assert freed == ["free"] and suspects.may_begin("b", "b0")
    assert suspects.charge(["b", "c"]) == ["b"] and suspects.given_up == {"b"} and suspects.suspects == ["a", "c"]


def test_one_death_is_enough_where_one_is_allowed() -> None:
    suspects = Suspects(1)
    assert suspects.may_begin("a", "a") and suspects.may_begin("b", "b")
    assert suspects.charge(["a", "b"]) == ["a", "b"]


def test_deaths_are_forgiven_once_and_only_to_an_engine_that_finishes_something() -> None:
    suspects, forgiven = Suspects(2), list[int]()

    def die(number: int, *tickets: str) -> None:
        suspects.charge(tickets, lambda: forgiven.append(number))

    die(1, "a"), die(2, "a")
    assert not forgiven, "nothing was ever finished"
    suspects.ended("x", finished=True)
    die(3, "b"), die(4, "b")
    assert forgiven == [3, 4]
    die(5, "c"), die(6, "c")
    assert forgiven == [3, 4], "nothing was finished since"


# --- the engine's client -----------------------------------------------------------------------------------------------------


class Sampler(FakeProcess):
    """Samples a token a second for each of its requests. Those of poisoned tickets end it at their second token."""

    poisoned: set[int] = set()
    seen: list[set[str]] = []

    async def serve(self) -> None:
        running: dict[str, tuple[Request, int]] = {}
        while True:
            while self.inbox or not running:
                frame = await self.receive()
                if frame.method == "start":
                    self.reply(frame, Capabilities(64))
                elif frame.method == "add":
                    request = unpack(frame.payload, Request)
                    running[request.id] = request, len(request.prefix)
                elif frame.method == "cancel":
                    running.pop(unpack(frame.payload, str), None)
                elif frame.method == "abort":
                    ends = tuple(Finished(name, "interrupted") for name in running)
                    running.clear()
                    self.push("output", StepOutput(0, (), (), (), (), ends))
                    self.reply(frame, None)
            await asyncio.sleep(1.0)
            self.seen.append({ticket_of(name) for name in running})
            for name, (request, place) in list(running.items()):
                key = RolloutKey.read(name)
                if key and key.ticket in self.poisoned and place == 1:
                    self.die("was killed by SIGSEGV")
                    raise Died
                last = place + 1 == request.sampling.max_tokens
                ends = (Finished(name, "length"),) if last else ()
                self.push("output", StepOutput(0, (name,), (100 + place,), (-0.5,), (0,), ends))
                running[name] = request, place + 1
                if last:
                    del running[name]


def engine_of(facts: FactList, poisoned: set[int], max_deaths: int = 3, ticket_deaths: int = 3) -> ProcessEngine:
    clock = asyncio.get_running_loop().time
    telemetry = Telemetry(facts.record, clock, Waits(facts.record, clock, 1e5, 1e6))

    def begin() -> Sampler:
        process = Sampler()
        process.poisoned, process.seen = poisoned, seen
        return process

    seen: list[set[str]] = []
    engine = ProcessEngine(
        FakeLauncher({"engine": begin}), Job("engine", "engine"), max_deaths, telemetry, Suspects(ticket_deaths)
    )
    engine.seen = seen  # type: ignore[attr-defined]
    return engine


def asked(engine: ProcessEngine, ticket: int, rollouts: int = 2, tokens: int = 8) -> list[asyncio.Future[Completion]]:
    return [
        asyncio.ensure_future(engine.generate(Request(f"t{ticket}/{i}", (1, 2), Sampling(max_tokens=tokens))))
        for i in range(rollouts)
    ]


def run(case: Callable[[ProcessEngine, FactList], object], **settings: object) -> FactList:
    facts = FactList()

    async def go() -> None:
        engine = engine_of(facts, **settings)  # type: ignore[arg-type]
        await engine.launch()
        await engine.open(EngineStart("", {}, {}))
        try:
            await case(engine, facts)  # type: ignore[misc]
        finally:
            await engine.close()

    virtual_time.run(go())
    return facts


def test_a_poisoned_ticket_is_given_up_and_those_beside_it_lose_no_token() -> None:
    async def case(engine: ProcessEngine, facts: FactList) -> None:
        both = [asked(engine, ticket) for ticket in range(4)]
        answers = await asyncio.gather(*(one for ticket in (0, 2, 3) for one in both[ticket]))
        assert {answer.tokens for answer in answers} == {tuple(range(100, 108))}
        for one in both[1]:
            with pytest.raises(
                PoisonedRequest, match="t1 is given up: 3 engine processes died while they worked on it"
            ):
                await one
        with pytest.raises(PoisonedRequest):
            await asked(engine, 1)[0]
        alone = [tickets for tickets in engine.seen if "t1" in tickets]  # type: ignore[attr-defined]
        assert alone[-1] == {"t1"}, "all of them were suspects then, and one was worked on"

    facts = run(case, poisoned={1})
    assert len(facts.of(WorkerLost)) == 3
    assert sum("given up" in warning.message for warning in facts.of(Warned)) == 1


def test_one_poisoned_ticket_after_another_does_not_end_an_engine_that_serves_the_others() -> None:
    async def case(engine: ProcessEngine, facts: FactList) -> None:
        for ticket in range(12):
            for one in asked(engine, ticket):
                if ticket % 3 == 2:
                    with pytest.raises(PoisonedRequest):
                        await one
                else:
                    assert len((await one).tokens) == 8

    facts = run(case, poisoned={2, 5, 8, 11})
    assert len(facts.of(WorkerLost)) == 12


def test_an_engine_that_dies_of_everything_is_given_up_itself() -> None:
    async def case(engine: ProcessEngine, facts: FactList) -> None:
        with pytest.raises(WorkerDied, match="death no. 4 .engine.max_deaths allows 3"):
            for ticket in range(9):
                for one in asked(engine, ticket):
                    with pytest.raises(PoisonedRequest):
                        await one

    assert len(run(case, poisoned=set(range(9))).of(WorkerLost)) == 4


def test_a_suspect_that_waits_for_its_turn_can_be_cancelled_or_interrupted() -> None:
    async def case(engine: ProcessEngine, facts: FactList) -> None:
        tasks = [asked(engine, ticket, rollouts=1, tokens=50)[0] for ticket in range(4)]
        for _ in range(2):
            await asyncio.sleep(5.0)
            engine.kill()
        await asyncio.sleep(5.0)  # all are suspects: one runs, three wait
        waiting = [task for number, task in enumerate(tasks) if f"t{number}" not in engine.seen[-1]]  # type: ignore[attr-defined]
        assert len(waiting) == 3
        waiting[0].cancel()
        await asyncio.sleep(1.0)
        await engine.abort()
        ends = await asyncio.gather(*(task for task in tasks if task is not waiting[0]))
        assert [end.stop for end in ends] == ["interrupted"] * 3
        assert len((await asked(engine, 9)[0]).tokens) == 8

    run(case, poisoned=set())
