"""Several ranks on one GPU: what each collective library makes of it, and whether FSDP2 over two ranks computes what one rank does.

    python -m benchmarks.device.ranks --rank R --backend B --folder F --model M --device D [--compiled]        one of two ranks, started by the entry

NCCL is expected to refuse two ranks on one GPU (it asks for a GPU each), and headrace refuses them before that, with a sentence. gloo takes them: that
is no way to train, and shows that the code of several ranks on CUDA computes the right numbers. With two GPUs NCCL is tried on both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.device import loads
from benchmarks.device.entry import Entry, Figure, Line
from benchmarks.device.loads import Bench
from benchmarks.device.predictions import trained
from headrace.algo.config import AlgoConfig
from headrace.core.errors import ConfigError
from headrace.trainer.config import TrainConfig
from headrace.trainer.parallel import ParallelConfig
from headrace.trainer.placement.rendezvous import meet
from headrace.trainer.placement.sharded import Sharded
from headrace.trainer.step.trainer import TorchTrainer

RANKS = 2
PATIENCE = 50.0
"""Seconds for two ranks to meet, load and make two steps."""
COMPILING = 110.0
"""The same with layers that are compiled first."""
SHAPE = {"groups": 4, "rollouts": 8, "prompt": 64, "tokens": 192}
HOST_COPY = 10e9
"""Bytes a second at which gloo moves tensors of a GPU: through the host, twice. An assumption."""


def measure(bench: Bench) -> Iterator[Figure]:
    bench.model("135m")
    yield _refused(bench)
    expected = alone(bench)
    yield compared(bench, "gloo, FSDP2 of two: as one rank", "gloo", expected)
    found = _read(bench, "gloo")
    rate = found["tokens"] / found["seconds"] if found else None
    yield Figure("gloo, FSDP2 of two", rate, note="" if found else "it did not run")
    if bench.device == "cpu":
        for name in (
            "NCCL, a group of one",
            "NCCL, two ranks on one GPU are refused",
            "NCCL, FSDP2 of two GPUs: as one rank",
        ):
            yield Figure(name, None, "needs a GPU")
        return
    yield _nccl_alone()
    if torch.cuda.device_count() < RANKS:
        yield _nccl_refuses(bench)
        yield Figure("NCCL, FSDP2 of two GPUs: as one rank", None, "needs two GPUs")
    else:
        yield Figure("NCCL, two ranks on one GPU are refused", None, "there are two GPUs")
        yield compared(bench, "NCCL, FSDP2 of two GPUs: as one rank", "nccl", expected)


def _refused(bench: Bench) -> Figure:
    name = "two ranks and one GPU: a sentence"
    if bench.device == "cpu" or torch.cuda.device_count() >= RANKS:
        return Figure(name, None, "needs one GPU")
    try:
        meet(0, RANKS, str(bench.folder / "never"), torch.device("cuda"))
    except ConfigError as error:
        return Figure(name, "lower train.parallel.shard" in str(error), str(error))
    return Figure(name, False, "it was not refused")


def alone(bench: Bench) -> dict[str, float]:
    """Loss and gradient's norm of one rank's first step."""
    learner = loads.trainer(bench, "135m", dtype="float32", path="torch")
    report = learner.step(loads.batch(bench, 0, **SHAPE))
    del learner
    bench.forget()
    return {"loss": report.loss, "norm": report.grad_norm}


def compared(bench: Bench, name: str, backend: str, expected: dict[str, float], *, compiled: bool = False) -> Figure:
    """Whether two ranks make the first step of one. `compiled`: their layers."""
    codes, words = _two(bench, backend, compiled=compiled)
    found = _read(bench, backend)
    if any(codes) or not found:
        return Figure(name, False, words)
    near = all(abs(found[key] - value) <= 1e-3 * max(abs(value), 1e-3) for key, value in expected.items())
    return Figure(name, near, f"gradient's norm {found['norm']:.6g}, of one rank {expected['norm']:.6g}")


def _two(bench: Bench, backend: str, *, compiled: bool = False) -> tuple[list[int], str]:
    """Starts two ranks. Returns how they ended, and the last words of one that failed."""
    (bench.folder / f"{backend}-place").unlink(missing_ok=True)
    words = [
        "--backend",
        backend,
        "--folder",
        str(bench.folder),
        "--model",
        str(bench.model("135m")),
        "--device",
        bench.device,
    ]
    command = [sys.executable, "-m", "benchmarks.device.ranks", *words, *(["--tiny"] if bench.tiny else [])]
    command += ["--compiled"] if compiled else []
    ends, children = time.monotonic() + (COMPILING if compiled else PATIENCE) * (10 if bench.tiny else 1), []
    for rank in range(RANKS):
        log = (bench.folder / f"{backend}-{rank}.log").open("wb")
        children.append(subprocess.Popen([*command, "--rank", str(rank)], stdout=log, stderr=log))
    try:
        codes = [child.wait(max(0.1, ends - time.monotonic())) for child in children]
    except subprocess.TimeoutExpired:
        codes = [child.poll() or 1 for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    logs = [(bench.folder / f"{backend}-{rank}.log").read_text(errors="replace").strip() for rank in range(RANKS)]
    told = next(
        (log for code, log in zip(codes, logs, strict=True) if code and log), "no answer in time" if any(codes) else ""
    )
    return codes, told[-300:].replace("\n", " ")


def _read(bench: Bench, backend: str) -> dict[str, float]:
    path = bench.folder / f"{backend}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _nccl_alone() -> Figure:
    name = "NCCL, a group of one"
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
        values = torch.ones(1024, device="cuda")
        dist.all_reduce(values)
        return Figure(name, float(values.sum()) == 1024)
    except Exception as error:
        return Figure(name, False, f"{type(error).__name__}: {error}"[:300])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _nccl_refuses(bench: Bench) -> Figure:
    codes, words = _two(bench, "nccl")
    return Figure("NCCL, two ranks on one GPU are refused", all(codes), words or "both ranks finished")


# --- a rank --------------------------------------------------------------------------------------------------------------------


def rank(options: argparse.Namespace) -> None:
    device = (
        torch.device(options.device, options.rank % torch.cuda.device_count())
        if options.device == "cuda"
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(str(options.folder / f"{options.backend}-place"), RANKS)
    backend = "gloo" if options.device == "cpu" else f"cpu:gloo,cuda:{options.backend}"
    dist.init_process_group(
        backend, store=store, rank=options.rank, world_size=RANKS, timeout=timedelta(seconds=PATIENCE * 10)
    )
    bench = Bench(device=options.device, folder=options.folder, tiny=options.tiny)
    parallel = ParallelConfig(shard=RANKS)
    config = TrainConfig(
        **{
            **loads.TRAIN,
            "device": options.device,
            "dtype": "float32",
            "path": "torch",
            "compile": False,
            "parallel": parallel,
        }
    )
    placement = Sharded(parallel, torch.device(options.device))
    learner = TorchTrainer(options.model, config, AlgoConfig(), 0, placement=placement)
    if options.compiled and (reason := loads.compile_layers(bench, learner)):
        raise ConfigError(reason)
    first = learner.step(loads.batch(bench, 0, **SHAPE))
    again = first if options.tiny or options.compiled else learner.step(loads.batch(bench, 1, **SHAPE))
    if options.rank == 0:
        told = {"loss": first.loss, "norm": first.grad_norm, "tokens": again.forward_tokens, "seconds": again.seconds}
        (options.folder / f"{options.backend}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    rank(parser.parse_args())


def _over_gloo(chip: loads.Gpu) -> float:
    """Weights are gathered twice for a microbatch, and gradients summed once, in float32, through the host."""
    tokens = SHAPE["groups"] * (SHAPE["prompt"] + SHAPE["rollouts"] * SHAPE["tokens"])
    moved = 3 * 4 * loads.SHAPES["135m"].parameters / HOST_COPY
    return tokens / (tokens / (RANKS * trained("135m", 256)(chip) / 4) + moved)


ENTRY = Entry(
    name="ranks",
    about="two processes on one GPU; 135m with random weights in float32",
    limit=120,
    lines=(
        Line(name="two ranks and one GPU: a sentence", unit="check", formula="headrace refuses them with its remedy"),
        Line(
            name="gloo, FSDP2 of two: as one rank",
            unit="check",
            formula="loss and gradient's norm within 0.1 % of one rank's",
        ),
        Line(
            name="gloo, FSDP2 of two",
            predicted=_over_gloo,
            formula="tokens / (a quarter of the bfloat16 rate on each, assumed + 12 bytes a parameter at 10 GB/s, assumed)",
        ),
        Line(name="NCCL, a group of one", unit="check", formula="it starts, and a sum is right"),
        Line(name="NCCL, two ranks on one GPU are refused", unit="check", formula="NCCL asks for a GPU each"),
        Line(name="NCCL, FSDP2 of two GPUs: as one rank", unit="check", formula="where there are two"),
    ),
    measure=measure,
)

if __name__ == "__main__":
    main()
