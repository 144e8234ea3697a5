"""Transports that engines fetch from: what travels, what is refused, and what the end of one engine does to the others."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from headrace.core.errors import IdentityError
from headrace.core.protocols import Transport, WeightSender
from headrace.core.weights import WeightUpdate
from headrace.run.config import load_config
from headrace.run.starting import transport_of
from headrace.weight_sync import tcp_engine, tcp_server
from headrace.weight_sync.fetching import FetchingReceiver
from headrace.weight_sync.files import CHANGES, Files
from headrace.weight_sync.kind import Encoding, Opening
from headrace.weight_sync.packed import lay_out
from headrace.weight_sync.ranges import ByteRange
from headrace.weight_sync.sockets import LONGEST, SendQueue, read_message, send_message
from headrace.weight_sync.tcp import Tcp
from headrace.weight_sync.tcp_engine import TcpSource
from headrace.weight_sync.tcp_server import PieceSaid, Question, WeightReply
from headrace.weight_sync.transport import TRANSPORTS
from support.runs.beside import Beside
from support.tiny_run import tiny_config

SHAPES = {"embed": (3000, 16), "q": (64, 64), "norm": (7,)}
PAYLOAD = sum(2 * torch.Size(shape).numel() for shape in SHAPES.values())


def parameters(version: int) -> list[tuple[str, torch.Tensor]]:
    """Those of version 0, of which each version changes a few more."""
    generator = torch.Generator().manual_seed(0)
    named = [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]
    for step in range(1, version + 1):
        for _, tensor in named:
            tensor.view(-1)[step % 7 :: 97] += step
    return named


MANIFESTS = {"": lay_out(parameters(0), torch.bfloat16)}


class Both:
    """A sender and as many receivers as are asked for."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.sender: WeightSender = transport.sender(MANIFESTS)

    def receiver(self) -> FetchingReceiver:
        receiver = self.transport.receiver(MANIFESTS)
        assert isinstance(receiver, FetchingReceiver)
        return receiver

    def send(self, version: int) -> WeightUpdate:
        return self.sender.send(version, parameters(version))


def received(receiver: FetchingReceiver, update: WeightUpdate) -> int:
    """Receives it, compares it, and returns the bytes that travelled."""
    before = receiver.received
    views = receiver.receive(update)
    for name, tensor in parameters(update.version):
        assert torch.equal(views[name], tensor.bfloat16()), name
    return receiver.received - before


def ends_of(kind: str, form: Encoding) -> Iterator[Both]:
    both = Both(TRANSPORTS[kind].open(Opening(form=form)))
    yield both
    both.transport.close()


@pytest.fixture(params=["tcp", "http", "files", "broadcast"])
def deltas(request: pytest.FixtureRequest) -> Iterator[Both]:
    yield from ends_of(request.param, Encoding(delta=True, anchor_every=5))


@pytest.fixture
def tcp() -> Iterator[Both]:
    yield from ends_of("tcp", Encoding())


# -- what travels -------------------------------------------------------------------------------------------------------------


def test_a_full_copy_first_then_differences_with_an_anchor_now_and_then(deltas: Both) -> None:
    receiver, travelled = deltas.receiver(), []
    for version in range(9):
        update = deltas.send(version)
        travelled.append(received(receiver, update))
        assert ("base" in update.where) == (travelled[-1] < PAYLOAD / 5)
    anchors = [version for version, nbytes in enumerate(travelled) if nbytes >= PAYLOAD]
    assert anchors == [0, 6], travelled


def test_whoever_missed_a_version_gets_it_whole(deltas: Both) -> None:
    receiver, late = deltas.receiver(), deltas.receiver()
    for version in range(3):
        received(receiver, deltas.send(version))
    update = deltas.send(3)
    assert received(receiver, update) < PAYLOAD / 5
    assert received(late, update) >= PAYLOAD, "it had nothing"
    deltas.send(4)
    update = deltas.send(5)
    assert received(late, update) >= PAYLOAD, "it had version 3"


def test_an_update_that_is_loaded_again_travels_once(deltas: Both) -> None:
    receiver = deltas.receiver()
    update = deltas.send(0)
    assert received(receiver, update) >= PAYLOAD and received(receiver, update) == 0


