"""The dispatch of requests to the members of a fleet: which member a request goes to, and how it moves to another."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain

from headrace.core.errors import HeadraceError, PoisonedRequest
from headrace.core.steps import StepOutput
from headrace.core.types import Completion, Request, RolloutKey
from headrace.engine.fleet.member import Attempt, Member
from headrace.engine.request_book import Pending, RequestBook

# --- The member that a request goes to
# One that holds the KV entries of its group's prompt, else the one with the least work.
#
# **Groups stay together, and no member idles beside a queue.** A prompt is computed once where its group is on one member. But if that one has no
# room, a request waits there while others may have room. So a request leaves its group, for a member with room, if
#
#     the tokens that have to be computed again there < the tokens that its own member has to sample before its turn comes:
#                                                       its place in the queue there x the mean length of a completion
#
# Both sides count tokens because an engine computes a given token at least as fast as it samples one: the left side is an upper bound of the cost, in
# the time of the right side. A member has room if it has a free row and KV cache for the request. If none has room, nothing changes: the request
# joins its group. The rule is asked when a request comes (`choose`), and for requests that wait when a member gets room (`next_for`).


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
    """Members that have computed its prompt."""
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
            member = _least_busy([candidate for candidate in self._free if able(candidate)] or found)
        elif not member.has_room(_cost(request, home, member)):
            member = self._beside(request, home, member, [candidate for candidate in self._free if able(candidate)])
        self.settle(request, member)
        return member

    def _beside(self, request: Request, home: _Home, member: Member, free: Iterable[Member]) -> Member:
        """Returns the member that takes a request for which `member`, its best place, has no room."""
        costs = {candidate: cost for candidate in free if candidate.has_room(cost := _cost(request, home, candidate))}
        if not costs or (least := min(costs.values())) >= self._wait(request, member.queue + 1):
            return member
        return _least_busy([candidate for candidate, cost in costs.items() if cost == least])

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
        member.known_rows = b""
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
        longest = max(self._crowded, key=lambda candidate: candidate.queue)
        if longest is member or longest.held:
            return None
        waiting = [(name, attempt) for name, attempt in reversed(longest.attempts.items()) if attempt.waits][:LOOKED_AT]
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
        if home and (spans := pending.sampled.spans):
            home.floor = max(home.floor, spans[-1].version)
        if pending.end and pending.end.stop in ("stop", "length") and pending.sampled:
            self._ended += 1
            length = len(pending.request.prefix) + len(pending.sampled)
            self._mean += (length - self._mean) / min(self._ended, REMEMBERED)


def _able(pending: Pending, home: _Home, without: Member | None) -> Callable[[Member], bool]:
    """Returns whether a member may go on with the request."""
    floor = max([home.floor, *(span.version for span in pending.sampled.spans[-1:])])
    adapter = pending.request.adapter

    def able(member: Member) -> bool:
        return member.serves and member.versions.get(adapter, -1) >= floor and member is not without

    return able


def _at_home(request: Request, home: _Home, able: Callable[[Member], bool]) -> Member | None:
    """The member that has most of what the request needs: its rollout's, else one that has its prompt, if possible with room."""
    own = home.rollouts.get(_turn_of(request)[0])
    if own and able(own):
        return own
    there = home.members = [member for member in home.members if able(member)]
    return next(
        (member for member in there if member.has_room(_cost(request, home, member))), there[0] if there else None
    )


def _cost(request: Request, home: _Home, there: Member) -> int:
    """Tokens that a member would have to compute again."""
    index, turn = _turn_of(request)
    if there is home.rollouts.get(index):
        return 0
    return len(request.prefix) + (len(request.prompt) if turn or there not in home.members else 0)


def _least_busy(members: Sequence[Member]) -> Member:
    """The one with the fewest requests; of several, the one with the fewest tokens, which are counted for these only."""
    fewest = min(len(member.attempts) for member in members)
    return min((member for member in members if len(member.attempts) == fewest), key=lambda member: member.tokens)


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


# --- The requests of a fleet
# Each is on one member at a time; if that leaves the rotation, it goes on elsewhere from its tokens. One that waits in a queue goes to a
# member that has room for it (`dispatch.py`).
#
# **Exactly once.** A token is accepted from the member that has the request now, and only if it was sampled by weights that were live there
# when the request came. Whatever a member sends after it has left is ignored; it comes back after it has dropped its earlier requests
# (`rotation.py`). A request that is taken from a member that stays is not given back to it until that has answered a question asked later: nothing that
# it sent of the request before is under way then.


