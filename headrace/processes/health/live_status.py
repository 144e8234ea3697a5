"""`status.json`: the present state of a running process. The rest of a run's status comes from `metrics.jsonl`, also after its end."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import msgspec

from headrace.core.types import Struct
from headrace.durable.atomic_files import replace_file
from headrace.facts import run_state
from headrace.facts.facts import FirstFailure, Warned
from headrace.facts.group_numbers import Tally
from headrace.facts.records import METRICS, MetricsFact, decode_metrics, left_out
from headrace.facts.run_state import RunState
from headrace.facts.thresholds import Mark
from headrace.facts.verdicts import advices, failings
from headrace.facts.waits import Lasting, counted
from headrace.processes.health import stacks
from headrace.processes.health.family import Family
from headrace.processes.health.stacks import process_state

if TYPE_CHECKING:  # numpy comes with it, and the process that watches a run loads nothing heavy
    from headrace.facts.index_file import Digest

# --- Snapshots
# Every named wait, the stacks of this process's threads and tasks, and those of its worker processes, at one moment.


@dataclass(frozen=True)
class Snapshot:
    taken: float
    accounts: Sequence[stacks.Account]
    """One per worker process."""
    lines: Sequence[str]
    path: Path
    """The file with the lines."""


class Camera:
    """Takes snapshots, and writes each to `logs/stacks-<n>.txt`. May be used in any thread but the event loop's: it takes up to 2 seconds."""

    def __init__(self, logs: Path, family: Family, lasting: Callable[[], list[Lasting]]) -> None:
        self._logs, self._family, self._lasting = logs, family, lasting
        self.loop: asyncio.AbstractEventLoop | None = None
        self.last: Snapshot | None = None
        self._one_at_a_time = threading.Lock()

    def take(self, why: str) -> Snapshot:
        """Takes a snapshot. Callers at the same time get the same one."""
        asked = time.monotonic()
        with self._one_at_a_time:
            if self.last is None or self.last.taken < asked:
                self.last = self._take(why)
            return self.last

    def _take(self, why: str) -> Snapshot:
        lines = [f"headrace: {why}", "", "waits, longest first:"]
        lines += [f"  {words}" for words, _ in counted(self._lasting())] or ["  nothing waits"]
        lines += ["", f"--- controller, pid {os.getpid()}", *stacks.thread_lines([threading.get_ident()])]
        if self.loop is not None:
            with suppress(RuntimeError):  # the tasks change faster than they can be counted
                lines += stacks.task_lines(self.loop)
        accounts = stacks.ask(self._family.children())
        for account in accounts:
            lines += ["", *account.lines]
        return Snapshot(time.monotonic(), accounts, lines, self._keep(lines))

    def _keep(self, lines: Sequence[str]) -> Path:
        number = 1
        while (path := self._logs / f"stacks-{number}.txt").exists():
            number += 1
        with suppress(OSError):  # a full disk must not prevent the report on the terminal
            path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="backslashreplace")
        return path


def blame(wait: Lasting, every: Sequence[Lasting], accounts: Sequence[stacks.Account]) -> tuple[str, list[str]]:
    """Returns the cause of a wait in a few words, and its stacks. The cause is the worker that the wait names; if it names none
    (`8 scored groups`), those that the other waits name.

    A scorer that was passed from Python has no process: its threads are in this one.
    """
    for what in (wait.what, ", ".join(waiting.what for waiting in every)):
        guilty = [account for account in accounts if account.child.who in what]
        guilty = guilty or [
            account for account in accounts if account.child.who.split()[0] in what
        ]  # `scorer 2`: one of several
        threads = stacks.threads_named(REWARD_THREADS) if "scorer" in what else []
        if guilty or threads:
            messages = [account.brief for account in guilty]
            messages += [f"thread {name}: in {stacks.thread_place(ident)}" for name, ident in threads]
            lines = [line for account in guilty for line in account.short]
            for name, ident in threads:
                lines += [f"--- controller, thread {name}", *stacks.thread_stack(ident)[-stacks.SHORT :]]
            return "; ".join(messages), lines
    return "", []


REWARD_THREADS = "headrace-reward-"
"""Prefix of the names of threads that run a user's functions."""


# --- live status ------------------------------------------------------------


STATUS = "status.json"

SILENT = 15.0
"""Seconds without a new `status.json` after which a live run is called silent; it writes one every two seconds."""


