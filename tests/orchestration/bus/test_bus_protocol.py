"""The protocol of a bus, the same for all three: letters, leases, notices, the list of who is there."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import ConfigError, HeadraceError, StalledError
from headrace.durable.atomic_files import replacing
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.own_groups import Suspects
from headrace.loop.world import virtual_time
from headrace.loop.world.world import FactList
from headrace.run.clients.bus_engine import BusEngine
from headrace.run.hosts.bus.bus_port import Bus, Letter, Posting
from headrace.run.hosts.bus.directory_bus import JsonlBus, LineFile
from headrace.run.hosts.bus.open_bus import open_for_run, runs_on
from headrace.run.hosts.bus.redis_streams import PASSING, RedisBus, _code_of
from headrace.run.hosts.bus_messages import GroupSizes
from headrace.run.hosts.rollout_host import Deserted, HostPatience
from headrace.run.rollout_hosting import Hosting, serve_rollouts
from headrace.testing.faulty_bus import BusFaults, FaultyBus
from headrace.testing.memory_bus import MemoryBus, MemoryServer
from support.bus.redis_server import RedisServer, a_redis_server

LEASE = 2.0
"""Real seconds with Redis, virtual ones otherwise: whoever keeps a letter may not run for one of them."""

Opening = Callable[[], Bus]
"""Opens another user's end of one bus."""


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with a_redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


KINDS = ("memory", "jsonl", "redis")


@pytest.fixture(params=KINDS)
def users(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Callable[[Opening], object]], None]:
    """Runs a case, which is given what opens the ends of a new bus."""
    numbers = itertools.count()

    def run(case: Callable[[Opening], object]) -> None:
        number = next(numbers)
        if request.param == "redis":
            server: RedisServer = request.getfixturevalue("redis")
            run_name = f"{request.node.name}.{number}"
            asyncio.run(_closing(case, lambda: RedisBus(server.url, run_name, lease=LEASE)))
        else:
            virtual_time.run(_closing(case, _opening(request.param, tmp_path / str(number))))

    return run


def _opening(kind: str, directory: Path) -> Opening:
    if kind == "jsonl":
        return lambda: JsonlBus(directory, LEASE, poll=LEASE / 8, clock=asyncio.get_running_loop().time)
    shared: list[MemoryServer] = []

    def open_one() -> MemoryBus:
        if not shared:
            shared.append(MemoryServer(LEASE))
        return MemoryBus(shared[0])

    return open_one


async def _closing(case: Callable[[Opening], object], opening: Opening) -> None:
    opened: list[Bus] = []

    def remembered() -> Bus:
        opened.append(opening())
        return opened[-1]

    try:
        await case(remembered)  # type: ignore[misc]
    finally:
        for bus in opened:
            await bus.close()


def keys(letters: list[Letter]) -> list[str]:
    return [letter.key for letter in letters]


def test_letters_are_claimed_once_in_order_and_settled(users: Callable[..., None]) -> None:
    async def case(opening: Opening) -> None:
        run, one, other = opening(), opening(), opening()
        for number in range(5):
            await run.post(Posting("tickets", str(number), b"body %d" % number))
        first = await one.claim("tickets", "one", most=2)
        second = await other.claim("tickets", "other", most=9)
        assert keys(first) == ["0", "1"] and keys(second) == ["2", "3", "4"]
        assert second[0].body == b"body 2"
        assert await one.claim("tickets", "one", most=9) == [] == await other.claim("tickets", "other", most=9)
        assert await run.unsettled("tickets") == {"0", "1", "2", "3", "4"}
        await one.settle("tickets", [first[0].id], then=Posting("answers", "0", b"done"))
        assert await run.unsettled("tickets") == {"1", "2", "3", "4"}
        assert [(letter.key, letter.body) for letter in await run.claim("answers", "run", most=9)] == [("0", b"done")]
        await one.settle("tickets", [first[0].id])  # again, which changes nothing
        await other.settle("tickets", [letter.id for letter in second])
        assert await run.unsettled("tickets") == {"1"} and await run.unsettled("answers") == {"0"}

    users(case)


