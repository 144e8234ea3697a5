"""Fakes of what gives scores over HTTP: a client that asks nobody, and a server. Both misbehave as they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Literal

import msgspec

from headrace.episodes.scoring.services.endpoint import HttpAnswer, NoAnswer

Misbehaviour = Literal[
    "down", "hang", "500", "busy", "html", "nan", "twice", "short", "unauthorised", "redirect", "half"
]
"""The fault of one request: no connection, no answer, a server error, `Retry-After`, a page instead of JSON, scores that are none, two lists of them, too
few, a refusal, another place, the connection lost in the middle of the answer."""
Scores = Callable[[Mapping[str, Any]], list[Any]]
Reply = Callable[[str], str]

_STATUS = {"500": 500, "busy": 503, "unauthorised": 401, "redirect": 302}
_TEXTS = {
    "html": b"<html><body>Bad gateway</body></html>",
    "nan": b'{"scores": [NaN]}',
    "twice": b'{"scores": [0, 0], "scores": [1, 1]}',
    "500": b"it broke",
    "busy": b"later",
    "unauthorised": b'{"error": "who are you?"}',
}


def answer_of(body: bytes, scores: Scores | None, reply: Reply | None) -> bytes:
    """Returns the answer of a service that works, or of a judge, which `reply` gives for the last message."""
    asked = msgspec.json.decode(body)
    if reply and "messages" in asked:
        text = reply(asked["messages"][-1]["content"])
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        return msgspec.json.encode({"choices": [choice], "usage": {"total_tokens": len(text.split())}})
    assert scores
    return msgspec.json.encode({"scores": scores(asked)})


class ScriptedPost:
    """Protocol `Poster` without a network. Time passes in `asyncio.sleep` alone, so that it works in virtual time."""

    def __init__(
        self,
        scores: Scores | None = None,
        reply: Reply | None = None,
        *,
        faults: Iterable[Misbehaviour | None] = (),
        seconds: float = 0.0,
    ) -> None:
        """`faults`: one for each request, in order; None, and the end of it, for requests that work. `seconds`: time to an answer."""
        self._scores, self._reply = scores, reply
        self._faults, self._seconds = iter(faults), seconds
        self.asked: list[tuple[str, dict[str, str], Any]] = []
        """Url, headers and body of every request."""
        self.running = self.most = 0
        """Requests in progress now, and the most that there were at once."""

    async def post(self, url: str, body: bytes, headers: Mapping[str, str], seconds: float) -> HttpAnswer:
        self.asked.append((url, dict(headers), msgspec.json.decode(body)))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self._answered(next(self._faults, None), body, seconds)
        finally:
            self.running -= 1

    async def _answered(self, fault: Misbehaviour | None, body: bytes, seconds: float) -> HttpAnswer:
        late = fault == "hang" or self._seconds > seconds
        await asyncio.sleep(seconds if late else self._seconds)
        if late:
            raise NoAnswer(f"no answer within {seconds:g} s", late=True)
        if fault in ("down", "half"):
            raise NoAnswer("Connection refused" if fault == "down" else "the connection was closed in the middle")
        return _faulty(fault, body) if fault else HttpAnswer(200, {}, answer_of(body, self._scores, self._reply))

    async def close(self) -> None:
        pass


def _faulty(fault: Misbehaviour, body: bytes) -> HttpAnswer:
    headers = {"busy": {"Retry-After": "2"}, "redirect": {"Location": "http://elsewhere/"}}.get(fault, {})
    if fault == "short":
        return HttpAnswer(200, {}, b'{"scores": []}')
    return HttpAnswer(_STATUS.get(fault, 200), headers, _TEXTS.get(fault, b""))


class FakeService:
    """A real server on this machine: `POST /score` is a service, `POST /v1/chat/completions` a judge.

    `async with FakeService(scores) as service: service.url`"""

    def __init__(
        self,
        scores: Scores | None = None,
        reply: Reply | None = None,
        *,
        faults: Iterable[Misbehaviour | None] = (),
        token: str = "",
    ) -> None:
        """`token`: the one that requests must carry; empty for none."""
        self._scores, self._reply, self._faults, self._token = scores, reply, iter(faults), token
        self.keys: list[str] = []
        """The `Idempotency-Key` of every request."""
        self.url = ""

    async def __aenter__(self) -> FakeService:
        from aiohttp import web

        app = web.Application()
        app.router.add_post("/score", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: Any) -> Any:
        from aiohttp import web

        self.keys.append(request.headers.get("Idempotency-Key", ""))
        body, fault = await request.read(), next(self._faults, None)
        if self._token and request.headers.get("Authorization") != f"Bearer {self._token}":
            fault = "unauthorised"
        if fault == "hang":
            await asyncio.sleep(1e6)
        if fault in ("down", "half"):
            if fault == "half":
                begun = web.StreamResponse(headers={"Content-Length": "1000"})
                await begun.prepare(request)
                await begun.write(b'{"scores": [')
            request.transport.close()
            return web.Response()
        answer = _faulty(fault, body) if fault else HttpAnswer(200, {}, answer_of(body, self._scores, self._reply))
        return web.Response(body=answer.body, status=answer.status, headers=dict(answer.headers))
