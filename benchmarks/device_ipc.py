"""Weights between two processes on one GPU (`weight_sync.kind = "cuda_ipc"`): checked bit for bit, then timed. Called by device.sh.

    python benchmarks/device_ipc.py --device cuda        (cpu: the stand-in, which checks the script)

The trainer's end is this process, the engine's a child. Versions of random weights in SmolLM2-135M's size are published in turn; the engine compares
fingerprints and all values with those that it makes from the same seed. A version with a flipped bit has to be refused.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Literal

import msgspec
import torch

from headrace.core.errors import IdentityError
from headrace.core.weights import WeightUpdate
from headrace.weight_sync.cuda_ipc import CudaIpc
from headrace.weight_sync.packed import lay_out
from headrace.weight_sync.slots import Manifests

Device = Literal["cpu", "cuda"]
SHAPES = {"embed": (49152, 576), **{f"layer.{i}": (30, 576, 209) for i in range(30)}}
VERSIONS = 6


def weights(version: int, device: Device, small: bool) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator(device).manual_seed(version)
    shapes = {"embed": (512, 64), "norm": (3,)} if small else SHAPES
    return [(name, torch.randn(shape, generator=generator, device=device)) for name, shape in shapes.items()]


def manifests(device: Device, small: bool) -> Manifests:
    return {"": lay_out(weights(0, device, small), torch.bfloat16)}


def engine(device: Device, small: bool) -> None:
    """Answers each update with the seconds that it took, or with the reason why it was refused."""
    receiver = CudaIpc(device).receiver(manifests(device, small))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        update = msgspec.json.decode(line, type=WeightUpdate)
        began = time.perf_counter()
        try:
            views = receiver.receive(update)
        except IdentityError as error:
            print(json.dumps(str(error)), flush=True)
            continue
        seconds = time.perf_counter() - began
        for name, tensor in weights(update.version, device, small):
            assert views[name].device.type == device and torch.equal(views[name], tensor.bfloat16()), name
        print(json.dumps(seconds), flush=True)


def trainer(device: Device, small: bool) -> None:
    sender = CudaIpc(device).sender(manifests(device, small))
    command = [sys.executable, __file__, "--device", device, "--engine"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin and child.stdout
    assert json.loads(child.stdout.readline()) == "ready"
    published, received = [], []
    for version in range(VERSIONS):
        began = time.perf_counter()
        finish = sender.copy(version, weights(version, device, small))
        copied = time.perf_counter() - began
        update = finish()
        if version == VERSIONS - 1:
            sender._slots[""][version % 2][0].views["embed"].view(torch.uint8)[7] ^= 1
        child.stdin.write(msgspec.json.encode(update).decode() + "\n")
        child.stdin.flush()
        heard = json.loads(child.stdout.readline())
        if version == VERSIONS - 1:
            assert isinstance(heard, str) and f"version {version}" in heard, "a flipped bit was not refused"
        else:
            published.append(copied)
            received.append(heard)
    child.stdin.close()
    child.wait()
    print(
        f"weights between two processes, {device}: {update.nbytes / 1e6:.1f} MB, {VERSIONS - 1} versions equal bit for bit, a flipped bit refused; "
        f"copied in {1e3 * statistics.median(published):.2f} ms, verified by the engine in {1e3 * statistics.median(received):.2f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--engine", action="store_true", help="the child")
    options = parser.parse_args()
    (engine if options.engine else trainer)(options.device, small=options.device == "cpu")


if __name__ == "__main__":
    main()
