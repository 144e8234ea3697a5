"""Engines pass pieces of a version on: it leaves the trainer twice at most, and one that dies, lies or is silent costs time and never a byte."""

from __future__ import annotations

import signal
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import IdentityError
from headrace.core.weights import WeightUpdate
from headrace.weight_sync import tcp_engine, tcp_server
from headrace.weight_sync.packed import lay_out
from headrace.weight_sync.ranges import ValueRange, parts_of
from headrace.weight_sync.relays import FANOUT, Relays
from headrace.weight_sync.slots import send_all
from headrace.weight_sync.sockets import ConnectionServer, read_message, send_message
from headrace.weight_sync.tcp import Tcp, TcpPartSender
from headrace.weight_sync.tcp_engine import TcpReceiver, TcpSource
from headrace.weight_sync.tcp_server import Pieces, PieceSaid, Question, WeightReply
from headrace.weight_sync.unprepared import UnpreparedReceiver
from support.meeting import Meeting
from support.relaying_engine import Given, RelayingEngine, engine_process
from support.runs.beside import Beside

ROWS = 64
SHAPES = {"a": (ROWS, 96), "b": (7,), "c": (ROWS, 160)}
MANIFEST = lay_out([(name, torch.empty(shape)) for name, shape in SHAPES.items()], torch.bfloat16)
SMALLEST = 4096
"""Bytes of a piece: eight or so of each version here."""


def weights(version: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()}


