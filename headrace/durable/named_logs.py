"""Logs that an error names: they are there when the message is read, also where a start was refused and everything else of it is removed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


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
