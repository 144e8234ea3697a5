"""An engine behind HTTP: what it returns, and what no broken connection, dead server or stranger changes in it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.core.errors import ConfigError, IdentityError, WorkerDied
from headrace.core.reports import Capabilities, EngineStats
from headrace.core.steps import StepOutput
from headrace.core.types import Fork, Request, Sampling
from headrace.core.weights import AdapterSpec, WeightUpdate
from headrace.engine.remote.connection import Connection
from headrace.engine.remote.dialect import ServerState
from headrace.engine.remote.dialects.headrace import HeadraceDialect
from headrace.engine.remote.remote_engine import RemoteEngine, _load_missing, check_state
from headrace.facts.facts import WorkerLost
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.world.world import FactList
from headrace.models.chat import ChatEncoder
from headrace.serve.serving import Serving
from headrace.serve.start import make_app
from headrace.testing.fake_engine import FakeEngine
from headrace.web.limits import ServerLimits
from support.labelled_engine import so_far, until
from support.served import answering

LENGTH, ENDLESS = 60, 10_000


def update(version: int, number: int | None = None, adapter: AdapterSpec | None = None) -> WeightUpdate:
    """`number`: how many the server has loaded before it, which is what the fake calls them by."""
    number = version + 1 if number is None else number
    where = {"path": "/nowhere"}
    kind: Any = "adapter" if adapter else "full"
    return WeightUpdate(
        version=version, kind=kind, fingerprint=f"fake-{number}", nbytes=0, seconds=0.0, where=where, adapter=adapter
    )


def request(name: str, tokens: int = LENGTH, **more: Any) -> Request:
    return Request(name, (1, 7, 8), Sampling(max_tokens=tokens, seed=3), **more)


class Machine:
    """A place where a server runs, dies and runs again at one address; between it and the client a wire that can be cut."""

    def __init__(self, model: Path, speed: float, limits: ServerLimits) -> None:
        self.model, self.speed, self.limits = model, speed, limits
        self.port = 0
        self.wires: set[asyncio.StreamWriter] = set()
        self.connected = True
        self._behind = ""
        self._server: contextlib.AsyncExitStack | None = None
        self._relays: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """A process that has its own weights as version 0 and knows of no others."""
        self.engine = FakeEngine(seconds_per_token=self.speed, length=lambda rng: ENDLESS)
        self.serving = Serving(
            engine=self.engine, encoder=ChatEncoder(self.model), name="tiny", limits=self.limits, dtype="float32"
        )
        own = WeightUpdate(version=0, kind="full", fingerprint="fake-0", nbytes=0, seconds=0.0)
        await self.serving.load(own)
        self._server = contextlib.AsyncExitStack()
        self._behind = (await self._server.enter_async_context(answering(make_app(self.serving, "")))).rpartition(":")[
            2
        ]
        self.connected = True

    async def die(self) -> None:
        self.connected = False
        self.cut()
        assert self._server
        await self._server.aclose()

    def cut(self) -> None:
        for wire in list(self.wires):
            wire.transport.abort()

    async def listen(self) -> None:
        self.door = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.port = self.door.sockets[0].getsockname()[1]

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.connected:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", int(self._behind))
        self.wires |= {writer, far_writer}

        async def carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(1 << 16):
                    sink.write(data)
                    await sink.drain()
            sink.close()

        await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer))
        self.wires -= {writer, far_writer}


class Owner:
    """The run's own server: whenever it dies, it has ended with an error. Protocol `Host`."""

    who = "the server"

    def __init__(self, machine: Machine, warns: Collection[str] = ()) -> None:
        self.machine = machine
        self.starts: list[asyncio.Task[None]] = []
        self.warns = set(warns)

    def not_loaded(self) -> frozenset[str]:
        return frozenset(self.warns)

    def start(self) -> None:
        if not self.machine.connected:
            self.starts.append(asyncio.get_running_loop().create_task(self.machine.start()))

    def ended(self) -> str:
        coming = any(not task.done() for task in self.starts)
        return "" if self.machine.connected or coming else "failed"

    def error(self) -> str:
        return self.ended() and "a fault"

    def kill(self) -> None: ...

    async def end(self) -> None: ...


