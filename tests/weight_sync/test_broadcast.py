"""The broadcast of weights, with real processes: what the end, the stop or the slowness of one receiver does to the others."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import pytest
import torch

from headrace.core.errors import IdentityError
from headrace.core.weights import AdapterSpec, WeightUpdate
from headrace.weight_sync.broadcast import Broadcast, Link
from headrace.weight_sync.broadcast_rounds import BUCKET
from headrace.weight_sync.fetching import FetchingReceiver
from headrace.weight_sync.kind import Encoding, Opening
from headrace.weight_sync.packed import lay_out
from headrace.weight_sync.round_messages import BeginRound, GetKey, GotBucket, JoinGroup, PutKey
from headrace.weight_sync.sockets import send_message
from support.runs.beside import Beside

VALUES = 2 * BUCKET + 999
"""bfloat16: four buckets, and a piece of a fifth."""
MANIFESTS = {"": lay_out([("w", torch.empty(VALUES))], torch.bfloat16)}
PATIENCE = 2.0


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    whole = torch.arange(VALUES, dtype=torch.float32) % 251
    whole[::1000] += version
    return [("w", whole)]


# -- receivers in processes of their own ----------------------------------------------------------------------------------------


def victim(transport: Broadcast, update: WeightUpdate, sent: int) -> None:
    """Takes part in a round until its second bucket has arrived, and then sends itself a signal."""
    link = Link((update.where["host"], update.where["port"]), transport.token, transport.patience)
    begin = link.ask("", update.fingerprint, "full")
    assert isinstance(begin, BeginRound)
    group = link._joined(begin)
    for number in range(2):
        group.carry(number, BUCKET)
    for number in range(2):
        while link._next(60) != (begin.group, number):
            pass
        link.send(GotBucket(begin.round, number))
    os.kill(os.getpid(), sent)


def serve() -> None:
    """The program of a receiver: a line of JSON for each update in, and one for its bytes out."""
    transport = msgspec.json.decode(sys.stdin.readline(), type=Broadcast)
    receiver = transport.receiver(MANIFESTS)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        sent, told = json.loads(line)
        update = msgspec.convert(told, WeightUpdate)
        if sent:
            victim(transport, update, sent)
        before = receiver.received
        try:
            views = receiver.receive(update)
            right = torch.equal(views["w"], weights(update.version)[0][1].bfloat16())
            print(json.dumps([right, receiver.received - before]), flush=True)
        except IdentityError as error:
            print(json.dumps(str(error)), flush=True)


class Process:
    def __init__(self, transport: Broadcast) -> None:
        self._child = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self._say(msgspec.to_builtins(transport))

    def _say(self, what: Any) -> None:
        assert self._child.stdin
        self._child.stdin.write(json.dumps(what) + "\n")
        self._child.stdin.flush()

    def heard(self) -> Any:
        assert self._child.stdout
        return json.loads(self._child.stdout.readline())

    def take(self, update: WeightUpdate, sent: int = 0) -> None:
        self._say((sent, msgspec.to_builtins(update)))

    def signal(self, number: int) -> None:
        os.kill(self._child.pid, number)

    def ended(self) -> int:
        return self._child.wait(120)

    def close(self) -> None:
        self._child.kill()
        self._child.wait()


# -- both ends ------------------------------------------------------------------------------------------------------------------


class Ends:
    def __init__(self, delta: bool = False) -> None:
        self.transport = msgspec.structs.replace(Broadcast.open(Opening(form=Encoding(delta))), patience=PATIENCE)
        self.sender = self.transport.sender(MANIFESTS)

    def receiver(self) -> FetchingReceiver:
        return self.transport.receiver(MANIFESTS)


def all_at_once(receivers: list[FetchingReceiver], update: WeightUpdate) -> list[int]:
    """Returns the bytes that travelled to each."""
    found: dict[int, int] = {}

    def receive(number: int) -> None:
        before = receivers[number].received
        views = receivers[number].receive(update)
        assert torch.equal(views["w"], weights(update.version)[0][1].bfloat16())
        found[number] = receivers[number].received - before

    threads = [Beside(partial(receive, number)) for number in range(len(receivers))]
    for thread in threads:
        thread.join()
    return [found[number] for number in range(len(receivers))]


@pytest.fixture
def ends() -> Ends:
    return Ends(delta=True)


@pytest.fixture
def processes(ends: Ends) -> Iterator[list[Process]]:
    """Two of them, which are ready."""
    started = [Process(ends.transport) for _ in range(2)]
    assert [process.heard() for process in started] == ["ready"] * 2
    yield started
    for process in started:
        process.close()


@pytest.mark.slow
def test_receivers_that_are_killed_and_stopped_within_a_round(ends: Ends, processes: list[Process]) -> None:
    """The others get the version all the same, and whoever was stopped gets the newest when it goes on."""
    killed, stopped = processes
    others, nbytes = [ends.receiver() for _ in range(2)], MANIFESTS[""].nbytes
    update = ends.sender.send(0, weights(0))
    killed.take(update, signal.SIGKILL)
    stopped.take(update, signal.SIGSTOP)
    assert all_at_once(others, update) == [nbytes] * 2
    assert killed.ended() == -signal.SIGKILL
    for version in (1, 2):  # a group without the stopped one: differences, since these have the version before
        update = ends.sender.send(version, weights(version))
        for travelled in all_at_once(others, update):
            assert 0 < travelled < nbytes / 5
    stopped.take(update)
    stopped.signal(signal.SIGCONT)
    heard = stopped.heard()
    assert isinstance(heard, str) and "no longer has them" in heard, "version 0 is gone"
    assert stopped.heard() == [True, nbytes]


def test_one_round_for_all_and_one_for_those_that_need_the_whole() -> None:
    ends = Ends(delta=True)
    receivers = [ends.receiver() for _ in range(2)]
    nbytes = MANIFESTS[""].nbytes
    assert all_at_once(receivers, ends.sender.send(0, weights(0))) == [nbytes] * 2
    receivers.append(ends.receiver())
    first, second, late = all_at_once(receivers, ends.sender.send(1, weights(1)))
    assert first == second < nbytes / 5 and late == nbytes


def test_one_that_comes_back_is_served_though_others_ask_for_each_version_at_once() -> None:
    """A trainer that publishes more often than rounds wait for those who have not asked. The one that comes back needs the whole."""
    ends = Ends(delta=True)
    steady, back = ends.receiver(), ends.receiver()
    newest = ends.sender.send(0, weights(0))
    steady.receive(newest)
    served: list[int] = []

    def come_back() -> None:
        while not served:
            with suppress(IdentityError):  # that version is gone by now
                back.receive(newest)
                served.append(newest.version)

    thread = Beside(come_back)
    for version in range(1, 300):
        newest = ends.sender.send(version, weights(version))
        steady.receive(newest)
        if served:
            break
    assert served and served[0] <= newest.version
    thread.join()


def test_a_slow_receiver_holds_a_round_up_only_while_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its buckets takes a while, all of them more than the patience for one."""
    ends = Ends()
    slow, quick = ends.receiver(), ends.receiver()
    send = Link.send

    def slowly(link: Link, message: Any) -> None:
        if isinstance(message, GotBucket) and threading.current_thread().name == "slow":
            time.sleep(PATIENCE / 4)
        send(link, message)

    monkeypatch.setattr(Link, "send", slowly)
    update = ends.sender.send(0, weights(0))
    done: list[int] = []

    def receive() -> None:
        slow.receive(update)
        done.append(slow.received)

    thread = Beside(receive, name="slow")
    assert all_at_once([quick], update) == [MANIFESTS[""].nbytes]
    thread.join()
    assert done == [MANIFESTS[""].nbytes]


