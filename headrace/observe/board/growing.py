"""Arrays that are appended to, or set at places that may lie behind their end."""

from __future__ import annotations

from typing import Any

import numpy as np

START = 256
"""Elements that an array has room for at first."""


class Growing:
    """An array [n] whose room doubles when it is full. The first `n` elements are never moved under a reader: a view stays valid."""

    def __init__(self, dtype: Any, values: np.ndarray | None = None) -> None:
        self._room = np.zeros(START, dtype) if values is None else values
        self._count = 0 if values is None else len(values)

    def __len__(self) -> int:
        return self._count

    @property
    def view(self) -> np.ndarray:
        """[n] the elements so far."""
        return self._room[: self._count]

    def append(self, value: Any) -> None:
        self.put(self._count, value)

    def put(self, place: int, value: Any) -> None:
        """Sets the element at `place`. Elements between the end and `place` become zeros."""
        if place >= len(self._room):
            room = np.zeros(max(START, 2 * len(self._room), place + 1), self._room.dtype)
            room[: self._count] = self.view
            self._room = room
        self._room[place] = value
        self._count = max(self._count, place + 1)
