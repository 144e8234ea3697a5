"""Reference values, computed from seeds, facts and records alone, without the code that is checked.

`Counts`: the counts of C2 according to the journal. `Admission`: which tickets may be drawn and taken, and when (C1). `fate_of`: the
outcome of a group. `one_age`: the versions that a group may have, by `partial.mode`.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
import zstandard
from xxhash import xxh3_64_hexdigest

from headrace.core.batches import Group, Row
from headrace.core.types import Episode, RolloutKey, VersionSpan
from headrace.durable.journal import (
    AnyRecord,
    DrawnRecord,
    GoneRecord,
    Journal,
    LiveRecord,
    ReadyRecord,
    SteppedRecord,
    read_steps,
)
from headrace.episodes.rollout import seed_of
from headrace.facts.facts import Accounting, GroupEnded
from headrace.loop.buffer import Buffer
from headrace.loop.staleness import StalenessConfig
from headrace.testing.faultsim.case import GroupShape
from headrace.testing.faultsim.engine_worker import MAX_TOKENS, fate
from headrace.testing.faultsim.scorer import reward_of

MIN_ROLLOUTS = 2
"""Fewest scored rollouts of a group that can have contrast."""


_head = struct.Struct("<4xIQ21x")
"""Bytes of a frame, number of its record."""
_record: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)


def records_in(directory: Path) -> list[tuple[int, AnyRecord]]:
    """Returns the records of all complete frames of the journal with their numbers, whatever their checksums."""
    found = []
    for path in sorted((directory / "journal").glob("*.segment")):
        data, at = path.read_bytes(), 0
        while at + _head.size <= len(data) and at + (frame := _head.unpack_from(data, at))[0] <= len(data):
            body = zstandard.decompress(data[at + _head.size : at + frame[0]])
            found.append((frame[1], _record.decode(body)))
            at += frame[0]
    return found


def trained_in(directory: Path) -> dict[int, tuple[tuple[int, str], ...]]:
    """Returns the trained tickets and prompts by step, according to the journal."""
    steps = read_steps(directory)
    return {step.step: tuple((group.ticket, group.prompt.id) for group in step.groups) for step in steps}


class Counts:
    """The state of every ticket according to a journal, and the sums."""

    def __init__(self, records: Iterable[tuple[int, AnyRecord]] = ()) -> None:
        self.drawn: set[int] = set()
        self.ready: dict[int, None] = {}
        """Ready tickets in order, including those that have ended since."""
        self.ended: set[int] = set()
        self.steps: dict[int, tuple[int, ...]] = {}
        self.live: set[int] = set()
        self.records: list[tuple[int, AnyRecord]] = []
        self._trained = 0
        self._dropped: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        for number, record in records:
            self.fold(number, record)

    def until(self, position: int) -> Counts:
        """Returns the counts of the records before this number."""
        return Counts((number, record) for number, record in self.records if number < position)

    @property
    def end(self) -> int:
        return self.records[-1][0] + 1 if self.records else 0

    def fold(self, number: int, record: AnyRecord) -> None:
        self.records.append((number, record))
        match record:
            case DrawnRecord():
                self.drawn.add(record.ticket)
            case ReadyRecord():
                self.ready[record.group.ticket] = None
                self._failures.update(failure.reason for failure in record.group.failures)
            case GoneRecord():
                self.ended.add(record.ticket)
                (self._dropped if record.outcome == "dropped" else self._failed)[record.reason] += 1
                if record.ticket not in self.ready:
                    self._failures.update(record.failures)
            case SteppedRecord():
                self.ended.update(record.tickets)
                if reason := record.report.skipped:
                    self._dropped[reason] += len(record.tickets)
                else:
                    self.steps[record.report.step] = record.tickets
                    self._trained += len(record.tickets)
            case LiveRecord():
                self.live.add(record.version)

    @property
    def flying(self) -> list[int]:
        return sorted(self.drawn - self.ended - set(self.ready))

    @property
    def waiting(self) -> list[int]:
        return [ticket for ticket in self.ready if ticket not in self.ended]

    def agree(self, counted: Accounting, when: str) -> None:
        """Checks C2 and C7: exactly the contents of the journal are counted."""
        mine = len(self.drawn), self._trained, self._dropped, self._failed, self._failures
        theirs = counted.drawn, counted.trained, counted.dropped, counted.failed, counted.rollout_failures
        assert mine == theirs, f"C7: {when} the journal counts {mine}, the controller {theirs}"


class WatchedJournal:
    """A journal that checks before every record that exactly the records before it are counted."""

    def __init__(self, journal: Journal, buffer: Buffer, counts: Counts, dead: Callable[[], bool]) -> None:
        self._journal, self._buffer, self.counts, self._dead = journal, buffer, counts, dead
        self.flushed = journal.position
        """Records that survive a loss of power."""
        self.on_ready: Callable[[Group], None] = lambda group: None
        self.on_record: Callable[[AnyRecord], None] = lambda record: None
        self.on_flush: Callable[[], None] = lambda: None

    @property
    def position(self) -> int:
        return self._journal.position

    def write(self, record: AnyRecord) -> None:
        if self._dead():
            return
        self.counts.agree(self._buffer.accounting(), f"before {type(record).__name__}")
        if isinstance(record, ReadyRecord):
            self.on_ready(record.group)
        self.on_record(record)
        number = self._journal.position
        self._journal.write(record)
        self.counts.fold(number, record)

    def flush(self) -> None:
        self._journal.flush()
        if not self._dead():
            self.flushed = self._journal.position
            self.on_flush()


class WatchedBuffer(Buffer):
    """A buffer that reports which tickets the trainer takes, and when."""

    on_take: Callable[[int], None] = staticmethod(lambda ticket: None)

    async def take(self, count: int, judge: Callable[[Group], Group | None]) -> tuple[Group, ...] | None:
        def watched(group: Group) -> Group | None:
            self.on_take(group.ticket)
            return judge(group)

        return await super().take(count, watched)


class Admission:
    """Checks C1 from the facts of one life: tickets in use, the window, the order."""

    def __init__(self, config: StalenessConfig, counts: Counts) -> None:
        self._config = config
        self._flying = dict.fromkeys(counts.flying)
        self._ready = dict.fromkeys(counts.waiting)
        self._restored = frozenset(self._ready)
        """Tickets that were ready at the start; the order in which they were finished is not recorded."""
        self._not_live: dict[int, int] = {}
        """The version that a ticket's group trained, as long as it is not live, by ticket."""
        self._next = len(counts.drawn)
        self.here: set[int] = set()
        """Tickets that were drawn in this life."""

    def drawn(self, ticket: int, step: int, live: int) -> None:
        config = self._config
        self._flying[ticket] = None
        self._next = ticket + 1
        self.here.add(ticket)
        most = (config.max_lag + 1) * config.groups_per_step - (config.window - 1)
        inside = len(self._flying) + len(self._ready)
        if config.overdue == "wait":
            out = inside + len(self._not_live)
            assert out <= most, f"C1: {out} tickets are out, of {most} slots"
            return
        limit = config.in_flight or most
        assert len(self._flying) <= limit, f"C1: {len(self._flying)} groups in flight, of {limit}"
        assert not config.stored or inside <= config.stored + limit, f"C1: {inside} groups wait or are in flight"
        assert step - live <= config.max_lag, f"C1: ticket {ticket} is drawn under version {live}, at step {step}"

    def ended(self, fact: GroupEnded) -> None:
        self._flying.pop(fact.ticket, None)
        self._ready.pop(fact.ticket, None)
        if fact.outcome == "ready":
            self._ready[fact.ticket] = None

    def taken(self, ticket: int) -> None:
        config = self._config
        assert ticket in self._ready, f"C2: ticket {ticket} is taken, and is not ready"
        may = list(self._ready)
        if config.overdue == "wait":
            behind = min([*self._flying, *self._ready, self._next]) + config.window
            assert ticket < behind, f"C1: ticket {ticket} is taken, and the window ends at {behind}"
            may = [ticket_ for ticket_ in may if ticket_ < behind]
        if config.order == "stalest":
            first = min(may)
        else:
            first = next((ticket_ for ticket_ in may if ticket_ in self._restored), may[0])
        either = config.order == "finished" and {ticket, first} <= self._restored
        assert ticket == first or either, f"order: ticket {ticket} is taken, and it was the turn of {first}"
        del self._ready[ticket]

    def trained(self, tickets: Iterable[int], version: int) -> None:
        self._not_live.update(dict.fromkeys(tickets, version))

    def live(self, version: int) -> None:
        self._not_live = {ticket: made for ticket, made in self._not_live.items() if made > version}


