"""What can happen to a request on its way."""

from __future__ import annotations

from headrace.errors import HeadraceError


class Unreachable(HeadraceError):
    """No answer, or half of one: the server may be gone. Asking again later may help."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        """Status of an answer that was refused by the server; 0 where none came."""


class Busy(HeadraceError):
    """The server has no room now."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds
        """After which to ask again."""
