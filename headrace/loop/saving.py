"""Checkpoints beside training: the trainer stands still for a copy, which is written while the next steps are done.

step 4 ─▶ capture ─▶ step 5 ─▶ step 6 ─▶ ...
             └─▶ the files, their checksums, the name

One is written at a time. If the next one is due before that, training waits, under a name: so a run has the checkpoints that
`checkpoint.every` says, whatever the disk does, and memory for one copy is enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from headrace.loop.parts import Parts
from headrace.loop.snapshots import Moment

SAVING = "checkpoint"
"""The work of a trainer that it can do while it sleeps."""

WORTH_SAYING = 1.0
"""Seconds from which on a wait for the checkpoint before is reported."""


class Saving:
    def __init__(
        self, parts: Parts, busy: Callable[[str, Callable[[int], Awaitable[None]], int], Awaitable[None]]
    ) -> None:
        """`busy`: does work of the trainer, in this pipeline's turn (`Pipeline._busy`)."""
        self._parts, self._busy, self._clock = parts, busy, parts.telemetry.clock
        self._writing: asyncio.Future[str] | None = None
        """The one that is being written, or was last. Its result is the error, or an empty string."""
        self._step = -1
        """Its step."""
        self._said: set[str] = set()

    async def begin(self, step: int, loops: asyncio.TaskGroup | None = None) -> None:
        """Begins the checkpoint of this moment, between two steps. Waits for the one before. `loops`: is told of errors that must end the run;
        those of the disk are only recorded."""
        began, before = self._clock(), self._step
        await self.finish()
        if (waited := self._clock() - began) > WORTH_SAYING and step > before:
            self._say(
                "waited",
                f"training waited {waited:.0f} s until the checkpoint of step {before} was written, before that of step {step}: raise "
                "checkpoint.every, or let the run write to a faster disk",
            )
        self._writing = None
        if step == self._parts.snapshots.saved_step:
            return
        await self._busy(SAVING, self._capture, step)
        if loops and self._writing:
            loops.create_task(_result(self._writing))

    async def finish(self) -> str:
        """Waits until nothing is being written. Returns the error of the last one, or an empty string."""
        if self._writing is None:
            return ""
        if not self._writing.done():
            async with self._parts.telemetry.waits.named(
                "trainer", f"the checkpoint of step {self._step} to be written"
            ):
                await asyncio.shield(self._writing)
        return self._writing.result()

    async def whole(self, step: int) -> str:
        """Writes a checkpoint, and returns when it is there. Returns the error, or an empty string."""
        await self.begin(step)
        return await self.finish()

    def cancel(self) -> None:
        if self._writing:
            self._writing.cancel()

    async def _capture(self, step: int) -> None:
        """The trainer goes on when this returns."""
        moment = await self._parts.snapshots.capture(step, self._parts)
        self._step, self._writing = step, asyncio.ensure_future(self._write(moment))
        if moment.short:
            self._say("short", f"training stands still while checkpoints are written: {moment.short}. Free memory")
            await asyncio.shield(self._writing)

    async def _write(self, moment: Moment) -> str:
        failure = await self._parts.snapshots.write(moment)
        self._parts.minutes.measured(save=self._clock() - moment.seconds)
        return failure

    def _say(self, kind: str, said: str) -> None:
        """Reports each kind once."""
        if kind not in self._said:
            self._said.add(kind)
            self._parts.telemetry.warn(said)


async def _result(writing: asyncio.Future[str]) -> None:
    await asyncio.shield(writing)
