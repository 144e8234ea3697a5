"""`ProcessEngine` against workers that repeat, lose and break off what they say: no token is lost or told twice in silence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import WorkerDied
from headrace.core.protocols import Heard, Job
from headrace.core.reports import Capabilities, LoadReport, SleepReport
from headrace.core.steps import Finished, StepOutput
from headrace.core.types import Request, Sampling
from headrace.core.weights import WeightUpdate
from headrace.facts.facts import WorkerLost
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.own_groups import Suspects
from headrace.loop.world import virtual_time
from headrace.processes.launch.local import LocalLauncher
from headrace.processes.wire import Frame, pack, pack_payload, unpack
from headrace.run.clients.process_engine import ProcessEngine
from headrace.run.worker.worker_messages import EngineStart
from headrace.testing.fake_worker import FakeProcess, FakeWorker, InstantNetwork


class Line(FakeProcess):
    """A worker that follows a script. Its messages may come twice, or never."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script

    async def serve(self) -> None:
        await self._script(self)
        while True:
            await self.receive()

    def say(self, method: str, payload: Any, to: int = 0, times: int = 1) -> None:
        """`times` 0 loses it."""
        data = pack(Frame(to, method, pack_payload(payload), number=self.number))
        self.number += 1
        for _ in range(times):
            self.to_controller.put(data)

    def tell(self, request: str, token: int, stop: Any = None, times: int = 1) -> None:
        ends = (Finished(request, stop),) if stop else ()
        self.say("output", StepOutput(0, (request,), (token,), (-0.5,), (0,), ends), times=times)

    async def until(self, method: str) -> Frame:
        """Answers what is asked before."""
        answers = {"start": Capabilities(64), "load": LoadReport(0, 0.0, 0.0)}
        while (frame := await self.receive()).method != method:
            if frame.id:
                self.reply(frame, answers.get(frame.method))
        return frame

    def leave(self) -> None:
        self.die("ended")


Script = Callable[[Line], Coroutine[Any, Any, None]]


async def idle(line: Line) -> None:
    await line.until("nothing that anybody asks for")


class Scripted:
    """Protocol `Launcher`: the first script is the first worker's, the next that of the one that replaces it, and so on.

    `broken`: raised instead of starting a worker when there is no script left."""

    def __init__(self, scripts: Sequence[Script], broken: Exception | None = None) -> None:
        self._scripts, self._broken = list(scripts), broken

    def worker(self, job: Job, heard: Heard) -> FakeWorker:
        if self._scripts or not self._broken:
            script = self._scripts.pop(0) if self._scripts else idle
            return FakeWorker(job.who, lambda: Line(script), heard, InstantNetwork())
        return Unstartable(job.who, self._broken)


class Unstartable(FakeWorker):
    def __init__(self, who: str, error: Exception) -> None:
        super().__init__(who, lambda: Line(idle), lambda method, payload: None, InstantNetwork())
        self._error = error

    async def start(self) -> None:
        raise self._error


class Facts:
    def __init__(self) -> None:
        self.lost: list[WorkerLost] = []

    def record(self, fact: Any) -> None:
        if isinstance(fact, WorkerLost):
            self.lost.append(fact)


def over(
    *scripts: Script,
    use: Callable[[ProcessEngine, Facts], Coroutine[Any, Any, None]],
    broken: Exception | None = None,
) -> None:
    async def go() -> None:
        facts, clock = Facts(), asyncio.get_running_loop().time
        launcher = Scripted(scripts, broken)
        engine = ProcessEngine(
            launcher,
            Job("engine", "engine"),
            2,
            Telemetry(facts.record, clock, Waits(facts.record, clock, 1e6, 2e6)),
            suspects=Suspects(9),  # deaths count for the engine, not for a ticket
        )
        try:
            await engine.launch()
            await engine.open(EngineStart("", {}, {}))
            await engine.load(WeightUpdate(version=0, kind="full", fingerprint="", nbytes=0, seconds=0.0))
            await use(engine, facts)
        finally:
            await engine.close()

    virtual_time.run(go())


def wanted(name: str) -> Request:
    return Request(name, (1, 2), Sampling(max_tokens=8))


def test_what_is_said_twice_is_heard_once() -> None:
    async def script(line: Line) -> None:
        await line.until("add")
        for token in (5, 6, 7):
            line.tell("r", token, times=token - 4)
        line.tell("r", 8, "length", times=2)

    async def use(engine: ProcessEngine, facts: Facts) -> None:
        answer = await engine.generate(wanted("r"))
        assert answer.tokens == (5, 6, 7, 8) and answer.stop == "length"
        assert not facts.lost

    over(script, use=use)