@asynccontextmanager
async def connected(
    model: Path,
    speed: float = 0.002,
    limits: ServerLimits | None = None,
    patience: float = 60.0,
    max_deaths: int = 3,
    owned: bool = False,
    warns: Collection[str] = (),
) -> AsyncIterator[tuple[RemoteEngine, Machine]]:
    """Version 0 of the run is live. `warns`: of what the log says that it was not loaded."""
    machine = Machine(model, speed, limits or ServerLimits())
    await machine.listen()
    await machine.start()
    facts, clock = FactList(), asyncio.get_running_loop().time
    engine = RemoteEngine(
        Connection(f"http://127.0.0.1:{machine.port}"),
        HeadraceDialect(),
        patience=patience,
        max_deaths=max_deaths,
        telemetry=Telemetry(facts.record, clock, Waits(facts.record, clock, 100.0, 200.0)),
        host=Owner(machine, warns) if owned else None,
    )
    engine.facts = facts  # type: ignore[attr-defined]
    try:
        async with asyncio.timeout(300):
            await engine.open()
            await engine.load(update(0))
            yield engine, machine
    finally:
        await engine.close()
        machine.cut()
        machine.door.close()
        if machine.connected:
            await machine.die()


def run(model: Path, case: Callable[[RemoteEngine, Machine], Awaitable[None]], **settings: Any) -> None:
    async def go() -> None:
        async with connected(model, **settings) as (engine, machine):
            await case(engine, machine)

    asyncio.run(go())


def tokens_of(outputs: Iterator[StepOutput], name: str) -> list[int]:
    return [
        token
        for output in outputs
        for token, who in zip(output.tokens, output.request_ids, strict=True)
        if who.startswith(name)
    ]


def wired_id(machine: Machine) -> str:
    """The fake samples by the request's id, which on the wire has a number of its own: the first that was asked for."""
    return machine.engine.requests[0].id


# --- what its log says ---------------------------------------------------------------------------------------------------


def test_a_server_that_warns_of_weights_which_it_loaded_before_is_refused(tiny_tokenizer: Path) -> None:
    """Of tables that are in no checkpoint it warns at every update."""

    async def go() -> None:
        async with connected(tiny_tokenizer, owned=True, warns=["RotaryEmbedding"]) as (engine, _):
            await engine.load(update(1))
            host = engine._host
            assert isinstance(host, Owner)
            host.warns.add("ParallelLMHead")
            with pytest.raises(IdentityError, match="has not loaded ParallelLMHead of version 2"):
                await engine.load(update(2))

    asyncio.run(go())


# --- what it returns ---------------------------------------------------------------------------------------------------


def test_completions_scores_and_versions_are_those_of_the_server(tiny_tokenizer: Path) -> None:
    async def case(engine: RemoteEngine, machine: Machine) -> None:
        told: list[StepOutput] = []
        engine.listen(told.append)
        asking = asyncio.ensure_future(engine.generate(request("a")))
        await until(lambda: so_far(engine, "a") > 10)
        report = await engine.load(update(1))
        assert report.version == 1
        completion = await asking
        assert len(completion.tokens) == LENGTH and completion.stop == "length"
        assert [span.version for span in completion.spans] == [0, 1] and completion.spans[0].start == 0
        assert tuple(tokens_of(iter(told), "a")) == completion.tokens, "each was told once, before it was known"
        assert machine.engine.requests[0].sampling == request("a").sampling
        scored = await engine.score((1, 7, 8))
        assert scored.prompt_logprobs == (-1.0, -1.0) and scored.spans[0].version == 1
        assert (
            engine.capabilities.prompt_logprobs and not engine.capabilities.forks and not engine.capabilities.streamed
        )
        with pytest.raises(ValueError, match="give the tokens"):
            await engine.generate(Request("f", (), Sampling(), fork=Fork("a", 1)))
        with pytest.raises(ValueError, match="no adapter nobody"):
            await engine.generate(request("b", adapter="nobody"))
        assert (await engine.stats()).sampled_tokens == LENGTH, "what the server had done before does not count"

    run(tiny_tokenizer, case, speed=0.01)


def test_cancelling_aborting_and_draining(tiny_tokenizer: Path) -> None:
    async def case(engine: RemoteEngine, machine: Machine) -> None:
        asking = [asyncio.ensure_future(engine.generate(request(name, ENDLESS))) for name in "abc"]
        await until(lambda: min(so_far(engine, name) for name in "abc") > 3)
        asking[0].cancel()
        await until(lambda: len(machine.engine.unfinished()) == 2)
        await engine.abort()
        for one in asking[1:]:
            completion = await one
            assert completion.stop == "interrupted" and len(completion.tokens) > 3
        await until(lambda: not machine.engine.unfinished())

        begun = asyncio.ensure_future(engine.generate(request("d")))
        await until(lambda: so_far(engine, "d") > 3)
        draining = asyncio.ensure_future(engine.drain())
        await asyncio.sleep(0)
        late = asyncio.ensure_future(engine.generate(request("e")))
        await draining
        assert begun.done() and not late.done() and not machine.engine.unfinished()
        await engine.resume()
        assert len((await late).tokens) == LENGTH

    run(tiny_tokenizer, case, speed=0.01)


