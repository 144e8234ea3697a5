"""The run's end of a bus: it posts errands, takes replies, and knows which hosts are there.

C2 over a bus. A letter may come twice, late, or never. So:

- The run holds the truth: its journal and buffer know every ticket in flight. An errand that is in neither queue is posted again (`_audit`).
- Each process of the run posts its own letters. Those of an earlier one are left out by hosts: if this one went on from a checkpoint, they may ask
  for other prompts under the same numbers, or for versions that it has not come to.
- The first reply to an errand is taken. Any other one, now or after a restart of the run, is counted and removed.
- A reply is removed from the bus only when its group is in the journal (`forget`). If the run is killed before that, it finds the reply again.

C1 over a bus. An errand names the version that was live when its ticket was drawn, and no host begins it with an older one. So a version is
live, in the sense of the proof in `staleness.py`, as soon as it is announced: no group that is admitted later has an older token, however
slow a host is. A reply that breaks this, or that has a version which this run has not published, is thrown away, and its errand posted again.
Of an earlier process, versions count up to the one that this process began with: later ones had other weights under the same numbers.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from headrace.core.batches import Failure
from headrace.core.errors import PoisonedRequest
from headrace.core.protocols import EnvironmentKind, Scorer
from headrace.core.reports import TOTALS, EngineStats
from headrace.core.types import Prompt
from headrace.facts.facts import EngineSample, FleetSample, MemberSample, WorkerJoined
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.own_groups import PlayedGroup, Seen, Suspects, said_of
from headrace.run.hosts.bus.bus_port import Bus, Letter, Posting
from headrace.run.hosts.bus_messages import (
    ALIVE,
    ANSWERS,
    SILENT,
    SUSPECTS,
    TICKETS,
    AliveNotice,
    Errand,
    ErrandLetter,
    ErrandReply,
    GroupErrand,
    GroupSizes,
    HeldOutErrand,
    HostEntry,
    RequestErrand,
    SuspectsNotice,
    letter_of,
)
from headrace.settings.process_config import EvalConfig

# --- The rollout hosts that the run knows of, and their sums
# The rollout hosts that the run knows of, and their sums, which cost what changes: there may be a thousand hosts.


SAMPLES = 20
"""Hosts whose statistics are recorded in one second: those of a thousand, every second, would fill a gigabyte in two hours."""


@dataclass
class KnownHost:
    """A rollout host that has signed."""

    entry: HostEntry
    body: bytes
    """The entry as it was written."""
    heard: float
    """The time at which its entry last changed, on the run's clock."""
    rate: float = 0.0
    """Sampled tokens per second between its last two entries."""

    @property
    def is_new(self) -> bool:
        """Whether the host has not loaded any weights yet."""
        return self.entry.version < 0


