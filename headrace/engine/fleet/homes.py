"""The member that a request goes to: the one that holds the KV entries of its group's prompt, else the one with the least work."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.engine.fleet.member import Member
from headrace.engine.request_book import Pending
from headrace.types import Request, RolloutKey

REMEMBERED = 1 << 14
"""Groups and requests whose places are remembered. Older ones are forgotten, which costs a prompt that is computed again."""


@dataclass
class _Home:
    member: Member
    floor: int = -1
    """The newest version that sampled a token of the group: no later turn of it is sampled by an older one (C4)."""


class Homes:
    def __init__(self) -> None:
        self._homes: OrderedDict[object, _Home] = OrderedDict()
        self._hosts: OrderedDict[str, tuple[Member, int]] = OrderedDict()
        """The member of each request, and how often it had left the rotation when the request came to it."""

    def choose(self, pending: Pending, members: Iterable[Member]) -> Member | None:
        """Returns None if no member may go on with the request yet: it would sample with older weights than its last token's. Members are
        looked through only for a group without a home: a fleet may have a thousand."""
        request = pending.request
        if request.fork:
            return self._host(request.fork.of)
        key = _key(request)
        home = self._homes.get(key)
        floor = max([home.floor if home else -1, *pending.versions[-1:]])

        def able(one: Member) -> bool:
            return one.serves and one.versions.get(request.adapter, -1) >= floor

        if home is None or not able(home.member):
            if not (found := list(filter(able, members))):
                return None
            home = self._homes[key] = _Home(_least_busy(found), floor)
            _forget(self._homes)
        self._homes.move_to_end(key)
        self._hosts[request.id] = home.member, home.member.absences
        _forget(self._hosts)
        return home.member

    def _host(self, request_id: str) -> Member | None:
        """The member that holds the KV entries of a request. None if it has been away since, or was never known."""
        member, absences = self._hosts.get(request_id, (None, 0))
        return member if member and member.serves and member.absences == absences else None

    def ended(self, pending: Pending) -> None:
        home = self._homes.get(_key(pending.request))
        if home and pending.versions:
            home.floor = max(home.floor, pending.versions[-1])


def _least_busy(members: Sequence[Member]) -> Member:
    """The one with the fewest requests; of several, the one with the fewest tokens, which are counted for these only."""
    fewest = min(len(one.attempts) for one in members)
    return min((one for one in members if len(one.attempts) == fewest), key=lambda one: one.tokens)


def _key(request: Request) -> object:
    """Requests with equal keys have a prompt in common: those of a group, with all their turns; else those with the same prompt."""
    key = RolloutKey.read(request.id)
    return (key.adapter, key.ticket) if key else (request.adapter, request.prompt)


def _forget(places: OrderedDict[object, _Home] | OrderedDict[str, tuple[Member, int]]) -> None:
    while len(places) > REMEMBERED:
        places.popitem(last=False)