class LiveStatus(Struct, frozen=True, kw_only=True):
    """The content of `status.json`."""

    pid: int
    written: float
    """Seconds since 1970."""
    waits: tuple[Lasting, ...] = ()
    """Longest first."""
    silent: float = 0.0
    """Seconds for which the event loop has not turned."""
    workers: dict[str, int] = {}
    """Process ids by name."""
    verdict: str = ""
    """The reason why the watchdog ended the process; empty if it did not."""
    picture: str = ""
    """Path of the last file with the stacks of all processes."""


def write_live(run_dir: Path, live: LiveStatus) -> None:
    """Replaces the file atomically: a reader never sees half of it."""
    replace_file(run_dir / STATUS, msgspec.json.encode(live), flush=False)


def add_verdict(run_dir: Path, verdict: str) -> None:
    """Adds the verdict on a process that can no longer write it itself."""
    if live := read_live(run_dir):
        write_live(run_dir, msgspec.structs.replace(live, verdict=verdict))


def read_live(run_dir: Path) -> LiveStatus | None:
    """Reads `status.json`; None if there is none, or another version of headrace wrote it."""
    try:
        return msgspec.json.decode((run_dir / STATUS).read_bytes(), type=LiveStatus)
    except (OSError, msgspec.MsgspecError):
        return None


Life = Literal["alive", "silent", "starting", "finished", "interrupted", "paused", "stopped", "died"]
LIVING = ("alive", "silent", "starting")


class Status(Struct, frozen=True):
    """Whether a run is alive, and a sentence about it."""

    life: Life
    words: str
    """The sentence."""
    live: LiveStatus | None

    @property
    def ok(self) -> bool:
        """Whether the run is alive, or ended as it should."""
        return self.life not in ("paused", "stopped", "died")

    @property
    def mark(self) -> Mark:
        return "warn" if self.life == "silent" else "good" if self.ok else "bad"


class Follower:
    """Reads a run's files, and later only what was added to them."""

    _offset: int
    _lines: int
    _seen: bytes

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._restart()

    def look(self, alive: bool, now: float) -> Status:
        """Returns the present status. `alive`: whether a process holds the run's lock. `now`: seconds since 1970."""
        live = read_live(self.run_dir)
        self.read()
        return judge(self.state, live, alive, now)

    def read(self, most: int = sys.maxsize) -> bool:
        """Reads what was added, about `most` bytes at most. Returns whether there is more."""
        try:
            file = (self.run_dir / METRICS).open("rb")
        except OSError:
            return False
        with file:
            if self._offset and end_before(file, self._offset) != self._seen:  # a resumed run has cut the file
                self._restart()
            file.seek(self._offset)
            end = self._offset + most
            for line in file:
                if not line.endswith(b"\n"):  # still being written, or torn by a kill
                    break
                self._offset, self._lines = self._offset + len(line), self._lines + 1
                if fact := decode_metrics(line[:-1]):
                    self._take(fact)
                else:
                    self._unreadable.append(self._lines)
                if self._offset >= end:
                    break
            self._seen = end_before(file, self._offset)
        self._say_what_is_left_out()
        return self._offset >= end

    @property
    def size(self) -> int:
        """Bytes of the file; 0 if there is none."""
        try:
            return (self.run_dir / METRICS).stat().st_size
        except OSError:
            return 0

    @property
    def unread(self) -> int:
        """Bytes whose facts are not in `state` yet."""
        return self.size - self._offset

    def _go_on_from(self, digest: Digest) -> None:
        """Takes the sums of a digest that fits the file; the next `read` begins behind what it counts."""
        with (self.run_dir / METRICS).open("rb") as file:
            self._seen = end_before(file, digest.size)
        self.state, self._offset, self._lines = digest.state, digest.size, digest.lines
        self._unreadable.clear()

    def _restart(self) -> None:
        """Forgets everything; the file is read from its start."""
        self.state = RunState()
        self._offset, self._lines, self._seen = 0, 0, b""
        self._unreadable: list[int] = []
        self._said: Warned | None = None

    def _take(self, fact: MetricsFact) -> None:
        self.state.fold(fact)

    def _say_what_is_left_out(self) -> None:
        if not self._unreadable:
            return
        warnings = self.state.warnings
        if self._said in warnings:
            warnings.remove(self._said)
        self._said = left_out(self._unreadable, self.state.now)
        warnings.append(self._said)


def end_before(file: IO[bytes], offset: int, most: int = 256) -> bytes:
    """Returns the last bytes before `offset`, `most` at most, by which a part of a file is known again: facts have their time in them."""
    return os.pread(file.fileno(), min(most, offset), max(0, offset - most))