class HostList:
    def __init__(self, session: str) -> None:
        """`session`: that of this process of the run. Entries for others are left out."""
        self._session = session
        self.hosts: dict[str, KnownHost] = {}
        self._gone, self._there = EngineStats(), EngineStats()
        """The totals of hosts that are no longer there, and of those that are."""
        self._versions = Counter[int]()
        self._read_at = 0.0
        """The time at which entries were last read."""
        self._sample_due, self._sampled = 0.0, -1
        self._changes = 0
        """Number of times that a host has come, gone, or loaded its first weights."""

    def read(self, signed: Mapping[str, bytes], now: float) -> tuple[list[str], bool]:
        """Takes the entries that are signed now. Returns the hosts that have come, and whether any has come or serves another version."""
        came, moved = list[str](), False
        away, self._read_at = now - self._read_at, now
        for who, body in signed.items():
            known = self.hosts.get(who)
            if known and known.body == body:
                if (
                    away > SILENT / 2
                ):  # this process or its bus was stopped: nobody could be heard, and perhaps nobody could sign
                    known.heard += away
                continue
            try:
                entry = msgspec.msgpack.decode(body, type=HostEntry)
            except ValueError:  # of another version, which finds that out itself
                continue
            if entry.session != self._session:
                continue
            if known is None:
                self.hosts[who] = KnownHost(entry, body, now)
                self._count(entry, 1)
                self._changes += 1
                came.append(who)
            elif entry.beat != known.entry.beat:
                moved |= entry.version != known.entry.version
                self._renew(known, entry, body, now)
        return came, moved or bool(came)

    def _renew(self, known: KnownHost, entry: HostEntry, body: bytes, now: float) -> None:
        before = known.entry
        if (seconds := now - known.heard) > 0:
            known.rate = max(0, entry.stats.sampled_tokens - before.stats.sampled_tokens) / seconds
        self._changes += (entry.version < 0) != (before.version < 0)
        self._count(before, -1)
        self._count(entry, 1)
        known.entry, known.body, known.heard = entry, body, now

    def missing(self, signed: Collection[str], now: float) -> list[str]:
        """Returns the hosts that leave, have left or are silent."""
        return [
            who
            for who, host in self.hosts.items()
            if host.entry.leaving or who not in signed or now - host.heard > SILENT
        ]

    def part_with(self, who: str) -> KnownHost:
        host = self.hosts.pop(who)
        self._count(host.entry, -1)
        self._gone = _sum(self._gone, host.entry.stats, 1)
        self._changes += 1
        return host

    def _count(self, entry: HostEntry, times: int) -> None:
        self._there = _sum(self._there, entry.stats, times)
        self._versions[entry.version] += times
        if not self._versions[entry.version]:
            del self._versions[entry.version]

    @property
    def stats(self) -> EngineStats:
        """The sums of all hosts that were ever there. Busy seconds are the mean of those that are, so that the engine is idle to the share to
        which they are on average."""
        there = self._there
        return msgspec.structs.replace(
            _sum(self._gone, there, 1),
            busy_seconds=max(0.0, there.busy_seconds) / max(1, len(self.hosts)),
            running=there.running,
            waiting=there.waiting,
            kv_used=max((host.entry.stats.kv_used for host in self.hosts.values()), default=0.0),
            version=min(self._versions, default=-1),
        )

    def samples(self, now: float) -> tuple[MemberSample, ...] | None:
        """Returns the hosts for a record: at once when one has come, gone or begun to serve, else the less often, the more there are. None: not
        now."""
        if self._changes == self._sampled and now < self._sample_due:
            return None
        self._sampled, self._sample_due = self._changes, now + len(self.hosts) / SAMPLES
        return tuple(self._members())

    def _members(self) -> Iterator[MemberSample]:
        for who, host in self.hosts.items():
            yield MemberSample(
                name=who,
                state="away" if host.is_new else "serving",
                version=host.entry.version,
                running=host.entry.stats.running,
                tokens=host.entry.stats.sampled_tokens,
                rate=host.rate,
                absences=0,
                why="it loads its first weights" if host.is_new else "",
            )


_SUMMED = (*TOTALS, "running", "waiting")


def _sum(stats: EngineStats, other: EngineStats, times: int) -> EngineStats:
    """Returns one + times * other, of totals and of what runs and waits."""
    return EngineStats(**{name: getattr(stats, name) + times * getattr(other, name) for name in _SUMMED})


# --- desk ------------------------------------------------------------


LOOK = 1.0
"""Seconds between two looks at the list of hosts."""

NO_HOST = "no rollout host"
"""The key of warnings that are true until one comes."""

AUDIT = 10.0
"""Seconds between two comparisons of what was asked with what is on the bus."""

RUN_NAME = "run"
"""The name under which the run claims answers."""

_encode = msgspec.msgpack.Encoder().encode


@dataclass
class _Asked:
    letter: ErrandLetter
    reply: asyncio.Future[ErrandReply]
    again: bool
    """Whether an earlier process of the run has asked too: its letter names another version, and perhaps it has been answered."""
    posted: bool = False
    thrown: bool = False
    """Whether its answer was thrown away, so that the bus is right not to have it."""


