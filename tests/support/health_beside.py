"""Whether a server still answers others while somebody attacks it."""

from __future__ import annotations

import time
import urllib.request

BOUND = 5.0
"""Seconds. On a quiet machine 0.25 is what a server takes at most; a machine of tests may be ten times slower, and shared."""


def seconds_to_answer(url: str) -> float:
    """Asks over a connection of its own. Raises OSError where nothing answers within a minute."""
    began = time.monotonic()
    with urllib.request.urlopen(url, timeout=60) as answer:
        answer.read()
    return time.monotonic() - began


class Beside:
    """Compares answers with those before the attack."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._quiet = max(seconds_to_answer(url) for _ in range(3))

    def check(self, attack: str) -> None:
        taken = max(seconds_to_answer(self._url) for _ in range(3))
        assert taken < BOUND + 10 * self._quiet, f"{self._url} took {taken:.2f} s beside {attack}"
