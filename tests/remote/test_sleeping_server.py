"""A vLLM server that takes turns with the trainer: what becomes of its requests and weights, and who may start a process when."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from headrace.core.errors import ConfigError
from headrace.core.types import Completion
from headrace.core.weights import WeightUpdate
from headrace.engine.remote.connection import Connection
from headrace.engine.remote.dialects.vllm import VllmDialect
from headrace.engine.remote.sleeping_server import SleepingServer
from headrace.facts.facts import WorkerLost
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.world.world import FactList
from headrace.models.chat import ChatEncoder
from headrace.serve.serving import Serving
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.servers.fake_vllm import FakeVllm
from headrace.web.limits import ServerLimits
from support.labelled_engine import ENDS, LENGTH, request, so_far, until, update
from support.served import answering

NAMES = "abcd"
OWN = WeightUpdate(version=0, kind="full", fingerprint="those on the disk", nbytes=0, seconds=0.0)


class Place:
    """One address, at which a process of vLLM answers, or none. Protocol `OwnServer`, for a run that starts it itself."""

    who = "the server"

    def __init__(self, model: Path, **how: Any) -> None:
        self._model, self._how = model, {"sleep_mode": True, **how}
        self.server: FakeVllm | None = None
        self.processes: list[FakeVllm] = []
        self.may_start = lambda: True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await (self._app if self.server else PlainTextResponse("nobody is here", 502))(scope, receive, send)

    def start(self) -> None:
        assert self.may_start(), "the trainer has the memory that this process would take"
        engine = FakeEngine(trusts=True, seconds_per_token=0.005, length=lambda rng: LENGTH)
        serving = Serving(engine=engine, encoder=ChatEncoder(self._model), name="tiny", limits=ServerLimits())
        self.server = FakeVllm(serving, **self._how)
        self._app, self._reading = self.server.app(), asyncio.ensure_future(serving.load(OWN))
        self.processes.append(self.server)

    def ended(self) -> str:
        return "" if self.server else "was killed"

    def error(self) -> str:
        return ""

    def not_loaded(self) -> frozenset[str]:
        return frozenset()

    def kill(self) -> None:
        self.server = None

    async def end(self) -> None: ...

    @property
    def told(self) -> list[str]:
        assert self.server
        return self.server.rest.told


@asynccontextmanager
async def opened(
    place: Place, own: bool = True, keeps_base: bool = False
) -> AsyncIterator[tuple[SleepingServer, FactList]]:
    facts, clock = FactList(), asyncio.get_running_loop().time
    telemetry = Telemetry(facts.record, clock, Waits(facts.record, clock, 100.0, 200.0))
    async with AsyncExitStack() as undo:
        url = await undo.enter_async_context(answering(place))  # type: ignore[arg-type]
        if not own:
            place.start()
        engine = SleepingServer(
            Connection(url),
            VllmDialect(ENDS, check_every=0),
            keeps_base=keeps_base,
            patience=60.0,
            max_deaths=100,
            telemetry=telemetry,
            host=place if own else None,
        )
        undo.push_async_callback(engine.close)
        await engine.open()
        yield engine, facts


def run(case: Callable[[], Awaitable[None]]) -> None:
    async def go() -> None:
        async with asyncio.timeout(60):
            await case()

    asyncio.run(go())


async def live(engine: SleepingServer, directory: Path, version: int) -> None:
    """The engine's turn begins, and a version goes live in it."""
    await engine.wake(True)
    await engine.load(update(directory, version))


def asked(engine: SleepingServer) -> dict[str, asyncio.Future[Completion]]:
    return {name: asyncio.ensure_future(engine.generate(request(name))) for name in NAMES}


def spans(completion: Completion) -> list[tuple[int, int]]:
    assert len(completion.tokens) == LENGTH == len(completion.logprobs) and completion.stop == "length"
    return [(span.version, span.kv_version) for span in completion.spans]


BEGIN = ["wake", "sleep 2", "wake weights", "wake kv_cache"]
"""It is woken when it is met, because a run that was killed may have left it asleep, and begins asleep."""


