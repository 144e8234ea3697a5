"""`runs/<name>/`: one run, one directory, one process at a time.

config.toml        the resolved settings
metrics.jsonl      every fact, one JSON line each
journal.jsonl      what became of every ticket, complete
passes/            what the engine sampled since the last checkpoint
checkpoints/       see checkpoint.py
logs/              what the worker processes printed
status.json        who waits for whom at this moment, see observe/status.py
report.html
"""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from headrace.config import RunConfig, dump_config
from headrace.errors import ConfigError
from headrace.observe.files import read_lines
from headrace.observe.journal import JOURNAL
from headrace.observe.records import METRICS

LOCK = ".lock"

PATIENCE = 0.3
"""Seconds that a run tries to get its lock: one who asks for its status holds it for microseconds."""


class RunDirectory:
    """Locked while open. The lock belongs to the open file: a killed run leaves none behind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self._lock = (path / LOCK).open("a")
        if not _take(self._lock, fcntl.LOCK_EX, PATIENCE):
            self._lock.close()
            raise ConfigError(f"another process is training in {path}: wait for it, or choose another name")
        self.checkpoints.mkdir(exist_ok=True)
        self.logs.mkdir(exist_ok=True)

    @classmethod
    def of(cls, path: Path, config: RunConfig, resume: bool) -> RunDirectory:
        return cls.reopen(path) if resume else cls.create(path, dump_config(config))

    @classmethod
    def create(cls, path: Path, config_toml: str) -> RunDirectory:
        path.mkdir(parents=True, exist_ok=True)
        directory = cls(path)
        try:
            refuse_used(path)
        except ConfigError:
            directory.close()
            raise
        (path / METRICS).unlink(missing_ok=True)  # of one that was refused at its start
        (path / "config.toml").write_text(config_toml)
        return directory

    @classmethod
    def reopen(cls, path: Path) -> RunDirectory:
        if not (path / "config.toml").exists():
            raise ConfigError(f"{path} is not a run directory (it has no config.toml)")
        return cls(path)

    def keep_config(self, config_toml: str, step: int) -> None:
        """The settings that a resumed run goes on with; those until then stay beside them (`configs_until` reads them)."""
        current, until = self.path / "config.toml", self.path / f"config.until-step-{step}.toml"
        later = [path for number, path in configs_until(self.path) if number > step]
        if current.read_text() == config_toml and not later:
            return
        if not until.exists():  # one that is there did the steps before; what came after it did none
            (later[0] if later else current).rename(until)
        for path in later:
            path.unlink(missing_ok=True)  # what they did after that was set aside
        current.write_text(config_toml)

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def refuse_used(path: Path) -> None:
    """Raises ConfigError where a run has begun there."""
    started = (b'"RunStarted"' in line for line in read_lines(path / METRICS))
    if any(read_lines(path / JOURNAL)) or any(started):
        raise ConfigError(
            f"{path} already holds a run: go on with it (headrace train --resume {path}), or choose another name "
            "(--set name=...)"
        )


def configs_until(path: Path) -> list[tuple[int, Path]]:
    """The earlier settings of a run: each those of the optimizer steps before that number (and from the one before on)."""
    found = path.glob("config.until-step-*.toml")
    return sorted((int(one.stem.removeprefix("config.until-step-")), one) for one in found)


def held(path: Path) -> bool:
    """Whether some process has this run open. The operating system keeps the lock, so it is true of the living only."""
    try:
        file = (path / LOCK).open("rb")
    except OSError:
        return False
    with file:
        return not _take(file, fcntl.LOCK_SH)


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
