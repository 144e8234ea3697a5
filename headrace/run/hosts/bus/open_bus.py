"""Buses by their address: `redis://HOST:PORT`, `rediss://HOST:PORT`, `jsonl:DIRECTORY`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.run.hosts.bus.bus_port import Bus
from headrace.run.hosts.bus.directory_bus import JsonlBus, runs_in
from headrace.run.hosts.bus.redis_streams import RedisBus
from headrace.settings.extras import install, is_installed

FORGETS = (
    "keeps no append-only file: when it is started again, letters are gone, and rollouts that were finished or under way are sampled again. "
    "Start it with --appendonly yes (or: redis-cli config set appendonly yes), or allow it with orchestration.bus_forgets = true"
)


def open_bus(url: str, run: str, *, password: str = "", say: Callable[[str], None]) -> Bus:
    """Raises ConfigError for an address that is none. A server need not answer yet."""
    if directory := _directory(url):
        return _in_files(directory / run, url)
    return RedisBus(url, run, password=password, say=say)


async def open_for_run(
    url: str,
    run: str,
    *,
    password: str = "",
    forgets: bool = False,
    say: Callable[[str], None],
    again: Callable[[str], None] | None = None,
) -> tuple[Bus, str]:
    """Opens the run's end, and enters the run into the list of runs. Returns the bus, and what it keeps, in words. `forgets`: whether it
    may be a server without an append-only file. `say`, `again`: as for `RedisBus`. Waits for a server that does not answer yet. Raises
    ConfigError if it cannot be used."""
    bus: JsonlBus | RedisBus
    if directory := _directory(url):
        bus, kept = _in_files(directory / run, url), "files, flushed"
    else:
        bus = RedisBus(url, run, password=password, say=say, again=again)
        try:
            kept = await _checked(bus, url, forgets, say)
        except BaseException:
            await bus.close()
            raise
    await bus.register()
    return bus, kept


async def runs_on(url: str, password: str = "", *, say: Callable[[str], None]) -> list[str]:
    """Returns the runs on a bus, by name, as soon as it answers. `say`: as for `RedisBus`. Raises ConfigError if it cannot be used."""
    if directory := _directory(url):
        return runs_in(directory)
    bus = RedisBus(url, "", password=password, say=say)
    try:
        return await bus.runs()
    finally:
        await bus.close()


async def _checked(bus: RedisBus, url: str, forgets: bool, say: Callable[[str], None]) -> str:
    found = await bus.persistence()
    if tuple(map(int, found.version.split(".")[:2])) < (6, 2):
        raise ConfigError(f"orchestration.bus = {url} is Redis {found.version}; XPENDING with IDLE needs 6.2 or newer")
    if found.evicts:
        raise ConfigError(
            f"orchestration.bus = {url} drops keys when its memory is full (maxmemory-policy); set it to noeviction, or use a server of its own"
        )
    if not found.aof:
        if not forgets:
            raise ConfigError(f"orchestration.bus = {url} {FORGETS}")
        say(f"{url} keeps no append-only file (orchestration.bus_forgets)")
    return str(found)


def _directory(url: str) -> Path | None:
    kind, _, place = url.partition(":")
    if kind == "jsonl":
        return Path(place).expanduser().absolute()
    if not is_installed("redis"):
        raise ConfigError(f"{url} needs the package redis: {install('redis')}; jsonl:DIRECTORY needs none")
    return None


def _in_files(directory: Path, url: str) -> JsonlBus:
    try:
        return JsonlBus(directory)
    except OSError as error:
        raise ConfigError(f"{url} cannot be used: {error}; name a directory that can be written") from None
