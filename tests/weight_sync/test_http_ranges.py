"""Weights over HTTP: strangers, ranges, and engines that fetch from each other."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from urllib.parse import urlsplit

import msgspec
import pytest
import torch

from headrace.core.errors import IdentityError
from headrace.core.weights import WeightUpdate
from headrace.weight_sync.directory import DirectoryReceiver
from headrace.weight_sync.fetching import OfferingSender
from headrace.weight_sync.http_ranges import Http, HttpReceiver, HttpSource, WeightServer
from headrace.weight_sync.packed import lay_out
from headrace.weight_sync.relays import FANOUT
from headrace.weight_sync.slots import Slots, anonymous_memory
from support.runs.beside import Beside

PARAMETERS = [("embed", torch.arange(8e6).view(2000, 4000)), ("norm", torch.ones(7))]
MANIFESTS = {"": lay_out(PARAMETERS, torch.bfloat16)}
NBYTES = MANIFESTS[""].nbytes


class Ends:
    def __init__(self) -> None:
        self.transport = Http.open()
        sender = self.transport.sender(MANIFESTS)
        assert isinstance(sender, OfferingSender)
        self.update = sender.send(0, PARAMETERS)
        self.send = sender.send

    def receiver(self) -> HttpReceiver:
        return self.transport.receiver(MANIFESTS)

    def ask(self, path: str, token: str | None = None, **headers: str) -> tuple[int, bytes]:
        place = urlsplit(self.update.where["url"])
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
        connection.request("GET", path, headers={"Authorization": f"Bearer {token or self.transport.token}", **headers})
        answer = connection.getresponse()
        found = answer.status, answer.read()
        connection.close()
        return found


@pytest.fixture
def ends() -> Iterator[Ends]:
    yield Ends()


def is_right(receiver: HttpReceiver | DirectoryReceiver, update: WeightUpdate) -> bool:
    views = receiver.receive(update)
    return all(torch.equal(views[name], tensor.bfloat16()) for name, tensor in PARAMETERS)


def test_only_those_who_know_the_token_are_answered(ends: Ends) -> None:
    path = f"/weights/-/{ends.update.fingerprint}/full"
    assert ends.ask(path)[0] == 206
    for token in ("0" * 32, "x", "é"):
        assert ends.ask(path, token.encode().decode("latin-1")) == (401, b"")
    for wrong, status in (("/", 400), (path + "/x", 400), (path.replace("/-/", "/south/"), 404), (path + "x", 206)):
        assert ends.ask(wrong)[0] == status
    assert ends.ask("/weights/-/00/full")[0] == 404
    assert ends.transport.token not in msgspec.json.encode(ends.update).decode()


def test_a_range_is_the_rest_of_the_bytes(ends: Ends) -> None:
    path = f"/weights/-/{ends.update.fingerprint}/full"
    whole = ends.ask(path)[1]
    assert len(whole) == NBYTES and ends.ask(path, Range="bytes=5000-") == (206, whole[5000:])
    assert ends.ask(path, Range=f"bytes={NBYTES}-")[0] == 416 and ends.ask(path, Range="bytes=x-")[0] == 400


class Cut:
    """Stands before the trainer, and cuts each answer off after so many bytes."""

    def __init__(self, update: WeightUpdate, after: int) -> None:
        self._to = urlsplit(update.where["url"])
        self._after, self.answers = after, 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.update = msgspec.structs.replace(
            update, where={"url": f"http://127.0.0.1:{self._listening.getsockname()[1]}"}
        )
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            here, _ = self._listening.accept()
            self.answers += 1
            threading.Thread(target=self._serve, args=(here,), daemon=True).start()

    def _serve(self, here: socket.socket) -> None:
        with here, socket.create_connection((self._to.hostname or "", self._to.port or 0)) as there:
            threading.Thread(target=_pass_on, args=(here, there), daemon=True).start()  # a body comes after its head
            left = self._after
            while left and (more := there.recv(min(left, 1 << 16))):
                here.sendall(more)
                left -= len(more)
            with suppress(OSError):  # it has hung up first
                here.shutdown(socket.SHUT_RDWR)  # closing alone would wait for the other thread


def _pass_on(here: socket.socket, there: socket.socket) -> None:
    with suppress(OSError):  # one of them is closed
        while some := here.recv(1 << 16):
            there.sendall(some)


def test_what_is_cut_off_goes_on_from_there(ends: Ends) -> None:
    cut, each = Cut(ends.update, 3_000_000), 3_000_000
    assert is_right(ends.receiver(), cut.update)
    assert NBYTES // each <= cut.answers < 2 * (NBYTES // each) + 3


def test_a_trainer_that_only_hangs_up_is_named(ends: Ends) -> None:
    cut = Cut(ends.update, 0)
    with pytest.raises(
        IdentityError, match="version 0, published with fingerprint .* could not be fetched from the trainer at"
    ):
        ends.receiver().receive(cut.update)
    assert cut.answers == 3


@contextmanager
def held_busy(ends: Ends) -> Iterator[None]:
    """The trainer sends to as many as it does at a time, who read no more than the beginning."""
    path = f"/weights/-/{ends.update.fingerprint}/full"
    place = urlsplit(ends.update.where["url"])
    with ExitStack() as open_ones:
        for _ in range(FANOUT):
            one = open_ones.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect((place.hostname or "", place.port or 0))
            one.sendall(f"GET {path} HTTP/1.1\r\nAuthorization: Bearer {ends.transport.token}\r\n\r\n".encode())
            assert one.recv(10)
        yield


def test_engines_fetch_from_each_other(ends: Ends) -> None:
    first = ends.receiver()
    assert is_right(first, ends.update)
    with held_busy(ends):
        others = [ends.receiver() for _ in range(3)]

        def fetch(receiver: HttpReceiver) -> None:
            assert is_right(receiver, ends.update)

        fetching = [Beside(partial(fetch, one)) for one in others]
        for thread in fetching:
            thread.join()
        assert all(one.received == NBYTES for one in others)
        assert all(one.from_others for one in others), "the trainer was busy all the time"


class Liar:
    """An engine that has other weights under this name."""

    def __init__(self) -> None:
        self.manifests, self.asked = MANIFESTS, 0
        self._slots = Slots(anonymous_memory(), MANIFESTS)

    def find(self, name: str, fingerprint: str, part: str) -> memoryview:
        self.asked += 1
        return self._slots.buffer("", 0)


def test_an_engine_that_is_gone_or_has_other_weights_is_passed_over(ends: Ends) -> None:
    source, liar = HttpSource(ends.transport.token), Liar()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = closed.getsockname()[1]
    with held_busy(ends):
        for port in (gone, WeightServer(liar, "127.0.0.1", ends.transport.token).port):
            source.announce(ends.update, port)
        for _ in range(2):  # one is sent to each
            assert is_right(ends.receiver(), ends.update)
        assert liar.asked == 1


def test_a_server_that_was_not_prepared_for_a_run_fetches_its_layout_too(ends: Ends) -> None:
    """As `headrace serve` does; the dialect adds the token to what it is told."""
    receiver = DirectoryReceiver(None, lambda path: {}, torch.bfloat16)  # type: ignore[arg-type]
    told = msgspec.structs.replace(ends.update, where={**ends.update.where, "token": ends.transport.token})
    assert is_right(receiver, told) and receiver.received == NBYTES
    other = Ends()
    assert is_right(
        receiver, msgspec.structs.replace(other.update, where={**other.update.where, "token": other.transport.token})
    )
    with pytest.raises(IdentityError, match="answer 401"):
        DirectoryReceiver(None, lambda path: {}, torch.bfloat16).receive(ends.update)  # type: ignore[arg-type]