def test_an_adapter_is_loaded_named_and_loaded_again(tiny_tokenizer: Path) -> None:
    async def case(engine: RemoteEngine, machine: Machine) -> None:
        spec = AdapterSpec("policy", 4, 8.0)
        await engine.load(update(0, number=2, adapter=spec))
        completion = await engine.generate(request("a", adapter="policy"))
        assert [span.version for span in completion.spans] == [0]
        await engine.load(update(1, number=3, adapter=spec))
        assert (await engine.score((1, 2), "policy")).spans[0].version == 1

    run(tiny_tokenizer, case)


# --- what breaks -------------------------------------------------------------------------------------------------------


def test_a_wire_that_is_cut_again_and_again_costs_no_token(tiny_tokenizer: Path) -> None:
    async def case(engine: RemoteEngine, machine: Machine) -> None:
        told: list[StepOutput] = []
        engine.listen(told.append)
        asking = {name: asyncio.ensure_future(engine.generate(request(name))) for name in "abcd"}
        for _ in range(5):
            before = so_far(engine, "a")
            await until(lambda before=before: so_far(engine, "a") > before or asking["a"].done())  # type: ignore[misc]
            machine.cut()
        for name, one in asking.items():
            completion = await one
            assert len(completion.tokens) == LENGTH == len(completion.logprobs)
            assert tuple(tokens_of(iter(told), name)) == completion.tokens
            asked = [sent for sent in machine.engine.requests if f".{name}." in sent.id]
            assert len(asked) > 1 and asked[-1].prefix == completion.tokens[: len(asked[-1].prefix)] != ()
        assert not [fact for fact in engine.facts.facts if isinstance(fact, WorkerLost)], "nobody has died"  # type: ignore[attr-defined]

    run(tiny_tokenizer, case, speed=0.005)


def test_a_server_that_dies_and_comes_back_gets_its_weights_first(tiny_tokenizer: Path) -> None:
    async def case(engine: RemoteEngine, machine: Machine) -> None:
        await engine.load(update(1))
        asking = asyncio.ensure_future(engine.generate(request("a")))
        await until(lambda: so_far(engine, "a") > 5)
        had = so_far(engine, "a")
        await machine.die()
        engine._wanted[""] = update(
            1, number=1
        )  # the fake calls weights by how many it has loaded: this one none but its own
        engine._published["", 1] = "fake-1"
        await asyncio.sleep(0.3)
        assert not asking.done()
        await machine.start()
        completion = await asking
        assert len(completion.tokens) == LENGTH and [span.version for span in completion.spans] == [1]
        assert machine.serving.loaded[""].label.version == 1 and len(machine.engine.requests[0].prefix) >= had
        (lost,) = [fact for fact in engine.facts.facts if isinstance(fact, WorkerLost)]  # type: ignore[attr-defined]
        assert lost.deaths == 1 and lost.requests_reissued == 1

    run(tiny_tokenizer, case, speed=0.01)


def test_a_server_that_stays_away_ends_the_run_with_a_sentence(tiny_tokenizer: Path) -> None:
    async def case(engine: RemoteEngine, machine: Machine) -> None:
        asking, watching = (asyncio.ensure_future(one) for one in (engine.generate(request("a")), engine.watch()))
        await until(lambda: so_far(engine, "a") > 5)
        await machine.die()
        for one in (asking, watching, engine.generate(request("b")), engine.load(update(1))):
            with pytest.raises(WorkerDied, match=r"was away for 0.5 s \(engine.patience\)"):
                await one
        assert len(engine.unfinished()["a"].tokens) > 5, "what it had until then is known"

    run(tiny_tokenizer, case, patience=0.5)


def test_one_that_dies_too_often_is_given_up(tiny_tokenizer: Path) -> None:
    async def case(engine: RemoteEngine, machine: Machine) -> None:
        engine._wanted.clear()  # a fake that begins anew knows no fingerprint but its own
        for deaths in (1, 2):
            await machine.die()
            await machine.start()
            await until(lambda deaths=deaths: engine._presence._deaths.total == deaths)  # type: ignore[misc]
        with pytest.raises(WorkerDied, match="its death no. 2"):
            await engine.watch()

    run(tiny_tokenizer, case, max_deaths=1)


