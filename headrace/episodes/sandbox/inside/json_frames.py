"""Frames of JSON over file descriptors (`processes/frames.py`). Nothing is read ahead, since another process may read the next frame."""

from __future__ import annotations

import json
import os
from typing import Any

from headrace.processes.frames import framed, read_frame

MOST = 16 << 20
"""Bytes of a frame."""
PIECE = 1 << 20
"""Bytes that room is made for at once: the other end may say a length and send nothing."""


def send(descriptor: int, frame: Any) -> None:
    """Raises OSError if nobody reads, and ValueError for a frame that is too long."""
    body = json.dumps(frame).encode()
    if len(body) > MOST:
        raise ValueError(f"a value of more than {MOST:,} bytes")
    rest = memoryview(framed(body))
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def receive(descriptor: int) -> Any:
    """Raises StreamEnded (an OSError) at the end, and ValueError for what is no frame."""
    return json.loads(read_frame(lambda count: os.read(descriptor, min(count, PIECE)), MOST))
