"""Who may ask. It stands before all routes, those that do not exist and /health included.

With a token, a request needs it. Without one only this machine reaches the server, and still a page in a browser of this machine
might send requests to it: so the name by which it was called must be a loopback's (a page cannot choose the `Host` header, and a
name of its own that leads here, "DNS rebinding", is none), and bodies must be declared as JSON (`sending.read_body`), which a page
of another origin may not do without being allowed to.
"""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.serve.config import is_loopback
from headrace.serve.errors import Refused, response_of


class Guard:
    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode() if token else b""

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
            if hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
                return None
            said = "this server asks for a token: send the header `Authorization: Bearer TOKEN`"
            return Refused(401, said, "invalid_api_key", {"WWW-Authenticate": "Bearer"})
        host = headers.get(b"host", b"").decode("latin-1")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if host and not is_loopback(name):
            return Refused(
                403, f"this server answers on this machine only, and was called as {host}; start it with --token-file"
            )
        return None
