"""`headrace pool`: the members of a running run are seen and changed through the socket in its directory."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.core.errors import ConfigError, WorkerDied
from headrace.engine.fleet.fleet import Fleet
from headrace.engine.fleet.member import MemberEngine
from headrace.engine.fleet.rotation import FleetPatience
from headrace.facts.facts import MemberMoved, MemberSample
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.run.fleets import pool_door
from headrace.run.fleets.pool_door import SOCKET, PoolAnswer, PoolDoor, PoolQuestion, ask
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.makers import request, update
from headrace.views.screen.live import absences, short, table

ONE, TWO, THREE = (f"http://127.0.0.1:{port}" for port in (8101, 8102, 8103))
Case = Callable[[Fleet, PoolDoor], Coroutine[Any, Any, None]]


def fake() -> FakeEngine:
    return FakeEngine(seconds_per_token=0.001, length=lambda rng: 30)


def run(directory: Path, case: Case, settings: tuple[str, ...] = (ONE, TWO), joins: bool = True) -> None:
    async def join(url: str) -> MemberEngine:
        if url.endswith(":9"):
            raise WorkerDied("engine", f"at {url} was away for 60 s")
        return fake()

    async def whole() -> None:
        clock, record = asyncio.get_running_loop().time, lambda fact: None
        telemetry = Telemetry(record, clock, Waits(record, clock, 1e6, 1e6))
        fleet = Fleet({url: fake() for url in settings}, FleetPatience(60, 30), telemetry)
        await fleet.open()
        await fleet.load(update(0))
        door = PoolDoor(directory, fleet, join if joins else None, settings)
        await door.open()
        try:
            async with asyncio.timeout(100):
                await case(fleet, door)
        finally:
            await door.close()
            await fleet.close()

    asyncio.run(whole())


async def asked(directory: Path, do: str, member: str = "") -> PoolAnswer:
    return await asyncio.to_thread(ask, directory, PoolQuestion(do, member), 50.0)  # type: ignore[arg-type]


def names(answer: PoolAnswer) -> list[str]:
    return [member.name for member in answer.members]


def test_a_server_is_added_and_another_removed_while_requests_run(tmp_path: Path) -> None:
    async def case(fleet: Fleet, door: PoolDoor) -> None:
        assert names(await asked(tmp_path, "show")) == [ONE, TWO]
        tasks = [asyncio.ensure_future(fleet.generate(request(f"t{i}/0", (i,), 30))) for i in range(6)]
        await asyncio.sleep(0.01)
        assert names(await asked(tmp_path, "add", f"{THREE}/")) == [ONE, TWO, THREE]
        answer = await asked(tmp_path, "remove", ONE)
        assert names(answer) == [TWO, THREE] and not answer.error
        done = await asyncio.gather(*tasks)
        assert all(len(one.tokens) == 30 and one.stop == "length" for one in done)
        assert pool_door.urls_of(tmp_path, (ONE, TWO)) == (TWO, THREE), "a resumed run goes on with them"
        assert pool_door.urls_of(tmp_path, (ONE,)) == (ONE,), "unless its settings name others"

    run(tmp_path, case)
    assert not (tmp_path / SOCKET).exists()


def test_what_cannot_be_done_is_refused_with_a_sentence_and_changes_nothing(tmp_path: Path) -> None:
    async def case(fleet: Fleet, door: PoolDoor) -> None:
        for do, member, said in (
            ("add", ONE, "is a member already"),
            ("add", "http://127.0.0.1:9", "was away for 60 s"),
            ("remove", THREE, f"there is no member {THREE}; there are {ONE}, {TWO}"),
        ):
            answer = await asked(tmp_path, do, member)
            assert said in answer.error and names(answer) == [ONE, TWO]
        await asked(tmp_path, "remove", ONE)
        assert f"no other member than {TWO} serves" in (await asked(tmp_path, "remove", TWO)).error
        assert pool_door.urls_of(tmp_path, (ONE, TWO)) == (TWO,)

    run(tmp_path, case)


def test_members_that_are_processes_can_be_removed_and_not_added(tmp_path: Path) -> None:
    async def case(fleet: Fleet, door: PoolDoor) -> None:
        assert "resume it with another number" in (await asked(tmp_path, "add", THREE)).error
        assert names(await asked(tmp_path, "remove", "1")) == ["2"]
        assert not (tmp_path / pool_door.FILE).exists()

    run(tmp_path, case, settings=("1", "2"), joins=False)


def test_the_socket_is_for_the_user_alone_and_replaces_that_of_a_killed_run(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        here = os.getcwd()
        os.chdir(tmp_path)
        left.bind(SOCKET)
        os.chdir(here)

    async def case(fleet: Fleet, door: PoolDoor) -> None:
        assert stat.S_IMODE((tmp_path / SOCKET).stat().st_mode) == 0o600
        assert names(await asked(tmp_path, "show")) == [ONE, TWO]

    run(tmp_path, case)


def test_a_long_path_is_no_obstacle(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 80) / ("e" * 80)
    deep.mkdir(parents=True)

    async def case(fleet: Fleet, door: PoolDoor) -> None:
        assert names(await asked(deep, "show")) == [ONE, TWO]

    run(deep, case)


@pytest.mark.parametrize("line", [b"\n", b"{}\n", b'{"do": "format"}\n', b"x" * 10_000, b""])
def test_nonsense_is_answered_or_dropped_and_the_door_stays_open(tmp_path: Path, line: bytes) -> None:
    async def case(fleet: Fleet, door: PoolDoor) -> None:
        def send() -> bytes:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(tmp_path / SOCKET)) if len(str(tmp_path)) < 80 else pytest.skip("a long path")
                connection.sendall(line)
                connection.shutdown(socket.SHUT_WR)
                return connection.makefile("rb").read()

        answer = await asyncio.to_thread(send)
        assert not answer or b'"error":""' not in answer
        assert names(await asked(tmp_path, "show")) == [ONE, TWO]

    run(tmp_path, case)


def test_a_run_that_does_not_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it does not run, or has one engine"):
        ask(tmp_path, PoolQuestion("show"), 1.0)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def case(fleet: Fleet, door: PoolDoor) -> None:
        assert await asyncio.to_thread(main, ["pool", str(tmp_path)]) == 0
        out = capsys.readouterr().out
        assert [line.split()[0] for line in out.splitlines()] == ["member", ONE, TWO] and "serving" in out
        assert await asyncio.to_thread(main, ["pool", str(tmp_path), "add", THREE]) == 0
        assert THREE in capsys.readouterr().out
        assert await asyncio.to_thread(main, ["pool", str(tmp_path), "remove", "http://10.0.0.9:1"]) == 1
        assert "there is no member http://10.0.0.9:1" in capsys.readouterr().err
        for wrong in (["add"], ["show", ONE], ["add", "10.0.0.1"]):
            assert await asyncio.to_thread(main, ["pool", str(tmp_path), *wrong]) == 2

    run(tmp_path, case)


def sample(name: str, state: str = "serving", **more: Any) -> MemberSample:
    usual = {"version": 12, "running": 64, "tokens": 1_234_567, "rate": 2_345.6, "absences": 3}
    return MemberSample(name=name, state=state, **{**usual, **more})  # type: ignore[arg-type]


def test_the_table_fits_into_80_columns() -> None:
    far = "https://inference-17.region-4.cloud.example.com:30000"
    members = [sample(ONE), sample(far), sample(TWO, "away", version=-1, why="has not answered for 30 s")]
    lines = [line.plain for line in table(members)]
    assert max(map(len, lines)) <= 80, lines
    assert lines[0].split() == ["member", "state", "version", "requests", "tok/s", "tokens", "left"]
    assert lines[1].split() == [ONE, "serving", "12", "64", "2,346", "1,234,567", "3"]
    assert lines[2].split()[0].startswith("https://infer") and lines[2].split()[0].endswith(".com:30000")
    assert lines[3].split() == [TWO, "away", "-", "64", "-", "1,234,567", "3"]
    assert lines[4].strip() == "has not answered for 30 s"
    assert len(short(far, 20)) == 20


def test_the_summary_counts_who_left() -> None:
    def moved(member: str, state: str, requests: int = 0) -> MemberMoved:
        return MemberMoved(1.0, member, state, "", requests, 10 * requests, 1)

    moves = [moved("1", "away", 5), moved("1", "serving"), moved("2", "lost", 1)]
    words = "1, 2 left 2 times, came back 1 time, 1 for good; 6 requests went on elsewhere from 60 tokens"
    assert absences(moves) == words and not absences([moved("3", "serving")])
