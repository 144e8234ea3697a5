"""Weights over TLS: what travels cannot be read, and only the trainer's own certificate counts."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
import torch

from headrace.core.errors import ConfigError, IdentityError
from headrace.core.weights import WeightUpdate
from headrace.web.tls import TlsIdentity, first_certificate
from headrace.weight_sync.http_ranges import Http
from headrace.weight_sync.kind import Encoding, Opening
from headrace.weight_sync.packed import lay_out
from headrace.weight_sync.relays import FANOUT
from headrace.weight_sync.sockets import send_message
from headrace.weight_sync.tcp import Tcp
from headrace.weight_sync.tcp_server import Question
from headrace.weight_sync.unprepared import UnpreparedReceiver

MANIFESTS = {"": lay_out([("w", torch.empty(70_000))], torch.bfloat16)}
MARK = 1.234
"""A value of the weights, whose bytes must not be seen."""


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    whole = torch.full((70_000,), MARK)
    whole[::500] += version
    return [("w", whole)]


def identity(directory: Path, name: str) -> TlsIdentity:
    cert, key = directory / f"{name}.pem", directory / f"{name}.key"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    subprocess.run([*made, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return TlsIdentity(first_certificate(cert), str(cert), str(key))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> TlsIdentity:
    return identity(tmp_path_factory.mktemp("own"), "own")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> TlsIdentity:
    return identity(tmp_path_factory.mktemp("other"), "other")


def tcp(tls: TlsIdentity | None, delta: bool = False) -> Tcp:
    return msgspec.structs.replace(Tcp.open(Opening(form=Encoding(delta))), tls=tls)


def http(tls: TlsIdentity | None, delta: bool = False) -> Http:
    return msgspec.structs.replace(Http.open(Opening(form=Encoding(delta))), tls=tls)


MAKERS = pytest.mark.parametrize("make", [tcp, http])


class Wire:
    """Passes connections on, and remembers all that the trainer sent."""

    def __init__(self, update: WeightUpdate) -> None:
        url = urlsplit(update.where.get("url", ""))
        self._to, self.seen = (url.hostname or update.where["host"], url.port or update.where["port"]), b""
        self._listening = socket.create_server(("127.0.0.1", 0))
        port = self._listening.getsockname()[1]
        where = {"url": f"{url.scheme}://127.0.0.1:{port}"} if url.port else {**update.where, "port": port}
        self.update = msgspec.structs.replace(update, where=where)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            here, _ = self._listening.accept()
            there = socket.create_connection(self._to)
            threading.Thread(target=self._pass, args=(here, there), daemon=True).start()
            threading.Thread(target=self._remember, args=(there, here), daemon=True).start()

    def _remember(self, there: socket.socket, here: socket.socket) -> None:
        while data := there.recv(1 << 16):
            self.seen += data
            here.sendall(data)

    def _pass(self, here: socket.socket, there: socket.socket) -> None:
        while data := here.recv(1 << 16):
            there.sendall(data)


@MAKERS
@pytest.mark.parametrize("encrypted", [True, False])
def test_what_travels_cannot_be_read(
    make: Callable[[TlsIdentity | None], Tcp | Http], own: TlsIdentity, encrypted: bool
) -> None:
    """Without TLS the same test finds the weights, so that it can fail."""
    transport = make(own if encrypted else None)
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(transport), type=type(transport))
    wire = Wire(transport.sender(MANIFESTS).send(0, weights(0)))
    views = arrived.receiver(MANIFESTS).receive(wire.update)
    assert torch.equal(views["w"], weights(0)[0][1].bfloat16())
    values = bytes(torch.full((8,), MARK).bfloat16().view(torch.uint8).tolist())
    assert (values in wire.seen) != encrypted and len(wire.seen) > 140_000


@MAKERS
def test_differences_travel_over_it_too(make: Callable[[TlsIdentity, bool], Tcp | Http], own: TlsIdentity) -> None:
    transport = make(own, True)
    sender, receiver = transport.sender(MANIFESTS), transport.receiver(MANIFESTS)
    for version in range(3):
        before = receiver.received
        views = receiver.receive(sender.send(version, weights(version)))
        assert torch.equal(views["w"], weights(version)[0][1].bfloat16())
        assert version == 0 or receiver.received - before < 14_000


@MAKERS
def test_another_certificate_and_none_are_refused(
    make: Callable[[TlsIdentity], Tcp | Http], own: TlsIdentity, other: TlsIdentity
) -> None:
    transport = make(own)
    update = transport.sender(MANIFESTS).send(0, weights(0))
    for wrong in (other, None):
        engine = msgspec.structs.replace(transport, tls=wrong)
        with pytest.raises(IdentityError, match="could not be fetched from the trainer"):
            engine.receiver(MANIFESTS).receive(update)
    assert transport.receiver(MANIFESTS).receive(update)


def test_whoever_speaks_plainly_is_answered_nothing_of_the_weights(own: TlsIdentity) -> None:
    transport = tcp(own)
    update = transport.sender(MANIFESTS).send(0, weights(0))
    with socket.create_connection((update.where["host"], update.where["port"]), 60) as connection:
        send_message(connection, Question(transport.token, "", update.fingerprint, "full"))
        heard = b""
        try:
            while data := connection.recv(1 << 16):
                heard += data
        except ConnectionError:
            pass
        assert len(heard) < 100, "an alert of TLS at most"


@MAKERS
def test_a_server_that_was_started_before_the_run_trusts_the_certificate_that_it_is_sent(
    make: Callable[[TlsIdentity], Tcp | Http], own: TlsIdentity, other: TlsIdentity
) -> None:
    transport = make(own)
    update = transport.sender(MANIFESTS).send(0, weights(0))
    assert str(update.where.get("url", "https://")).startswith("https://") and own.certificate not in str(update)
    sent = msgspec.structs.replace(update, where={**update.where, **transport.access})
    assert torch.equal(UnpreparedReceiver().receive(sent)["w"], weights(0)[0][1].bfloat16())
    for certificate in (other.certificate, ""):
        wrong = msgspec.structs.replace(sent, where={**sent.where, "certificate": certificate})
        with pytest.raises(IdentityError, match="could not be fetched"):
            UnpreparedReceiver().receive(wrong)


def test_engines_do_not_serve_each_other_over_it(own: TlsIdentity) -> None:
    """They have no certificate, and would send weights that anybody can read."""
    transport = http(own)
    update = transport.sender(MANIFESTS).send(0, weights(0))
    receivers = [transport.receiver(MANIFESTS) for _ in range(FANOUT + 1)]
    for receiver in receivers:
        assert torch.equal(receiver.receive(update)["w"], weights(0)[0][1].bfloat16())
    assert [receiver.from_others for receiver in receivers] == [0] * len(receivers)
    assert not any(receiver.serves for receiver in receivers)


def test_the_key_stays_where_it_is(own: TlsIdentity) -> None:
    key = Path(own.key_file).read_text().splitlines()[1]
    assert key not in msgspec.json.encode(tcp(own)).decode()


def test_of_a_chain_only_the_server_s_own_certificate_is_trusted(
    own: TlsIdentity, other: TlsIdentity, tmp_path: Path
) -> None:
    chain = tmp_path / "chain.pem"
    chain.write_text(own.certificate + other.certificate)
    assert first_certificate(chain) == own.certificate
    chain.write_text("nothing")
    with pytest.raises(ConfigError, match="holds no certificate"):
        first_certificate(chain)