@pytest.mark.parametrize("kind", ["tcp", "http", "files", "broadcast"])
@pytest.mark.parametrize("every", [1, 3])
def test_the_setting_says_how_many_differences_lie_between_two_full_copies(
    kind: str, every: int, tmp_path: Path
) -> None:
    given = tiny_config(tmp_path, tmp_path)
    given["weight_sync"] = {"kind": kind, "encoding": "delta", "anchor_every": every}
    given["engine"] = {"dtype": "bfloat16"} | (
        {"kind": "vllm", "urls": ["http://127.0.0.1:1"]} if kind == "http" else {}
    )
    transport = transport_of(load_config(given), tmp_path)
    sender = transport.sender(MANIFESTS)
    whole = [version for version in range(9) if "base" not in sender.send(version, parameters(version)).where]
    transport.close()
    assert whole == list(range(0, 9, every + 1))


def test_an_update_that_is_loaded_again_is_proven_again(deltas: Both) -> None:
    """What was overwritten meanwhile (by an engine that works on its weights in place, say) is refused, and then fetched anew; a difference
    from it is no good either."""
    receiver = deltas.receiver()
    for version in range(3):
        update = deltas.send(version)
        receiver.receive(update)["norm"][3] += 1
        with pytest.raises(IdentityError, match=f"version {version} were published with fingerprint"):
            receiver.receive(update)
        assert received(receiver, update) >= PAYLOAD
        receiver.receive(update)["norm"][3] += 1
    assert received(receiver, deltas.send(3)) >= PAYLOAD, "the difference, and the full copy in its place"


def test_all_values_changed_travel_whole(deltas: Both) -> None:
    receiver = deltas.receiver()
    receiver.receive(deltas.send(0))
    changed = [(name, tensor.flip(0) * 1.7) for name, tensor in parameters(0)]
    update = deltas.sender.send(1, changed)
    assert "base" not in update.where
    assert torch.equal(receiver.receive(update)["q"], dict(changed)["q"].bfloat16())


def test_the_version_that_is_served_stays_valid_whatever_is_refused_meanwhile(deltas: Both) -> None:
    receiver = deltas.receiver()
    served = receiver.receive(deltas.send(0))
    for version in range(1, 4):
        update = deltas.send(version)
        with pytest.raises(IdentityError):
            receiver.receive(msgspec.structs.replace(update, fingerprint="00"))
        assert torch.equal(served["q"], dict(parameters(0))["q"].bfloat16())
    assert received(receiver, update) >= PAYLOAD


def test_a_version_published_twice_is_fetched_again_by_nobody(deltas: Both) -> None:
    """`headrace plan --calibrate` publishes the same weights several times."""
    receiver = deltas.receiver()
    received(receiver, deltas.send(0))
    assert received(receiver, deltas.send(0)) == 0
    received(receiver, deltas.send(1))
    received(receiver, deltas.send(1))
    assert received(receiver, deltas.send(2)) < PAYLOAD


# -- files --------------------------------------------------------------------------------------------------------------------


def test_old_files_go_when_nothing_differs_from_them() -> None:
    for both in ends_of("files", Encoding(delta=True, anchor_every=2)):
        assert isinstance(both.transport, Files)
        model, kept = Path(both.transport.directory) / "model", []
        for version in range(7):
            update = both.send(version)
            kept.append([int(path.name) for path in sorted(model.iterdir())])
            received(both.receiver(), update)
        assert kept == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [3, 4], [3, 4, 5], [3, 4, 5, 6]]


def test_a_torn_difference_is_replaced_by_the_full_copy_before_it_and_a_missing_one_is_refused() -> None:
    for both in ends_of("files", Encoding(delta=True)):
        receiver = both.receiver()
        received(receiver, both.send(0))
        update = both.send(1)
        changes = Path(update.where["path"]) / CHANGES
        whole = changes.read_bytes()
        changes.write_bytes(whole[:-3])
        with pytest.raises(IdentityError, match="version 1"):
            receiver.receive(update)
        changes.write_bytes(whole)
        assert received(receiver, update)
        shutil.rmtree(changes.parent)
        with pytest.raises(IdentityError, match="Trainer and engine must see the same directory"):
            both.receiver().receive(update)


# -- TCP: strangers, and bytes that are not those of the trainer ----------------------------------------------------------------


def told(update: WeightUpdate, data: bytes) -> bytes:
    """What the trainer's server says to that."""
    with socket.create_connection((update.where["host"], update.where["port"]), 60) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        heard = b""
        while more := connection.recv(1 << 16):
            heard += more
        return heard


