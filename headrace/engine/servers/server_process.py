"""A server that the run starts, starts anew when it has died, and ends with itself. Its parent is the guard (`server_guard.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.engine.remote.server_kind import HOST, Place, server_kind
from headrace.engine.servers import server_guard
from headrace.processes.process_end import ended_within, ending
from headrace.settings.extras import Found, foreign_variables

# --- The words and variables that start a server, from the settings of the run's engine.


VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Command:
    words: Sequence[str]
    variables: Mapping[str, str]
    """The whole environment."""


def command(config: EngineConfig, found: Found, place: Place) -> Command:
    starts = server_kind(config.kind).starts
    assert starts, f"a run starts no server of {config.kind}"
    words, variables = starts.command(config, found, place)
    return Command([*words, *config.server_args], foreign_variables(found.python) | variables | visible(config.gpus))


def visible(gpus: Sequence[int]) -> dict[str, str]:
    """Returns the variable that leaves only these GPUs. Raises ConfigError if they are not among those that this process may use."""
    there = [gpu.strip() for gpu in os.environ.get(VISIBLE, "").split(",") if gpu.strip()]
    if there and gpus and max(gpus) >= len(there):
        raise ConfigError(
            f"engine.gpus names GPU {max(gpus)}, and {VISIBLE}={os.environ[VISIBLE]} leaves {len(there)}, which count from 0"
        )
    return {VISIBLE: ",".join(there[gpu] if there else str(gpu) for gpu in gpus)} if gpus else {}


# --- The reason why a server ended, from its log
# The exception that ended it may stand hundreds of lines above the last one.


LENGTH = 300
"""Characters of a reason at most."""

_SPEAKER = re.compile(r"\((?P<who>[\w ]+ pid=\d+)\) ?")
_STAMP = re.compile(r"(?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?")
"""The beginnings of vLLM's lines: the process, and the level, the time and the place in its source. A line may lack either."""
_COLOURS = re.compile(r"\x1b\[[\d;]*m")
_IN_GROUP = re.compile(r"\s+\| ?")
"""The beginning of each line in a group of exceptions."""
_EXCEPTION = re.compile(r"(?![A-Z]+:)[A-Za-z_][\w.]*(?:: .*)?$")
"""The last line of a traceback; not `INFO: ...`, which another thread may write between its lines."""
_FURTHER = "For further information visit"
_ARGUMENTS = re.compile(r"\S+: error: ")
"""A complaint of argparse about arguments, which has no traceback."""
_WORKS = "Avg generation throughput:"
"""vLLM writes this every ten seconds in which it has worked. What went wrong before such a line did not end it."""

_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_IGNORED = "Exception ignored in"
_POINTS_ELSEWHERE = re.compile(
    r"EngineDeadError|(?:Engine core|WorkerProc) initialization failed|for the root cause|died unexpectedly|CancelledError|KeyboardInterrupt"
    r"|SystemExit|BrokenPipeError|ConnectionResetError|EOFError"
)
"""Exceptions in processes that lost another one, or were asked to end."""
_ANSWERED = "RequestValidationError"
"""The answer to a request without its fields, which a run sends to see whether the route is there."""
_NOTICES = re.compile(
    r"nanobind: |See https://nanobind| - leaked | - \.\.\. skipped|INFO\b|\w*Warning: |warnings\.warn|\S+:\d+: \w*Warning"
    r"|.*resource_tracker|Exception ignored|\s*$"
)
"""Lines that say nothing of the end of a process, though they may be its last."""


_NOT_LOADED = re.compile(
    r"\] (?:(?P<kind>\w+): Failed to load weights|Following weights were not loaded from checkpoint: (?P<names>.*))"
)
"""vLLM's warnings of an update that it has not applied as a whole (vLLM 0.32, `model_loader/reload/`). It answers with success all the same."""


def not_loaded(text: str) -> frozenset[str]:
    """Returns what vLLM warns of in this part of its log that it has not loaded: classes of modules, and names of parameters."""
    found: set[str] = set()
    for match in _NOT_LOADED.finditer(_COLOURS.sub("", text)):
        found.update([match["kind"]] if match["kind"] else re.findall(r"'([^']+)'", match["names"]))
    return frozenset(found)


@dataclass(frozen=True)
class _Line:
    who: str
    """The process that wrote it, where it says so."""
    level: str
    text: str


@dataclass
class _Traceback:
    """A traceback as far as it was read."""

    chained: bool
    """Whether its exception was raised while that of the one before was handled."""
    ignored: bool
    words: list[str] = field(default_factory=list)
    """Its exception, and the indented lines behind it, which belong to its message."""
    ended: bool = False

    def read(self, text: str) -> None:
        inside = text.startswith((" ", "\t"))
        if not self.words and not inside and _EXCEPTION.match(text):
            self.words.append(_short_name(text))
        elif self.words and not inside:
            self.ended = True
        elif self.words and not self.ended and not text.strip().startswith(_FURTHER):
            self.words.append(text.strip())


