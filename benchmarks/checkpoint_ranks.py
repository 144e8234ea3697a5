"""What a checkpoint of several ranks costs: gathered by rank 0, as it was, against written by each rank, in one run.

    python benchmarks/checkpoint_ranks.py                        # a Llama of 58 million parameters on two ranks (FSDP2, gloo)
    python benchmarks/checkpoint_ranks.py --ranks 4 --layers 24

Prints, for rank 0 and the median of rounds: seconds that training stands still, seconds of the whole, CPU seconds, and the most memory that it takes beside what it had. A resume
builds the optimizer's state anew beside the one that is there: a process that has just started has none.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from headrace.algo.config import AlgoConfig
from headrace.core.batches import Batch, Group, Row
from headrace.core.types import Prompt
from headrace.native.arithmetic import cpu_model
from headrace.native.memory import held, trim
from headrace.trainer.config import TrainConfig
from headrace.trainer.parallel import ParallelConfig
from headrace.trainer.placement.rendezvous import meet
from headrace.trainer.placement.sharded import Sharded
from headrace.trainer.step import checkpoint
from headrace.trainer.step.trainer import TorchTrainer

CPU = torch.device("cpu")
SHAPE = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 2048,
    "vocab_size": 8192,
    "tie_word_embeddings": False,
}


def batch(step: int, tokens: int = 64) -> Batch:
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


def costs(work: Callable[[], float | None]) -> tuple[float, float, float, float]:
    """Seconds until `work` says that training may go on, seconds of all, CPU seconds, and megabytes taken at most. `work` returns the former, or None for all."""
    dist.barrier()
    trim()
    before, seen, over = held(CPU), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            seen.append(held(CPU))

    watching = threading.Thread(target=watch)
    watching.start()
    began, used = time.perf_counter(), time.process_time()
    stopped = work()
    whole, cpu = time.perf_counter() - began, time.process_time() - used
    over.set()
    watching.join()
    return whole if stopped is None else stopped, whole, cpu, (max(seen) - before) / 1e6


def serve(rank: int, ranks: int, store: str, directory: str, rounds: int, results: Any) -> None:
    torch.set_num_threads(1)
    meet(rank, ranks, store, CPU)
    where = Path(directory)
    placement = Sharded(ParallelConfig(shard=ranks), CPU)
    config = TrainConfig(dtype="float32", path="torch", device="cpu")
    trainer = TorchTrainer(where / "model", config, AlgoConfig(), seed=0, placement=placement, beside=ranks)
    trainer.step(batch(0))  # from here on there are moments
    found = checkpoint.tensors(trainer._contents(""), trainer._learners[""].optimizer)

    def gathered() -> float:
        began = time.perf_counter()
        whole = {}
        for name, tensor in found.items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if not rank:
                whole[name] = full.detach().clone()
        stopped = time.perf_counter() - began
        if not rank:
            save_file(whole, where / "gathered.safetensors")
        return stopped

    def parts() -> float:
        began = time.perf_counter()
        write = trainer.capture()[1]
        stopped = time.perf_counter() - began
        write(where / "parts")
        return stopped

    def read_parts() -> None:
        trainer.restore(where / "parts")

    works: dict[str, Callable[[], float | None]] = {
        "gathered by rank 0": gathered,
        "each rank its part (first: fresh memory)": parts,
        "each rank its part": parts,
        "a resume, each rank its part": read_parts,
    }
    told: dict[str, list[tuple[float, float, float, float]]] = {}
    for number in range(rounds):
        for name, work in works.items():
            if "first" in name and number:
                continue
            with torch.no_grad():
                told.setdefault(name, []).append(costs(work))
    if not rank:
        results.put((told, sum(tensor.numel() for _, tensor in trainer._model.named_parameters())))
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        config = transformers.LlamaConfig(**SHAPE, num_hidden_layers=given.layers)
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(Path(scratch) / "model")
        del model
        results = context.Queue()
        ranks = [
            context.Process(target=serve, args=(rank, given.ranks, f"{scratch}/store", scratch, given.rounds, results))
            for rank in range(given.ranks)
        ]
        for process in ranks:
            process.start()
        told, count = results.get()
        for process in ranks:
            process.join()
    print(f"{count / 1e6:.0f} million parameters, {12 * count / 1e6:.0f} MB, {given.ranks} ranks; {cpu_model()}")
    print(f"{'rank 0':42} {'stop, s':>9} {'all, s':>9} {'CPU, s':>9} {'MB more':>9}")
    for name, rounds in told.items():
        middle = [statistics.median(values) for values in zip(*rounds, strict=True)]
        print(f"{name:42} " + " ".join(f"{value:9.3f}" for value in middle[:3]) + f" {middle[3]:9.0f}")


if __name__ == "__main__":
    main()