@pytest.mark.slow
def test_whoever_never_answers_is_left_and_the_others_go_on() -> None:
    """It asks, joins, and takes nothing: its connection stays, so that only the lack of progress shows it."""
    ends = Ends()
    update = ends.sender.send(0, weights(0))
    silent = Link((update.where["host"], update.where["port"]), ends.transport.token, PATIENCE)
    waiting = Beside(lambda: silent._joined(silent.ask("", update.fingerprint, "full")))  # type: ignore[arg-type]
    assert all_at_once([ends.receiver(), ends.receiver()], update) == [MANIFESTS[""].nbytes] * 2
    waiting.join()
    assert all_at_once([ends.receiver()], ends.sender.send(1, weights(1))) == [MANIFESTS[""].nbytes]
    silent.close()


def test_a_torn_bucket_is_refused_and_the_version_before_stays() -> None:
    ends = Ends()
    receiver = ends.receiver()
    served = receiver.receive(ends.sender.send(0, weights(0)))
    update = ends.sender.send(1, weights(1))
    slot = ends.sender.offers.slots.buffer("", 1)
    slot[2 * BUCKET + 5] ^= 1
    with pytest.raises(IdentityError, match="version 1"):
        receiver.receive(update)
    assert torch.equal(served["w"], weights(0)[0][1].bfloat16())
    slot[2 * BUCKET + 5] ^= 1
    assert all_at_once([receiver], update) == [MANIFESTS[""].nbytes]


def test_an_adapter_goes_to_all() -> None:
    manifests = {"": MANIFESTS[""], "north": lay_out([("a", torch.empty(7, 5))], torch.bfloat16)}
    transport = Broadcast.open()
    sender, receivers = transport.sender(manifests, [""]), [transport.receiver(manifests) for _ in range(2)]
    north = AdapterSpec("north", 8, 16.0)
    for version in range(3):
        tensor = torch.full((7, 5), float(version))
        update = sender.send(version, [("a", tensor)], north)
        for receiver in receivers:
            assert torch.equal(receiver.receive(update)["a"], tensor.bfloat16())


def test_strangers_learn_nothing_and_an_engine_of_another_size_is_refused() -> None:
    ends = Ends()
    update = ends.sender.send(0, weights(0))
    address = update.where["host"], update.where["port"]
    assert update.where["host"] == "127.0.0.1"
    assert ends.transport.token not in msgspec.json.encode(update).decode()
    for message in (JoinGroup("0" * 32, ""), PutKey("", 1, "a", b"b"), GetKey("no", 1, "a")):
        with socket.create_connection(address, 60) as connection:
            send_message(connection, message)
            assert connection.recv(100) == b""
    small = ends.transport.receiver({"": lay_out([("w", torch.empty(8))], torch.bfloat16)})
    with pytest.raises(IdentityError, match="and this engine's weights"):
        small.receive(update)
    assert all_at_once([ends.receiver()], update) == [MANIFESTS[""].nbytes]


def test_a_trainer_that_is_gone_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        host, port = listening.getsockname()
    ends = Ends()
    update = msgspec.structs.replace(ends.sender.send(0, weights(0)), where={"host": host, "port": port})
    with pytest.raises(IdentityError, match=f"could not be had from the trainer at 127.0.0.1:{port}"):
        ends.receiver().receive(update)


if __name__ == "__main__":
    serve()
