"""Workers that dial in over TCP: who is let in, who is turned away, and how a silent one is noticed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.core.errors import ConfigError, HeadraceError, WorkerDied
from headrace.processes.frames import LONGEST, framed, length_of
from headrace.processes.joining.dial import LOST, dial
from headrace.processes.joining.greeting import Hello
from headrace.processes.joining.listener import Listener
from headrace.processes.wire import (
    Channel,
    Frame,
    WorkerEnd,
    numbered,
    pack,
    unpack,
)
from headrace.version import __version__
from headrace.web.tls import server_context

TOKEN = "a token of many characters"


def with_listener(use: Callable[[Listener], Awaitable[Any]], tls: ssl.SSLContext | None = None) -> Any:
    async def go() -> Any:
        listener = Listener(TOKEN, tls=tls)
        await listener.open()
        try:
            async with asyncio.timeout(300):
                return await use(listener)
        finally:
            await listener.close()

    return asyncio.run(go())


def packed(what: Any) -> bytes:
    return framed(msgspec.msgpack.encode(what))


async def answer_to(listener: Listener, data: bytes) -> bytes:
    """All that the listener says to a stranger before it closes the connection."""
    host, port = listener.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


STRANGERS: dict[str, tuple[bytes, str]] = {
    "a port scan": (b"", "silent"),
    "half a greeting": (b"\x20\x00", "silent"),
    "a browser": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "garbage"),
    "a huge first frame": (struct.pack("<I", 1 << 31) + b"x", "garbage"),
    "no msgpack": (struct.pack("<I", 3) + b"\xc1\xc1\xc1", "garbage"),
    "no UTF-8": (struct.pack("<I", 16) + b"\x82\xa4type\xa1\xff\xa5token\xa1\xff", "garbage"),
    "another protocol": (packed({"type": "somebody", "token": TOKEN}), "garbage"),
    "a frame in place of a greeting": (pack(Frame(1, "start")), "garbage"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_are_turned_away_and_counted_and_hear_nothing(name: str) -> None:
    data, reason = STRANGERS[name]

    async def use(listener: Listener) -> None:
        arrival = listener.expect("engine")
        assert await answer_to(listener, data) == b""
        assert listener.turned_away == {reason: 1} and not arrival.done()

    with_listener(use)


@pytest.mark.parametrize(
    ("hello", "reason", "sentence"),
    [
        (Hello(__version__, TOKEN + "r", "engine"), "token", "its token is not the controller's"),
        (Hello(__version__, "", "engine"), "token", "its token is not the controller's"),
        (Hello("0.0.9", TOKEN, "engine"), "version", "it is headrace 0.0.9, and the controller is"),
        (Hello(__version__, TOKEN, "trainer"), "seat", "the controller waits for no trainer now"),
        (Hello(__version__, TOKEN, "engine", "another seat"), "seat", "the controller waits for no engine now"),
    ],
)
def test_a_worker_of_ours_hears_why_it_is_turned_away(hello: Hello, reason: str, sentence: str) -> None:
    async def use(listener: Listener) -> None:
        arrival = listener.expect("engine")
        assert sentence.encode() in await answer_to(listener, packed(hello))
        assert listener.turned_away == {reason: 1} and not arrival.done()

    with_listener(use)


def test_a_wrong_token_says_nothing_of_the_version() -> None:
    async def use(listener: Listener) -> None:
        assert b"headrace 0.0.9" not in await answer_to(listener, packed(Hello("0.0.9", "guess", "engine")))

    with_listener(use)


def test_a_seat_is_taken_once_and_strangers_do_not_keep_the_right_one_out() -> None:
    async def use(listener: Listener) -> None:
        host, port = listener.address.split(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
        arrival = listener.expect("engine", "seat")
        end = await asyncio.to_thread(dial, listener.address, "engine", TOKEN, "seat")
        await arrival
        with pytest.raises(ConfigError, match="refused this engine: the controller waits for no engine now"):
            await asyncio.to_thread(dial, listener.address, "engine", TOKEN, "seat")
        end._sock.close()
        for _, writer in silent:
            writer.close()

    with_listener(use)


def test_a_token_that_could_be_guessed_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 16"):
        Listener("secret")


OFFERING = """
from headrace.processes.joining.dial import offer
offer("127.0.0.1:1", "scorer", print, agree=None)
"""


def test_a_worker_that_is_there_before_the_run_says_what_it_waits_for() -> None:
    given = {"HEADRACE_TOKEN": TOKEN, "HEADRACE_PATIENCE": "0.5"}
    done = subprocess.run([sys.executable, "-c", OFFERING], env={**os.environ, **given}, capture_output=True, text=True)
    assert done.returncode == LOST
    waits, ends = (line for line in done.stderr.splitlines() if "127.0.0.1:1 cannot be reached" in line)
    assert "this scorer tries again for up to 0.5 s (--patience)" in waits and "tries again" not in ends


def test_a_run_with_another_certificate_is_not_tried_again(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    made += ["-subj", "/CN=elsewhere", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(made, check=True, capture_output=True)

    async def use(listener: Listener) -> None:
        with pytest.raises(
            ConfigError, match=r"cert.pem vouches for .*; give the run's own \(orchestration.cert\) by --ca"
        ):
            await asyncio.to_thread(dial, listener.address, "engine", TOKEN, ca=str(cert))

    with_listener(use, server_context(cert, key))


# --- frames and beats ----------------------------------------------------------------------------------------------------


async def channel_to(
    listener: Listener, serve: Callable[[WorkerEnd], None], silence: float
) -> tuple[Channel, asyncio.Future[str]]:
    """`serve` runs in a thread at the worker's end."""
    arrival = listener.expect("engine")
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    channel = Channel("engine", lambda method, payload: None, lost.set_result, silence)
    threading.Thread(target=lambda: serve(dial(listener.address, "engine", TOKEN)), daemon=True).start()
    arrived = await arrival
    channel.open(arrived.reader, arrived.writer)
    return channel, lost


