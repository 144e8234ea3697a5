"""Failures of a request to a server."""

from __future__ import annotations

from headrace.core.errors import HeadraceError


class Unreachable(HeadraceError):
    """No answer, or an incomplete one: the server may be gone. A later attempt may succeed."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        """Status of an answer that was refused by the server; 0 where none came."""


class Busy(HeadraceError):
    """The server has no room now."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds
        """The time to wait before asking again."""
