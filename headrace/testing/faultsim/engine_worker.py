"""A simulated engine process: forward passes over all running requests, and messages in between. It shares a memory with the trainer's.

The sampled tokens depend on the weights, the request's seed and the place, as in an exact engine. `Truth` remembers all of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from headrace.core.errors import IdentityError
from headrace.core.reports import EngineStats, LoadReport, SleepReport, capable
from headrace.core.steps import Finished, PromptScores, StepOutput
from headrace.core.types import Request, RolloutKey
from headrace.core.weights import WeightUpdate
from headrace.processes.wire import Frame, unpack
from headrace.run.worker.worker_messages import EngineStart
from headrace.testing.fake_worker import Died
from headrace.testing.faultsim.chance import Chance, OneAtATime, Process

MAX_RUNNING = 12

TICKET_DEATHS = 3
"""Deaths of engine processes after which a ticket is given up."""

MAX_TOKENS = 6
"""Tokens of a completion at most."""


def digest(*parts: object) -> int:
    """Returns a hash of 64 bits."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest())


def opinion(weights: str, count: int) -> tuple[float, ...]:
    """Returns the log-probs of a probe. Engine and trainer agree if their weights do."""
    return tuple(-1.0 - digest(weights, place) % 1000 / 100 for place in range(count))


def fate(seed: int, max_tokens: int) -> tuple[int, bool]:
    """Returns the length of a completion, and whether it fails at its end."""
    rng = random.Random(seed)
    return min(max(1, int(rng.paretovariate(0.7))), max_tokens), rng.random() < 0.05


@dataclass
class Truth:
    """Everything that engines sampled and served in all lives of a run, whether or not the controller received it."""

    _: KW_ONLY
    tokens: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Each token with its version, by request. A token that is sampled again replaces the earlier one."""
    served: dict[int, str] = field(default_factory=dict)
    """Fingerprints of the weights by version."""
    remembers: bool = True
    """Whether this object exists in all lives."""
    keys: dict[int, dict[str, RolloutKey]] = field(default_factory=dict)
    """The keys of a ticket's requests, by ticket."""

    several: bool = False
    """Whether several engines may sample one request: one that hung goes on with requests that others have by now. Then only what the
    controller accepted is true, and it may accept only what somebody has sampled."""
    options: dict[tuple[str, int], set[tuple[int, int]]] = field(default_factory=dict)
    """The tokens that any engine has sampled, by request and place."""

    def sampled(self, request: str, place: int, token: int, version: int) -> None:
        if not self.remembers:
            return
        if self.several:
            self.options.setdefault((request, place), set()).add((token, version))
            return
        known = self._known(request)
        assert place <= len(known), f"{request} goes on at token {place}, and {len(known)} were sampled"
        del known[place:]
        known.append((token, version))

    places: Counter[str] = field(default_factory=Counter)
    """The number of tokens that the controller has of each request, those from before this life included."""

    def accepted(self, request: str, pair: tuple[int, int]) -> None:
        """The controller received a token."""
        place = self.places[request]
        self.places[request] += 1
        if not (self.remembers and self.several) or request.startswith("eval"):
            return
        found = self.options.get((request, place), set())
        assert pair in found, f"C5: token {place} of {request} is {pair}, and nobody has sampled it: {found}"
        known = self._known(request)
        del known[place:]
        known.append(pair)

    def _known(self, request: str) -> list[tuple[int, int]]:
        if request not in self.tokens:
            key = RolloutKey.read(request)
            assert key is not None, f"{request} is no rollout's"
            self.keys.setdefault(key.ticket, {})[request] = key
        return self.tokens.setdefault(request, [])

    def serves(self, version: int, weights: str) -> None:
        first = self.served.setdefault(version, weights)
        assert first == weights, f"C3: version {version} was served as {first} and as {weights}"


@dataclass
class _Row:
    """A running request."""

    request: Request
    wanted: int
    fails: bool
    place: int
    kv: int
    """The version that computed its cache; -1 where that was dropped."""


