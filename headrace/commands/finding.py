"""Finds the run that a person names on the command line."""

from __future__ import annotations

import difflib
from pathlib import Path

from headrace.core.errors import ConfigError


def run_directory(run: str) -> Path:
    """Finds a run by its directory, or by its name under `runs/`."""
    for candidate in (Path(run), Path("runs") / run):
        if candidate.is_dir():
            return candidate
    if is_config(run):
        own = Path("runs") / Path(run).stem
        place = str(own) if own.is_dir() else "runs/NAME"
        raise ConfigError(
            f"{run} is a config, but the directory of a run is needed here, such as {place} (headrace train {run} starts a new run)"
        )
    if Path(run).is_file():
        raise ConfigError(f"{run} is a file, but a run is a directory: give its path, or its name under runs/")
    known = [path.name for path in Path("runs").glob("*") if path.is_dir()]
    near = difflib.get_close_matches(Path(run).name, known, n=1)
    hint = f"; did you mean runs/{near[0]}?" if near else ""
    raise ConfigError(f"there is no run {run}: neither that directory nor runs/{run} exists{hint}")


def is_config(source: str) -> bool:
    """Whether it looks like a config rather than a run. JSON and YAML count too; they are refused when they are read."""
    return source.endswith((".toml", ".json", ".yaml", ".yml"))