def test_letters_of_the_silent_go_to_others_and_those_of_the_living_do_not(users: Callable[..., None]) -> None:
    async def case(opening: Opening) -> None:
        run, dead, living, heir = (opening() for _ in range(4))
        for key in ("a", "b", "c"):
            await run.post(Posting("tickets", key, b""))
        lost, kept = await dead.claim("tickets", "dead", most=1), await living.claim("tickets", "living", most=2)
        assert (keys(lost), keys(kept)) == (["a"], ["b", "c"])
        assert await heir.claim("tickets", "heir", most=9) == []
        inherited: list[Letter] = []
        for _ in range(12):
            await asyncio.sleep(LEASE / 4)
            await living.keep("tickets", "living", [letter.id for letter in kept])
            inherited += await heir.claim("tickets", "heir", most=9)
            await heir.keep("tickets", "heir", [letter.id for letter in inherited])
        assert keys(inherited) == ["a"], "once, though it was silent for several leases, because its heir keeps it"
        await dead.settle("tickets", [lost[0].id])  # it was only slow
        await heir.settle("tickets", [inherited[0].id])
        assert await run.unsettled("tickets") == {"b", "c"}

    users(case)


def test_one_silent_letter_is_found_behind_many_that_are_kept(users: Callable[..., None]) -> None:
    async def case(opening: Opening) -> None:
        run, dead, living, heir = (opening() for _ in range(4))
        for number in range(61):
            await run.post(Posting("tickets", str(number), b""))
        kept = await living.claim("tickets", "living", most=60)
        assert keys(await dead.claim("tickets", "dead", most=1)) == ["60"]
        inherited: list[Letter] = []
        for _ in range(12):
            await asyncio.sleep(LEASE / 4)
            await living.keep("tickets", "living", [letter.id for letter in kept])
            inherited += await heir.claim("tickets", "heir", most=1)
        assert "60" in keys(inherited)

    users(case)


def test_a_letter_that_is_not_kept_comes_again_even_to_its_holder(users: Callable[..., None]) -> None:
    """It may have been forgotten: a settlement that was lost would otherwise leave it there for ever."""

    async def case(opening: Opening) -> None:
        only = opening()
        await only.post(Posting("tickets", "a", b""))
        [first] = await only.claim("tickets", "only", most=1)
        assert await only.claim("tickets", "only", most=1) == []
        await asyncio.sleep(LEASE * 1.5)
        assert await only.claim("tickets", "only", most=1, wait=LEASE) == [first]

    users(case)


def test_a_process_that_is_started_again_gets_what_it_held(users: Callable[..., None]) -> None:
    async def case(opening: Opening) -> None:
        run = opening()
        for key in ("a", "b", "c"):
            await run.post(Posting("answers", key, b""))
        assert keys(await run.claim("answers", "run", most=2)) == ["a", "b"]
        again = opening()
        assert keys(await again.claim("answers", "run", most=1)) == ["a"]
        assert keys(await again.claim("answers", "run", most=1)) == ["b"]
        assert keys(await again.claim("answers", "run", most=9)) == ["c"]
        assert await again.claim("answers", "run", most=9) == []

    users(case)


def test_a_claim_waits_for_a_letter(users: Callable[..., None]) -> None:
    async def case(opening: Opening) -> None:
        run, host = opening(), opening()
        waiting = asyncio.ensure_future(host.claim("tickets", "host", most=4, wait=60.0))
        await asyncio.sleep(LEASE / 4)
        assert not waiting.done()
        await run.post(Posting("tickets", "a", b""))
        assert keys(await waiting) == ["a"]

    users(case)


def test_a_notice_is_the_newest_and_is_waited_for(users: Callable[..., None]) -> None:
    async def case(opening: Opening) -> None:
        run, host = opening(), opening()
        assert await host.newer("weights") is None
        waiting = asyncio.ensure_future(host.newer("weights", wait=60.0))
        await asyncio.sleep(LEASE / 4)
        await run.pin("weights", b"1")
        first = await waiting
        assert first is not None and first.body == b"1"
        assert await host.newer("weights", first.id) is None
        for body in (b"2", b"3"):
            await run.pin("weights", body)
        third = await host.newer("weights", first.id, wait=1.0)
        assert third is not None and third.body == b"3"
        assert await host.newer("weights", third.id) is None and await host.newer("run") is None

    users(case)


def test_the_list_has_the_last_entry_of_each(users: Callable[..., None]) -> None:
    async def case(opening: Opening) -> None:
        run, one, other = opening(), opening(), opening()
        await one.sign("one", b"1")
        await other.sign("other", b"2")
        await one.sign("one", b"3")
        assert dict(await run.signed()) == {"one": b"3", "other": b"2"}
        await run.unsign("one")
        await run.unsign("nobody")
        assert dict(await run.signed()) == {"other": b"2"}

    users(case)


