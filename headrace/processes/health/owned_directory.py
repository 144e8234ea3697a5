"""Temporary directories that are removed even where everything that could remove them was killed at once.

Their owner holds a lock on each, which the kernel releases with the owner's last breath. Whoever makes another one first removes those that
nobody holds. Imports only the standard library.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "headrace-own-"


class OwnedDirectory:
    """A new directory. It is removed with `remove`, or after the death of this process."""

    def __init__(self, kind: str) -> None:
        """`kind`: a word of its name. Raises OSError."""
        sweep()
        while True:
            self.path, self._held = tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-"), -1
            try:
                self._held = _hold(self.path)
            except BlockingIOError:  # somebody who found it without an owner is removing it
                continue
            if os.path.isdir(self.path):  # nobody has removed it between these lines
                return
            self._release()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        if self._held >= 0:
            os.close(self._held)
            self._held = -1


def _hold(path: str) -> int:
    """Holds a directory until the returned descriptor is closed, at the latest by the end of this process. Returns -1 where the file system
    knows no locks: then it is never swept. Raises BlockingIOError if somebody else holds it, who sweeps."""
    try:
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        os.close(held)
        if isinstance(error, BlockingIOError):
            raise
        return -1
    return held


def sweep() -> None:
    """Removes the directories of this user that nobody holds any more."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # gone meanwhile, another user's, no directory
            continue
        try:
            if os.fstat(held).st_uid == os.getuid():
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # somebody holds it
            pass
        finally:
            os.close(held)
