"""Measures the figures that `auto` chooses by: once per machine and shape of a model, kept in the cache."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from headrace.core.printing import echo
from headrace.durable.atomic_files import replace_file
from headrace.models.resolve import cache_dir
from headrace.native.arithmetic import cpu_model
from headrace.run.auto.candidates import CANDIDATES, Candidate, Figures
from headrace.run.auto.gpu_rates import GpuRates, GpuRequest
from headrace.run.auto.slices import slice_of
from headrace.version import PACKAGE, __version__

# --- Measures how much of this machine's cores other processes leave free at this moment, which is what a new run gets.


SAMPLES, EVERY = 10, 0.05
"""Samples of the scheduler's queue, and seconds between them."""


class Share(NamedTuple):
    cores: float
    """Cores that a run with one thread per core gets."""
    of_each: float
    """Share of a core that one thread gets, 0 to 1."""

    @property
    def words(self) -> str:
        cores = f"{self.cores:.2g} core" + ("" if f"{self.cores:.2g}" == "1" else "s")
        return "" if self.of_each > 0.95 else f"; other processes leave about {cores} free"


def share_of(cores: int, busy: float, stolen: float) -> Share:
    """Computes the share. `busy`: runnable threads of other processes; `stolen`: share of the time that the host gives to other virtual
    machines.

    The scheduler is fair: of N + B threads on N cores each gets N / (N + B)."""
    fair = cores / (cores + busy) if busy > 0 else 1.0
    of_each = max(0.05, fair * (1 - stolen))
    return Share(cores * of_each, of_each)


def measure_share(cores: int, sleep: Callable[[float], None] = time.sleep) -> Share:
    """Measures over half a second. A machine without `/proc/stat` is assumed to be idle."""
    running, before = [], _stolen()
    for _ in range(SAMPLES):
        sleep(EVERY)
        running.append(_runnable())
    total, stolen = (after - earlier for after, earlier in zip(_stolen(), before, strict=True))
    return share_of(cores, sum(running) / len(running), stolen / total if total > 0 else 0.0)


def _runnable() -> float:
    """Returns the number of runnable threads, without the calling one and those of our own children, which are being started."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return 0.0
    running = next((float(line.split()[1]) for line in lines if line.startswith("procs_running")), 1.0)
    return max(0.0, running - 1 - sum(map(_running_threads, _descendants(os.getpid()))))


def _descendants(pid: int) -> list[int]:
    """Returns the processes that this one has started, and theirs."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # gone meanwhile
            found += [child for text in listed.read_text().split() for child in (int(text), *_descendants(int(text)))]
    return found


def _running_threads(pid: int) -> int:
    count = 0
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):
            count += stat.read_text().rpartition(")")[2].split()[0] == "R"
    return count


def _stolen() -> tuple[float, float]:
    """Returns ticks of all cores since boot: the total, and those that the host gave to other virtual machines."""
    try:
        ticks = [float(number) for number in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, IndexError, ValueError):
        return 0.0, 0.0
    return sum(ticks), ticks[7] if len(ticks) > 7 else 0.0


# --- measurer ------------------------------------------------------------


SECONDS = 300
"""Timeout of a measurement. It takes about ten seconds on an idle machine."""
TOO_SMALL = 5_000_000
"""Parameters below which all candidates are equally fast."""
MEASURING = "headrace: measuring which dtype and kernels are fastest for this model here: once, about ten seconds on an idle machine"
MEASURING_THREADS = (
    "headrace: measuring how many threads are fastest on these cores: once, a few seconds on an idle machine"
)
LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "HEADRACE_INSTRUCTIONS", "CXX")
"""Environment variables that change the result."""
MEASURING_GPU = (
    "headrace: measuring which sizes are worth their memory on this GPU: once for this model, a minute or two"
)
GPU_SOURCES = ("engine/native/runners", "trainer/forward")
SOURCES = ("native/src", "engine/native/kernels", "trainer/kernels")


Answer = TypeVar("Answer", Figures, GpuRates)


class Measurer(Protocol):
    def measure(self, config: Mapping[str, Any], threads: Sequence[int]) -> Figures:
        """Returns the figures of the model with this `config.json`. `threads`: the numbers of threads to compare. Never raises:
        `Figures.problem` says why there are none."""

    def measure_gpu(self, request: GpuRequest, card: str) -> GpuRates:
        """Returns the rates of the first GPU, which is called `card`. Never raises: `GpuRates.problem` says why there are none."""


