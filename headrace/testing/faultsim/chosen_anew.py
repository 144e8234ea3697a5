"""The reference of every choice of a prompt, and of the good rollouts that join a group: those of a reader of the journal from its first record, without a
checkpoint."""

from __future__ import annotations

from headrace.core.batches import Group
from headrace.core.types import Scored
from headrace.durable.journal import AnyRecord, DrawnRecord, ReadyRecord
from headrace.loop.curriculum import open_curriculum
from headrace.testing.faultsim.case import Case
from headrace.testing.faultsim.oracles import Counts


class ChosenAnew:
    """Follows the journal of a run through one life. A loss of power may have cut records out of it; then nothing is checked."""

    def __init__(self, case: Case, counts: Counts) -> None:
        """`counts`: the records that are in the journal already."""
        self._curriculum = open_curriculum(case.task(), case.choosing, case.group_size)
        self._keeps, self._kept = case.experience, dict[tuple[int, ...], list[Scored]]()
        """Good rollouts by prompt; the prompt whose last group is longest ago first."""
        self._whole = [number for number, _ in counts.records] == list(range(len(counts.records)))
        for _, record in counts.records:
            self.check(record)

    def check(self, record: AnyRecord) -> None:
        """Checks C7 and C8 for a record that follows the ones before."""
        if not self._whole:
            return
        if isinstance(record, DrawnRecord):
            prompt, _ = self._curriculum.draw(record.ticket)
            assert prompt == record.prompt, (
                f"C8: ticket {record.ticket} drew {record.prompt.id}, and by the journal it is the turn of {prompt.id}"
            )
        if isinstance(record, ReadyRecord):
            self._finished(record.group)
        self._curriculum.count(record)

    def _finished(self, group: Group) -> None:
        had = self._kept.pop(group.prompt.tokens, [])
        assert list(group.experience) == had, (
            f"C8: ticket {group.ticket} has other rollouts of earlier groups than the journal"
        )
        best = [rollout for rollout in [*group.scored, *had] if rollout.reward > self._keeps.above]
        best.sort(key=lambda rollout: rollout.reward, reverse=True)
        if best and self._keeps.rollouts:
            self._kept[group.prompt.tokens] = best[: self._keeps.rollouts]
        if len(self._kept) > self._keeps.prompts:
            self._kept.pop(next(iter(self._kept)))
