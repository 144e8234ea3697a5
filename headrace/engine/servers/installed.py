"""The packages of servers, which may be in an interpreter of their own."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.engine.remote.server_kind import Startable, server_kind
from headrace.settings.extras import Found, interpreter, look_into
from headrace.version import PACKAGE, __version__

SETTING = "engine.python"

PLUGINS = "vllm.general_plugins"
"""The group of entry points with which headrace teaches vLLM to fetch weights over HTTP, and to open them (`pyproject.toml`)."""


def look(kind: str, python: str) -> Found:
    """Raises ConfigError if the interpreter does not answer, or if a run starts no server of that kind."""
    return look_into(python, _starts(kind).modules, SETTING)


def _starts(kind: str) -> Startable:
    starts = server_kind(kind).starts
    if starts is None:
        raise ConfigError(f'a run starts no server of engine.kind = "{kind}"; name one that is running in engine.urls')
    return starts


def places(named: Sequence[str]) -> list[str]:
    """Returns the interpreters in which a server may be: this one, those that are named, and that of a program `vllm`. Raises
    ConfigError for a name that is no program."""
    found = [sys.executable, *(interpreter(name, SETTING) for name in named)]
    if program := shutil.which("vllm"):
        found += [str(path) for path in [Path(program).parent / "python"] if path.exists()]
    return list(dict.fromkeys(found))


def require(kind: str, named: str, fetches: bool = False) -> Found:
    """Returns what `engine.python` has of a server. `fetches`: whether headrace's part in it has to fetch new weights, or open them. Raises ConfigError, with the
    remedy, if something is missing."""
    starts = _starts(kind)
    found = look(kind, interpreter(named, SETTING))
    where = f"{SETTING} = {found.python}" if named else f"this interpreter ({found.python})"
    if found.missing:
        raise ConfigError(
            f'engine.kind = "{kind}" without engine.urls starts a server, and {where} has no {" and no ".join(found.missing)}: install it '
            f"({starts.install}) and name its interpreter in engine.python, or name a server that runs in engine.urls"
        )
    if starts.needs_headrace == "to fetch" and fetches:
        _require_plugin(where, look_into(found.python, [["headrace", "headrace"]], SETTING, PLUGINS))
    if starts.needs_headrace == "always":
        _require_version(where, found)
    return found


def _require_plugin(where: str, found: Found) -> None:
    """Raises ConfigError if vLLM would not find headrace's engine for the transfer of weights. It does so by the entry point of an installed
    headrace: one that can merely be imported is not found."""
    if "headrace" not in found.plugins:
        raise ConfigError(
            f"vLLM is to fetch or open new weights (weight_sync), and {where} has no headrace installed, which does that there: install it "
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
