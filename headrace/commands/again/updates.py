"""How far a step moved each trained tensor: numbers that machines with other orders of summation can compare."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

Updates = dict[str, tuple[float, float]]
"""The norm of a tensor's change, and that of the tensor after it, by its name."""
NAMES = ("model.safetensors", "adapter_model.safetensors")


def norms_of_updates(before: Path, after: Path) -> Updates:
    """`before`, `after`: directories of checkpoints, with weights as the trainer keeps them."""
    from safetensors import safe_open

    name = next(name for name in NAMES if (before / name).exists())
    found: Updates = {}
    with safe_open(before / name, "pt") as old, safe_open(after / name, "pt") as new:
        for key in sorted(old.keys()):
            a, b = old.get_tensor(key).double(), new.get_tensor(key).double()
            found[key] = float((b - a).norm()), float(b.norm())
    return found


def apart(
    found: Mapping[str, tuple[float, float]], recorded: Mapping[str, tuple[float, float]], tolerance: float
) -> str:
    """Returns the first tensor that moved otherwise, in words; empty if there is none. `tolerance`: 0 compares bit for bit."""
    for name, (moved, norm) in recorded.items():
        here = found.get(name)
        if here is None:
            return f"{name} is missing"
        for what, now, then in (("moved by", here[0], moved), ("has the norm", here[1], norm)):
            if not (now == then if not tolerance else math.isclose(now, then, rel_tol=tolerance, abs_tol=1e-12)):
                return f"{name} {what} {now:.8g} instead of {then:.8g}"
    return ""
