"""Python stacks of another process, read by py-spy from outside: also of one that keeps the interpreter's lock, or is stopped.

The kernel allows it for a process of the same user that has allowed its reader (`may_be_read_by`), unless the machine forbids
it altogether; then what the kernel says of the process is all there is.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

PR_SET_PTRACER = 0x59616D61
"""Linux, prctl(2): which process, with its descendants, may read this one where Yama restricts it."""

SECONDS = 10.0
"""A look takes about 20 ms on a machine that has time."""


def may_be_read_by(pid: int) -> None:
    """Where the kernel has no such rule the call fails, and nothing is needed."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def stacks_from_outside(pid: int, stopped: bool = False) -> str:
    """As `frames.dump_lines` writes them; empty where they cannot be had. Blocks. `stopped`: it is, so it need not be held."""
    tool = _tool()
    if tool is None:
        return ""
    command = [tool, "dump", "--json", *(["--nonblocking"] if stopped else []), "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, stdin=subprocess.DEVNULL, check=True)
        threads = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ""
    return "\n".join(line for thread in sorted(threads, key=_is_main) for line in _lines(thread))


def _tool() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")  # an environment that is not activated is not on PATH
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _is_main(thread: dict[str, Any]) -> bool:
    return bool(thread["os_thread_id"] == thread["pid"])


def _lines(thread: dict[str, Any]) -> list[str]:
    name = thread["thread_name"] or ("MainThread" if _is_main(thread) else thread["os_thread_id"])
    lines = [f'  File "{one["filename"]}", line {one["line"]} in {one["name"]}' for one in thread["frames"]]
    return [f"Thread {name} (most recent call first):", *lines]
