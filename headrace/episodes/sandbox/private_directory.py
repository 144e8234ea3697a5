"""The private directory of a call: in memory with limits of the kernel, or on the disk and watched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.episodes.sandbox.kernel.namespaces import mount_private
from headrace.episodes.sandbox.kernel.syscalls import unmount
from headrace.episodes.sandbox.sandbox_limits import SandboxLimits
from headrace.processes.health.owned_directory import remove_all


class PrivateDirectory:
    """A directory that is empty at the start of each call. Every call of a process that makes calls has the same path."""

    def __init__(self, path: str, limits: SandboxLimits, *, in_memory: bool) -> None:
        self.path, self._limits, self._in_memory = path, limits, in_memory

    @contextmanager
    def fresh(self) -> Iterator[None]:
        os.mkdir(self.path, 0o700)
        try:
            if self._in_memory:
                mount_private(self.path, self._limits.disk, self._limits.files)
            try:
                yield
            finally:
                if self._in_memory:
                    unmount(self.path)
        finally:
            remove_all(self.path)

    def overfull(self) -> str:
        """Returns what there is too much of. In memory the kernel refuses it; on the disk this is looked at while the call runs."""
        if self._in_memory:
            return ""
        files = size = 0
        try:
            for found in _files(self.path):
                files, size = files + 1, size + found
                if files > self._limits.files:
                    return f"more than {self._limits.files} files"
                if size > self._limits.disk:
                    return f"more than {self._limits.disk:,} bytes of files"
        except PermissionError:
            return "a directory that nobody can look into, which may have any number of files"
        except RecursionError:
            return "directories within each other without end"
        return ""


def _files(path: str) -> Iterator[int]:
    """Yields the size on the disk of each file and directory below, one at a time: there may be very many."""
    try:
        with os.scandir(path) as found:
            for entry in found:
                yield entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    yield from _files(entry.path)
    except PermissionError:
        raise
    except OSError:  # removed meanwhile
        return
