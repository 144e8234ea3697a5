"""The order in which a server of weights sends to engines over HTTP, and which of them send to others."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

FANOUT = 2
"""Full copies that a server sends at a time."""
PATIENCE = 60.0
"""Seconds in which nothing arrives until a connection counts as broken, and for which a server lets an engine wait for its turn."""


def path_to(name: str, fingerprint: str) -> str:
    return f"/weights/{quote(name, safe='') or '-'}/{fingerprint}"


class Relays:
    """The order in which engines are sent a full copy, and by whom."""

    def __init__(self) -> None:
        self._sending: Counter[str] = Counter()
        self._peers: dict[str, deque[str]] = {}
        """Addresses of engines that have a version, by its path; the one that was named longest ago first."""
        self._change = threading.Condition()

    def joined(self, path: str, url: str) -> None:
        with self._change:
            self._peers.setdefault(path, deque()).append(url)
            self._change.notify_all()

    def forget(self, name: str, newest: str) -> None:
        """Forgets who has other versions of the same."""
        kept, other = path_to(name, newest), path_to(name, "")
        with self._change:
            self._peers = {path: one for path, one in self._peers.items() if path == kept or not path.startswith(other)}

    @contextmanager
    def turn(self, path: str, direct: bool) -> Iterator[str]:
        """Waits for a turn. Yields the address of an engine that sends instead, or an empty string. `direct`: at once, and by nobody else."""
        with self._change:
            busy = lambda: not direct and self._sending[path] >= FANOUT  # noqa: E731
            self._change.wait_for(lambda: not busy() or path in self._peers, PATIENCE / 2)
            other = ""
            if busy() and (peers := self._peers.get(path)):
                other = peers[0]
                peers.rotate(-1)
            self._sending[path] += not other
        try:
            yield other
        finally:
            with self._change:
                self._sending[path] -= not other
                self._sending += Counter()  # forgets what is zero
                self._change.notify_all()
