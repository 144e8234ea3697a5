"""Workers of one machine share the memory of new weights: one fetches, the others map, and one that dies, hangs or still reads costs bytes and no worker."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import IdentityError
from headrace.core.weights import WeightUpdate
from headrace.weight_sync import machine_memory
from headrace.weight_sync.http_ranges import Http
from headrace.weight_sync.kind import Encoding, Opening
from headrace.weight_sync.machine_memory import MachineMemory, SharingReceiver
from headrace.weight_sync.packed import lay_out
from headrace.weight_sync.tcp import Tcp
from headrace.weight_sync.unprepared import UnpreparedReceiver
from support import sharing_worker
from support.runs.preloaded_python import Program

SHAPES = {"a": (64, 96), "b": (7,)}
MANIFESTS = {"": lay_out([(name, torch.empty(shape)) for name, shape in SHAPES.items()], torch.bfloat16)}
NBYTES = MANIFESTS[""].nbytes


def weights(version: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()}
    whole["a"][version % 64] += version
    return whole


class Trainer:
    def __init__(self, kind: type[Tcp | Http] = Tcp, delta: bool = False) -> None:
        self.transport = kind.open(Opening(form=Encoding(delta, anchor_every=3)))
        self._sender = self.transport.sender(MANIFESTS)

    def send(self, version: int) -> WeightUpdate:
        """Returns it as a server is told of it."""
        update = self._sender.send(version, weights(version).items())
        return msgspec.structs.replace(update, where={**update.where, **self.transport.access})


def workers(directory: Path, number: int) -> list[UnpreparedReceiver]:
    return [UnpreparedReceiver(MachineMemory(directory / "shared")) for _ in range(number)]


def right(worker: UnpreparedReceiver, update: WeightUpdate) -> bool:
    found = worker.receive(update)
    return all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in weights(update.version).items())


def all_right(some: Sequence[UnpreparedReceiver], update: WeightUpdate) -> int:
    """They are told at the same time. Returns the number of bytes that travelled."""
    before = sum(worker.received for worker in some)
    with ThreadPoolExecutor(len(some)) as pool:
        assert all(pool.map(lambda worker: right(worker, update), some))
    return sum(worker.received for worker in some) - before


@pytest.mark.parametrize("kind", [Tcp, Http])
def test_one_worker_fetches_a_version_and_the_others_map_it(kind: type[Tcp | Http], tmp_path: Path) -> None:
    trainer, some = Trainer(kind), workers(tmp_path, 4)
    assert [all_right(some, trainer.send(version)) for version in range(4)] == [NBYTES] * 4
    inodes = {os.fstat(worker._receivers[""][1]._receiver.memory).st_ino for worker in some}  # type: ignore[union-attr]
    assert len(inodes) == 1, "one memory of two slots"
    for worker in some:
        worker.close()
    assert not list((tmp_path / "shared").iterdir())


def test_whichever_worker_fetches_a_difference_it_is_applied_to_the_version_before(tmp_path: Path) -> None:
    trainer, some = Trainer(delta=True), workers(tmp_path, 3)
    travelled = []
    for version in range(9):
        update = trainer.send(version)
        order = some[version % 3 :] + some[: version % 3]
        before = sum(worker.received for worker in some)
        assert all(right(worker, update) for worker in order)
        travelled.append(sum(worker.received for worker in some) - before)
    assert [nbytes == NBYTES for nbytes in travelled] == [version in (0, 4, 8) for version in range(9)], travelled


def test_what_a_worker_still_reads_is_not_written_to(tmp_path: Path) -> None:
    trainer, (slow, *others) = Trainer(), workers(tmp_path, 3)
    read = slow.receive(update := trainer.send(0))
    for version in range(1, 5):
        all_right(others, trainer.send(version))
    assert all(torch.equal(read[name], tensor.bfloat16()) for name, tensor in weights(0).items())
    assert right(slow, update := trainer.send(5)) and all_right(others, update) == 0, "they meet again"


@pytest.mark.parametrize("kind", [Tcp, Http])
@pytest.mark.parametrize("shared", [False, True])
def test_a_server_keeps_nothing_of_the_run_before(kind: type[Tcp | Http], shared: bool, tmp_path: Path) -> None:
    """Neither the memory of two versions nor an address at which others fetched them."""
    server = UnpreparedReceiver(MachineMemory(tmp_path / "shared")) if shared else UnpreparedReceiver()
    assert right(server, Trainer(kind).send(0))
    first = server._receivers[""][1]
    kept = weakref.ref(first._receiver if isinstance(first, SharingReceiver) else first)
    del first
    assert right(server, Trainer(kind).send(0))
    end = time.monotonic() + 60
    while kept() is not None:  # until the thread that accepts has noticed
        assert time.monotonic() < end
        time.sleep(0.01)
        gc.collect()


def test_two_runs_and_two_adapters_share_nothing(tmp_path: Path) -> None:
    (one, other), first, second = workers(tmp_path, 2), Trainer(), Trainer()
    assert right(one, first.send(0)) and right(other, second.send(0)) and other.received == NBYTES


def test_a_worker_that_waits_too_long_fetches_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, (hangs, worker) = Trainer(), workers(tmp_path, 2)
    update = trainer.send(0)
    assert right(hangs, update)
    shared = hangs._receivers[""][1]
    assert isinstance(shared, SharingReceiver)
    monkeypatch.setattr(machine_memory, "PATIENCE", 0.05)
    with shared._alone() as alone:
        assert alone and right(worker, update) and worker.received == NBYTES
        read = worker.receive(update)
    assert right(hangs, trainer.send(1))
    assert all(torch.equal(read[name], tensor.bfloat16()) for name, tensor in weights(0).items())


@pytest.mark.parametrize(
    "spoilt", [b"", b"{", b"[]", b'{"process": 1, "fd": 0, "inode": 1, "marks": ["",""], "newest": 0}']
)
def test_a_book_that_says_nothing_of_use_costs_one_fetch(spoilt: bytes, tmp_path: Path) -> None:
    trainer, (one, other) = Trainer(), workers(tmp_path, 2)
    assert right(one, trainer.send(0))
    (book,) = [path for path in (tmp_path / "shared").iterdir() if not path.suffix]
    assert json.loads(book.read_bytes())["process"] == os.getpid()
    book.write_bytes(spoilt)
    assert all_right([one, other], trainer.send(1)) in (NBYTES, 2 * NBYTES)
    assert all_right([one, other], trainer.send(2)) == NBYTES


def test_a_directory_that_others_may_write_to_is_not_used(tmp_path: Path) -> None:
    trainer, some = Trainer(), workers(tmp_path, 2)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    assert all_right(some, trainer.send(0)) == 2 * NBYTES and not list((tmp_path / "shared").iterdir())


def test_what_killed_workers_have_left_goes_after_a_week_and_those_that_live_go_on(tmp_path: Path) -> None:
    trainer, (one, other) = Trainer(), workers(tmp_path, 2)
    assert right(one, trainer.send(0))
    for path in (tmp_path / "shared").iterdir():
        os.utime(path, (0, 0))
    assert all_right([one, other], trainer.send(1)) in (NBYTES, 2 * NBYTES)
    (book,) = [path for path in (tmp_path / "shared").iterdir() if not path.suffix]
    assert book.stat().st_mtime > 0 and all_right([one, other], trainer.send(2)) in (NBYTES, 2 * NBYTES)


def test_other_bytes_than_were_published_are_refused_by_each_and_fetched_again(tmp_path: Path) -> None:
    trainer, some = Trainer(), workers(tmp_path, 2)
    update = trainer.send(0)
    assert right(some[0], update)
    some[0].receive(update)["b"][0] += 1
    for worker in some:
        with pytest.raises(IdentityError, match="the engine loaded"):
            worker.receive(update)
    assert all_right(some, trainer.send(1)) == NBYTES


# -- processes --------------------------------------------------------------------------------------------------------------


class Worker:
    def __init__(self, directory: Path, halts: int = -1) -> None:
        """`halts`: the version within whose fetch it stays."""
        words = [sys.executable, str(sharing_worker.__file__), str(directory / "shared"), str(halts)]
        self.process = Program(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, update: WeightUpdate) -> None:
        assert self.process.stdin
        self.process.stdin.write(msgspec.json.encode(update).decode() + "\n")
        self.process.stdin.flush()

    def heard(self) -> str:
        assert self.process.stdout
        return str(self.process.stdout.readline()).strip()

    def loaded(self, version: int) -> int:
        """Checks the weights that it has loaded, and returns the bytes that it has fetched for it."""
        nbytes, total = self.heard().split()
        assert float(total) == sum(tensor.bfloat16().double().sum().item() for tensor in weights(version).values())
        return int(nbytes)


@pytest.mark.parametrize("version", [0, 2])
def test_a_worker_that_is_killed_while_it_fetches_is_replaced_by_the_next(version: int, tmp_path: Path) -> None:
    """Version 0: it has made the memory. Version 2: it writes into the slot of a version that all have had."""
    trainer = Trainer()
    killed, *others = (Worker(tmp_path, version), Worker(tmp_path), Worker(tmp_path))
    try:
        for earlier in range(version):
            update = trainer.send(earlier)
            for worker in (killed, *others):
                worker.tell(update)
            assert sum(worker.loaded(earlier) for worker in (killed, *others)) == NBYTES
        update = trainer.send(version)
        killed.tell(update)
        assert killed.heard() == "fetches"
        for worker in others:
            worker.tell(update)
        killed.process.send_signal(signal.SIGKILL)
        assert sum(worker.loaded(version) for worker in others) == NBYTES
    finally:
        for worker in (killed, *others):
            worker.process.kill()
            worker.process.communicate()


@settings(max_examples=20)
@given(order=st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=12))
def test_whoever_comes_when_has_the_weights_that_were_published(
    order: list[tuple[int, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each step: a worker is told of the newest version, after another one was published or not."""
    trainer, some, version = Trainer(delta=True), workers(tmp_path_factory.mktemp("any"), 3), 0
    update, reads = trainer.send(0), dict[int, tuple[int, dict[str, torch.Tensor]]]()
    for number, further in order:
        if further:
            version += 1
            update = trainer.send(version)
        reads[number] = version, dict(some[number].receive(update))
        for earlier, found in reads.values():
            assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in weights(earlier).items())
    for worker in some:
        worker.close()
