"""Measures new weights on their way: the parts of a publish, alone and beside what a run does at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

from headrace.core.protocols import Engine, Trainer


class Publishing(NamedTuple):
    """Seconds of a version on its way."""

    copy: float
    send: float
    """The rest of the trainer's part."""
    send_slows: float
    """Factor by which that and a step slow each other down."""
    verify: float
    """Seconds until the swap, once the update is there."""
    verify_slows: float
    swap: float


async def time_publishing(
    engine: Engine,
    trainer: Trainer,
    *,
    step: Callable[[], Awaitable[Any]],
    generating: Callable[[], AbstractAsyncContextManager[None]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Publishing:
    """`step`: does an optimizer step, which makes a new version. `generating`: keeps the engine busy."""
    copies: list[float] = []
    sends: list[float] = []
    steps: list[float] = []
    steps_beside: list[float] = []
    swaps: list[float] = []
    loads: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for loaded in (False, True):
            steps.append(await timed(step, clock))
            copies.append(await timed(trainer.copy, clock))
            started = clock()
            if loaded:
                update, seconds = await asyncio.gather(trainer.publish(), timed(step, clock))
                steps_beside.append(seconds)
            else:
                update = await trainer.publish()
                sends.append(clock() - started)
            async with generating() if loaded else contextlib.nullcontext():
                started = clock()
                report = await engine.load(update)
                loads[loaded].append(clock() - started - report.swap_seconds)
            swaps.append(report.swap_seconds)
    alone, beside, send = (statistics.median(one) for one in (loads[False], loads[True], sends))
    longer = statistics.median(steps_beside) - statistics.median(steps)
    return Publishing(
        copy=statistics.median(copies),
        send=send,
        send_slows=max(1.0, 1 + longer / send) if send else 1.0,
        verify=alone,
        verify_slows=max(1.0, beside / alone) if alone else 1.0,
        swap=statistics.median(swaps),
    )


async def timed(work: Callable[[], Awaitable[Any]], clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the seconds that it takes."""
    started = clock()
    await work()
    return clock() - started
