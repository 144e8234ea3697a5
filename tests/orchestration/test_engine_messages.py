"""`ProcessEngine` against workers that repeat, lose and break off what they say: no token is lost or told twice in silence."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.errors import WorkerDied
from headrace.observe.facts import WorkerLost
from headrace.orchestration.workers.clients import ProcessEngine
from headrace.orchestration.workers.messages import EngineStart
from headrace.orchestration.workers.process import Worker
from headrace.orchestration.workers.wire import Frame, WorkerEnd, pack, pack_payload, unpack
from headrace.reports import Capabilities, LoadReport
from headrace.steps import Finished, StepOutput
from headrace.types import Request, Sampling
from headrace.weights import WeightUpdate


class Line:
    """The worker's end of the connection, whose messages may come twice, or never."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._reader = sock, WorkerEnd(sock)
        self.number = 0

    def receive(self) -> Frame | None:
        return self._reader.receive()

    def send(self, method: str, payload: Any, to: int = 0, times: int = 1) -> None:
        """`times` 0 loses it."""
        data = pack(Frame(to, method, pack_payload(payload), number=self.number))
        self.number += 1
        for _ in range(times):
            self._sock.sendall(data)

    def tell(self, request: str, token: int, stop: Any = None, times: int = 1) -> None:
        ends = (Finished(request, stop),) if stop else ()
        self.send("output", StepOutput(0, (request,), (token,), (-0.5,), (0,), ends), times=times)

    def until(self, method: str) -> Frame:
        """Answers what is asked before."""
        answers = {"start": Capabilities(64), "load": LoadReport(0, 0.0, 0.0)}
        while (frame := self.receive()) is not None:
            if frame.method == method:
                return frame
            if frame.id:
                self.send(frame.method, answers.get(frame.method), to=frame.id)
        raise ConnectionError

    def leave(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)


Script = Callable[[Line], None]


class ScriptedWorker(Worker):
    """A thread in place of a process."""

    def __init__(self, script: Script, who: str, log: Path, on_push: Any) -> None:
        super().__init__(who, log, on_push)
        self._script = script

    async def start(self, kind: str, fds: Any, cores: Any) -> None:
        self._ended = asyncio.get_running_loop().create_future()
        ours, theirs = socket.socketpair()

        def run() -> None:
            line = Line(theirs)
            try:
                self._script(line)
                while line.receive() is not None:
                    pass
            except OSError:
                pass
            theirs.close()

        threading.Thread(target=run, daemon=True).start()
        await self.channel.open(ours)

    def _lost(self, wrong: str) -> None:
        assert self._ended is not None
        if not self._ended.done():
            self._ended.set_result(wrong or "ended")


class Facts:
    def __init__(self) -> None:
        self.lost: list[WorkerLost] = []

    def record(self, fact: Any) -> None:
        if isinstance(fact, WorkerLost):
            self.lost.append(fact)


def over(
    *scripts: Script,
    use: Callable[[ProcessEngine, Facts], Coroutine[Any, Any, None]],
    tmp_path: Path,
    then: type[ScriptedWorker] = ScriptedWorker,
) -> None:
    """The first script is the first worker's, the next that of the one that replaces it, and so on; behind them come workers of
    the kind `then`."""
    scripts_left = [lambda line: None, *scripts]  # the one that is never started

    def make(who: str, log: Path, on_push: Any) -> Worker:
        if scripts_left:
            return ScriptedWorker(scripts_left.pop(0), who, log, on_push)
        return then(lambda line: None, who, log, on_push)

    async def go() -> None:
        facts = Facts()
        engine = ProcessEngine((), 0, tmp_path / "log", 2, facts, lambda: 0.0, make_worker=make)
        try:
            await engine.launch()
            await engine.open(EngineStart("", {}, {}))
            await engine.load(WeightUpdate(0, "full", "", 0, 0, 0.0))
            await asyncio.wait_for(use(engine, facts), 120)
        finally:
            await engine.close()

    asyncio.run(go())


def wanted(name: str) -> Request:
    return Request(name, (1, 2), Sampling(max_tokens=8))


