"""The cost of a publish: all weights compared with an adapter alone, from the trainer's float32 to tensors that the
engine has verified.

    python benchmarks/lora_publish.py MODEL_DIR --ranks 8 16 64

Both ends of the shared-memory transport run in one process, without a forward pass. Seconds are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from headrace.core.weights import AdapterSpec
from headrace.models.lora import LoraConfig
from headrace.models.resolve import resolve_model
from headrace.trainer.model.adapters import Adapters
from headrace.trainer.model.causal_lm import load_model
from headrace.weight_sync.packed import lay_out
from headrace.weight_sync.shared_memory import SharedMemory


def measure(
    parameters: Iterable[tuple[str, torch.Tensor]], spec: AdapterSpec | None, repeats: int
) -> tuple[int, float, float]:
    """Returns (bytes, seconds to send, seconds to receive)."""
    parameters, memory, name = list(parameters), SharedMemory.open(), spec.name if spec else ""
    manifests = {name: lay_out(parameters, torch.bfloat16)}
    sender, receiver = memory.sender(manifests), memory.receiver(manifests)
    sending, receiving, nbytes = [], [], 0
    for version in range(repeats + 2):
        started = time.perf_counter()
        update = sender.send(version, parameters, spec)
        sent = time.perf_counter()
        receiver.receive(update)
        sending.append(sent - started)
        receiving.append(time.perf_counter() - sent)
        nbytes = update.nbytes
    memory.close()
    return nbytes, statistics.median(sending[2:]), statistics.median(receiving[2:])  # the first two touch new pages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    directory = Path(resolve_model(options.model))
    print("| published | MB | send, ms | verify, ms | of a full sync |\n|---|---:|---:|---:|---:|")
    model = load_model(directory, torch.device("cpu"))
    full = measure(model.named_parameters(), None, options.repeats)
    report("all weights", full, full)
    for rank in options.ranks:
        model, config = load_model(directory, torch.device("cpu")), LoraConfig(rank=rank)
        adapters = Adapters(model, {"a": config}, torch.bfloat16, directory)
        report(f"rank {rank}", measure(adapters.state("a").items(), config.spec("a"), options.repeats), full)


def report(what: str, found: tuple[int, float, float], full: tuple[int, float, float]) -> None:
    nbytes, sending, receiving = found
    share = (sending + receiving) / (full[1] + full[2])
    print(f"| {what} | {nbytes / 1e6:.1f} | {1e3 * sending:.2f} | {1e3 * receiving:.2f} | {100 * share:.1f} % |")


if __name__ == "__main__":
    main()
