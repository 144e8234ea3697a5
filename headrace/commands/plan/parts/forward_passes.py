"""The forward passes of a simulated engine: how many are done, and when a given number will be.

Between two events the same n sequences run, so passes take `decode(n) + context · C`, where C, the tokens in their caches, grows
by n a pass: P passes take (decode(n) + context · C) P + context · n P² / 2 seconds, a quadratic that is solved for P.
"""

from __future__ import annotations

import asyncio
import math

from headrace.commands.plan.parts.shared_cores import Shared
from headrace.commands.plan.rates.rates import EngineRates


class Passes:
    """The pace of one engine, and its counters."""

    def __init__(self, rates: EngineRates, shared: Shared) -> None:
        self._rates, self._shared = rates, shared
        self.done = 0.0
        self.debt = 0.0
        """Seconds of work before the next pass: prompts, a swap."""
        self.running = 0
        self.cached = 0.0
        """Tokens in the caches of the running sequences."""
        self.slowed = 1.0
        """Factor for other work during generation (verification of new weights)."""
        self.busy = self.sampled = 0.0
        self._at = 0.0
        self._paces: dict[int, float] = {}

    def advance(self) -> None:
        """Updates the counters to the present time. Called before anything changes on which the pace depends."""
        now = asyncio.get_running_loop().time()
        elapsed, self._at = now - self._at, now
        if elapsed <= 0 or not self.running:
            return
        self.busy += elapsed
        work = elapsed / self._factor
        paid = min(self.debt, work)
        self.debt -= paid
        done = self._within(work - paid)
        self.done += done
        self.cached += done * self.running
        self.sampled += done * self.running

    def seconds_until(self, target: float) -> float:
        """Returns the seconds until `target` passes are done, at the present pace."""
        passes = max(0.0, target - self.done)
        growth = self._rates.context * self.running * passes / 2
        return (self.debt + (self._each + growth) * passes) * self._factor

    @property
    def _factor(self) -> float:
        return self._shared.engine_factor * self.slowed

    @property
    def _each(self) -> float:
        pace = self._paces.get(self.running)
        if pace is None:
            pace = self._paces[self.running] = self._rates.pass_seconds(self.running)
        return pace + self._rates.context * self.cached

    def _within(self, seconds: float) -> float:
        each, growth = self._each, self._rates.context * self.running
        if growth == 0.0:
            return seconds / each
        return (math.sqrt(each * each + 2 * growth * seconds) - each) / growth
