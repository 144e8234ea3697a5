"""The lossless difference of two packed buffers as a stream of bytes.

    4 bytes   `hrd1`
    1         bytes of a value (2 or 4)
    8         bytes of the buffer
    then for each piece of the buffer, in order:
    4         number of values that changed; 0: nothing follows
    4 (1 + w) lengths of the gaps and of each plane of differences, each a frame of zstd
              the frames

A gap is the number of equal values before a change, a byte each; 255 stands for 255 equal values without a change behind them. A plane has one
byte of every change, low bytes first. Numbers are little-endian.

A step of AdamW at a small learning rate changes one value in a hundred of a model in bfloat16, because most changes of the master weights
are smaller than half a unit in the last place. A difference is the exclusive or of two values, so that the same stream leads forward
and back.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import sys
from collections.abc import Iterator
from ctypes import POINTER, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import zstandard

from headrace.core.printing import echo
from headrace.core.weights import Manifest
from headrace.models.resolve import cache_dir
from headrace.native.build import Built, compiled

# --- The search for changes, compiled for this machine (`native/build.py`).
#
# python -m headrace.weight_sync.delta.codec        compiles now (`make demo` and `make setup` do) and prints the result


SOURCE = Path(__file__).parent / "src"


@cache
def built() -> Built:
    """Never raises: without a compiler numpy does the same more slowly."""
    return compiled(SOURCE / "delta.cpp", cache_dir() / "kernels")


# --- Finds the changes between two images of a packed buffer and undoes them
# In C++, or in numpy where nothing could be compiled. Both give the same bytes. `src/delta.cpp` describes gaps and planes.


Bytes = npt.NDArray[np.uint8]
_WORDS = {2: np.uint16, 4: np.uint32}
_END = 255
"""A gap byte that stands for this many equal values without a change behind them."""


class Changes(NamedTuple):
    gaps: Bytes
    planes: tuple[Bytes, ...]
    """The bytes of the differences, least significant first: one array [changes] for each byte of a value."""


class Search(Protocol):
    def find(self, before: Bytes, now: Bytes, width: int) -> Changes:
        """`before`, `now`: [bytes], a multiple of `width` (bytes of a value: 2 or 4). The result is valid until the next call."""

    def apply(self, image: Bytes, changes: Changes, width: int) -> None:
        """Changes the image in place; applied twice, it is what it was. Raises ValueError if the changes lie beyond its end."""


class NumpySearch:
    """Protocol `Search`."""

    def find(self, before: Bytes, now: Bytes, width: int) -> Changes:
        word = _WORDS[width]
        difference = np.bitwise_xor(before.view(word), now.view(word))
        (places,) = np.nonzero(difference)
        between = np.diff(places, prepend=-1) - 1
        empty = between // _END
        gaps = np.full(int(empty.sum()) + len(places), _END, np.uint8)
        gaps[np.cumsum(empty + 1) - 1] = between % _END
        split = difference[places].view(np.uint8).reshape(-1, width)
        return Changes(gaps, tuple(np.ascontiguousarray(split[:, plane]) for plane in range(width)))

    def apply(self, image: Bytes, changes: Changes, width: int) -> None:
        word = _WORDS[width]
        values, change = image.view(word), changes.gaps != _END
        passed = np.cumsum(np.where(change, changes.gaps.astype(np.int64) + 1, _END))
        places = passed[change] - 1
        if len(places) != len(changes.planes[0]) or (len(places) and places[-1] >= len(values)):
            raise ValueError("the changes do not fit into the image")
        values[places] ^= np.stack(changes.planes, axis=1).view(word)[:, 0]


class NativeSearch:
    """Protocol `Search`. Python's lock is released while it works."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._room: list[Bytes] = []
        """Gaps and planes, kept from call to call: fresh pages cost more than the search."""

    def find(self, before: Bytes, now: Bytes, width: int) -> Changes:
        count = len(before) // width
        if len(self._room) <= width or len(self._room[0]) < count:
            self._room = [np.empty(count, np.uint8) for _ in range(1 + width)]
        gaps, planes, used = self._room[0], self._room[1 : 1 + width], c_int64()
        found = self._library.headrace_delta_find(
            *(width, _at(before), _at(now), count), *(_at(gaps), ctypes.byref(used), _pointers(planes))
        )
        return Changes(gaps[: used.value], tuple(plane[:found] for plane in planes))

    def apply(self, image: Bytes, changes: Changes, width: int) -> None:
        gaps, planes = changes
        wrong = self._library.headrace_delta_apply(
            *(width, _at(image), len(image) // width), *(_at(gaps), len(gaps), _pointers(planes), len(planes[0]))
        )
        if wrong:
            raise ValueError("the changes do not fit into the image")


def _at(array: Bytes) -> int:
    return int(array.ctypes.data)


def _pointers(planes: Any) -> Any:
    return (c_void_p * len(planes))(*map(_at, planes))


def search() -> Search:
    """Returns a new one of the fastest kind that this machine has. It serves one thread at a time."""
    library = _library()
    return NativeSearch(library) if library else NumpySearch()


@cache
def _library() -> Any | None:
    path = built().library
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    pointers = POINTER(c_void_p)
    library.headrace_delta_find.restype = c_int64
    library.headrace_delta_find.argtypes = [c_int, *[c_void_p] * 2, c_int64, c_void_p, POINTER(c_int64), pointers]
    library.headrace_delta_apply.restype = c_int
    library.headrace_delta_apply.argtypes = [c_int, c_void_p, c_int64, c_void_p, c_int64, pointers, c_int64]
    return library


# --- codec ------------------------------------------------------------


PIECE = 1 << 23
"""Bytes of the buffer that are encoded at a time: two of them, and the changes between them, stay in the cache."""

LEVEL = 1
"""The level of zstd. Level 3 takes twice as long and saves 2 %."""

_MAGIC = b"hrd1"
_HEAD = struct.Struct("<4sBQ")


class _Piece(NamedTuple):
    width: int
    changed: int
    frames: tuple[memoryview, ...]


@cache
def _compressor() -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)


