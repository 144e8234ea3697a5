"""Finds the changes between two images of a packed buffer and undoes them: in C++, or in numpy where nothing could be compiled. Both give
the same bytes. `src/delta.cpp` describes gaps and planes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int, c_int64, c_void_p
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from headrace.weight_sync.delta.build import built

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