def fate_of(seed: int, ticket: int, prompt: str, shape: GroupShape) -> tuple[str, dict[str, int]]:
    """Returns the outcome of a group that is not cancelled, and its failed rollouts by reason. `prompt`: the id."""

    def fails(place: int, first: int = 0) -> bool:
        seeds = [(place, turn) if turn else (place,) for turn in range(first, shape.turns)]
        return any(fate(seed_of(seed, "rollout", ticket, *parts), MAX_TOKENS)[1] for parts in seeds)

    if ticket in shape.poisoned:
        return "failed", {"engine_died": shape.size}
    engine, scored_before, families = 0, 0, list[tuple[int, list[float]]]()
    raised = 0
    for place in range(shape.size):
        if fails(place):
            engine += 1
            continue
        pivot = seed_of(seed_of(seed, "environment", ticket, place), "pivot") % shape.turns
        others = range(shape.size + place * shape.alternatives, shape.size + (place + 1) * shape.alternatives)
        failed = sum(fails(other, pivot) for other in others)
        ends = 1 + shape.alternatives - failed
        rewards = [reward_of(seed, prompt, scored_before + end) for end in range(ends)]
        known = [reward for reward in rewards if reward is not None]
        engine, raised, scored_before = engine + failed, raised + ends - len(known), scored_before + ends
        families += [(pivot, known)] if known else []
    failures = {"engine_error": engine, "reward_raised": raised}
    outcome = "failed" if len(families) < MIN_ROLLOUTS else "ready" if _differ(families) else "dropped"
    return outcome, {reason: count for reason, count in failures.items() if count}


