"""`python -m headrace.testing.faultsim.cluster.day`: a day of a cluster in virtual time, with failures at realistic rates.

--gpus 1024 --hours 24   the size of the cluster, and of the day
--seeds 0 1              days with other failures
--harsher 1 30           days with so many times as many failures
--bus                    engines belong to rollout hosts, over a bus
--one-gpu                engines of one GPU each, for a model of 7.6B parameters
--beats 5                seconds without a beat after which an engine counts as lost, as in real runs
--say                    prints the warnings of the run too
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from headrace.core.errors import HeadraceError
from headrace.core.printing import echo
from headrace.facts.facts import Accounting
from headrace.loop.world.virtual_time import VirtualTimeLoop
from headrace.testing.faultsim.cluster.bus_life import BusLives
from headrace.testing.faultsim.cluster.day_checks import DayChecks
from headrace.testing.faultsim.cluster.day_report import DayReport, report_of
from headrace.testing.faultsim.cluster.fleet_life import FleetLife
from headrace.testing.faultsim.cluster.machines import Machines
from headrace.testing.faultsim.cluster.mishaps import Mishap, mishaps_of
from headrace.testing.faultsim.cluster.sizing import ClusterSize
from headrace.testing.faultsim.faults import Killed, forget


def run_day(size: ClusterSize, hours: float, seed: int, harsher: float, *, bus: bool = False) -> DayReport:
    """Simulates a day. `harsher`: the factor on all rates of failure; 0 for a day without. `bus`: whether engines belong to rollout hosts.
    Raises AssertionError where a contract does not hold."""
    began, until = time.process_time(), hours * 3600
    mishaps = mishaps_of(size, until, seed, harsher) if harsher else []
    checks = DayChecks(size, seed)
    with _own_directory() as directory:
        live = _over_a_bus if bus else _over_a_fleet
        lived = live(_Setting(size, checks, directory / "run", seed, until), mishaps)
        checks.finish(lived.books)
    return report_of(
        checks,
        size=size,
        bus=bus,
        seconds=until,
        seed=seed,
        harsher=harsher,
        mishaps=tuple(mishaps),
        lives=len(lived.ends) + 1,
        ends=tuple(lived.ends),
        down=lived.down,
        books=lived.books,
        cpu=time.process_time() - began,
    )


class _Setting(NamedTuple):
    size: ClusterSize
    checks: DayChecks
    directory: Path
    seed: int
    until: float


class _Lived(NamedTuple):
    """The end of a day: the books, and what became of the processes of the controller."""

    books: Accounting
    ends: list[str]
    """The reasons for which they ended before the day did."""
    down: float
    """Seconds without a run."""


def _over_a_fleet(day: _Setting, mishaps: Sequence[Mishap]) -> _Lived:
    machines, ends = Machines(day.size), list[str]()
    at, since, down = 0.0, 0.0, 0.0
    while True:
        life = FleetLife(day.size, machines, day.checks, directory=day.directory, seed=day.seed, until=day.until)
        ended, reason = _live(life, at, [mishap for mishap in mishaps if mishap.t >= since])
        day.checks.serve(ended, 0)
        down += min(life.up_at, ended) - at
        if not reason:
            return _Lived(life.books, ends, down)
        ends.append(f"{ended / 3600:.2f} h: {reason}")
        assert len(ends) <= len(mishaps), f"C6: the run does not go on, though nothing goes wrong any more: {ends[-1]}"
        since, at = ended, ended + day.size.restart
        down += day.size.restart


def _live(life: FleetLife, at: float, mishaps: Sequence[Mishap]) -> tuple[float, str]:
    """Runs one process of the controller from the time `at` on. Returns the time of its end, and the reason; empty if the day is over."""
    loop = VirtualTimeLoop()
    loop.jump(at)
    for mishap in mishaps:
        loop.call_at(max(at, mishap.t), life.befall, mishap)
    task = loop.create_task(life.run())
    try:
        loop.run_until_complete(task)
    except Killed:
        return loop.time(), "the controller was killed"
    except HeadraceError as error:
        return loop.time(), str(error).partition(". ")[0]
    finally:
        forget(loop)
    return loop.time(), ""


def _over_a_bus(day: _Setting, mishaps: Sequence[Mishap]) -> _Lived:
    lives = BusLives(day.size, Machines(day.size), day.checks, directory=day.directory, seed=day.seed, until=day.until)
    loop = VirtualTimeLoop()
    try:
        loop.run_until_complete(lives.run(mishaps))
    finally:
        forget(loop)
    day.checks.serve(day.until, 0)
    return _Lived(lives.books, lives.ends, lives.down)


class _own_directory(tempfile.TemporaryDirectory[str]):
    """A directory in which everything of a day lies, also what its processes would leave in that of the system when they are killed."""

    def __enter__(self) -> Path:  # type: ignore[override]
        self._before, tempfile.tempdir = tempfile.tempdir, self.name
        return Path(self.name)

    def __exit__(self, *error: object) -> None:
        tempfile.tempdir = self._before
        super().__exit__(*error)  # type: ignore[arg-type]


def days(
    size: ClusterSize,
    hours: float,
    *,
    seeds: Sequence[int],
    harsher: Sequence[float],
    say: Callable[[str], None],
    bus: bool = False,
    warnings: bool = False,
) -> None:
    """Simulates a day without failures, and then those with them. `warnings`: whether those of the runs are said too."""
    ideal = run_day(size, hours, seeds[0], 0.0, bus=bus)
    say("\n".join([*ideal.lines(None), ""]))
    for factor in harsher:
        for seed in seeds:
            report = run_day(size, hours, seed, factor, bus=bus)
            say("\n".join([*report.lines(ideal), *(report.said if warnings else ()), ""]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1024)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--harsher", type=float, nargs="+", default=[1.0])
    parser.add_argument("--bus", action="store_true")
    parser.add_argument("--one-gpu", action="store_true")
    parser.add_argument("--beats", type=float, default=ClusterSize().beats)
    parser.add_argument("--say", action="store_true")
    options = parser.parse_args()
    size = ClusterSize.of_one_gpu() if options.one_gpu else ClusterSize()
    days(
        replace(size.on(options.gpus), beats=options.beats),
        options.hours,
        seeds=options.seeds,
        harsher=options.harsher,
        say=echo,
        bus=options.bus,
        warnings=options.say,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
