"""The part of headrace that a cluster runs on a node: it starts one worker there and watches it.

The cluster is sent this module's source, so that a node answers whatever version of headrace it has. So it imports only the
standard library, and headrace where it is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers")
"""Packages that decide what an engine computes."""

WORDS = 1000
"""How often a word is written into a file that other machines look for: more than fits into one block."""

LAST_WORDS = 1.0
"""Seconds for which output is awaited after the worker has ended: a child of it may keep the pipe open."""


class NodeHost:
    """An actor. Its methods run in one event loop."""

    def __init__(self) -> None:
        self._worker: subprocess.Popen[bytes] | None = None
        self._said: asyncio.Queue[tuple[bytes, int | None]]

    async def look(self) -> dict[str, str]:
        """Returns the versions of this node, by name; empty for a package that is not installed."""
        try:
            from headrace.version import __version__ as version
        except ImportError:
            version = ""
        found = {"headrace": version, "Python": "{}.{}".format(*sys.version_info), "host": socket.gethostname()}
        for name in PACKAGES:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                found[name] = ""
        return found

    async def clock(self) -> float:
        """Returns the seconds since 1970."""
        return time.time()

    async def machine(self) -> dict[str, float]:
        """Returns the cores that a worker may use here, and the bytes of memory and those of them that are free."""
        page, found = os.sysconf("SC_PAGE_SIZE"), {"cores": float(os.cpu_count() or 1)}
        if hasattr(os, "sched_getaffinity"):
            found["cores"] = len(os.sched_getaffinity(0))
        for name, pages in (("memory", "SC_PHYS_PAGES"), ("free", "SC_AVPHYS_PAGES")):
            found[name] = page * os.sysconf(pages)
        return found

    async def give(self, address: str, token: str, count: int) -> tuple[str, float]:
        """Sends that many bytes to `address`. Returns why it could not, or an empty string, and the seconds."""
        began = time.monotonic()
        host, _, port = address.rpartition(":")
        try:
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.write(token.encode() + b">")
            writer.write(bytes(count))
            await writer.drain()
            done = await reader.read(1)
            writer.close()
        except OSError as error:
            return str(error), 0.0
        return "" if done else "the run has not read all of it", time.monotonic() - began

    async def fetch(self, address: str, token: str, count: int) -> tuple[str, float]:
        """Reads that many bytes from `address`. Returns why it could not, or an empty string, and the seconds."""
        began = time.monotonic()
        host, _, port = address.rpartition(":")
        try:
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=1 << 20)
            writer.write(token.encode() + b"<")
            while count and (data := await reader.read(1 << 20)):
                count -= len(data)
            writer.close()
        except OSError as error:
            return str(error), 0.0
        return f"{count} bytes are missing" if count else "", time.monotonic() - began

    async def leave(self, path: str, word: str) -> str:
        """Writes a file, and then replaces it by one that has this word many times, each in one step. Returns why it could not, or an empty
        string."""
        return await asyncio.to_thread(_replaced, Path(path), word)

    async def find(self, path: str, word: str, within: float) -> tuple[str, float]:
        """Waits until a file is there as `leave` writes it. Returns why it is not after `within` seconds, or an empty string, and the seconds."""
        began = time.monotonic()
        while problem := await asyncio.to_thread(_unlike, Path(path), word):
            if time.monotonic() - began > within:
                break
            await asyncio.sleep(0.05)
        return problem, time.monotonic() - began

    async def drop(self, path: str) -> None:
        """Removes a file."""
        with contextlib.suppress(OSError):
            await asyncio.to_thread(os.unlink, path)

    async def agree(self, terms: Any) -> Any:
        """Returns the node's answer (`Agreed`) to the `Terms` of a run. A known model is fetched if it is not there."""
        from headrace.processes.joining.same_model import agree_to

        return await asyncio.to_thread(agree_to, terms)

    async def start(self, kind: str, address: str, variables: Mapping[str, str]) -> int:
        """Starts a worker that connects to the run at `address`; returns its process id.

        The thread of this loop is its parent, at whose end the kernel ends it (`family.py`): with this process, whatever ends that."""
        from headrace.processes.health import family
        from headrace.processes.launch.local import environment, start_worker

        self._said = asyncio.Queue()
        own = environment(()) | family.parent_variables() | dict(variables)
        self._worker = worker = start_worker([kind, "--connect", address], own, output=subprocess.PIPE)
        threading.Thread(target=self._attend, args=(worker, asyncio.get_running_loop()), daemon=True).start()
        return worker.pid

    async def output(self) -> tuple[bytes, int | None]:
        """Waits for the next words of the worker. The last ones come with its exit code, as `subprocess` gives it."""
        return await self._said.get()

    def kill(self) -> None:
        if self._worker and self._worker.poll() is None:
            self._worker.send_signal(signal.SIGKILL)

    def _attend(self, worker: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop) -> None:
        reading = threading.Thread(target=self._read, args=(worker, loop), daemon=True)
        reading.start()
        code = worker.wait()
        reading.join(LAST_WORDS)
        self._say(loop, b"", code)

    def _read(self, worker: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop) -> None:
        assert worker.stdout
        while data := os.read(worker.stdout.fileno(), 1 << 16):
            self._say(loop, data, None)

    def _say(self, loop: asyncio.AbstractEventLoop, data: bytes, code: int | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            loop.call_soon_threadsafe(self._said.put_nowait, (data, code))


def _replaced(path: Path, word: str) -> str:
    """Writes and replaces a file. Returns why it could not, or an empty string."""
    part = path.with_name(f"{path.name}.part")
    try:
        for text in ("", WORDS * word):
            with part.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _unlike(path: Path, word: str) -> str:
    """Returns why a file is not as `leave` writes it, or an empty string."""
    try:
        found = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        return "is not there" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
    return "" if found == WORDS * word else "has other bytes there" if found else "is there in an older version"
