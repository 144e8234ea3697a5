"""Temporary directories that are removed even where everything that could remove them was killed at once.

Their owner holds a lock on each, which the kernel releases with the owner's last breath. Whoever makes another one first removes those that
nobody holds. Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
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
        remove_all(self.path)
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
                remove_all(str(path))
        except OSError:  # somebody holds it
            pass
        finally:
            os.close(held)


def remove_all(path: str) -> None:
    """Removes a directory in which nobody works any more, whatever programs have left there: directories that cannot be read or written (a cache
    of Go has none that can), and thousands within each other. What cannot be removed stays."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    if os.path.islink(path) or not os.path.isdir(path):
        return
    with contextlib.suppress(OSError):
        os.chmod(path, 0o700)
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _empty(top)
        finally:
            os.close(top)
        os.rmdir(path)


def _empty(top: int) -> None:
    """Empties an open directory. What lies in a directory within it is moved up before that is removed, so that no path gets long."""
    prefix, count = secrets.token_hex(8), 0
    while names := os.listdir(top):
        for name in names:
            if not _is_open_directory(name, top):
                os.unlink(name, dir_fd=top)
                continue
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
            try:
                for child in os.listdir(inner):
                    _is_open_directory(child, inner)  # only one that can be written may be moved
                    os.rename(child, f"{prefix}{count}", src_dir_fd=inner, dst_dir_fd=top)
                    count += 1
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=top)


def _is_open_directory(name: str, within: int) -> bool:
    """Whether the entry is a directory, which may be read and written from now on."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=within, follow_symlinks=False).st_mode):
        return False
    os.chmod(name, 0o700, dir_fd=within)
    return True