def _differ(families: Sequence[tuple[int, Sequence[float]]]) -> bool:
    """Whether a turn is better or worse than what it is compared with. `families`: of each rollout, the turn at which it branches, and the
    rewards of its ends. The means of rollouts are compared by the turns before that one; a rollout with one end does not branch."""
    means = [fmean(ends) for _, ends in families]
    compared = any(
        pivot or len(ends) == 1 for (pivot, ends), mean in zip(families, means, strict=True) if mean != fmean(means)
    )
    return compared or any(len(set(ends)) > 1 for _, ends in families)


def one_age(group: Group, mode: str, delivered: int, here: bool, quiet: bool) -> None:
    """Checks the versions of a group that becomes ready, as `partial.mode` promises them. `delivered`: the version that went live last in
    this life, not counting its start; `here`: whether the group began in this life; `quiet`: whether this life had no fault."""
    completions = [turn.completion for rollout in group.scored for turn in rollout.episode.turns]
    versions = [completion.versions() for completion in completions]
    message = f"{mode}: ticket {group.ticket} has tokens of versions {versions}"
    if mode == "barrier" and here:
        assert len({version for of_turn in versions for version in of_turn}) <= 1, message
    if mode == "drain" and here and quiet:
        assert all(len(set(of_turn)) <= 1 for of_turn in versions), message
    if mode == "cancel_group":
        assert min((version for of_turn in versions for version in of_turn), default=delivered) >= delivered, (
            f"{message}, at {delivered}"
        )
    if mode in ("barrier", "drain", "abort_resume", "save_resume"):
        assert not any(map(_over_older, _spans(completions))), (
            f"{mode}: ticket {group.ticket} was sampled over an older cache"
        )


def _spans(completions: Sequence[Any]) -> Iterator[VersionSpan]:
    for completion in completions:
        yield from completion.spans


def _over_older(span: VersionSpan) -> bool:
    return span.kv_version < span.version


def context_mark(prompt: Sequence[int], before: Sequence[int]) -> str:
    """Returns the mark of the tokens `before` a turn in its key: a 64-bit hash of them as 8-byte integers; empty for the prompt alone."""
    return "" if tuple(prompt) == tuple(before) else xxh3_64_hexdigest(np.asarray(before, "<i8").tobytes())