def judge(state: RunState, live: LiveStatus | None, alive: bool, now: float) -> Status:
    if alive:
        return _living(state, live, now)
    if live and live.verdict:
        return Status("died", live.verdict, live)
    if state.ended is None:
        doing = "training" if state.training else run_state.phase(state)
        return Status("died", f"died while {doing} and left no message: it was killed, or the machine went down", live)
    match state.ended.reason:
        case "finished" | "interrupted" as life:
            return Status(life, life, live)
        case reason if reason.startswith("paused:"):
            return Status("paused", reason, live)
        case reason:
            return Status("stopped", reason, live)


def _living(state: RunState, live: LiveStatus | None, now: float) -> Status:
    age = now - live.written if live else 0.0
    doing = process_state(live.pid) if live else "gone"
    if live is None or (abs(age) > SILENT and doing == "gone"):  # the file is that of the process before
        return Status("starting", "alive, and just starting", None)
    if age < -SILENT:  # it would count as new until this clock has come so far
        return Status(
            "silent",
            f"alive, but its last status is from {-age:.0f} s later than now (was the clock set back?): its process is {doing}",
            live,
        )
    if age > SILENT:
        return Status("silent", f"alive, but has written no status for {age:.0f} s: its process is {doing}", live)
    if live.silent > SILENT:
        return Status("silent", f"alive, but its event loop has not turned for {live.silent:.0f} s", live)
    if state.ended and state.ended.reason not in ("finished", "interrupted"):
        return Status("alive", f"going on after: {state.ended.reason}", live)
    return Status("alive", run_state.phase(state), live)


def as_dict(status: Status, state: RunState) -> dict[str, Any]:
    """Returns the status for programs: `headrace status --json`."""
    live, started = status.live, state.started
    return {
        "name": started.name if started else None,
        "life": status.life,
        "words": status.words,
        "ok": status.ok,
        "pid": live.pid if live else None,
        "workers": live.workers if live else {},
        "seconds": state.now,
        "step": state.step,
        "steps": started.steps if started else None,
        "seconds_a_step": run_state.step_seconds(state),
        "seconds_left": run_state.seconds_left(state),
        "reward": run_state.recent_reward(state),
        "held_out": [[evaluation.phase, evaluation.reward_mean] for evaluation in state.evals],
        "held_out_failed": [evaluation.failed_prompts for evaluation in state.evals],
        "shares": {"recent": _shares(state.shares.recent), "total": _shares(state.shares.total)},
        "failures": [
            {"kind": failing.kind, "rollouts": failing.rollouts, **(_first(failing.first) if failing.first else {})}
            for failing in failings(state)
        ],
        "advice": [[advice.name, advice.sentence] for advice in advices(state)],
        "lag": {
            "mean": run_state.mean_lag(state),
            "max": max(state.lags, default=None),
            "bound": started and started.max_lag,
            "experience": {str(age): count for age, count in sorted(state.ages.items())},
        },
        "tokens_a_second": {"engine": state.engine.recent()[1], "trainer": run_state.trainer_rate(state, 10)},
        "accounting": {**msgspec.to_builtins(state.accounting), "balance": state.accounting.balance()},
        "checkpoint": _checkpoint(state),
        "waits": msgspec.to_builtins(live.waits if live else ()),
        "joined": {who: [worker.host, worker.pid, worker.address] for who, worker in state.joined.items()},
        "members": msgspec.to_builtins(state.members),
        "deaths": [[death.t, death.who, death.how] for death in state.deaths],
        "warnings": [[warning.t, warning.message] for warning in state.warnings],
        "picture": live.picture if live else "",
    }


def _shares(tally: Tally) -> dict[str, float | None]:
    return {
        "truncated": tally.truncated_share,
        "no_contrast": tally.no_contrast_share,
        "dropped": tally.dropped_share,
        "failed": tally.failed_share,
    }


def _first(failure: FirstFailure) -> dict[str, str]:
    return {
        "reason": failure.reason,
        "detail": failure.detail,
        "traceback": failure.traceback,
        "prompt": failure.prompt_id,
    }


def _checkpoint(state: RunState) -> dict[str, Any] | None:
    good = [checkpoint for checkpoint in state.checkpoints if not checkpoint.error]
    return {"step": good[-1].step, "t": good[-1].t, "path": good[-1].path} if good else None


def parts_of(run_dir: Path) -> Sequence[Path]:
    """Returns the directories of a run: one, or one per adapter if it trains several."""
    return sorted(path.parent for path in run_dir.glob("*/config.toml")) or [run_dir]
