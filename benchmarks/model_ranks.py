"""What each rank of a trainer holds of a large model, from loading to publishing, beside its share, in one run.

    python benchmarks/model_ranks.py                                     # every matrix of a Llama of 7B, a quarter as wide and as high: 421 million parameters
    python benchmarks/model_ranks.py --scale 1 --layers 2 --vocab 8000   # layers of the true size, fewer of them

The shape is that of Llama 2 7B (hidden 4096, 32 layers of 32 heads, feed-forward 11008, vocabulary 32000), with random weights. Ranks are processes of this machine
that divide it with FSDP2. They load it, make two steps (the first makes the moments), write a checkpoint, and publish over TCP to an engine, which proves the fingerprint.
Then others resume from the checkpoint and publish the same bytes. The starting process reads each rank's memory every few milliseconds, without pages that
processes share; what it had before loading (Python and torch) is subtracted.

The share of each of n ranks, for P parameters: 4 P / n bytes of weights when they are loaded; 16 P / n with gradients and moments; 12 P / n of copies for a checkpoint, and
4 P / n of two published versions in bfloat16, which stay. Ranks that have resumed have no gradients and no copies yet.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from checkpoint_ranks import batch

from headrace.native.arithmetic import cpu_model

SHAPE = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 11008}
TOKENS = 16
"""Of a row: few, since activations are no part of a share, and bfloat16 is slow on most CPUs."""
SHARES = {"load": 4, "step": 16, "checkpoint": 28, "publish": 32, "resume": 12, "publish again": 16}
"""Bytes of a parameter that ranks hold together in each phase, with what stays of those before."""


def write_model(directory: Path, scale: int, layers: int, vocab: int) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    shape = {name: size // scale for name, size in SHAPE.items()}
    config = transformers.LlamaConfig(**shape, num_hidden_layers=layers, vocab_size=vocab, tie_word_embeddings=False)
    config.dtype = "bfloat16"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory, max_shard_size="500MB")


def rank_process(
    rank: int, ranks: int, scratch: Path, store: Path, gather: str, resumes: bool, pipe: Connection
) -> None:
    """One rank: says each phase before it begins, waits for an answer, and says None at the end."""
    import torch
    import torch.distributed as dist

    from headrace.algo.config import AlgoConfig
    from headrace.trainer.config import TrainConfig
    from headrace.trainer.parallel import ParallelConfig
    from headrace.trainer.placement.rendezvous import meet
    from headrace.trainer.placement.sharded import Sharded
    from headrace.trainer.step.trainer import TorchTrainer
    from headrace.weight_sync.packed import lay_out
    from headrace.weight_sync.ranges import ValueRange, parts_of

    torch.set_num_threads(1)
    meet(rank, ranks, str(store), torch.device("cpu"))

    def begin(phase: str | None, told: Any = None) -> Any:
        dist.barrier()
        pipe.send((phase, told))
        return pipe.recv()

    def exchange(value: Any) -> list[Any]:
        found: list[Any] = [None] * ranks
        dist.all_gather_object(found, value)
        return found

    def values() -> Iterator[ValueRange]:
        return itertools.starmap(ValueRange, trainer.own_values("", rank, ranks))

    transport = begin("resume" if resumes else "load")
    parallel = ParallelConfig(shard=ranks, gather=gather)
    config = TrainConfig(dtype="bfloat16", path="torch", device="cpu", parallel=parallel)
    placement = Sharded(parallel, torch.device("cpu"))
    trainer = TorchTrainer(scratch / "model", config, AlgoConfig(), seed=0, placement=placement, beside=ranks)
    if resumes:
        trainer.restore(scratch / "checkpoint")
    else:
        begin("step")
        trainer.step(batch(0, TOKENS))
        trainer.step(batch(1, TOKENS))
        begin("checkpoint")
        trainer.capture()[1](scratch / "checkpoint")
    begin("publish again" if resumes else "publish")
    manifests = {"": lay_out(trainer.parameters(), torch.bfloat16, trainer.tied, trainer.kept)}
    parts = parts_of(manifests, rank, lambda _: values(), exchange)
    assert parts, "FSDP2 divides into ranges of values"
    sender = transport.part_sender(manifests, [], parts)
    for number in range(2):  # both slots
        update = sender.copy(trainer.version + number, trainer.parameters())()
        begin("publish again" if resumes else "publish", (update, manifests))
    begin(None)


def receive(transport: Any, update: Any, manifests: Any) -> None:
    """The engine, in a process of its own: fetches every rank's part. Raises IdentityError where the fingerprint is another."""
    transport.receiver(manifests).receive(update)