class ProbeMeasurer:
    """Times a piece of the model in a separate process."""

    def measure(self, config: Mapping[str, Any], threads: Sequence[int]) -> Figures:
        piece = slice_of(config)
        if piece is None:
            return Figures(problem="the model's config.json does not say how large its layers are")
        if piece.parameters < TOO_SMALL:
            return Figures(problem="with so small a model all choices are equally fast")
        mark = fingerprint(piece.config)
        figures = self._once(mark, config, CANDIDATES, ())
        engines = {
            candidate.name: candidate
            for candidate in CANDIDATES
            if candidate.part == "engine" and candidate.name in figures.tokens
        }
        if figures.problem or len(threads) < 2 or not engines:
            return figures
        fastest = engines[max(engines, key=figures.tokens.__getitem__)]
        on_these = self._once("-".join([mark, *map(str, threads)]), config, (fastest,), threads)
        return msgspec.structs.replace(figures, threads=on_these.threads, problem=on_these.problem)

    def _once(
        self, name: str, config: Mapping[str, Any], candidates: Sequence[Candidate], threads: Sequence[int]
    ) -> Figures:
        """Returns the kept figures of this name, or measures and keeps them."""
        place = cache_dir() / "measured" / f"{name}.json"
        if (kept := _read(place)) is not None:
            return kept
        echo(MEASURING if len(candidates) > 1 else MEASURING_THREADS, err=True)
        figures = _ask(config, candidates, threads)
        if not figures.problem:
            _keep(place, figures)
        return figures

    def measure_gpu(self, request: GpuRequest, card: str) -> GpuRates:
        piece = slice_of(request.config)
        if piece is None or piece.parameters < TOO_SMALL:
            return GpuRates(problem="with so small a model sizes make no difference")
        asked = msgspec.json.encode(request).decode()
        place = cache_dir() / "measured" / f"{fingerprint({'gpu': card, 'request': asked}, GPU_SOURCES)}.json"
        with suppress(OSError, msgspec.DecodeError):  # no file, or one of another version
            return msgspec.json.decode(place.read_bytes(), type=GpuRates)
        echo(MEASURING_GPU, err=True)
        rates = _answered("headrace.run.auto.gpu_probe", asked.encode(), GpuRates)
        if isinstance(rates, str):
            return GpuRates(problem=rates)
        if not rates.problem:
            _keep(place, rates)
        return rates


def fingerprint(config: Mapping[str, Any], sources: Sequence[str] = SOURCES) -> str:
    """Hashes everything that the figures of one core depend on: processor and instruction sets, versions, kernels, and the shape of the
    model."""
    parts = [
        cpu_model(),
        _instructions(),
        *(f"{name}={os.environ.get(name, '')}" for name in LIMITS),
        platform.machine(),
        __version__,  # of the source, which need not be installed
        *(metadata.version(name) for name in ("torch", "transformers")),
        json.dumps(CANDIDATES),
        json.dumps(config, sort_keys=True, default=str),
    ]
    for folder in sources:
        for path in sorted((PACKAGE / folder).rglob("*")):
            if path.suffix in (".cpp", ".h", ".py"):
                parts.append(path.read_text(encoding="utf-8"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def thread_counts(cores: int) -> tuple[int, ...]:
    """Returns the numbers of threads worth comparing: one per logical core that the process may use, and one per physical core."""
    siblings = set()
    for cpu in sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ():
        try:
            siblings.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            return (cores,)
    return tuple(sorted({min(cores, len(siblings) or cores), cores}))


def _ask(config: Mapping[str, Any], candidates: Sequence[Candidate], threads: Sequence[int]) -> Figures:
    request = {
        "config": dict(config),
        "candidates": [tuple(candidate) for candidate in candidates],
        "threads": list(threads),
    }
    figures = _answered("headrace.run.auto.probe", msgspec.json.encode(request), Figures)
    return Figures(problem=figures) if isinstance(figures, str) else figures


def _answered(module: str, request: bytes, kind: type[Answer]) -> Answer | str:
    """Returns what a process of `module` answers, or why it does not."""
    quiet = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            input=request,
            capture_output=True,
            timeout=SECONDS,
            env={**os.environ, **quiet},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the measurement could not be made: {error}"
    try:
        return msgspec.json.decode(done.stdout, type=kind)
    except msgspec.DecodeError:
        words = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        return f"the measurement failed: {words[-1]}"


def _read(place: Path) -> Figures | None:
    try:
        return msgspec.json.decode(place.read_bytes(), type=Figures)
    except (OSError, msgspec.DecodeError):  # no file, or one of another version
        return None


def _keep(place: Path, figures: Figures | GpuRates) -> None:
    """Writes the figures to the cache. If it cannot be written, the next start measures again."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        replace_file(place, msgspec.json.encode(figures))
    except OSError:
        pass


def _instructions() -> str:
    """Returns the instruction sets of the processor as the system lists them, else its name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
