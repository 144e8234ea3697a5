"""Engine and trainer at once or in turns (`orchestration.placement`): memory, seconds a step, tokens a second.

    python benchmarks/colocation.py recipes/demo/demo.toml --steps 8 --rounds 2 [--arms apart,host,drop,pinned,lent] [--set SETTING=VALUE ...]

Arms: `apart` (the default: both share all cores), `host` and `drop` (in turns, with the KV cache kept or dropped), `pinned` (half of the
cores each), `lent` (the same, but the engine has all cores while the trainer waits for a batch: its threads are moved from outside as
soon as the metrics show that a step is over, or that a batch is ready).

Arms are taken in turn in each round. Every run is a process of its own; its workers' resident memory is read twenty times a second, and
their CPU time at the end. The first two steps are not counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
CORES = sorted(os.sched_getaffinity(0))
HALF = max(1, len(CORES) // 2)
SPLIT = [f"engine.cores={CORES[:HALF]}", f"train.cores={CORES[HALF:]}"]
ARMS = {
    "apart": [],
    "host": ["orchestration.placement=shared"],
    "drop": ["orchestration.placement=shared", "orchestration.kv=drop"],
    "pinned": SPLIT,
    "lent": [*SPLIT, f"engine.threads={len(CORES)}"],
}
SKIPPED = 2
WORKER = b"headrace.run.worker.worker"


class Arm(NamedTuple):
    """The figures of one run. Bytes are resident memory that no other process shares; published weights are counted once."""

    step: float
    """Median seconds from one step to the next."""
    tokens: float
    """Trained tokens a second over the counted steps."""
    training: float
    """Median seconds of a step's own work."""
    both: float
    engine: float
    trainer: float
    change: float
    """Seconds of sleep and wake a step."""
    cpu: float
    """Seconds of CPU time of both workers a step, loading included."""


def workers(controller: int) -> dict[str, int]:
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError, ValueError):
            continue
        if parent == controller and WORKER in words:
            found[words[words.index(WORKER) + 1].decode()] = int(entry.name)
    return found


def resident(pid: int) -> tuple[int, int]:
    """(private, shared with the other worker) bytes."""
    try:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return tuple(int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))  # type: ignore[return-value]
    except (OSError, KeyError):
        return 0, 0


def cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Watch(threading.Thread):
    """Reads the memory of a run's workers, and lends cores if asked to."""

    def __init__(self, controller: int, metrics: Path, lends: bool) -> None:
        super().__init__(daemon=True)
        self._controller, self._metrics, self._lends = controller, metrics, lends
        self.most = {"both": 0, "engine": 0, "trainer": 0}
        self.cpu: dict[str, float] = {}
        self.over = threading.Event()
        self._read, self._lent = 0, False

    def run(self) -> None:
        due = 0.0
        while not self.over.wait(0.005 if self._lends else 0.05):
            if self._lends:
                self._lend()
            if time.monotonic() >= due:
                due = time.monotonic() + 0.05
                self._look()

    def _look(self) -> None:
        sizes = {who: resident(pid) for who, pid in workers(self._controller).items()}
        for who, (private, _) in sizes.items():
            self.most[who] = max(self.most.get(who, 0), private)
        if len(sizes) == 2:
            both = sum(private for private, _ in sizes.values()) + max(shared for _, shared in sizes.values())
            self.most["both"] = max(self.most["both"], both)
        for who, pid in workers(self._controller).items():
            self.cpu[who] = max(self.cpu.get(who, 0.0), cpu_seconds(pid))

    def _lend(self) -> None:
        """The trainer's cores go to the engine after a step, and back when the wait for the next batch is over."""
        if not self._metrics.exists():
            return
        with self._metrics.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        self._read += len(new)
        for line in new.splitlines():
            if b'"fact":"StepTrained"' in line:
                self._move(CORES)
            elif b'"fact":"Waited"' in line and b'"owner":"trainer"' in line and b"scored groups" in line:
                self._move(CORES[:HALF])

    def _move(self, cores: Iterable[int]) -> None:
        if pid := workers(self._controller).get("engine"):
            for task in Path(f"/proc/{pid}/task").iterdir():
                try:
                    os.sched_setaffinity(int(task.name), cores)
                except OSError:
                    continue  # it has ended


def facts(metrics: Path, kind: str) -> list[dict[str, Any]]:
    return [one for one in map(json.loads, metrics.read_text().splitlines()) if one["fact"] == kind]


def measure(name: str, recipe: str, sets: list[str]) -> Arm:
    out = Path(tempfile.mkdtemp(prefix="colocation-"))
    try:
        given = [f"out={out}", "name=run", "observe.terminal=off", *sets, *ARMS[name]]
        flags = [word for one in given for word in ("--set", one)]
        command = [sys.executable, "-m", "headrace", "train", recipe, *flags]
        child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(HERE.parent)}, stdout=subprocess.DEVNULL)
        watch = Watch(child.pid, out / "run" / "metrics.jsonl", name == "lent")
        watch.start()
        if child.wait():
            raise SystemExit(f"the run of {name} ended with {child.returncode}")
        watch.over.set()
        watch.join()
        metrics = out / "run" / "metrics.jsonl"
        steps = facts(metrics, "StepTrained")
        ends, counted = [step["t"] for step in steps[SKIPPED:]], steps[SKIPPED + 1 :]
        changes = sum(fact["report"]["seconds"] for kind in ("Slept", "Woke") for fact in facts(metrics, kind))
        return Arm(
            step=statistics.median(after - before for before, after in itertools.pairwise(ends)),
            tokens=sum(one["report"]["loss_tokens"] for one in counted) / (ends[-1] - ends[0]),
            training=statistics.median(one["report"]["seconds"] for one in counted),
            both=watch.most["both"] / 2**30,
            engine=watch.most["engine"] / 2**30,
            trainer=watch.most["trainer"] / 2**30,
            change=changes / len(steps),
            cpu=sum(watch.cpu.values()) / len(steps),
        )
    finally:
        shutil.rmtree(out, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--arms", default="apart,host,drop")
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    fixed = [
        f"train.steps={options.steps}",
        "train.minutes=0",
        "eval.prompts=0",
        "checkpoint.every=0",
        "train.warmup_steps=0",
    ]
    names = options.arms.split(",")
    found: dict[str, list[Arm]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in names:
            found[name].append(measure(name, options.recipe, [*fixed, *options.set]))
            print(f"round {number + 1}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    first = statistics.median(one.step for one in found[names[0]])
    print(
        "| arm | s a step | of the first | tokens/s | training, s | sleep and wake, s | CPU s a step | GiB, both | engine | trainer |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name, runs in found.items():
        one = Arm(*(statistics.median(column) for column in zip(*runs, strict=True)))
        print(
            f"| {name} | {one.step:.2f} | {one.step / first:.2f} | {one.tokens:.0f} | {one.training:.2f} | {one.change:.2f} | {one.cpu:.1f} "
            f"| {one.both:.2f} | {one.engine:.2f} | {one.trainer:.2f} |"
        )


if __name__ == "__main__":
    main()
