"""`headrace serve --train` in a thread of its own, for the official client, which blocks the thread that it is called from."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tinker

from headrace.engine.config import EngineConfig
from headrace.run.worker.build import open_launcher
from headrace.serve.config import ServeConfig, TrainingConfig, TrainLimits
from headrace.serve.serving import Serving
from headrace.serve.start import make_app, opened
from headrace.serve.training.tinker_routes import routes
from headrace.serve.training.tinker_service import TinkerService, opened_service
from headrace.trainer.shared.calls import SharedConfig
from headrace.web.server import bind, make_server

T = TypeVar("T")
KEY = "tml-a-token-for-the-tests"
PLACES = 2
ENGINE = EngineConfig(
    dtype="float32", device="cpu", kv_gib=0.01, context_length=200, max_running=32, max_adapters=PLACES
)


@dataclass
class Running:
    url: str
    service: TinkerService
    serving: Serving
    loop: asyncio.AbstractEventLoop
    logs: Path

    def client(self, key: str = KEY) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.url, api_key=key)

    def within(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(300)

    def call(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and body of a bare request: GET without a body, POST of JSON or of bytes with one."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        media = "application/x-protobuf" if isinstance(body, bytes) else "application/json"
        headers = {"X-API-Key": KEY, **({"Content-Type": media} if data is not None else {}), **headers}
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())


@contextmanager
def running(
    model: Path, work: Path, limits: TrainLimits | None = None, engine: EngineConfig = ENGINE
) -> Iterator[Running]:
    found: list[Running] = []
    failed: list[BaseException] = []
    up, over = threading.Event(), threading.Event()
    stop: list[asyncio.Event] = []

    async def main() -> None:
        training = TrainingConfig(
            directory=work / "checkpoints",
            train=SharedConfig(device="cpu", dtype="float32"),
            limits=limits or TrainLimits(),
        )
        config = ServeConfig(model=str(model), engine=engine, name="tiny", token=KEY, training=training)
        stop.append(asyncio.Event())
        sock = bind("127.0.0.1", 0)
        async with (
            opened(config, model, work / "logs") as serving,
            opened_service(
                training, serving, launcher=open_launcher(work / "logs"), directory=model, places=PLACES, max_deaths=3
            ) as service,
        ):
            server = make_server(make_app(serving, KEY, routes(service)))
            serve = asyncio.ensure_future(server.serve(sockets=[sock]))
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            found.append(Running(url, service, serving, asyncio.get_running_loop(), work / "logs"))
            up.set()
            await stop[0].wait()
            server.should_exit = server.force_exit = True
            await serve
        sock.close()

    def target() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failed.append(error)
        finally:
            up.set()
            over.set()

    threading.Thread(target=target, daemon=True).start()
    assert up.wait(300), "the server does not start"
    if failed:
        raise failed[0]
    try:
        yield found[0]
    finally:
        found[0].loop.call_soon_threadsafe(stop[0].set)
        assert over.wait(120), "the server does not end"
        if failed:
            raise failed[0]
