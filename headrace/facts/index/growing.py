"""Arrays that are appended to, or set at places that may lie behind their end."""

from __future__ import annotations

from typing import Any

import numpy as np

START = 256
"""Elements that an array has room for at first."""


class Growing:
    """An array [n] whose room doubles when it is full. The first `n` elements are never moved under a reader: a view stays valid."""

    def __init__(self, dtype: Any) -> None:
        self._room = np.zeros(START, dtype)
        self._count = 0

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
        self._make_room(place + 1)
        with np.errstate(over="ignore"):  # metrics of a version without `headrace.core.rewards` may hold any number
            self._room[place] = value
        self._count = max(self._count, place + 1)

    def extend(self, values: np.ndarray) -> None:
        self.put_all(np.arange(self._count, self._count + len(values)), values)

    def put_all(self, places: np.ndarray, values: np.ndarray) -> None:
        """Sets elements as `put` does. `places` and `values`: [n]."""
        end = int(places.max(initial=-1)) + 1
        self._make_room(end)
        self._room[places] = values
        self._count = max(self._count, end)

    def _make_room(self, count: int) -> None:
        if count > len(self._room):
            room = np.zeros(max(START, 2 * len(self._room), count), self._room.dtype)
            room[: self._count] = self.view
            self._room = room
