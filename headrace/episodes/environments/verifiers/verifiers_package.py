"""The interpreter that has `verifiers`: the one of `environment.python`."""

from __future__ import annotations

from headrace.core.errors import ConfigError
from headrace.settings.interpreters import Found, interpreter, look_into

SETTING = "environment.python"
MODULES = [["verifiers", "verifiers"]]
SERIES = "0.4."
"""The versions whose interface the player uses. 0.3 had another one."""
REMEDY = "python -m venv ~/verifiers && ~/verifiers/bin/pip install 'verifiers>=0.4,<0.5' uv"
"""uv installs the programs that most of its agents are."""


def look_for_verifiers(python: str) -> Found:
    """Raises ConfigError if the interpreter does not answer."""
    return look_into(python, MODULES, SETTING)


def lacking(found: Found) -> str:
    """Says, in words, why an interpreter cannot play tasksets; empty if it can."""
    if found.missing:
        return "no verifiers"
    return "" if found.version.startswith(SERIES) else f"verifiers {found.version or 'of an unknown version'}"


def require_verifiers(named: str) -> Found:
    """Returns what `environment.python` has. Raises ConfigError, with the command that installs it, if it is not verifiers 0.4."""
    found = look_for_verifiers(interpreter(named, SETTING))
    if lacks := lacking(found):
        where = f"{SETTING} = {found.python}" if named else f"this interpreter ({found.python})"
        raise ConfigError(
            f'environment.kind = "verifiers" needs verifiers {SERIES}*, and {where} has {lacks}: install it ({REMEDY}) and name its '
            "interpreter in environment.python"
        )
    return found
