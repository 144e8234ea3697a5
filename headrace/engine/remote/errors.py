"""Failures of a request to a server."""

from __future__ import annotations

from headrace.errors import HeadraceError


class Unreachable(HeadraceError):
    """No answer, or half of one: the server may be gone. Asking again later may help."""


class Busy(HeadraceError):
    """The server has no room now."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds
        """The time to wait before asking again."""
