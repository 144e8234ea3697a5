"""Checks whether a client may send requests, before every route, including /health and routes that do not exist.

If the server has a token, a request needs it. Without one, only this machine can reach the server, but a page in a browser on this
machine could still send requests. Therefore the `Host` header must be a loopback name: a page cannot choose this header, and a
domain that resolves to this machine ("DNS rebinding") is no loopback name. And bodies must be declared as JSON
(`read_body` of `web/sending.py`), which a page of another origin may not do without permission.
"""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.web.errors import Refused, response_of
from headrace.web.limits import is_loopback


class Guard:
    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = {b"authorization": f"Bearer {token}".encode(), b"x-api-key": token.encode()} if token else {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        assert scope["type"] == "http", "the server is run without websockets"
        if refused := self._refusal(dict(scope["headers"])):
            await response_of(refused)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, headers: dict[bytes, bytes]) -> Refused | None:
        if self._expected:
            given = [hmac.compare_digest(headers.get(name, b""), value) for name, value in self._expected.items()]
            if any(given):
                return None
            said = "this server asks for a token: send the header `Authorization: Bearer TOKEN` (or `X-API-Key: TOKEN`)"
            return Refused(401, said, "invalid_api_key", {"WWW-Authenticate": "Bearer"})
        host = headers.get(b"host", b"").decode("latin-1")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if host and not is_loopback(name):
            return Refused(
                403, f"this server answers on this machine only, and was called as {host}; start it with --token-file"
            )
        return None