class SimulatedEngineProcess(Process):
    who = "engine"

    def __init__(
        self,
        chance: Chance,
        memory: dict[int, str],
        truth: Truth,
        turns: Callable[[], int],
        *,
        devices: OneAtATime,
        poisoned: Collection[int] = (),
    ) -> None:
        """`devices`: those that it uses while it is awake. `poisoned`: tickets whose requests end the process when it begins them."""
        super().__init__(chance)
        self._devices, self._poisoned = devices, poisoned
        self._memory, self._truth, self._turns = memory, truth, turns
        self._version, self._weights = -1, ""
        self._pass = chance.random.choice([0.01, 0.1, 0.5])
        self._loading = chance.random.choice([0.3, 3.0, 40.0]) if truth.several else 0.3
        """Seconds that an update takes on average. Members of a fleet differ, and some are later than a fleet waits."""
        self._waiting: dict[str, Request] = {}
        self._running: dict[str, _Row] = {}
        self._ended: list[Finished] = []
        self._swaps: list[Callable[[], None]] = []
        self._drains: list[Frame] = []
        self._admits, self._mixed = True, False
        self._sampled = self._passes = 0
        self._loads: set[asyncio.Task[None]] = set()
        self._weights_thread = asyncio.Lock()

    async def serve(self) -> None:
        start = await self.receive()
        if not unpack(start.payload, EngineStart).asleep:
            self._devices.take(self)
        self.reply(start, capable(1000, "simulated", exact=True, rows=MAX_RUNNING))
        while True:
            await self.step_into(self._turns())
            while not (self.inbox or self._swaps or self._has_work()):
                await self.heard()
            while self.inbox:
                self._obey(self.inbox.popleft())
            if self._swaps:
                self._swaps.pop(0)()
            if self._has_work():
                await asyncio.sleep(self.chance.seconds(self._pass))
                self.push("output", self._forward())
            if self._drains and not self._running and not any(map(self._may_begin, self._waiting.values())):
                for frame in self._drains:
                    self.reply(frame, None)
                self._drains.clear()
            if self._passes % 16 == 1:
                self.push("stats", self._stats())

    def _has_work(self) -> bool:
        admitted = self._running or any(map(self._may_begin, self._waiting.values()))
        return bool(self._ended or (admitted and self._weights))

    def _may_begin(self, request: Request) -> bool:
        return (self._admits or bool(request.prefix)) and len(self._running) < MAX_RUNNING

    def _obey(self, frame: Frame) -> None:
        match frame.method:
            case "add":
                self._add(unpack(frame.payload, Request))
            case "cancel":
                name = unpack(frame.payload, str)
                self._waiting.pop(name, None)
                self._running.pop(name, None)
            case "load":
                self._enter(self._load(frame))
            case "sleep" | "wake":
                self._enter(self._turn(frame))
            case "stats":
                self.reply(frame, self._stats())
            case "resume":
                self._admits = True
                self.reply(frame, None)
            case "drain":
                self._admits = False
                self._drains.append(frame)
            case "abort":
                self._abort()
                self.reply(frame, None)
            case method:
                raise AssertionError(f"unknown message {method}")

    def _enter(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts work of the weights thread."""
        task = asyncio.get_running_loop().create_task(work)
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)

    def _add(self, request: Request) -> None:
        if request.id in self._waiting or request.id in self._running:
            self.push("refused", (request.id, f"a request {request.id} is here already"))
        else:
            self._waiting[request.id] = request

    def _abort(self) -> None:
        self._ended += [Finished(name, "interrupted") for name in [*self._running, *self._waiting]]
        self._running.clear()
        self._waiting.clear()

    def _stats(self) -> EngineStats:
        return EngineStats(len(self._running), len(self._waiting), sampled_tokens=self._sampled, version=self._version)

    # -- one forward pass -------------------------------------------------------------------------------------------------

    def _forward(self) -> StepOutput:
        self._passes += 1
        ended, self._ended = self._ended, []
        if not self._weights:
            return StepOutput(self._version, finished=tuple(ended))
        scores: list[PromptScores] = []
        self._admit(ended, scores)
        rows = list(self._running.values())
        for row in rows:
            row.kv = self._version if row.kv < 0 else row.kv
        tokens = [self._sample(row, ended) for row in rows]
        names = tuple(row.request.id for row in rows)
        kvs = tuple(row.kv for row in rows)
        logprobs = tuple(-token / 100 for token in tokens)
        return StepOutput(
            version=self._version,
            request_ids=names,
            tokens=tuple(tokens),
            logprobs=logprobs,
            kv_versions=kvs,
            finished=tuple(ended),
            scores=tuple(scores),
            mixed=self._mixed,
        )

    def _admit(self, ended: list[Finished], scores: list[PromptScores]) -> None:
        for name, request in sorted(self._waiting.items(), key=lambda item: item[1].priority):
            if not self._may_begin(request):
                continue
            del self._waiting[name]
            if request.prompt_logprobs:
                scored = opinion(self._weights, len(request.prompt) - 1)
                scores.append(PromptScores(name, self._version, scored, mixed=self._mixed))
                ended.append(Finished(name, "length"))
                continue
            if (key := RolloutKey.read(name)) and key.ticket in self._poisoned:
                self.die("was killed by SIGSEGV (simulated)")
                raise Died
            wanted, fails = fate(request.sampling.seed, request.sampling.max_tokens)
            assert len(request.prefix) < wanted, f"{name} had ended, and is asked for again"
            self._running[name] = _Row(request, wanted, fails, len(request.prefix), self._version)

    def _sample(self, row: _Row, ended: list[Finished]) -> int:
        request = row.request
        token = digest(self._weights, request.sampling.seed, row.place) % 97 + 1
        self._truth.serves(self._version, self._weights)
        if not request.id.startswith("eval"):
            self._truth.sampled(request.id, row.place, token, self._version)
        row.place += 1
        self._sampled += 1
        if row.place == row.wanted:
            del self._running[request.id]
            limit = row.wanted == request.sampling.max_tokens
            stop = Finished(request.id, "length" if limit else "stop")
            ended.append(Finished(request.id, "error", "injected failure") if row.fails else stop)
        return token

    # -- weights ----------------------------------------------------------------------------------------------------------

    async def _load(self, frame: Frame) -> None:
        """One update after another, as the weights thread of a real process does."""
        async with self._weights_thread:
            await self._load_next(frame)

    async def _load_next(self, frame: Frame) -> None:
        update, parts = unpack(frame.payload, tuple[WeightUpdate, int])
        slot = update.where["slot"]
        found = self._memory[slot]
        await asyncio.sleep(self.chance.seconds(self._loading))
        if not found == update.fingerprint == self._memory[slot]:
            self.fail(frame, IdentityError(f"version {update.version}: {found} instead of {update.fingerprint}"))
            return
        before = self._sampled
        for _ in range(parts - 1 if self._version >= 0 else 0):
            self._swaps.append(self._begin_mixed)
            self.wake()
            await asyncio.sleep(self.chance.seconds(0.1))

        def swap() -> None:
            self._devices.use(self, "load weights")
            self._version, self._weights, self._mixed = update.version, update.fingerprint, False
            self.reply(frame, LoadReport(update.version, 0.0, 0.0, self._sampled - before))

        self._swaps.append(swap)
        self.wake()

    async def _turn(self, frame: Frame) -> None:
        """Falls asleep, or wakes, after the updates before it."""
        async with self._weights_thread:
            await asyncio.sleep(self.chance.seconds(0.1))

            def change() -> None:
                if frame.method == "sleep":
                    self._fall_asleep(keep=unpack(frame.payload, bool))
                else:
                    self._devices.take(self)
                self.reply(frame, SleepReport())

            self._swaps.append(change)
            self.wake()

    def _fall_asleep(self, keep: bool) -> None:
        self._devices.leave(self)
        self._weights = ""
        for row in () if keep else self._running.values():
            row.kv = -1

    def _begin_mixed(self) -> None:
        self._mixed = True

    def die(self, how: str) -> None:
        super().die(how)
        for task in self._loads:
            task.cancel()
