"""The tool `run_python`, and the sandbox of this process. A file that imports it says that it runs code (`sandbox_limits.py`)."""

from __future__ import annotations

import threading

from headrace.episodes.sandbox.isolation import refuse_missing
from headrace.episodes.sandbox.sandbox import Sandbox
from headrace.episodes.sandbox.sandbox_limits import settings_of_this_process

_one = threading.Lock()
_sandbox: Sandbox | None = None


def sandbox_of_this_process(who: str) -> Sandbox:
    """Returns the sandbox, and makes it if there is none. Raises ConfigError if a kind of isolation is missing that is not allowed to be.
    `who`: what runs code, for that message."""
    global _sandbox
    with _one:
        if _sandbox is None:
            settings = settings_of_this_process()
            refuse_missing(settings.limits, settings.allow, who)
            _sandbox = Sandbox(settings.limits, settings.parallel)
        return _sandbox


def run_python(code: str) -> str:
    """Runs a Python program and returns what it prints. Every program begins anew.

    Args:
        code: the program
    """
    result = sandbox_of_this_process("the tool run_python").run(code)
    if not result.reason:
        return result.out or "(it printed nothing)"
    message = result.err.strip() if result.reason == "raised" else f"error: {result.detail}"
    return f"{result.out}{message}"
