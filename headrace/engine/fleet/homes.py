"""The member that a request goes to: one that holds the KV entries of its group's prompt, else the one with the least work.

**Groups stay together, and no member idles beside a queue.** A prompt is computed once where its group is on one member. But if that one has no
room, a request waits there while others may have room. So a request leaves its group, for a member with room, if

    the tokens that have to be computed again there < the tokens that its own member has to sample before its turn comes:
                                                      its place in the queue there x the mean length of a completion

Both sides count tokens because an engine computes a given token at least as fast as it samples one: the left side is an upper bound of the cost, in
the time of the right side. A member has room if it has a free row and KV cache for the request. If none has room, nothing changes: the request
joins its group. The rule is asked when a request comes (`choose`), and for requests that wait when a member gets room (`next_for`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field

from headrace.core.types import Request, RolloutKey
from headrace.engine.fleet.member import Attempt, Member
from headrace.engine.request_book import Pending

REMEMBERED = 1 << 14
"""Groups and requests whose places are remembered. Older ones are forgotten, which costs a prompt that is computed again."""

LOOKED_AT = 16
"""Requests of a queue that are looked at for one that may leave it: the newest, which have the longest to wait."""


@dataclass
class _Home:
    """The places of a group."""

    floor: int
    """The newest version that sampled a token of the group: no later turn of it is sampled by an older one (C4)."""
    members: list[Member] = field(default_factory=list)
    """Those that have computed its prompt."""
    rollouts: dict[int, Member] = field(default_factory=dict)
    """The member that holds the tokens of each rollout, by index."""


class Homes:
    def __init__(self) -> None:
        self._homes: OrderedDict[object, _Home] = OrderedDict()
        self._hosts: OrderedDict[str, tuple[Member, int]] = OrderedDict()
        """The member of each request, and how often it had left the rotation when the request came to it."""
        self._free: dict[Member, None] = {}
        """Members with a free row."""
        self._crowded: dict[Member, None] = {}
        """Members where requests wait for a row."""
        self._ended, self._mean = 0, 0.0
        """Number and mean length of the completions that have ended."""

    def choose(self, pending: Pending, members: Iterable[Member], without: Member | None = None) -> Member | None:
        """Returns None if no member may go on with the request yet: it would sample with older weights than its last token's. Members are
        looked through only for a group without a home, and for one whose home has no room: a fleet may have a thousand. `without`: one that is
        not to have it."""
        request = pending.request
        if request.fork:
            return self._host(request.fork.of)
        home = self._homes.setdefault(group_of(request), _Home(-1))
        able = _able(pending, home, without)
        member = _at_home(request, home, able)
        if member is None:
            if not (found := list(filter(able, members))):
                return None
            member = _least_busy([one for one in self._free if able(one)] or found)
        elif not member.has_room(_cost(request, home, member)):
            member = self._beside(request, home, member, [one for one in self._free if able(one)])
        self.settle(request, member)
        return member

    def _beside(self, request: Request, home: _Home, member: Member, free: Iterable[Member]) -> Member:
        """Returns the member that takes a request for which `member`, its best place, has no room."""
        costs = {one: cost for one in free if one.has_room(cost := _cost(request, home, one))}
        if not costs or (least := min(costs.values())) >= self._wait(request, member.queue + 1):
            return member
        return _least_busy([one for one, cost in costs.items() if cost == least])

    def _wait(self, request: Request, place: int) -> float:
        """Tokens that a member samples until the turn of a request comes that has this place in its queue."""
        return place * (self._mean or request.sampling.max_tokens)

    def settle(self, request: Request, member: Member) -> None:
        """Notes the member that has the request from now on."""
        group, index = group_of(request), _turn_of(request)[0]
        home = self._homes.setdefault(group, _Home(-1))
        if member not in home.members:
            home.members.append(member)
        if index >= 0:
            home.rollouts[index] = member
        self._homes.move_to_end(group)
        _forget(self._homes)
        self._hosts[request.id] = member, member.absences
        _forget(self._hosts)

    # -- queues -----------------------------------------------------------------------------------------------------------

    def changed(self, member: Member) -> None:
        """The member has entered the rotation or left it, got a request or lost one, or has new statistics."""
        for members, holds in (
            (self._free, not member.rows or len(member.attempts) < member.rows),
            (self._crowded, member.is_crowded),
        ):
            if member.serves and holds:
                members[member] = None
            else:
                members.pop(member, None)

    def next_for(self, member: Member, without: Container[str]) -> Attempt | None:
        """Returns a request that waits in the longest queue and begins sooner at this member, if that has room; none of those `without`."""
        if member not in self._free or not self._crowded or member.held:
            return None
        longest = max(self._crowded, key=lambda one: one.queue)
        if longest is member or longest.held:
            return None
        waiting = [(name, one) for name, one in reversed(longest.attempts.items()) if one.waits][:LOOKED_AT]
        for place, (name, attempt) in enumerate(waiting):
            if name not in without and self._gains(attempt, member, max(1, longest.queue - place)):
                return attempt
        return None

    def _gains(self, attempt: Attempt, member: Member, place: int) -> bool:
        """Whether a request that has this place in its queue begins sooner at `member`."""
        request, home = attempt.pending.request, self._homes.get(attempt.group)
        if request.fork or home is None or not _able(attempt.pending, home, None)(member):
            return False
        cost = _cost(request, home, member)
        return cost < self._wait(request, place) and member.has_room(cost)

    # -- requests that were here ------------------------------------------------------------------------------------------

    def _host(self, request_id: str) -> Member | None:
        """The member that holds the KV entries of a request. None if it has been away since, or was never known."""
        member, absences = self._hosts.get(request_id, (None, 0))
        return member if member and member.serves and member.absences == absences else None

    def ended(self, pending: Pending) -> None:
        home = self._homes.get(group_of(pending.request))
        if home and pending.versions:
            home.floor = max(home.floor, pending.versions[-1])
        if pending.end and pending.end.stop in ("stop", "length") and pending.tokens:
            self._ended += 1
            length = len(pending.request.prefix) + len(pending.tokens)
            self._mean += (length - self._mean) / min(self._ended, REMEMBERED)


def _able(pending: Pending, home: _Home, without: Member | None) -> Callable[[Member], bool]:
    """Returns whether a member may go on with the request."""
    floor, adapter = max([home.floor, *pending.versions[-1:]]), pending.request.adapter

    def able(one: Member) -> bool:
        return one.serves and one.versions.get(adapter, -1) >= floor and one is not without

    return able


def _at_home(request: Request, home: _Home, able: Callable[[Member], bool]) -> Member | None:
    """The member that has most of what the request needs: its rollout's, else one that has its prompt, if possible with room."""
    own = home.rollouts.get(_turn_of(request)[0])
    if own and able(own):
        return own
    there = home.members = [one for one in home.members if able(one)]
    return next((one for one in there if one.has_room(_cost(request, home, one))), there[0] if there else None)


