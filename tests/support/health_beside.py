"""A process with all doors (`attacked_server.py`), and whether it still answers others while somebody attacks it."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import headrace
from support import attacked_server

BOUND = 0.25
"""CPU seconds of the machine on which figures are measured (`docs/benchmarks.md`). A slower machine is given as much more."""
USUAL = 1024
"""The soft limit of open files on most systems."""


def answers(url: str) -> None:
    """Asks over a connection of its own. Raises OSError where nothing answers within a minute."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        answer.read()


class Attacked:
    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self.log = process, log
        self.doors: dict[str, Any] = json.loads(self._line())
        """Their addresses, and what else an attacker knows."""

    def url(self, door: str) -> str:
        return str(self.doors[door])

    def place(self, door: str) -> tuple[str, int]:
        split = urlsplit(self.url(door))
        assert split.hostname and split.port
        return split.hostname, split.port

    def path(self, door: str) -> str:
        return urlsplit(self.url(door)).path

    def begin(self) -> None:
        self._longest()

    def check(self, attack: str, bound: float = BOUND) -> None:
        """Asserts that /health answers, and that nothing since `begin` has kept others waiting."""
        for _ in range(3):
            answers(f"{self.url('serve')}/health")
        taken = self._longest()
        assert taken < bound, f"the event loop was busy for {taken:.2f} s of CPU time at once beside {attack}"

    def cost_of_an_answer(self) -> float:
        """CPU seconds that the event loop's thread takes from a question about its health to the answer, of the machine of `BOUND`: with one thing at
        a time between the turns that the answer needs, the sum of several."""
        began = self._used()
        answers(f"{self.url('serve')}/health")
        return (self._used() - began) / max(1.0, self.doors["slowness"])

    def _used(self) -> float:
        place = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/schedstat")
        return int(place.read_text().split()[0]) / 1e9

    def _longest(self) -> float:
        """Seconds of the machine of `BOUND`."""
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._line()) / max(1.0, self.doors["slowness"])

    def _line(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline()


@contextlib.contextmanager
def attacked_doors(model: Path) -> Iterator[Attacked]:
    """Starts the process under the usual limit of open files, which those who attack may exceed."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    paths = [*sys.path, str(Path(headrace.__file__).parents[1])]
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, str(attacked_server.__file__), str(model), place],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (min(USUAL, hard), hard)),
            )
        try:
            yield Attacked(process, log)
        finally:
            process.kill()
            process.wait()


def said_to(where: tuple[str, int], data: bytes, patience: float = 300.0) -> bytes:
    """Sends bytes over a connection of its own, and returns what comes back; nothing where the connection is closed."""
    received = b""
    with socket.create_connection(where, timeout=patience) as connection, contextlib.suppress(OSError):
        connection.sendall(data)
        while part := connection.recv(1 << 16):
            received += part
            head, _, body = received.partition(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            if length.isdigit() and len(body) >= int(length):
                break
    return received


def request(path: str, body: bytes, media: str = "application/json", more: str = "") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {media}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    )
    return head.encode() + body
