"""The transitions of every ticket, in one place. Each is written to the journal first, then counted, then reported.

    transition   journal     buffer                             fact
    ----------   -------     ------                             ----
    drawn        `Drawn`     in flight                          `TicketDrawn`; `PromptChosen` if it was chosen
    ready        `Ready`     ready                              `GroupEnded` (ready)
    ended        `Gone`      the slot is free                   `GroupEnded` (dropped, failed)
    trained      `Stepped`   trained; dropped if skipped        `StepTrained`; `GroupEnded` (dropped) for each
    live         `Live`      the slots are free                 `WeightsLive`

A run that is killed between two of these columns loses nothing: recovery reads the journal and applies its records to the buffer with the
same `Buffer.count`, and to the curriculum with the same `Curriculum.count`.
"""

from __future__ import annotations

from headrace.core.batches import Batch, Group
from headrace.core.reports import PromptChoice, TrainReport
from headrace.core.types import Prompt
from headrace.core.weights import WeightUpdate
from headrace.durable.journal import (
    AnyRecord,
    DrawnRecord,
    GoneRecord,
    Journal,
    LiveRecord,
    ReadyRecord,
    SteppedRecord,
)
from headrace.facts.facts import GroupEnded, PromptChosen, TicketDrawn, WeightsLive
from headrace.facts.telemetry import Telemetry
from headrace.loop.buffer import Buffer
from headrace.loop.curriculum.source import Curriculum
from headrace.loop.outcomes import Outcome, Rolled, rolled_of, step_fact
from headrace.loop.partial import Delivery


class Ledger:
    def __init__(self, journal: Journal, buffer: Buffer, curriculum: Curriculum, telemetry: Telemetry) -> None:
        self._journal, self._buffer, self._curriculum = journal, buffer, curriculum
        self._record, self._clock = telemetry.record, telemetry.clock

    def drawn(self, ticket: int, prompt: Prompt, choice: PromptChoice | None = None) -> None:
        """`choice`: how the prompt was chosen, if it was."""
        self._enter(DrawnRecord(self._clock(), ticket, prompt))
        self._record(TicketDrawn(self._clock(), ticket, prompt.id))
        if choice:
            self._record(PromptChosen(self._clock(), ticket, choice))

    def ready(self, group: Group, rolled: Rolled) -> GroupEnded:
        self._enter(ReadyRecord(self._clock(), group))
        return self._ended(rolled, "ready")

    def ended(self, rolled: Rolled, outcome: Outcome, reason: str) -> GroupEnded:
        """Records a group that will not be trained, whether it is in flight, ready or taken."""
        assert outcome != "ready"
        failures = rolled.failures if outcome == "dropped" else ()
        reasons = tuple(failure.reason for failure in failures)
        rewards = tuple(one.reward for one in rolled.scored)
        self._enter(GoneRecord(self._clock(), rolled.ticket, outcome, reason, failures=reasons, rewards=rewards))
        return self._ended(rolled, outcome, reason)

    def trained(self, report: TrainReport, batch: Batch, drawn: float, waited: float) -> None:
        """Records an optimizer step, also a skipped one. `drawn` and `waited`: see `step_fact`. The journal is flushed on return."""
        groups = batch.groups
        tickets = tuple(group.ticket for group in groups)
        self._enter(SteppedRecord(self._clock(), report, tickets, batch.steps), flush=True)
        if not report.skipped:
            self._record(step_fact(self._clock(), report, groups, drawn, waited))
            return
        for group in groups:
            self._ended(rolled_of(group), "dropped", report.skipped)

    def live(self, update: WeightUpdate, delivery: Delivery, cancelled: int) -> None:
        """`cancelled`: number of rollouts of groups that are dropped because of the new weights."""
        self._enter(LiveRecord(self._clock(), update.version, update.fingerprint))
        interrupted = delivery.interrupted + cancelled
        self._record(WeightsLive(self._clock(), update, delivery.load, interrupted, delivery.pause))

    def _enter(self, record: AnyRecord, flush: bool = False) -> None:
        self._journal.write(record)
        if flush:
            self._journal.flush()
        self._buffer.count(record)
        self._curriculum.count(record)

    def _ended(self, rolled: Rolled, outcome: Outcome, reason: str = "") -> GroupEnded:
        self._record(fact := rolled.ended(self._clock(), outcome, reason))
        return fact