def _cost(request: Request, home: _Home, there: Member) -> int:
    """Tokens that a member would have to compute again."""
    index, turn = _turn_of(request)
    if there is home.rollouts.get(index):
        return 0
    return len(request.prefix) + (len(request.prompt) if turn or there not in home.members else 0)


def _least_busy(members: Sequence[Member]) -> Member:
    """The one with the fewest requests; of several, the one with the fewest tokens, which are counted for these only."""
    fewest = min(len(one.attempts) for one in members)
    return min((one for one in members if len(one.attempts) == fewest), key=lambda one: one.tokens)


def _turn_of(request: Request) -> tuple[int, int]:
    """The numbers of the rollout in its group, and of the turn in it; -1 and 0 for a request of none."""
    key = RolloutKey.read(request.id)
    return (key.index, key.turn) if key else (-1, 0)


def group_of(request: Request) -> object:
    """Requests of equal ones have a prompt in common: those of a group, with all their turns; else those with the same prompt."""
    key = RolloutKey.read(request.id)
    return (key.adapter, key.ticket) if key else (request.adapter, request.prompt)


def _forget(places: OrderedDict[object, _Home] | OrderedDict[str, tuple[Member, int]]) -> None:
    while len(places) > REMEMBERED:
        places.popitem(last=False)
