"""Refusals: their status, and a body in the format of OpenAI's API, which clients can read."""

from __future__ import annotations

import functools
import logging
import os
import re
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from headrace.core.errors import HeadraceError, UnexpectedError, WorkerDied, nearest

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    503: "overloaded_error",
}


_LONGEST_PATH = 200
"""Characters of a path that nobody serves, in the sentence that says so."""


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str = "",
        headers: dict[str, str] | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        """`details`: what programs read of it."""
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, message, code, headers or {}
        self.details = details or {}

    @property
    def body(self) -> bytes:
        """The error in the format of OpenAI's API."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": without_paths(self.message), "type": kind, "param": None, "code": self.code or None}
        return msgspec.json.encode({"error": error | ({"details": self.details} if self.details else {})})


def busy(message: str) -> Refused:
    return Refused(503, message, "busy", {"Retry-After": "1"})


@functools.cache
def _paths() -> re.Pattern[str]:
    """Matches absolute paths of this machine: those that begin in a directory that it has. A route such as /v1/models is none."""
    roots = sorted((entry.name for entry in os.scandir("/")), key=len, reverse=True)
    begin = rf"(?<![\w/])/+(?:{'|'.join(map(re.escape, roots))})(?![\w.-])"
    return re.compile(rf"(?<=')({begin}[^'\n]*)(?=')|(?<=\")({begin}[^\"\n]*)(?=\")|({begin}[^\s'\"`:;,()<>\[\]]*)")


def without_paths(text: str) -> str:
    """Returns a message for clients: of each path of this machine only the last name is left.

    >>> without_paths("No such file: '/usr/local/an adapter/config.json'; see /v1/models")
    "No such file: 'config.json'; see /v1/models"
    """
    return _paths().sub(lambda found: found[0].rstrip("/").rpartition("/")[2], text)


def log_internal(error: BaseException) -> None:
    """Writes an error of the server to its log, whose reader is not the client."""
    logging.getLogger("uvicorn.error").error("A request failed inside of the server", exc_info=error)


def refusal_of(error: Exception) -> Refused:
    """The refusal that a client receives. For an error of the server it holds only the error's name; the log has the rest."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, HTTPException):
        return Refused(error.status_code, str(error.detail), headers=dict(error.headers or {}))
    if isinstance(error, WorkerDied):
        return Refused(503, f"{error}", "engine_lost")
    if isinstance(error, UnexpectedError):
        log_internal(error)
        return Refused(500, f"internal error: {error.headline}")
    if isinstance(error, ValueError):  # a refusal of the engine, with the remedy in the sentence
        return Refused(400, str(error))
    if isinstance(error, HeadraceError):
        return Refused(409, str(error))
    log_internal(error)
    return Refused(500, f"internal error: {type(error).__name__}")


def response_of(error: Exception) -> Response:
    refusal = refusal_of(error)
    return Response(refusal.body, refusal.status, refusal.headers, media_type="application/json")


async def answer_error(request: HttpRequest, error: Exception) -> Response:
    return response_of(_unrouted(request, error) if isinstance(error, HTTPException) else error)


def _unrouted(request: HttpRequest, error: HTTPException) -> Exception:
    """The refusal of a path or a method that no route has."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    if error.status_code == 404:
        path, paths = request.url.path[:_LONGEST_PATH], [route.path for route in routes if "{" not in route.path]
        return Refused(404, f"{path} is not served here{nearest(path, paths)}")
    if error.status_code == 405:
        methods = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))  # of a set
        return Refused(405, f"{request.url.path} takes {methods}, not {request.method}", headers={"Allow": methods})
    return error
