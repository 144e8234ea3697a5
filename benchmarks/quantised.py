"""Weights of eight bits in the native engine: decoding against bfloat16 and float32, and what quantising costs beside a cast.

    python benchmarks/quantised.py [--sequences 1,16,64] [--rounds 7] [--threads 2] [--instructions native]

One forward pass of the C++ kernels for each step, of a random model with the shape of SmolLM2-135M and contexts of 96 tokens. The three kinds take turns in each
round; a figure is the least of all rounds, in CPU milliseconds and wall milliseconds a step, because the machine may be busy with other work.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.engine.native.forward_pass import BLOCK, ForwardInput
from headrace.engine.native.kernels import binding
from headrace.engine.native.kernels.runner import INT8_LEVELS, KernelRunner
from headrace.engine.native.runners.skeleton import read

SMOLLM2 = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=2048,
    rope_theta=100_000,
    tie_word_embeddings=True,
)
CONTEXT = 96
KINDS = {
    "float32": (torch.float32, 0),
    "bfloat16": (torch.bfloat16, 0),
    "int8": (torch.bfloat16, INT8_LEVELS),
    "int8 beside float32": (torch.float32, INT8_LEVELS),
}
"""Dtype of activations and cache, and levels of the weights."""


def runner_of(directory: Path, kind: str, instructions: str) -> KernelRunner:
    dtype, levels = KINDS[kind]
    library = binding.library(instructions, str(dtype).removeprefix("torch."))
    cpu = torch.device("cpu")
    return KernelRunner(read(directory, dtype, cpu), 1024, dtype=dtype, device=cpu, library=library, levels=levels)


def step_of(count: int) -> ForwardInput:
    """One token of each of `count` sequences, which have CONTEXT tokens in blocks of their own."""
    width = -(-(CONTEXT + 1) // BLOCK)
    return ForwardInput(
        tokens=np.arange(count, dtype=np.int64) + 5,
        starts=np.arange(count + 1, dtype=np.int32),
        context=np.full(count, CONTEXT, np.int32),
        tables=np.arange(count * width, dtype=np.int32).reshape(count, width),
        rows=np.arange(count, dtype=np.int64),
        adapters=np.full(count, -1, np.int32),
    )


def timed(work: Any, least: float = 0.15) -> tuple[float, float]:
    """(CPU, wall) milliseconds of a call: the mean over as many as take `least` seconds."""
    calls, begun, cpu = 0, time.perf_counter(), time.process_time()
    while calls < 2 or time.perf_counter() - begun < least:
        work()
        calls += 1
    return (time.process_time() - cpu) / calls * 1e3, (time.perf_counter() - begun) / calls * 1e3


def least(works: dict[str, Any], rounds: int) -> dict[str, tuple[float, float]]:
    """The least CPU and wall time of each; they take turns."""
    for work in works.values():
        work()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            found[name].append(timed(work))
    return {name: (min(cpu for cpu, _ in times), min(wall for _, wall in times)) for name, times in found.items()}


def decode(directory: Path, weights: dict[str, torch.Tensor], counts: list[int], given: argparse.Namespace) -> None:
    print("| sequences | kind | CPU ms a step | wall ms a step | bfloat16's time / its time |\n|---|---|---|---|---|")
    runners = {}
    for kind, (dtype, _) in KINDS.items():
        runners[kind] = runner = runner_of(directory, kind, given.instructions)
        runner.allocate(max(counts) * -(-(CONTEXT + 1) // BLOCK))
        runner.use(runner.prepare({name: weight.to(dtype) for name, weight in weights.items()}))
    for count in counts:
        batch = step_of(count)
        times = least({kind: lambda r=runner, b=batch: r.forward(b) for kind, runner in runners.items()}, given.rounds)
        for kind, (cpu, wall) in times.items():
            ratio = f"{times['bfloat16'][0] / cpu:.2f} (CPU), {times['bfloat16'][1] / wall:.2f} (wall)"
            print(f"| {count} | {kind} | {cpu:.1f} | {wall:.1f} | {ratio} |", flush=True)


def publish(directory: Path, weights: dict[str, torch.Tensor], given: argparse.Namespace) -> None:
    """The cost of a version: casts of float32 to bfloat16, which a publish makes, beside what the engine makes of them."""
    flat = torch.zeros(sum(weight.numel() for weight in weights.values()), dtype=torch.bfloat16)  # one behind the other
    parts = flat.split([weight.numel() for weight in weights.values()])
    narrow = {name: part.view(weights[name].shape) for name, part in zip(weights, parts, strict=True)}
    works: dict[str, Any] = {"a cast to bfloat16": lambda: [narrow[name].copy_(weights[name]) for name in weights]}
    for kind in ("bfloat16", "int8"):
        runner = runner_of(directory, kind, given.instructions)
        works[f"packing {kind}"] = lambda r=runner: r.prepare(narrow)
    times = least(works, given.rounds)
    cast = times["a cast to bfloat16"][0]
    print("\n| cost of a version | CPU ms | casts |\n|---|---|---|")
    for name, (cpu, _) in times.items():
        print(f"| {name} | {cpu:.0f} | {cpu / cast:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", default="1,16,64")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--instructions", default="native", help="a kind of processor, as the compiler calls it")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    model = LlamaForCausalLM(SMOLLM2)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    with TemporaryDirectory() as name:
        SMOLLM2.save_pretrained(name)
        print(f"{binding.tier(given.instructions)}, {given.threads} threads\n")
        decode(Path(name), weights, [int(count) for count in given.sequences.split(",")], given)
        publish(Path(name), weights, given)


if __name__ == "__main__":
    main()
