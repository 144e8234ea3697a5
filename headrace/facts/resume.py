"""One continuous history: a resumed run keeps the metrics of the process before it, as far as the journal confirms them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.facts.facts import CheckpointSaved, Evaluated, GroupEnded, PromptChosen, TicketDrawn, WeightsLive
from headrace.facts.records import MetricsFact, StepRow


@dataclass(frozen=True, kw_only=True)
class Resume:
    """The position of a resumed run, from its checkpoint and the journal after it.

    The journal is written before the facts. So a fact that the journal does not have means that the journal was cut: just now, or by a
    process that was killed before it had cut the metrics as well. Deriving the cut from the journal handles both cases.
    """

    step: int
    """Optimizer steps that are done."""
    saved: int | None = None
    """Steps of the checkpoint; None if there is none."""
    next_ticket: int = 0
    flying: frozenset[int] = frozenset()
    """Tickets whose groups are not finished."""
    ready: frozenset[int] = frozenset()
    """Tickets whose groups wait for a step."""
    anew: bool = False
    """Whether all earlier metrics are discarded."""
    digest: Path | None = None
    """The file with the sums of the facts until the checkpoint, all of which are kept; None if there is no checkpoint."""

    def knows(self, fact: MetricsFact | None) -> bool:
        """Returns whether checkpoint and journal confirm this fact."""
        match fact:
            case TicketDrawn() | PromptChosen():
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
    """Returns for each line of the metrics whether a resumed run keeps it: the readable lines before the first one that the journal does
    not confirm, and the fact of the checkpoint.

    Generation goes on while a checkpoint is written, so the fact of the checkpoint may come after unconfirmed ones."""
    if resume.anew:
        return [False] * len(facts)
    end = next((i for i, fact in enumerate(facts) if not resume.knows(fact)), len(facts))
    saved = next(
        (i for i, fact in enumerate(facts) if fact and _is_of(fact, resume.saved)), -1
    )  # the first, if a kill left two
    return [fact is not None and (i < end or i == saved) for i, fact in enumerate(facts)]


def _is_of(fact: MetricsFact, saved: int | None) -> bool:
    return isinstance(fact, CheckpointSaved) and fact.step == saved and not fact.error
