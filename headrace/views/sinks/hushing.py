"""Keeps the greetings of a library off the screen of a run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any


class _Hushed:
    """A stream that drops what one thread writes, and passes on what all others write."""

    def __init__(self, stream: Any, thread: int) -> None:
        self._stream, self._thread = stream, thread

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def hushed() -> Iterator[None]:
    """Drops what this thread prints meanwhile."""
    here = threading.get_ident()
    with redirect_stdout(_Hushed(sys.stdout, here)), redirect_stderr(_Hushed(sys.stderr, here)):
        yield
