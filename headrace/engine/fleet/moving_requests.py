"""The requests of a fleet. Each is on one member at a time; if that leaves the rotation, it goes on elsewhere from its tokens. One that waits in a
queue goes to a member that has room for it (`homes.py`).

**Exactly once.** A token is accepted from the member that has the request now, and only if it was sampled by weights that were live there
when the request came. Whatever a member sends after it has left is ignored; it comes back after it has dropped its earlier requests
(`care.py`). A request that is taken from a member that stays is not given back to it until that has answered a question asked later: nothing that
it sent of the request before is under way then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import msgspec

from headrace.core.errors import HeadraceError, PoisonedRequest
from headrace.core.steps import Finished, StepOutput
from headrace.core.types import Completion, Request
from headrace.engine.fleet.homes import Homes, group_of
from headrace.engine.fleet.member import Attempt, Member
from headrace.engine.request_book import Pending, RequestBook


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
        self._decoder = msgspec.msgpack.Decoder(StepOutput)

    async def generate(self, request: Request) -> Completion:
        pending = self.book.enter(request)
        try:
            self._place(pending)
            completion = await pending.done
            if attempt := self._at.get(request.id):
                await attempt.over()
            return completion
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
        floor, had = member.versions.get(request.adapter, -1), len(pending.tokens)
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
            completion = await member.engine.generate(pending.rest())
        except (ValueError, PoisonedRequest) as error:
            if self._at.get(pending.request.id) is attempt:
                pending.fail(error)
        except HeadraceError as error:  # the member is lost, as its care finds out as well
            self._expel(member, str(error))
        else:
            if self._at.get(pending.request.id) is attempt:
                pending.finish(Finished(pending.request.id, completion.stop, completion.error, completion.routing))

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
        for one in pending:
            if one.aborted or one.request.fork:
                one.interrupt()
            else:
                self._place(one)
        return len(pending), sum(len(one.tokens) for one in pending)

    # -- from the members ---------------------------------------------------------------------------------------------------

    def heard(self, member: Member, raw: bytes) -> None:
        output = self._decoder.decode(raw)
        accepted = {name for name in _names(output) if name in member.attempts}
        if not accepted:
            return
        if accepted != _names(output):
            output = _only(output, accepted)
            raw = msgspec.msgpack.encode(output)
        if old := _too_old(output, member.attempts):
            self._expel(member, old)
            return
        try:
            self.book.publish(raw)
        except Exception as error:  # for example, the journal cannot be written: later tokens would not be in it
            self._give_up(error)
            return
        member.accepted += len(output.tokens)
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
    named = {one.request_id for one in output.details} | {one.request_id for one in output.scores}
    return {*output.request_ids, *named, *(one.request_id for one in output.finished)}


def _only(output: StepOutput, names: Iterable[str]) -> StepOutput:
    """The part of an output that belongs to these requests."""
    kept = [place for place, name in enumerate(output.request_ids) if name in names]
    return StepOutput(
        version=output.version,
        request_ids=tuple(output.request_ids[i] for i in kept),
        tokens=tuple(output.tokens[i] for i in kept),
        logprobs=tuple(output.logprobs[i] for i in kept),
        kv_versions=tuple(output.kv_versions[i] for i in kept),
        finished=tuple(one for one in output.finished if one.request_id in names),
        versions=tuple(output.versions[i] for i in kept) if output.versions else (),
        details=tuple(one for one in output.details if one.request_id in names),
        scores=tuple(one for one in output.scores if one.request_id in names),
        mixed=output.mixed,
    )


def _too_old(output: StepOutput, attempts: dict[str, Attempt]) -> str:
    """Returns a sentence if a token is of older weights than were live at the member when its request came, else an empty string."""
    versions = output.versions or (output.version,) * len(output.request_ids)
    labels = [
        *zip(output.request_ids, versions, strict=True),
        *((one.request_id, one.version) for one in output.scores),
    ]
    for name, version in labels:
        if version < (floor := attempts[name].floor):
            return f"sampled with version {version} after version {floor} had gone live there"
    return ""
