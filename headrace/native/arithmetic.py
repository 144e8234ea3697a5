"""The bits of a result, and what they depend on: names for forward passes, and the mark of a machine.

Where two forward passes have the same name, equal weights give equal log-probs, to the last bit. Two steps on machines with equal marks are expected
to be equal bit for bit; with different marks, within rounding (`commands/replay/replay.py`).
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from headrace.native.build import kernels_mark
from headrace.native.resources import usable_cores

PROVEN = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "qwen3_moe", "mixtral", "olmoe")
"""The `model_type`s for which `tests/trainer/parity/` compares engine and trainer."""
TIERS = {"bfloat16": ("AMX", "AVX512-BF16"), "float32": ("AMX", "AVX512-BF16", "AVX-512", "AVX2")}
"""The kinds of processor on which engine and trainer round at the same places, by the dtype of the computation. On other kinds the
engine multiplies weights in bfloat16 by activations in float32; float32 was not tried on them."""


def arithmetic(family: str, dtype: str, tier: str) -> str:
    """The name of the arithmetic of the C++ kernels; empty if engine and trainer are not known to agree.

    `tier`: the kind of processor that the kernels were compiled for.
    """
    return f"{family} {dtype} {tier}" if family in PROVEN and tier in TIERS.get(dtype, ()) else ""


def why_unproven(family: str, dtype: str, tier: str) -> str:
    """The reason why `arithmetic` returns no name."""
    if family not in PROVEN:
        return f"the model is of the family {family}, and equal log-probs are proven for {', '.join(PROVEN)}"
    if dtype not in TIERS:
        return f"it computes in {dtype}, and equal log-probs are proven for {', '.join(TIERS)}"
    return f"this processor has {tier}, and equal log-probs in {dtype} are proven for {' and '.join(TIERS[dtype])}"


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