def test_what_is_wiped_is_gone_but_for_the_board(users: Callable[..., None]) -> None:
    async def case(opening: Opening) -> None:
        run, host = opening(), opening()
        await run.pin("run", b"over")
        await host.sign("host", b"")
        for queue in ("tickets", "answers"):
            await run.post(Posting(queue, "a", b""))
        await host.claim("tickets", "host", most=1)
        await run.wipe()
        assert await run.unsettled("tickets") == set() == await run.unsettled("answers")
        assert not await run.signed()
        late = await opening().newer("run")
        assert late is not None and late.body == b"over"
        await run.post(Posting("tickets", "b", b""))
        assert keys(await host.claim("tickets", "host", most=9, wait=1.0)) == ["b"]

    users(case)


_NUMBERS = itertools.count()
"""Not random: Hypothesis seeds that."""

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["post", "claim", "settle", "keep", "sleep", "die"]), st.integers(0, 2), st.integers(1, 4)
    ),
    max_size=40,
)


async def _every_letter_survives(opening: Opening, events: list[tuple[str, int, int]]) -> None:
    """Whatever three hosts do, a letter that was not settled comes to a host that asks long enough, and one that was settled to nobody."""
    run, hosts, lives = opening(), [opening() for _ in range(3)], [0, 0, 0]
    held: list[dict[str, Letter]] = [{}, {}, {}]
    posted, settled = 0, set[str]()
    for event, who, count in events:
        name = f"host {who}.{lives[who]}"
        match event:
            case "post":
                for _ in range(count):
                    await run.post(Posting("tickets", str(posted), b""))
                    posted += 1
            case "claim":
                claimed = await hosts[who].claim("tickets", name, most=count)
                assert not {letter.key for letter in claimed} & settled
                held[who] |= {letter.id: letter for letter in claimed}
            case "settle":
                gone = [held[who].pop(id) for id in list(held[who])[:count]]
                await hosts[who].settle("tickets", [letter.id for letter in gone])
                settled |= {letter.key for letter in gone}
            case "keep":
                await hosts[who].keep("tickets", name, list(held[who]))
            case "sleep":
                await asyncio.sleep(LEASE / 3 * count)
            case "die":
                held[who], hosts[who] = {}, opening()
                lives[who] += 1
    wanted = {str(number) for number in range(posted)} - settled
    assert await run.unsettled("tickets") == wanted
    last, found = opening(), set[str]()
    for _ in range(8):
        found |= set(keys(await last.claim("tickets", "last", most=200)))
        await asyncio.sleep(LEASE / 2)
    assert found == wanted


@settings(max_examples=60)
@given(events=EVENTS)
def test_every_letter_survives_in_memory(events: list[tuple[str, int, int]]) -> None:
    virtual_time.run(_every_letter_survives(_opening("memory", Path()), events))


@settings(max_examples=25)
@given(events=EVENTS)
def test_every_letter_survives_in_files(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, int, int]]
) -> None:
    virtual_time.run(_every_letter_survives(_opening("jsonl", tmp_path_factory.mktemp("bus")), events))


@pytest.mark.slow
@settings(max_examples=10)
@given(events=EVENTS)
def test_every_letter_survives_in_redis(redis: RedisServer, events: list[tuple[str, int, int]]) -> None:
    name = f"property {next(_NUMBERS)}"
    asyncio.run(
        _closing(
            lambda opening: _every_letter_survives(opening, events), lambda: RedisBus(redis.url, name, lease=LEASE)
        )
    )


def test_a_faulty_bus_does_what_its_faults_say() -> None:
    async def case(faults: BusFaults) -> Counter[str]:
        bus = FaultyBus(MemoryBus(MemoryServer(lease=1.0)), faults, random.Random(0))
        for number in range(200):
            await bus.post(Posting("tickets", str(number), b""))
        await asyncio.sleep(10.0)
        letters = await bus.claim("tickets", "host", most=1000)
        await bus.settle("tickets", [letter.id for letter in letters[:100]])
        return Counter(keys(letters)) + Counter(unsettled=len(await bus.unsettled("tickets")))

    whole = virtual_time.run(case(BusFaults()))
    assert whole.pop("unsettled") == 100 and set(whole.values()) == {1} and list(whole) == [str(n) for n in range(200)]
    lost = virtual_time.run(case(BusFaults(lost=0.3)))
    assert 120 < len(lost) - 1 < 160
    repeated = virtual_time.run(case(BusFaults(repeated=0.3)))
    assert sum(count == 2 for key, count in repeated.items() if key != "unsettled") > 40
    late = virtual_time.run(case(BusFaults(late=0.5, latest=5.0)))
    assert len(late) == 201 and list(late)[:50] != [str(n) for n in range(50)]
    assert virtual_time.run(case(BusFaults(unsettled=1.0)))["unsettled"] == 200


