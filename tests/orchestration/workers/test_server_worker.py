"""The loop of a worker that has a server: its frames, their order, and its last words. The server is a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import ConfigError, HeadraceError, IdentityError
from headrace.core.protocols import Heard, Job
from headrace.core.reports import EngineStats, LoadReport
from headrace.core.steps import Finished, StepOutput
from headrace.core.types import Request
from headrace.core.weights import WeightUpdate
from headrace.facts.facts import EngineSample, WorkerLost
from headrace.processes.wire import Frame, pack_payload
from headrace.run.clients.keeper import Keeper
from headrace.run.worker.server_loop import ServerLoop, in_one
from headrace.run.worker.worker_messages import LAST_WORDS, LastWords
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.makers import request

TYPES: dict[str, Any] = {"output": StepOutput, "stats": EngineStats, LAST_WORDS: LastWords, "load": LoadReport}


@dataclass
class Wire:
    """The worker's end of a connection: what it sends, in order."""

    sent: list[tuple[str, Any]] = field(default_factory=list)

    def push(self, method: str, payload: Any) -> None:
        self.sent.append((method, msgspec.msgpack.decode(pack_payload(payload), type=TYPES.get(method, Any))))

    def reply(self, to: Frame, payload: Any) -> None:
        self.push(to.method, payload)

    def fail(self, to: Frame, error: str, message: str) -> None:
        self.sent.append((f"{to.method} failed", f"{error}: {message}"))

    def tokens(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for method, output in self.sent:
            for name in output.request_ids if method == "output" else ():
                counts[name] = counts.get(name, 0) + 1
        return counts

    def ends(self) -> dict[str, str]:
        return {end.request_id: end.stop for name, said in self.sent if name == "output" for end in said.finished}


class Watched(FakeEngine):
    """A fake engine that may be given up, and that a cancelled request leaves a while later, as it does a server."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.there = set[str]()
        self.given_up = asyncio.get_running_loop().create_future()

    async def watch(self) -> None:
        await self.given_up

    async def until_end(self, request: Request) -> Finished:
        if request.id in self.there:
            raise ValueError(f"the engine has a request {request.id} already")
        self.there.add(request.id)
        try:
            return await super().until_end(request)
        finally:
            await asyncio.sleep(0.01)
            self.there.remove(request.id)


UPDATE = WeightUpdate(version=0, kind="full", fingerprint="0", nbytes=1, seconds=0.0, where={})


@asynccontextmanager
async def looping(**more: Any) -> AsyncIterator[tuple[ServerLoop, Wire, Watched, list[LastWords], Callable[..., None]]]:
    wire, engine, left = (
        Wire(),
        Watched(seconds_per_token=0.002, trusts=True, length=lambda rng: 1000, **more),
        list[LastWords](),
    )
    loop = ServerLoop(wire, engine, left.append)  # type: ignore[arg-type]

    def ask(method: str, payload: Any = None) -> None:
        loop.obey(Frame(1, method, pack_payload(payload)))

    ask("load", (UPDATE, 1))
    await until(lambda: "load" in dict(wire.sent))
    yield loop, wire, engine, left, ask


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.005)


def test_requests_are_sampled_to_their_ends_in_few_messages_and_answers_come_behind_their_tokens() -> None:
    async def case() -> None:
        async with looping() as (_, wire, _, _, ask):
            for name in "abcd":
                ask("add", request(name))
            await until(lambda: len(wire.ends()) == 4)
            assert wire.tokens() == dict.fromkeys("abcd", 8)
            outputs = [said for method, said in wire.sent if method == "output"]
            assert len(outputs) < 16, "four requests of eight tokens each came one by one"
            ask("add", request("e"))
            ask("drain")
            await until(lambda: any(method == "drain" for method, _ in wire.sent))
            assert wire.sent[-1][0] == "drain" and wire.ends()["e"]

    asyncio.run(case())


def test_a_request_that_was_cancelled_may_come_again_at_once_under_its_name() -> None:
    async def case() -> None:
        async with looping() as (_, wire, engine, _, ask):
            ask("add", request("a", tokens=1000))
            await until(lambda: wire.tokens().get("a"))
            ask("cancel", "a")
            ask("cancel", "nobody")
            ask("add", request("a"))
            await until(wire.ends)
            assert len(engine.requests) == 2 and not [said for method, said in wire.sent if method == "refused"]

    asyncio.run(case())


def test_a_refusal_and_an_interruption_reach_the_run() -> None:
    async def case() -> None:
        async with looping() as (_, wire, _, _, ask):
            ask("add", request("long", adapter="nobody's"))
            await until(lambda: any(method == "refused" for method, _ in wire.sent))
            ask("add", request("a", tokens=1000))
            await until(lambda: wire.tokens().get("a"))
            ask("abort")
            await until(wire.ends)
            assert wire.ends() == {"a": "interrupted"}
            ask("load", (msgspec.structs.replace(UPDATE, version=1, kind="adapter"), 1))
            with pytest.raises(AssertionError, match="unknown message sleep"):
                ask("sleep")

    asyncio.run(case())


@pytest.mark.parametrize(
    ("error", "named"),
    [(IdentityError("foreign weights"), "IdentityError"), (ConfigError("no kernel"), "ConfigError"), (None, "")],
)
def test_the_last_words_say_whether_another_process_may_take_its_place(error: HeadraceError | None, named: str) -> None:
    async def case() -> None:
        async with looping() as (loop, wire, engine, left, ask):
            ask("add", request("a"))
            await until(lambda: wire.tokens().get("a"))
            loop.heard(EngineSample(0.0, EngineStats(sampled_tokens=7)))
            assert [method for method, _ in wire.sent][-2:] == ["output", "stats"] or wire.sent[-1][0] == "stats"
            if error:
                engine.given_up.set_exception(error)
                await loop.watch()
            else:
                loop.heard(WorkerLost(0.0, "engine", "was killed by SIGKILL", 1))
            why = str(error) if error else "its server was killed by SIGKILL"
            assert left == [LastWords(why, named)] and wire.sent[-1] == (LAST_WORDS, left[0])  # type: ignore[arg-type]

    asyncio.run(case())


NAMES = st.sampled_from(["a", "b", "c"])


@st.composite
def sampled(draw: st.DrawFn) -> StepOutput:
    name, count, version = draw(NAMES), draw(st.integers(0, 3)), draw(st.integers(0, 1))
    tokens = tuple(draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)))
    ends = (Finished(name, "stop"),) if draw(st.booleans()) else ()
    own = (version,) * count
    return StepOutput(version, (name,) * count, tokens, (-1.0,) * count, own, ends, mixed=draw(st.booleans()))


@given(st.lists(sampled(), max_size=12))
def test_outputs_in_one_have_every_token_with_its_labels_and_every_end_in_order(outputs: list[StepOutput]) -> None:
    def told(outputs: list[StepOutput]) -> dict[str, list[Any]]:
        """What each request is told: its tokens, with what is reported of them, and its ends."""
        of: dict[str, list[Any]] = {}
        for output in outputs:
            for name, *token in zip(output.request_ids, output.tokens, output.kv_versions, strict=True):
                of.setdefault(name, []).append((output.version, output.mixed, *token))
            for end in output.finished:
                of.setdefault(end.request_id, []).append(end.stop)
        return of

    assert told(in_one(outputs)) == told(outputs)


class _Silent:
    """A worker that ends when a test says so. Protocol `Worker`, as far as a keeper uses it."""

    left = False

    def __init__(self, heard: Heard) -> None:
        self.heard, self.ended = heard, asyncio.get_running_loop().create_future()

    async def start(self) -> None: ...

    async def watch(self) -> str:
        said: str = await asyncio.shield(self.ended)
        return said

    async def end(self) -> None: ...

    def say(self, words: LastWords) -> None:
        self.heard(LAST_WORDS, msgspec.Raw(msgspec.msgpack.encode(words)))


class _Workers:
    def __init__(self) -> None:
        self.made: list[_Silent] = []

    def worker(self, job: Job, heard: Heard) -> _Silent:
        self.made.append(_Silent(heard))
        return self.made[-1]


class _Owner:
    def __init__(self) -> None:
        self.deaths: list[str] = []
        self.errors: list[Exception] = []

    async def begin(self, worker: object) -> None: ...

    async def resume_in(self, worker: object) -> None: ...

    def went_down(self, forgive: object) -> None: ...

    def died(self, how: str, deaths: int) -> None:
        self.deaths.append(how)

    def given_up(self, error: Exception) -> None:
        self.errors.append(error)


def test_a_keeper_tells_how_a_server_ended_and_gives_up_where_another_would_not_help() -> None:
    async def case() -> None:
        workers, owner = _Workers(), _Owner()
        keeper = Keeper(workers, Job("engine", "engine"), 3, owner, lambda method, payload: None)  # type: ignore[arg-type]
        await keeper.open()
        workers.made[0].say(LastWords("its server was killed by SIGKILL"))
        workers.made[0].ended.set_result("ended with exit code 1")
        await until(lambda: keeper.is_up and len(workers.made) == 2)
        assert owner.deaths == ["ended with exit code 1: its server was killed by SIGKILL"]
        workers.made[1].say(LastWords("somebody else loads weights into it", "IdentityError"))
        with pytest.raises(IdentityError, match="somebody else"):
            await keeper.watch()
        assert owner.errors
        await keeper.close()

    asyncio.run(case())