SampledTurn = tuple[int, str, tuple[tuple[int, int], ...]]
"""Number, mark of the context, and tokens with their versions."""


def ends_of(episode: Episode) -> list[list[int]]:
    """Returns the numbers of the turns of each path through an episode, in the order of their last turns."""
    path_to: dict[int, list[int]] = {}
    for number, turn in enumerate(episode.turns):
        path_to[number] = [*(path_to[turn.parents[0]] if turn.parents else []), number]
    followed = {turn.parents[0] for turn in episode.turns if turn.parents}
    return [path for number, path in path_to.items() if number not in followed]


def turns_of(group: Group, episode: Episode) -> Iterator[SampledTurn]:
    """Yields the turns of a rollout, those that its ends share once."""
    seen: set[int] = set()
    for end in ends_of(episode):
        before: tuple[int, ...] = ()
        for number, place in enumerate(end):
            turn, done = episode.turns[place], episode.turns[place].completion
            before += turn.context
            if place not in seen:
                mark = context_mark(group.prompt.tokens, before)
                yield number, mark, tuple(zip(done.tokens, done.versions(), strict=True))
            before += done.tokens
        seen.update(end)


def check_tokens(group: Group, sampled: Counter[SampledTurn] | None) -> None:
    """C4, C5. `sampled`: the turns that engines have sampled for the group; None if that is not known."""
    rows = iter(group.rows)
    for rollout in group.scored:
        for found in turns_of(group, rollout.episode) if sampled is not None else ():
            assert sampled and sampled[found], (
                f"C5: ticket {group.ticket} trains {found}, which nobody sampled: {sampled}"
            )
            sampled[found] -= 1
        begins = {rollout.episode.turns[branch.first].context for branch in rollout.branches}
        assert len(begins) < 2, f"C7: the ends of a rollout of ticket {group.ticket} begin after different messages"
        trained: set[int] = set()
        for end in ends_of(rollout.episode):
            row = next(rows)
            assert list(row.versions) == sorted(row.versions), f"C4: versions of ticket {group.ticket} decrease"
            check_row(row, rollout.episode, end, trained)
    assert next(rows, None) is None, f"C5: ticket {group.ticket} has a row of no episode"


def check_row(row: Row, episode: Episode, end: Sequence[int], trained: set[int]) -> None:
    """C5: what was sampled, and nothing else, may be in the loss, and that once. `end`: the turns of the row; `trained`: those of rows before
    it, to which they are added."""
    tokens: list[int] = []
    sampled: list[bool] = []
    fresh: list[bool] = []
    for place in end:
        turn = episode.turns[place]
        context = turn.context if turn.parents else ()
        fresh += [place not in trained] * (len(context) + len(turn.completion.tokens))
        tokens += [*context, *turn.completion.tokens]
        sampled += [False] * len(context) + [True] * len(turn.completion.tokens)
    logprobs = tuple(-token / 100 if own else 0.0 for token, own in zip(tokens, sampled, strict=True))
    assert row.tokens == tuple(tokens), f"C5: a row has the tokens {row.tokens} where its episode has {tokens}"
    assert row.logprobs == logprobs, "C5: other log-probs than sampled"
    assert not any(kept and not own for kept, own in zip(row.mask, sampled, strict=True)), "C5: context is trained"
    assert not any(kept and not new for kept, new in zip(row.mask, fresh, strict=True)), "C5: a turn is trained twice"
    trained.update(end)


def oldest(tokens: Mapping[str, list[tuple[int, int]]], names: Iterable[str]) -> int | None:
    """Returns the version of the oldest token that an engine sampled for these requests."""
    return min((version for name in names for _, version in tokens.get(name, ())), default=None)


def of_rollouts(reached: Mapping[str, int], tickets: Iterable[int]) -> Iterator[tuple[str, int]]:
    """The requests of these groups, with the tokens that the controller received."""
    among = set(tickets)
    for name, tokens in reached.items():
        if (key := RolloutKey.read(name)) and key.ticket in among:
            yield name, tokens


def aged(row: Row) -> list[int]:
    """The versions of the tokens that are trained."""
    return [version for version, kept in zip(row.versions, row.mask, strict=True) if kept]
