"""Servers for tests, in this process and on a port of their own."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from starlette.applications import Starlette

from headrace.core.types import Request
from headrace.core.weights import WeightUpdate
from headrace.models.chat import ChatEncoder
from headrace.serve.serving import Serving
from headrace.serve.start import make_app
from headrace.testing.fake_engine import FakeEngine
from headrace.web.limits import ServerLimits
from headrace.web.server import bind, make_server

LOOPBACK = "127.0.0.1"


def by_name(request: Request) -> Sequence[int]:
    """A script for `FakeEngine`: the tokens of a completion depend on the client's name of it, which is a part of the engine's."""
    rng = random.Random(request.id.rpartition(".")[0])
    return [rng.randint(1, 99) for _ in range(rng.randint(5, 20))]


@asynccontextmanager
async def answering(app: Starlette) -> AsyncIterator[str]:
    """Its URL."""
    sock, server = bind(LOOPBACK, 0), make_server(app)
    running = asyncio.ensure_future(server.serve(sockets=[sock]))
    try:
        yield f"http://{LOOPBACK}:{sock.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        await running
        sock.close()


@asynccontextmanager
async def faked(
    model: Path, engine: FakeEngine | None = None, limits: ServerLimits | None = None, token: str = ""
) -> AsyncIterator[tuple[Client, Serving]]:
    """The real server over an engine without a model, which serves version 0."""
    serving = Serving(
        engine=engine or FakeEngine(seconds_per_token=0.001),
        encoder=ChatEncoder(model).with_special_tokens("hide"),  # as `headrace serve`
        name="tiny",
        limits=limits or ServerLimits(),
        dtype="float32",
    )
    await serving.load(WeightUpdate(version=0, kind="full", fingerprint="fake-0", nbytes=0, seconds=0.0))
    async with answering(make_app(serving, token)) as url, aiohttp.ClientSession(base_url=url) as session:
        yield Client(session, url), serving


class Client:
    """A client that believes nothing: status and body as they are."""

    def __init__(self, session: aiohttp.ClientSession, url: str = "") -> None:
        self.session, self.url = session, url

    async def get(self, path: str, **more: Any) -> tuple[int, Any]:
        async with self.session.get(path, **more) as answer:
            return answer.status, _read(await answer.text())

    async def post(self, path: str, body: Any = None, **more: Any) -> tuple[int, Any]:
        more = more if body is None else {"json": body, **more}
        async with self.session.post(path, **more) as answer:
            return answer.status, _read(await answer.text())

    async def events(self, path: str, body: Any) -> list[Any]:
        """All but the `[DONE]` with which every stream ends."""
        async with self.session.post(path, json={**body, "stream": True}) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in (await answer.text()).splitlines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
