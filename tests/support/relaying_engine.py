"""An engine's end of weight sync over TCP in a process of its own, which a test ends or stops while it fetches or sends pieces."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from headrace.core.weights import Manifest, WeightUpdate
from headrace.weight_sync import tcp_engine, tcp_server
from headrace.weight_sync.tcp_engine import TcpReceiver, TcpSource


class Given(msgspec.Struct):
    token: str
    manifest: Manifest
    smallest: int
    """Bytes of a piece."""
    sends: int | None = None
    """Pieces that it sends whole; within the next one it says so, and goes no further. None: it sends all."""
    fetches: int | None = None
    """Likewise of those that it fetches."""


class RelayingEngine:
    """The process, seen from the test."""

    def __init__(self, given: Given) -> None:
        from support.runs.preloaded_python import Program  # the process itself need not find `support`

        words = [sys.executable, __file__, msgspec.json.encode(given).decode()]
        self.process = Program(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin and self.process.stdout
        self._told, self._says = self.process.stdin, self.process.stdout

    def fetch(self, update: WeightUpdate) -> None:
        """Returns at once."""
        self._told.write(msgspec.json.encode(update).decode() + "\n")
        self._told.flush()

    def heard(self) -> str:
        """Returns what it says next: "has it", "sends" or "fetches"; empty if it has ended."""
        return str(self._says.readline()).strip()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@contextmanager
def engine_process(given: Given) -> Iterator[RelayingEngine]:
    engine = RelayingEngine(given)
    try:
        yield engine
    finally:
        engine.process.kill()
        engine.process.communicate()


def _halting(word: str, whole: int | None, move: Callable[[socket.socket, memoryview], object]) -> Any:
    """Returns `move`, which stays within the piece after so many."""
    left = [whole]

    def halted(connection: socket.socket, data: memoryview) -> None:
        if left[0] is None or left[0] > 0:
            left[0] = None if left[0] is None else left[0] - 1
            move(connection, data)
        else:
            move(connection, data[: len(data) // 2])
            os.write(1, f"{word}\n".encode())  # whole, whatever other threads say
            threading.Event().wait()

    return halted


def main() -> None:
    given = msgspec.json.decode(sys.argv[1], type=Given)
    tcp_server.send_all = _halting("sends", given.sends, tcp_server.send_all)
    tcp_engine.receive_into = _halting("fetches", given.fetches, tcp_engine.receive_into)
    receiver = TcpReceiver({"": given.manifest}, TcpSource(given.token, None, given.smallest))
    for line in sys.stdin:
        receiver.receive(msgspec.json.decode(line, type=WeightUpdate))
        os.write(1, b"has it\n")


if __name__ == "__main__":
    main()
