"""The protocol of a bus."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

LEASE = 12.0
"""Seconds of silence after which the letters of a claimant are given to others: a little more than the run needs to notice that a rollout
host is lost, because it says then which of its tickets hosts may have died of."""


class Posting(NamedTuple):
    """A letter that is to be posted."""

    queue: str
    key: str
    """Its name for those who write and read it. Letters with equal keys are repetitions."""
    body: bytes


class Letter(NamedTuple):
    """A letter that was claimed."""

    id: str
    """The bus's own name for it, which `keep` and `settle` take."""
    key: str
    body: bytes


class Notice(NamedTuple):
    """The newest notice under a name."""

    id: str
    body: bytes


class Bus(Protocol):
    """The messages of one run.

    >>> from headrace.testing.memory_bus import MemoryBus
    >>> async def case():
    ...     bus = MemoryBus()
    ...     await bus.post(Posting("tickets", "12", b"sample this"))
    ...     [letter] = await bus.claim("tickets", "host a", most=4)
    ...     await bus.settle("tickets", [letter.id], then=Posting("answers", "12", b"sampled"))
    ...     return letter.key, await bus.unsettled("tickets"), await bus.unsettled("answers")
    >>> asyncio.run(case())
    ('12', set(), {'12'})
    """

    async def register(self) -> None:
        """Enters the run into the list of runs."""

    async def post(self, posting: Posting) -> None:
        """Returns when the letter will outlast a kill of this process and of the bus."""

    async def claim(self, queue: str, who: str, most: int, wait: float = 0.0) -> list[Letter]:
        """Returns up to `most` letters: those that nobody holds, and those that were not kept for the lease, whoever holds them. A process that
        was started again under its name gets the letters that it held first. Waits up to `wait` seconds for the first one."""

    async def keep(self, queue: str, who: str, ids: Collection[str]) -> None:
        """Extends the lease of letters that `who` holds. Letters that are gone are ignored."""

    async def settle(self, queue: str, ids: Collection[str], then: Posting | None = None) -> None:
        """Removes letters, and posts `then` before that: a kill in between repeats a letter, and loses none. Letters that are gone are
        ignored."""

    async def unsettled(self, queue: str) -> set[str]:
        """Returns the keys of all letters that are in a queue, claimed or not."""

    async def pin(self, name: str, body: bytes) -> None:
        """Replaces the notice under a name."""

    async def newer(self, name: str, than: str = "", wait: float = 0.0) -> Notice | None:
        """Returns the notice under a name if its id is not `than`. Waits up to `wait` seconds for one."""

    async def sign(self, who: str, body: bytes) -> None:
        """Enters `who` into the list of those who are there, or replaces the entry."""

    async def signed(self) -> Mapping[str, bytes]:
        """Returns the list. Entries of the dead stay until `unsign`."""

    async def unsign(self, who: str) -> None: ...

    async def wipe(self) -> None:
        """Removes letters and list. The board stays, so that whoever comes late reads that the run is over."""

    async def close(self) -> None: ...
