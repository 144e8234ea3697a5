"""The reference of every choice of a prompt: what a curriculum that has read the journal from its first record, and no checkpoint, draws."""

from __future__ import annotations

from headrace.durable.journal import AnyRecord, DrawnRecord
from headrace.loop.curriculum import open_curriculum
from headrace.testing.faultsim.case import Case
from headrace.testing.faultsim.oracles import Counts


class ChosenAnew:
    """Follows the journal of a run through one life. A loss of power may have cut records out of it; then nothing is checked."""

    def __init__(self, case: Case, counts: Counts) -> None:
        """`counts`: the records that are in the journal already."""
        self._curriculum = open_curriculum(case.task(), case.choosing, case.group_size)
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
        self._curriculum.count(record)
