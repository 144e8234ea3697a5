"""The file with the address at which agents elsewhere reach a run."""

from __future__ import annotations

import os
from pathlib import Path


class AddressFile:
    """It is there while the run can be reached. One that a killed process of the run has left names nobody, and is removed."""

    def __init__(self, path: Path) -> None:
        self._path, self._published = path, False
        path.unlink(missing_ok=True)

    def publish(self, address: str) -> None:
        """Writes the address, once, as a whole file that nobody else can read."""
        if self._published:
            return
        part = self._path.with_name(f"{self._path.name}.part")
        part.unlink(missing_ok=True)
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(handle, f"{address}\n".encode())
        finally:
            os.close(handle)
        part.rename(self._path)
        self._published = True

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
