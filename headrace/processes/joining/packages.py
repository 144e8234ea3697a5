"""The packages that decide what an engine computes, and whether two machines have the same."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

NAMES = ("torch", "transformers")


def own_packages() -> dict[str, str]:
    """Returns the versions of this environment, by name; empty for a package that is not installed."""
    return {name: _version(name) for name in NAMES}


def differing(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Returns which packages differ, in words; empty if none does. `+cpu` and `+cu130` are builds of one version for different devices."""
    return ", ".join(
        f"{name} {theirs.get(name) or 'none'} (the run has {version})"
        for name, version in ours.items()
        if theirs.get(name, "").partition("+")[0] != version.partition("+")[0]
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
