"""The server of `headrace serve` in a process of its own, for whole runs of the tiny model."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tiny_run import of, tiny_config

from headrace.observe.facts import IdentityChecked, RunEnded, WeightsLive

SETS = {"kv_gib": 0.01, "context_length": 64, "max_running": 16, "dtype": '"float32"'}


class Server:
    def __init__(self, model: Path, cache: Path, *options: str) -> None:
        self._model, self._cache, self._options = model, cache, options
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Returns at once: whoever wants it waits."""
        sets = [word for name, value in SETS.items() for word in ("--set", f"engine.{name}={value}")]
        command = ["serve", str(self._model), "--port", str(self.port), *sets, *self._options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrace", *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HEADRACE_CACHE": str(self._cache)},
        )

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def serving(model: Path, cache: Path, *options: str) -> Iterator[Server]:
    server = Server(model, cache, *options)
    try:
        yield server
    finally:
        server.kill()


def config_for(directory: Path, model: Path, server: Server, **tables: Any) -> dict[str, Any]:
    config = tiny_config(directory, model, **tables)
    remote = {"kind": "headrace", "urls": [server.url], "dtype": "float32", "context_length": 64, "patience": 300.0}
    return {**config, "engine": {**remote, **tables.get("engine", {})}}


def checked_run(directory: Path) -> None:
    """What holds of every run."""
    (ended,) = of(directory, RunEnded)
    books = ended.accounting
    assert ended.reason == "finished" and books.balance() == 0, books
    assert all(one.ok for one in of(directory, IdentityChecked)) and of(directory, IdentityChecked)
    for kind in ("full", "adapter"):
        live = [one.update.version for one in of(directory, WeightsLive) if one.update.kind == kind]
        assert live == list(range(len(live)))
    assert not list(directory.rglob("*.safetensors")) or not list(directory.glob("**/tiny-weights"))