# --- files -------------------------------------------------------------------------------------------------------------


def test_half_a_line_is_cut_off_and_a_damaged_one_left_out(tmp_path: Path) -> None:
    path = tmp_path / "tickets.jsonl"

    async def case() -> None:
        bus = JsonlBus(tmp_path, LEASE)
        await bus.post(Posting("tickets", "a", b"1"))
        with path.open("ab") as file:
            file.write(b'deadbeef ["post","x","torn"')  # a kill in the middle of a write
        assert await JsonlBus(tmp_path, LEASE).unsettled("tickets") == {"a"}
        await bus.post(Posting("tickets", "b", b"2"))
        assert path.read_bytes().count(b"torn") == 0
        damaged = path.read_bytes().replace(b'"b"', b'"z"')  # a page that a loss of power took
        path.write_bytes(damaged)
        await bus.post(Posting("tickets", "c", b"3"))
        assert await JsonlBus(tmp_path, LEASE).unsettled("tickets") == {"a", "c"}

    asyncio.run(case())
    file = LineFile(path)
    with file.locked():
        file.new()
    assert file.damaged == 1


def test_a_file_of_settled_letters_is_shortened_under_those_who_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.run.hosts.bus.directory_bus.COMPACT", 4096)

    async def case() -> None:
        run, host, other = (JsonlBus(tmp_path, 60.0) for _ in range(3))
        await run.post(Posting("tickets", "held", b"x" * 50))
        [mine] = await other.claim("tickets", "other", most=1)
        sizes = []
        for number in range(60):
            await run.post(Posting("tickets", str(number), b"x" * 200))
            [letter] = await host.claim("tickets", "host", most=1)
            assert letter.key == str(number)
            await host.settle("tickets", [letter.id])
            sizes.append((tmp_path / "tickets.jsonl").stat().st_size)
        assert max(sizes) < 8192 and any(after < before for before, after in itertools.pairwise(sizes))
        assert await other.claim("tickets", "other", most=9) == [], (
            "it still holds what it holds, after the file was replaced"
        )
        assert await host.claim("tickets", "host", most=9) == []
        await other.settle("tickets", [mine.id])
        assert await run.unsettled("tickets") == set()

    asyncio.run(case())


def test_a_host_that_signs_while_the_run_wipes_is_not_disturbed(tmp_path: Path) -> None:
    """Its entry lies beside the others until it is whole, and was removed with them: the host ended with an error after a run that was over."""
    run = JsonlBus(tmp_path, LEASE)
    with replacing(tmp_path / "list" / "host") as write:
        write(b"leaving")
        asyncio.run(run.wipe())
    assert dict(asyncio.run(run.signed())) == {"host": b"leaving"}


# --- Redis -------------------------------------------------------------------------------------------------------------


def test_what_a_server_keeps_is_known_and_runs_are_listed(redis: RedisServer) -> None:
    async def case() -> None:
        bus = RedisBus(redis.url, "demo.1")
        kept = await bus.persistence()
        assert (kept.aof, kept.fsync, kept.evicts) == (True, "everysec", False) and "AOF, fsync everysec" in str(kept)
        await bus.register()
        assert "demo.1" in await bus.runs()
        await bus.wipe()
        assert "demo.1" not in await bus.runs()
        await bus.close()

    asyncio.run(case())


