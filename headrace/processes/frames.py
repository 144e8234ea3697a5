"""Frames on the streams between our own processes: four bytes of length, the lowest first, and a body of so many bytes.

The body is msgpack, but JSON where a confined process may write it (`episodes/sandbox`). Two streams have no frames: the program that plays
tasksets runs in an interpreter without headrace and writes lines of JSON, and tensors follow a frame that has said their size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.core.errors import HeadraceError

if TYPE_CHECKING:  # processes without an event loop read frames too
    import asyncio

_LENGTH = struct.Struct("<I")
HEAD = _LENGTH.size
"""Bytes before each body. They hold its length."""

LONGEST = 1 << 30
"""Most bytes of a body. A row of a million tokens takes 14 MB; a longer frame is an error, or not from headrace. Streams of strangers and of
the user's code have lower limits."""


class FrameTooLong(HeadraceError, ValueError):
    """Raised for a length above the limit, before any byte of the body is read."""


class StreamEnded(ConnectionError):
    """Raised where a stream ends before a frame or in the middle of one."""


def framed(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def length_of(head: bytes, limit: int = LONGEST) -> int:
    """Returns the bytes of the body behind the head. Raises FrameTooLong."""
    (length,) = _LENGTH.unpack(head)
    if length > limit:
        raise FrameTooLong(f"received a message of {length} bytes; the limit is {limit}")
    return int(length)


def read_frame(read: Callable[[int], bytes], limit: int = LONGEST) -> bytes:
    """Returns the body of the next frame. `read` blocks, and returns at most that many bytes: none at the end of the stream.

    Raises StreamEnded, FrameTooLong, and what `read` raises."""
    return _exactly(read, length_of(_exactly(read, HEAD), limit))


def _exactly(read: Callable[[int], bytes], count: int) -> bytes:
    pieces = []
    while count:
        if not (piece := read(count)):
            raise _ended(count)
        pieces.append(piece)
        count -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def receive_frame(
    reader: asyncio.StreamReader, limit: int = LONGEST, heard: Callable[[], object] | None = None
) -> bytes:
    """Returns the body of the next frame. `heard`: is called with each piece of it that arrives, so that the sender of a large frame does not
    count as silent. Raises StreamEnded, FrameTooLong, and OSError."""
    return await _received(reader, length_of(await _received(reader, HEAD, heard), limit), heard)


async def _received(reader: asyncio.StreamReader, count: int, heard: Callable[[], object] | None) -> bytes:
    pieces = []
    while count:
        if not (piece := await reader.read(count)):
            raise _ended(count)
        if heard is not None:
            heard()
        pieces.append(piece)
        count -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _ended(missing: int) -> StreamEnded:
    return StreamEnded(f"the connection ended {missing} bytes too early")
