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
        self._sending: Counter[str] = Counter()
        """Number of askers whose address is not known that this server sends to, by path."""
        self._peers: dict[str, deque[str]] = {}
        """Addresses of engines that have it, by its path; the one that was named longest ago first."""
        self._by: dict[str, dict[str, str]] = {}
        """The address that each asker is sent it from (empty: by this server), by path and the asker's own address."""
        self._change = threading.Condition()

    def joined(self, path: str, address: str) -> None:
        """The engine at that address has it, and sends it to others."""
        with self._change:
            peers = self._peers.setdefault(path, deque())
            if address not in peers:
                peers.append(address)
            self._by.get(path, {}).pop(address, None)
            self._change.notify_all()

    def lost(self, path: str, address: str, asker: str) -> None:
        """The asker was sent there, and did not get it."""
        with self._change:
            self._by.get(path, {}).pop(asker, None)
            if address in (peers := self._peers.get(path, deque())):
                peers.remove(address)
            self._change.notify_all()

    def forget(self, kept: str, of: str) -> None:
        """Forgets who has what begins with `of`, unless it begins with `kept`."""
        with self._change:
            stays = lambda path: path.startswith(kept) or not path.startswith(of)  # noqa: E731
            self._peers = {path: peers for path, peers in self._peers.items() if stays(path)}
            self._by = {path: askers for path, askers in self._by.items() if stays(path)}

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
        string. `asker`: the address at which the engine that asks serves others; empty if it is not known. `still`: called after each of the waits;
        what it raises ends the waiting."""
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
            with self._change:
                source = self._sends(path, asker)
        try:
            yield source
        except BaseException:
            with self._change:
                self._by.get(path, {}).pop(asker, None)
                self._change.notify_all()
            raise
        finally:
            if not asker and not source:
                with self._change:
                    self._sending[path] -= 1
                    self._sending += Counter()  # forgets what is zero
                    self._change.notify_all()

    def source(self, path: str, asker: str = "") -> str | None:
        """Returns who sends it, and counts that until the asker says that it has it; None if all of them are busy."""
        with self._change:
            peers = self._peers.get(path, deque())
            if not asker:
                if self._sending[path] < FANOUT:
                    return self._sends(path, asker)
                peers.rotate(-1)
                return peers[-1] if peers else None
            by = self._by.setdefault(path, {})
            by.pop(asker, None)  # it asks again
            loads = Counter(by.values())
            others = [peer for peer in peers if peer != asker] or [""]
            least = min(others, key=lambda peer: loads[peer])
            if loads[least] >= FANOUT:
                return None
            by[asker] = least
            return least

    def _sends(self, path: str, asker: str) -> str:
        """Counts that this server itself sends it."""
        if asker:
            self._by.setdefault(path, {})[asker] = ""
        else:
            self._sending[path] += 1
        return ""
