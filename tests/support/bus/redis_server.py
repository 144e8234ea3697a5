"""A Redis server of a test's own, where redis-server is installed (Debian: apt-get install redis-server)."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class RedisServer:
    def __init__(self, directory: Path, *options: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}"
        self._directory, self._options = directory, options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers: it has read its append-only file by then."""
        words = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._directory)]
        words += ["--save", "", "--appendonly", "yes", *self._options]
        with (self._directory / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log)
        for _ in range(600):
            if self._answers():
                return
            assert self._process.poll() is None, (self._directory / "redis.log").read_text()
            time.sleep(0.05)
        raise AssertionError("redis-server did not answer within 30 s")

    def kill(self) -> None:
        assert self._process
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64) == b"+PONG\r\n"
        except OSError:
            return False


@contextmanager
def a_redis_server(directory: Path, *options: str) -> Iterator[RedisServer]:
    """Skips the test where there is none."""
    pytest.importorskip("redis", reason="the Python package redis is not installed: pip install 'headrace[redis]'")
    if not shutil.which("redis-server"):
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    server = RedisServer(directory, *options)
    server.start()
    try:
        yield server
    finally:
        server.kill()
