"""A worker whose engine is a server: it starts one on its machine, and passes on what the run asks and what the server samples.

    controller ──frames── worker ──HTTP on the loopback── server (vLLM, SGLang, headrace)
                            └──── its process, its log, and its weights where it cannot fetch them

To the run it is an engine like any other: seats, spares, connections that come back, TLS, and the tickets that end engines go by what is known of workers. So the
worker starts no second server: when the first has ended it says how, and ends too, and the run gives its seat to another, here or elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from headrace.core.errors import HeadraceError, IdentityError
from headrace.core.printing import echo, say
from headrace.core.reports import Capabilities
from headrace.core.steps import StepOutput
from headrace.core.types import Request
from headrace.core.weights import WeightUpdate
from headrace.engine.config import EngineConfig
from headrace.engine.fleet.member import MemberEngine
from headrace.engine.remote.connection import Connection
from headrace.engine.remote.remote_engine import check_state
from headrace.facts.facts import EngineSample, Fact, Warned, WorkerLost
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.processes.health.owned_directory import OwnedDirectory
from headrace.processes.joining.greeting import ENGINE_PYTHON
from headrace.processes.wire import Frame, WorkerEnd, fail, unpack
from headrace.run.worker.own_server import Surroundings, engine_over, server_process
from headrace.run.worker.worker_messages import LAST_WORDS, EngineStart, LastWords

HOLD = 0.02
"""Seconds for which what the server has sampled is held, to be sent in one message: it comes token by token and request by request."""

ENDLESS = 1e9
"""Seconds. The waits of a run have their deadlines in the controller."""

LOG_EVERY = 0.5
"""Seconds between two looks at what the server prints."""


def in_one(outputs: Sequence[StepOutput]) -> list[StepOutput]:
    """Returns the outputs with neighbours of one version as one, in their order.

    >>> one, other = StepOutput(4, ("a",), (20,), (-0.1,), (4,)), StepOutput(4, ("b",), (8,), (-2.0,), (4,))
    >>> in_one([one, other]) == [StepOutput(4, ("a", "b"), (20, 8), (-0.1, -2.0), (4, 4))]
    True
    """
    found: list[StepOutput] = []
    for output in outputs:
        last = found[-1] if found else None
        ended = {end.request_id for end in last.finished} if last else set()
        if last is None or (last.version, last.mixed) != (output.version, output.mixed) or ended & {*output.requests}:
            found.append(output)
            continue
        columns = ("request_ids", "tokens", "logprobs", "kv_versions", "finished", "details", "scores")
        both = {name: getattr(last, name) + getattr(output, name) for name in columns}
        found[-1] = msgspec.structs.replace(last, **both)
    return found


class ServerLoop:
    """Obeys the controller. All of it runs in one event loop."""

    def __init__(self, end: WorkerEnd, engine: MemberEngine, leave: Callable[[LastWords], object]) -> None:
        """`engine`: over the server. `leave`: ends this process."""
        self._end, self._engine, self._leave = end, engine, leave
        self._held = list[StepOutput]()
        self._asked: dict[str, asyncio.Task[None]] = {}
        """Requests that are at the server, by id."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._loads = asyncio.Lock()
        engine.listen(self._hold)

    def obey(self, frame: Frame) -> None:
        match frame.method:
            case "add":
                request = unpack(frame.payload, Request)
                self._asked[request.id] = self._go(self._generate(request, self._asked.get(request.id)))
            case "cancel":
                if task := self._asked.get(unpack(frame.payload, str)):
                    task.cancel()
            case "load":
                self._answer(frame, partial(self._load, *unpack(frame.payload, tuple[WeightUpdate, int])))
            case "drain" | "resume" | "abort" | "stats":
                self._answer(frame, getattr(self._engine, frame.method))
            case method:
                raise AssertionError(f"unknown message {method}")

    async def _generate(self, request: Request, before: asyncio.Task[None] | None) -> None:
        """`before`: the request with its id that was cancelled, and may not have left the server yet."""
        try:
            if before:
                await asyncio.wait([before])
            await self._engine.until_end(request)
        except ValueError as error:
            self._flush()
            self._end.push("refused", (request.id, str(error)))
        except HeadraceError:  # the watch says it
            pass
        finally:
            if self._asked.get(request.id) is asyncio.current_task():
                del self._asked[request.id]

    async def _load(self, update: WeightUpdate, parts: int) -> Any:
        async with self._loads:
            return await self._engine.load(update, parts)

    def _answer(self, frame: Frame, ask: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        async def answered() -> None:
            try:
                result = await ask()
            except Exception as error:
                self._flush()
                fail(self._end, frame, error)
            else:
                self._flush()
                self._end.reply(frame, result)

        self._go(answered())

    def _go(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- to the controller ------------------------------------------------------------------------------------------------

    def _hold(self, output: StepOutput) -> None:
        if not self._held:
            asyncio.get_running_loop().call_later(HOLD, self._flush)
        self._held.append(output)

    def _flush(self) -> None:
        """Called before anything else is sent, so that the order stays that of the server."""
        held, self._held = self._held, []
        for output in in_one(held):
            self._end.push("output", output)

    def heard(self, fact: Fact) -> None:
        """Takes what the engine records."""
        if isinstance(fact, EngineSample):
            self._flush()
            self._end.push("stats", fact.stats)
        elif isinstance(fact, Warned):
            say(fact.message)
        elif isinstance(fact, WorkerLost):
            self._say_last(LastWords(f"its server {fact.how}"))

    async def watch(self) -> None:
        """Weights of somebody else, or such as were not loaded, end the engine for good."""
        try:
            await self._engine.watch()
        except HeadraceError as error:
            self._say_last(
                LastWords(str(error), "IdentityError" if isinstance(error, IdentityError) else "ConfigError")
            )

    def _say_last(self, words: LastWords) -> None:
        self._flush()
        with contextlib.suppress(OSError):
            self._end.push(LAST_WORDS, words)
        self._leave(words)


class ServerWorker:
    """The server of a worker, and what belongs to it on this machine."""

    def __init__(self, end: WorkerEnd, start: EngineStart) -> None:
        """Raises ConfigError if this machine cannot start the server."""
        assert start.server and start.transport, "a worker with a server has been told what it needs"
        self._place = OwnedDirectory("server")
        end.last_acts.append(self._place.remove)
        python = os.environ.get(ENGINE_PYTHON) or start.engine["python"]
        settings = self._settings = EngineConfig(**{**start.engine, "python": python})
        around = Surroundings(
            model_dir=Path(start.model_dir),
            transport=start.transport,
            logs=Path(self._place.path),
            telemetry=Telemetry(self._heard, time.monotonic, Waits(self._heard, time.monotonic, ENDLESS, ENDLESS)),
            kept="this worker's",
        )
        self._host = host = server_process(settings, start.server, around)
        connection = Connection(host.url, host.token)
        self._served = served = engine_over(
            settings, start.server, around, connection=connection, host=host, patience=settings.patience
        )
        served.prepare(start.manifests)
        end.last_acts.append(self.clear)
        self.loop = ServerLoop(end, served.engine, self._leave)

    async def open(self) -> Capabilities:
        """Starts the server, and waits until it answers. Raises HeadraceError if it does not come up, or is another one than the run needs."""
        engine, settings = self._served.engine, self._settings
        self._tasks = [asyncio.ensure_future(self._print_log())]
        state = await engine.open()
        check_state(state, settings.serving_dtype, settings.context_length, self._host.url)
        self._tasks.append(asyncio.ensure_future(self.loop.watch()))
        return engine.capabilities

    def clear(self) -> None:
        """Ends the server at once, and removes what it and this worker have written. Called from any thread."""
        self._host.kill()
        if self._served.carrier:
            self._served.carrier.close()
        self._place.remove()

    def _heard(self, fact: Fact) -> None:
        self.loop.heard(fact)

    def _leave(self, words: LastWords) -> NoReturn:
        self._print()
        say(words.why)
        self.clear()
        os._exit(1)

    async def _print_log(self) -> None:
        """Prints what the server prints, for whoever started this worker and for the run's `logs/`."""
        while True:
            await asyncio.sleep(LOG_EVERY)
            self._print()

    def _print(self) -> None:
        if said := self._host.said_since():
            echo(said.rstrip("\n"), err=True)


def serve_server(end: WorkerEnd, inbox: queue.Queue[Frame], first: Frame) -> None:
    """Serves until the connection ends, which ends this process, and the server with it. `first`: the start message."""
    asyncio.run(_serve(end, inbox, first))


def _end_by(loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> NoReturn:
    """An error that nobody expects ends the process: what it was about would never be answered."""
    loop.default_exception_handler(dict(context))
    os._exit(1)


async def _serve(end: WorkerEnd, inbox: queue.Queue[Frame], first: Frame) -> None:
    here = asyncio.get_running_loop()
    try:
        worker = ServerWorker(end, unpack(first.payload, EngineStart))
        capabilities = await worker.open()
    except Exception as error:
        fail(end, first, error)
        for act in end.last_acts:
            act()
        return
    end.reply(first, capabilities)
    here.set_exception_handler(_end_by)

    def pass_on() -> None:
        while True:
            here.call_soon_threadsafe(worker.loop.obey, inbox.get())

    threading.Thread(target=pass_on, daemon=True).start()
    await asyncio.Event().wait()
