"""The port through which the loops get groups: prompts go in, scored rollouts come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.core.batches import Failure
from headrace.core.types import Episode, Prompt, Scored, Struct


class PlayedGroup(Struct, frozen=True):
    """The rollouts of a group, each scored or failed."""

    scored: tuple[Scored, ...] = ()
    failures: tuple[Failure, ...] = ()
    between: tuple[float, ...] = ()
    """Seconds that each scored one spent between its turns."""
    times: tuple[tuple[float, ...], ...] = ()
    """Seconds before the group was scored at which each turn of each scored one was asked for and had ended, in pairs."""


Seen = Callable[[Sequence[Episode]], None]
"""Called with the episodes of a group as soon as they are known."""


class GroupSource(Protocol):
    async def trained(self, ticket: int, prompt: Prompt, seen: Seen) -> PlayedGroup:
        """Returns a group of training rollouts."""

    async def held_out(self, number: int, index: int, prompt: Prompt, seen: Seen) -> PlayedGroup:
        """Returns the rollouts of a held-out prompt. `number`: the measurement; `index`: the place of the prompt in it."""

    def forget(self, ticket: int) -> None:
        """Frees what is kept of a group. Its outcome is in the journal."""

    def progress(self) -> object:
        """Returns what changes as long as groups are sampled."""
