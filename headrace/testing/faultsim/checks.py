"""Checks the contracts C1 to C8 at every fact of a simulated run, at every record of its journal, and at its end.

`RunHistory` survives the kills: it knows what was sampled, reported, trained and served in all lives of a run. `Referee` is the observer
of one life: it checks every fact before it is written. Their reference values are in `oracles.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.core.batches import Group
from headrace.core.errors import HeadraceError, StalledError
from headrace.core.steps import StepOutput
from headrace.core.types import Completion
from headrace.durable.journal import LiveRecord, read_journal, read_steps
from headrace.facts.facts import CheckpointSaved, GroupEnded, MemberMoved, StepTrained, TicketDrawn, Warned, WeightsLive
from headrace.facts.records import StepRow, read_metrics
from headrace.loop.buffer import Buffer
from headrace.loop.checkpoints import FILES, Checkpoints, damage, load_controller
from headrace.loop.loop_plan import LoopPlan
from headrace.loop.partial import Interrupts
from headrace.run.run_directory import Storage
from headrace.testing.faultsim.case import Case, GroupShape
from headrace.testing.faultsim.chance import Chance
from headrace.testing.faultsim.chosen_anew import ChosenAnew
from headrace.testing.faultsim.engine_worker import TICKET_DEATHS, Truth
from headrace.testing.faultsim.faults import Disk, Fault, rot, rot_journal
from headrace.testing.faultsim.kept_notes import KeptNotes
from headrace.testing.faultsim.oracles import (
    Admission,
    Counts,
    WatchedBuffer,
    WatchedJournal,
    aged,
    check_tokens,
    fate_of,
    of_rollouts,
    oldest,
    one_age,
    records_in,
    trained_in,
)
from headrace.testing.faultsim.scorer import AskedScores
from headrace.testing.faultsim.trainer_worker import SKIPPED, WEIGHTS


class RunHistory:
    """The events of all lives of a run."""

    def __init__(self, shape: GroupShape, remembers: bool = True, several: bool = False) -> None:
        """`remembers`: whether it exists in all lives of the run, rather than in one. `several`: engines."""
        self._shape = shape
        self.truth = Truth(remembers=remembers, several=several)
        self.trained: dict[int, tuple[tuple[int, str], ...]] = {}
        """The trained tickets and prompts, by step."""
        self.killed = self.facts = 0
        self.from_sums = 0
        """Lives that went on from the sums of their checkpoint, rather than from all facts."""
        self.stopped: list[str] = []
        self.befell: list[Fault] = []
        self.reached: Counter[str] = Counter()
        """The number of tokens that the controller has received, by request."""
        self.admitted: dict[int, int] = {}
        """The version that was live when a ticket was drawn, by ticket."""
        self.journal: WatchedJournal | None = None
        """The journal of the latest life."""
        self.passes_lost = False
        """Whether a disk was full or lost power: tokens received then are sampled again."""
        self.lost_power = False
        """Whether power was lost since the journal was opened last."""
        self.changes = False
        """Whether training settings were changed, and no life has begun with them yet."""
        self.rotten = False
        """Whether a record of the journal was damaged, and no life has begun without it yet."""
        self.damaged = False
        """Whether that happened just before this life."""
        self._spoiled: set[tuple[str, int]] = set()
        """Damaged checkpoints: their names, and when they were sealed."""
        self.given_up, self.outcomes = set[int](), list[GroupEnded]()
        """Innocent tickets that were given up: too many others ended their engines."""
        self.scores = AskedScores()
        self.notes = KeptNotes()
        self.weights = ""
        """The trainer's weights at the end."""

    # -- while it runs --------------------------------------------------------------------------------------------------

    def received(self, output: StepOutput) -> None:
        """Counts the tokens of an engine output."""
        for name, token, _, version in output.sampled():
            self.truth.accepted(name, (token, version))
            self.reached[name] += 1

    def meanwhile(self, directory: Path, faults: Sequence[Fault]) -> None:
        """Applies the faults that happen between two lives."""
        self.damaged = False
        sealed = Checkpoints(directory / "checkpoints", 2).all()
        good = [path for path in sealed if not self.is_spoiled(path)]
        assert not (wrong := [message for path in good if (message := damage(path))]), f"C7: {wrong}"
        for fault in faults:
            self.changes |= fault.kind == "change"
            if fault.kind == "rot" and fault.share >= 0.5:
                first = load_controller(good[-1]).journal if good else 0
                self.damaged |= rot_journal(directory, fault.share * 2 - 1, first)
            elif fault.kind == "rot" and len(good) > 1:
                self._spoiled.add(_sealed(good[-1]))
                rot(good.pop(), fault.share * 2)
        self.rotten |= self.damaged

    def is_spoiled(self, checkpoint: Path) -> bool:
        return _sealed(checkpoint) in self._spoiled

    def opens(self, storage: Storage, counts: Counts) -> None:
        """Checks C7: a kill costs no record of the journal, and no step that was reported."""
        saved, before = storage.saved, self.journal
        if saved is None or before is None or not self.truth.remembers:
            return
        found, written = counts.end, before.counts.end
        least = min(written, before.flushed) if self.lost_power else written
        if saved.rewinds or self.changes or self.rotten:
            least = min(least, saved.position)
            if (
                saved.rewinds
            ):  # set aside by this process; else by one that was killed while doing so, perhaps not all of it
                written = min(written, saved.position)
            self._forget(saved.step)
        assert least <= found <= written, f"C7: {written} records were written, {least} are safe, and {found} are there"
        for step, taken in self.trained.items():
            tickets = tuple(ticket for ticket, _ in taken)
            assert counts.steps.get(step) == tickets, f"C7: step {step} was reported, and is not in the journal"
        self.admitted = {ticket: version for ticket, version in self.admitted.items() if ticket in counts.drawn}
        self.lost_power = False

    def _forget(self, step: int) -> None:
        """Forgets everything after this step, which was set aside."""
        self.trained = {known: taken for known, taken in self.trained.items() if known < step}
        self.truth.served = {version: digest for version, digest in self.truth.served.items() if version <= step}
        self.reached.clear()
        self.notes.forget()

    def resumes(self, storage: Storage, buffer: Buffer, interrupts: Interrupts, plan: LoopPlan) -> None:
        """Checks C7: no token that had reached the controller is sampled again."""
        self.changes = self.rotten = False
        if storage.saved is None or not self.truth.remembers:
            return
        kept = interrupts.tokens.so_far()
        self.truth.places = Counter({name: len(completion.tokens) for name, completion in kept.items()})
        reached, self.reached = self.reached, Counter()
        for name, known in of_rollouts(reached, buffer.in_flight):
            have = len(kept[name].tokens) if name in kept else 0
            assert have >= known or self.passes_lost, f"C7: {name} had {known} tokens, and goes on from {have}"
            self.reached[name] = have
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
        truth = self.truth
        keys = truth.keys.get(group.ticket, {})
        sampled = Counter((key.turn, key.context, tuple(truth.tokens[name])) for name, key in keys.items())
        check_tokens(group, sampled if truth.remembers else None)

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
        replayed = [step.step for step in read_steps(directory)]
        assert replayed == list(range(steps)), f"C8: the journal gives steps {replayed}"
        assert trained_in(directory) == self.trained, "C8: the journal has other steps than were trained"
        for record in read_journal(directory):
            if isinstance(record, LiveRecord):
                self.truth.serves(record.version, record.fingerprint)
        recorded = [fact.report.step for fact in read_metrics(directory) if isinstance(fact, StepRow)]
        # They are not flushed: a loss of power costs some of them.
        assert recorded == list(range(steps)) or self.passes_lost, f"C7: the metrics hold steps {recorded}"

    def trained_all(self, seed: int, count: int) -> None:
        """Checks C7: the trained prompts are those of a run without faults, the first ones that have contrast."""
        expected: set[str] = set()
        ticket = 0
        while len(expected) < count:
            prompt = f"train/{ticket}"
            if fate_of(seed, ticket, prompt, self._shape)[0] == "ready" and ticket not in self.given_up:
                expected.add(prompt)
            ticket += 1
        found = {prompt for step in self.trained.values() for _, prompt in step}
        assert found == expected, f"C7: lost {sorted(expected - found)}, and trained {sorted(found - expected)} instead"


