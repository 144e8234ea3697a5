"""Restores a run to the moment at which it was killed, from its newest checkpoint and the files written after that (C7).

The checkpoint holds the state between two steps. The journal after it records every later change of a ticket: these are applied to the
real buffer and the real task again, and the trainer repeats the steps (`Pipeline.redo`). The passes after it hold the tokens that were
sampled for unfinished groups. If settings on which a step depends have changed, or if the journal is damaged, the run is resumed from
the checkpoint alone, and everything later is set aside. First everything is read (`read_saved_run`, `recover`); the disk is changed only
when the run is ready to begin (`discard_superseded`, `open_journal`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.reports import TrainReport, differing
from headrace.core.steps import Finished, StepOutput, Transcript, write_down
from headrace.core.types import Completion, Request, RolloutKey
from headrace.durable.journal import (
    AnyRecord,
    Damage,
    DrawnRecord,
    GoneRecord,
    Journal,
    JournalDamaged,
    JournalReader,
    JournalStep,
    ReadyRecord,
    SteppedRecord,
    count_steps,
    cut_journal,
    end_of_journal,
    read_journal,
)
from headrace.durable.pass_log import PassNote, discard_passes, read_passes
from headrace.durable.segments import JOURNAL, SEGMENT
from headrace.episodes.rollout_session import Notebook
from headrace.facts.records import Resume
from headrace.loop.buffer import Buffer
from headrace.loop.checkpoints import UNCHANGED, ChangedSettings, ControllerState, carried_over
from headrace.loop.curriculum import Curriculum
from headrace.loop.loop_plan import LoopPlan
from headrace.loop.partial import Interrupts, joined


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """The saved state of a run that is resumed, as read from its directory. `discard_superseded` removes the rest from there."""

    run_dir: Path
    state: ControllerState | None
    """The controller's state in the checkpoint, with what of its rollouts goes on; None if there is no checkpoint."""
    records: tuple[AnyRecord, ...]
    """The journal's records after the checkpoint."""
    complaints: tuple[str, ...] = ()
    rewinds: bool = False
    """Whether everything after the checkpoint is set aside."""
    lost: int = 0
    """Number of records before the checkpoint that the end of the journal lacks."""
    changed: ChangedSettings = UNCHANGED
    """The settings that were others when the checkpoint was made."""

    @property
    def saved_step(self) -> int:
        """The step of the checkpoint; 0 if there is none."""
        return self.state.step if self.state else 0

    @property
    def position(self) -> int:
        """Number of the first record that is not in the checkpoint."""
        return self.state.journal if self.state else 0

    @property
    def step(self) -> int:
        """Number of optimizer steps done when the run was killed."""
        done = [record.report.version for record in self.records if isinstance(record, SteppedRecord)]
        return max([self.saved_step, *done])

    @property
    def resume(self) -> Resume:
        """Says which part of the metrics belongs to the state that is restored."""
        buffer = self.state.buffer if self.state else None
        flying = set(buffer.in_flight) if buffer else set()
        ready = {group.ticket for group in buffer.ready} if buffer else set()
        drawn = buffer.next_ticket if buffer else 0
        for record in self.records:
            match record:
                case DrawnRecord():
                    flying.add(record.ticket)
                    drawn = record.ticket + 1
                case ReadyRecord():
                    flying.discard(record.group.ticket)
                    ready.add(record.group.ticket)
                case GoneRecord():
                    flying.discard(record.ticket)
                    ready.discard(record.ticket)
                case SteppedRecord():
                    ready.difference_update(record.tickets)
        restarts = self.rewinds and self.state is None
        saved = self.state.step if self.state else None
        return Resume(
            step=self.step,
            saved=saved,
            next_ticket=drawn,
            flying=frozenset(flying),
            ready=frozenset(ready),
            anew=restarts,
        )

    @property
    def outdated(self) -> dict[int, tuple[str, ...]]:
        """The groups of the checkpoint that were made under other settings, by ticket, with the names of these settings."""
        if self.state is None:
            return {}
        changed, heat = self.changed, tuple(name for name in self.changed.anew if name == "rollout.temperature")
        found = {
            group.ticket: changed.groups or heat
            for group in self.state.buffer.ready
            if changed.groups or (heat and not all(row.temperature for row in group.rows))  # an earlier version's
        }
        return found | {ticket: changed.prompts for ticket in self.state.buffer.in_flight if changed.prompts}

    @property
    def seconds(self) -> float:
        """Age of the run at that moment, in seconds."""
        known = [self.state.seconds if self.state else 0.0, *(record.t for record in self.records)]
        return max(known)


