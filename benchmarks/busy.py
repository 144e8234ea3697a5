"""Engine and trainer on a machine that also does other work: how much of the share left to them do they use?

    python benchmarks/busy.py [--trees old=DIR new=DIR] [--work engine16,engine64,trainer16,both] [--loads quiet,loop1,...]

Beside each load the benchmark measures, in turn and `--rounds` times: two threads that only count (four for `both`,
which has four threads), and the engine, the trainer, and both together. The counters' result beside the load, divided
by their result without it, is the share of the machine that is left; `busy_table.py` computes the figures. Rounds are
interleaved, because others may use the machine, too. `--first` gives this session priority over those of other users
(sched_autogroup), so that other work matters little.

`--trees`: checkouts to compare, each with its own `headrace` and, after commas, settings of its environment; the others
are compared with the first.

Loads: quiet; loopN: N processes that never rest; pinnedN: the same, the first on the first core, and so on; takeMS: a
process of real-time priority that has the last core for MS of every 10 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from busy_table import Figures
from trainer_process import machine

HERE = Path(__file__).resolve().parent
LOADS = "quiet,loop1,loop2,pinned1,pinned2,take2,take5,take8,loop4"
WORK = "engine16,engine64,trainer16,both"
BOTH = ("engine16", "trainer16")
CORES = sorted(os.sched_getaffinity(0))
COUNTERS = {"both": 2 * len(CORES)}


class Child:
    def __init__(self, kind: str, number: int = 0, tree: str = str(HERE.parent)) -> None:
        sys.path.insert(0, str(HERE.parent))
        from headrace.processes.launch.local import environment

        where, *settings = tree.split(",")
        variables = {**environment(CORES), "PYTHONPATH": where, **dict(setting.split("=", 1) for setting in settings)}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "busy_child.py"), kind, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=variables,
        )
        assert self._process.stdin and self._process.stdout
        self._in, self._out = self._process.stdin, self._process.stdout
        if kind in ("loop", "take"):
            return
        if self._out.readline() != "ready\n":
            raise SystemExit(f"{kind} {number} of {tree} did not start")

    def ask(self, seconds: float) -> None:
        self._in.write(f"{seconds}\n")
        self._in.flush()

    def rate(self) -> float:
        done, seconds = json.loads(self._out.readline())
        return done / seconds

    def pin(self, core: int) -> None:
        os.sched_setaffinity(self._process.pid, {core})

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def loaded(load: str) -> Iterator[None]:
    name, number = load.rstrip("0123456789"), int(load.lstrip("abcdefghijklmnopqrstuvwxyz") or 0)
    children = []
    if name == "take":
        children = [Child("take", number)]
        children[0].pin(CORES[-1])
    elif name != "quiet":
        children = [Child("loop") for _ in range(number)]
        for i, child in enumerate(children):
            if name == "pinned":
                child.pin(CORES[i % len(CORES)])
    try:
        yield
    finally:
        for child in children:
            child.end()


def rates(children: list[Child], seconds: float) -> list[float]:
    for child in children:
        child.ask(seconds)
    return [child.rate() for child in children]


def beside(first: Child, second: Child, seconds: float) -> list[float]:
    """Runs both for as long as the second takes, whose steps are long."""
    first.ask(float("inf"))
    second.ask(seconds)
    rate = second.rate()
    first.ask(0)
    return [first.rate(), rate]


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.works = options.work.split(",")
        self.trees = dict(pair.split("=", 1) for pair in options.trees) or {"": str(HERE.parent)}
        self.counters = [Child("count") for _ in range(2 * len(CORES))]
        alone = [work for work in self.works if work != "both"]
        needed = {*alone, *(BOTH if "both" in self.works else ())}
        self.children = {
            (tree, work): child_of(work, where) for tree, where in self.trees.items() for work in sorted(needed)
        }
        self.found: dict[tuple[str, str, str], list[tuple[float, float]]] = {}

    def measure(self) -> None:
        loads = self.options.loads.split(",")
        for round_number in range(self.options.rounds):
            for load in random.sample(loads, len(loads)):
                with loaded(load):
                    for work in self.works:
                        self._compare(load, work)
                print(f"round {round_number + 1}: {load}", file=sys.stderr, flush=True)

    def _compare(self, load: str, work: str) -> None:
        """Measures the counters before and after, which stand for the time in between."""
        seconds, counters = self.options.seconds, self.counters[: COUNTERS.get(work, len(CORES))]
        left = sum(rates(counters, seconds / 2))
        for tree in random.sample(list(self.trees), len(self.trees)):
            got = (
                beside(*members, seconds) if len(members := self._members(tree, work)) == 2 else rates(members, seconds)
            )
            after = sum(rates(counters, seconds / 2))
            for part, rate in zip(self._parts(work), got, strict=True):
                self.found.setdefault((load, part, tree), []).append((rate, (left + after) / 2))
            left = after

    def _parts(self, work: str) -> list[str]:
        return [f"{part} of both" for part in BOTH] if work == "both" else [work]

    def _members(self, tree: str, work: str) -> list[Child]:
        return [self.children[tree, part] for part in (BOTH if work == "both" else (work,))]

    def rows(self) -> list[dict[str, object]]:
        return [
            {"load": load, "work": work, "tree": tree, "rates": rates}
            for (load, work, tree), rates in self.found.items()
        ]

    def end(self) -> None:
        for child in (*self.counters, *self.children.values()):
            child.end()


def child_of(work: str, tree: str) -> Child:
    kind, number = work.rstrip("0123456789"), work.lstrip("abcdefghijklmnopqrstuvwxyz")
    return Child(kind, int(number), tree)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs="*", default=[], metavar="NAME=DIR[,VARIABLE=VALUE...]")
    parser.add_argument("--work", default=WORK)
    parser.add_argument("--loads", default=LOADS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="that each measurement takes; a step of the trainer is done whole"
    )
    parser.add_argument("--first", action="store_true", help="before other sessions of this machine")
    parser.add_argument("--to", type=Path, help="a file for the figures (JSON)")
    options = parser.parse_args()
    if options.first:
        with contextlib.suppress(PermissionError):
            os.setsid()  # refused where a shell has made a session for this process already
        Path("/proc/self/autogroup").write_text("-20")
    print(machine())
    bench = Bench(options)
    try:
        bench.measure()
        figures = Figures(bench.rows())
        print(figures.details())
        if "quiet" in figures.loads:
            print(figures.table())
        if options.to:
            options.to.write_text(json.dumps(bench.rows(), indent=1))
    finally:
        bench.end()


if __name__ == "__main__":
    main()
