"""One agent: a process of the user's command with a session, a directory and an address of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.environments.agents import agent_reaper
from headrace.observe.health.patience import within
from headrace.observe.health.user_process import ending

GRACE = 5.0
"""Seconds that an agent which is ended early has after SIGTERM, before it is killed."""
KEPT = 16 << 10
"""Bytes at the end of its output that are kept; the rest is dropped."""
CHUNK = 1 << 16


def agent_variables(url: str, key: str) -> dict[str, str]:
    """The environment of an agent: ours, with the address of its rollout for OpenAI's and Anthropic's clients."""
    local = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), "127.0.0.1"]))
    own = {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "NO_PROXY": local,  # a proxy of the user's must not be asked for an address on this machine
        "no_proxy": local,
    }
    return {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **os.environ, **own}


class Reaper:
    """The process that ends the agents if this one is killed. It is started with the first agent."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def started(self, group: int, directory: str) -> None:
        """`directory`: removed with the agent; empty for one that is the user's."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", agent_reaper.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
        self._say(f"+{group} {directory}\n")

    def ended(self, group: int) -> None:
        self._say(f"-{group}\n")

    def _say(self, line: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(OSError):  # somebody has killed it
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.wait()
            self._process = None


class _Tail:
    """The end of a stream."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._kept = b""
        self.reading = asyncio.create_task(self._read(stream))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(CHUNK):
            self._kept = (self._kept + chunk)[-KEPT:]

    @property
    def text(self) -> str:
        return self._kept.decode(errors="replace")


class AgentProcess:
    def __init__(self, process: asyncio.subprocess.Process, directory: str, reaper: Reaper) -> None:
        """`directory`: the one that was made for it; empty if it runs in a directory of the user."""
        assert process.stdout is not None and process.stderr is not None
        self._process, self._directory, self._reaper = process, directory, reaper
        self._out, self._err = _Tail(process.stdout), _Tail(process.stderr)
        reaper.started(process.pid, directory)

    @classmethod
    async def start(
        cls, command: Sequence[str], variables: Mapping[str, str], *, given: bytes, directory: str, reaper: Reaper
    ) -> AgentProcess:
        """`given`: its standard input. `directory`: where it runs; empty: in one that is made for it and removed at its end. Raises
        OSError."""
        own = "" if directory else await asyncio.to_thread(tempfile.mkdtemp, prefix="headrace-agent-")
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=directory or own,
                env=dict(variables),
                start_new_session=True,
            )
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, own, ignore_errors=True)
            raise
        self = cls(process, own, reaper)
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it may read nothing
            process.stdin.write(given)
            process.stdin.close()
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Returns its exit code when it has ended and its output was read."""
        code = await self._process.wait()
        self._kill()  # what it started may hold its output open
        await asyncio.wait({self._out.reading, self._err.reading}, timeout=GRACE)
        return code

    @property
    def output(self) -> str:
        return self._out.text

    @property
    def errors(self) -> str:
        return self._err.text

    @property
    def traceback(self) -> str:
        """The last traceback of Python in its standard error; empty if there is none."""
        _, found, rest = self.errors.rpartition("Traceback (most recent call last):\n")
        return rest.strip() if found else ""

    def how(self, code: int) -> str:
        """How it ended, in words, with its last line."""
        lines = self.errors.strip().splitlines() or self.output.strip().splitlines()
        return f"{ending(code)}{f'; it said: {lines[-1].strip()[:300]}' if lines else ''}"

    async def end(self, log: Path | None) -> None:
        """Ends it, if it has not ended, and all that it started. Its standard error goes to the log."""
        if self._process.returncode is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await within(self.pid, GRACE, self._process.wait())
        self._kill()
        await self.wait()
        for tail in (self._out, self._err):
            tail.reading.cancel()  # a process that has left the session may still hold the output open
        self._reaper.ended(self.pid)
        if log and self.errors:
            await asyncio.to_thread(_append, log, f"--- agent {self.pid}\n{self.errors}")
        if self._directory:
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, signum: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signum)


def _append(log: Path, text: str) -> None:
    with log.open("a", errors="replace") as file:
        file.write(text if text.endswith("\n") else f"{text}\n")
