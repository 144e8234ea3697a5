"""Connections that break and come back: nothing is lost, nothing comes twice, and who is too late is told so."""

from __future__ import annotations

import asyncio
import io
import threading
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import ConfigError, HeadraceError
from headrace.processes.frames import read_frame, receive_frame
from headrace.processes.joining.dial import dial
from headrace.processes.joining.greeting import Hello, Welcome, packed
from headrace.processes.joining.listener import Listener
from headrace.processes.joining.returning import LONGEST_BODY, SEGMENT, Outbox, opened, segment
from headrace.processes.wire import Channel, WorkerEnd, unpack
from headrace.version import __version__
from support.bus.cutting import Cut, CuttingProxy

TOKEN = "a token of many characters"
GREETING = 1000
"""More bytes than the first greeting has: a worker that never had a seat has no session."""


# --- the outbox ---------------------------------------------------------------------------------------------------------------


def test_what_was_acknowledged_is_not_sent_again() -> None:
    outbox = Outbox()
    assert [len(piece) for piece in outbox.put(b"a" * (SEGMENT + 3))] == [SEGMENT, 3]
    outbox.put(b"bc")
    outbox.acknowledge(SEGMENT)
    outbox.acknowledge(SEGMENT)
    assert list(outbox.rest()) == [b"aaa", b"bc"]
    outbox.acknowledge(SEGMENT + 5)
    assert list(outbox.rest()) == []


@pytest.mark.parametrize("received", [1, 6, 99])
def test_bytes_that_were_never_sent_cannot_be_received(received: int) -> None:
    outbox = Outbox()
    outbox.put(b"hello")
    with pytest.raises(HeadraceError, match=f"{received} bytes are said to be received"):
        outbox.acknowledge(received)
    outbox.acknowledge(0)
    assert list(outbox.rest()) == [b"hello"], "who says the right number afterwards gets them"


def test_the_head_of_a_segment_is_what_it_says_or_is_refused() -> None:
    assert opened(read_frame(io.BytesIO(segment(b"abc", 1 << 40)).read, LONGEST_BODY)) == (b"abc", 1 << 40)
    for length in (0, 8):
        with pytest.raises(HeadraceError, match=f"received a segment of {length} bytes"):
            opened(bytes(length))


# --- a channel over connections that are cut ------------------------------------------------------------------------------------


