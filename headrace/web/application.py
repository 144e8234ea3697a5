"""The application of every server here: its routes behind the guard against pages of other origins, and errors as answers."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping, Sequence

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.core.errors import HeadraceError
from headrace.core.printing import say
from headrace.web.errors import Refused, answer_error, response_of
from headrace.web.limits import is_loopback
from headrace.web.request_fields import IgnoredFields, Remark

# --- Checks whether a client may send requests
# Checks whether a client may send requests, before every route, including /health and routes that do not exist.
#
# A browser lets a page of any origin send requests to a server on this machine; only the answer is kept from the page. `OriginGuard`
# refuses what another origin's page sends ("cross-site request forgery"), as `CrossOriginProtection` of Go's net/http does, but for GET
# too. It is in front of every server.
#
# `Guard` asks for the server's token. Without one, only this machine can reach the server. Then the `Host` header must be a loopback name:
# a page cannot choose this header, and a domain that resolves to this machine ("DNS rebinding") is no loopback name.


Headers = Mapping[bytes, bytes]


class OriginGuard:
    """Refuses requests of pages of other origins, whatever else they hold."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _passed(scope, receive, send, app=self._app, check=_foreign_page)


class Guard:
    """Refuses requests without the server's token. Without a token it refuses those that name another host than this machine."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = {b"authorization": f"Bearer {token}".encode(), b"x-api-key": token.encode()} if token else {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _passed(scope, receive, send, app=self._app, check=self._refusal)

    def _refusal(self, scope: Scope) -> Refused | None:
        headers = _headers(scope)
        if self._expected:
            given = [hmac.compare_digest(headers.get(name, b""), value) for name, value in self._expected.items()]
            if any(given):
                return None
            message = (
                "this server asks for a token: send the header `Authorization: Bearer TOKEN` (or `X-API-Key: TOKEN`)"
            )
            return Refused(401, message, "invalid_api_key", {"WWW-Authenticate": "Bearer"})
        host = headers.get(b"host", b"").decode("latin-1")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if host and not is_loopback(name):
            return Refused(
                403, f"this server answers on this machine only, and was called as {host}; start it with --token-file"
            )
        return None


Check = Callable[[Scope], Refused | None]


async def _passed(scope: Scope, receive: Receive, send: Send, *, app: ASGIApp, check: Check) -> None:
    assert scope["type"] in ("http", "lifespan"), "servers are run without websockets"
    refused = check(scope) if scope["type"] == "http" else None
    await (response_of(refused) if refused else app)(scope, receive, send)


def _headers(scope: Scope) -> Headers:
    return dict(scope["headers"])


def _foreign_page(scope: Scope) -> Refused | None:
    """A page can neither set nor leave out these headers. Programs send none of them. `Sec-Fetch-Site` counts before `Origin`, because it
    is still right behind a proxy that changes `Host`; browsers send it to this machine and over TLS only."""
    headers = _headers(scope)
    site = headers.get(b"sec-fetch-site", b"").decode("latin-1").lower()
    origin = headers.get(b"origin", b"").decode("latin-1").lower()
    if site:
        same = site in ("same-origin", "none") or _is_link(scope, headers)
    else:
        same = not origin or origin.partition("://")[2] == headers.get(b"host", b"").decode("latin-1").lower() != ""
    if same:
        return None
    whose = f"a page of {origin[:200]}" if origin else "a page of another origin"
    return Refused(403, f"this request was sent by {whose}; send it by a program, or from a page of this server")


def _is_link(scope: Scope, headers: Headers) -> bool:
    """Whether a person has followed a link of another page: the browser then shows the answer, and the other page cannot read it."""
    link = {b"sec-fetch-mode": b"navigate", b"sec-fetch-dest": b"document"}
    return scope["method"] == "GET" and all(headers.get(name) == value for name, value in link.items())


# --- application ------------------------------------------------------------


def make_application(
    routes: Sequence[Route],
    permission: Sequence[Middleware],
    remark: Remark = lambda name, sentence: say(sentence),
) -> Starlette:
    """`permission`: asks in this order who may send a request, for every path; empty where the routes do so. `remark`: is told of fields of
    requests that are ignored."""
    kinds = [Refused, HeadraceError, ValueError, 404, 405, Exception]
    return Starlette(
        routes=routes,
        middleware=[Middleware(OriginGuard), *permission, Middleware(IgnoredFields, remark=remark)],
        exception_handlers=dict.fromkeys(kinds, answer_error),
    )
