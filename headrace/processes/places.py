"""The table of places where a run's workers may run. Each states its own facts (`worker_place.py`)."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.processes.joining.joined import JoinPlace
from headrace.processes.launch.local import LocalPlace
from headrace.processes.placed.ray_cluster import RayPlace
from headrace.processes.worker_place import WorkerPlace

_ALL: tuple[WorkerPlace, ...] = (LocalPlace(), JoinPlace(), RayPlace())
"""All places, a line each."""

PLACES = {place.name: place for place in _ALL}
"""The places by the value of `orchestration.kind`."""


def kinds_elsewhere() -> str:
    """The setting by which engines are on other machines, in words.

    >>> kinds_elsewhere()
    'orchestration.kind = "join" or "ray"'
    """
    return f"orchestration.kind = {quoted(place.name for place in PLACES.values() if place.elsewhere)}"


def quoted(names: Iterable[str]) -> str:
    """
    >>> quoted(["a", "b", "c"])
    '"a", "b" or "c"'
    """
    *others, last = (f'"{name}"' for name in names)
    return f"{', '.join(others)} or {last}" if others else last
