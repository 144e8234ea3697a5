"""Python stacks of another process, read with py-spy, even if that process keeps the interpreter's lock or is stopped.

The kernel permits this for a process of the same user that has permitted its reader (`may_be_read_by`), unless the machine forbids it
altogether. In that case only the kernel's own information about the process is available.
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
"""Linux, prctl(2): sets the process that may read this one, with its descendants, where Yama restricts it."""

SECONDS = 10.0
"""Timeout; reading takes about 20 ms on an idle machine."""


def may_be_read_by(pid: int) -> None:
    """Permits the process `pid` to read this one. If the kernel has no such rule, the call fails and nothing is needed."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def stacks_from_outside(pid: int, stopped: bool = False) -> str:
    """Returns the stacks in the format of `own_stacks.dump_lines`; empty if they cannot be read. Blocks.

    `stopped`: whether the process is stopped by a signal already, so that py-spy need not pause it."""
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
    beside = Path(sys.executable).with_name("py-spy")  # the environment may not be activated, and so not be on PATH
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _is_main(thread: dict[str, Any]) -> bool:
    return bool(thread["os_thread_id"] == thread["pid"])


def _lines(thread: dict[str, Any]) -> list[str]:
    name = thread["thread_name"] or ("MainThread" if _is_main(thread) else thread["os_thread_id"])
    lines = [f'  File "{one["filename"]}", line {one["line"]} in {one["name"]}' for one in thread["frames"]]
    return [f"Thread {name} (most recent call first):", *lines]
