"""The sender of weights to an engine that asks for them: the server that it asks, or an engine that has them already.

A server sends to `FANOUT` engines at a time. Over HTTP the others wait until one of these has the version, and are sent to it, which lets them wait in
turn. Over TCP weights travel in pieces, and each engine says where it serves: so the server knows who is sent a piece by whom, and as soon as one
engine has the piece, engines send it, to `FANOUT` others each at a time. It leaves the trainer twice at most, as long as those who have it live.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FANOUT = 2
"""Full copies, or pieces, that a server sends at a time."""


class Relays:
    """Thread-safe. A path names what is sent: all of a version, or a piece of it.

    >>> relays = Relays()
    >>> relays.source("v1/0", "a"), relays.source("v1/0", "b"), relays.source("v1/0", "c")
    ('', '', None)
    >>> relays.joined("v1/0", "a")
    >>> relays.source("v1/0", "c")
    'a'
    """

    def __init__(self) -> None:
        self._sending: dict[str, Counter[str]] = {}
        """The number of askers that each source (empty: this server) sends to, by path."""
        self._peers: dict[str, deque[str]] = {}
        """Addresses of engines that have it, by its path; the one that was named longest ago first."""
        self._change = threading.Condition()

    def joined(self, path: str, address: str) -> None:
        """The engine at that address has it, and sends it to others."""
        with self._change:
            peers = self._peers.setdefault(path, deque())
            if address not in peers:
                peers.append(address)
            self._change.notify_all()

    def lost(self, path: str, address: str) -> None:
        """An engine was sent to that address, and did not get it."""
        with self._change:
            if address in (peers := self._peers.get(path, deque())):
                peers.remove(address)
            self._change.notify_all()

    def forget(self, kept: str, of: str) -> None:
        """Forgets who has what begins with `of`, unless it begins with `kept`."""
        with self._change:
            stays = lambda path: path.startswith(kept) or not path.startswith(of)  # noqa: E731
            self._peers = {path: peers for path, peers in self._peers.items() if stays(path)}
            self._sending = {path: counts for path, counts in self._sending.items() if stays(path)}

    @contextmanager
    def turn(
        self,
        path: str,
        asker: str = "",
        *,
        seconds: float,
        waits: int = 1,
        still: Callable[[], object] = lambda: None,
    ) -> Iterator[str]:
        """Waits for a turn, `waits` times at most so many seconds; then it has come. Yields the address of an engine that sends instead, or an empty
        string: the source, which counts as busy with it until the context ends. `asker`: the address at which the engine that asks serves others;
        empty if it is not known. `still`: called after each of the waits; what it raises ends the waiting."""
        source = None
        for _ in range(waits):
            with self._change:
                found = list[str]()

                def ready(found: list[str] = found) -> bool:
                    found += [] if (one := self.source(path, asker)) is None else [one]
                    return bool(found)

                if self._change.wait_for(ready, seconds):
                    source = found[0]
                    break
            still()
        if source is None:
            source = self._taken(path, "")
        try:
            yield source
        finally:
            self.given_back(path, source)

    def source(self, path: str, asker: str = "") -> str | None:
        """Returns who sends it, and counts that until it is given back; None if all of them are busy."""
        with self._change:
            peers = self._peers.get(path, deque())
            if not asker:
                if self._load(path, "") < FANOUT:
                    return self._taken(path, "")
                peers.rotate(-1)
                return self._taken(path, peers[-1]) if peers else None
            others = [peer for peer in peers if peer != asker] or [""]
            least = min(others, key=lambda peer: self._load(path, peer))
            return self._taken(path, least) if self._load(path, least) < FANOUT else None

    def given_back(self, path: str, source: str) -> None:
        """The source sends it no longer to one of those for whom it was counted."""
        with self._change:
            if self._load(path, source):
                self._sending[path][source] -= 1
            self._change.notify_all()

    def _load(self, path: str, source: str) -> int:
        return self._sending.get(path, Counter[str]())[source]

    def _taken(self, path: str, source: str) -> str:
        with self._change:
            self._sending.setdefault(path, Counter())[source] += 1
            return source
