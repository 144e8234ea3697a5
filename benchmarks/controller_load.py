"""What `controller.py` measures: the CPU time of turns of the event loop, and how late the loop is by the clock."""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec

from headrace.facts.facts import Fact, StepTrained
from headrace.loop.world.world import World

TICK = 0.01
"""Seconds."""


class MeasuredLoop(asyncio.SelectorEventLoop):
    """Keeps the CPU time of every turn."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[float] = []

    def _run_once(self) -> None:
        began = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        self.turns.append(time.thread_time() - began)


class Counts:
    """An observer that writes every fact down, as a run's metrics do."""

    def __init__(self) -> None:
        self.facts: Counter[str] = Counter()
        self._encode = msgspec.json.Encoder().encode
        self.steps = 0

    def record(self, fact: Fact) -> None:
        self.facts[type(fact).__name__] += 1
        self.steps += isinstance(fact, StepTrained)
        self._encode(fact)


class BareWorld(World):
    """Without the check of the accounting at every fact, which no run has."""

    def _record(self, fact: Fact) -> None:
        self.observer.record(fact)


async def measure(
    loop: MeasuredLoop,
    seconds: float,
    *,
    facts: Counter[str],
    frames: Counter[str],
    step: Callable[[], int],
) -> None:
    """Watches the loop for `seconds`, and prints. `frames`: what is received, by kind, counted by the caller."""
    loop.turns.clear()
    frames.clear()
    facts.clear()
    cpu, clock, before = time.process_time(), time.monotonic(), step()
    late = await _lateness(clock + seconds)
    took, spent, turns = time.monotonic() - clock, time.process_time() - cpu, sorted(loop.turns)
    kinds = ", ".join(f"{name} {count / took:.0f}" for name, count in frames.items())
    print(f"in {took:.0f} s: {step() - before} steps; received a second: {kinds}")
    print(f"CPU          {spent / took:.1%} of a core, {frames.total() / spent:.0f} received per second of CPU time")
    print(
        f"loop turns   {len(turns) / took:.0f} a second; CPU time: p50 {statistics.median(turns) * 1e3:.2f} ms, longest {turns[-1] * 1e3:.0f} ms"
    )
    print(f"loop lag     by CPU time: p99 {own_lag(turns, took, 0.01) * 1e3:.1f} ms")
    print(f"             by the clock: p99 {late[int(0.99 * len(late))] * 1e3:.1f} ms, longest {late[-1] * 1e3:.0f} ms")
    print(f"facts a second: { ({name: round(count / took, 1) for name, count in facts.items()}) }")


async def _lateness(until: float) -> list[float]:
    """The seconds by which a task is late that is due every `TICK`, in order of size. One that is late for several times is late at each of
    them: a long stop of the loop counts by its length."""
    late, due = list[float](), time.monotonic()
    while due < until:
        due += TICK
        await asyncio.sleep(due - time.monotonic())
        late.append(max(0.0, time.monotonic() - due))
    return sorted(late)


def own_lag(turns: Sequence[float], seconds: float, share: float) -> float:
    """Returns the lag that is exceeded for this share of the time, if the loop is late for its own turns alone (seconds of CPU time each).

    >>> round(own_lag([0.5, 0.001], 10.0, 0.01), 3)
    0.4
    """
    low, high = 0.0, max(turns)
    for _ in range(40):
        middle = (low + high) / 2
        if sum(max(0.0, turn - middle) for turn in turns) > share * seconds:
            low = middle
        else:
            high = middle
    return high


@contextlib.contextmanager
def profiled(file: str) -> Iterator[None]:
    if not file:
        yield
        return
    profile = cProfile.Profile(time.process_time)
    profile.enable()
    try:
        yield
    finally:
        profile.disable()
        profile.dump_stats(file)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
