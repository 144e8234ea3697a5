"""The end of a run: waits that an interrupt cuts short, and the last checkpoint, without which a run is not finished."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from headrace.core.errors import CheckpointError
from headrace.facts.waits import Waits

T = TypeVar("T")

LONGEST_PAUSE = 60.0
"""Longest pause between two tries to write the last checkpoint, in seconds."""


class Leaving:
    def __init__(self) -> None:
        self._begun = asyncio.Event()

    def begin(self) -> None:
        self._begun.set()

    @property
    def begun(self) -> bool:
        return self._begun.is_set()

    async def unless(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Awaits `work` until it is done or the run is interrupted, since an engine for which it waits may hang. After an interrupt it
        cancels the work, including what that awaits, and returns None."""
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
    """Saves the last checkpoint. If the disk cannot be written, it tries again for `patience` seconds or until an interrupt. `save` returns
    the error, or an empty string. Raises CheckpointError when `patience` is over."""
    left, pause = patience, 1.0
    while not leaving.begun and (failure := await save()):
        if left <= 0:
            raise CheckpointError(
                f"all {step} steps are done, but the run is not finished, because its weights are not on the disk: {failure}. Then "
                "resume with --resume, which repeats the steps that are in no checkpoint from the journal"
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