def test_what_is_missing_is_named_and_made_good_from_the_prefix() -> None:
    went_on: list[Request] = []

    async def first(line: Line) -> None:
        await line.until("add")
        line.tell("r", 5)
        line.tell("r", 6, times=0)
        line.tell("r", 7)

    async def second(line: Line) -> None:
        went_on.append(unpack((await line.until("add")).payload, Request))
        line.tell("r", 6)
        line.tell("r", 7, "stop")

    async def use(engine: ProcessEngine, facts: Facts) -> None:
        answer = await engine.generate(wanted("r"))
        assert answer.tokens == (5, 6, 7), "neither lost nor twice"
        assert went_on[0].prefix == (5,)
        (lost,) = facts.lost
        assert lost.how == "was ended: message 3 of the engine is lost: number 4 (output) was received instead"

    over(first, second, use=use)


def test_a_gap_ends_the_engine_where_it_may_die_no_more() -> None:
    async def script(line: Line) -> None:
        await line.until("add")
        line.number += 3
        line.tell("r", 5)

    async def use(engine: ProcessEngine, facts: Facts) -> None:
        with pytest.raises(WorkerDied, match=r"message 2 to 4 of the engine is lost.*death no. 3"):
            await engine.generate(wanted("r"))
        assert len(facts.lost) == 3

    over(script, script, script, use=use)


async def dies(line: Line) -> None:
    await line.until("add")
    line.leave()


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        (None, "the engine process could not be started: .*Cannot allocate memory"),
        (OSError(28, "No space left"), "died and could not be replaced: .*No space left"),
        (RuntimeError("can't start new thread"), "died and could not be replaced: can't start new thread"),
    ],
)
def test_an_engine_that_cannot_be_replaced_ends_the_run_at_once(second: Exception | None, sentence: str) -> None:
    """Whoever waits for it hears why: requests, calls, and the pipeline's sentinel. Nobody waits for a deadline."""

    broken = second or WorkerDied("engine", "could not be started: [Errno 12] Cannot allocate memory")

    async def use(engine: ProcessEngine, facts: Facts) -> None:
        for heard in (engine.generate(wanted("r")), engine.watch(), engine.stats(), engine.drain()):
            with pytest.raises(WorkerDied, match=sentence):
                await heard
        assert len(facts.lost) == 1

    over(dies, use=use, broken=broken)


def test_a_worker_that_cannot_be_started_says_so(tmp_path: Path) -> None:
    async def go() -> None:
        launcher = LocalLauncher(tmp_path / "gone")  # no log can be opened there
        worker = launcher.worker(Job("engine", "engine"), lambda method, payload: None)
        with pytest.raises(WorkerDied, match="engine process could not be started: .*No such file"):
            await worker.start()
        assert "could not be started" in await worker.watch(), "and whoever waits for its end is not left waiting"
        await worker.end()

    asyncio.run(go())


def test_listeners_hear_everything_first_and_as_it_was_said() -> None:
    async def script(line: Line) -> None:
        await line.until("add")
        for token in (5, 6):
            line.tell("r", token)
        await line.until("cancel")
        line.tell("r", 7, "stop")

    async def use(engine: ProcessEngine, facts: Facts) -> None:
        heard: list[tuple[StepOutput, list[int]]] = []
        other: list[StepOutput] = []

        def listen(told: StepOutput) -> None:
            heard.append((told, list(engine.unfinished()["r"].tokens)))
            if len(heard) == 2:
                seen.set()

        seen = asyncio.Event()
        engine.listen(listen)
        engine.listen(other.append)
        answer = asyncio.ensure_future(engine.generate(wanted("r")))
        await seen.wait()
        now = engine.unfinished()["r"]
        assert list(now.tokens) == [5, 6] and now.transcript.request == wanted("r") and not answer.done()
        engine._keeper.push("cancel", "nobody")
        assert (await answer).tokens == (5, 6, 7)
        assert list(now.tokens) == [5, 6] and not engine.unfinished(), "a copy"
        assert [(told.tokens, known) for told, known in heard] == [((5,), []), ((6,), [5]), ((7,), [5, 6])]
        assert len(other) == 3

    over(script, use=use)


