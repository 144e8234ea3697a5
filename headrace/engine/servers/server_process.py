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

from headrace.engine.remote.server_kind import HOST
from headrace.engine.servers import server_guard
from headrace.engine.servers.commands import Command
from headrace.engine.servers.server_log import last_line, not_loaded, raised
from headrace.processes.process_end import ended_within, ending

ENDING = 2 * server_guard.GRACE
"""Seconds in which the guard should have ended the server."""
READ = 2**20
"""Bytes at the end of its log in which the reason of its end is looked for."""


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
        self._begins = 0
        """The size of its log when the present process was started: what is before was written by others."""
        self._heard = 0
        """The part of its log that was looked through for warnings about weights."""
        self.url = f"http://{HOST}:{self._port}"

    def start(self) -> None:
        """Raises OSError."""
        self._write_token()
        words = [sys.executable, "-I", server_guard.__file__, *self._command.words]
        with self._log.open("ab") as log:
            self._begins = log.tell()
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
        code = self._code()
        if code is None:
            return ""
        if error := self.error():
            return f"ended with exit code {code}: {error} (its output is in {self._log})"
        signaled = code - server_guard.KILLED in list(signal.Signals)  # 255 is an exit code
        how = ending(server_guard.KILLED - code if signaled else code)
        said = last_line(self._said())
        return f"{how} (its output is in {self._log}{f', which ends with: {said}' if said else ''})"

    def error(self) -> str:
        """The exception that ended its process, or the complaint about its arguments; empty while it runs, and where it was killed or its
        log has neither."""
        code = self._code()
        return "" if code is None or code > server_guard.KILLED else raised(self._said())

    def _code(self) -> int | None:
        """Its exit code, from which nothing of it is left; None while it runs."""
        assert self._process is not None
        code = self._process.poll()
        if code is None:
            return None
        server_guard.end_session(self._process.pid)  # nobody is left, unless the guard was killed
        return server_guard.KILLED - code if code < 0 else code

    def _said(self) -> str:
        """The log of its present process."""
        try:
            with self._log.open("rb") as log:
                log.seek(max(self._begins, self._log.stat().st_size - READ))
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def not_loaded(self) -> frozenset[str]:
        """Returns what it has warned of since the last call that it has not loaded."""
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(max(self._begins, self._heard))
            said = log.read()
            self._heard = log.tell()
            return not_loaded(said.decode(errors="replace"))
        return frozenset()

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
        await asyncio.to_thread(ended_within, self._process, ENDING)
        server_guard.end_session(self._process.pid)
        self._token_file.unlink(missing_ok=True)
