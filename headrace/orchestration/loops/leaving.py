"""The end of a run: what does not wait any more once somebody has interrupted it, and what keeps it from being finished."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from headrace.errors import CheckpointError
from headrace.observe.health.waits import Waits

T = TypeVar("T")

LONGEST_PAUSE = 60.0
"""Seconds between two tries of the last checkpoint."""


class Leaving:
    def __init__(self) -> None:
        self._begun = asyncio.Event()

    def begin(self) -> None:
        self._begun.set()

    @property
    def begun(self) -> bool:
        return self._begun.is_set()

    async def unless(self, work: Coroutine[Any, Any, T]) -> T | None:
        """For what waits for an engine, which may hang: whoever interrupts the run does not wait for that. None then; the work is
        cancelled, and what it awaits."""
        doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(self._begun.wait())
        try:
            await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            doing.cancel()
        await asyncio.wait((doing,))
        return None if doing.cancelled() and self.begun else await doing


async def until_saved(
    save: Callable[[], Awaitable[str]],
    step: int,
    patience: float,
    *,
    waits: Waits,
    leaving: Leaving,
    warn: Callable[[str], None],
) -> None:
    """Saves the last checkpoint: again and again for `patience` seconds where the disk does not take it, or until somebody
    interrupts the run. `save` says why it could not. Raises CheckpointError at the end of patience."""
    left, pause = patience, 1.0
    while not leaving.begun and (failure := await save()):
        if left <= 0:
            raise CheckpointError(
                f"all {step} steps are done, but the run is not finished, because its weights are not on the disk: {failure}. Then go "
                "on with --resume, which does the steps that are in no checkpoint again from the journal"
            )
        warn(
            f"the run is not finished before the checkpoint of step {step} is on the disk: free disk space; it is tried again in "
            f"{min(pause, left):.0f} s, and for {left:.0f} s in all"
        )
        await leaving.unless(_pause(waits, min(pause, left)))
        left, pause = left - pause, min(2 * pause, LONGEST_PAUSE)


async def _pause(waits: Waits, seconds: float) -> None:
    async with waits.named("controller", "room on the disk for the last checkpoint"):
        await asyncio.sleep(seconds)
