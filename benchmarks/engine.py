"""How fast does the native engine sample, compared with what a user would use instead?

    python benchmarks/engine.py [--rounds 3] [--only headrace,vllm] [--loads 64,group] [--json figures.json]

Contenders, each a process of its own that loads the same bf16 weights once (see engine_headrace.py and its neighbours):
headrace; vLLM compiled and eager, in the environment that `make bench-setup` builds; transformers' `generate` and its
continuous batching; and the ceiling, which is the model's matrix products alone. All are pinned to the same cores, and
only the one that is timed runs. Rounds are interleaved, every load is warmed up, and prompts are new each time.
Log-probs of the sampled tokens are on.

Tokens per second are sampled tokens over the time from the first request added to the last one finished, prompts
included. Ratios are taken within a round, against the better of the vLLM contenders.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from engine_loads import LOADS, OURS_ALONE, Load, Text, warm_up
from engine_process import Contender, Failed, Measured
from engine_table import tables

from headrace.models.resolve import resolve_model
from headrace.processes.launch.local import environment

HERE = Path(__file__).resolve().parent
BENCH = HERE.parent / ".venv-bench"
KV_GIB = 2
"""GiB of KV cache for vLLM, enough for every load: no request has to wait for it."""
ON_REQUEST = ("headrace-fused",)
"""Contenders that are measured only if they are named in full."""
DISTURBED = 0.1
"""Measurements during which others took more than this share of the cores are marked."""


def contenders(model: Path, cores: set[int], logs: Path) -> list[Contender]:
    ours, theirs = sys.executable, str(BENCH / "bin" / "python")
    threads = {"OMP_NUM_THREADS": str(len(cores))}
    commands = {
        "headrace": ([ours, "engine_headrace.py", str(model), "auto"], environment(sorted(cores))),
        "headrace-fused": ([ours, "engine_headrace.py", str(model), "fused"], environment(sorted(cores))),
        "vllm-compiled": ([theirs, "engine_vllm.py", str(model), "compiled", "bfloat16"], vllm_environment(cores)),
        "vllm-eager": ([theirs, "engine_vllm.py", str(model), "eager", "bfloat16"], vllm_environment(cores)),
        "vllm-float32": ([theirs, "engine_vllm.py", str(model), "compiled", "float32"], vllm_environment(cores)),
        "hf-generate": ([ours, "engine_transformers.py", str(model), "generate"], threads),
        "hf-batching": ([ours, "engine_transformers.py", str(model), "batching"], threads),
        "ceiling": ([ours, "engine_ceiling.py", str(model)], threads),
    }
    return [
        Contender(name, [python, str(HERE / script), *arguments], variables, cores, logs / f"{name}.log")
        for name, ((python, script, *arguments), variables) in commands.items()
    ]


def choose(everybody: list[Contender], only: str) -> list[Contender]:
    """Selects contenders by their full names, or by a common beginning."""
    full = {one.name for one in everybody} & set(only.split(","))
    beginnings = tuple(set(only.split(",")) - full)
    return [
        one for one in everybody if one.name in full or (one.name.startswith(beginnings) and one.name not in ON_REQUEST)
    ]


def vllm_environment(cores: set[int]) -> dict[str, str]:
    """The environment of vLLM: by default it keeps a core free and uses GNU's OpenMP, and both cost it much on a small
    machine."""
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(cores))),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "LD_PRELOAD": str(BENCH / "lib" / "libiomp5.so"),
        "VLLM_CACHE_ROOT": str(BENCH / "cache"),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def measure(running: list[Contender], loads: list[str], rounds: int, text: list[int]) -> Iterator[Measured]:
    for round_number in range(rounds):
        for load_name in loads:
            load = LOADS[load_name](Text(text, seed=2 * round_number))
            before = warm_up(load, LOADS[load_name](Text(text, seed=2 * round_number + 1)).asks)
            turn = round_number % len(running)  # nobody is always the one after the same neighbour
            for contender in running[turn:] + running[:turn]:
                if load_name not in OURS_ALONE or contender.name == "headrace":
                    yield from attempt(contender, before, load, round_number)


def attempt(contender: Contender, before: Load, load: Load, round_number: int) -> list[Measured]:
    """Runs the warm-up, then the load. A load that fails is reported and left out."""
    label = f"round {round_number + 1}  {load.name:9s} {contender.name:14s}"
    try:
        if contender.name != "ceiling":
            contender.run(before, round_number)
        one = contender.run(load, round_number)
    except Failed as failure:
        print(f"{label} FAILED: {failure}", flush=True)
        return []
    disturbed = f"  others took {one.others:.0%} of the cores" if one.others > DISTURBED else ""
    print(f"{label} {one.rate:8.1f} tokens/s  {one.seconds:7.2f} s{disturbed}", flush=True)
    return [one]


def started(stack: ExitStack, chosen: list[Contender]) -> list[Contender]:
    """Starts the contenders one after the other, and returns those that could be started."""
    there = []
    for contender in chosen:
        if contender.name.startswith("vllm") and not BENCH.is_dir():
            print(f"{contender.name}: left out, there is no {BENCH.name}; `make bench-setup` builds it", flush=True)
            continue
        stack.callback(contender.close)
        try:
            contender.start()
        except Failed as failure:
            print(f"{contender.name}: FAILED to start: {failure}", flush=True)
            continue
        print(f"{contender.name}: ready after {contender.start_seconds:.0f} s", flush=True)
        there.append(contender)
    return there


def tokenised(model: Path) -> list[int]:
    """Returns a long English text: the topics of Python's own help."""
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    return tokenizer("\n".join(topics.values()), verbose=False)["input_ids"]


def machine(cores: set[int]) -> dict[str, str]:
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True).stdout
    return {
        "cpu": f"{names[0] if names else platform.machine()}, cores {sorted(cores)}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "commit": commit.strip(),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a directory or a known name")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="contenders, or how the names of several begin, with commas between")
    parser.add_argument("--loads", default="", help=f"of {','.join(LOADS)}")
    parser.add_argument("--cores", default="", help="such as 0,1; all that this process may use if empty")
    parser.add_argument("--json", type=Path, help="where every single measurement is written")
    given = parser.parse_args()
    given.loads = given.loads.split(",") if given.loads else list(LOADS)
    if unknown := [name for name in given.loads if name not in LOADS]:
        parser.error(f"there is no load {unknown[0]}; the loads are {', '.join(LOADS)}")
    return given


def main() -> None:
    given = arguments()
    cores = set(map(int, given.cores.split(","))) if given.cores else os.sched_getaffinity(0)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it must not leave stopped contenders behind
    model = resolve_model(given.model)
    text = tokenised(model)
    logs = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    chosen = choose(contenders(model, cores, logs), given.only)
    measured: list[Measured] = []
    with ExitStack() as stack, suppress(KeyboardInterrupt):  # interrupted, it tells what it has
        for one in measure(started(stack, chosen), given.loads, given.rounds, text):
            measured.append(one)
    about = machine(cores)
    if given.json:
        given.json.write_text(json.dumps({"machine": about, "runs": [asdict(one) for one in measured]}, indent=1))
    print("\n" + ", ".join(f"{key} {value}" for key, value in about.items()) + "\n")
    print("\n".join(tables(measured, {name: LOADS[name](Text(text, 0)).about for name in given.loads})))


if __name__ == "__main__":
    main()
