"""What do the cores do while the trainer waits for a batch?

    python benchmarks/idle_cores.py recipes/demo/demo.toml [--minutes 4] [--set SETTING=VALUE ...]

Runs a recipe and reads the CPU time of its processes fifty times a second. Its metrics say when the trainer waited for scored groups, and
when it worked. Printed for both: how many cores the engine, the trainer, and all other processes of the run had on average, and how many the
whole machine used; in the first and in the second half of the run, because a policy that gets better drops more groups without contrast, and
its trainer waits longer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from collections import defaultdict
from pathlib import Path

from colocation import HERE, WORKER, cpu_seconds

OF = ("engine", "trainer", "others", "machine")
Sample = tuple[float, dict[str, float]]
"""Seconds of the clock, and CPU seconds so far."""


def family(root: int) -> dict[int, str]:
    """The processes below `root` and itself, each as `engine`, `trainer` or `others`."""
    parents, words = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            words[int(entry.name)] = (entry / "cmdline").read_bytes().split(b"\0")
        except (OSError, IndexError, ValueError):
            continue
    found, open_ = {root: "others"}, [root]
    while open_:
        parent = open_.pop()
        for pid in [one for one, of in parents.items() if of == parent and one not in found]:
            worker = WORKER in words[pid] and words[pid][words[pid].index(WORKER) + 1].decode()
            found[pid] = worker if worker in OF else found[parent] if found[parent] != "others" else "others"
            open_.append(pid)
    return found


def machine_seconds() -> float:
    """CPU seconds of all cores so far that were neither idle nor waited for a disk, nor were taken by the host."""
    ticks = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:]))
    return (sum(ticks[:8]) - ticks[3] - ticks[4] - ticks[7]) / os.sysconf("SC_CLK_TCK")


class Watch(threading.Thread):
    def __init__(self, root: int, metrics: Path) -> None:
        super().__init__(daemon=True)
        self._root, self._metrics = root, metrics
        self.over = threading.Event()
        self.samples: list[Sample] = []
        self.offset = float("inf")
        """The clock when the run's own was at 0: the least that any line, read as it was written, allows."""
        self._read, self._most = 0, dict[int, tuple[str, float]]()

    def run(self) -> None:
        due = 0.0
        while not self.over.wait(0.02):
            now = time.monotonic()
            if now >= due:  # who is there changes seldom
                due = now + 0.5
                self._family = family(self._root)
            for pid, who in self._family.items():
                self._most[pid] = who, max(self._most.get(pid, (who, 0.0))[1], cpu_seconds(pid))
            spent = defaultdict(float, machine=machine_seconds())
            for who, seconds in self._most.values():
                spent[who] += seconds
            self.samples.append((now, dict(spent)))
            self._follow()

    def _follow(self) -> None:
        if not self._metrics.exists():
            return
        with self._metrics.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        now = time.monotonic()
        for line in whole.splitlines():
            self.offset = min(self.offset, now - json.loads(line)["t"])


def between(samples: list[Sample], begin: float, end: float) -> dict[str, float]:
    """CPU seconds in an interval, by linear interpolation."""
    at = [spent_at(samples, one) for one in (begin, end)]
    return {who: at[1].get(who, 0.0) - at[0].get(who, 0.0) for who in OF}


def spent_at(samples: list[Sample], t: float) -> dict[str, float]:
    after = min(max(1, bisect_right([sample[0] for sample in samples], t)), len(samples) - 1)
    (t0, old), (t1, new) = samples[after - 1], samples[after]
    share = min(1.0, max(0.0, (t - t0) / (t1 - t0)))
    return {who: old.get(who, 0.0) + share * (new.get(who, 0.0) - old.get(who, 0.0)) for who in OF}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    out = Path(tempfile.mkdtemp(prefix="idle-cores-"))
    given = [f"out={out}", "name=run", "observe.terminal=off", "eval.prompts=0", "checkpoint.every=0"]
    given += [f"train.minutes={options.minutes:g}", *options.set]
    command = [sys.executable, "-m", "headrace", "train", options.recipe]
    command += [word for one in given for word in ("--set", one)]
    try:
        child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(HERE.parent)}, stdout=subprocess.DEVNULL)
        watch = Watch(child.pid, metrics := out / "run" / "metrics.jsonl")
        watch.start()
        if child.wait():
            raise SystemExit(f"the run ended with {child.returncode}")
        watch.over.set()
        watch.join()
        print_table(watch, [json.loads(line) for line in metrics.read_text().splitlines()])
    finally:
        shutil.rmtree(out, ignore_errors=True)


def print_table(watch: Watch, facts: list[dict]) -> None:
    steps = [fact for fact in facts if fact["fact"] == "StepTrained"]
    begin, end = steps[1]["t"], steps[-1]["t"]
    halves = (begin, (begin + end) / 2, end)
    waits = [fact for fact in facts if fact["fact"] == "Waited"]
    kinds = {
        "waits for groups": [wait for wait in waits if wait["owner"] == "trainer" and "scored groups" in wait["what"]],
        "works": [wait for wait in waits if wait["owner"] == "controller"],
    }
    print(f"{len(steps)} steps, {len(os.sched_getaffinity(0))} cores\n")
    print(
        "| | share of the time | engine, cores | trainer | others of the run | whole machine |\n|---|---:|---:|---:|---:|---:|"
    )
    for which, (since, until) in zip(("first half", "second half"), itertools.pairwise(halves), strict=True):
        for kind, of in kinds.items():
            total, seconds = defaultdict(float), 0.0
            for one in of:
                start, stop = max(since, one["t"] - one["seconds"]), min(until, one["t"])
                if stop > start:
                    seconds += stop - start
                    for who, spent in between(watch.samples, watch.offset + start, watch.offset + stop).items():
                        total[who] += spent
            cells = " | ".join(f"{total[who] / max(seconds, 1e-9):.2f}" for who in OF)
            print(f"| {which}, the trainer {kind} | {seconds / (until - since):.0%} | {cells} |")


if __name__ == "__main__":
    main()