def answer(end: WorkerEnd, heard: list[bytes]) -> None:
    """Replies to each call with its payload, and pushes it before, in two halves."""
    while (frame := end.receive()) is not None:
        data = unpack(frame.payload, bytes)
        heard.append(data)
        end.push("half", data[: len(data) // 2])
        end.push("half", data[len(data) // 2 :])
        if frame.id:
            end.reply(frame, data)


async def talked(cuts: list[Cut], sizes: list[int], in_turn: bool = False) -> int:
    """Calls and pushes over a connection that is cut. Returns the number of cuts that were made. `in_turn`: one after the other."""
    listener = Listener(TOKEN, reconnect=300.0)
    await listener.open()
    proxy = CuttingProxy(listener.address, cuts)
    await proxy.open()
    arrival = listener.expect("engine", "seat")
    end = await asyncio.to_thread(dial, proxy.address, "engine", TOKEN, "seat")
    heard: list[bytes] = []
    threading.Thread(target=answer, args=(end, heard), daemon=True).start()
    pushed, lost = list[Any](), list[str]()
    channel = Channel("engine", lambda method, payload: pushed.append(unpack(payload, bytes)), lost.append, 5.0, 300.0)
    arrived = await arrival
    channel.open(arrived.reader, arrived.writer)
    sent = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    try:
        async with asyncio.timeout(300):
            calls = []
            for number, data in enumerate(sent):
                if number % 3 == 2:
                    channel.push("take", data)
                else:
                    calls.append((data, asyncio.ensure_future(channel.call("echo", data, bytes))))
                await asyncio.wait([calls[-1][1]]) if in_turn else await asyncio.sleep(0)
            for data, reply in calls:
                assert await reply == data
            while len(pushed) < 2 * len(sent):
                await asyncio.sleep(0.01)
    finally:
        await channel.close()
        await listener.close()
    assert heard == sent, "in their order, and each of them once"
    assert [one + other for one, other in zip(pushed[::2], pushed[1::2], strict=True)] == sent
    assert not lost
    return proxy.made


CUTS = st.lists(st.tuples(st.booleans(), st.integers(0, 4000), st.booleans()), max_size=7)


@settings(max_examples=25)
@given(cuts=CUTS, sizes=st.lists(st.sampled_from([0, 1, 10, 300, 3000, 200_000]), min_size=1, max_size=9))
def test_nothing_is_lost_or_doubled_wherever_the_connection_is_cut(
    cuts: list[tuple[bool, int, bool]], sizes: list[int]
) -> None:
    made = [
        Cut(from_worker, after + GREETING * (not number), rude)
        for number, (from_worker, after, rude) in enumerate(cuts)
    ]
    asyncio.run(talked(made, sizes))


def test_many_cuts_in_a_row_at_every_kind_of_place() -> None:
    """In the greeting, in a head, in a segment, behind one; one direction after the other."""
    cuts = [Cut(True, GREETING)] + [
        Cut(number % 2 == 0, after, number % 3 == 0) for number, after in enumerate([0, 1, 5, 90, 300, 500, 20_000])
    ]
    assert asyncio.run(talked(cuts, [3000] * 40 + [70_000] * 3, in_turn=True)) == len(cuts)


# --- who does not come back -----------------------------------------------------------------------------------------------------


async def raw(listener: Listener, hello: Hello) -> tuple[Welcome, asyncio.StreamWriter]:
    host, port = listener.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(packed(hello))
    return msgspec.msgpack.decode(await receive_frame(reader, 4096), type=Welcome), writer


def test_a_worker_that_does_not_come_back_in_time_is_lost_and_its_session_too() -> None:
    async def go() -> None:
        listener = Listener(TOKEN, reconnect=0.3)
        await listener.open()
        arrival = listener.expect("engine", "seat")
        welcome, writer = await raw(listener, Hello(__version__, TOKEN, "engine", "seat", host="far", pid=7))
        assert len(welcome.session) == 32 and welcome.reconnect == 0.3
        arrived, lost = await arrival, asyncio.Event()
        channel = Channel("engine", lambda method, payload: None, lambda wrong: lost.set(), 5.0, 0.3)
        channel.open(arrived.reader, arrived.writer)
        writer.close()
        async with asyncio.timeout(300):
            await lost.wait()
        late, writer = await raw(listener, Hello(__version__, TOKEN, "engine", session=welcome.session))
        assert "given its seat away" in late.refused and listener.turned_away == {"session": 1}
        writer.close()
        await channel.close()
        await listener.close()

    asyncio.run(go())


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"token": "another token of many"}, "its token is not the controller's"),
        ({"version": "0.0.1"}, "install the same on both machines"),
        ({"session": "0" * 32}, "given its seat away"),
    ],
)
def test_a_session_needs_the_token_and_the_version_and_cannot_be_guessed(change: dict[str, str], refused: str) -> None:
    async def go() -> None:
        listener = Listener(TOKEN, reconnect=300.0)
        await listener.open()
        arrival = listener.expect("engine", "seat")
        welcome, writer = await raw(listener, Hello(__version__, TOKEN, "engine", "seat"))
        arrived = await arrival
        hello = Hello(__version__, TOKEN, "engine", session=welcome.session)
        answered, other = await raw(listener, msgspec.structs.replace(hello, **change))
        assert refused in answered.refused
        assert not arrived.writer.is_closing(), "the one that has the seat keeps it"
        writer.close(), other.close(), arrived.writer.close()
        await listener.close()

    asyncio.run(go())


def test_a_worker_whose_seat_was_given_away_ends() -> None:
    async def go() -> None:
        listener = Listener(TOKEN, reconnect=300.0)
        await listener.open()
        arrival = listener.expect("engine", "seat")
        end = await asyncio.to_thread(dial, listener.address, "engine", TOKEN, "seat")
        (await arrival).writer.close()
        async with asyncio.timeout(300):
            assert await asyncio.to_thread(end.receive) is None
        with pytest.raises(ConfigError, match="waits for no engine now"):
            await asyncio.to_thread(dial, listener.address, "engine", TOKEN, "seat")
        await listener.close()

    asyncio.run(go())
