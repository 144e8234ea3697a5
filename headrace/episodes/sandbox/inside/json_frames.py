"""Frames over file descriptors: four bytes of length, then JSON. Nothing is read ahead, since another process may read the next frame."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

_LENGTH = struct.Struct(">I")
MOST = 16 << 20
"""Bytes of a frame."""


def send(descriptor: int, frame: Any) -> None:
    """Raises OSError if nobody reads, and ValueError for a frame that is too long."""
    body = json.dumps(frame).encode()
    if len(body) > MOST:
        raise ValueError(f"a value of more than {MOST:,} bytes")
    rest = memoryview(_LENGTH.pack(len(body)) + body)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def receive(descriptor: int) -> Any:
    """Raises EOFError at the end, and ValueError for what is no frame."""
    (length,) = _LENGTH.unpack(_exactly(descriptor, _LENGTH.size))
    if length > MOST:
        raise ValueError(f"a frame of {length:,} bytes")
    return json.loads(_exactly(descriptor, length))


def _exactly(descriptor: int, count: int) -> bytes:
    parts = []
    while count:
        part = os.read(descriptor, min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
