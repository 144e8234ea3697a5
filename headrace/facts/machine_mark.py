"""The mark of a machine: the properties on which the bits of a training step depend, apart from its input.

Two steps with equal marks are expected to be equal bit for bit; with different marks, within rounding (`commands/replay/replay.py`).
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from headrace.native.build import kernels_mark
from headrace.native.resources import usable_cores


def machine_mark(cores: Sequence[int], threads: int = 0) -> dict[str, str]:
    """Returns the mark. `cores` and `threads`: those of the trainer; empty or 0 for all. Imports nothing heavy."""
    mark = {
        "cpu": cpu_model(),
        "threads": str(threads or len(cores) or usable_cores()),  # sums are split over the threads
        "torch": _version("torch"),
        "system": f"{platform.system()} {platform.machine()}",
        "kernels": kernels_mark(),
    }
    gpus = sorted(_model_of(path) for path in Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return mark | ({"gpu": ", ".join(gpus)} if gpus else {})


def cpu_model() -> str:
    """Returns the processor's name as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _model_of(information: Path) -> str:
    lines = information.read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("Model:")), "unknown")