class Requests:
    def __init__(
        self,
        members: Sequence[Member],
        expel: Callable[[Member, str], None],
        give_up: Callable[[Exception], None],
    ) -> None:
        """`expel`: takes a member out of the rotation. `give_up`: ends the fleet."""
        self._members, self._expel, self._give_up = members, expel, give_up
        self.book = RequestBook()
        self._homes = Homes()
        self._at: dict[str, Attempt] = {}
        self._waiting: dict[str, Pending] = {}
        """Requests that no member can take yet."""
        self._echoes: dict[str, Member] = {}
        """The requests that were taken from a member that stays and may still send something of them."""
        self._listening: set[asyncio.Task[None]] = set()

    async def generate(self, request: Request) -> Completion:
        pending = self.book.enter(request)
        try:
            self._place(pending)
            await pending.done
            if attempt := self._at.get(request.id):
                await attempt.over()
            return pending.so_far()
        finally:
            self._homes.ended(pending)
            self._withdraw(request.id)
            self.book.leave(request.id)

    def _withdraw(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        if attempt := self._at.pop(request_id, None):
            del attempt.member.attempts[request_id]
            _end(attempt)
            self.look_at(attempt.member)

    # -- places -----------------------------------------------------------------------------------------------------------

    def _place(self, pending: Pending) -> None:
        request = pending.request
        member = self._homes.choose(pending, self._members, self._echoes.get(request.id))
        if member is not None:
            self._begin(pending, member)
        elif request.fork:
            pending.fail(
                ValueError(f"request {request.fork.of} is not known; give its tokens as the prompt of a new request")
            )
        else:
            self._waiting[request.id] = pending

    def _begin(self, pending: Pending, member: Member) -> None:
        request = pending.request
        floor, had = member.versions.get(request.adapter, -1), len(pending.sampled)
        attempt = Attempt(pending=pending, member=member, floor=floor, group=group_of(request), had=had)
        self._at[request.id] = member.attempts[request.id] = attempt
        attempt.task = asyncio.get_running_loop().create_task(self._follow(attempt))
        self._homes.changed(member)

    async def _follow(self, attempt: Attempt) -> None:
        try:
            await self._until_over(attempt)
        except Exception as error:  # no other task learns of it: for example, that a member is lost cannot be recorded
            self._give_up(error)

    async def _until_over(self, attempt: Attempt) -> None:
        """The request's tokens and its end are heard in `heard`; here is what else can happen to it."""
        pending, member = attempt.pending, attempt.member
        try:
            end = await member.engine.until_end(pending.rest())
        except (ValueError, PoisonedRequest) as error:
            if self._at.get(pending.request.id) is attempt:
                pending.fail(error)
        except HeadraceError as error:  # the member is lost, as its care finds out as well
            self._expel(member, str(error))
        else:
            if self._at.get(pending.request.id) is attempt:
                pending.finish(end)

    def place_waiting(self) -> None:
        """Called when a member has entered the rotation, or has newer weights."""
        waiting, self._waiting = self._waiting, {}
        for pending in waiting.values():
            self._place(pending)

    def look_at(self, member: Member) -> None:
        """Called when a member has entered the rotation, lost a request, or has new statistics: it gets requests that wait elsewhere."""
        self._homes.changed(member)
        while waiting := self._homes.next_for(member, self._echoes):
            request, before = waiting.pending.request, waiting.member
            del self._at[request.id], before.attempts[request.id]
            _end(waiting)
            self._homes.changed(before)
            self._homes.settle(request, member)
            self._echoes[request.id] = before
            listening = asyncio.get_running_loop().create_task(self._until_silent(waiting))
            self._listening.add(listening)
            listening.add_done_callback(self._listening.discard)
            self._begin(waiting.pending, member)

    async def _until_silent(self, taken: Attempt) -> None:
        """Returns when nothing of a request that was taken from a member can come from there any more."""
        request_id, member = taken.pending.request.id, taken.member
        assert taken.task is not None
        try:
            await asyncio.wait([taken.task])
            with suppress(HeadraceError):  # the member is lost, and its care hears of it
                await member.while_serving(member.engine.stats())
            del self._echoes[request_id]
            if request_id in self._waiting:
                self._place(self._waiting.pop(request_id))
        except Exception as error:  # no other task learns of it
            self._give_up(error)

    def move(self, member: Member) -> tuple[int, int]:
        """Takes all requests away from a member that has left the rotation. Returns their number, and that of the tokens that they go on
        from elsewhere. Forks end: the cache entries that they continued from are there."""
        attempts = list(member.attempts.values())
        member.attempts.clear()
        for attempt in attempts:
            del self._at[attempt.pending.request.id]
            _end(attempt)
        self._homes.changed(member)
        pending = [attempt.pending for attempt in attempts if not attempt.pending.done.done()]
        for pending_request in pending:
            if pending_request.aborted or pending_request.request.fork:
                pending_request.interrupt()
            else:
                self._place(pending_request)
        return len(pending), sum(len(pending_request.sampled) for pending_request in pending)

    # -- from the members ---------------------------------------------------------------------------------------------------

    def heard(self, member: Member, output: StepOutput) -> None:
        rows = output.runs.encoded_rows if output.runs else b""
        others = output.finished or output.details or output.scores
        if others or not rows or rows != member.known_rows:
            names = _names(output)
            accepted = names & member.attempts.keys()
            if not accepted:
                return
            if len(accepted) < len(names):
                output = output.only(accepted)
                rows = b""
            if old := _too_old(output, member.attempts):
                self._expel(member, old)
                return
            member.known_rows = rows
        try:
            self.book.publish(output)
        except Exception as error:  # for example, the journal cannot be written: later tokens would not be in it
            self._give_up(error)
            return
        member.accepted += output.token_count
        self.book.enter_output(output)

    # -- control ------------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Marks all requests: whatever happens to their members, they end."""
        self.book.abort()
        for pending in self._waiting.values():
            pending.interrupt()
        self._waiting.clear()


def _end(attempt: Attempt) -> None:
    """Ends a request at its member. One that has ended there is about to leave by itself."""
    task = attempt.task
    assert task is not None
    if task.done():
        return
    if attempt.pending.end is None:
        task.cancel()
    attempt.member.leaving.add(task)
    task.add_done_callback(attempt.member.leaving.discard)


def _names(output: StepOutput) -> set[str]:
    """Everybody in an output: the ids of its requests."""
    named = {detail.request_id for detail in output.details} | {scores.request_id for scores in output.scores}
    return {*output.requests, *named, *(end.request_id for end in output.finished)}


def _too_old(output: StepOutput, attempts: dict[str, Attempt]) -> str:
    """Returns a sentence if a token is of older weights than were live at the member when its request came, else an empty string."""
    scored = [(scores.request_id, scores.version) for scores in output.scores]
    for name, version in chain(output.versions_of_requests(), scored):
        if version < (floor := attempts[name].floor):
            return f"sampled with version {version} after version {floor} had gone live there"
    return ""