def raised(log: str) -> str:
    """Returns the exception that ended a server, or what it said of its arguments; empty if the log has neither.

    It is that of the first traceback which does not point to another process. Of exceptions that were raised while others were handled
    it is the last, which was written for the user."""
    lines = [_read(line) for line in log.rpartition(_WORKS)[2].splitlines()]
    for chain in _chains(lines):
        own = [line for line in chain if not _POINTS_ELSEWHERE.search(line) and _ANSWERED not in line]
        if own:
            return _cut(own[-1])
    return _cut(next((line.text for line in lines if _ARGUMENTS.match(line.text)), ""))


def last_line(log: str) -> str:
    """Returns the last line that is no notice; empty if there is none."""
    lines = [_read(line) for line in log.splitlines()]
    told = [line.text for line in lines if line.level in ("", "ERROR", "CRITICAL") and not _NOTICES.match(line.text)]
    return _cut(told[-1] if told else "")


def _read(line: str) -> _Line:
    rest, who, level = _COLOURS.sub("", line), "", ""
    if found := _SPEAKER.match(rest):
        who, rest = found["who"], rest[found.end() :]
    if found := _STAMP.match(rest):
        level, rest = found["level"], rest[found.end() :]
    if found := _IN_GROUP.match(rest):
        rest = rest[found.end() :]
    return _Line(who, level, rest.rstrip())


def _chains(lines: list[_Line]) -> Iterator[list[str]]:
    """Yields the exception of each traceback, with those that were raised while it was handled, in the order of their beginnings. Processes
    write at the same time, so each is read for itself."""
    begun: list[list[_Traceback]] = []
    open_by: dict[str, list[_Traceback]] = {}
    before: dict[str, str] = {}
    """The last line of each process that was not empty."""
    for line in lines:
        between = before.get(line.who, "")
        if line.text.strip() == _TRACEBACK:
            traceback = _Traceback(chained=between.startswith(_CHAINED), ignored=between.startswith(_IGNORED))
            if not (traceback.chained and line.who in open_by):
                begun.append([])
                open_by[line.who] = begun[-1]
            open_by[line.who].append(traceback)
        elif line.who in open_by:
            open_by[line.who][-1].read(line.text)
        if line.text:
            before[line.who] = line.text
    for chain in begun:
        yield [" ".join(trace.words) for trace in chain if trace.words and not trace.ignored]


def _short_name(exception: str) -> str:
    """The exception without the modules of its class: `a.b.Error: c` is `Error: c`."""
    name, colon, rest = exception.partition(":")
    return name.rpartition(".")[2] + colon + rest


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LENGTH else text[: LENGTH - 3] + "..."


# --- server process ------------------------------------------------------------


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

    def __init__(
        self, kind: str, name: str, logs: Path, make: Callable[[int, str, Path], Command], *, kept: str = ""
    ) -> None:
        """`name`: its name in a fleet, or an empty string. `make`: the command, by port, token and the file that will hold the token. `kept`: where people
        find what it prints, in words; empty: in its log."""
        stem = f"engine-{name}" if name else "engine"
        self._title, self._log = f"{kind} server {name}".rstrip(), logs / f"{stem}.log"
        self._kept = kept or str(self._log)
        self._port, self.token = free_port(), secrets.token_hex(32)
        starts = server_kind(kind).starts
        assert starts, f"a run starts no server of {kind}"
        end, self._token_text = starts.token_file
        self._token_file = logs / f"{stem}.token{end}"
        self._command = make(self._port, self.token, self._token_file)
        self._process: subprocess.Popen[bytes] | None = None
        self._begins = 0
        """The size of its log when the present process was started: what is before was written by others."""
        self._heard = 0
        """The part of its log that was looked through for warnings about weights."""
        self._shown = 0
        """The part of it that was printed (`said_since`)."""
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
            file.write(self._token_text.format(self.token))

    def ended(self) -> str:
        """How the server's process ended; empty while it runs."""
        code = self._code()
        if code is None:
            return ""
        if error := self.error():
            return f"ended with exit code {code}: {error} (its output is in {self._kept})"
        signaled = code - server_guard.KILLED in list(signal.Signals)  # 255 is an exit code
        how = ending(server_guard.KILLED - code if signaled else code)
        message = last_line(self._said())
        return f"{how} (its output is in {self._kept}{f', which ends with: {message}' if message else ''})"

    def error(self) -> str:
        """The exception that ended its process, or the complaint about its arguments; empty while it runs, and where it was killed or its
        log has neither."""
        code = self._code()
        return "" if code is None or code > server_guard.KILLED else raised(self._said())

    def _code(self) -> int | None:
        """The process's exit code, after which nothing of it is left; None while it runs."""
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

    def said_since(self) -> str:
        """Returns what it has printed since the last call."""
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(self._shown)
            data = log.read()
            self._shown += len(data)
            return data.decode(errors="replace")
        return ""

    def not_loaded(self) -> frozenset[str]:
        """Returns what it has warned of since the last call that it has not loaded."""
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(max(self._begins, self._heard))
            text = log.read()
            self._heard = log.tell()
            return not_loaded(text.decode(errors="replace"))
        return frozenset()

    @property
    def who(self) -> str:
        return f"the {self._title} that this run started"

    def kill(self) -> None:
        """Ends it at once, with all that it started."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    async def end(self) -> None:
        """Ends the server and waits until nothing of it is left."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        await asyncio.to_thread(ended_within, self._process, ENDING)
        server_guard.end_session(self._process.pid)
        self._token_file.unlink(missing_ok=True)