@contextlib.asynccontextmanager
async def a_server_that_says(answer: bytes) -> AsyncIterator[str]:
    """The address of a server that has one answer for all commands."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"


NOWHERE = "redis://127.0.0.1:1"


def test_a_host_waits_for_a_server_that_does_not_answer_yet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("redis")
    patience = HostPatience(run=0.3)
    with pytest.raises(Deserted, match=r"a run on redis://127.0.0.1:1 was waited for 0.3 s \(--patience\)"):
        serve_rollouts(Hosting(bus=NOWHERE, patience=patience))
    said = capfd.readouterr().err
    assert "redis://127.0.0.1:1 does not answer (" in said and "redis-server --appendonly yes" in said
    with pytest.raises(Deserted, match=f"a run called demo on jsonl:{tmp_path} was waited for"):
        serve_rollouts(Hosting(bus=f"jsonl:{tmp_path}", run="demo", patience=patience))
    assert "waiting for a run called demo" in capfd.readouterr().err
    with pytest.raises(ConfigError, match="is not the address of a Redis server"):
        serve_rollouts(Hosting(bus="redis://127.0.0.1:none", patience=patience))


def test_a_run_waits_for_a_server_that_does_not_answer_yet() -> None:
    pytest.importorskip("redis")

    async def case() -> list[str]:
        facts, clock, said = FactList(), asyncio.get_running_loop().time, list[str]()
        telemetry = Telemetry(facts.record, clock, Waits(facts.record, clock, 0.1, 0.3))
        sizes, suspects = GroupSizes(1, 1), Suspects(1)
        opened = functools.partial(open_for_run, NOWHERE, "demo", say=said.append)
        engine = BusEngine(NOWHERE, opened, "", telemetry, sizes=sizes, suspects=suspects)
        with pytest.raises(
            StalledError, match=r"stopped: start has waited .* for the bus redis://127.0.0.1:1 to answer"
        ):
            await engine.launch()
        await engine.close()
        return said

    (said,) = asyncio.run(case())
    assert "it is tried again until it does. If nobody starts it: redis-server --appendonly yes" in said


@pytest.mark.parametrize(
    ("answer", "remedy"),
    [
        (b"-NOAUTH Authentication required.\r\n", "give the server's password, the run's by orchestration.token_file"),
        (b"-WRONGPASS invalid username-password pair or user is disabled.\r\n", "a rollout host's by --token-file"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "name the address of a Redis server"),
    ],
)
def test_a_server_that_refuses_a_process_is_not_waited_for(answer: bytes, remedy: str) -> None:
    pytest.importorskip("redis")

    async def case() -> None:
        async with a_server_that_says(answer) as url:
            for opened in (
                lambda: runs_on(url, "guessed", say=print),
                lambda: open_for_run(url, "demo", password="guessed", say=print),
            ):
                with pytest.raises(ConfigError, match=re.escape(f"{url} cannot be used (")) as refused:
                    async with asyncio.timeout(60):
                        await opened()
                assert remedy in str(refused.value)

    asyncio.run(case())


def test_a_server_that_is_killed_loses_no_letter_and_is_waited_for(tmp_path: Path) -> None:
    with a_redis_server(tmp_path) as server:
        asyncio.run(_killed(server))


async def _killed(server: RedisServer) -> None:
    messages: list[str] = []
    run, host = RedisBus(server.url, "demo", lease=60.0, say=messages.append), RedisBus(server.url, "demo", lease=60.0)
    for number in range(20):
        await run.post(Posting("tickets", str(number), b"x" * 50_000))
    held = await host.claim("tickets", "host", most=7)
    server.kill()
    posting = asyncio.ensure_future(run.post(Posting("tickets", "meanwhile", b"")))
    while not messages:
        await asyncio.sleep(0.01)
    assert not posting.done() and "does not answer" in messages[0]
    server.start()
    await posting
    assert "answers again" in messages[1]
    assert await run.unsettled("tickets") == {*map(str, range(20)), "meanwhile"}
    await host.settle("tickets", [letter.id for letter in held])
    assert len(await host.claim("tickets", "host", most=99)) == 14
    for bus in (run, host):
        await bus.close()


def on(server: RedisServer, case: Callable[[RedisBus, RedisBus], object], messages: list[str] | None = None) -> None:
    """A run's end of a bus, and a host's."""

    async def both() -> None:
        name = f"demo.{next(NAMES)}"
        run, host = (
            RedisBus(server.url, name, lease=60.0, say=(messages if messages is not None else []).append)
            for _ in range(2)
        )
        try:
            await run.register()
            await case(run, host)  # type: ignore[misc]
        finally:
            await run.close()
            await host.close()

    asyncio.run(both())


NAMES = itertools.count()


def test_what_no_process_of_ours_has_written_is_a_letter_or_a_notice_that_nobody_can_read(redis: RedisServer) -> None:
    """It ended every host, one after the other: none of them could settle it."""

    async def case(run: RedisBus, host: RedisBus) -> None:
        client = run._client
        for fields in ({b"x": b"y"}, {b"k": b"\xff", b"b": b"y"}, {b"k": b"z"}):
            await client.xadd(run._stream("tickets"), fields)
        await run.post(Posting("tickets", "right", b"body"))
        assert {"right"} < await run.unsettled("tickets")
        letters = await host.claim("tickets", "host", most=9)
        assert [letter.body for letter in letters] == [b"", b"y", b"", b"body"]
        await host.settle("tickets", [letter.id for letter in letters])
        assert await run.unsettled("tickets") == set()
        await client.xadd(run._board("run"), {b"x": b"y"})
        notice = await host.newer("run")
        assert notice and notice.body == b""
        await client.hset(f"{run._prefix}:list", b"\xff", b"y")
        assert list((await run.signed()).values()) == [b"y"]

    on(redis, case)


def test_a_notice_is_read_although_its_server_has_an_earlier_time_than_before(redis: RedisServer) -> None:
    """Its memory was lost, and its clock set back (or another server took its place): hosts would keep their weights for ever."""

    async def case(run: RedisBus, host: RedisBus) -> None:
        await run._client.xadd(run._board("weights"), {b"b": b"old"}, id="99999999999999-0")
        old = await host.newer("weights")
        assert old and await host.newer("weights", old.id) is None
        await run._client.delete(run._board("weights"))
        await run.pin("weights", b"new")
        new = await host.newer("weights", old.id, wait=0.05)
        assert new and new.body == b"new" and await host.newer("weights", new.id) is None

    on(redis, case)


def test_a_server_whose_memory_is_full_is_waited_for(redis: RedisServer) -> None:
    said = list[str]()

    async def case(run: RedisBus, host: RedisBus) -> None:
        await run.post(Posting("tickets", "held", b""))
        [held] = await run.claim("tickets", "host", most=1)
        await run._client.config_set("maxmemory", "100kb")
        try:
            answer = asyncio.ensure_future(run.settle("tickets", [held.id], then=Posting("answers", "held", b"")))
            while not said:
                await asyncio.sleep(0.01)
            assert not answer.done() and "takes nothing at present (OOM" in said[0]
        finally:
            await run._client.config_set("maxmemory", "0")
        await answer
        assert "answers again" in said[1]
        assert (await run.unsettled("tickets"), await run.unsettled("answers")) == (set(), {"held"})

    on(redis, case, said)


@pytest.mark.parametrize(
    ("said", "passes"),
    [
        ("MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk", True),
        (
            "Command # 1 (XADD a * k b) of pipeline caused error: ('NOREPLICAS Not enough good replicas to write.',)",
            True,
        ),
        ("BUSY Redis is busy running a script", True),
        ("BUSYGROUP Consumer Group name already exists", False),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", False),
        ("NOPERM this user has no permissions to run the 'xadd' command", False),
    ],
)
def test_a_server_that_takes_nothing_is_told_from_one_that_refuses(said: str, passes: bool) -> None:
    exceptions = pytest.importorskip("redis").exceptions
    assert _code_of(exceptions.ResponseError(said)).startswith(PASSING) == passes
    assert _code_of(exceptions.ReadOnlyError("You can't write against a read only replica.")).startswith(PASSING)


def test_a_command_that_is_refused_for_good_ends_with_a_sentence_and_is_no_fault_of_an_errand(
    redis: RedisServer,
) -> None:
    async def case(run: RedisBus, host: RedisBus) -> None:
        await run._client.delete(run._stream("tickets"))
        await run._client.set(run._stream("tickets"), b"of another program")
        with pytest.raises(HeadraceError, match="refuses what is asked of it.*another program uses its keys"):
            await host.claim("tickets", "host", most=1)

    on(redis, case)


def test_the_end_of_a_run_leaves_the_boards_of_others_and_its_own_stay_if_it_goes_on(redis: RedisServer) -> None:
    async def case() -> None:
        ending, other = RedisBus(redis.url, "a*"), RedisBus(redis.url, "ab")
        for bus in (ending, other):
            await bus.register()
            await bus.pin("suspects", b"")
        await ending.wipe()
        left = [await bus._client.ttl(bus._board("suspects")) for bus in (ending, other)]
        assert left[0] > 0 and left[1] == -1
        await ending.register()
        assert await ending._client.ttl(ending._board("suspects")) == -1
        for bus in (ending, other):
            await bus.wipe()
            await bus.close()

    asyncio.run(case())


def test_entries_that_are_signed_at_once_are_written_one_after_the_other(tmp_path: Path) -> None:
    async def case() -> None:
        bus = JsonlBus(tmp_path)
        await asyncio.gather(*(bus.sign("host", b"%d" % number) for number in range(200)))
        assert (await bus.signed()).keys() == {"host"}

    asyncio.run(case())
