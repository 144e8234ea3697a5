"""The hosts of `controller.py`: many light ones in one process, which speak the real wire protocol, or the real messages of a bus.

A host that dials in is a connection with an engine behind it: it greets, beats, reports its statistics every second, loads, and sends the tokens
of its sequences. A host on a bus signs every second, and answers the tickets that its process claims; the claims of a process go over one connection
to Redis, because their number costs the hosts and Redis something, and the controller nothing.
"""

from __future__ import annotations

import asyncio
import random
import resource
from typing import Any

import msgspec

from headrace.core.reports import EngineStats, LoadReport, capable
from headrace.core.steps import Finished, PromptScores, StepOutput
from headrace.core.types import Completion, Request, VersionSpan
from headrace.core.weights import WeightUpdate
from headrace.loop.own_groups import PlayedGroup
from headrace.processes.frames import receive_frame
from headrace.processes.joining.greeting import SILENCE, Agreed, Hello, Welcome, packed
from headrace.processes.joining.same_model import own_packages
from headrace.processes.wire import BEAT, BEATS, Frame, decode, pack, pack_payload, unpack
from headrace.run.hosts.bus.bus_port import Letter, Posting
from headrace.run.hosts.bus.redis_streams import RedisBus
from headrace.run.hosts.bus_messages import (
    ANSWERS,
    RUN,
    TICKETS,
    WEIGHTS,
    ErrandLetter,
    ErrandReply,
    GroupErrand,
    HostEntry,
    RequestErrand,
    RunNotice,
    WeightsNotice,
)
from headrace.run.hosts.bus_messages import BEAT as ENTRY_EVERY
from headrace.testing.makers import completion, scored
from headrace.version import __version__

GROUP, TOKENS = 8, (20, 60)
"""Rollouts of a group, and the fewest and most tokens of a completion."""


