"""A bus on a Redis server (6.2 or newer): a stream with a consumer group for each queue.

    headrace:RUN:tickets, :answers     streams; a letter is an entry {k: key, b: body}, acknowledged and deleted when it is settled
    headrace:RUN:board:NAME            a stream of the newest notice
    headrace:RUN:list                  a hash: who is there
    headrace:runs                      a set: the runs

`XPENDING ... IDLE` finds the letters of silent claimants and `XCLAIM` gives them to others; `XCLAIM ... JUSTID` by the claimant says that it
is not silent. (`XAUTOCLAIM` does the first two in one command, but looks at ten times as many letters as it may claim, the oldest first: those
of a silent claimant stay hidden behind them.) An answer is posted and its ticket settled in one transaction.

A server that does not answer (yet), or takes nothing at present (its memory or its disk is full, it is a replica until another one is), is tried
again for as long as it takes: the waits of run and hosts have names and deadlines. One that refuses the user or the password is not. A server
that comes back without its memory gets its groups anew; the run posts what is missing (`hosts/bus_run.py`).
"""

from __future__ import annotations

import asyncio
import functools
import ssl
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from headrace.core.errors import ConfigError, HeadraceError
from headrace.run.hosts.bus.bus_port import LEASE, Letter, Notice, Posting

RUNS = b"headrace:runs"
GROUP = "headrace"
AGAIN, LONGEST_AGAIN = 0.5, 2.0
"""Seconds between the first two attempts to reach the server, and between later ones: the pauses double, because a thousand hosts may try."""
SOCKET = 15.0
"""Seconds after which a command without an answer counts as an outage."""
LONGEST_BLOCK = 5.0
"""Seconds for which the server may hold back the answer to a read."""
KEPT = 86_400
"""Seconds for which the board of a run that is over stays."""
QUEUES, BOARD = ("tickets", "answers"), ("run", "weights", "alive", "suspects")
"""The names that a run uses."""
PASSING = ("OOM ", "MISCONF ", "READONLY ", "MASTERDOWN ", "NOREPLICAS ", "CLUSTERDOWN ", "TRYAGAIN ", "BUSY ")
"""The beginnings of errors that say that the server takes no command, or none that writes, at present."""

T = TypeVar("T")


class Persistence(NamedTuple):
    """The part of its content that a server keeps over a restart."""

    version: str
    aof: bool
    fsync: str
    """`always`, `everysec`, `no`; empty if the server does not say."""
    evicts: bool
    """Whether it may drop keys when its memory is full."""

    def __str__(self) -> str:
        return f"Redis {self.version}, " + (f"AOF, fsync {self.fsync or 'unknown'}" if self.aof else "no AOF")


