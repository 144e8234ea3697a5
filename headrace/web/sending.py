"""Bodies in and answers out. A client that leaves takes its work with it: its requests end, and their KV is free."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from hashlib import blake2b
from itertools import islice
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headrace.web.errors import Refused, refusal_of
from headrace.web.limits import ServerLimits
from headrace.web.request_fields import note_unknown

T = TypeVar("T")

JSON = "application/json"

MOST_PARTS = 1 << 17
"""Objects, lists and texts of one body. Each becomes an object of Python, which takes a microsecond wherever it is looked at: a body of nothing
else would hold up the event loop for seconds."""
LONG = 1 << 20
"""Bytes of a body from which on each look at it takes milliseconds."""
_PART = re.compile(rb'[{\[]|"[^"]*"?')
_SIZE = "headrace.body_bytes"
_DIGEST = "headrace.body_digest"
_ATTEMPT = "x-stainless-retry-count"
"""The header in which the clients openai and anthropic number their attempts at one request, from 0."""

GONE = Response(status_code=499)
"""Never received: the client has disconnected."""


async def read_body(request: HttpRequest, kind: type[T], limits: ServerLimits) -> T:
    """A JSON body of that shape. Raises Refused: 400, 408, 413, 415."""
    body = await read_bytes(request, JSON, limits)
    read = await decoded_in_turns(body, kind)
    await let_others(body)
    note_unknown(request.scope, read, body)
    return read


def body_bytes(request: HttpRequest) -> int:
    """Returns the size of the body that `read_body` has read."""
    return int(request.scope.get(_SIZE, 0))


def attempt_of(request: HttpRequest) -> tuple[bytes, bool]:
    """Returns a digest of the request whose body was read, and whether its client has sent it before; an empty one where the client does not say
    that."""
    return request.scope.get(_DIGEST, b""), request.headers.get(_ATTEMPT, "0") != "0"


def _has_many_parts(body: bytes) -> bool:
    """Looks closely only where there may be too many: texts hold brackets too, and quotes behind a backslash (which may be behind another one)."""
    brackets, quotes = body.count(b"{") + body.count(b"["), body.count(b'"')
    if brackets + quotes // 2 <= MOST_PARTS:
        return False
    ends = quotes - body.count(b'\\"') + body.count(b'\\\\"')  # no fewer quotes than those that end or begin a text
    if brackets + (ends + 1) // 2 <= MOST_PARTS:
        return False
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return next(islice(_PART.finditer(plain), MOST_PARTS, None), None) is not None


def decoded(body: bytes, kind: type[T]) -> T:
    """Raises Refused (400)."""
    _check_parts(body)
    return _read(body, kind)


async def decoded_in_turns(body: bytes, kind: type[T]) -> T:
    """Decodes a body that may be long, with turns for others between. Raises Refused (400)."""
    _check_parts(body)
    await let_others(body)
    return _read(body, kind)


async def let_others(body: bytes) -> None:
    """Between two looks at a long body, whoever else waits for the event loop has it."""
    if len(body) > LONG:
        await asyncio.sleep(0)


def _check_parts(body: bytes) -> None:
    if _has_many_parts(body):
        raise Refused(400, f"the body has more than {MOST_PARTS} objects, lists and texts; send fewer in one request")


def _read(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refused(400, f"the body is not what this route takes: {error}") from None


async def read_bytes(request: HttpRequest, media: str, limits: ServerLimits) -> bytes:
    """A body that is declared as `media`. Raises Refused: 408, 413, 415."""
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if declared != media:
        raise Refused(415, f"send a body of {media}, and say so in the header `Content-Type: {media}`")
    if int(request.headers.get("content-length") or 0) > limits.body_bytes:
        raise _too_large(limits)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.body_bytes:
                    raise _too_large(limits)
    except TimeoutError:
        message = f"the body did not arrive within {limits.body_seconds:g} seconds"
        raise Refused(408, message, headers={"Connection": "close"}) from None
    request.scope[_SIZE] = len(body)
    if _ATTEMPT in request.headers:
        path = request.scope["path"].encode()
        request.scope[_DIGEST] = blake2b(path + b"\0" + body, digest_size=16).digest()
    return bytes(body)


async def first_bytes(request: HttpRequest, limits: ServerLimits) -> bytes:
    """Returns what has arrived, or arrives next, of a body that was refused unread; nothing where the client says no more."""
    with suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                return chunk
    return b""


def _too_large(limits: ServerLimits) -> Refused:
    return Refused(413, f"a body may have {limits.body_bytes} bytes", headers={"Connection": "close"})


async def gone(receive: Receive) -> None:
    """Returns when the client has left."""
    with suppress(ClientDisconnect):
        while (await receive())["type"] != "http.disconnect":
            pass


async def while_there(request: HttpRequest, work: Coroutine[Any, Any, T]) -> T | None:
    """The work's result; None (and the work cancelled) where the client left before. The body must have been read."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone(request.receive))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        await _end(working, leaving)


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def json_response(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type=JSON)


class Events(Response):
    """Server-sent events: a line `data: JSON` for each thing that `events` yields, then `data: [DONE]`. With `named`, a line with the
    `type` of each thing goes before it, and nothing follows the last one.

    An error before the first event is an answer with its own status; a later one is an event with an `error`."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[Any], named: bool = False) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._named, self._begun = events, named, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending, leaving = asyncio.ensure_future(self._send(send)), asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait([sending, leaving], return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                with suppress(OSError):  # the client left between two events
                    await sending
        finally:
            await _end(sending, leaving)
            await self._events.aclose()  # type: ignore[attr-defined]

    async def _send(self, send: Send) -> None:
        try:
            async for event in self._events:
                await self._put(send, msgspec.json.encode(event), event["type"] if self._named else "")
        except OSError:
            raise
        except Exception as error:
            if not self._begun:
                await self._answer(send, error)
                return
            body = refusal_of(error).body
            await self._put(
                send, b'{"type":"error",' + body[1:] if self._named else body, "error" if self._named else ""
            )
        if not self._named:
            await self._put(send, b"[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _put(self, send: Send, data: bytes, name: str = "") -> None:
        if not self._begun:
            self._begun = True
            await send(self._start(200, self.raw_headers))
        head = f"event: {name}\ndata: " if name else "data: "
        await send({"type": "http.response.body", "body": head.encode() + data + b"\n\n", "more_body": True})

    async def _answer(self, send: Send, error: Exception) -> None:
        refusal = refusal_of(error)
        headers = [(name.lower().encode(), value.encode()) for name, value in refusal.headers.items()]
        await send(self._start(refusal.status, [(b"content-type", b"application/json"), *headers]))
        await send({"type": "http.response.body", "body": refusal.body})

    @staticmethod
    def _start(status: int, headers: list[tuple[bytes, bytes]]) -> Message:
        return {"type": "http.response.start", "status": status, "headers": headers}
