"""The name of a completion in a run, from which a request's id is made and recovered."""

from __future__ import annotations

from headrace.types import Struct


class RolloutKey(Struct, frozen=True):
    """The place of one completion in a run. `str` gives the request id, which is the same in every process.

    >>> str(RolloutKey(12, 0)), str(RolloutKey(12, 0, turn=2)), str(RolloutKey(12, 0, adapter="math"))
    ('t12/0', 't12/0.2', 'math:t12/0')
    >>> RolloutKey.read("math:t12/0.2")
    RolloutKey(ticket=12, index=0, turn=2, adapter='math', context='')
    >>> str(RolloutKey(12, 0, turn=2, context="5e01"))
    't12/0.2~5e01'
    """

    ticket: int
    """Number of the group's prompt in the order of drawing, from 0. A ticket is drawn before its prompt is sampled, and given
    back when the weights that its group trained are live, or when the group ends untrained (C1)."""
    index: int
    """Number of the rollout in its group, from 0."""
    turn: int = 0
    """Number of the turn in its rollout, from 0; 0 is not spelled out in the id."""
    adapter: str = ""
    """The adapter that is trained; empty where all weights are."""
    context: str = ""
    """A digest of the tokens before the turn (`rollouts/episodes.py`); empty where they are the prompt of the group. A recorded turn is
    found again by the tokens that it was sampled after, and never used after others (C5)."""

    def __str__(self) -> str:
        owner, turn = f"{self.adapter}:" if self.adapter else "", f".{self.turn}" if self.turn else ""
        context = f"~{self.context}" if self.context else ""
        return f"{owner}t{self.ticket}/{self.index}{turn}{context}"

    @classmethod
    def read(cls, request_id: str) -> RolloutKey | None:
        """Parses a request id; None for an id that belongs to no rollout (a probe, an evaluation)."""
        adapter, _, name = request_id.rpartition(":")
        ticket, _, rest = name.partition("/")
        place, _, context = rest.partition("~")
        index, _, turn = place.partition(".")
        try:
            key = cls(int(ticket[1:]), int(index), int(turn or 0), adapter, context)
        except ValueError:
            return None
        right = str(key) == request_id and min(key.ticket, key.index, key.turn) >= 0
        return key if right else None  # `int` accepts spellings that `str` never writes, such as "01"
