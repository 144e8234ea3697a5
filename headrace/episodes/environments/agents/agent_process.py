"""One agent: a process of the user's command with a session, a directory and an address of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from headrace.core.errors import RolloutFailed
from headrace.core.rewards import named_twice
from headrace.episodes.environments.agents import agent_reaper
from headrace.processes.health.owned_directory import OwnedDirectory
from headrace.processes.health.patience import within
from headrace.processes.joining.greeting import Terms
from headrace.processes.joining.same_model import code_terms
from headrace.processes.process_end import ending, signal_group
from headrace.settings.secrets import OWN

# --- The reward of an agent
# The last line that it prints, a number or a JSON object of numbers by name.
#
# An object within it has the rewards of the role that it is named after: `{"white": {"won": 1}, "moves": 0.2}`.


GivenRewards = Mapping[str, float | Mapping[str, float]]
"""Rewards by name: those of the rollout, and those of each role by theirs."""
NAME = "agent"
"""The name of a reward that is a number alone."""


def printed_reward(output: str) -> GivenRewards:
    """Raises RolloutFailed if the last line of the output is no reward. NaN is one here, and is refused with all rewards later."""
    line = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")
    wanted = "it must be a number, or a JSON object of numbers by name, with an object for each role that has rewards of its own"
    if not line:
        raise RolloutFailed("environment_reward", f"printed no reward: the last line of its output is empty; {wanted}")
    try:
        printed = json.loads(line)
    except (ValueError, RecursionError):
        printed = None
    if twice := named_twice(line):
        raise RolloutFailed("environment_reward", f"printed the reward {twice} twice in the last line of its output")
    rewards = printed if isinstance(printed, dict) else {NAME: printed}
    named = [
        value for reward in rewards.values() for value in (reward.values() if isinstance(reward, dict) else [reward])
    ]
    if not named or not all(isinstance(value, (bool, int, float)) for value in named):
        raise RolloutFailed(
            "environment_reward", f"the last line of its output is not a reward: {line!r:.80}; {wanted}"
        )
    try:
        return {
            name: _floats(reward) if isinstance(reward, dict) else float(reward) for name, reward in rewards.items()
        }
    except OverflowError:
        raise RolloutFailed("environment_reward", f"the reward is too large: {line:.40}...") from None


def _floats(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


# --- Ends agents that hold more memory than they may, each with all that it started.
#
# An agent is a session of processes. A limit of the kernel holds for each process alone (`AgentProcess` sets one too, which stops a process
# that takes much at once), so the sum over a session is looked at every second. Pages that several processes share count once in it
# (`Pss` of `/proc/PID/smaps_rollup`); finding that out takes long, so it is done only where the sum of all resident pages is too large.


SECONDS = 1.0
"""Time between two looks."""

Hogged = Callable[[int], None]
"""Called with the bytes that an agent holds when these are too many."""


class MemoryWatch:
    def __init__(self, limit: int, seconds: float = SECONDS) -> None:
        """`limit`: bytes of one agent; 0 sets no limit."""
        self._limit, self._seconds = limit, seconds
        self._watched: dict[int, Hogged] = {}
        self._looking: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def watching(self, session: int, hogged: Hogged) -> Iterator[None]:
        if not self._limit:
            yield
            return
        self._watched[session] = hogged
        self._looking = self._looking or asyncio.create_task(self._look())
        try:
            yield
        finally:
            del self._watched[session]

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            for session, held in (await asyncio.to_thread(held_by, tuple(self._watched), self._limit)).items():
                if hogged := self._watched.get(session):
                    hogged(held)

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)


def held_by(sessions: Iterable[int], limit: int) -> dict[int, int]:
    """Returns the bytes that those sessions hold that hold more than the limit. Empty where there is no /proc."""
    resident: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for session, process, held in _resident(frozenset(sessions)):
        resident[session][process] = held
    large = {session: held for session, held in resident.items() if sum(held.values()) > limit}
    found = {session: sum(map(_own, held, held.values())) for session, held in large.items()}
    return {session: held for session, held in found.items() if held > limit}


def _resident(sessions: frozenset[int]) -> Iterator[tuple[int, int, int]]:
    """Yields session, process and resident bytes of all processes of these sessions (proc(5): fields 6 and 24 of `stat`)."""
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = place.read_text().rpartition(")")[2].split()
            session, pages = int(fields[3]), int(fields[21])
        except (OSError, ValueError, IndexError):  # it has ended meanwhile
            continue
        if session in sessions:
            yield session, int(place.parent.name), pages * mmap.PAGESIZE


def _own(process: int, resident: int) -> int:
    """Bytes of a process, where a page that several have counts for each in part."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return resident


# --- agent process ------------------------------------------------------------


GRACE = 5.0
"""Seconds that an agent which is ended early has after SIGTERM, before it is killed."""
KEPT = 16 << 10
"""Bytes at the end of its output that are kept; the rest is dropped."""


LARGEST_CODE = 1 << 20
"""Bytes. A larger file of a command is a program that somebody has built, and is not looked at."""


