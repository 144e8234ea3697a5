"""`runs/<name>/`: the directory of one run, which one process at a time may open.

config.toml        the resolved settings
metrics.jsonl      every fact, one JSON line each
journal/           every ticket and its outcome, complete
passes/            the tokens sampled since the last checkpoint
checkpoints/       see checkpoints.py
logs/              output of the worker processes
status.json        who waits for whom at this moment, see processes/health/live_status.py
report.html
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from headrace.core.errors import ConfigError, HeadraceError
from headrace.durable.atomic_files import full_disk_as_error, read_lines, remove_parts, replace_file, write_error
from headrace.durable.journal import Journal, holds_records
from headrace.durable.pass_log import PassLog
from headrace.durable.segments import SEGMENT
from headrace.facts.facts import Warned
from headrace.facts.kept_settings import CONFIG, configs_until
from headrace.facts.recorder import Recorder
from headrace.facts.records import METRICS
from headrace.facts.waits import Lasting
from headrace.loop.checkpoints import Checkpoints
from headrace.loop.recovery import SavedRun, discard_superseded, open_journal
from headrace.processes.health.live_status import LiveStatus, parts_of, write_live

LOCK = ".lock"

PATIENCE = 3.0
"""Seconds for which a run tries to get its lock. `headrace status` holds it for microseconds, or longer on a busy machine."""


class RunDirectory:
    """The directory of a run, locked while open. The lock belongs to the open file, so a killed process leaves none behind.

    A new directory holds no run before `begin`. If `begin` is never called, everything that was created is removed again, but for the logs
    that say why.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self._made = [folder for folder in (path, *path.parents) if not folder.exists()]
        with _writable(path):
            path.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(path / LOCK)
        if self._lock is None:
            raise ConfigError(f"another process is training in {path}: wait until it ends, or choose another name")
        self.begun = (path / CONFIG).exists()
        """Whether the directory holds a run."""
        try:
            with _writable(path):
                self.logs.mkdir(exist_ok=True)
        except BaseException:  # a notebook keeps the error, and with it this object and its lock
            self.close()
            raise

    @classmethod
    def of(cls, path: Path, resume: bool) -> RunDirectory:
        """Opens or creates the directory; files of a run stay as they are. Raises ConfigError, for instance if the place cannot be
        written, and HeadraceError for a full disk."""
        return cls.reopen(path) if resume else cls.create(path)

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        directory = cls(path)
        try:
            refuse_used(path)
        except ConfigError:
            directory.close()
            raise
        return directory

    @classmethod
    def reopen(cls, path: Path) -> RunDirectory:
        if not (path / CONFIG).exists():
            raise ConfigError(f"{path} is not a run directory (it has no {CONFIG})")
        return cls(path)

    def begin(self, config_toml: str) -> None:
        """Writes the settings. From now on the directory holds a run."""
        replace_file(self.path / CONFIG, config_toml.encode())
        self.begun = True

    def keep_config(self, config_toml: str, step: int) -> None:
        """Writes the settings of a resumed run. The earlier ones are kept beside them (see `configs_until`)."""
        current, until = self.path / CONFIG, self.path / f"config.until-step-{step}.toml"
        later = [path for number, path in configs_until(self.path) if number > step]
        if current.read_text() == config_toml and not later:
            return
        if not until.exists():  # an existing file did the steps before; the settings after it did none
            replace_file(until, (later[0] if later else current).read_bytes())
        for path in later:
            path.unlink(missing_ok=True)  # the steps that they did were set aside
        replace_file(current, config_toml.encode())

    def close(self) -> None:
        if self._lock:
            self._lock.close()

    def _vanish(self, keeps: Callable[[Path], bool]) -> None:
        """Removes everything that was created for a run that never began. `keeps`: which log files stay, if they are not empty."""
        for path in sorted(self.path.rglob("*"), key=lambda path_: -len(path_.parts)):
            with suppress(OSError):
                if path.is_dir():
                    path.rmdir()
                elif path.parent != self.logs or not path.stat().st_size or not keeps(path):
                    path.unlink()
        for path in self._made:
            with suppress(OSError):  # not empty
                path.rmdir()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.path in self._made and not self.begun:
            refused = not isinstance(error, Exception) or isinstance(error, ConfigError)
            self._vanish(lambda log: names(error, log) or not refused)
        self.close()


@contextmanager
def shown_waiting(path: Path, what: str, waited: float) -> Iterator[None]:
    """Keeps a run's directory and shows a wait in `headrace status`, while there is no event loop whose watchdog could. `what`: what the run has waited for
    for so many seconds."""
    with ExitStack() as undo:
        try:
            undo.enter_context(RunDirectory.reopen(path))
        except ConfigError:  # another process has the directory, or nobody can write it: that is what refuses
            parts: Sequence[Path] = ()
        else:
            parts = parts_of(path)
        live = LiveStatus(pid=os.getpid(), written=time.time(), waits=(Lasting("run", what, waited),))
        for part in parts:
            with suppress(OSError, HeadraceError):  # a full disk
                write_live(part, live)
        yield


def refuse_used(path: Path) -> None:
    """Raises ConfigError if the directory holds a run that has begun."""
    started = (b'"RunStarted"' in line for line in read_lines(path / METRICS))
    if holds_records(path) or any(started):
        raise ConfigError(
            f"{path} already holds a run: resume it (headrace train --resume {path}), or choose another name "
            "(--set name=...)"
        )


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        with full_disk_as_error(path):
            yield
    except OSError as error:
        raise ConfigError(
            f"{error.filename or path} cannot be written ({error.strerror}): choose another place for runs (--set out=DIR), or get "
            "write permission there"
        ) from error


