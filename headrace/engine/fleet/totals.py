"""Statistics of a fleet: those of its members, as those of one engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from headrace.core.reports import TOTALS, Capabilities, EngineStats
from headrace.engine.fleet.member import Member
from headrace.facts.facts import MemberSample


class Totals:
    """Sums that never decrease, whoever joins, leaves or starts anew."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys(TOTALS, 0.0)
        self._seen: dict[Member, EngineStats] = {}

    def taken(self, members: Sequence[Member]) -> EngineStats:
        """Returns the statistics of the fleet. Its busy seconds are the mean of its members', so that it is idle to the share to which they
        are on average."""
        own = sum(not member.lent for member in members)
        for member in members:
            before, now = self._seen.get(member, EngineStats()), member.stats
            for name in TOTALS:
                more = max(0, getattr(now, name) - getattr(before, name))
                if name != "busy_seconds":
                    self._sums[name] += more
                elif not member.lent:  # whose devices are the trainer's, which is idle meanwhile
                    self._sums[name] += more / own
            self._seen[member] = now
        self._seen = {member: self._seen[member] for member in members}
        serving = [member for member in members if member.serves]
        sums = {name: value if name == "busy_seconds" else round(value) for name, value in self._sums.items()}
        return EngineStats(
            running=sum(member.stats.running for member in serving),
            waiting=sum(member.stats.waiting for member in serving),
            kv_used=max((member.stats.kv_used for member in serving), default=0.0),
            version=min((member.versions.get("", -1) for member in serving), default=-1),
            **sums,  # type: ignore[arg-type]
        )


def samples(members: Iterable[Member]) -> tuple[MemberSample, ...]:
    return tuple(
        MemberSample(
            name=member.name,
            state=member.state,
            version=member.versions.get("", -1),
            running=len(member.attempts),
            tokens=member.stats.sampled_tokens,
            rate=member.rate if member.serves else 0.0,
            absences=member.absences,
            why=member.why,
            lent=member.lent,
        )
        for member in members
    )


def in_common(all_: Sequence[Capabilities]) -> Capabilities:
    """Returns what every one of them can do."""
    kinds = {one.path.partition(" at ")[0] for one in all_}
    arithmetic = all_[0].arithmetic if len({one.arithmetic for one in all_}) == 1 else ""
    flags = [name for name, kind in Capabilities.__annotations__.items() if kind == "bool"]
    each = {name: all(getattr(one, name) for one in all_) for name in flags}
    each["exact"] &= len(kinds) == 1 and len({one.arithmetic for one in all_}) == 1  # a request may change its member
    return msgspec.structs.replace(
        all_[0],
        context_length=min(one.context_length for one in all_),
        adapters=min(one.adapters for one in all_),
        rows=sum(one.rows for one in all_) if all(one.rows for one in all_) else 0,
        kv_tokens=sum(one.kv_tokens for one in all_) if all(one.kv_tokens for one in all_) else 0,
        path=f"{len(all_)} members: {', '.join(sorted(kinds))}",
        arithmetic=arithmetic,
        **each,
    )