class BusDesk:
    def __init__(
        self,
        bus: Bus,
        session: str,
        telemetry: Telemetry,
        changed: Callable[[], Awaitable[None]],
        suspects: Suspects,
    ) -> None:
        """`changed`: called when a host has come, moved or gone, and now and then, because the bus may have lost notices."""
        self._bus, self._session, self._telemetry, self._changed = bus, session, telemetry, changed
        self._clock, self._suspects = telemetry.clock, suspects
        self._asked: dict[str, _Asked] = {}
        self._early: dict[str, ErrandReply | None] = {}
        """Replies by key that an earlier process of the run is owed; None until they come."""
        self._expecting = asyncio.Event()
        self._beats = itertools.count()
        self._answered: set[str] = set()
        """The keys of the answers that were on the bus when this process began."""
        self.found_letters = False
        """Whether there were answers or tickets then."""
        self._replies: dict[str, str] = {}
        """The letter of each reply that was taken, by key."""
        self._to_settle: list[str] = []
        self._list = HostList(session)
        self._alone = False
        """Whether it is said that there is no host."""
        self.mark = ""
        """The mark of the run's settings (`RunNotice.mark`)."""
        self.newest = self._first = -1
        """The newest version that was announced, and the one that this process began with."""
        self.repeated = 0
        """Replies that nobody waited for."""
        self.reposted = 0
        """Errands that had to be posted again."""

    async def begin(self) -> None:
        """Reads what an earlier process of the run is owed."""
        self._answered = await self._bus.unsettled(ANSWERS)
        self.found_letters = bool(self._answered or await self._bus.unsettled(TICKETS))

    def announced(self, version: int) -> None:
        """Lets tokens be of this version from now on."""
        self.newest = version
        self._first = version if self._first < 0 else self._first

    def expect(self, keys: Collection[str]) -> None:
        """Names the errands that will be asked for again, because the run was killed meanwhile. Replies are taken from then on: before, all of
        them would be replies that nobody waits for."""
        self._early = dict.fromkeys(keys)
        self._expecting.set()

    def invite(self, command: str) -> None:
        """Says that there is no host yet, and the command that starts one."""
        self._say_alone(f"no rollout host serves this run yet; start one, on any machine: {command}")

    def _say_alone(self, message: str) -> None:
        self._alone = True
        self._telemetry.warn(message, key=NO_HOST)

    async def ask(self, key: str, errand: Errand) -> ErrandReply:
        """Raises PoisonedRequest if the errand is given up, because host after host died with it in hand."""
        reply: asyncio.Future[ErrandReply] = asyncio.get_running_loop().create_future()
        asked = self._asked[key] = _Asked(letter_of(self._session, errand), reply, again=key in self._early)
        try:
            if early := self._early.pop(key, None):
                self._take(key, asked, early)
            elif not (asked.again and key in self._answered):
                await self._post(key, asked.letter)
            asked.posted = True
            return await asked.reply
        finally:
            del self._asked[key]

    def forget(self, key: str) -> None:
        """Removes the reply from the bus: what it said is in the journal."""
        if letter := self._replies.pop(key, ""):
            self._to_settle.append(letter)

    async def live(self) -> None:
        """Gives signs of life until it is cancelled. For the time in which the run waits for its own workers, and is not announced yet: hosts are
        to stay."""
        while True:
            await self._sign()
            await asyncio.sleep(LOOK)

    async def _sign(self) -> None:
        await self._bus.pin(ALIVE, _encode(AliveNotice(self._session, next(self._beats))))

    async def run(self) -> None:
        """Works until it is cancelled."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._collect())
            loops.create_task(self._roll_call())
            loops.create_task(self._audit())

    @property
    def hosts(self) -> Mapping[str, KnownHost]:
        return self._list.hosts

    @property
    def stats(self) -> EngineStats:
        return self._list.stats

    # -- loops ----------------------------------------------------------------------------------------------------------

    async def _collect(self) -> None:
        await self._expecting.wait()
        while True:
            for letter in await self._bus.claim(ANSWERS, RUN_NAME, most=64, wait=LOOK):
                self._receive(letter)
            if settled := self._to_settle[:]:
                await self._bus.settle(ANSWERS, settled)
                del self._to_settle[: len(settled)]

    def _receive(self, letter: Letter) -> None:
        if self._replies.get(letter.key) == letter.id:
            return  # it was taken, and waits for the journal
        asked = self._asked.get(letter.key)
        try:
            reply = msgspec.msgpack.decode(letter.body, type=ErrandReply)
        except ValueError as error:  # msgspec's own errors, and text that is not UTF-8
            self._telemetry.warn(f"an answer on the bus cannot be read ({error}); it is thrown away")
            self._to_settle.append(letter.id)
            return
        if letter.key in self._replies or not (asked or letter.key in self._early):
            self.repeated += 1
            self._to_settle.append(letter.id)
            return
        self._replies[letter.key] = letter.id
        if asked is None:
            self._early[letter.key] = reply
        else:
            self._take(letter.key, asked, reply)

    def _take(self, key: str, asked: _Asked, reply: ErrandReply) -> None:
        versions, (oldest, newest) = list(_versions(reply)), self._allowed(asked, reply)
        is_other = reply.asked != asked.letter.asked
        if is_other or (reply.group is None) != isinstance(asked.letter.errand, RequestErrand):
            self._telemetry.warn(
                f"{reply.who} answered errand {key} with something else than it was asked; the answer is thrown away, and the errand posted again"
            )
            self._throw_away(key, asked)
        elif reply.group and reply.mark != self.mark:
            self._telemetry.warn(
                f"{reply.who} answered errand {key} under settings that have changed since; the answer is thrown away, and the errand posted again"
            )
            self._throw_away(key, asked)
        elif versions and not oldest <= min(versions) <= max(versions) <= newest:
            self._telemetry.warn(
                f"{reply.who} answered errand {key} with tokens of versions {min(versions)} to {max(versions)}, and only {oldest} to {newest} are "
                f"allowed; the answer is thrown away, and the errand posted again"
            )
            self._throw_away(key, asked)
        elif not asked.reply.done():
            asked.reply.set_result(reply)

    def _throw_away(self, key: str, asked: _Asked) -> None:
        self.forget(key)
        asked.posted = asked.thrown = True  # the audit finds it missing

    def _allowed(self, asked: _Asked, reply: ErrandReply) -> tuple[int, int]:
        """Returns the oldest and the newest version that the tokens of a reply may have."""
        is_own = reply.session == self._session
        oldest = 0 if asked.again and not is_own else asked.letter.errand.at_least
        return oldest, self.newest if is_own else self._first

    async def _audit(self) -> None:
        while True:
            await asyncio.sleep(AUDIT)
            waiting = [key for key, asked in self._asked.items() if asked.posted]
            # In this order: an answer is posted before its ticket is settled.
            there = await self._bus.unsettled(TICKETS) | await self._bus.unsettled(ANSWERS)
            for key in waiting:
                asked = self._asked.get(key)
                if asked and key not in there and not asked.reply.done():
                    if not (self.reposted or asked.thrown):
                        self._telemetry.warn(
                            f"errand {key} is no longer on the bus, which has lost letters; it is posted again, and so are others from now on"
                        )
                    self.reposted += not asked.thrown
                    asked.thrown = False
                    await self._post(key, asked.letter)
            await self._changed()
            await self._say_suspects()

    async def _roll_call(self) -> None:
        while True:
            # Where the bus takes nothing no host can sign, and this waits too: the hosts are not held to be silent for it.
            await self._sign()
            signed = await self._bus.signed()
            now = self._clock()
            came, moved = self._list.read(signed, now)
            for who in came:
                entry = self.hosts[who].entry
                self._telemetry.record(WorkerJoined(now, f"rollout host {who}", entry.host, entry.pid, entry.host))
            if self._alone and any(not self.hosts[who].entry.leaving for who in came):
                self._alone = False
                self._telemetry.withdraw(NO_HOST)
            if moved | await self._part_with(signed):
                await self._changed()
            self._telemetry.record(EngineSample(self._clock(), self.stats))
            if (samples := self._list.samples(now)) is not None:
                self._telemetry.record(FleetSample(self._clock(), samples))
            await asyncio.sleep(LOOK)

    async def _post(self, key: str, letter: ErrandLetter) -> None:
        await self._bus.post(Posting(TICKETS, key, _encode(letter)))

    # -- hosts ----------------------------------------------------------------------------------------------------------

    async def _part_with(self, signed: Mapping[str, bytes]) -> bool:
        """Parts with hosts that have left or are silent. Returns whether there were any."""
        parted = self._list.missing(signed, self._clock())
        for who in parted:
            host = self._list.part_with(who)
            await self._bus.unsign(who)
            (self._telemetry.warn if self.hosts else self._say_alone)(self._farewell(who, host))
            self._charge(host.entry)
        if parted:
            await self._say_suspects()
        return bool(parted)

    def _charge(self, entry: HostEntry) -> None:
        """Charges the death of a host to the errands that it worked on."""
        given_up = self._suspects.charge(entry.begun)
        if given_up:
            self._telemetry.warn(said_of(_named(given_up), self._suspects.most, "rollout hosts"))
        for key in given_up:
            asked = self._asked.get(key)
            if asked and not asked.reply.done():
                error = PoisonedRequest(said_of(_named([key]), self._suspects.most, "rollout hosts"))
                asked.reply.set_exception(error)
                asked.reply.exception()  # marks it as retrieved: the task that asked may be cancelled first

    async def _say_suspects(self) -> None:
        suspects, given_up = tuple(self._suspects.suspects), tuple(self._suspects.given_up)
        if not (suspects or given_up):
            return
        body, found = _encode(SuspectsNotice(self._session, suspects, given_up)), await self._bus.newer(SUSPECTS)
        if found is None or found.body != body:
            await self._bus.pin(SUSPECTS, body)

    def _farewell(self, who: str, host: KnownHost) -> str:
        left = f"{len(self.hosts)} left" if self.hosts else "none is left: start one with headrace rollouts"
        if host.entry.leaving:
            return f"the rollout host {who} has left{f': {host.entry.trouble}' if host.entry.trouble else ''}; {left}"
        return (
            f"the rollout host {who} on {host.entry.host} (process {host.entry.pid}) is lost: it was silent for {SILENT:g} s. Others get the "
            f"{host.entry.groups} errands that it had; {left}"
        )


def _named(keys: Sequence[str]) -> list[str]:
    return [f"t{key}" if key.isdigit() else key for key in keys]


def _versions(reply: ErrandReply) -> Iterator[int]:
    group = reply.group
    for rollout in group.scored if group else ():
        for turn in rollout.episode.turns:
            yield from (span.version for span in turn.completion.spans)
    if reply.completion:
        yield from (span.version for span in reply.completion.spans)


# --- Groups that rollout hosts sample and score, reached over a bus.


class BusGroups:
    """Protocol `GroupSource`."""

    def __init__(self, desk: BusDesk, session: str, waits: Waits, sizes: GroupSizes) -> None:
        self._desk, self._session, self._waits, self._sizes = desk, session, waits, sizes
        self._evaluations = itertools.count()
        self._of = ""

    def measuring(
        self, evaluation: EvalConfig, environment: EnvironmentKind | None, scorer: Scorer | None
    ) -> BusGroups:
        """Hosts open what the set has of its own (`open_parts` of `rollout_hosting.py`)."""
        found = copy.copy(self)  # its errands are counted with all others: their keys are the bus's
        found._of, found._sizes = evaluation.name, self._sizes._replace(held_out=evaluation.samples)
        return found

    async def trained(self, ticket: int, prompt: Prompt, seen: Seen) -> PlayedGroup:
        errand = GroupErrand(ticket, prompt, at_least=self._desk.newest)
        async with self._waits.named("rollouts", "a rollout host", advances=self.progress):
            group = await _played(self._desk.ask(str(ticket), errand), prompt.rollouts or self._sizes.trained)
        return _shown(group, seen)

    async def held_out(self, number: int, index: int, prompt: Prompt, seen: Seen) -> PlayedGroup:
        key = f"held out {self._session} {next(self._evaluations)}"
        errand = HeldOutErrand(number, index, prompt, at_least=self._desk.newest, of=self._of)
        async with self._waits.named("evaluation", "a rollout host", advances=self.progress):
            group = await _played(self._desk.ask(key, errand), self._sizes.held_out)
        self._desk.forget(key)
        return _shown(group, seen)

    def forget(self, ticket: int) -> None:
        self._desk.forget(str(ticket))

    def progress(self) -> object:
        return self._desk.stats.sampled_tokens


async def _played(asked: Awaitable[ErrandReply], rollouts: int) -> PlayedGroup:
    """Returns the group that a host has played. One that was given up is data with a reason, like any other that failed."""
    try:
        reply = await asked
    except PoisonedRequest as error:
        return PlayedGroup(failures=(Failure("engine_died", str(error)),) * rollouts)
    assert reply.group is not None, "a host answers a group with a group"
    return reply.group


def _shown(group: PlayedGroup, seen: Seen) -> PlayedGroup:
    seen([rollout.episode for rollout in group.scored])
    return group