class Sent:
    """Bytes of weights that each server has sent, by its port."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by: Counter[int] = Counter()
        lock = threading.Lock()

        def counted(connection: socket.socket, data: memoryview) -> None:
            with lock:
                self.by[connection.getsockname()[1]] += len(data)
            send_all(connection, data)

        monkeypatch.setattr(tcp_server, "send_all", counted)


class Trainer:
    """One rank, or several that are threads."""

    def __init__(self, ranks: int = 1) -> None:
        self.transport = Tcp.open()
        self._ranks = ranks
        self._meeting, self._senders, self._values = Meeting(ranks), list[Any](), dict[str, torch.Tensor]()
        if ranks == 1:
            self._senders = [self.transport.sender({"": MANIFEST})]
        else:
            with ThreadPoolExecutor(ranks) as pool:
                self._senders = list(pool.map(self._sender, range(ranks)))

    def _sender(self, rank: int) -> TcpPartSender:
        first, last = rank * ROWS // self._ranks, (rank + 1) * ROWS // self._ranks

        def values(name: str) -> Iterator[ValueRange]:
            for key, (rows, *width) in SHAPES.items():
                each = width[0] if width else 1
                if rows == ROWS:
                    at = self._values.get(key, torch.empty(rows * each)).flatten()
                    yield ValueRange(key, first * each, at[first * each : last * each])
                elif rank == 1:
                    yield ValueRange(key, 0, self._values.get(key, torch.empty(rows)).flatten())

        parts = parts_of({"": MANIFEST}, rank, values, lambda value: self._meeting.exchange(rank, value))
        assert parts
        return TcpPartSender(self.transport, {"": MANIFEST}, [], parts)

    def send(self, version: int) -> WeightUpdate:
        self._values = weights(version)
        with ThreadPoolExecutor(self._ranks) as pool:
            finish = list(pool.map(lambda sender: sender.copy(version, self._values.items()), self._senders))
        return finish[0]()

    def engine(self) -> TcpReceiver:
        return TcpReceiver({"": MANIFEST}, TcpSource(self.transport.token, None, SMALLEST))


def ports_of(update: WeightUpdate) -> set[int]:
    where = update.where
    return {port for _, port in where["parts"]} if "parts" in where else {where["port"]}


def right(engine: TcpReceiver, update: WeightUpdate) -> bool:
    found, wanted = engine.receive(update), weights(update.version)
    return all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in wanted.items())


def all_right(engines: Sequence[TcpReceiver], update: WeightUpdate) -> bool:
    """They fetch at the same time."""
    with ThreadPoolExecutor(len(engines)) as pool:
        return all(pool.map(lambda engine: right(engine, update), engines))


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_version_leaves_the_trainer_twice_at_most(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "STILL", 900.0)  # however slow this machine is
    sent, trainer = Sent(monkeypatch), Trainer(ranks)
    engines = [trainer.engine() for _ in range(8)]
    whole = MANIFEST.nbytes if ranks == 1 else MANIFEST.payload
    for version in range(3):
        update = trainer.send(version)
        sent.by.clear()
        assert all_right(engines, update)
        if ranks > 1 and not version:
            continue  # they ask for the ranges of each rank, too
        left = sum(sent.by[port] for port in ports_of(update))
        assert whole <= left <= 2 * whole
        assert sum(sent.by.values()) == len(engines) * whole, "no byte travels twice to one engine"


def test_engines_that_come_one_after_another_are_sent_nothing_by_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, trainer = Sent(monkeypatch), Trainer(2)
    update = trainer.send(0)
    first = trainer.engine()
    assert right(first, update) and first.from_others == 0
    sent.by.clear()
    assert all(right(trainer.engine(), update) for _ in range(5))
    assert sum(sent.by[port] for port in ports_of(update)) < 5 * 1024, "the ranges of each rank"


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_server_that_was_not_prepared_for_a_run_fetches_the_layout_too_and_passes_pieces_on(ranks: int) -> None:
    """As `headrace serve` and vLLM do; the dialect adds the token to what they are told."""
    trainer, servers = Trainer(ranks), [UnpreparedReceiver() for _ in range(3)]
    for version in range(2):
        update = trainer.send(version)
        sent = msgspec.structs.replace(update, where={**update.where, **trainer.transport.access})
        for server in servers:
            found, wanted = server.receive(sent), weights(version)
            assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in wanted.items())
        with pytest.raises(IdentityError, match="could not be fetched"):
            UnpreparedReceiver().receive(update)  # without the token
    receivers = [server._receivers[""][1] for server in servers]
    assert [bool(receiver.from_others) for receiver in receivers] == [False, True, True]
    again = Trainer(ranks)
    update = again.send(7)
    servers[0].receive(msgspec.structs.replace(update, where={**update.where, **again.transport.access}))
    assert servers[0]._receivers[""][1] is not receivers[0], "another run, whose layout may be another"


# -- engines that do not send what they have announced ---------------------------------------------------------------------


def closes(connection: socket.socket, asked: Question, found: Pieces) -> None:
    """Killed before its first byte."""


def dies_midway(connection: socket.socket, asked: Question, found: Pieces) -> None:
    send_message(connection, WeightReply(asked.nbytes, whole=found.whole))
    connection.sendall(found.data[0][: len(found.data[0]) // 2])
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset


def lies(connection: socket.socket, asked: Question, found: Pieces) -> None:
    send_message(connection, WeightReply(asked.nbytes, whole=found.whole))
    data = bytearray(b"".join(found.data))
    data[len(data) // 2] ^= 1
    connection.sendall(data)


def refuses(connection: socket.socket, asked: Question, found: Pieces) -> None:
    send_message(connection, WeightReply(refused="it has another version by now"))


def talks_nonsense(connection: socket.socket, asked: Question, found: Pieces) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")


def other_length(connection: socket.socket, asked: Question, found: Pieces) -> None:
    send_message(connection, WeightReply(1, whole=1))
    connection.sendall(b"x")


FAULTS = [closes, dies_midway, lies, refuses, talks_nonsense, other_length]


class FaultyEngine:
    """Fetches as an engine does, and fails whoever it sends a piece to. `healthy`: the pieces that it sends before that."""

    def __init__(
        self, trainer: Trainer, fault: Callable[[socket.socket, Question, Pieces], object], healthy: int = 0
    ) -> None:
        self.receiver, self._fault, self._left = trainer.engine(), fault, healthy
        self._source: Any = self.receiver._relayed
        self._source._server = self
        self._listening = ConnectionServer("127.0.0.1", self._serve, at_once=100)

    @property
    def address(self) -> tuple[str, int]:
        return self._listening.address

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            asked = msgspec.msgpack.decode(read_message(connection), type=Question)
            found = self._source._pieces(asked)
            self._left -= 1
            if self._left >= 0:
                send_message(connection, WeightReply(asked.nbytes, whole=found.whole))
                for data in found.data:
                    connection.sendall(data)
            else:
                self._fault(connection, asked, found)


@pytest.mark.parametrize("fault", FAULTS)
def test_an_engine_that_fails_others_costs_them_no_byte(
    fault: Callable[[socket.socket, Question, Pieces], None],
) -> None:
    trainer = Trainer(2)
    update = trainer.send(0)
    assert right(FaultyEngine(trainer, fault).receiver, update)
    others = [trainer.engine() for _ in range(3)]
    assert all(right(engine, update) for engine in others)
    assert all(right(engine, trainer.send(1)) for engine in others), "and the next version"


def test_other_bytes_are_found_with_their_piece_and_not_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(2)
    update, liar = trainer.send(0), FaultyEngine(trainer, lies, healthy=2)
    assert right(liar.receiver, update)
    first, second = trainer.engine(), trainer.engine()
    assert right(first, update) and first.received == MANIFEST.payload, "it fetched nothing twice"
    assert first.from_others == 2, "after the first lie it asks the liar for nothing"
    port = liar.address[1]
    assert capsys.readouterr().err.count(f"the engine at 127.0.0.1:{port} sent other bytes") == 1
    assert right(second, update) and second.received == MANIFEST.payload


def test_an_engine_that_is_gone_is_not_waited_for() -> None:
    trainer = Trainer()
    update, gone = trainer.send(0), FaultyEngine(trainer, closes)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone._source._server = SimpleNamespace(address=closed.getsockname())
    assert right(gone.receiver, update)
    engine = trainer.engine()
    assert right(engine, update) and engine.from_others == 0


def test_an_engine_that_falls_silent_holds_nobody_up_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_engine, "OTHERS", 0.05)
    done = threading.Event()
    trainer = Trainer()
    update = trainer.send(0)
    assert right(FaultyEngine(trainer, lambda *_: done.wait(60)).receiver, update)
    assert right(trainer.engine(), update)
    done.set()


def test_an_engine_that_reaches_no_other_soon_asks_the_trainer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, tried = Trainer(2), list[tuple[str, int]]()
    update, reach = trainer.send(0), tcp_engine.reach
    assert all_right([trainer.engine() for _ in range(5)], update)

    def behind_a_wall(place: tuple[str, int], seconds: float, tls: Any) -> socket.socket:
        if place[1] not in ports_of(update):
            tried.append(place)
            raise TimeoutError("no answer")
        return reach(place, seconds, tls)

    monkeypatch.setattr(tcp_engine, "reach", behind_a_wall)
    engine = trainer.engine()
    assert right(engine, update) and engine.from_others == 0
    assert len(tried) == len(set(tried)) == tcp_engine.FAR


def test_nobody_without_the_token_announces_anything() -> None:
    trainer = Trainer()
    update = trainer.send(0)
    stranger = Question("0" * 32, "", update.fingerprint, "full", 0, SMALLEST, relay=9)
    with socket.create_connection((update.where["host"], update.where["port"])) as connection:
        send_message(connection, stranger)
        with suppress(OSError):  # closed with our bytes unread
            send_message(connection, PieceSaid(has=True))
            assert connection.recv(1) == b""
    engine = trainer.engine()
    assert right(engine, update) and engine.from_others == 0


@settings(max_examples=15, deadline=None)
@given(
    ranks=st.sampled_from([1, 2]),
    faults=st.lists(st.tuples(st.sampled_from(FAULTS), st.integers(0, 4)), max_size=3),
    seed=st.integers(0, 99),
)
def test_whatever_engines_do_the_others_have_the_right_weights(
    ranks: int, faults: list[tuple[Callable[[socket.socket, Question, Pieces], None], int]], seed: int
) -> None:
    trainer = Trainer(ranks)
    faulty = [FaultyEngine(trainer, fault, healthy).receiver for fault, healthy in faults]
    engines = [trainer.engine() for _ in range(3)]
    order = [*faulty, *engines]
    Random(seed).shuffle(order)
    for version in range(2):
        update = trainer.send(version)
        assert all_right(order, update)


# -- engines that are processes, and are killed or stopped --------------------------------------------------------------------


def process_for(trainer: Trainer, smallest: int = SMALLEST, **until: int) -> AbstractContextManager[RelayingEngine]:
    return engine_process(Given(trainer.transport.token, MANIFEST, smallest, **until))


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_that_is_killed_while_it_sends_a_piece_costs_the_others_no_byte(ranks: int) -> None:
    trainer = Trainer(ranks)
    update = trainer.send(0)
    with process_for(trainer, sends=3) as killed:
        killed.fetch(update)
        assert killed.heard() == "has it"
        engines = [trainer.engine() for _ in range(3)]
        fetching = Beside(lambda: all_right(engines, update) or pytest.fail("other weights"))
        assert killed.heard() == "sends"
        killed.signal(signal.SIGKILL)
        fetching.join()
    assert sum(engine.from_others for engine in engines) >= 3
    assert all_right(engines, trainer.send(1)), "and the next version"


def test_two_engines_that_are_killed_while_they_fetch_a_piece_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer sends it to no more than two. It is so small that the trainer has sent it when they are killed."""
    monkeypatch.setattr(tcp_server, "STILL", 900.0)
    trainer = Trainer()
    update = trainer.send(0)
    with (
        process_for(trainer, MANIFEST.nbytes, fetches=0) as one,
        process_for(trainer, MANIFEST.nbytes, fetches=0) as other,
    ):
        for killed in (one, other):
            killed.fetch(update)
        assert one.heard() == other.heard() == "fetches"
        engine = TcpReceiver({"": MANIFEST}, TcpSource(trainer.transport.token, None, MANIFEST.nbytes))
        fetching = Beside(lambda: right(engine, update) or pytest.fail("other weights"))
        for killed in (one, other):
            killed.signal(signal.SIGKILL)
        fetching.join()