def width_of(manifest: Manifest) -> int:
    """Returns the bytes of a value, by which a buffer is compared: those of the dtype that most bytes of it have."""
    wide = sum(spec.nbytes for spec in manifest.tensors if spec.dtype in ("float32", "int32"))
    return 4 if 2 * wide > manifest.payload else 2


def encode(before: memoryview, now: memoryview, width: int, limit: int, by: Search | None = None) -> bytes | None:
    """Returns the stream that makes `now` of `before`, or None if it would be longer than `limit` bytes.

    `before`, `now`: [bytes], a multiple of `width`. `by`: the fastest search by default."""
    by, old, new = by or search(), np.frombuffer(before, np.uint8), np.frombuffer(now, np.uint8)
    parts = [_HEAD.pack(_MAGIC, width, len(new))]
    length = len(parts[0])
    for start in range(0, len(new), PIECE):
        piece = _encode_piece(by.find(old[start : start + PIECE], new[start : start + PIECE], width))
        parts += piece
        length += sum(map(len, piece))
        if length > limit:
            return None
    return b"".join(parts)


def _encode_piece(changes: Changes) -> list[bytes]:
    count = len(changes.planes[0])
    if not count:
        return [struct.pack("<I", 0)]
    frames = [_compressor().compress(stream.data) for stream in (changes.gaps, *changes.planes)]
    return [struct.pack(f"<{1 + len(frames)}I", count, *map(len, frames)), *frames]


def apply(image: memoryview, *deltas: bytes, by: Search | None = None) -> None:
    """Applies the streams one after the other, in place. Raises ValueError if one is no stream for this image, which is then spoilt.

    They are applied piece by piece, so that each piece of the image is read once."""
    by, whole = by or search(), np.frombuffer(image, np.uint8)
    readers = [_pieces(memoryview(delta), len(whole)) for delta in deltas]
    for start in range(0, len(whole), PIECE):
        part = whole[start : start + PIECE]
        for pieces in readers:
            if (piece := next(pieces, None)) is None:
                raise ValueError("the delta is shorter than the image")
            if piece.changed:
                by.apply(part, _decode_piece(piece, len(part)), piece.width)
    if any(next(pieces, None) for pieces in readers):
        raise ValueError("the delta is longer than the image")


def _pieces(delta: memoryview, nbytes: int) -> Iterator[_Piece]:
    """Raises ValueError for bytes that are no stream for a buffer of `nbytes`."""
    try:
        magic, width, length = _HEAD.unpack_from(delta)
        if magic != _MAGIC or width not in (2, 4) or length != nbytes:
            raise ValueError(f"these are no changes of a buffer of {nbytes} bytes")
        at = _HEAD.size
        while at < len(delta):
            (count,) = struct.unpack_from("<I", delta, at)
            at += 4
            if not count:
                yield _Piece(width, 0, ())
                continue
            lengths = struct.unpack_from(f"<{1 + width}I", delta, at)
            at += 4 * len(lengths)
            ends = np.cumsum((at, *lengths)).tolist()
            if ends[-1] > len(delta):
                raise ValueError("the delta is cut off")
            yield _Piece(width, count, tuple(delta[a:b] for a, b in itertools.pairwise(ends)))
            at = ends[-1]
    except struct.error as error:
        raise ValueError(f"the delta is cut off ({error})") from None


def _decode_piece(piece: _Piece, room: int) -> Changes:
    gaps, *planes = (_decompressed(frame, room) for frame in piece.frames)
    if any(len(plane) != piece.changed for plane in planes):
        raise ValueError("the planes of the delta differ in length")
    return Changes(gaps, tuple(planes))


def _decompressed(frame: memoryview, room: int) -> Bytes:
    """`room`: the most bytes that it may have; a frame is asked for its size before memory is taken."""
    try:
        if not 0 <= zstandard.frame_content_size(frame) <= room:
            raise ValueError("a frame of the delta is larger than its piece")
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(f"the delta cannot be decompressed ({error})") from None


if __name__ == "__main__":
    found = built()
    echo(f"delta of weights: {found.reason}" + ("" if found.library else "; numpy is used, which is slower"))
    sys.exit(0)
