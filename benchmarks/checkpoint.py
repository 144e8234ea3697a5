"""How long a checkpoint stops training: the trainer's copy, against a plain copy of the same bytes, in one process.

    python benchmarks/checkpoint.py                     # a Llama of 135 million parameters, random weights
    python benchmarks/checkpoint.py --layers 8 --rounds 9 --dir /mnt/disk

Each round measures, one after the other: a plain copy of every tensor of the checkpoint into memory that is there, `TorchTrainer.capture`
(the stop), a step alone, a step beside the writing, the rest of the writing, and a checkpoint that is written while nothing else is done, as
before. Medians, by the clock and by the CPU time of the process. Predicted: 12 bytes a parameter at the rate at which one tensor of 256 MiB
is copied.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from headrace.algo.config import AlgoConfig
from headrace.core.batches import Batch, Group, Row
from headrace.core.types import Prompt
from headrace.native.arithmetic import cpu_model
from headrace.trainer.config import TrainConfig
from headrace.trainer.step import checkpoint
from headrace.trainer.step.trainer import TorchTrainer

SMOLLM2 = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
"""SmolLM2-135M, which has 30 layers."""


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds by the clock, and of CPU time."""
    began, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - used


def batch(step: int, tokens: int) -> Batch:
    rows = tuple(
        Row(
            (1, 2, 3),
            tuple(range(10, 10 + tokens)),
            (-1.0,) * tokens,
            (advantage,) * tokens,
            (True,) * tokens,
            (step,) * tokens,
        )
        for advantage in (1.0, -1.0)
    )
    return Batch(step, (Group(0, Prompt("p", "", (1, 2, 3)), (), rows),), 1.0)


def trainer_of(directory: Path, layers: int) -> TorchTrainer:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMOLLM2, num_hidden_layers=layers)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return TorchTrainer(directory, TrainConfig(dtype="float32", device="cpu"), AlgoConfig(), seed=0)


def measured(trainer: TorchTrainer, directory: Path, rounds: int, tokens: int) -> dict[str, list[tuple[float, float]]]:
    trainer.step(batch(0, tokens))  # from here on there are moments
    found = checkpoint.tensors(trainer._contents(""), trainer._learners[""].optimizer)
    there = {name: torch.zeros_like(tensor) for name, tensor in found.items()}
    one, other = torch.zeros(1 << 26), torch.zeros(1 << 26)
    writes: list[Callable[[Path], None]] = []

    def step() -> None:
        trainer.step(batch(trainer.version, tokens))

    def stop() -> None:
        writes.append(trainer.capture()[1])

    seconds = {"the first stop of a process": [timed(stop)]}  # on fresh pages
    for number in range(rounds):
        writing = threading.Thread(target=lambda at: writes[-1](at), args=(directory / f"beside-{number}",))
        works: dict[str, Callable[[], Any]] = {
            "256 MiB, one tensor": lambda: other.copy_(one),
            "a plain copy": lambda: [there[name].copy_(tensor) for name, tensor in found.items()],
            "the stop (capture)": stop,
            "a step alone": step,
            "a step beside the writing": partial(_with, writing, step),
            "the writing, after that step": writing.join,
            "a checkpoint while training stands still": partial(trainer.save, directory / f"still-{number}"),
        }
        names = list(works)
        names[1:3] = names[1:3] if number % 2 else names[2:0:-1]  # neither is always the first
        for name, work in ((name, works[name]) for name in names):
            seconds.setdefault(name, []).append(timed(work))
    return seconds


def _with(writing: threading.Thread, work: Callable[[], None]) -> None:
    writing.start()
    work()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200, help="of each of the two rows of a step")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="on the disk that is written to")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.dir) as scratch:
        trainer = trainer_of(Path(scratch) / "model", given.layers)
        count = sum(tensor.numel() for _, tensor in trainer.parameters())
        seconds = measured(trainer, Path(scratch), given.rounds, given.tokens)
    middle = {
        name: tuple(statistics.median(one[kind] for one in many) for kind in (0, 1)) for name, many in seconds.items()
    }
    rate = (1 << 28) / middle.pop("256 MiB, one tensor")[0]
    print(
        f"{count / 1e6:.0f} million parameters, {12 * count / 1e9:.2f} GB; {cpu_model()}, {torch.get_num_threads()} threads"
    )
    for name, (clock, cpu) in middle.items():
        print(f"{name:42} {clock:7.3f} s   {cpu:7.3f} CPU-s")
    print(f"{'predicted for the stop':42} {12 * count / rate:7.3f} s   (at {rate / 1e9:.1f} GB/s)")
    pairs = zip(seconds["the stop (capture)"], seconds["a plain copy"], strict=True)
    ratios = [(stop[0] / copy[0], stop[1] / copy[1]) for stop, copy in pairs]
    clock, cpu = (statistics.median(ratio[kind] for ratio in ratios) for kind in (0, 1))
    print(
        f"the stop is {clock:.2f} times the plain copy by the clock, {cpu:.2f} by CPU time (predicted: 1.0; allowed: 1.2)"
    )


if __name__ == "__main__":
    main()
