"""A simulated engine process of a cluster: all its sequences advance together, and it wakes when one of them ends.

The sampled tokens follow from the request's seed and their place, so that a group that is trained can be compared with what its engines
must have sampled (`token_at`), whichever of them it moved through.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from bisect import bisect_right
from collections.abc import Coroutine
from dataclasses import KW_ONLY, dataclass
from typing import Any

from headrace.core.errors import IdentityError
from headrace.core.reports import EngineStats, LoadReport, capable
from headrace.core.steps import Finished, PromptScores, StepOutput
from headrace.core.types import Request
from headrace.core.weights import WeightUpdate
from headrace.loop.world.surroundings import CompletionLengths, context_length
from headrace.processes.wire import BEAT, BEATS, Frame, unpack
from headrace.testing.fake_worker import FakeProcess
from headrace.testing.faultsim.cluster.machines import NodeLink
from headrace.testing.faultsim.cluster.sizing import ClusterSize
from headrace.testing.faultsim.engine_worker import opinion

_ROUNDING = 1e-6


def token_at(seed: int, place: int, length: int) -> int:
    """Returns the simulated token at a place of a completion: its real length first, and then tokens that follow from the seed."""
    return (seed * 31 + place * 7919) % 97 + 1 if place else length


@dataclass(eq=False)
class _Running:
    request: Request
    _: KW_ONLY
    length: int
    """Real tokens of the whole completion."""
    at_limit: bool
    origin: float
    """The pass at which its first token would have been sampled, had it been here from the start."""
    begun: float
    """The pass at which it began here."""
    reported: int
    """Simulated tokens that the controller has, those of earlier engines included."""


class ClusterEngineProcess(FakeProcess):
    def __init__(self, link: NodeLink, size: ClusterSize, published: dict[int, str]) -> None:
        """`published`: the fingerprints of the weights that can be fetched, by version."""
        super().__init__(link)
        self._link, self._size, self._published = link, size, published
        self._lengths = CompletionLengths(size.completions, size.max_tokens)
        self._rows: dict[str, _Running] = {}
        self._waiting: list[tuple[int, int, Request]] = []
        self._order = itertools.count()
        self._swaps: list[float] = []
        """The passes at which weights went live."""
        self._versions: list[int] = []
        self._fingerprint = ""
        self._admits = True
        self._passes = self._sampled = self._busy = self._debt = self._since = 0.0
        self.slow_until = 0.0
        self.hangs = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        self.reply(await self.receive(), capable(1 << 20, "simulated", rows=self._size.rows))
        self._do(self._beat())
        while not self.hangs:
            self._advance()
            while self.inbox:
                self._obey(self.inbox.popleft())
            self._report()
            self._admit()
            self._wake_at_next_end()
            await self.heard()
        await asyncio.Event().wait()

    def vanish(self) -> None:
        """The node has lost its power: nobody hears of it."""
        self.alive = False
        self._task.cancel()
        self._stop()

    def die(self, how: str) -> None:
        super().die(how)
        self._stop()

    def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._timer:
            self._timer.cancel()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._size.beats / BEATS)
            self.push(BEAT, None)

    def _obey(self, frame: Frame) -> None:
        match frame.method:
            case "add":
                self._add(unpack(frame.payload, Request))
            case "cancel":
                name = unpack(frame.payload, str)
                self._rows.pop(name, None)
                self._waiting = [entry for entry in self._waiting if entry[2].id != name]
                heapq.heapify(self._waiting)
            case "load":
                self._do(self._load(frame))
            case "stats":
                self.reply(frame, self._stats())
            case "resume" | "drain":
                self._admits = frame.method == "resume"
                self.reply(frame, None)
            case method:
                raise AssertionError(f"unknown message {method}")

    def _add(self, request: Request) -> None:
        if request.prompt_logprobs:
            scores = PromptScores(request.id, self._versions[-1], opinion(self._fingerprint, len(request.prompt) - 1))
            ended = (Finished(request.id, "length"),)
            self.push("output", StepOutput(self._versions[-1], finished=ended, scores=(scores,)))
        else:
            heapq.heappush(self._waiting, (request.priority, next(self._order), request))

    def _stats(self) -> EngineStats:
        return EngineStats(
            len(self._rows),
            len(self._waiting),
            sampled_tokens=round(self._sampled),
            busy_seconds=self._busy,
            version=self._versions[-1] if self._versions else -1,
        )

    # -- passes -----------------------------------------------------------------------------------------------------------

    @property
    def _pass(self) -> float:
        slow = 3.0 if asyncio.get_running_loop().time() < self.slow_until else 1.0
        return self._size.pass_seconds(len(self._rows)) * slow

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        seconds, self._since = now - self._since, now
        if not self._rows:
            return
        self._busy += seconds
        paid = min(seconds, self._debt)
        self._debt -= paid
        passes = (seconds - paid) / self._pass
        self._passes += passes
        self._sampled += passes * len(self._rows)

    def _admit(self) -> None:
        while self._waiting and self._admits and len(self._rows) < self._size.rows and self._versions:
            request = heapq.heappop(self._waiting)[2]
            length, at_limit = self._lengths(request)
            had = len(request.prefix) * self._size.grain
            self._debt += self._size.prefill * (context_length(request.prompt, self._size.grain) + had)
            self._rows[request.id] = _Running(
                request,
                length=length,
                at_limit=at_limit,
                origin=self._passes - had,
                begun=self._passes,
                reported=len(request.prefix),
            )

    def _wake_at_next_end(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._rows:
            left = min(row.origin + row.length for row in self._rows.values()) - self._passes
            self._timer = asyncio.get_running_loop().call_later(max(0.0, left) * self._pass + self._debt, self.wake)

    def _report(self) -> None:
        """Sends what was sampled since the last report, if a sequence has ended: a real engine sends every token at once."""
        ended = [row for row in self._rows.values() if self._passes - row.origin >= row.length - _ROUNDING]
        if not ended:
            return
        columns: list[tuple[str, int, int]] = []
        for row in self._rows.values():
            columns += self._new_tokens(row)
        for row in ended:
            del self._rows[row.request.id]
        names, tokens, versions = map(tuple, zip(*columns, strict=True)) if columns else ((), (), ())
        output = StepOutput(
            version=self._versions[-1],
            request_ids=names,
            tokens=tokens,
            logprobs=(-1.0,) * len(tokens),
            kv_versions=versions,
            versions=versions,
            finished=tuple(Finished(row.request.id, "length" if row.at_limit else "stop") for row in ended),
        )
        self.push("output", output)

    def _new_tokens(self, row: _Running) -> list[tuple[str, int, int]]:
        grain, done = self._size.grain, self._passes - row.origin
        whole = -(-row.length // grain)
        until = whole if done >= row.length - _ROUNDING else min(whole - 1, int(done / grain))
        first, row.reported = row.reported, max(row.reported, until)
        name, seed = row.request.id, row.request.sampling.seed
        return [
            (name, token_at(seed, place, row.length), self._version_at(max(row.begun, row.origin + place * grain)))
            for place in range(first, until)
        ]

    def _version_at(self, passes: float) -> int:
        return self._versions[bisect_right(self._swaps, passes + _ROUNDING) - 1]

    # -- weights ----------------------------------------------------------------------------------------------------------

    async def _load(self, frame: Frame) -> None:
        update, _ = unpack(frame.payload, tuple[WeightUpdate, int])
        await asyncio.sleep(self._size.fetch * self._link.slowed)
        if self.hangs:
            return
        if (found := self._published.get(update.version, "nothing")) != update.fingerprint:
            self.fail(frame, IdentityError(f"version {update.version}: {found} instead of {update.fingerprint}"))
            return
        self._advance()
        self._swaps.append(self._passes)
        self._versions.append(update.version)
        self._fingerprint = update.fingerprint
        self.reply(frame, LoadReport(update.version, self._size.fetch, 0.02))
        self.wake()