def held(path: Path) -> bool:
    """Whether a process has this run open. The operating system releases the lock when a process dies."""
    try:
        file = (path / LOCK).open("rb")
    except OSError:
        return False
    with file:
        return not _take(file, fcntl.LOCK_SH)


def _locked(path: Path) -> IO[Any] | None:
    """The locked file; None if another process holds the lock. Tries again if the file was deleted meanwhile, as after a refused start."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
        if not _take(file, fcntl.LOCK_EX, PATIENCE):
            file.close()
            return None
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()


def _take(file: IO[Any], kind: int, patience: float = 0.0) -> bool:
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        time.sleep(0.02)


# --- The files of one pipeline, opened together
# The files of one pipeline, opened together, and what an earlier process of the same run wrote to them.


_OUTLIVED = (
    "the end of the journal is lost, as after a loss of power, while the log of sampled tokens is not: rollouts that were not in the "
    "checkpoint start again"
)


class Storage:
    """Changes nothing on the disk before `begin`, so that a run that is refused until then stays as it was."""

    def __init__(
        self,
        *,
        run_dir: Path,
        recorder: Recorder,
        checkpoints: Checkpoints,
        flush: bool,
        checkpoint: Path | None = None,
        saved: SavedRun | None = None,
        made_by: Mapping[str, Any] | None = None,
        keep_settings: Callable[[], None] = lambda: None,
        keep_steps: Callable[[int, int], None] = lambda steps, step: None,
        segment: int = SEGMENT,
    ) -> None:
        """`flush`: flush the journal to the disk after every step. `checkpoint`: the one from which the run is resumed. `saved`: None for
        a new run. `made_by`: what the settings of this process mean (`resume_rules.meaning`). `keep_settings` writes the settings of this
        process into the directory; `keep_steps` writes them with another number of steps, from a given step on. `segment`: bytes of a
        segment of the journal."""
        self.run_dir, self._flush, self._keep_settings = run_dir, flush, keep_settings
        self._segment = segment
        self.recorder, self.checkpoints = recorder, checkpoints
        self.checkpoint, self.saved = checkpoint, saved
        self.keep_steps, self.made_by = keep_steps, made_by or {}
        self._open: tuple[Journal, PassLog] | None = None

    def begin(self, outlived: bool = False) -> None:
        """Brings the directory in line with `saved`, and opens it for writing. The order matters: first passes and journal are set aside,
        then the metrics that go with them, and the settings come last. So a run that is killed in between is resumed with its old
        settings, from what was done under them. `outlived`: see `recovery.recover`.

        Raises `HeadraceError` if the disk cannot be written."""
        saved, seconds = self.saved, self.seconds
        step, number = (saved.saved_step, saved.state.passes if saved.state else 0) if saved else (0, 0)
        try:
            if saved:
                remove_parts(self.run_dir)
                discard_superseded(saved, outlived)
            self.recorder.begin()
            self.checkpoints.root.mkdir(exist_ok=True)
            if outlived:
                self.recorder.record(Warned(seconds, _OUTLIVED))
            if message := self.checkpoints.clear():
                self.recorder.record(Warned(seconds, message))
            journal = open_journal(self.run_dir, self._flush, saved, self._segment)
            passes = PassLog(
                self.run_dir, step, lambda sentence: self.recorder.record(Warned(seconds, sentence)), number
            )
            self._open = journal, passes
            self._keep_settings()
        except OSError as error:
            raise write_error(Path(error.filename or self.run_dir), error) from error

    @property
    def begun(self) -> bool:
        return self._open is not None

    @property
    def journal(self) -> Journal:
        assert self._open, "begin first"
        return self._open[0]

    @property
    def passes(self) -> PassLog:
        assert self._open, "begin first"
        return self._open[1]

    @property
    def seconds(self) -> float:
        """Age of the run when this process started, in seconds."""
        return self.saved.seconds if self.saved else 0.0

    @property
    def saved_step(self) -> int:
        """The step of the checkpoint; -1 if there is none."""
        return self.saved.saved_step if self.saved and self.checkpoint else -1

    def close(self) -> None:
        self.recorder.close()
        if self._open:
            self.journal.close()
            self.passes.close()


# --- Logs that an error names -----------------------------------------------------------------------------------------


def names(error: BaseException | None, path: Path) -> bool:
    """Whether the message of the error names the file."""
    return error is not None and any(str(path) in text for text in (str(error), *getattr(error, "__notes__", ())))


@contextmanager
def temporary_logs() -> Iterator[Path]:
    """A directory for what processes print. It is removed in the end, but for the logs that the error names which ended it."""
    directory = Path(tempfile.mkdtemp(prefix="headrace-logs-"))
    try:
        yield directory
    except BaseException as error:
        _remove(directory, error)
        raise
    shutil.rmtree(directory, ignore_errors=True)


def _remove(directory: Path, error: BaseException) -> None:
    kept = {path for path in directory.glob("*.log") if names(error, path)}
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path not in kept:
            path.unlink(missing_ok=True)
    with suppress(OSError):  # logs are left
        directory.rmdir()
