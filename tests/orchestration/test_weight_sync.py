"""Shared memory: both ends of the wire in one test (C3)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from headrace.errors import IdentityError
from headrace.weight_sync.memory import anonymous_memory
from headrace.weight_sync.shared_memory import SharedMemoryReceiver, SharedMemorySender, fingerprint, lay_out
from headrace.weights import Manifest

Ends = tuple[SharedMemorySender, SharedMemoryReceiver, Manifest, int]


def _parameters(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (100, 16), "q": (16, 16), "k": (8, 16), "v": (8, 16), "norm": (7,)}
    return [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]


@pytest.fixture
def ends() -> Iterator[Ends]:
    fd = anonymous_memory()
    manifest = lay_out(_parameters(0), torch.bfloat16)
    yield SharedMemorySender(fd, {"": manifest}), SharedMemoryReceiver(fd, {"": manifest}), manifest, fd
    os.close(fd)


def test_what_is_received_is_what_was_sent_in_the_serving_dtype(ends: Ends) -> None:
    sender, receiver, _, _ = ends
    for version in range(4):
        sent = _parameters(version)
        received = receiver.receive(sender.send(version, sent))
        assert list(received) == [name for name, _ in sent]
        for name, tensor in sent:
            assert received[name].dtype == torch.bfloat16
            assert torch.equal(received[name], tensor.bfloat16())


def test_the_version_before_stays_valid_until_the_next_but_one(ends: Ends) -> None:
    sender, receiver, _, _ = ends
    old = receiver.receive(sender.send(0, _parameters(0)))
    sender.send(1, _parameters(1))
    assert torch.equal(old["q"], dict(_parameters(0))["q"].bfloat16())


def test_neighbours_in_canonical_order_are_neighbours_in_memory(ends: Ends) -> None:
    sender, receiver, _, _ = ends
    views = receiver.receive(sender.send(0, _parameters(0)))
    q, k = views["q"], views["k"]
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    assert q.data_ptr() + q.numel() * 2 == k.data_ptr()


@pytest.mark.parametrize("byte", [0, 17, 3000, -1])
def test_one_flipped_bit_is_refused(ends: Ends, byte: int) -> None:
    sender, receiver, manifest, fd = ends
    update = sender.send(1, _parameters(1))
    last = manifest.tensors[-1]
    position = manifest.slot_nbytes + (byte if byte >= 0 else last.offset + last.nbytes - 1)
    (value,) = os.pread(fd, 1, position)
    os.pwrite(fd, bytes([value ^ 1]), position)
    with pytest.raises(IdentityError, match="version 1"):
        receiver.receive(update)


def test_an_update_that_never_arrived_is_refused(ends: Ends) -> None:
    """The fault that went unnoticed elsewhere for months: the engine goes on with the weights it had."""
    sender, receiver, manifest, fd = ends
    sender.send(0, _parameters(0))
    update = sender.send(2, _parameters(2))
    zeros = lay_out(_parameters(0), torch.bfloat16)
    old = fingerprint(zeros, memoryview(bytes(manifest.slot_nbytes)))
    assert old != update.fingerprint
    os.pwrite(fd, bytes(manifest.slot_nbytes), 0)
    with pytest.raises(IdentityError):
        receiver.receive(update)


def test_the_fingerprint_names_order_shape_and_dtype() -> None:
    parameters = _parameters(0)
    raw = memoryview(bytes(1 << 14))
    base = fingerprint(lay_out(parameters, torch.bfloat16), raw)
    assert fingerprint(lay_out(parameters[::-1], torch.bfloat16), raw) != base
    assert fingerprint(lay_out(parameters, torch.float16), raw) != base
    assert fingerprint(lay_out([("other", parameters[0][1]), *parameters[1:]], torch.bfloat16), raw) != base


def test_the_memory_has_no_name() -> None:
    """A killed run leaves nothing in /dev/shm or the temporary directory that a later run could trip over."""
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    fd = anonymous_memory()
    SharedMemorySender(fd, {"": lay_out(_parameters(0), torch.bfloat16)})
    assert (set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()) <= before
    os.close(fd)