def code_of(command: Sequence[str]) -> Terms:
    """Returns the files that a command names, those that they import from beside them, and the packages that they import if this environment's
    Python runs them, for `changed_code`."""
    terms = code_terms(word for word in command if _is_code(word))
    program = shutil.which(command[0]) or ""
    ours = os.path.dirname(program) == os.path.dirname(sys.executable)
    return terms if ours else msgspec.structs.replace(terms, packages={})


def _is_code(word: str) -> bool:
    return word.startswith("/") and os.path.isfile(word) and os.path.getsize(word) <= LARGEST_CODE


def agent_addresses(url: str, key: str) -> dict[str, str]:
    """The variables that have the address of a rollout, for OpenAI's and Anthropic's clients."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
    }


def agent_variables(addresses: Mapping[str, str]) -> dict[str, str]:
    """The environment of an agent: ours without what opens the run's doors, and with the addresses of its rollout."""
    host = urlsplit(addresses["OPENAI_BASE_URL"]).hostname
    direct = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), host]))
    own = {"NO_PROXY": direct, "no_proxy": direct}  # a proxy of the user's must not be asked for this address
    inherited = {name: value for name, value in os.environ.items() if name not in OWN}
    return {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **inherited, **addresses, **own}


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


class _Output(asyncio.SubprocessProtocol):
    """Keeps the end of what a process writes. (`Process.wait` of asyncio's streams waits for whoever else holds a pipe open, too.)"""

    def __init__(self) -> None:
        self._kept = {1: b"", 2: b""}
        self.exited, self.closed = asyncio.Event(), asyncio.Event()
        """Set when the process has ended; and when nobody can write to its output any more."""

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._kept[fd] = (self._kept[fd] + data)[-KEPT:]

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    def text(self, fd: int) -> str:
        return self._kept[fd].decode(errors="replace")


class AgentProcess:
    def __init__(
        self, transport: asyncio.SubprocessTransport, output: _Output, directory: OwnedDirectory | None, reaper: Reaper
    ) -> None:
        """`directory`: the one that was made for it; None if it runs in a directory of the user."""
        self._transport, self._output, self._directory, self._reaper = transport, output, directory, reaper
        self.pid = transport.get_pid()
        reaper.started(self.pid, directory.path if directory else "")

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        variables: Mapping[str, str],
        *,
        given: bytes,
        directory: str,
        reaper: Reaper,
        memory: int = 0,
    ) -> AgentProcess:
        """`given`: its standard input. `directory`: where it runs; empty: in one that is made for it and removed at its end. `memory`:
        bytes that it, and each process that it starts, may allocate; 0 sets no limit. Raises OSError."""
        own = None if directory else await asyncio.to_thread(OwnedDirectory, "agent")
        try:
            transport, output = await asyncio.get_running_loop().subprocess_exec(
                _Output, *command, cwd=own.path if own else directory, env=dict(variables), start_new_session=True
            )
        except BaseException:
            if own:
                await asyncio.to_thread(own.remove)
            raise
        self = cls(transport, output, own, reaper)
        if memory and hasattr(resource, "prlimit"):
            with contextlib.suppress(
                ProcessLookupError
            ):  # Linux; of data, because runtimes reserve addresses that they never use
                resource.prlimit(self.pid, resource.RLIMIT_DATA, (memory, memory))
        pipe = transport.get_pipe_transport(0)
        assert isinstance(pipe, asyncio.WriteTransport)
        pipe.write(given)  # it may read nothing: that is no error
        pipe.close()
        return self

    def kill(self) -> None:
        """Ends it at once, with all that it started. `end` still has to be called."""
        signal_group(self.pid)

    async def wait(self) -> int:
        """Returns its exit code when it has ended and its output was read."""
        await self._output.exited.wait()
        signal_group(self.pid)  # what it started may hold its output open
        with contextlib.suppress(TimeoutError):  # so may a process that has left the session
            async with asyncio.timeout(GRACE):
                await self._output.closed.wait()
        code = self._transport.get_returncode()
        assert code is not None
        return code

    @property
    def output(self) -> str:
        """The end of its standard output."""
        return self._output.text(1)

    @property
    def errors(self) -> str:
        """The end of its standard error."""
        return self._output.text(2)

    @property
    def traceback(self) -> str:
        """The last traceback of Python in its standard error; empty if there is none."""
        _, found, rest = self.errors.rpartition("Traceback (most recent call last):\n")
        return rest.strip() if found else ""

    def how(self, code: int) -> str:
        """How the agent ended, in words, with its last line."""
        lines = self.errors.strip().splitlines() or self.output.strip().splitlines()
        return f"{ending(code)}{f'; it said: {lines[-1].strip()[:300]}' if lines else ''}"

    async def end(self, log: Path | None) -> None:
        """Ends it, if it has not ended, and all that it started. Its standard error goes to the log."""
        if not self._output.exited.is_set():
            signal_group(self.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await within(self.pid, GRACE, self._output.exited.wait())
        signal_group(self.pid)
        await self.wait()
        self._transport.close()
        self._reaper.ended(self.pid)
        if log and self.errors:
            await asyncio.to_thread(_append, log, f"--- agent {self.pid}\n{self.errors}")
        if self._directory:
            await asyncio.to_thread(self._directory.remove)


def _append(log: Path, text: str) -> None:
    with log.open("a", encoding="utf-8", errors="replace") as file:
        file.write(text if text.endswith("\n") else f"{text}\n")