def run(ranks: int, scratch: Path, gather: str, *, resumes: bool) -> tuple[dict[str, list[int]], dict[str, float], str]:
    """Returns by phase what each rank held at most (bytes), the seconds, and the fingerprint that was published."""
    from headrace.weight_sync.tcp import Tcp

    spawn, transport = multiprocessing.get_context("spawn"), Tcp.open()
    store = scratch / f"store-{resumes}"
    pairs = [spawn.Pipe() for _ in range(ranks)]
    processes = [
        spawn.Process(target=rank_process, args=(rank, ranks, scratch, store, gather, resumes, there), daemon=True)
        for rank, (_, there) in enumerate(pairs)
    ]
    for process, (_, there) in zip(processes, pairs, strict=True):
        process.start()
        there.close()
    ends = [here for here, _ in pairs]
    most: dict[str, list[int]] = {}
    seconds: dict[str, float] = {}
    base, phase, told, fingerprint, began = [0] * ranks, None, {}, "", time.perf_counter()
    while True:
        for end in wait(ends, timeout=0.004):
            told[ends.index(end)] = end.recv()
        found = [memory_of(process.pid) - had for process, had in zip(processes, base, strict=True)]
        if phase:
            most[phase] = [max(pair) for pair in zip(found, most.get(phase, found), strict=True)]
        else:
            base = [had + more for had, more in zip(base, found, strict=True)]
        if len(told) < ranks:
            continue
        if phase:
            seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - began
        phase, published = told[0]
        told = {}
        if published:
            engine = spawn.Process(target=receive, args=(transport, *published))
            engine.start()
            engine.join()
            assert not engine.exitcode, "the engine did not get what was published"
            fingerprint = published[0].fingerprint
        for end in ends:
            end.send(transport)
        if phase is None:
            break
        began = time.perf_counter()
    for process in processes:
        process.join()
    return most, seconds, fingerprint


def memory_of(pid: int | None) -> int:
    """Bytes of a process without pages that it shares (proc(5), statm)."""
    resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--scale", type=int, default=4, help="divides width and vocabulary")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--vocab", type=int, help="tokens of the vocabulary (32000 / scale)")
    parser.add_argument("--gather", choices=["float32", "bfloat16"], default="bfloat16")
    given = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        vocab = given.vocab or 32000 // given.scale
        writer = spawn.Process(target=write_model, args=(scratch / "model", given.scale, given.layers, vocab))
        writer.start()
        writer.join()
        parameters = sum(file.stat().st_size for file in (scratch / "model").glob("*.safetensors")) // 2
        most, seconds, first = run(given.ranks, scratch, given.gather, resumes=False)
        again, more, second = run(given.ranks, scratch, given.gather, resumes=True)
        assert first == second, "what has been resumed publishes other bytes"
    print(f"{parameters / 1e6:.0f} million parameters, {given.ranks} ranks, gathered in {given.gather}; {cpu_model()}")
    print(f"{'':16}{'share, MB':>10}{'most of a rank, MB':>20}{'ratio':>8}{'seconds':>9}")
    for phase, held in (most | again).items():
        share = SHARES[phase] * parameters / given.ranks
        print(
            f"{phase:16}{share / 1e6:10.0f}{max(held) / 1e6:20.0f}{max(held) / share:8.2f}{(seconds | more)[phase]:9.1f}"
        )


if __name__ == "__main__":
    main()