def test_an_engine_that_is_stopped_is_waited_for_once_with_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, reached, reach = Trainer(), Counter[int](), tcp_engine.reach
    monkeypatch.setattr(tcp_engine, "OTHERS", 0.2)

    def counted(place: tuple[str, int], seconds: float, tls: Any) -> socket.socket:
        reached[place[1]] += 1
        return reach(place, seconds, tls)

    monkeypatch.setattr(tcp_engine, "reach", counted)
    for version in range(2):
        update = trainer.send(version)
        with process_for(trainer) as stopped:
            stopped.fetch(update)
            assert stopped.heard() == "has it"
            stopped.signal(signal.SIGSTOP)
            reached.clear()
            engine = trainer.engine()
            assert right(engine, update) and engine.from_others == 0
            assert [times for port, times in reached.items() if port not in ports_of(update)] == [1]
            assert right(later := trainer.engine(), update) and later.from_others, "the first one sends"


# -- who sends to whom -----------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(["ask", "has", "lost", "dies"]), st.integers(0, 6)), max_size=60))
def test_nobody_sends_to_more_than_two_and_the_trainer_to_none_once_another_has_it(
    steps: list[tuple[str, int]],
) -> None:
    """`source` against a list of who is sent a piece by whom."""
    relays, path = Relays(), "/v1/0"
    by, has = dict[str, str](), set[str]()
    for what, number in steps:
        engine = f"host:{number}"
        if what == "ask" and engine not in has and engine not in by:
            source = relays.source(path, engine)
            loads = Counter(by.values())
            if source is None:
                assert all(loads[one] >= FANOUT for one in has) if has else loads[""] >= FANOUT
            else:
                assert source != engine and loads[source] < FANOUT
                assert (source in has) if has else source == ""
                assert loads[source] == min((loads[one] for one in has), default=loads[source]), "the least busy"
                by[engine] = source
        elif what == "has" and engine in by:
            relays.joined(path, engine)
            relays.given_back(path, by.pop(engine))
            has.add(engine)
        elif what == "lost" and engine in has:
            relays.lost(path, engine)
            has.discard(engine)
        elif what == "dies" and engine in by:
            relays.given_back(path, by.pop(engine))


def test_what_is_forgotten_is_sent_by_the_trainer_again() -> None:
    relays = Relays()
    for path in ("/old/0", "/new/0", "north/old/0"):
        relays.joined(path, "host:1")
    relays.forget("/new/", "/")
    assert relays.source("/old/0", "host:2") == "" and relays.source("/new/0", "host:2") == "host:1"
    assert relays.source("north/old/0", "host:2") == "host:1", "of another adapter"
