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
from headrace.weight_sync.cuda_ipc import CudaIpc, IpcReceiver, IpcSender, UnpreparedIpcReceiver
from headrace.weight_sync.device_memory import CudaMemory, PageMemory
from headrace.weight_sync.in_vllm.receiving import Receiving
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


def test_a_server_that_was_started_before_the_run_finds_the_layout_in_the_same_memory() -> None:
    sender, receiver = CudaIpc("cpu").sender(MANIFESTS), Receiving("cpu")
    for version in range(3):
        update = sender.send(version, weights(version))
        shown = msgspec.structs.replace(update, where={**update.where, **CudaIpc("cpu").access})
        views = receiver.of(shown).receive(shown)
        assert all(torch.equal(views[name], tensor.bfloat16()) for name, tensor in weights(version))
    adapter = sender.send(0, [("a", torch.ones(5, 7))], NORTH)
    opened = UnpreparedIpcReceiver(PageMemory())
    assert torch.equal(opened.receive(adapter)["a"], torch.ones(5, 7).bfloat16())
    assert opened.manifest("north") == MANIFESTS["north"]
    again = CudaIpc("cpu").sender(MANIFESTS).send(7, weights(7))
    assert torch.equal(opened.receive(again)["b"], torch.full((3,), 7.0).bfloat16()), "another trainer's memory"
    torn = again.where["layout"]
    with pytest.raises(IdentityError, match="the layout of version 8 cannot be read"):
        handle = {"handle": torn, "layout": again.where["handle"]}
        opened.receive(msgspec.structs.replace(again, version=8, where=handle))


def test_memory_of_another_gpu_is_refused_with_a_remedy() -> None:
    """Whichever numbers two processes give to the GPUs that they see."""
    memory = CudaMemory(0, name_of=["GPU-b", "GPU-a"].__getitem__)
    update = CudaIpc("cpu").sender(MANIFESTS).send(0, weights(0))
    there = msgspec.structs.replace(update, where={"handle": ["GPU-a", 1], "layout": ["GPU-a", 2]})
    for receiver in (IpcReceiver(memory, MANIFESTS), UnpreparedIpcReceiver(memory)):
        with pytest.raises(IdentityError, match="it is on the GPU GPU-a, .* on GPU-b.*leave weight_sync.kind out"):
            receiver.receive(there)


def test_memory_of_another_kind_of_device_is_refused() -> None:
    update = CudaIpc("cpu").sender(MANIFESTS).send(0, weights(0))
    there = msgspec.structs.replace(update, where={**update.where, "memory": "cuda"})
    with pytest.raises(IdentityError, match="in memory of a device cuda, and vLLM computes on cpu; leave"):
        Receiving("cpu").of(there)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_both_ends_say_so() -> None:
    for end in (CudaIpc.open().sender, CudaIpc.open().receiver):
        with pytest.raises(ConfigError, match="needs trainer and engines on one GPU"):
            end(MANIFESTS)


if __name__ == "__main__":
    trainer()
