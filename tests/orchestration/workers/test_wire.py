"""The wire between controller and worker: calls, failures by kind, and both ends noticing the death of the other."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import Raw

from headrace.core.errors import ConfigError, HeadraceError, WorkerDied
from headrace.core.steps import Finished, StepOutput
from headrace.processes.wire import Channel, Frame, WorkerEnd, name_of, pack, pack_payload, unpack


def joined(serve: Callable[[WorkerEnd], None], use: Callable[[Channel], Any]) -> Any:
    """`serve` runs in a thread at the worker's end, `use` at the controller's."""
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=serve, args=(WorkerEnd(theirs),), daemon=True)

    async def main() -> Any:
        pushed: list[tuple[str, Raw]] = []
        lost: list[str] = []
        channel = Channel("engine", lambda *push: pushed.append(push), lost.append)
        channel.open(*await asyncio.open_connection(sock=ours))
        thread.start()
        try:
            return await asyncio.wait_for(use(channel), 120), pushed, lost
        finally:
            await channel.close()

    result = asyncio.run(main())
    thread.join(10)
    assert not thread.is_alive(), "the worker's end did not notice that the controller is gone"
    return result


def echo(end: WorkerEnd) -> None:
    while (frame := end.receive()) is not None:
        end.push("output", StepOutput(7, ("a",), (1,), (-0.5,), (7,), (Finished("a", "stop"),)))
        end.reply(frame, unpack(frame.payload, list[float]))


def test_calls_are_answered_and_pushes_arrive_before() -> None:
    async def use(channel: Channel) -> Any:
        return await asyncio.gather(*(channel.call("score", [float(i)], list[float]) for i in range(50)))

    answers, pushed, _ = joined(echo, use)
    assert answers == [[float(i)] for i in range(50)]
    assert unpack(pushed[0][1], StepOutput).finished[0].stop == "stop" and len(pushed) == 50


@pytest.mark.parametrize(
    ("raised", "arrives"),
    [
        (ConfigError("no such model"), ConfigError),
        (ValueError("too long"), ValueError),
        (FileNotFoundError("gone"), OSError),
        (KeyError("a bug"), HeadraceError),
    ],
)
def test_failures_arrive_as_what_they_are(raised: Exception, arrives: type[Exception]) -> None:
    def serve(end: WorkerEnd) -> None:
        while (frame := end.receive()) is not None:
            end.fail(frame, name_of(raised), str(raised))

    async def use(channel: Channel) -> None:
        with pytest.raises(arrives) as caught:
            await channel.call("load", None, type(None))
        assert str(caught.value) == str(raised)

    joined(serve, use)


def test_a_worker_that_dies_in_a_call_ends_it_at_once() -> None:
    def serve(end: WorkerEnd) -> None:
        end.receive()
        end._sock.shutdown(socket.SHUT_RDWR)

    async def use(channel: Channel) -> None:
        with pytest.raises(WorkerDied, match="engine"):
            await channel.call("step", None, type(None))

    _, _, lost = joined(serve, use)
    assert lost == [""]


def test_a_controller_killed_with_replies_unread_is_noticed() -> None:
    """The kernel then answers reads with a reset instead of an end of file: a worker once lived on for ever."""
    ours, theirs = socket.socketpair()
    end = WorkerEnd(theirs)
    end.push("output", StepOutput(0))
    ours.close()
    assert end.receive() is None


def test_a_worker_ignores_what_comes_again_and_leaves_over_what_is_missing():
    ours, theirs = socket.socketpair()
    end = WorkerEnd(theirs)
    for number in (0, 1, 1, 0, 2, 4):
        ours.sendall(pack(Frame(0, "add", pack_payload(number), number=number)))
    assert [unpack(frame.payload, int) for frame in (end.receive(), end.receive(), end.receive()) if frame] == [0, 1, 2]
    with pytest.raises(HeadraceError, match=r"message 3 of the controller is lost: number 4 \(add\)"):
        end.receive()


def test_what_makes_no_sense_ends_the_connection_and_says_why():
    def serve(end: WorkerEnd) -> None:
        end.receive()
        end._sock.sendall(b"\x02\x00\x00\x00\xc1\xc1")

    async def use(channel: Channel) -> None:
        with pytest.raises(WorkerDied, match="MessagePack"):
            await channel.call("step", None, type(None))

    _, _, lost = joined(serve, use)
    assert len(lost) == 1 and "MessagePack" in lost[0]
