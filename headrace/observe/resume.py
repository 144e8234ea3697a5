"""One continuous history: a resumed run goes on with that of the process before, or with the part that its journal knows of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.observe.facts import CheckpointSaved, Evaluated, GroupEnded, TicketDrawn, WeightsLive
from headrace.observe.records import MetricsFact, StepRow


@dataclass(frozen=True)
class Resume:
    """Where a run stands that goes on, by its checkpoint and the journal behind it.

    The journal is written before the facts. So facts that it does not know of are those of a journal that was cut: since then,
    or in a process that was killed before it had cut the metrics too. Whoever derives the cut from the journal need not know which.
    """

    step: int
    """Optimizer steps that are done."""
    saved: int | None = None
    """Those of the checkpoint; None where there is none."""
    next_ticket: int = 0
    flying: frozenset[int] = frozenset()
    """Tickets of groups that are not finished."""
    ready: frozenset[int] = frozenset()
    """Of groups that wait for a step."""
    anew: bool = False
    """All that there was is set aside."""

    def knows(self, fact: MetricsFact | None) -> bool:
        """Whether this happened, as far as checkpoint and journal say."""
        match fact:
            case TicketDrawn():
                return fact.ticket < self.next_ticket
            case GroupEnded():
                unfinished = fact.ticket in self.flying or (fact.outcome != "ready" and fact.ticket in self.ready)
                return fact.ticket < self.next_ticket and not unfinished
            case StepRow():
                return fact.report.version <= self.step
            case WeightsLive():
                return fact.update.version <= self.step
            case Evaluated() | CheckpointSaved():
                return fact.step <= self.step
        return True


def kept_of(facts: Sequence[MetricsFact | None], resume: Resume) -> list[bool]:
    """Which lines of the metrics go on in a resumed run: those that can be read, before the first that its journal does not know.

    Generation goes on while a checkpoint is written, so that the fact of the checkpoint may come behind that."""
    if resume.anew:
        return [False] * len(facts)
    end = next((i for i, fact in enumerate(facts) if not resume.knows(fact)), len(facts))
    return [fact is not None and (i < end or _is_of(fact, resume.saved)) for i, fact in enumerate(facts)]


def _is_of(fact: MetricsFact, saved: int | None) -> bool:
    return isinstance(fact, CheckpointSaved) and fact.step == saved and not fact.error