def more_files() -> None:
    """A connection is a file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


# --- that dial in --------------------------------------------------------------------------------------------------------


class Host:
    """One connection that behaves like a worker with an engine."""

    def __init__(self, number: int, token: str, passes: float) -> None:
        self._number, self._token, self._passes = number, token, passes
        self._rows: dict[str, int] = {}
        """Tokens that are missing, by request."""
        self._version, self._sampled, self._frames = -1, 0, 0
        self._rng = random.Random(number)

    async def run(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
        place = {"host": f"node-{self._number // 8}", "pid": self._number + 1}
        hello = Hello(__version__, self._token, "engine", packages=own_packages(), **place)
        self._writer.write(packed(hello))
        while (welcome := await self._greeting()).terms or welcome.waiting:
            if welcome.terms:
                self._writer.write(packed(Agreed("/model")))
        assert not welcome.refused, welcome.refused
        beats = [asyncio.ensure_future(one) for one in (self._beat(), self._generate())]
        try:
            while True:
                self._obey(decode(await receive_frame(self._reader)))
        except ConnectionError:
            pass
        finally:
            for beat in beats:
                beat.cancel()

    async def _greeting(self) -> Welcome:
        return msgspec.msgpack.decode(await receive_frame(self._reader), type=Welcome)

    def _send(self, frame: Frame) -> None:
        self._writer.write(pack(msgspec.structs.replace(frame, number=self._frames)))
        self._frames += 1

    def _push(self, method: str, payload: Any) -> None:
        self._send(Frame(0, method, pack_payload(payload)))

    async def _beat(self) -> None:
        await asyncio.sleep(self._rng.random())
        while True:
            await asyncio.sleep(SILENCE / BEATS)
            self._push(BEAT, None)
            self._push("stats", self._stats())

    async def _generate(self) -> None:
        await asyncio.sleep(self._rng.random() / self._passes)
        while True:
            await asyncio.sleep(1 / self._passes)
            if self._rows and self._version >= 0:
                self._pass()

    def _pass(self) -> None:
        names, ended = tuple(self._rows), list[Finished]()
        for name in names:
            self._rows[name] -= 1
            if not self._rows[name]:
                del self._rows[name]
                ended.append(Finished(name, "stop"))
        self._sampled += len(names)
        columns = (7,) * len(names), (-1.0,) * len(names), (self._version,) * len(names)
        self._push("output", StepOutput(self._version, names, *columns, finished=tuple(ended)))

    def _stats(self) -> EngineStats:
        return EngineStats(len(self._rows), 0, sampled_tokens=self._sampled, version=self._version)

    def _obey(self, frame: Frame) -> None:
        answer: Any = None
        match frame.method:
            case "start":
                answer = capable(1 << 20, "benchmark")
            case "stats":
                answer = self._stats()
            case "load":
                update, _ = unpack(frame.payload, tuple[WeightUpdate, int])
                self._version = update.version
                answer = LoadReport(update.version, 0.0, 0.0)
            case "add":
                self._add(unpack(frame.payload, Request))
            case "cancel":
                self._rows.pop(unpack(frame.payload, str), None)
        if frame.id:
            self._send(Frame(frame.id, frame.method, pack_payload(answer)))

    def _add(self, request: Request) -> None:
        if request.prompt_logprobs:
            scores = PromptScores(request.id, self._version, (-1.0,) * (len(request.prompt) - 1))
            self._push(
                "output", StepOutput(self._version, finished=(Finished(request.id, "length"),), scores=(scores,))
            )
        else:
            self._rows[request.id] = max(1, random.Random(request.sampling.seed).randint(*TOKENS) - len(request.prefix))


def hosts(address: str, token: str, numbers: range, passes: float) -> None:
    """One process of hosts."""

    async def run() -> None:
        await asyncio.gather(*(Host(number, token, passes).run(address) for number in numbers))

    more_files()
    asyncio.run(run())


# --- on a bus ------------------------------------------------------------------------------------------------------------


class BusHosts:
    """One process of hosts on a bus."""

    def __init__(self, url: str, numbers: range, rows: int, passes: float) -> None:
        self._bus, self._names = RedisBus(url, "bench"), [f"host-{number}" for number in numbers]
        self._room, self._passes = max(1, len(numbers) * rows // GROUP), passes
        self._rng, self._session, self._version = random.Random(numbers.start), "", -1
        self._begun: dict[str, dict[str, None]] = {name: {} for name in self._names}
        """The keys that each host works on."""
        self._letters: dict[str, Letter] = {}
        self._sampled = dict.fromkeys(self._names, 0)
        self._done, self._newer = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        while not (found := await self._bus.newer(RUN, wait=1.0)):
            pass
        notice = msgspec.msgpack.decode(found.body, type=RunNotice)
        self._session, self._mark = notice.session, notice.mark
        works = [self._weights(), self._claims(), self._keeps(), *map(self._signs, self._names)]
        await asyncio.gather(*works)

    async def _weights(self) -> None:
        than = ""
        while True:
            if found := await self._bus.newer(WEIGHTS, than, 1.0):
                than, notice = found.id, msgspec.msgpack.decode(found.body, type=WeightsNotice)
                self._version = max((update.version for update in notice.updates.values()), default=-1)
                self._newer.set()
                self._newer.clear()

    async def _signs(self, who: str) -> None:
        beat = 0
        await asyncio.sleep(self._rng.random() * ENTRY_EVERY)
        while True:
            beat += 1
            stats = EngineStats(8 * len(self._begun[who]), 0, sampled_tokens=self._sampled[who], version=self._version)
            entry = HostEntry(
                self._session,
                host="node",
                pid=beat,
                beat=beat,
                version=self._version,
                groups=len(self._begun[who]),
                begun=tuple(self._begun[who]),
                capabilities=capable(1 << 20, "benchmark"),
                stats=stats,
            )
            await self._bus.sign(who, msgspec.msgpack.encode(entry))
            await asyncio.sleep(ENTRY_EVERY)

    async def _keeps(self) -> None:
        while True:
            await self._bus.keep(TICKETS, self._names[0], list(self._letters))
            await asyncio.sleep(ENTRY_EVERY)

    async def _claims(self) -> None:
        while True:
            room = min(64, self._room - len(self._letters))
            if self._version < 0 or room <= 0:
                self._done.clear()
                await asyncio.wait([asyncio.ensure_future(self._done.wait())], timeout=0.2)
                continue
            for letter in await self._bus.claim(TICKETS, self._names[0], room, 1.0):
                if letter.id not in self._letters:
                    self._letters[letter.id] = letter
                    asyncio.get_running_loop().create_task(self._answer(letter))

    async def _answer(self, letter: Letter) -> None:
        who = min(self._names, key=lambda name: len(self._begun[name]))
        self._begun[who][letter.key] = None
        asked, reply = msgspec.msgpack.decode(letter.body, type=ErrandLetter), ErrandReply(who)
        errand = asked.errand
        if isinstance(errand, GroupErrand):
            while self._version < errand.at_least:
                await self._newer.wait()
            group, seconds = self._played(errand)
            reply = ErrandReply(who, group)
            await asyncio.sleep(seconds)
        elif isinstance(errand, RequestErrand):
            prompt, version = errand.request.prompt, self._version
            scores = (-1.0,) * (len(prompt) - 1)
            told = Completion((), (), (VersionSpan(0, version, version),), "length", prompt_logprobs=scores)
            reply = ErrandReply(who, completion=told)
        del self._begun[who][letter.key], self._letters[letter.id]
        reply = msgspec.structs.replace(reply, mark=self._mark, session=self._session, asked=asked.asked)
        posting = Posting(ANSWERS, letter.key, msgspec.msgpack.encode(reply))
        await self._bus.settle(TICKETS, [letter.id], then=posting)
        self._done.set()

    def _played(self, errand: GroupErrand) -> tuple[PlayedGroup, float]:
        """Returns a group, and the seconds that it takes."""
        lengths = [self._rng.randint(*TOKENS) for _ in range(GROUP)]
        played = [
            scored(completion((7,) * length, self._version), self._rng.random(), errand.prompt.tokens)
            for length in lengths
        ]
        return PlayedGroup(tuple(played), between=(0.0,) * GROUP), max(lengths) / self._passes


def bus_hosts(url: str, numbers: range, rows: int, passes: float) -> None:
    """One process of hosts on a bus."""
    more_files()
    asyncio.run(BusHosts(url, numbers, rows, passes).run())