def packed(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body


def test_strangers_and_garbage_are_told_nothing(tcp: Both) -> None:
    update = tcp.send(0)
    assert isinstance(tcp.transport, Tcp)
    right = Question(tcp.transport.token, "", update.fingerprint, "full")
    assert len(told(update, packed(right))) > PAYLOAD
    refused = [
        packed(msgspec.structs.replace(right, token="0" * 32)),
        packed(msgspec.structs.replace(right, token="")),
        packed(right)[:-1],
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        (LONGEST + 1).to_bytes(4, "little") + bytes(LONGEST + 1),
        (9).to_bytes(4, "little") + b"\xc1" * 9,
        b"",
    ]
    for data in refused:
        with contextlib.suppress(OSError):  # closed with our bytes unread
            assert told(update, data) == b""
    for wrong in (msgspec.structs.replace(right, name="south"), msgspec.structs.replace(right, part="delta")):
        heard = told(update, packed(wrong))
        assert msgspec.msgpack.decode(heard[4:], type=WeightReply).refused
    assert received(tcp.receiver(), update)


def test_the_server_listens_on_the_loopback_and_the_token_is_in_no_record(tcp: Both) -> None:
    update = tcp.send(0)
    assert isinstance(tcp.transport, Tcp)
    assert update.where["host"] == "127.0.0.1"
    assert tcp.transport.token not in msgspec.json.encode(update).decode()


class Relay:
    """Stands between engine and trainer, and changes what the trainer sends."""

    def __init__(self, update: WeightUpdate, change: Callable[[bytes], bytes]) -> None:
        self._to, self._change = (update.where["host"], update.where["port"]), change
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.update = msgspec.structs.replace(update, where={**update.where, "port": self._listening.getsockname()[1]})
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            here, _ = self._listening.accept()
            with here, socket.create_connection(self._to) as there:
                question = msgspec.msgpack.decode(read_message(here), type=Question)
                send_message(there, question)
                if question.relay:
                    send_message(there, PieceSaid(has=True))  # so that the trainer ends this connection
                heard = b""
                while more := there.recv(1 << 20):
                    heard += more
                here.sendall(self._change(heard))


def flipped(heard: bytes) -> bytes:
    """One bit, among the weights or in the last frame of a difference."""
    place = 5000 if len(heard) > PAYLOAD else len(heard) - 10
    return heard[:place] + bytes([heard[place] ^ 1]) + heard[place + 1 :]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (flipped, "the engine loaded"),
        (lambda heard: heard[:-1], "1 bytes too early"),
        (lambda heard: b"", "too early"),
        (lambda heard: packed(WeightReply(8)) + bytes(8), "has 8 bytes, and this engine's weights"),
        (lambda heard: b"HTTP/1.1 200 OK\r\n\r\n", "could not be fetched"),
    ],
)
def test_torn_and_foreign_bytes_are_refused_and_the_version_before_is_kept(
    tcp: Both, change: Callable[[bytes], bytes], said: str
) -> None:
    receiver = tcp.receiver()
    served = receiver.receive(tcp.send(0))
    update = tcp.send(1)
    with pytest.raises(IdentityError, match=said):
        receiver.receive(Relay(update, change).update)
    assert torch.equal(served["q"], dict(parameters(0))["q"].bfloat16())
    assert received(receiver, update)


def test_a_spoilt_difference_is_replaced_by_the_full_copy() -> None:
    """Bit flips within a difference: the fingerprint finds them, and the full copy is fetched."""
    for both in ends_of("tcp", Encoding(delta=True)):
        receiver = both.receiver()
        received(receiver, both.send(0))
        spoil = lambda heard: heard if len(heard) > PAYLOAD else flipped(heard)  # noqa: E731
        update = both.send(1)
        assert received(receiver, Relay(update, spoil).update) > PAYLOAD
        assert received(receiver, both.send(2)) < PAYLOAD / 5, "and differences go on"


def test_a_trainer_that_is_gone_is_named(tcp: Both) -> None:
    update = tcp.send(0)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    gone = msgspec.structs.replace(update, where={**update.where, "port": port})
    with pytest.raises(IdentityError, match=rf"version 0 could not be fetched from the trainer at 127.0.0.1:{port}"):
        tcp.receiver().receive(gone)


# -- several engines ------------------------------------------------------------------------------------------------------------