@pytest.mark.waits
def test_one_that_stands_still_is_missed_and_goes_on(tiny_tokenizer: Path) -> None:
    async def case(engine: RemoteEngine, machine: Machine) -> None:
        asking = asyncio.ensure_future(engine.generate(request("a")))
        await until(lambda: so_far(engine, "a") > 3)
        machine.engine.stopped = True
        await until(lambda: not engine._presence._up.is_set())
        machine.engine.stopped = False
        completion = await asking
        assert len(completion.tokens) == LENGTH

    run(tiny_tokenizer, case, speed=0.02)


@pytest.mark.parametrize("error", [IdentityError, ConfigError])
def test_weights_that_are_published_over_while_they_are_restored_give_way_to_newer_ones(error: type[Exception]) -> None:
    wanted, asked = {"": update(1)}, []
    state = ServerState("boot", "float32", Capabilities(context_length=10), {"": "fake-0"}, EngineStats())

    async def load(one: WeightUpdate) -> None:
        asked.append(one.version)
        if one.version == 1:
            wanted[""] = update(2)
        if one.version != 2 or len(asked) > 2:
            raise error("the files are gone")

    asyncio.run(_load_missing(wanted, state, load))
    assert asked == [1, 2]
    with pytest.raises(error, match="are gone"):
        asyncio.run(_load_missing(wanted, state, load))


# --- who is it ---------------------------------------------------------------------------------------------------------


def test_weights_that_somebody_else_loads_end_the_run(tiny_tokenizer: Path) -> None:
    async def case(engine: RemoteEngine, machine: Machine) -> None:
        asking = asyncio.ensure_future(engine.generate(request("a")))
        await until(lambda: so_far(engine, "a") > 3)
        await machine.serving.load(update(0, number=2))  # under the very number that is live
        with pytest.raises(IdentityError, match="somebody else loads weights into it"):
            await asking
        with pytest.raises(IdentityError):
            await engine.watch()

    run(tiny_tokenizer, case, speed=0.01)


def test_weights_that_are_not_those_published_are_refused_and_the_old_ones_serve(tiny_tokenizer: Path) -> None:
    async def case(engine: RemoteEngine, machine: Machine) -> None:
        with pytest.raises(IdentityError, match="was published as torn"):
            await engine.load(msgspec.structs.replace(update(1), fingerprint="torn"))
        assert (await engine.score((1, 2))).spans[0].version == 0
        with pytest.raises(ValueError, match="in parts"):
            await engine.load(update(1), parts=2)

    run(tiny_tokenizer, case)


def test_a_server_without_room_is_asked_again(tiny_tokenizer: Path) -> None:
    async def case(engine: RemoteEngine, machine: Machine) -> None:
        completions = await asyncio.gather(*(engine.generate(request(f"r{number}")) for number in range(4)))
        assert [len(completion.tokens) for completion in completions] == [LENGTH] * 4
        assert machine.serving.counters.refused > 0

    run(tiny_tokenizer, case, limits=ServerLimits(requests=2))


def test_a_server_that_is_none_of_ours_is_refused(tiny_tokenizer: Path) -> None:
    async def go() -> None:
        async with connected(tiny_tokenizer) as (engine, machine):
            state = await engine._dialect.look(engine._connection, 60)
            check_state(state, "float32", 1000, "http://x")
            with pytest.raises(ConfigError, match='set engine.dtype = "float32"'):
                check_state(state, "bfloat16", 1000, "http://x")
            with pytest.raises(ConfigError, match="engine.context_length=9999999"):
                check_state(state, "float32", 9_999_999, "http://x")
        token = "0123456789abcdef"
        async with answering(make_app(machine.serving, token)) as url:
            for given, words in (("", "engine.token_file"), ("wrong-token-wrong", "engine.token_file")):
                connection = Connection(url, given)
                with pytest.raises(ConfigError, match=words):
                    await HeadraceDialect().look(connection, 60)
                await connection.close()
            connection = Connection(url, token)
            assert (await HeadraceDialect().look(connection, 60)).dtype == "float32"
            await connection.close()

    asyncio.run(go())


@pytest.mark.parametrize("asked", ["tokens", "scores", ""])
def test_a_server_of_the_run_that_has_served_is_started_again_and_one_that_has_not_is_refused(
    asked: str, tiny_llama: Path
) -> None:
    """What ends one before it has done anything for a request would end the next one too."""

    async def case() -> None:
        async with connected(tiny_llama, owned=True) as (engine, machine):
            if asked == "scores":
                await engine.score([1, 7, 8])
            elif asked:
                await engine.generate(request("first", 1))
            await machine.die()
            if asked:
                assert len((await engine.generate(request("second", 5))).tokens) == 5
            else:
                with pytest.raises(ConfigError, match="the server came up and ended before it had served a request"):
                    await engine.generate(request("second", 5))

    asyncio.run(case())
