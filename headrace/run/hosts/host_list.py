"""The rollout hosts that the run knows of, and their sums, which cost what changes: there may be a thousand hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from headrace.core.reports import TOTALS, EngineStats
from headrace.facts.facts import MemberSample
from headrace.run.hosts.errands import SILENT, HostEntry

SAMPLES = 20
"""Hosts whose statistics are recorded in one second: those of a thousand, every second, would fill a gigabyte in two hours."""


@dataclass
class KnownHost:
    """A rollout host that has signed."""

    entry: HostEntry
    body: bytes
    """The entry as it was written."""
    heard: float
    """The time at which its entry last changed, on the run's clock."""
    rate: float = 0.0
    """Sampled tokens per second between its last two entries."""

    @property
    def is_new(self) -> bool:
        """Whether it has not loaded any weights yet."""
        return self.entry.version < 0


class HostList:
    def __init__(self, session: str) -> None:
        """`session`: that of this process of the run. Entries for others are left out."""
        self._session = session
        self.hosts: dict[str, KnownHost] = {}
        self._gone, self._there = EngineStats(), EngineStats()
        """The totals of hosts that are no longer there, and of those that are."""
        self._versions = Counter[int]()
        self._sample_due, self._sampled = 0.0, -1
        self._changes = 0
        """Number of times that a host has come, gone, or loaded its first weights."""

    def read(self, signed: Mapping[str, bytes], now: float) -> tuple[list[str], bool]:
        """Takes the entries that are signed now. Returns the hosts that have come, and whether any has come or serves another version."""
        came, moved = list[str](), False
        for who, body in signed.items():
            known = self.hosts.get(who)
            if known and known.body == body:
                continue
            try:
                entry = msgspec.msgpack.decode(body, type=HostEntry)
            except msgspec.MsgspecError:  # of another version, which finds that out itself
                continue
            if entry.session != self._session:
                continue
            if known is None:
                self.hosts[who] = KnownHost(entry, body, now)
                self._count(entry, 1)
                self._changes += 1
                came.append(who)
            elif entry.beat != known.entry.beat:
                moved |= entry.version != known.entry.version
                self._renew(known, entry, body, now)
        return came, moved or bool(came)

    def _renew(self, known: KnownHost, entry: HostEntry, body: bytes, now: float) -> None:
        before = known.entry
        if (seconds := now - known.heard) > 0:
            known.rate = max(0, entry.stats.sampled_tokens - before.stats.sampled_tokens) / seconds
        self._changes += (entry.version < 0) != (before.version < 0)
        self._count(before, -1)
        self._count(entry, 1)
        known.entry, known.body, known.heard = entry, body, now

    def missing(self, signed: Collection[str], now: float) -> list[str]:
        """Returns the hosts that leave, have left or are silent."""
        return [
            who
            for who, host in self.hosts.items()
            if host.entry.leaving or who not in signed or now - host.heard > SILENT
        ]

    def part_with(self, who: str) -> KnownHost:
        host = self.hosts.pop(who)
        self._count(host.entry, -1)
        self._gone = _sum(self._gone, host.entry.stats, 1)
        self._changes += 1
        return host

    def _count(self, entry: HostEntry, times: int) -> None:
        self._there = _sum(self._there, entry.stats, times)
        self._versions[entry.version] += times
        if not self._versions[entry.version]:
            del self._versions[entry.version]

    @property
    def stats(self) -> EngineStats:
        """The sums of all hosts that were ever there. Busy seconds are the mean of those that are, so that the engine is idle to the share to
        which they are on average."""
        there = self._there
        return msgspec.structs.replace(
            _sum(self._gone, there, 1),
            busy_seconds=max(0.0, there.busy_seconds) / max(1, len(self.hosts)),
            running=there.running,
            waiting=there.waiting,
            kv_used=max((host.entry.stats.kv_used for host in self.hosts.values()), default=0.0),
            version=min(self._versions, default=-1),
        )

    def samples(self, now: float) -> tuple[MemberSample, ...] | None:
        """Returns the hosts for a record: at once when one has come, gone or begun to serve, else the less often, the more there are. None: not
        now."""
        if self._changes == self._sampled and now < self._sample_due:
            return None
        self._sampled, self._sample_due = self._changes, now + len(self.hosts) / SAMPLES
        return tuple(self._members())

    def _members(self) -> Iterator[MemberSample]:
        for who, host in self.hosts.items():
            yield MemberSample(
                name=who,
                state="away" if host.is_new else "serving",
                version=host.entry.version,
                running=host.entry.stats.running,
                tokens=host.entry.stats.sampled_tokens,
                rate=host.rate,
                absences=0,
                why="it loads its first weights" if host.is_new else "",
            )


_SUMMED = (*TOTALS, "running", "waiting")


def _sum(one: EngineStats, other: EngineStats, times: int) -> EngineStats:
    """Returns one + times * other, of totals and of what runs and waits."""
    return EngineStats(**{name: getattr(one, name) + times * getattr(other, name) for name in _SUMMED})
