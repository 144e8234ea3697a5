"""From a checkpoint and what was written after it to the moment at which a run was killed (C7).

The checkpoint is the state between two steps. The journal behind it says what became of every ticket since: it is done to the
real buffer and the real task once more, and its steps are done again by the trainer (`Pipeline.redo`). The passes behind it
say what was sampled of groups that had not ended. Where the settings that a step depends on have changed, or the journal is
damaged, the run goes on from the checkpoint alone, and what came after it is set aside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.buffer import Buffer
from headrace.errors import ConfigError
from headrace.observe.files import read_lines
from headrace.observe.journal import (
    JOURNAL,
    AnyRecord,
    Drawn,
    Gone,
    JournalDamaged,
    JournalStep,
    Live,
    Ready,
    Stepped,
    cut_journal,
    read_journal,
)
from headrace.observe.passes import discard_passes, read_passes
from headrace.orchestration.parts import Plan
from headrace.orchestration.snapshots import ControllerState
from headrace.partial import Interrupts, joined
from headrace.protocols import Task
from headrace.steps import Finished, StepOutput, Transcript, write_down
from headrace.types import Completion, Request


@dataclass(frozen=True)
class Past:
    """What a resumed run has behind it."""

    state: ControllerState | None
    """Of the checkpoint; None where none had been written."""
    records: tuple[AnyRecord, ...]
    """Of the journal, since then."""
    outputs: tuple[StepOutput, ...]
    """Of the engine, since then."""
    complaints: tuple[str, ...] = ()
    rewinds: bool = False
    """Whether what came after the checkpoint was set aside."""

    @property
    def saved_step(self) -> int:
        """Of the checkpoint."""
        return self.state.step if self.state else 0

    @property
    def step(self) -> int:
        """Optimizer steps that were done when the run was killed."""
        done = [one.report.version for one in self.records if isinstance(one, Stepped)]
        return max([self.saved_step, *done])

    def outdated(self, mark: str) -> frozenset[int]:
        """Tickets of finished groups in the checkpoint whose rows other settings made (`course.scoring_mark`)."""
        if self.state is None or self.state.scored_by in ("", mark):
            return frozenset()
        return frozenset(group.ticket for group in self.state.buffer.ready)

    @property
    def seconds(self) -> float:
        """Age of the run then."""
        known = [self.state.seconds if self.state else 0.0, *(record.t for record in self.records)]
        return max(known)


def read_past(run_dir: Path, state: ControllerState | None, same_course: bool) -> Past:
    """`same_course`: whether the steps in the journal can be done again with the settings of now.

    What cannot be used is moved aside (`journal.jsonl.discarded`)."""
    position, step, passes = (state.journal, state.step, state.passes) if state else (0, 0, 0)
    records, complaints = _read(run_dir, position) if same_course else (None, [_CHANGED])
    if records is not None:
        return Past(state, records, tuple(read_passes(run_dir, step, passes)), tuple(complaints))
    at = f"step {step}" if state else "its start"
    said = [f"{complaint}: the run goes on from {at}, and what came after it is set aside" for complaint in complaints]
    if position < _length(run_dir):
        cut_journal(run_dir, position)
    discard_passes(run_dir, step)
    return Past(state, (), (), tuple(said) if state or _length(run_dir) else (), rewinds=True)


_CHANGED = "the settings of training are not those of before"


def _read(run_dir: Path, position: int) -> tuple[tuple[AnyRecord, ...] | None, list[str]]:
    try:
        records = tuple(read_journal(run_dir, position))
    except JournalDamaged as error:
        return None, [str(error)]
    if not records and (length := _length(run_dir)) < position:
        return None, [f"the journal has {length} records, the checkpoint knows of {position}"]
    return records, []


def _length(run_dir: Path) -> int:
    return sum(1 for _ in read_lines(run_dir / JOURNAL))


def recover(past: Past, task: Task, buffer: Buffer, interrupts: Interrupts, plan: Plan) -> list[JournalStep]:
    """Brings all to the moment of the kill, and returns the steps that the trainer has to do again.

    Raises ConfigError when the task gives other prompts than it did."""
    if past.state:
        task.restore(past.state.task)
        buffer.restore(past.state.buffer)
    steps = list(_apply(past.records, task, buffer))
    asked = [plan.requests(ticket, prompt) for ticket, prompt in buffer.in_flight.items()]
    interrupts.restore(_begun(past, {request.id: request for requests in asked for request in requests}))
    return steps


def _apply(records: Iterable[AnyRecord], task: Task, buffer: Buffer) -> Iterator[JournalStep]:
    for record in records:
        match record:
            case Drawn():
                found = task.draw()
                if found.tokens != record.prompt.tokens:
                    raise ConfigError(
                        f"the task gives the prompt {found.id} where it gave {record.prompt.id} before the run was killed: its "
                        "data have changed. Put them back, or start a new run"
                    )
                buffer.start(record.ticket, record.prompt)
            case Ready():
                buffer.put(record.group)
            case Gone():
                buffer.end(record.ticket, record.outcome, record.reason, record.failures)
            case Stepped():
                yield _stepped(record, buffer)
            case Live():
                pass  # what was trained is live as soon as the run begins


def _stepped(record: Stepped, buffer: Buffer) -> JournalStep:
    groups, report = buffer.take_again(record.tickets), record.report
    if report.skipped:
        for ticket in record.tickets:
            buffer.end(ticket, "dropped", report.skipped)
    else:
        buffer.trained(groups)
        buffer.release(groups)
    return JournalStep(report.step, record.t, report.version, groups, report)


def _begun(past: Past, requests: Mapping[str, Request]) -> dict[str, Completion]:
    """What was sampled of these requests until the kill, by their names."""
    before = past.state.begun if past.state else {}
    found = {name: completion for name, completion in before.items() if name in requests}
    since: dict[str, Transcript] = {}

    def find(name: str) -> Transcript | None:
        if name not in requests:
            return None
        return since.setdefault(name, Transcript(requests[name]))

    for output in past.outputs:
        write_down(output, find)
        for end in output.finished:
            if transcript := find(end.request_id):
                _keep(found, transcript, end)
                del since[end.request_id]
    for name, transcript in since.items():
        _keep(found, transcript, Finished(name, "interrupted"))
    return found


def _keep(found: dict[str, Completion], transcript: Transcript, end: Finished) -> None:
    part, name = transcript.completion(end), end.request_id
    before = found.get(name)
    found[name] = joined(before, part) if before else part