def read_saved_run(
    run_dir: Path,
    state: ControllerState | None,
    reproducible: bool,
    changed: ChangedSettings = UNCHANGED,
    max_tokens: int = 1 << 62,
) -> SavedRun:
    """`reproducible`: whether repeating the journaled steps under the current settings gives the same results. `changed`: the settings that
    were others when the checkpoint was made; `max_tokens`: the most tokens of a completion now. Changes nothing on the disk."""
    damage = Damage()
    position = state.journal if state else 0
    end = end_of_journal(run_dir, damage, position)
    nothing = state is None and not end and not damage
    records: tuple[AnyRecord, ...] = ()
    behind, lost = [] if reproducible else [_CHANGED], max(0, position - end)
    try:
        if reproducible:
            records = tuple(read_journal(run_dir, position))
    except JournalDamaged as error:
        behind, damage = [str(error)], Damage()  # reported once is enough
    messages = [f"{complaint}: {_from_where(state)}, and everything after it is set aside" for complaint in behind]
    if nothing:
        messages = []
    if lost:
        messages.append(_lost(run_dir, state, lost))
    elif damage:
        messages.append(
            f"the journal in {run_dir / JOURNAL} is damaged: {damage}. The run itself is complete; only replay, inspect and diff will lack these records"
        )
    if state:
        state, more = carried_over(state, changed, max_tokens)
        messages += more
    return SavedRun(
        run_dir=run_dir,
        state=state,
        records=records,
        complaints=tuple(messages),
        rewinds=bool(behind or lost),
        lost=lost,
        changed=changed,
    )


_CHANGED = "settings of training have changed"


def _from_where(state: ControllerState | None) -> str:
    return f"the run is resumed from {f'step {state.step}' if state else 'its start'}"


def _lost(run_dir: Path, state: ControllerState | None, lost: int) -> str:
    assert state is not None, "only a checkpoint shows that records are lost"
    last = count_steps(run_dir)
    steps = f"steps {last + 1} to {state.step}" if last + 1 < state.step else f"step {state.step}"
    trained = f": {steps} cannot be replayed, inspected or compared" if last < state.step else ""
    return (
        f"the end of the journal is lost ({lost} records before the checkpoint of step {state.step}), as after a loss of power"
        f"{trained}. {_from_where(state)[0].upper()}{_from_where(state)[1:]}, whose weights and groups are complete"
    )


def discard_superseded(saved: SavedRun, outlived: bool) -> None:
    """Sets aside what `saved` does not contain. It may be killed between any two operations: the passes are removed first, because
    without their journal they would be attributed to other tickets. `outlived`: see `recover`."""
    if saved.rewinds or outlived:
        discard_passes(saved.run_dir, saved.saved_step)
    if saved.rewinds:
        cut_journal(saved.run_dir, saved.position)


def open_journal(run_dir: Path, flushes: bool, saved: SavedRun | None, segment: int = SEGMENT) -> Journal:
    """Opens the journal. Lost records that are known from the checkpoint are written again, under their old numbers. `segment`: see
    `Journal`."""
    again = _known_of_lost(saved) if saved and saved.lost else []
    position = saved.position if saved else 0
    journal = Journal(run_dir, flushes, position - len(again), segment)
    for record in again:
        journal.write(record)
    return journal


def _known_of_lost(saved: SavedRun) -> list[AnyRecord]:
    """Records of groups and prompts that are in the checkpoint, but no longer in the journal."""
    state = saved.state
    assert state is not None
    reader = JournalReader(saved.run_dir)
    finished, drawn = reader.keys(ReadyRecord), reader.keys(DrawnRecord)
    groups: list[AnyRecord] = [
        ReadyRecord(state.seconds, group) for group in state.buffer.ready if group.ticket not in finished
    ]
    prompts = {group.ticket: group.prompt for group in state.buffer.ready} | state.buffer.in_flight
    draws: list[AnyRecord] = [
        DrawnRecord(state.seconds, ticket, prompt) for ticket, prompt in prompts.items() if ticket not in drawn
    ]
    return [*draws, *groups][-saved.lost :]


def recover(
    saved: SavedRun,
    curriculum: Curriculum,
    buffer: Buffer,
    interrupts: Interrupts,
    *,
    notebook: Notebook,
    plan: LoopPlan,
) -> tuple[list[JournalStep], bool]:
    """Brings curriculum, buffer, interrupts and notes to the moment of the kill. Returns the steps that the trainer must repeat, and `outlived`: whether
    the passes since the checkpoint cannot be used. That is so if they contain tickets whose records a loss of power removed from the
    journal; these tickets are drawn and sampled again, under the same names.

    Raises ConfigError if the task now draws other prompts."""
    if saved.state:
        rewards, sampling = not saved.changed.groups, not saved.changed.anew
        curriculum.restore(saved.state.task, saved.state.curriculum, same_rewards=rewards)
        buffer.restore(saved.state.buffer, same_rewards=rewards, same_rollouts=rewards and sampling)
    steps = list(_apply(saved.records, curriculum, buffer))
    buffer.release(saved.step)  # what was trained is live as soon as the run begins
    in_flight = buffer.in_flight

    def asked(name: str) -> Request | None:
        key = RolloutKey.read(name)
        if key is None or key.adapter != plan.adapter or key.ticket not in in_flight:
            return None
        return plan.recorded(key) if key.index < plan.rollout.all_of(in_flight[key.ticket]) else None

    begun = _begun(saved, asked, plan.adapter)
    outlived = begun is None
    if begun is None:
        begun = _Begun(_of_checkpoint(saved, asked), _notes_of_checkpoint(saved, asked))
    interrupts.tokens.restore(begun.completions)
    notebook.restore(begun.notes)
    return steps, outlived