class RedisBus:
    """Protocol `Bus`."""

    def __init__(
        self,
        url: str,
        run: str,
        *,
        password: str = "",
        lease: float = LEASE,
        say: Callable[[str], None] = lambda message: None,
        again: Callable[[str], None] | None = None,
    ) -> None:
        """`say`: called when the server stops answering. `again`: when it answers again; by default `say`. Raises ConfigError for an address
        that is none."""
        self._client, self._where = client_of(url, password), url
        self._say, self._again = say, again or say
        self._prefix, self._run, self._lease = f"headrace:{run}", run, lease
        self._down = self._met = False
        """Whether it is said that the server does not answer; and whether it ever has."""
        self._backlog: dict[str, list[Letter]] = {}
        """The letters that an earlier process under this name held, by queue, until they are claimed."""
        self._looked = 0.0
        """The time at which the letters of silent claimants were last asked for."""

    async def register(self) -> None:
        """Enters the run into the list of runs. What an earlier process of it left is kept from now on."""

        async def work() -> None:
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.sadd(RUNS, self._run)
                for key in (*map(self._stream, QUEUES), *map(self._board, BOARD)):
                    pipe.persist(key)
                await pipe.execute()

        await self._steady(work)

    async def runs(self) -> list[str]:
        """Returns the runs that the server has, by name."""
        return sorted(map(_text, await self._steady(lambda: self._client.smembers(RUNS))))

    async def persistence(self) -> Persistence:
        from redis.exceptions import ResponseError

        async def fsync() -> str:
            try:
                said: str = (await self._client.config_get("appendfsync")).get("appendfsync", "")
            except ResponseError:  # many hosted servers forbid CONFIG
                return ""
            return said

        server, kept, memory = [
            await self._steady(functools.partial(self._client.info, part))
            for part in ("server", "persistence", "memory")
        ]
        evicts = bool(memory.get("maxmemory")) and memory.get("maxmemory_policy") != "noeviction"
        return Persistence(server["redis_version"], bool(kept["aof_enabled"]), await self._steady(fsync), evicts)

    async def post(self, posting: Posting) -> None:
        await self._steady(lambda: self._client.xadd(self._stream(posting.queue), _fields(posting)))

    async def claim(self, queue: str, who: str, most: int, wait: float = 0.0) -> list[Letter]:
        return await self._steady(lambda: self._claim(queue, who, most, wait))

    async def _claim(self, queue: str, who: str, most: int, wait: float) -> list[Letter]:
        stream, client = self._stream(queue), self._client
        if queue not in self._backlog:
            await self._make_group(stream)
            self._backlog[queue] = _letters(await client.xreadgroup(GROUP, who, {stream: "0"}))
        if backlog := self._backlog[queue]:
            self._backlog[queue] = backlog[most:]
            return backlog[:most]
        if time.monotonic() - self._looked > self._lease / 4:
            self._looked = time.monotonic()
            if letters := await self._inherit(stream, who, most):
                return letters
        block = round(min(wait, LONGEST_BLOCK) * 1000) or None
        return _letters(await client.xreadgroup(GROUP, who, {stream: ">"}, count=most, block=block))

    async def _inherit(self, stream: str, who: str, most: int) -> list[Letter]:
        client, silent = self._client, round(self._lease * 1000)
        found = await client.xpending_range(stream, GROUP, "-", "+", most, idle=silent)
        ids = [entry["message_id"] for entry in found]
        return _entries(await client.xclaim(stream, GROUP, who, silent, ids)) if ids else []

    async def keep(self, queue: str, who: str, ids: Collection[str]) -> None:
        if ids:
            stream, those = self._stream(queue), list(ids)
            await self._steady(lambda: self._client.xclaim(stream, GROUP, who, 0, those, justid=True))

    async def settle(self, queue: str, ids: Collection[str], then: Posting | None = None) -> None:
        async def work() -> None:
            async with self._client.pipeline(transaction=True) as pipe:
                if then:
                    pipe.xadd(self._stream(then.queue), _fields(then))
                if ids:
                    pipe.xack(self._stream(queue), GROUP, *ids)
                    pipe.xdel(self._stream(queue), *ids)
                await pipe.execute()

        await self._steady(work)

    async def unsettled(self, queue: str) -> set[str]:
        entries = await self._steady(lambda: self._client.xrange(self._stream(queue)))
        return {letter.key for letter in _entries(entries)}

    async def pin(self, name: str, body: bytes) -> None:
        stream = self._board(name)
        await self._steady(lambda: self._client.xadd(stream, {b"b": body}, maxlen=1, approximate=False))

    async def newer(self, name: str, than: str = "", wait: float = 0.0) -> Notice | None:
        return await self._steady(lambda: self._newer(self._board(name), than, wait))

    async def _newer(self, stream: str, than: str, wait: float) -> Notice | None:
        block = round(min(wait, LONGEST_BLOCK) * 1000) or None
        found = _pairs(await self._client.xread({stream: than or "0"}, block=block) or [])
        if not found and than:  # ids are times of the server: those of a stream that was lost may be the later ones
            found = await self._client.xrevrange(stream, count=1)
        if not found or found[-1][0] == than.encode():
            return None
        id, fields = found[-1]
        return Notice(id.decode(), fields.get(b"b", b""))

    async def sign(self, who: str, body: bytes) -> None:
        await self._steady(lambda: self._client.hset(f"{self._prefix}:list", who, body))

    async def signed(self) -> Mapping[str, bytes]:
        found = await self._steady(lambda: self._client.hgetall(f"{self._prefix}:list"))
        return {_text(who): body for who, body in found.items()}

    async def unsign(self, who: str) -> None:
        await self._steady(lambda: self._client.hdel(f"{self._prefix}:list", who))

    async def wipe(self) -> None:
        async def work() -> None:
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.delete(f"{self._prefix}:list")
                pipe.srem(RUNS, self._run)
                for stream in QUEUES:  # one that is deleted is an error for those who wait for its next entry
                    pipe.xtrim(self._stream(stream), maxlen=0, approximate=False)
                for key in (*map(self._board, BOARD), *map(self._stream, QUEUES)):
                    pipe.expire(key, KEPT)
                await pipe.execute()

        await self._steady(work)

    async def close(self) -> None:
        await self._client.aclose()

    def _stream(self, queue: str) -> str:
        return f"{self._prefix}:{queue}"

    def _board(self, name: str) -> str:
        return f"{self._prefix}:board:{name}"

    async def _make_group(self, stream: str) -> None:
        from redis.exceptions import ResponseError

        try:
            await self._client.xgroup_create(stream, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def _steady(self, work: Callable[[], Awaitable[T]]) -> T:
        """Does the work as soon as the server answers. Work that was done although its answer was lost is done again: letters repeat. Raises
        HeadraceError for a command that the server refuses for good, and ConfigError for a server that refuses this process, or is none."""
        from redis.exceptions import BusyLoadingError, ConnectionError, InvalidResponse, ResponseError, TimeoutError

        pause = AGAIN
        while True:
            try:
                done = await work()
            except (ConnectionError, TimeoutError, BusyLoadingError, OSError, InvalidResponse) as error:
                if remedy := _remedy(error):
                    raise ConfigError(f"{self._where} cannot be used ({error}): {remedy}") from None
                pause = await self._outage(f"does not answer ({error})", pause)
            except ResponseError as error:
                if (code := _code_of(error)).startswith(PASSING):
                    pause = await self._outage(f"takes nothing at present ({code.strip()}: {error})", pause)
                elif code.startswith(("NOGROUP", "UNBLOCKED")):
                    self._backlog.clear()  # the server has lost its memory
                else:
                    raise HeadraceError(
                        f"{self._where} refuses what is asked of it: {error}. See whether another program uses its keys {self._prefix}:*, "
                        "and what the user may do there"
                    ) from None
            else:
                _heed_cancelling()
                self._met = True
                if self._down:
                    self._down = False
                    self._again(f"{self._where} answers again")
                return done

    async def _outage(self, how: str, pause: float) -> float:
        """Waits for so many seconds. Returns the seconds of the next pause."""
        _heed_cancelling()
        if not self._down:
            self._down = True
            remedy = "" if self._met else ". If nobody starts it: redis-server --appendonly yes"
            self._say(f"{self._where} {how}; it is tried again until it does{remedy}")
        await asyncio.sleep(pause)
        return min(2 * pause, LONGEST_AGAIN)


def _remedy(error: Exception) -> str:
    """Returns what a person must do about an error of the connection; empty for one that passes with time."""
    from redis.exceptions import AuthenticationError, AuthorizationError, InvalidResponse

    if isinstance(error, AuthenticationError | AuthorizationError):
        return "give the server's password, the run's by orchestration.token_file and a rollout host's by --token-file"
    if isinstance(error.__context__, ssl.SSLCertVerificationError):
        return "name the certificate that the server's is checked with: rediss://HOST:PORT?ssl_ca_certs=FILE"
    return "name the address of a Redis server" if isinstance(error, InvalidResponse) else ""


def _code_of(error: Exception) -> str:
    """The first word of what the server said, which the client leaves out of errors that it has a class for."""
    from redis import exceptions as known

    for kind, code in (
        (known.OutOfMemoryError, "OOM "),
        (known.ReadOnlyError, "READONLY "),
        (known.MasterDownError, "MASTERDOWN "),
    ):
        if isinstance(error, kind):
            return code
    message = str(error)
    inner = message.rpartition("of pipeline caused error: ")[2].lstrip("('\"")
    return inner.partition(" ")[0] + " "


def client_of(url: str, password: str = "") -> Any:
    """A client that reports an outage instead of hiding it. Raises ConfigError for an address that is none."""
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    try:
        return Redis.from_url(
            url,
            password=password or None,
            socket_timeout=SOCKET,
            socket_connect_timeout=SOCKET,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError as error:
        raise ConfigError(f"orchestration.bus = {url} is not the address of a Redis server: {error}") from None


def _heed_cancelling() -> None:
    """Raises the cancellation of this task if the client has swallowed it: seen with redis-py 8.1, on a connection that broke before."""
    if (task := asyncio.current_task()) and task.cancelling():
        raise asyncio.CancelledError


def _fields(posting: Posting) -> dict[bytes, bytes]:
    return {b"k": posting.key.encode(), b"b": posting.body}


def _letters(found: Any) -> list[Letter]:
    return _entries(_pairs(found)) if found else []


def _pairs(found: Any) -> list[Any]:
    """The entries of an answer that names its one stream: a list of pairs, or (RESP3) a dict."""
    streams = list(found.values()) if isinstance(found, dict) else [entries for _, entries in found]
    entries = streams[0] if streams else []
    return entries[0] if entries and isinstance(entries[0], list) else entries


def _entries(entries: Iterable[Any]) -> list[Letter]:
    """Leaves out entries that were deleted, which a claim returns without their fields. One that no process of ours has written is a letter that
    nobody can read: whoever claims it settles it."""
    return [
        Letter(id.decode(), _text(fields.get(b"k", b"")), fields.get(b"b", b"")) for id, fields in entries if fields
    ]


def _text(name: bytes) -> str:
    """A name, which anybody may have written."""
    return name.decode(errors="replace")
