"""Environments of several turns for simulated runs, and the check of the notes that they keep (C7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from headrace.core.protocols import EnvironmentKind
from headrace.core.types import Completion
from headrace.episodes.environments.single_turn import SINGLE_TURN
from headrace.episodes.rollout_session import Notebook
from headrace.testing.fake_environments import scripted
from headrace.testing.faultsim.case import Case

THINKS = 0.2
"""Virtual seconds of an environment between two turns."""


class KeptNotes:
    """The notes of all lives of a run."""

    def __init__(self) -> None:
        self._written: Counter[str] = Counter()
        """Notes that were written, by rollout."""
        self.went_on = 0
        """Rollouts that found notes of an earlier life."""

    def environment(self, case: Case, life: int) -> EnvironmentKind:
        """An environment whose replies differ between lives where it exports its state, so that one that is given twice is another context, whose tokens
        would be lost."""
        if case.turns == 1:
            return SINGLE_TURN
        if case.resumes == "replayed":
            return scripted(case.turns, seconds=THINKS)

        def reply(done: Completion, seed: int) -> Sequence[int]:
            return 98, life, len(done.tokens)

        return scripted(case.turns, seconds=THINKS, reply=reply, resumes=case.resumes)

    def watching(self, write: Callable[[str, bytes], None], dead: Callable[[], bool]) -> Callable[[str, bytes], None]:
        """Returns a `write` that counts. `dead`: whether the process is killed."""

        def watched(name: str, note: bytes) -> None:
            write(name, note)
            if not dead():
                self._written[name] += 1

        return watched

    def forget(self) -> None:
        """Forgets what was written after a checkpoint, because it was set aside."""
        self._written.clear()

    def resumes(self, notebook: Notebook, tickets: Collection[int], excused: bool) -> None:
        """Checks that no note of a group in flight is lost. `excused`: whether a disk has lost some."""
        found = {name: len(notes) for name, notes in notebook.state(tickets).items()}
        for name, count in self._written.items():
            known = found.get(name, 0)
            ended = not any(name.partition("/")[0] == f"t{ticket}" for ticket in tickets)
            assert known >= count or ended or excused, f"C7: {name} kept {count} notes, and goes on with {known}"
        self._written = Counter(found)
        self.went_on += len(found)