def _apply(records: Iterable[AnyRecord], curriculum: Curriculum, buffer: Buffer) -> Iterator[JournalStep]:
    for record in records:
        match record:
            case DrawnRecord():
                found, _ = curriculum.draw(record.ticket)
                if found.tokens != record.prompt.tokens:
                    raise ConfigError(
                        f"the task draws the prompt {found.id} instead of {record.prompt.id}, which it drew before the run was killed: its "
                        "data have changed. Restore them, or start a new run"
                    )
            case SteppedRecord():
                yield JournalStep.of(record, buffer.take_again(record.tickets))
        buffer.count(record)
        curriculum.count(record)


Asked = Callable[[str], Request | None]
"""The request of that name, where a rollout in flight asked for it: a turn is known from its key alone, however many there are."""


def unlike(step: JournalStep, report: TrainReport) -> str:
    """Compares a repeated step with its record. Returns a sentence if they differ, else an empty string. Raises CheckpointError if exactly one
    of the two was skipped."""
    if bool(report.skipped) != bool(step.report.skipped):
        raise CheckpointError(
            f"step {step.step} was repeated from the journal and was {report.skipped or 'not skipped'}, while it had been "
            f"{step.report.skipped or 'not skipped'}: this machine computes other results. Move the run's directory "
            "journal away to resume from the checkpoint alone"
        )
    if difference := _differs(report, step.report):
        return (
            f"step {step.step} was repeated from the journal with a different result ({difference}): rollouts in flight "
            "were begun under slightly different weights"
        )
    return ""


def _differs(report: TrainReport, before: TrainReport) -> str:
    """The first fields in which a repeated step differs from its record; empty if only the time differs."""
    names = differing(report, before)[:3]
    return ", ".join(
        f"{name} {getattr(report, name)} instead of {getattr(before, name)}"
        if name != "token_numbers"
        else f"other {name}"
        for name in names
    )


def _of_checkpoint(saved: SavedRun, asked: Asked) -> dict[str, Completion]:
    before = saved.state.begun if saved.state else {}
    return {name: completion for name, completion in before.items() if asked(name)}


def _notes_of_checkpoint(saved: SavedRun, asked: Asked) -> dict[str, list[bytes]]:
    before = saved.state.notes if saved.state else {}
    return {name: list(notes) for name, notes in before.items() if asked(name)}


class _Begun(NamedTuple):
    """The recorded part of the rollouts in flight."""

    completions: dict[str, Completion]
    """The completion so far of each request."""
    notes: dict[str, list[bytes]]
    """The notes of their environments, by rollout."""


def _begun(saved: SavedRun, asked: Asked, adapter: str) -> _Begun | None:
    """The part of rollouts in flight that was recorded before the kill; None if the passes contain a ticket that was never
    drawn. Passes are folded as they are read, so that only requests in flight are held in memory."""
    found, notes = _of_checkpoint(saved, asked), _notes_of_checkpoint(saved, asked)
    since: dict[str, Transcript] = {}
    others: set[str] = set()

    def find(name: str) -> Transcript | None:
        if name in since or name in others:
            return since.get(name)
        if request := asked(name):
            return since.setdefault(name, Transcript(request=request))
        others.add(name)
        return None

    for output in _passes(saved):
        if isinstance(output, PassNote):
            if asked(output.rollout):
                notes.setdefault(output.rollout, []).append(output.note)
            else:
                others.add(output.rollout)
            continue
        write_down(output, find)
        for end in output.finished:
            if transcript := find(end.request_id):
                _keep(found, transcript, end)
                del since[end.request_id]
    for name, transcript in since.items():
        _keep(found, transcript, Finished(name, "interrupted"))
    keys = [key for name in others if (key := RolloutKey.read(name)) and key.adapter == adapter]
    return None if any(key.ticket >= saved.resume.next_ticket for key in keys) else _Begun(found, notes)


def _passes(saved: SavedRun) -> Iterable[StepOutput | PassNote]:
    """The engine's passes since the checkpoint, and the notes between them."""
    if saved.rewinds:
        return ()
    return read_passes(saved.run_dir, saved.saved_step, saved.state.passes if saved.state else 0)


def _keep(found: dict[str, Completion], transcript: Transcript, end: Finished) -> None:
    part, name = transcript.completion(end), end.request_id
    before = found.get(name)
    found[name] = joined(before, part) if before else part