def test_requests_go_on_after_the_trainers_turn_under_the_weights_that_came(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    async def case() -> None:
        place = Place(tiny_tokenizer)
        async with opened(place) as (engine, _):
            assert place.told == BEGIN[:2]
            await live(engine, tmp_path, 0)
            assert place.told == BEGIN
            asking = asked(engine)
            await until(lambda: min(so_far(engine, name) for name in NAMES) > 5)
            await engine.sleep(True)
            assert place.server and not place.server.serving.under_way and place.told == [*BEGIN, "sleep 2"]
            had = {name: so_far(engine, name) for name in NAMES}
            late = asyncio.ensure_future(engine.generate(request("late")))
            await asyncio.sleep(0.1)
            assert had == {name: so_far(engine, name) for name in NAMES} and not so_far(engine, "late")
            await engine.wake(True)
            await asyncio.sleep(0.1)
            assert not so_far(engine, "late"), "nothing is sampled between the memory and the weights"
            await engine.load(update(tmp_path, 1))
            assert place.told == [*BEGIN, "sleep 2", "wake weights", "wake kv_cache"]
            for name, one in asking.items():
                done = await one
                assert spans(done) == [(0, 0), (1, 1)] and done.spans[1].start == had[name]
            assert spans(await late) == [(1, 1)]

    run(case)


def test_a_turn_without_new_weights_loads_those_of_before_again(tiny_tokenizer: Path, tmp_path: Path) -> None:
    async def case() -> None:
        place = Place(tiny_tokenizer)
        async with opened(place) as (engine, _):
            await live(engine, tmp_path, 0)
            asking = asked(engine)
            await until(lambda: so_far(engine, "a") > 5)
            await engine.sleep(False)
            assert place.server
            before = place.server.reloads
            await engine.wake(False)
            assert place.server.reloads == before + 1
            for one in asking.values():
                assert spans(await one) == [(0, 0)]

    run(case)


def test_a_base_that_never_changes_stays_on_the_host(tiny_tokenizer: Path, tmp_path: Path) -> None:
    """With adapters, which vLLM's level 2 would lose."""

    async def case() -> None:
        place = Place(tiny_tokenizer)
        async with opened(place, keeps_base=True) as (engine, _):
            await live(engine, tmp_path, 0)
            assert place.server and place.server.reloads == 1
            await engine.sleep(False)
            await engine.wake(True)
            first = [word.replace("2", "1") for word in BEGIN]
            assert place.told == [*first, "sleep 1", "wake"] and place.server.reloads == 1
            assert spans(await engine.generate(request("a"))) == [(0, 0)]

    run(case)


def test_a_server_without_the_mode_is_refused_with_its_remedy(tiny_tokenizer: Path) -> None:
    """The remedy, `--enable-sleep-mode`, is what every other test here has followed."""

    async def case() -> None:
        for own in (True, False):
            with pytest.raises(ConfigError, match="start it with --enable-sleep-mode"):
                async with opened(Place(tiny_tokenizer, sleep_mode=False), own):
                    pass

    run(case)


def test_memory_that_is_not_there_ends_the_run_with_a_remedy(tiny_tokenizer: Path, tmp_path: Path) -> None:
    async def case() -> None:
        place = Place(tiny_tokenizer)
        async with opened(place) as (engine, _):
            assert place.server
            place.server.rest.no_room = True
            with pytest.raises(ConfigError, match=r"could not do /wake_up\?tags=weights: .* lower engine.kv_gib"):
                await engine.wake(True)
            place.server.rest.no_room = False
            await live(engine, tmp_path, 0)
            await engine.sleep(False)
            await engine.wake(True)
            place.server.rest.no_room = True
            with pytest.raises(ConfigError, match="could not do .*kv_cache"):
                await engine.load(update(tmp_path, 1))

    run(case)


def test_a_process_that_ends_asleep_is_started_again_in_the_engines_turn(tiny_tokenizer: Path, tmp_path: Path) -> None:
    async def case() -> None:
        place = Place(tiny_tokenizer)
        async with opened(place) as (engine, facts):
            await live(engine, tmp_path, 0)
            asking = asked(engine)
            await until(lambda: so_far(engine, "a") > 5)
            await engine.sleep(False)
            place.kill()
            await until(lambda: bool(facts.of(WorkerLost)))
            await asyncio.sleep(0.5)
            assert len(place.processes) == 1, "the trainer has the memory that another process would take"
            await engine.stats()
            await engine.sleep(False)  # again, as after a change that was cut off
            await live(engine, tmp_path, 1)
            assert len(place.processes) == 2 and len(facts.of(WorkerLost)) == 1
            for one in asking.values():
                assert spans(await one) == [(0, 0), (1, 1)]

    run(case)


def test_a_process_that_ends_while_it_falls_asleep_holds_nobody_up(tiny_tokenizer: Path, tmp_path: Path) -> None:
    async def case() -> None:
        place = Place(tiny_tokenizer)
        async with opened(place) as (engine, _):
            await live(engine, tmp_path, 0)
            place.kill()
            await engine.sleep(False)
            assert len(place.processes) == 1
            await engine.wake(False)
            assert spans(await engine.generate(request("a"))) == [(0, 0)] and len(place.processes) == 2

    run(case)


def test_a_process_that_others_start_in_the_trainers_turn_is_put_to_sleep(tiny_tokenizer: Path, tmp_path: Path) -> None:
    async def case() -> None:
        place = Place(tiny_tokenizer)
        async with opened(place, own=False) as (engine, facts):
            await live(engine, tmp_path, 0)
            await engine.sleep(False)
            place.start()
            await until(lambda: place.told == BEGIN[:2])
            assert place.server and not place.server.reloads and len(facts.of(WorkerLost)) == 1
            await live(engine, tmp_path, 1)
            assert spans(await engine.generate(request("a"))) == [(1, 1)]

    run(case)


def test_a_server_that_a_killed_run_left_asleep_is_woken(tiny_tokenizer: Path, tmp_path: Path) -> None:
    async def case() -> None:
        place = Place(tiny_tokenizer)
        async with opened(place, own=False) as (first, _):
            await live(first, tmp_path, 0)
            await first.sleep(False)
        first_process = place.server
        async with answering(place) as url:  # type: ignore[arg-type]
            connection = Connection(url)
            dialect = VllmDialect(ENDS, check_every=0)
            await dialect.look(connection, 60)
            await dialect.load(connection, update(tmp_path, 1), 60)
            await connection.close()
        assert place.server is first_process and place.told[-1] == "wake"

    run(case)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_dies_when_no_token_is_of_weights_that_are_not_known(
    seed: int, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    """The fake refuses requests that reach weights which are asleep or were discarded, and loads into memory that is not there."""
    rng = random.Random(seed)

    async def case() -> None:
        place, trains, version = Place(tiny_tokenizer), False, 0
        place.may_start = lambda: not trains
        async with opened(place) as (engine, facts):
            await live(engine, tmp_path, 0)
            asking = asked(engine)
            for turn in range(6):
                asking[f"{turn}"] = asyncio.ensure_future(engine.generate(request(f"{turn}")))
                changing = asyncio.ensure_future(engine.sleep(False))
                for moment in ("before", "asleep", "woken", "live"):
                    if rng.random() < 0.25:
                        place.kill()
                    await asyncio.sleep(rng.random() * 0.02)
                    if moment == "before":
                        await changing
                        trains = True
                    elif moment == "asleep":
                        trains = False
                        await engine.wake(replaced := rng.random() < 0.7)
                    elif moment == "woken" and replaced:
                        version += 1
                        await engine.load(update(tmp_path, version))
            for one in asking.values():
                versions = [version for version, _ in spans(await one)]
                assert versions == sorted(versions)
            assert len(facts.of(WorkerLost)) >= len(place.processes) - 1 > 0

    run(case)