def test_what_is_said_twice_is_heard_once(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        line.until("add")
        for token in (5, 6, 7):
            line.tell("r", token, times=token - 4)
        line.tell("r", 8, "length", times=2)

    async def use(engine: ProcessEngine, facts: Facts) -> None:
        answer = await engine.generate(wanted("r"))
        assert answer.tokens == (5, 6, 7, 8) and answer.stop == "length"
        assert not facts.lost

    over(script, use=use, tmp_path=tmp_path)


def test_what_is_missing_is_named_and_made_good_from_the_prefix(tmp_path: Path) -> None:
    went_on: list[Request] = []

    def first(line: Line) -> None:
        line.until("add")
        line.tell("r", 5)
        line.tell("r", 6, times=0)
        line.tell("r", 7)

    def second(line: Line) -> None:
        went_on.append(unpack(line.until("add").payload, Request))
        line.tell("r", 6)
        line.tell("r", 7, "stop")

    async def use(engine: ProcessEngine, facts: Facts) -> None:
        answer = await engine.generate(wanted("r"))
        assert answer.tokens == (5, 6, 7), "neither lost nor twice"
        assert went_on[0].prefix == (5,)
        (lost,) = facts.lost
        assert lost.how == "message 3 of the engine is lost: number 4 (output) came in its place"

    over(first, second, use=use, tmp_path=tmp_path)


def test_a_gap_ends_the_engine_where_it_may_die_no_more(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        line.until("add")
        line.number += 3
        line.tell("r", 5)

    async def use(engine: ProcessEngine, facts: Facts) -> None:
        with pytest.raises(WorkerDied, match=r"message 2 to 4 of the engine is lost.*death no. 3"):
            await engine.generate(wanted("r"))
        assert len(facts.lost) == 3

    over(script, script, script, use=use, tmp_path=tmp_path)


def dies(line: Line) -> None:
    line.until("add")
    line.leave()


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        (None, "the engine process could not be started: .*Cannot allocate memory"),
        (OSError(28, "No space left"), "died and could not be replaced: .*No space left"),
        (RuntimeError("can't start new thread"), "died and could not be replaced: can't start new thread"),
    ],
)
def test_an_engine_that_cannot_be_replaced_ends_the_run_at_once(
    tmp_path: Path, second: Exception | None, sentence: str
) -> None:
    """Whoever waits for it hears why: requests, calls, and the pipeline's sentinel. Nobody waits for a deadline."""

    class Second(ScriptedWorker):
        async def start(self, kind: str, fds: Any, cores: Any) -> None:
            if second:
                raise second
            raise WorkerDied(self.who, "could not be started: [Errno 12] Cannot allocate memory")

    async def use(engine: ProcessEngine, facts: Facts) -> None:
        for heard in (engine.generate(wanted("r")), engine.watch(), engine.stats(), engine.drain()):
            with pytest.raises(WorkerDied, match=sentence):
                await heard
        assert len(facts.lost) == 1

    over(dies, use=use, tmp_path=tmp_path, then=Second)


def test_a_worker_that_cannot_be_started_says_so(tmp_path: Path) -> None:
    async def go() -> None:
        worker = Worker("engine", tmp_path / "gone" / "engine.log")  # a log that cannot be opened
        with pytest.raises(WorkerDied, match="engine process could not be started: .*No such file"):
            await worker.start("engine", [], ())
        assert "could not be started" in await worker.ended(), "and whoever waits for its end is not left waiting"
        await worker.close()

    asyncio.run(go())


def test_listeners_hear_everything_first_and_as_it_was_said(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        line.until("add")
        for token in (5, 6):
            line.tell("r", token)
        line.until("cancel")
        line.tell("r", 7, "stop")

    async def use(engine: ProcessEngine, facts: Facts) -> None:
        heard: list[tuple[StepOutput, list[int]]] = []
        other: list[bytes] = []

        def listen(told: bytes) -> None:
            known = engine.unfinished()["r"].tokens
            heard.append((msgspec.msgpack.decode(told, type=StepOutput), known))
            if len(heard) == 2:
                seen.set()

        seen = asyncio.Event()
        engine.listen(listen)
        engine.listen(other.append)
        answer = asyncio.ensure_future(engine.generate(wanted("r")))
        await seen.wait()
        now = engine.unfinished()["r"]
        assert now.tokens == [5, 6] and now.request == wanted("r") and not answer.done()
        engine.unlisten(other.append)
        engine._send("cancel", "nobody")
        assert (await answer).tokens == (5, 6, 7)
        assert now.tokens == [5, 6] and not engine.unfinished(), "a copy"
        assert [(told.tokens, known) for told, known in heard] == [((5,), []), ((6,), [5]), ((7,), [5, 6])]
        assert len(other) == 2

    over(script, use=use, tmp_path=tmp_path)


def test_a_listener_that_cannot_keep_up_its_journal_ends_the_engine(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        line.until("add")
        line.tell("r", 5)
        line.tell("r", 6, "stop")

    async def use(engine: ProcessEngine, facts: Facts) -> None:
        def full(told: bytes) -> None:
            raise OSError(28, "No space left on device")

        engine.listen(full)
        with pytest.raises(OSError, match="No space left"):
            await engine.generate(wanted("r"))
        with pytest.raises(OSError, match="No space left"):
            await engine.watch()
        with pytest.raises(OSError, match="No space left"):
            await engine.generate(wanted("s"))

    over(script, use=use, tmp_path=tmp_path)


def test_who_was_aborted_stays_so_when_the_process_dies_before_it_says_so(tmp_path: Path) -> None:
    went_on: list[str] = []

    def first(line: Line) -> None:
        line.until("add")
        line.tell("r", 5)
        line.send("abort", None, to=line.until("abort").id)
        line.until("add")
        line.tell("late", 6)
        line.leave()

    def second(line: Line) -> None:
        frame = line.until("add")
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

    over(first, second, use=use, tmp_path=tmp_path)
