"""Shared parts of the training benchmarks: children that are processes of their own, and results that outlive an
interrupt.

A child gets one JSON object on its command line, does its work and writes one JSON object to the file given there.
Standard library only, so that children of every environment can import it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_process import Failed, cores_busy

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TRL = ROOT / ".venv-trl" / "bin" / "python"
VLLM = ROOT / ".venv-bench" / "bin" / "python"

Json = dict[str, Any]


@dataclass(frozen=True)
class Child:
    name: str
    script: str
    """A script beside this file."""
    options: Json
    python: str = sys.executable
    environment: Json | None = None
    limit: float = 7200.0
    """Seconds after which the child is ended, with all processes that it started."""

    def run(self, folder: Path) -> Json:
        """Returns its result. Raises Failed with the last line of its log."""
        told, log = folder / f"{self.name}.out.json", folder / f"{self.name}.log"
        told.unlink(missing_ok=True)
        command = [self.python, str(HERE / self.script), json.dumps({**self.options, "to": str(told)})]
        with log.open("w") as said:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env={**os.environ, **(self.environment or {})},
                start_new_session=True,
            )
            try:
                code = process.wait(self.limit)
            except subprocess.TimeoutExpired:
                raise Failed(f"it did not end within {self.limit:.0f} s (its log: {log})") from None
            finally:
                end(process)
        if code or not told.exists():
            lines = log.read_text(errors="replace").strip().splitlines() or ["it wrote nothing"]
            raise Failed(f"exit code {code}: {lines[-1][:300]} (its log: {log})")
        return json.loads(told.read_text())


def end(process: subprocess.Popen[bytes], grace: float = 20.0) -> None:
    """Ends the process and its whole session."""
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, grace)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        if process.poll() is not None and not _members(process.pid):
            break
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue


def _members(session: int) -> bool:
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    return True


def child_main(work: Callable[[Json], Json]) -> None:
    """The child's end."""
    options = json.loads(sys.argv[1])
    found = work(options)
    Path(options["to"]).write_text(json.dumps(found))


class Stopwatch:
    """Measures the wall clock of a piece of work, its peak of memory, and the share of the cores that others took
    meanwhile."""

    def __init__(self) -> None:
        self.cores = os.sched_getaffinity(0)
        self.before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
        self._busy, self._own, self._at = cores_busy(self.cores), _own_seconds(), time.perf_counter()

    def read(self) -> Json:
        seconds = time.perf_counter() - self._at
        busy, own = cores_busy(self.cores) - self._busy, _own_seconds() - self._own
        return {
            "seconds": seconds,
            "cpu_seconds": own,
            "peak_gib": resident("VmHWM"),
            "before_gib": self.before,
            "others": max(0.0, busy - own) / (seconds * len(self.cores)),
        }


def _own_seconds() -> float:
    """Returns CPU seconds with all children, except those still running."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def resident(name: str) -> float:
    """Returns GiB of this process: `VmRSS` now, `VmHWM` at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(name)) / 2**20


class Results:
    """A JSON file of results by name: an interrupted benchmark continues where it stopped."""

    def __init__(self, path: Path, again: bool = False) -> None:
        """`again`: requested results are measured again, once; others stay."""
        self._path, self._again = path, again
        path.parent.mkdir(parents=True, exist_ok=True)
        self.found: dict[str, Json] = json.loads(path.read_text()) if path.exists() else {}
        self._anew: set[str] = set()

    def measure(self, name: str, work: Callable[[], Json]) -> Json | None:
        """Returns the known result, else that of `work`; None if it fails, which is reported."""
        if name in self.found and (not self._again or name in self._anew):
            print(f"{name}: known from before", flush=True)
            return self.found[name]
        started = time.perf_counter()
        print(f"{name} ...", flush=True)
        try:
            found = work()
        except Failed as failure:
            print(f"{name}: FAILED: {failure}", flush=True)
            return None
        print(f"{name}: done in {time.perf_counter() - started:.0f} s", flush=True)
        self.found[name] = found
        self._anew.add(name)
        self._path.write_text(json.dumps(self.found, indent=1))
        return found


def machine() -> str:
    cpu = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True).stdout
    return f"{cpu[0] if cpu else 'CPU'}, {len(os.sched_getaffinity(0))} cores, commit {commit.strip()}"
