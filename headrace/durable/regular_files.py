"""Files that somebody else has named. A pipe under such a name would be waited for without end, and a device has no end."""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path) -> BufferedReader:
    """Opens a file to read it, without waiting for a writer. Raises OSError if it cannot be opened or is no regular file."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path} is no regular file")
        return open(handle, "rb")  # noqa: PTH123
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: Path, most: int) -> bytes:
    """Returns the content of a file. Raises OSError as `open_regular`, and ValueError for more than `most` bytes."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} has more than {most} bytes")
    return content
