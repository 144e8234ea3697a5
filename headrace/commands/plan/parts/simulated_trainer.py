"""A simulated trainer: protocol `Trainer`. The time of a step depends on its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from headrace.commands.plan.parts.engine import Shared, work
from headrace.commands.plan.rates.rates import TrainerRates
from headrace.core.batches import Batch
from headrace.core.reports import Captured, TrainReport, TrialScores
from headrace.core.weights import WeightUpdate
from headrace.loop.world.surroundings import loss_tokens, real_tokens, shared_again

FORWARD = 1 / 3
"""The time of a pass without gradient, as a share of one with it: a backward pass has twice the products of a forward one."""


class SimulatedTrainer:
    def __init__(
        self,
        rates: TrainerRates,
        shared: Shared,
        grain: int = 1,
        version: int = 0,
        *,
        epochs: int = 1,
        minibatches: int = 1,
        looks_ahead: bool = False,
        given: float = 0.0,
    ) -> None:
        """`epochs`, `minibatches`: as in `TrainConfig`. `looks_ahead`: whether a step of several updates computes old log-probs or values before the first of
        them; `given`: tokens of demonstrations and of good earlier rollouts beside the groups of a step."""
        self._rates, self._shared, self._grain = rates, shared, grain
        self._epochs, self._updates, self._given = epochs, epochs * minibatches, given
        self._ahead = FORWARD if looks_ahead and self._updates > 1 else 0.0
        self.version = version
        self._copied: int | None = None
        self._sending, self._working = 0, False
        self._turned = asyncio.Event()
        """Set when it starts or stops to work, on which the pace of a publish beside it depends."""
        self.busy = 0.0
        """Seconds of work so far, without waits."""

    async def step(self, batch: Batch) -> TrainReport:
        clock = asyncio.get_running_loop().time
        started, once = clock(), self._forward_tokens(batch)
        forward = self._epochs * (once + round(self._given))
        await self._work(self._rates.step * self._updates + self._rates.token * (forward + self._ahead * once))
        self.version += 1
        return TrainReport(
            batch.step,
            self.version,
            loss_tokens=sum(loss_tokens(row, self._grain) for row in batch.rows),
            forward_tokens=forward,
            updates=self._updates,
            seconds=clock() - started,
        )

    def _forward_tokens(self, batch: Batch) -> int:
        """Counts the forwarded tokens of one pass; the prompt of a group is forwarded once, and so are the turns before a fork."""
        prompts = sum(group.rows[0].prompt[1] for group in batch.groups if group.rows)
        again = sum(shared_again(rollout, self._grain) for group in batch.groups for rollout in group.scored)
        return prompts + sum(real_tokens(row, self._grain) for row in batch.rows) - again

    async def copy(self, adapter: str = "") -> None:
        await self._work(self._rates.publish)
        self._copied = self.version

    async def publish(self, adapter: str = "") -> WeightUpdate:
        if self._copied is None:
            await self.copy()
        version, self._copied = self._copied, None
        assert version is not None
        await self._send()
        return WeightUpdate(
            version=version,
            kind="full",
            fingerprint=f"simulated-{version}",
            nbytes=0,
            seconds=self._rates.publish,
        )

    async def _send(self) -> None:
        """Makes the copy an update, beside the next step: each may slow the other down."""
        slows = self._rates.send_slows
        self._sends(1)
        try:
            await work(self._rates.send, lambda: slows if self._working else 1.0, self._turned)
        finally:
            self._sends(-1)

    def _sends(self, change: int) -> None:
        self._sending += change
        self._shared.changed()

    async def publish_shadow(self) -> WeightUpdate | None:
        return None

    async def score(self, tokens: Sequence[int], adapter: str = "") -> list[float]:
        await self._work(self._rates.score)
        return [-1.0] * (len(tokens) - 1)

    async def begin_trial(self, adapter: str = "") -> None:
        raise AssertionError("a plan tries no weights")

    async def end_trial(self, pieces: Sequence[Sequence[int]], adapter: str = "", most: int = 0) -> TrialScores:
        raise AssertionError("a plan tries no weights")

    async def capture(self, adapter: str = "") -> Captured:
        await self._work(self._rates.save)
        return Captured()

    async def save(self, directory: Path, adapter: str = "") -> None:
        (directory / "simulated_trainer.txt").write_text(str(self.version))

    async def _work(self, seconds: float) -> None:
        clock = asyncio.get_running_loop().time
        started = clock()
        self._works(True)
        try:
            await self._shared.train(seconds, lambda: self._rates.send_slows if self._sending else 1.0)
        finally:
            self._works(False)
        self.busy += clock() - started

    def _works(self, works: bool) -> None:
        self._working = works
        self._turned.set()

    async def watch(self) -> None:
        """Never returns: `testing/faultsim/lives.py` simulates deaths."""
        await asyncio.Event().wait()

    def kill(self) -> None:
        pass

    async def close(self) -> None:
        pass