def echo(end: WorkerEnd) -> None:
    while (frame := end.receive()) is not None:
        end.reply(frame, unpack(frame.payload, bytes))


def test_calls_go_over_tcp_and_beats_are_heard_by_nobody() -> None:
    async def use(listener: Listener) -> None:
        channel, lost = await channel_to(listener, echo, 60.0)
        large = os.urandom(20_000_000)
        assert await channel.call("echo", large, bytes) == large
        channel.push("beat", None)
        assert await asyncio.gather(*(channel.call("echo", b"%d" % i, bytes) for i in range(50))) == [
            b"%d" % i for i in range(50)
        ]
        assert not lost.done()
        await channel.close()

    with_listener(use)


def test_a_peer_that_says_nothing_is_lost() -> None:
    """It has answered once, and its connection stays open for ever."""
    over = threading.Event()

    def mute(end: WorkerEnd) -> None:
        end.beat = lambda seconds: None  # type: ignore[method-assign]
        frame = end.receive()
        assert frame
        end.reply(frame, None)
        end.push = lambda method, payload: None  # type: ignore[method-assign]
        over.wait()

    async def use(listener: Listener) -> None:
        channel, lost = await channel_to(listener, mute, 3.0)
        await channel.call("start", None, type(None))
        assert (await lost).startswith("it was silent for 3")
        with pytest.raises(WorkerDied, match="closed its connection"):
            channel.push("add", None)

    with_listener(use)
    over.set()


@pytest.mark.slow
def test_a_rank_that_decodes_for_ten_beats_is_heard_and_one_that_is_stopped_is_lost() -> None:
    """Its beats come from another thread, and blocks of raw columns are decoded without keeping Python's lock from it."""

    async def use() -> None:
        ours, theirs = socket.socketpair()
        lost, decoded = asyncio.get_running_loop().create_future(), asyncio.Event()
        program = Path(__file__).with_name("busy_rank.py")
        words = [sys.executable, program, str(theirs.fileno()), "20", "2"]
        process = await asyncio.create_subprocess_exec(*words, pass_fds=[theirs.fileno()])
        theirs.close()
        channel = Channel("rank", lambda method, payload: decoded.set(), lost.set_result, silence=10.0)
        channel.open(*await asyncio.open_connection(sock=ours))
        try:
            await channel.call("start", None, type(None))
            await asyncio.wait_for(decoded.wait(), 300)
            assert not lost.done()
            process.send_signal(signal.SIGSTOP)
            assert (await asyncio.wait_for(lost, 300)).startswith("it was silent for 1")
        finally:
            process.kill()
            await process.wait()
            await channel.close()

    asyncio.run(use())


def test_a_worker_whose_controller_says_nothing_leaves() -> None:
    ours, theirs = socket.socketpair()
    assert WorkerEnd(theirs, silence=0.2).receive() is None
    ours.close()


def test_a_frame_that_nobody_would_read_is_neither_sent_nor_awaited() -> None:
    with pytest.raises(HeadraceError, match="the limit is"):
        length_of(struct.pack("<I", LONGEST + 1))
    numbers = iter(range(10))
    too_long = msgspec.Raw(memoryview(bytearray(LONGEST)))
    with pytest.raises(ValueError, match="the limit is .* lower rollout.max_tokens"):
        numbered(Frame(1, "step", too_long), numbers)
    assert next(numbers) == 0, "no message is missing because of it"