def _sealed(checkpoint: Path) -> tuple[str, int]:
    return checkpoint.name, (checkpoint / FILES).stat().st_mtime_ns


class Referee:
    """Implements `protocols.Observer`."""

    def __init__(self, case: Case, storage: Storage, buffer: WatchedBuffer, history: RunHistory, disk: Disk) -> None:
        self._case, self._storage, self._buffer, self._history, self._disk = case, storage, buffer, history, disk
        self._reached: dict[int, Counter[str]] = {}
        """Tokens received when the journal was flushed, by the number of its records."""
        self._live, self._delivered = -1, -1
        """The live version; and the version that went live last after the start of this life."""
        self._step = 0
        self._interrupts: Interrupts | None = None
        """Set once the run is resumed."""
        self._lost = set[str]()
        """Engines that do not come back."""
        self.journal: WatchedJournal
        self._admission: Admission
        self.saved_step: Callable[[], int]
        """The step of the checkpoint that the run relies on."""
        self._chance: Chance

    def begins(self, chance: Chance) -> None:
        """Starts checking, once the files are open."""
        disk, history, buffer, self._chance = self._disk, self._history, self._buffer, chance
        counts = Counts(records_in(Path(disk.root)))
        history.opens(self._storage, counts)
        self.journal = history.journal = WatchedJournal(self._storage.journal, buffer, counts, lambda: disk.dead)
        self._admission = Admission(self._case.staleness, counts)
        buffer.on_take, self.journal.on_ready, self.journal.on_flush = self._take, self._ready, self._flush
        self.journal.on_record = ChosenAnew(self._case, counts).check

    def record(self, fact: Any) -> None:
        if self._disk.dead:
            return
        self._history.facts += 1
        assert self._buffer.accounting().balance() == 0, f"C2: {self._buffer.accounting()}"
        match fact:
            case MemberMoved(state="lost"):
                self._lost.add(fact.member)
            case TicketDrawn():
                self._drawn(fact)
            case GroupEnded():
                self._ended(fact)
            case StepTrained():
                self._trained(fact)
            case WeightsLive():
                self._goes_live(fact.update.version)
            case Warned():
                assert "with a different result" not in fact.message, f"C7: {fact.message}"
            case CheckpointSaved():
                self._books()
                if fact.error:
                    assert self.saved_step() != fact.step, f"C7: the run counts on step {fact.step}: {fact.error}"
                else:
                    self._checkpoint(fact)
        self._storage.recorder.record(fact)

    def resumes(self, step: int, interrupts: Interrupts, plan: LoopPlan) -> None:
        self._step, self._interrupts = step, interrupts
        self.journal.counts.agree(self._buffer.accounting(), "when the run goes on")
        self._history.resumes(self._storage, self._buffer, interrupts, plan)

    def stops(self, error: HeadraceError) -> None:
        """Checks C6: nobody waits for a fleet of which no engine can come back. (A step and its checkpoint are brought to their end.)"""
        waited = isinstance(error, StalledError) or "had no member for" in str(error)
        excused = any(
            fault.kind.endswith(("hangs", "slow")) or fault.kind in ("jump", "lose") for fault in self._chance.befell
        )
        hopeless = len(self._lost) == self._case.members + self._case.lent
        assert not waited or not hopeless or excused, (
            f"C6: engines {sorted(self._lost)} are lost, and the run waited: {error}"
        )

    # -- tickets ----------------------------------------------------------------------------------------------------------

    def _drawn(self, fact: TicketDrawn) -> None:
        assert fact.ticket in self.journal.counts.drawn, f"C7: ticket {fact.ticket} is reported, and not in the journal"
        self._history.admitted[fact.ticket] = self._live
        self._admission.drawn(fact.ticket, self._step, self._live)

    def _take(self, ticket: int) -> None:
        self._admission.taken(ticket)

    def _ready(self, group: Group) -> None:
        here = group.ticket in self._admission.here
        one_age(group, self._case.mode, self._delivered, here, not self._chance.befell)
        if self._case.overdue == "cancel":
            turns = [turn for rollout in group.scored for turn in rollout.episode.turns]
            first = min(version for turn in turns for version in turn.completion.versions())
            assert first >= self._delivered - self._case.max_lag, f"cancel: ticket {group.ticket} is overdue, and ready"

    def _ended(self, fact: GroupEnded) -> None:
        counts, case, ticket = self.journal.counts, self._case, fact.ticket
        written = counts.ready if fact.outcome == "ready" else counts.ended
        assert ticket in written, f"C7: ticket {ticket} is reported as {fact.outcome}, and not in the journal"
        self._admission.ended(fact)
        self._history.outcomes.append(fact)
        self._history.given_up.discard(ticket)  # in a life whose end was set aside
        if fact.reason not in ("overdue", "interrupted", SKIPPED):
            assert not fact.lost_tokens or self._history.passes_lost, (
                f"C7: ticket {ticket} lost {fact.lost_tokens} tokens"
            )
            expected = fate_of(case.seed, ticket, fact.prompt_id, case.shape.of(fact.rollouts))
            found = fact.outcome, fact.failures
            deaths = sum(fault.kind == "engine_dies" for fault in self._chance.befell) + 2 * len(case.poisoned)
            if case.keeps and expected == ("dropped", found[1]):  # what is kept may give it the contrast that it lacks
                expected = found
            excused = "engine_died" in fact.failures and found != expected and deaths >= TICKET_DEATHS
            self._history.given_up |= {ticket} if excused else set()
            assert excused or found == expected, f"C2: ticket {ticket} ends as {found}, and should as {expected}"
        elif fact.reason != SKIPPED and self._history.truth.remembers:
            limit = self._step - (case.max_lag if fact.reason == "overdue" else 0)
            truth = self._history.truth
            first = oldest(truth.tokens, truth.keys.get(ticket, ()))
            assert first is not None and first < limit, (
                f"C2: ticket {ticket} ends as {fact.reason}, with tokens of {first}"
            )

    # -- steps and weights --------------------------------------------------------------------------------------------------

    def _trained(self, fact: StepTrained) -> None:
        step, tickets = fact.report.step, tuple(group.ticket for group in fact.groups)
        assert self.journal.counts.steps.get(step) == tickets, f"C7: step {step} is reported, and not in the journal"
        lags = [step - version for group in fact.groups for row in group.rows for version in aged(row)]
        assert lags and min(lags) >= 0 and max(lags) <= self._case.max_lag, f"C1: lags {sorted(set(lags))}"
        for group in fact.groups:
            self._admitted(group, step)
        self._step = fact.report.version
        self._admission.trained(tickets, self._step)
        self._history.step(fact)

    def _admitted(self, group: Group, step: int) -> None:
        """Checks the version that was live when a group was admitted, on which the proof in `loop/staleness.py` rests."""
        admitted = self._history.admitted.get(group.ticket)  # None: killed before it was reported
        if admitted is None:
            return
        first = min(version for row in group.rows for version in row.versions)
        assert first >= admitted, f"C4: ticket {group.ticket}, drawn under version {admitted}, has tokens of {first}"
        waits = self._case.overdue == "wait"
        assert not waits or step - admitted <= self._case.max_lag, (
            f"C1: ticket {group.ticket}, drawn under version {admitted}, is trained at step {step}"
        )

    def _goes_live(self, version: int) -> None:
        assert version > self._live, "C4: an older version went live"
        if self._live >= 0:
            assert version in self.journal.counts.live, f"C8: version {version} is live, and not in the journal"
            self._delivered = version
        self._live = version
        self._admission.live(version)
        self._nothing_is_missed()

    def _nothing_is_missed(self) -> None:
        """Checks C7: a checkpoint at this instant would have every token that was received. It is called at swaps, when many requests end
        at once."""
        if self._interrupts is not None:
            kept = self._interrupts.tokens.so_far()
            self._has_all(kept, self._buffer.in_flight, self._history.reached, "a checkpoint would have")

    # -- checkpoints ----------------------------------------------------------------------------------------------------------

    def _books(self) -> None:
        """Checks that the facts give the same counts as the controller (C2)."""
        counted, recorded = self._buffer.accounting(), self._storage.recorder.state.tickets.accounting()
        assert counted == recorded, f"C2: the controller counts {counted}, its facts {recorded}"

    def _flush(self) -> None:
        """Notes the tokens received when the journal is flushed: a checkpoint captures such an instant, and is written later."""
        self._reached[self.journal.flushed] = self._history.reached.copy()

    def _checkpoint(self, fact: CheckpointSaved) -> None:
        """Checks C7: a checkpoint has weights, tickets, journal and tokens of one instant."""
        assert fact.step != self._storage.saved_step, f"C7: the checkpoint of step {fact.step} is written anew"
        path = Path(fact.path)
        self._passes_of()
        state, version = load_controller(path), int((path / WEIGHTS).read_text().split()[0])
        assert version == state.step == fact.step, (
            f"C7: step {fact.step}: weights of {version}, tickets of {state.step}"
        )
        assert state.journal <= self.journal.flushed, f"C7: {state.journal} records, {self.journal.flushed} on the disk"
        counts = self.journal.counts.until(state.journal)
        counts.agree(state.buffer.accounting, f"at the checkpoint of step {fact.step}")
        held = list(state.buffer.in_flight), sorted(group.ticket for group in state.buffer.ready)
        assert held == (counts.flying, sorted(counts.waiting)), f"C7: the checkpoint of step {fact.step} holds {held}"
        assert state.journal in self._reached, (
            f"C7: step {fact.step}: the journal was not flushed at record {state.journal}"
        )
        reached = self._reached[state.journal]
        self._has_all(state.begun, counts.flying, reached, f"the checkpoint of step {fact.step} has")
        self._reached = {
            position: at_position for position, at_position in self._reached.items() if position > state.journal
        }

    def _has_all(
        self, kept: Mapping[str, Completion], tickets: Iterable[int], recorded: Mapping[str, int], what: str
    ) -> None:
        for name, known in of_rollouts(recorded, tickets) if self._history.truth.remembers else ():
            have = len(kept[name].tokens) if name in kept else 0
            assert have >= known, f"C7: {name} had {known} tokens, and {what} {have}"

    def _passes_of(self) -> None:
        """Checks C7: every checkpoint, older ones included, has the file of the passes after it, without which it cannot be used."""
        root, history = Path(self._disk.root), self._history
        good = [path for path in self._storage.checkpoints.all() if not history.is_spoiled(path)]
        missing = [path.name for path in good if not (root / "passes" / f"{path.name}.bin").exists()]
        assert not missing or history.passes_lost or self._disk.was_full, f"C7: there are no passes behind {missing}"
