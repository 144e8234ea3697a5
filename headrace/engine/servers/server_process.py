"""A server that the run starts, starts anew when it has died, and ends with itself. Its parent is the guard (`server_guard.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from headrace.engine.servers import server_guard
from headrace.engine.servers.commands import HOST, Command
from headrace.observe.health import patience

ENDING = 2 * server_guard.GRACE
"""Seconds in which the guard should have ended the server."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])


class ServerProcess:
    """Protocol `Host`."""

    def __init__(self, kind: str, name: str, logs: Path, make: Callable[[int, str, Path], Command]) -> None:
        """`name`: its name in a fleet, or an empty string. `make`: the command, by port, token and the file that will hold the token."""
        stem = f"engine-{name}" if name else "engine"
        self._title, self._log = f"{kind} server {name}".rstrip(), logs / f"{stem}.log"
        self._port, self.token = free_port(), secrets.token_hex(32)
        self._token_file = logs / f"{stem}.token"
        self._command = make(self._port, self.token, self._token_file)
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://{HOST}:{self._port}"

    def start(self) -> None:
        """Raises OSError."""
        self._write_token()
        words = [sys.executable, "-I", server_guard.__file__, *self._command.words]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                words,
                env=dict(self._command.variables),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _write_token(self) -> None:
        self._token_file.unlink(missing_ok=True)
        with os.fdopen(os.open(self._token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(self.token)

    def ended(self) -> str:
        """How its process ended; empty while it runs."""
        assert self._process is not None
        code = self._process.poll()
        if code is None:
            return ""
        server_guard.end_session(self._process.pid)  # nobody is left, unless the guard was killed
        code = server_guard.KILLED - code if code < 0 else code
        how = f"ended with exit code {code}"
        if code > server_guard.KILLED:
            with contextlib.suppress(ValueError):
                how = f"was killed by {signal.Signals(code - server_guard.KILLED).name}"
        return f"{how} (its output is in {self._log}{self._last_words()})"

    def _last_words(self) -> str:
        try:
            lines = self._log.read_bytes()[-4096:].decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return f", which ends with: {lines[-1].strip()[:300]}" if lines else ""

    @property
    def who(self) -> str:
        return f"the {self._title} that this run started"

    def kill(self) -> None:
        """Ends it at once, with all that it started."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    async def end(self) -> None:
        """Nothing of it is there when this returns."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.to_thread(patience.wait, self._process, ENDING)
        except subprocess.TimeoutExpired:
            self._process.kill()
        server_guard.end_session(self._process.pid)
        self._token_file.unlink(missing_ok=True)