def test_an_engine_that_dies_or_stops_reading_midway_delays_nobody(tcp: Both) -> None:
    update = tcp.send(0)
    assert isinstance(tcp.transport, Tcp)
    question = packed(Question(tcp.transport.token, "", update.fingerprint, "full"))
    slow = socket.create_connection((update.where["host"], update.where["port"]), 60)
    slow.sendall(question)
    assert slow.recv(10), "it has begun, and reads no more"
    for _ in range(3):
        dead = socket.create_connection((update.where["host"], update.where["port"]), 60)
        dead.sendall(question)
        dead.recv(10)
        dead.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))  # a reset, as at a kill
        dead.close()
    engines = [tcp.receiver() for _ in range(4)]
    fetching = [Beside(partial(received, engine, update)) for engine in engines]
    for thread in fetching:
        thread.join()
    assert all(engine.received >= PAYLOAD for engine in engines)
    slow.close()


def test_engines_beyond_those_that_are_sent_to_at_once_wait_longer_than_a_silent_connection_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_once, most, lock = [0], [0], threading.Lock()
    told, enough, send, say = Counter[object](), threading.Event(), tcp_server.send_all, tcp_server.send_message

    def held(connection: socket.socket, found: memoryview) -> None:
        with lock:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
        try:
            assert enough.wait(300)
            send(connection, found)
        finally:
            with lock:
                at_once[0] -= 1

    def counted(connection: socket.socket, message: WeightReply) -> None:
        if message.waits:
            with lock:
                told[connection.getpeername()] += 1
                if sum(times > longest for times in told.values()) == 8:
                    enough.set()
        say(connection, message)

    longest = tcp_engine.PATIENCE / tcp_server.STILL
    monkeypatch.setattr(tcp_server, "AT_ONCE", 2)
    monkeypatch.setattr(tcp_server, "STILL", 0.02)
    monkeypatch.setattr(tcp_server, "send_all", held)
    monkeypatch.setattr(tcp_server, "send_message", counted)
    for ends in ends_of("tcp", Encoding()):
        update = ends.send(0)
        engines = [ends.receiver() for _ in range(10)]
        for engine in engines:
            engine._relayed.direct = True
        fetching = [Beside(partial(received, engine, update)) for engine in engines]
        for thread in fetching:
            thread.join()
        assert all(engine.received >= PAYLOAD for engine in engines) and most[0] == 2


def test_one_that_goes_while_it_waits_gives_its_place_in_the_queue_to_the_next() -> None:
    queue, order = SendQueue(places=1), list[str]()

    def waits(name: str, still: Callable[[], object]) -> None:
        with queue.place(still, 0.01):
            order.append(name)

    def gone() -> None:
        raise OSError("it is gone")

    with queue.place(lambda: None, 5):
        lost = Beside(partial(waits, "lost", gone))
        with pytest.raises(OSError, match="it is gone"):
            lost.join()
        others = [Beside(partial(waits, name, lambda: None)) for name in ("a", "b")]
        time.sleep(0.05)
        assert order == []
    for other in others:
        other.join()
    assert sorted(order) == ["a", "b"]
    with queue.place(gone, 5):
        pass  # nobody has kept the place


def test_engines_begin_at_different_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    places, asked = [("127.0.0.1", port) for port in range(8)], list[tuple[str, int]]()
    source = TcpSource("token", None)
    monkeypatch.setattr(
        source, "_ranges_at", lambda update, manifest, places: [[ByteRange(n, 1)] for n, _ in enumerate(places)]
    )
    monkeypatch.setattr(source, "_serve", lambda place: None)
    monkeypatch.setattr(source, "_asked", lambda update, place, *rest: asked.append(place))
    update = WeightUpdate(
        version=0, kind="full", fingerprint="", nbytes=0, seconds=0, where={"parts": places, "label": "copy 1"}
    )
    rounds = []
    for _ in range(40):
        asked.clear()
        source.full(update, MANIFESTS[""], memoryview(bytes(8)))
        rounds.append(list(asked))
    assert all(sorted(one) == places for one in rounds), "each is asked once"
    assert len({one[0] for one in rounds}) > 3


def test_a_killed_engine_leaves_the_trainer_and_the_others_whole(tcp: Both) -> None:
    """The real thing: a process that is killed with the weights half way."""
    update = tcp.send(0)
    pid = os.fork()
    if pid == 0:
        connection = socket.create_connection((update.where["host"], update.where["port"]), 60)
        connection.sendall(packed(Question(tcp.transport.token, "", update.fingerprint, "full")))  # type: ignore[attr-defined]
        connection.recv(100)
        os.kill(os.getpid(), 9)
    assert os.waitpid(pid, 0)[1] == 9
    assert received(tcp.receiver(), update) and received(tcp.receiver(), tcp.send(1))
