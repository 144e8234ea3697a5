"""The bounded buffer between inference and training: tickets, slots, the window, and the accounting of every ticket.

A ticket's life:   drawn -> in flight -> ready -> taken -> trained -> (weights live) released
                            in flight -> dropped(reason) | failed(reason)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec
import xxhash

from headrace.algo.recipe_parts import Experience
from headrace.core.batches import Group, RewardsBefore
from headrace.core.types import Prompt, Scored, Struct
from headrace.durable.journal import AnyRecord, DrawnRecord, GoneRecord, LiveRecord, ReadyRecord, SteppedRecord
from headrace.facts.facts import Accounting
from headrace.loop.staleness import StalenessConfig


class BufferState(Struct, frozen=True):
    """The state of the buffer in a checkpoint: finished groups, prompts in flight, and the accounting.

    >>> counted = Accounting(drawn=13, trained=11, in_checkpoint=2)
    >>> saved = BufferState(next_ticket=13, ready=(group,), in_flight={11: prompt}, accounting=counted)
    """

    next_ticket: int
    ready: tuple[Group, ...]
    in_flight: dict[int, Prompt]
    """Prompts by ticket. A resumed run keeps the tickets."""
    accounting: Accounting
    rewards: dict[str, RewardsBefore] = {}
    """The rewards of each prompt so far, by a digest of its question, in runs whose advantage asks for it."""
    experience: dict[str, tuple[Scored, ...]] = {}
    """Good rollouts of each prompt, by that digest, best first; the prompt whose last group is longest ago first (`algo.experience`)."""


def _question(prompt: Prompt) -> str:
    """Returns a digest of what is asked, which is the same in every epoch. An id names one draw; tokens may hold other solved examples each time."""
    asked = msgspec.msgpack.encode((prompt.text, prompt.columns, prompt.images), order="deterministic")
    return xxhash.xxh3_128_hexdigest(asked)


def _asked_alike(prompt: Prompt) -> str:
    """Returns a digest of what the policy saw, for rollouts that are trained behind the same tokens again."""
    return _question(msgspec.structs.replace(prompt, text=repr(prompt.tokens)))


class Buffer:
    """Slots and order enforce C1 (proof in `staleness.py`); counters keep C2. Single-threaded: one asyncio loop.

    >>> buffer = Buffer(StalenessConfig(groups_per_step=1, max_lag=1, window=1), groups_wanted=8)  # two slots
    >>> asyncio.run(buffer.draw())  # returns at once: there is a free slot
    0
    >>> buffer.start(0, prompt)
    >>> buffer.start(1, prompt)  # now a draw waits
    >>> buffer.outstanding
    2
    >>> buffer.put(Group(ticket=1, prompt=prompt, scored=group.scored, rows=group.rows))  # not in the window: 0 is older
    >>> buffer.put(Group(ticket=0, prompt=prompt, scored=group.scored, rows=group.rows))
    >>> [taken.ticket for taken in asyncio.run(buffer.take(1, judge=lambda ready: ready))]
    [0]
    >>> buffer.trained([0], version=1)  # keeps its slot while the engine samples from older weights
    >>> buffer.outstanding, buffer.ready
    (2, (1,))
    >>> buffer.release(1)  # version 1 is live
    >>> buffer.end(1, "dropped", "no_contrast")
    >>> counts = buffer.accounting()
    >>> counts.drawn, counts.trained, counts.dropped, buffer.outstanding
    (2, 1, {'no_contrast': 1}, 0)

    A run that was killed goes on from the state in its checkpoint, with the same tickets:

    >>> resumed = Buffer(StalenessConfig(groups_per_step=1, max_lag=1, window=1), groups_wanted=16)
    >>> resumed.restore(saved)
    >>> resumed.ready, list(resumed.in_flight)
    ((12,), [11])
    """

    def __init__(
        self,
        config: StalenessConfig,
        groups_wanted: int,
        *,
        remembers: bool = False,
        experience: Experience = Experience(),  # noqa: B008
    ) -> None:
        """`groups_wanted`: the number of groups that the whole run trains. No more prompts are drawn than that takes. `remembers`: whether rewards are
        kept by prompt; `experience`: which rollouts are."""
        self._config = config
        self._wanted = groups_wanted
        self._next_ticket = 0
        self._in_flight: dict[int, Prompt] = {}
        """Prompts by ticket."""
        self._ready: dict[int, Group] = {}
        """Groups by ticket, in the order in which they finished."""
        self._taken: dict[int, Group] = {}
        self._trained_not_live: dict[int, int] = {}
        """The version that training a ticket's group made, by ticket."""
        self._drawn = self._trained = 0
        self._dropped: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._rollout_failures: Counter[str] = Counter()
        self._rewards: dict[str, RewardsBefore] | None = {} if remembers else None
        self._keeps = experience
        self._experience: dict[str, tuple[Scored, ...]] = {}
        self._closed = False
        self._sleepers: list[asyncio.Future[None]] = []

    def count(self, record: AnyRecord) -> None:
        """Applies a record of the journal: in a run right after it was written, and again when the run is recovered."""
        match record:
            case DrawnRecord():
                self.start(record.ticket, record.prompt)
            case ReadyRecord():
                self._remember(record.group.ticket, [rollout.reward for rollout in record.group.scored])
                self._keep(record.group)
                self.put(record.group)
            case GoneRecord():
                self._remember(record.ticket, record.rewards)
                self.end(record.ticket, record.outcome, record.reason, record.failures)
            case SteppedRecord(report=report) if report.skipped:
                for ticket in record.tickets:
                    self.end(ticket, "dropped", report.skipped)
            case SteppedRecord():
                self.trained(record.tickets, record.report.version)
            case LiveRecord():
                self.release(record.version)

    # -- the producer's side ------------------------------------------------------------------------------------------

    async def draw(self) -> int | None:
        """Returns the next ticket as soon as a slot is free and the run needs another group; None once the buffer is closed.

        Consumes: nothing yet: `start` takes the slot.
        Waits for: a free slot.
        Unblocked by: `release`, `end`, `want`, `close`; without pacing also `put`.
        """
        await self._until(lambda: self._closed or self._may_draw())
        return None if self._closed else self._next_ticket

    def start(self, ticket: int, prompt: Prompt) -> None:
        """Puts the prompt of the next ticket in flight."""
        assert ticket == self._next_ticket, f"ticket {ticket} is drawn after {self._next_ticket - 1}"
        self._next_ticket += 1
        self._in_flight[ticket] = prompt
        self._drawn += 1

    def _remember(self, ticket: int, rewards: Sequence[float]) -> None:
        """Counts the rewards of a group that is in flight: a ready one has been counted."""
        if self._rewards is not None and ticket in self._in_flight and len(rewards) > 1:
            name = _question(self._in_flight[ticket])
            self._rewards[name] = self._rewards.get(name, RewardsBefore()).after(rewards)

    def rewards_before(self, prompt: Prompt) -> RewardsBefore | None:
        """Returns the rewards that a prompt had in groups that are over, in the order of the journal; None if it is not kept."""
        return None if self._rewards is None else self._rewards.get(_question(prompt), RewardsBefore())

    def _keep(self, group: Group) -> None:
        """Keeps the good rollouts of a finished group, and lets go of those that they are better than."""
        if not self._keeps.rollouts:
            return
        name = _asked_alike(group.prompt)
        if best := self._best((*group.scored, *self._experience.pop(name, ()))):
            self._experience[name] = best
        if len(self._experience) > self._keeps.prompts:
            del self._experience[next(iter(self._experience))]

    def _best(self, rollouts: Sequence[Scored]) -> tuple[Scored, ...]:
        """Returns those to be kept, of equal ones the first."""
        good = [rollout for rollout in rollouts if rollout.reward > self._keeps.above]
        return tuple(sorted(good, key=lambda rollout: -rollout.reward)[: self._keeps.rollouts])

    def with_earlier(self, group: Group) -> Group:
        """Returns a scored group with what is known of earlier groups of its prompt, in the order of the journal: their rewards, and good rollouts."""
        before = self.rewards_before(group.prompt)
        kept: tuple[Scored, ...] = ()
        if self._experience:
            kept = self._experience.get(_asked_alike(group.prompt), ())
        return msgspec.structs.replace(group, before=before, experience=kept)

    def put(self, group: Group) -> None:
        """Makes a group in flight ready."""
        del self._in_flight[group.ticket]
        self._ready[group.ticket] = group
        self._count_failures(failure.reason for failure in group.failures)
        self._notify()

    def end(self, ticket: int, outcome: str, reason: str, failures: Iterable[str] = ()) -> None:
        """Ends a group that will not be trained: its slot is free at once. `failures`: the reasons of its failed rollouts."""
        assert outcome in ("dropped", "failed"), outcome
        place = next(held for held in (self._in_flight, self._ready, self._taken) if ticket in held)
        unfinished = ticket in self._in_flight  # else `put` has counted its failures
        del place[ticket]
        (self._dropped if outcome == "dropped" else self._failed)[reason] += 1
        if outcome == "dropped" and unfinished:
            self._count_failures(failures)
        self._notify()

    # -- the trainer's side -------------------------------------------------------------------------------------------

    async def take(self, count: int, judge: Callable[[Group], Group | None]) -> tuple[Group, ...] | None:
        """Returns the next `count` groups that may be taken, as they become ready; None once the buffer is closed.

        `judge` returns the part of a group that may be trained now, or None if it has ended the group.

        Consumes: ready groups, one at a time, which go back if the buffer is closed before there are `count`.
        Waits for: the next group that lies in the window.
        Unblocked by: `put` of a group, or `end` of the oldest one, behind which others wait; `close`.
        """
        batch: list[Group] = []
        while len(batch) < count:
            await self._until(lambda: self._closed or self._eligible() is not None)
            ticket = self._eligible()
            if self._closed or ticket is None:
                self._ready = {group.ticket: self._taken.pop(group.ticket) for group in batch} | self._ready
                return None
            if group := judge(self._ready[ticket]):
                self._taken[ticket] = self._ready.pop(ticket)
                batch.append(group)
            assert ticket not in self._ready, "a group that is not trained has ended"
        return tuple(batch)

    def take_again(self, tickets: Sequence[int]) -> tuple[Group, ...]:
        """Takes and returns the groups of a step that is in the journal."""
        for ticket in tickets:
            self._taken[ticket] = self._ready.pop(ticket)
        return tuple(self._taken[ticket] for ticket in tickets)

    def trained(self, tickets: Sequence[int], version: int) -> None:
        """Counts groups as trained; their slots stay taken until `release`. `version`: of the weights that the step made."""
        for ticket in tickets:
            del self._taken[ticket]
            self._trained_not_live[ticket] = version
            self._trained += 1

    def release(self, version: int) -> None:
        """Frees the slots of the groups that made this version or an earlier one, when its weights are live."""
        self._trained_not_live = {ticket: made for ticket, made in self._trained_not_live.items() if made > version}
        self._notify()

    def want(self, groups: int) -> None:
        """Changes the number of groups that the whole run trains."""
        self._wanted = groups
        self._notify()

    def close(self) -> None:
        """Ends the run: `draw` and `take` return None from now on."""
        self._closed = True
        self._notify()

    # -- what it knows ------------------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Tickets that hold a slot."""
        return self._inside + len(self._trained_not_live)

    @property
    def in_flight(self) -> dict[int, Prompt]:
        """The prompts whose groups are being generated or scored, by ticket."""
        return dict(self._in_flight)

    @property
    def ready(self) -> tuple[int, ...]:
        """Tickets of finished groups, including those in the current step."""
        return tuple(sorted([*self._ready, *self._taken]))

    @property
    def finished(self) -> tuple[Group, ...]:
        """Groups that wait for a step."""
        return tuple(self._ready.values())

    @property
    def _inside(self) -> int:
        return len(self._in_flight) + len(self._ready) + len(self._taken)

    def accounting(self, in_checkpoint: bool = False) -> Accounting:
        """Returns the counts of C2 at this instant. `in_checkpoint`: count what is in the pipeline as held by a checkpoint."""
        return Accounting(
            drawn=self._drawn,
            trained=self._trained,
            dropped=dict(self._dropped),
            failed=dict(self._failed),
            in_pipeline=0 if in_checkpoint else self._inside,
            in_checkpoint=self._inside if in_checkpoint else 0,
            rollout_failures=dict(self._rollout_failures),
        )

    def state(self) -> BufferState:
        groups = (*self._taken.values(), *self._ready.values())
        counted = self.accounting(in_checkpoint=True)
        earlier = dict(self._rewards or {}), dict(self._experience)
        return BufferState(self._next_ticket, groups, self.in_flight, counted, *earlier)

    def restore(self, state: BufferState, *, same_rewards: bool = True, same_rollouts: bool = True) -> None:
        """`same_rewards`: whether rewards still mean what they did; `same_rollouts`: whether rollouts are sampled as they were, too."""
        assert self._next_ticket == 0, "restore before the first draw"
        counted = state.accounting
        self._next_ticket = state.next_ticket
        self._ready = {group.ticket: group for group in state.ready}
        self._in_flight = dict(state.in_flight)
        self._drawn, self._trained = counted.drawn, counted.trained
        self._dropped, self._failed = Counter(counted.dropped), Counter(counted.failed)
        self._rollout_failures = Counter(counted.rollout_failures)
        if self._rewards is not None and same_rewards:
            self._rewards = dict(state.rewards)
        if self._keeps.rollouts and same_rollouts:
            kept = [(name, best) for name, rollouts in state.experience.items() if (best := self._best(rollouts))]
            self._experience = dict(kept[-self._keeps.prompts :])

    # -- inside -------------------------------------------------------------------------------------------------------

    def _may_draw(self) -> bool:
        config = self._config
        if self._wanted - self._trained - self._inside <= 0:
            return False
        if config.paced:
            return self.outstanding < config.slots
        if len(self._trained_not_live) > config.max_lag * config.groups_per_step:
            return False  # tokens sampled now would be overdue already
        room = not config.stored or len(self._ready) + len(self._in_flight) < config.stored + config.generating
        return room and len(self._in_flight) < config.generating

    def _eligible(self) -> int | None:
        """Returns the ready ticket that is taken next. With pacing, it lies in the window that begins at the oldest ticket not taken."""
        tickets = list(self._ready)
        if self._config.paced and tickets:
            oldest = next(iter(self._in_flight), self._next_ticket)  # they are started in order
            anchor = min(*tickets, oldest)
            tickets = [ticket for ticket in tickets if ticket < anchor + self._config.window]
        return min(tickets, default=None) if self._config.order == "stalest" else next(iter(tickets), None)

    def _count_failures(self, reasons: Iterable[str]) -> None:
        self._rollout_failures.update(reasons)

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition on the buffer. Unblocked by `_notify`, after each change that can fulfil one."""
        while not condition():
            sleeper = asyncio.get_running_loop().create_future()
            self._sleepers.append(sleeper)
            await sleeper

    def _notify(self) -> None:
        for sleeper in self._sleepers:
            if not sleeper.done():
                sleeper.set_result(None)
        self._sleepers.clear()
