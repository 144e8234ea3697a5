"""Weights between two processes on one GPU (`weight_sync.kind = "cuda_ipc"`): equal bit for bit, a flipped bit refused, and the milliseconds.

    python -m benchmarks.device.ipc --device cuda [--tiny]        the engine's end, which the entry `demo` starts (cpu: the stand-in)

The trainer's end publishes versions of random weights in turn; the engine's compares fingerprints and all values with those that it makes from the same seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

import msgspec
import torch

from benchmarks.device.loads import Device
from headrace.core.errors import IdentityError
from headrace.core.weights import WeightUpdate
from headrace.weight_sync.cuda_ipc import CudaIpc
from headrace.weight_sync.packed import lay_out
from headrace.weight_sync.slots import Manifests

SHAPES = {"embed": (49_152, 576), **{f"layer.{number}": (30, 576, 209) for number in range(30)}}
"""As many values as SmolLM2-135M has."""
TINY = {"embed": (512, 64), "norm": (3,)}
VERSIONS = 6
"""A bit of the last one is flipped."""


class Exchanged(NamedTuple):
    copied: float
    """Milliseconds of the trainer, as is the next of the engine."""
    verified: float
    refused: bool


def exchange(device: Device, tiny: bool) -> Exchanged:
    """Publishes to a child. Raises AssertionError if a value differs there."""
    sender = CudaIpc(device).sender(_manifests(device, tiny))
    command = [sys.executable, "-m", "benchmarks.device.ipc", "--device", device, *(["--tiny"] if tiny else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin and child.stdout
        assert json.loads(child.stdout.readline()) == "ready"
        copied, verified, heard = list[float](), list[float](), None
        for version in range(VERSIONS):
            began = time.perf_counter()
            finish = sender.copy(version, _weights(version, device, tiny))
            copied.append(time.perf_counter() - began)
            update = finish()
            if version == VERSIONS - 1:
                sender._slots[""][version % 2][0].views["embed"].view(torch.uint8)[7] ^= 1
            child.stdin.write(msgspec.json.encode(update).decode() + "\n")
            child.stdin.flush()
            heard = json.loads(child.stdout.readline())
            if isinstance(heard, float):
                verified.append(heard)
        child.stdin.close()
    assert len(verified) >= VERSIONS - 1, f"a version was refused: {heard}"
    refused = isinstance(heard, str) and f"version {VERSIONS - 1}" in heard
    return Exchanged(1e3 * statistics.median(copied), 1e3 * statistics.median(verified), refused)


def _weights(version: int, device: Device, tiny: bool) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator(device).manual_seed(version)
    shapes = TINY if tiny else SHAPES
    return [(name, torch.randn(shape, generator=generator, device=device)) for name, shape in shapes.items()]


def _manifests(device: Device, tiny: bool) -> Manifests:
    return {"": lay_out(_weights(0, device, tiny), torch.bfloat16)}


def engine(device: Device, tiny: bool) -> None:
    """Answers each update with the seconds that it took, or with the reason why it was refused."""
    receiver = CudaIpc(device).receiver(_manifests(device, tiny))
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
        for name, tensor in _weights(update.version, device, tiny):
            assert views[name].device.type == device and torch.equal(views[name], tensor.bfloat16()), name
        print(json.dumps(seconds), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    engine(options.device, options.tiny)


if __name__ == "__main__":
    main()
