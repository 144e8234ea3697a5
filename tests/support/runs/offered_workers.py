"""Workers that offer themselves to a run on this machine, as a person would start them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.runs import preloaded_python
from support.runs.beside import PATIENCE


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def token_file(directory: Path, token: str = "0123456789abcdef0123456789abcdef", name: str = "token") -> Path:
    path = directory / name
    path.write_text(token)
    path.chmod(0o600)
    return path


@contextmanager
def offering(directory: Path, port: int, *more: str, count: int = 1) -> Iterator[list[subprocess.Popen[str]]]:
    """Workers, as a person would start them."""
    words = ["--connect", f"127.0.0.1:{port}", "--token-file", str(directory / "token"), "--offers", "engine", *more]
    workers = [
        preloaded_python.Program(
            [sys.executable, "-m", "headrace", "worker", *words, "--patience", str(PATIENCE)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for _ in range(count)
    ]
    try:
        yield workers
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
            worker.communicate()
