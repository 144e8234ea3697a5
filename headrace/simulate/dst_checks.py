"""The contracts C1 to C7, checked at every fact of a simulated run, and at its end.

`Ledger` outlives the kills: it knows what was sampled, told, trained and served in all lives of a run. `Referee` is the observer
of one life: it looks at every fact before it is written.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from headrace.buffer import Buffer
from headrace.observe.facts import CheckpointSaved, StepTrained, Warned, WeightsLive
from headrace.observe.journal import Live, read_journal, read_steps
from headrace.observe.recorder import Recorder
from headrace.orchestration.checkpoint import Checkpoints
from headrace.orchestration.parts import Plan
from headrace.orchestration.recovery import Past
from headrace.partial import Interrupts
from headrace.rollout import name_of, seed_of
from headrace.simulate.dst_engine import Truth, fate
from headrace.simulate.dst_scorer import reward_of
from headrace.simulate.dst_trainer import WEIGHTS
from headrace.simulate.faults import Disk, Fault
from headrace.staleness import StalenessConfig
from headrace.steps import StepOutput
from headrace.types import Group, Row

_output = msgspec.msgpack.Decoder(StepOutput)


class Ledger:
    """What happened in all lives of a run."""

    def __init__(self, group_size: int, remembers: bool = True) -> None:
        """`remembers`: whether this one is there in all lives of the run, and not in one of them."""
        self._group_size = group_size
        self.truth = Truth(remembers=remembers)
        self.trained: dict[int, tuple[tuple[int, str], ...]] = {}
        """By step: tickets and prompts."""
        self.killed = self.facts = 0
        self.stopped: list[str] = []
        self.befell: list[Fault] = []
        self._reached: Counter[str] = Counter()
        """By request: tokens that the controller was told."""
        self.passes_lost = False
        """Whether a disk was full: what was told then is sampled again."""
        self.weights = ""
        """Of the trainer, at the end."""

    # -- while it runs --------------------------------------------------------------------------------------------------

    def told(self, output: bytes) -> None:
        """What is in the passes by now."""
        told = _output.decode(output)
        self._reached.update(told.request_ids)

    def resumes(self, past: Past | None, buffer: Buffer, interrupts: Interrupts, plan: Plan) -> None:
        """C7: nothing that had reached the controller is sampled again."""
        if past is None or not self.truth.remembers:
            return
        kept = interrupts.so_far()
        for ticket in buffer.in_flight:
            for name in plan.names(ticket):
                have = len(kept[name].tokens) if name in kept else 0
                known = self._reached[name]
                assert have >= known or self.passes_lost, f"C7: {name} had {known} tokens, and goes on from {have}"
                self._reached[name] = have
        for name, completion in kept.items():
            sampled = self.truth.tokens.get(name, [])
            pairs = list(zip(completion.tokens, completion.versions(), strict=True))
            assert pairs == sampled[: len(pairs)], f"C5: {name} goes on from other tokens than were sampled"

    def step(self, fact: StepTrained) -> None:
        taken = tuple((group.ticket, group.prompt.id) for group in fact.groups)
        known = self.trained.setdefault(fact.report.step, taken)
        assert known == taken, f"C7: step {fact.report.step} trained {known}, and then {taken}"
        for group in fact.groups:
            self._check_tokens(group)

    def _check_tokens(self, group: Group) -> None:
        """C4, C5"""
        names = [name_of("", group.ticket, place) for place in range(self._group_size)]
        sampled = Counter(tuple(self.truth.tokens.get(name, ())) for name in names)
        for row in group.rows:
            assert list(row.versions) == sorted(row.versions), f"C4: versions of ticket {group.ticket} decrease"
            found = tuple(zip(row.tokens, row.versions, strict=True))
            assert sampled[found] or not self.truth.remembers, (
                f"C5: ticket {group.ticket} trains {found}, which nobody sampled: {sampled}"
            )
            assert row.logprobs == tuple(-token / 100 for token in row.tokens), "C5: other log-probs than sampled"
            sampled[found] -= 1

    # -- at the end -----------------------------------------------------------------------------------------------------

    def finish(self, directory: Path, steps: int, groups: int) -> None:
        assert sorted(self.trained) == list(range(steps)), f"C7: steps {sorted(self.trained)} of {steps} were trained"
        prompts = [prompt for step in sorted(self.trained) for _, prompt in self.trained[step]]
        assert len(prompts) == steps * groups
        twice = [prompt for prompt, times in Counter(prompts).items() if times > 1]
        assert not twice, f"C7: {twice} were trained twice"
        newest, _ = Checkpoints(directory / "checkpoints", 2).newest_good()
        whole = newest is not None and newest.name == f"step-{steps:06d}"
        assert newest and whole, f"C7: the run is finished, and its newest checkpoint is {newest}"
        self.weights = (newest / WEIGHTS).read_text()
        assert trained_in(directory) == self.trained, "C8: the journal has other steps than were trained"
        for record in read_journal(directory):
            if isinstance(record, Live):
                self.truth.serves(record.version, record.fingerprint)

    def trained_all(self, seed: int, count: int) -> None:
        """C7: the prompts of a run in which nothing goes wrong: the first ones that have something to teach."""
        expected: set[str] = set()
        ticket = 0
        while len(expected) < count:
            if _teaches(seed, ticket, self._group_size):
                expected.add(f"train/{ticket}")
            ticket += 1
        found = {prompt for step in self.trained.values() for _, prompt in step}
        assert found == expected, f"C7: lost {sorted(expected - found)}, and trained {sorted(found - expected)} instead"


def trained_in(directory: Path) -> dict[int, tuple[tuple[int, str], ...]]:
    """As the journal tells it. By step: tickets and prompts."""
    steps = read_steps(directory)
    return {one.step: tuple((group.ticket, group.prompt.id) for group in one.groups) for one in steps}


def _teaches(seed: int, ticket: int, size: int) -> bool:
    whole = sum(not fate(seed_of(seed, "rollout", ticket, place), 6)[1] for place in range(size))
    rewards = [reward_of(seed, f"train/{ticket}", place) for place in range(whole)]
    return len({reward for reward in rewards if reward is not None}) > 1


class Referee:
    """Implements `protocols.Observer`."""

    def __init__(
        self, recorder: Recorder, buffer: Buffer, ledger: Ledger, staleness: StalenessConfig, disk: Disk
    ) -> None:
        self._disk = disk
        self._recorder, self._buffer, self._ledger = recorder, buffer, ledger
        self._bound = staleness.lag_bound
        self._live = -1

    def record(self, fact: Any) -> None:
        if self._disk.dead:
            return
        self._ledger.facts += 1
        assert self._buffer.accounting().balance() == 0, f"C2: {self._buffer.accounting()}"
        match fact:
            case StepTrained():
                self._step(fact)
            case WeightsLive():
                assert fact.update.version > self._live, "C4: an older version went live"
                self._live = fact.update.version
            case Warned():
                assert "came out otherwise" not in fact.message, f"C7: {fact.message}"
            case CheckpointSaved():
                self._books()
        self._recorder.record(fact)

    def _step(self, fact: StepTrained) -> None:
        lags = [fact.report.step - version for group in fact.groups for row in group.rows for version in _aged(row)]
        assert lags and min(lags) >= 0 and max(lags) <= self._bound, f"C1: lags {sorted(set(lags))}"
        self._ledger.step(fact)

    def _books(self) -> None:
        """C2, as a reader of the facts can tell it."""
        counted, told = self._buffer.accounting(), self._recorder.state.tickets.accounting()
        assert counted == told, f"C2: the controller counts {counted}, its facts {told}"


def _aged(row: Row) -> list[int]:
    return [version for version, kept in zip(row.versions, row.mask, strict=True) if kept]