def test_a_listener_that_cannot_keep_up_its_journal_ends_the_engine() -> None:
    async def script(line: Line) -> None:
        await line.until("add")
        line.tell("r", 5)
        line.tell("r", 6, "stop")

    async def use(engine: ProcessEngine, facts: Facts) -> None:
        def full(told: StepOutput) -> None:
            raise OSError(28, "No space left on device")

        engine.listen(full)
        with pytest.raises(OSError, match="No space left"):
            await engine.generate(wanted("r"))
        with pytest.raises(OSError, match="No space left"):
            await engine.watch()
        with pytest.raises(OSError, match="No space left"):
            await engine.generate(wanted("s"))

    over(script, use=use)


def test_who_was_aborted_stays_so_when_the_process_dies_before_it_says_so() -> None:
    went_on: list[str] = []

    async def first(line: Line) -> None:
        await line.until("add")
        line.tell("r", 5)
        line.reply(await line.until("abort"), None)
        await line.until("add")
        line.tell("late", 6)
        line.leave()

    async def second(line: Line) -> None:
        frame = await line.until("add")
        went_on.append(unpack(frame.payload, Request).id)
        line.tell("late", 7, "stop")

    async def use(engine: ProcessEngine, facts: Facts) -> None:
        first_told = asyncio.Event()
        engine.listen(lambda told: first_told.set())
        early = asyncio.ensure_future(engine.generate(wanted("r")))
        await first_told.wait()
        await engine.abort()
        late = asyncio.ensure_future(engine.generate(wanted("late")))
        assert (await early).stop == "interrupted" and (await early).tokens == (5,)
        assert (await late).tokens == (6, 7) and went_on == ["late"]

    over(first, second, use=use)


def dying_after(seconds: float) -> Script:
    async def script(line: Line) -> None:
        asyncio.get_running_loop().call_later(seconds, line.leave)
        await idle(line)

    return script


def test_deaths_in_a_row_end_an_engine_and_those_before_an_hour_of_work_are_forgiven() -> None:
    """In a run of weeks every engine dies now and then; one that dies at once is broken."""

    async def works_on(engine: ProcessEngine, facts: Facts) -> None:
        await asyncio.sleep(6 * 4000.0)
        assert [one.deaths for one in facts.lost] == [1, 2, 3, 4, 5]

    async def is_given_up(engine: ProcessEngine, facts: Facts) -> None:
        with pytest.raises(WorkerDied, match="its death no. 3"):
            await engine.watch()
        assert [one.deaths for one in facts.lost] == [1, 2, 3]

    over(*[dying_after(4000.0)] * 5, use=works_on)
    over(*[dying_after(60.0)] * 5, use=is_given_up)


def test_a_version_published_while_the_engine_wakes_is_loaded_once() -> None:
    """Both ask for it: who publishes it, and the wake, which loads what is wanted by then. Engines refuse the second."""
    loaded: list[int] = []

    async def script(line: Line) -> None:
        while True:
            frame = await line.receive()
            if frame.method == "load":
                update, _ = unpack(frame.payload, tuple[WeightUpdate, int])
                await asyncio.sleep(5)
                loaded.append(update.version)
                line.reply(frame, LoadReport(update.version, 0.0, 0.0))
            elif frame.id:
                answers = {"start": Capabilities(64), "sleep": SleepReport(), "wake": SleepReport()}
                line.reply(frame, answers.get(frame.method))

    async def use(engine: ProcessEngine, facts: Facts) -> None:
        await engine.sleep(keep=False)
        newer = asyncio.ensure_future(
            engine.load(WeightUpdate(version=1, kind="full", fingerprint="", nbytes=0, seconds=0.0))
        )
        await asyncio.gather(newer, engine.wake(replaced=False))
        assert newer.result().version == 1 and loaded == [0, 1]

    over(script, use=use)


def test_what_cannot_be_sent_leaves_nothing_that_a_new_process_is_given() -> None:
    given: list[Any] = []

    async def second(line: Line) -> None:
        given.append(unpack((await line.until("add")).payload, Request))
        line.tell("r", 7, "stop")

    async def use(engine: ProcessEngine, facts: Facts) -> None:
        with pytest.raises(OverflowError):
            await engine.generate(Request("r", (1, 2), Sampling(top_k=1 << 64)))
        with pytest.raises(OverflowError):
            await engine.load(WeightUpdate(version=1, kind="full", fingerprint="", nbytes=1 << 64, seconds=0.0))
        assert (await engine.generate(wanted("r"))).tokens == (7,)
        assert given == [wanted("r")] and len(facts.lost) == 1

    over(dies, second, use=use)
