"""Connections that say nothing, or half of something: servers and the dial-in port answer others meanwhile, and say little about it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.processes.joining import listener as listening
from headrace.processes.joining.dial import dial
from headrace.processes.joining.listener import Listener
from headrace.run.fleets import pool_door
from headrace.testing.fake_engine import FakeEngine
from headrace.web import server
from headrace.web.limits import (
    KEPT_FREE,
    OPEN_FILES,
    SILENT,
    Crowd,
    Guest,
    ServerLimits,
    raise_open_files,
    room_for_connections,
)
from headrace.web.server import OneLine
from headrace.web.tls import server_context
from headrace.weight_sync.http_ranges import AT_ONCE, WeightServer
from support.health_beside import USUAL, Attacked, attacked_doors, request
from support.served import faked

KEY = "a token of many characters"
HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-a: "


@pytest.fixture(scope="module")
def attacked(tiny_tokenizer: Path) -> Iterator[Attacked]:
    """A server that was started under the usual limits. The tests themselves may open more files."""
    if raise_open_files() < 3 * USUAL:
        pytest.skip("this test opens 3,000 connections, and the hard limit of open files is lower")
    with attacked_doors(tiny_tokenizer) as found:
        yield found


@contextlib.contextmanager
def half_open(where: tuple[str, int], count: int, said: bytes) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as opened:
        held = []
        for _ in range(count):
            held.append(opened.enter_context(socket.create_connection(where, timeout=60)))
            with contextlib.suppress(OSError):  # it made room already
                held[-1].sendall(said)
        yield held


@pytest.mark.parametrize("said", [b"", HEAD, b"\x16\x03\x01garbage\r\n\r\n"], ids=["silence", "half a head", "garbage"])
def test_half_open_connections_leave_a_server_to_others(attacked: Attacked, said: bytes) -> None:
    attacked.begin()
    before, began = attacked.log.stat().st_size, time.monotonic()
    with half_open(attacked.place("serve"), 2000, said):
        attacked.check("2,000 half-open connections")
        seconds = time.monotonic() - began
    lines = attacked.log.read_bytes()[before:].splitlines()
    assert len(lines) <= seconds + 2, "one line a second"
    assert all(len(line) < 300 for line in lines)


def test_as_many_completions_as_are_promised_fit_under_the_usual_limit_of_open_files(attacked: Attacked) -> None:
    promised = ServerLimits().requests
    body = json.dumps({"token_ids": [1, 7], "sampling_params": {"max_tokens": 9999}}).encode()
    head = b"POST /inference/v1/generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    asked = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    url = attacked.url("serve")
    with half_open(attacked.place("serve"), promised, asked) as held:
        with half_open(attacked.place("serve"), 1500, HEAD):
            until(lambda: running(url) == promised)
            attacked.begin()
            attacked.check("all completions and 1,500 half-open connections")
        assert running(url) == promised, "no completion had to make room"
        held.pop().close()
        until(lambda: running(url) == promised - 1)
    until(lambda: running(url) == 0)


def running(url: str) -> int:
    with urllib.request.urlopen(f"{url}/headrace/state", timeout=60) as answer:
        found: int = json.load(answer)["stats"]["running"]
    return found


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_head_of_a_request_has_a_deadline_and_trickling_does_not_move_it(
    tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.3)

    async def trickles(url: str, first: bytes) -> None:
        reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
        writer.write(first)
        with contextlib.suppress(OSError):
            while not reader.at_eof():
                writer.write(b"x")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        while await reader.read(1000):  # an answer, or the end
                            pass
        writer.close()

    async def go() -> None:
        async with asyncio.timeout(300), faked(tiny_tokenizer) as (client, _):
            await trickles(client.url, HEAD)
            await trickles(client.url, HEAD + b"\r\n\r\n" + HEAD)  # the head of its second request
            unfinished = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999\r\n\r\n"
            await trickles(client.url, unfinished)  # the body of a request that was refused

    asyncio.run(go())


def test_a_client_that_reads_nothing_does_not_keep_its_completions(
    tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STALLED_SECONDS", 0.3)

    async def go() -> None:
        engine = FakeEngine(seconds_per_token=0.0, length=lambda rng: 60_000, context_length=100_000)
        async with asyncio.timeout(300), faked(tiny_tokenizer, engine) as (client, serving):
            host, _, port = client.url.removeprefix("http://").partition(":")
            asked = json.dumps({"token_ids": [1], "stream": True, "sampling_params": {"max_tokens": 60_000}}).encode()
            with socket.socket() as one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                one.setblocking(False)
                await asyncio.get_running_loop().sock_connect(one, (host, int(port)))
                await asyncio.get_running_loop().sock_sendall(one, request("/inference/v1/generate", asked))
                while not serving.under_way:
                    await asyncio.sleep(0.01)
                while serving.under_way:
                    await asyncio.sleep(0.01)

    asyncio.run(go())


# -- the rules ----------------------------------------------------------------------------------------------------------


def test_those_with_requests_stay_and_the_oldest_of_the_others_makes_room() -> None:
    gone: list[str] = []
    crowd = Crowd(silent=2, most=4)

    def comes(name: str) -> Guest:
        return crowd.came(lambda: gone.append(name))

    one, two = comes("one"), comes("two")
    crowd.asked(one)
    comes("three")
    assert gone == [] and crowd.count == 3
    comes("four")
    assert gone == ["two"]
    crowd.left(two)
    assert crowd.count == 3, "it is counted once"
    crowd.waits(one)
    assert gone == ["two", "three"], "who was answered is the youngest of those that wait"
    crowd.waits(two)
    assert crowd.count == 2, "who has left waits for nothing"


def test_a_server_full_of_requests_refuses_the_next_connection() -> None:
    gone: list[int] = []
    crowd = Crowd(silent=9, most=3)
    for number in range(3):
        crowd.asked(crowd.came(lambda number=number: gone.append(number)))
    crowd.came(lambda: gone.append(99))
    assert gone == [99] and crowd.count == 3


def test_the_limit_of_open_files_is_raised_and_never_lowered() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        assert raise_open_files() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(before[1], OPEN_FILES)
        assert raise_open_files() == min(before[1], OPEN_FILES)
        assert room_for_connections() >= raise_open_files() - KEPT_FREE
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert SILENT + ServerLimits().requests < OPEN_FILES - KEPT_FREE


def test_the_log_has_one_line_a_second_with_the_number_of_the_others() -> None:
    now, calm = [100.0], OneLine(lambda record: record.levelno >= logging.WARNING, lambda: now[0])

    def says(level: int = logging.WARNING) -> str:
        record = logging.LogRecord("x", level, "", 0, "no %s", ("request",), None)
        return record.getMessage() if calm.filter(record) else ""

    assert [says() for _ in range(4)] == ["no request", "", "", ""]
    assert says(logging.INFO) == "no request", "others pass"
    now[0] += 1.0
    assert says() == "no request (lines left out since the last one: 3)"
    now[0] += 1.0
    assert says() == "no request"


# -- the dial-in port ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("over_tls", [False, True], ids=["plain", "TLS"])
def test_silent_connections_do_not_keep_an_honest_worker_out(
    over_tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "STRANGERS", 32)
    cert, key = certificate(tmp_path) if over_tls else (None, None)
    tls = server_context(cert, key) if cert and key else None
    messages: list[str] = []

    async def go() -> None:
        listener = Listener(KEY, tls=tls, say=messages.append)
        await listener.open()
        try:
            async with asyncio.timeout(300):
                for attack in (b"", b"\x16\x03", HEAD):
                    async with beside_half_open(listener, 100, attack):
                        arrival = listener.expect("engine", "a seat")
                        await asyncio.to_thread(
                            dial, listener.address, "engine", KEY, "a seat", ca=str(cert) if cert else ""
                        )
                        (await arrival).writer.close()
        finally:
            await listener.close()
        assert listener.turned_away["crowd"] >= 100 - 32

    asyncio.run(go())
    assert sum("too many connections" in one for one in messages) == 1, messages


def test_silent_connections_are_counted_and_leave_nothing() -> None:
    async def go() -> None:
        listener = Listener(KEY)
        await listener.open()
        try:
            async with asyncio.timeout(300):
                async with beside_half_open(listener, 50, b""):
                    pass
                while listener.turned_away["silent"] < 50 or listener._crowd.count:
                    await asyncio.sleep(0.01)
            assert listener.turned_away == {"silent": 50}
        finally:
            await listener.close()

    asyncio.run(go())


@contextlib.asynccontextmanager
async def beside_half_open(listener: Listener, count: int, said: bytes) -> AsyncIterator[None]:
    host, _, port = listener.address.rpartition(":")
    with contextlib.ExitStack() as opened:
        await asyncio.to_thread(opened.enter_context, half_open((host, int(port)), count, said))
        yield


# -- weights, and the pool door ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("over_tls", [False, True], ids=["plain", "TLS"])
def test_silent_connections_do_not_keep_engines_from_their_weights(over_tls: bool, tmp_path: Path) -> None:
    tls = server_context(*certificate(tmp_path)) if over_tls else None
    shelves: Any = SimpleNamespace(manifests={}, find=lambda *asked: None)
    server = WeightServer(shelves, "127.0.0.1", KEY, tls)
    trusts = ssl.create_default_context(cafile=str(tmp_path / "cert.pem")) if over_tls else None
    try:
        for said in (b"", b"\x16\x03", HEAD):
            with half_open(("127.0.0.1", server.port), AT_ONCE + 50, said):
                asked = urllib.request.Request(
                    f"{server.url}/weights/-/0/full", headers={"Authorization": f"Bearer {KEY}"}
                )
                with pytest.raises(urllib.error.HTTPError, match="404"):
                    urllib.request.urlopen(asked, timeout=60, context=trusts)
        until(lambda: not server._guests and not server._crowd.count)
    finally:
        server.shutdown()
        server.server_close()


def test_the_pool_door_waits_for_no_question_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_door, "SECONDS", 0.2)

    async def go() -> None:
        fleet: Any = SimpleNamespace(members=[])
        door = pool_door.PoolDoor(tmp_path, fleet, None, ())
        await door.open()
        try:
            async with asyncio.timeout(300):
                reader, writer = await asyncio.open_unix_connection(str(tmp_path / pool_door.SOCKET))
                writer.write(b'{"do"')
                assert await reader.read() == b""
                writer.close()
                question = pool_door.PoolQuestion("show")
                assert (await asyncio.to_thread(pool_door.ask, tmp_path, question, 60.0)).members == ()
        finally:
            await door.close()

    asyncio.run(go())


def certificate(place: Path) -> tuple[Path, Path]:
    cert, key = place / "cert.pem", place / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=headrace"]
    made += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(made, check=True, capture_output=True)
    return cert, key
