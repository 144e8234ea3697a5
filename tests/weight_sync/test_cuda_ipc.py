"""Weights by handles of device memory: over the CPU's stand-in, with trainer and engine in processes of their own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import msgspec
import pytest
import torch

from headrace.core.errors import ConfigError, IdentityError
from headrace.core.weights import AdapterSpec, WeightUpdate
from headrace.weight_sync.cuda_ipc import CudaIpc, IpcReceiver, IpcSender
from headrace.weight_sync.packed import lay_out
from headrace.weight_sync.shared_memory import SharedMemory

MANIFESTS = {
    "": lay_out([("w", torch.empty(300, 70)), ("b", torch.empty(3))], torch.bfloat16),
    "north": lay_out([("a", torch.empty(5, 7))], torch.bfloat16),
}
NORTH = AdapterSpec("north", 8, 16.0)


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(version)
    return [("w", torch.randn(300, 70, generator=generator)), ("b", torch.full((3,), float(version)))]


def trainer() -> None:
    """The program of the trainer's process: publishes three versions and an adapter, and then waits."""
    sender = CudaIpc("cpu").sender(MANIFESTS)
    updates = [sender.send(0, weights(0)), sender.send(0, [("a", torch.ones(5, 7))], NORTH)]
    updates += [sender.send(version, weights(version)) for version in (1, 2)]
    print(msgspec.json.encode(updates).decode(), flush=True)
    sys.stdin.readline()


def ends() -> tuple[IpcSender, IpcReceiver]:
    return CudaIpc("cpu").sender(MANIFESTS), CudaIpc("cpu").receiver(MANIFESTS)


@pytest.mark.slow
def test_an_engine_opens_the_memory_of_another_process_and_outlives_it() -> None:
    child = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout
    stale, adapter, older, newest = msgspec.convert(json.loads(child.stdout.readline()), list[WeightUpdate])
    receiver = CudaIpc("cpu").receiver(MANIFESTS)
    for update in (older, newest):
        views = receiver.receive(update)
        assert all(torch.equal(views[name], tensor.bfloat16()) for name, tensor in weights(update.version))
    assert torch.equal(receiver.receive(adapter)["a"], torch.ones(5, 7).bfloat16())
    assert receiver.received == 0
    with pytest.raises(IdentityError, match="version 0"):
        receiver.receive(stale)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert torch.equal(views["b"], torch.full((3,), 2.0).bfloat16()), "what is served stays"
    with pytest.raises(IdentityError, match="the trainer has ended, or uses another GPU"):
        CudaIpc("cpu").receiver(MANIFESTS).receive(newest)


def test_a_handle_is_opened_once_and_no_byte_is_copied() -> None:
    sender, receiver = ends()
    first = receiver.receive(sender.send(0, weights(0)))
    receiver.receive(sender.send(1, weights(1)))
    third = receiver.receive(sender.send(2, weights(2)))
    assert first["w"].data_ptr() == third["w"].data_ptr(), "two slots, mapped once"


def test_the_fingerprint_is_that_of_every_transport() -> None:
    shared = SharedMemory.open()
    sender, _ = ends()
    assert sender.send(1, weights(1)).fingerprint == shared.sender(MANIFESTS).send(1, weights(1)).fingerprint
    shared.close()


def test_one_flipped_bit_is_refused() -> None:
    sender, receiver = ends()
    update = sender.send(1, weights(1))
    buffer, _ = sender._slots[""][1]
    buffer.views["b"].view(torch.uint8)[-1] ^= 1
    with pytest.raises(IdentityError, match="version 1"):
        receiver.receive(update)


def test_memory_that_is_too_small_is_refused() -> None:
    sender, _ = ends()
    large = CudaIpc("cpu").receiver({"": lay_out([("w", torch.empty(3000, 70))], torch.bfloat16)})
    with pytest.raises(IdentityError, match="and this engine's weights"):
        large.receive(sender.send(0, weights(0)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_both_ends_say_so() -> None:
    for end in (CudaIpc.open().sender, CudaIpc.open().receiver):
        with pytest.raises(ConfigError, match="needs trainer and engines on one GPU"):
            end(MANIFESTS)


if __name__ == "__main__":
    trainer()
