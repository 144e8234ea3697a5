"""Workers that offer themselves: seats, spares, terms, and what a run refuses. In virtual time, or over the loopback without processes."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import ConfigError, StalledError
from headrace.core.protocols import Job
from headrace.core.reports import Capabilities, LoadReport
from headrace.core.steps import Finished, StepOutput
from headrace.core.types import Request, Sampling
from headrace.facts.facts import Warned, WorkerJoined, WorkerLost
from headrace.facts.run_state import RunState
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.world import virtual_time
from headrace.loop.world.world import FactList
from headrace.processes.health.live_status import LiveStatus, Status, as_dict
from headrace.processes.joining.dial import RunOver, dial
from headrace.processes.joining.greeting import LEAVE, LEAVING, Agreed, Hello, Terms, packed
from headrace.processes.joining.joined import JoinLauncher, secrets_of
from headrace.processes.joining.listener import Listener
from headrace.processes.joining.same_model import agree, own_packages, terms_of
from headrace.processes.orchestration_config import OrchestrationConfig
from headrace.processes.wire import unpack
from headrace.run.clients.process_engine import ProcessEngine
from headrace.run.config import load_config
from headrace.run.starting import transport_of
from headrace.run.worker.worker_messages import EngineStart
from headrace.testing.fake_arrivals import FakeArrivals
from headrace.testing.fake_worker import FakeProcess
from headrace.version import __version__
from headrace.views.screen.status_view import lines_of
from headrace.weight_sync.tcp import Tcp

TOKEN = "a token of many characters"


# --- seats in virtual time ---------------------------------------------------------------------------------------------------


class Engine(FakeProcess):
    """Samples one token a second, 100 and up, and dies after `life` of them."""

    def __init__(self, life: int, refuses: str = "", leaves: bool = False) -> None:
        """`leaves`: whether it gives its seat back then, instead."""
        super().__init__()
        self._leaves = leaves
        self._life, self._refuses = life, refuses
        self.model_dir, self.prefix = "", 0

    async def serve(self) -> None:
        while True:
            frame = await self.receive()
            if frame.method == "start":
                self.model_dir = unpack(frame.payload, EngineStart).model_dir
                self.fail(frame, ConfigError(self._refuses)) if self._refuses else self.reply(frame, Capabilities(64))
            elif frame.method == "add":
                await self._sample(unpack(frame.payload, Request))
            elif frame.id:
                self.reply(frame, LoadReport(0, 0.0, 0.0))

    async def _sample(self, request: Request) -> None:
        self.prefix = len(request.prefix)
        for place in range(len(request.prefix), request.sampling.max_tokens):
            await asyncio.sleep(1.0)
            if self._life == 0 and self._leaves:
                self.push(LEAVING, None)
                return
            if self._life == 0:
                self.die("was killed")
                return
            self._life -= 1
            last = place + 1 == request.sampling.max_tokens
            ends = (Finished(request.id, "length"),) if last else ()
            self.push("output", StepOutput(0, (request.id,), (100 + place,), (-0.5,), (0,), ends))


def telemetry_of(facts: FactList) -> Telemetry:
    clock = asyncio.get_running_loop().time
    return Telemetry(facts.record, clock, Waits(facts.record, clock, 10.0, 1000.0))


def test_a_lost_engine_s_requests_go_on_with_their_tokens_in_the_next_one_that_offers_itself() -> None:
    facts = FactList()

    async def go() -> None:
        arrivals = FakeArrivals()
        engine = ProcessEngine(
            JoinLauncher(arrivals, telemetry_of(facts)), Job("engine", "engine"), 3, telemetry_of(facts)
        )
        loop = asyncio.get_running_loop()
        first, second = Engine(life=3), Engine(life=100)
        loop.call_later(25.0, arrivals.offer, first, "one")
        await engine.launch()
        await engine.open(EngineStart("/not/there", {}, {}))
        loop.call_later(60.0, arrivals.offer, second, "two")
        answer = await engine.generate(Request("r", (1, 2), Sampling(max_tokens=8)))
        assert answer.tokens == tuple(range(100, 108)) and answer.stop == "length"
        assert second.prefix == 3 and second.model_dir == "/the/model"
        await engine.close()
        await asyncio.sleep(1)
        assert [frame.method for frame in second.inbox] == [LEAVE]

    virtual_time.run(go())
    assert [worker.host for worker in facts.of(WorkerJoined)] == ["one", "two"]
    (lost,) = facts.of(WorkerLost)
    assert lost.how == "on one (process 1) is lost: its connection has ended" and lost.requests_reissued == 1
    messages = [warning.message for warning in facts.of(Warned)]
    missing = "for a worker to join at 127.0.0.1:0 as engine"
    assert messages[:2] == [f"start has waited {n} s {missing} (the run stops at 1000 s)" for n in (10,)] + [
        f"start has waited 10 s {missing}"
    ]


def test_one_that_is_asked_to_end_gives_its_seat_back_which_is_no_death() -> None:
    facts = FactList()

    async def go() -> None:
        arrivals = FakeArrivals()
        engine = ProcessEngine(
            JoinLauncher(arrivals, telemetry_of(facts)), Job("engine", "engine"), 0, telemetry_of(facts)
        )
        engines = [Engine(life=2, leaves=True) for _ in range(4)]
        for number, one in enumerate(engines):
            arrivals.offer(one, f"spot {number}")
        arrivals.offer(Engine(life=99))
        await engine.launch()
        await engine.open(EngineStart("", {}, {}))
        answer = await engine.generate(Request("t1/0", (1, 2), Sampling(max_tokens=12)))
        assert answer.tokens == tuple(range(100, 112)), "no ticket is given up for it either"
        await asyncio.sleep(1)
        assert all([frame.method for frame in one.inbox][-1:] == [LEAVE] for one in engines)
        await engine.close()

    virtual_time.run(go())
    lost = facts.of(WorkerLost)
    assert [one.how for one in lost] == [
        f"on spot {number} (process 1) has left: it was asked to end there" for number in range(4)
    ]
    assert {one.deaths for one in lost} == {0}


def test_one_that_cannot_serve_the_run_counts_as_a_death_and_the_next_one_serves() -> None:
    facts = FactList()

    async def go() -> None:
        arrivals = FakeArrivals()
        engine = ProcessEngine(
            JoinLauncher(arrivals, telemetry_of(facts)), Job("engine", "engine"), 3, telemetry_of(facts)
        )
        arrivals.offer(Engine(life=1))
        await engine.launch()
        await engine.open(EngineStart("", {}, {}))
        arrivals.offer(Engine(life=9, refuses='engine.path = "kernels" does not serve llama here'))
        arrivals.offer(Engine(life=9))
        answer = await engine.generate(Request("r", (1, 2), Sampling(max_tokens=4)))
        assert answer.tokens == (100, 101, 102, 103)
        await engine.close()

    virtual_time.run(go())
    assert "it cannot serve this run" in facts.of(WorkerLost)[1].how


def test_a_seat_that_nobody_takes_stops_the_start_by_name() -> None:
    async def go() -> None:
        launcher = JoinLauncher(FakeArrivals(), telemetry_of(FactList()))
        await launcher.worker(Job("engine", "engine 2"), lambda method, payload: None).start()

    with pytest.raises(StalledError, match="start has waited 1000 s for a worker to join at 127.0.0.1:0 as engine 2"):
        virtual_time.run(go())


def test_what_shares_files_with_the_run_cannot_join() -> None:
    async def go() -> None:
        launcher = JoinLauncher(FakeArrivals(), telemetry_of(FactList()))
        for job in (Job("shared trainer", "trainer"), Job("engine", "engine", inherited=(3,))):
            with pytest.raises(ConfigError, match="cannot join from elsewhere"):
                launcher.worker(job, lambda method, payload: None)

    virtual_time.run(go())


# --- the socket --------------------------------------------------------------------------------------------------------------


def listening(use: Callable[[Listener, list[str]], Awaitable[Any]]) -> None:
    async def go() -> None:
        messages: list[str] = []
        listener = Listener(TOKEN, terms=Terms("a-model", {"config.json": "1"}), say=messages.append)
        await listener.open()
        try:
            async with asyncio.timeout(300):
                await use(listener, messages)
        finally:
            await listener.close()

    asyncio.run(go())


def come(listener: Listener, answer: Agreed | None = None, **more: Any) -> asyncio.Future[Any]:
    agreed = answer or Agreed("/their/model")
    return asyncio.ensure_future(
        asyncio.to_thread(
            dial, listener.address, more.get("kind", "engine"), more.get("token", TOKEN), agree=lambda terms: agreed
        )
    )


async def spares(listener: Listener, count: int) -> None:
    while len([spare for spare in listener._spares if not spare.place.done()]) != count:
        await asyncio.sleep(0.01)


def test_workers_wait_for_a_seat_in_their_order_and_hear_when_the_run_is_over() -> None:
    async def use(listener: Listener, messages: list[str]) -> None:
        first = come(listener)
        await spares(listener, 1)
        second = come(listener)
        await spares(listener, 2)
        third = come(listener)
        await spares(listener, 3)
        ours = await listener.expect("engine")
        end = await first
        assert ours.model_dir == "/their/model" and ours.hello.host == socket.gethostname()
        late = listener.expect("engine")
        other = await second
        assert (await late).writer is not ours.writer
        await listener.close()
        with pytest.raises(RunOver, match="the run is over"):
            await third
        assert not messages and not listener.turned_away
        end._sock.close(), other._sock.close()

    listening(use)


@pytest.mark.parametrize("agrees", [True, False])
def test_a_worker_that_leaves_while_it_waits_gets_no_seat(agrees: bool) -> None:
    async def use(listener: Listener, messages: list[str]) -> None:
        host, port = listener.address.split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(packed(Hello(__version__, TOKEN, "engine", packages=own_packages())))
        if agrees:
            writer.write(packed(Agreed("/gone")))
            await spares(listener, 1)
        writer.close()
        await spares(listener, 0)
        arrival = listener.expect("engine")
        end = await come(listener)
        assert (await arrival).model_dir == "/their/model"
        end._sock.close()

    listening(use)


@pytest.mark.parametrize(
    ("more", "reason", "sentence"),
    [
        ({"token": "another token of many"}, "token", "refused this engine: its token is not the controller's"),
        ({"kind": "trainer"}, "seat", "this run takes no trainer from elsewhere"),
        ({"answer": Agreed(unable="the model is not here")}, "model", "the model is not here"),
    ],
)
def test_who_is_turned_away_hears_why_and_the_run_says_so_once(more: Any, reason: str, sentence: str) -> None:
    async def use(listener: Listener, messages: list[str]) -> None:
        arrival = listener.expect("engine")
        for _ in range(2):
            with pytest.raises(ConfigError, match=sentence):
                await come(listener, **more)
        while listener.turned_away[reason] < 2:
            await asyncio.sleep(0.01)
        assert len(messages) == 1 and messages[0].startswith("a connection from 127.0.0.1 was turned away: ")
        assert not arrival.done()

    listening(use)


def test_a_worker_with_other_packages_is_turned_away_with_what_differs() -> None:
    async def use(listener: Listener, messages: list[str]) -> None:
        host, port = listener.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(packed(Hello(__version__, TOKEN, "engine", packages={**own_packages(), "torch": "1.0"})))
        heard = await reader.read()
        assert b"it has torch 1.0 (the run has " in heard and b"other versions compute other numbers" in heard
        assert messages == [
            "a connection from 127.0.0.1 was turned away: it has other versions of packages that decide what an engine computes (its worker "
            "says which)"
        ]
        writer.close()

    listening(use)


# --- the model ---------------------------------------------------------------------------------------------------------------


def model(directory: Path, **config: Any) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (directory / "tokenizer.json").write_text("{}")
    return directory


def test_the_model_of_another_machine_is_the_same_whoever_wrote_its_config(tmp_path: Path) -> None:
    ours = model(tmp_path / "ours", transformers_version="5.1")
    terms = terms_of("a-model", ours)
    theirs = model(tmp_path / "theirs", transformers_version="5.2")
    assert agree(terms, str(theirs)) == Agreed(str(theirs))
    other = model(tmp_path / "other", num_hidden_layers=3)
    assert "other is not the run's model (a-model): config.json differ" in agree(terms, str(other)).unable
    (theirs / "tokenizer.json").unlink()
    assert "tokenizer.json differ" in agree(terms, str(theirs)).unable
    assert "holds no config.json; name its directory here with --model" in agree(terms, str(tmp_path)).unable
    assert "the run's model is not on this machine: model.path = /no/such" in agree(Terms("/no/such", {})).unable


# --- settings ----------------------------------------------------------------------------------------------------------------

RUN: dict[str, Any] = {
    "model": {"path": "smollm2-135m-instruct"},
    "task": {"kind": "reasoning_gym", "name": "basic_arithmetic"},
    "reward": {"function": "reasoning_gym"},
    "orchestration": {"kind": "join", "token_file": "/a/token"},
}


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"orchestration": {"token_file": "/a/token"}}, 'token_file is for orchestration.kind = "join"'),
        ({"orchestration": {"kind": "join"}}, "needs orchestration.token_file"),
        ({"orchestration": {**RUN["orchestration"], "listen": "10.0.0.5"}}, 'listen = "10.0.0.5" is not HOST:PORT'),
        ({"orchestration": {**RUN["orchestration"], "cert": "/a"}}, "belong together"),
        ({"orchestration": {**RUN["orchestration"], "listen": "0.0.0.0:7"}}, "set weight_sync.host to the one"),
        (
            {"weight_sync": {"kind": "shared_memory"}},
            'does not reach engines elsewhere .* use weight_sync.kind = "tcp"',
        ),
        ({"weight_sync": {"kind": "files"}}, "does not reach engines elsewhere"),
        ({"engine": {"cores": (0,)}}, "engine.cores are cores of this machine"),
        (
            {"engine": {"kind": "headrace", "urls": ("http://127.0.0.1:1",)}},
            "engine.urls name servers that are running.*workers elsewhere start the engines; remove one of the two",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config({**RUN, **tables})


def test_weights_travel_over_tcp_from_the_address_that_workers_reach(tmp_path: Path) -> None:
    def way(**tables: Any) -> Any:
        return transport_of(load_config({**RUN, **tables}), tmp_path)

    there = {**RUN["orchestration"], "listen": "10.0.0.5:7400"}
    default, named = way(orchestration=there), way(orchestration=there, weight_sync={"host": "10.0.0.6"})
    assert isinstance(default, Tcp) and isinstance(named, Tcp)
    assert (default.host, named.host, default.inherited) == ("10.0.0.5", "10.0.0.6", ())
    assert default.tls is None


def test_weights_are_encrypted_where_engines_join_over_tls(tmp_path: Path) -> None:
    cert = tmp_path / "cert.pem"
    cert.write_text("first\n-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n")
    place = {**RUN["orchestration"], "cert": str(cert), "key": "/key.pem"}
    found = transport_of(load_config({**RUN, "orchestration": place}), tmp_path)
    assert isinstance(found, Tcp) and found.tls
    assert (found.tls.certificate, found.tls.key_file) == (cert.read_text().removeprefix("first\n"), "/key.pem")


def test_a_token_that_could_be_guessed_and_a_certificate_that_is_none_are_refused(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("short")
    token.chmod(0o600)
    with pytest.raises(ConfigError, match="could be guessed"):
        secrets_of(OrchestrationConfig(kind="join", token_file=str(token)))
    token.write_text("x" * 16)
    with pytest.raises(ConfigError, match="cannot be used with the key"):
        secrets_of(OrchestrationConfig(kind="join", token_file=str(token), cert=str(token), key=str(token)))


# --- status ------------------------------------------------------------------------------------------------------------------


def test_the_status_says_which_worker_is_where() -> None:
    state = RunState()
    for fact in (
        WorkerJoined(1.0, "engine 1", "gpu-7", 41, "10.0.0.7"),
        WorkerJoined(2.0, "engine 2", "gpu-8", 42, "10.0.0.8"),
        WorkerLost(3.0, "engine 1", "is lost", 1),
    ):
        state.fold(fact)
    status = Status("alive", "alive", LiveStatus(pid=1, written=0.0))
    shown = {label: " ".join(part.plain for part in parts) for label, parts in lines_of("run", status, state)}
    assert shown["joined"] == "engine 2 on gpu-8 (process 42)"
    assert as_dict(status, state)["joined"] == {"engine 2": ["gpu-8", 42, "10.0.0.8"]}
