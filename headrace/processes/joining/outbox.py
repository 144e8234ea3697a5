"""Segments of a stream, and those that may have to be sent again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from headrace.core.errors import HeadraceError
from headrace.processes.frames import framed

SEGMENT = 1 << 16
"""Most bytes of a segment. A small one is soon complete, so that a slow connection shows that it is alive."""


_COUNT = 8
"""Bytes at the beginning of a segment. They hold the number of bytes that its sender has received, the lowest first."""
LONGEST_BODY = _COUNT + SEGMENT
"""Most bytes of the frame's body that is a segment."""


def segment(piece: bytes, received: int) -> bytes:
    return framed(received.to_bytes(_COUNT, "little") + piece)


def opened(body: bytes) -> tuple[bytes, int]:
    """Returns the piece in a segment, and the bytes that its sender has received. Raises HeadraceError for one that has no piece."""
    if len(body) <= _COUNT:
        raise HeadraceError(f"received a segment of {len(body)} bytes, and the first {_COUNT} are none of its piece")
    return body[_COUNT:], int.from_bytes(body[:_COUNT], "little")


class Outbox:
    """The pieces that were sent and that the other end has not acknowledged."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._acknowledged = 0

    def put(self, data: bytes) -> list[bytes]:
        """Returns the data in pieces, each for one segment."""
        pieces = [data[begin : begin + SEGMENT] for begin in range(0, len(data), SEGMENT)]
        self._pieces += pieces
        return pieces

    def acknowledge(self, received: int) -> None:
        """The other end has received so many bytes in all. Raises HeadraceError if it cannot have."""
        while self._acknowledged < received and self._pieces:
            self._acknowledged += len(self._pieces.popleft())
        if self._acknowledged != received:
            raise HeadraceError(f"{received} bytes are said to be received, and {self._acknowledged} were sent")

    def rest(self) -> Iterator[bytes]:
        """Returns the pieces that the other end has not received, in order."""
        return iter(tuple(self._pieces))
