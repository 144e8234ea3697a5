"""A browser cannot send a header with a page, so the token of a board is given once, in its address, and then kept in a cookie."""

from __future__ import annotations

import hashlib
import hmac
from urllib.parse import parse_qs

from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

COOKIE = "headrace_board"
ASK = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    "<title>headrace board</title><body><form action='/'><p><label>This board asks for its token: "
    "<input type='password' name='token' autofocus></label> <button>open</button></p></form></body></html>"
)


class CookieGate:
    """Turns the cookie into the header that `Guard` behind it expects. The cookie holds a value that is made from the token: cookies of
    one port are sent to all others of the machine."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()
        self._value = hashlib.blake2b(self._token, person=b"headrace board").hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._token:
            await self._app(scope, receive, send)
            return
        if answer := self._at_the_door(scope):
            await answer(scope, receive, send)
            return
        if self._has_cookie(scope):
            header = (b"authorization", b"Bearer " + self._token)
            scope = {**scope, "headers": [one for one in scope["headers"] if one[0] != header[0]] + [header]}
        await self._app(scope, receive, send)

    def _at_the_door(self, scope: Scope) -> Response | None:
        """Returns the answer to somebody who asks for the page with a token, or without any permission."""
        if scope["path"] != "/":
            return None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[-1].encode("latin-1", "replace")
        if given and hmac.compare_digest(given, self._token):
            answer = RedirectResponse("/", 303, {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"})
            answer.set_cookie(COOKIE, self._value, httponly=True, samesite="strict")
            return answer
        asked = {b"authorization", b"x-api-key"} & {name for name, _ in scope["headers"]}
        return None if asked or self._has_cookie(scope) else HTMLResponse(ASK, 401)

    def _has_cookie(self, scope: Scope) -> bool:
        text = b"; ".join(value for name, value in scope["headers"] if name == b"cookie").decode("latin-1")
        cookies = [one.strip().partition("=") for one in text.split(";")]
        return any(
            name == COOKIE and hmac.compare_digest(value.encode("latin-1"), self._value.encode())
            for name, _, value in cookies
        )
