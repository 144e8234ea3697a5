"""The start, the run and the end of a server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from headrace.core.errors import WorkerDied
from headrace.core.protocols import Job
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.own_groups import Suspects
from headrace.models.chat import ChatEncoder
from headrace.models.resolve import cache_dir, resolve_model
from headrace.run.clients.process_engine import ProcessEngine
from headrace.run.worker.build import open_launcher
from headrace.run.worker.worker_messages import EngineStart
from headrace.serve.config import ServeConfig
from headrace.serve.routes import control, generate, text
from headrace.serve.serving import Serving
from headrace.web.application import Guard, make_application
from headrace.web.formats.responses import StoredResponses
from headrace.web.limits import room_for_connections
from headrace.web.server import address_of, bind, make_server, serve_until_asked
from headrace.weight_sync.directory import offer

# --- The application: all routes, protected by the guard.


ROUTES = [
    Route("/health", control.health),
    Route("/metrics", control.metrics),
    Route("/v1/models", text.models),
    Route("/v1/models/{name:path}", text.model),
    Route("/v1/completions", text.completions, methods=["POST"]),
    Route("/v1/chat/completions", text.chat, methods=["POST"]),
    Route("/v1/responses", text.responses, methods=["POST"]),
    Route("/v1/messages", text.messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", text.count_tokens, methods=["POST"]),
    Route("/inference/v1/generate", generate.generate, methods=["POST"]),
    Route("/inference/v1/abort_requests", control.abort, methods=["POST"]),
    Route("/v1/load_lora_adapter", control.load_adapter, methods=["POST"]),
    Route("/v1/unload_lora_adapter", control.unload_adapter, methods=["POST"]),
    Route("/pause", control.pause, methods=["POST"]),
    Route("/resume", control.resume, methods=["POST"]),
    Route("/is_paused", control.is_paused),
    Route("/headrace/state", control.state),
    Route("/headrace/weights", control.load_weights, methods=["POST"]),
]


def make_app(serving: Serving, token: str, more: Sequence[Route] = ()) -> Starlette:
    """`more`: routes beside the engine's."""
    app = make_application([*ROUTES, *more], [Middleware(Guard, token=token)])
    app.state.serving, app.state.responses = serving, StoredResponses()
    return app


# --- start ------------------------------------------------------------


def _unrecorded() -> Telemetry:
    """Drops all facts: a server has no run that would keep them. Nothing in it waits under a name, so no deadline matters."""
    drop, clock = lambda fact: None, asyncio.get_running_loop().time
    return Telemetry(drop, clock, Waits(drop, clock, math.inf, math.inf))


def serve(config: ServeConfig, say: Callable[[str], None]) -> int:
    """Runs the server until SIGINT or SIGTERM. Raises ConfigError, and WorkerDied if the engine is lost for good."""
    sock = bind(config.host, config.port)
    try:
        asyncio.run(_serve(config, sock, say))
    finally:
        sock.close()
    return 0


async def _serve(config: ServeConfig, sock: socket.socket, say: Callable[[str], None]) -> None:
    directory = await asyncio.to_thread(resolve_model, config.model)
    logs = cache_dir() / "serve" / str(sock.getsockname()[1])
    async with opened(config, directory, logs) as serving, training(config, serving, directory, logs) as more:
        server = make_server(make_app(serving, config.token, more))
        lost = asyncio.ensure_future(serving.engine.watch())
        lost.add_done_callback(lambda _: setattr(server, "should_exit", True))
        if (room := room_for_connections()) < config.limits.requests:
            message = f"{room} connections fit into the open files that this process may have, fewer than the {config.limits.requests} completions"
            say(f"{message} that it would serve at once: raise the hard limit (ulimit -Hn) before you start it")
        say(f"{serving.name} ({serving.engine.capabilities.path}, {serving.dtype}) at {address_of(sock)}")
        await serve_until_asked(server, sock)
        if lost.done():
            lost.result()
        lost.cancel()


@contextlib.asynccontextmanager
async def training(
    config: ServeConfig, serving: Serving, directory: Path, logs: Path
) -> AsyncIterator[Sequence[Route]]:
    """Yields the routes of the Tinker API, with their trainer started; none where the server does not train."""
    if config.training is None:
        yield ()
        return
    from headrace.serve.training.tinker_routes import routes
    from headrace.serve.training.tinker_service import opened_service

    places, deaths = config.engine.max_adapters, config.engine.max_deaths
    async with opened_service(
        config.training, serving, launcher=open_launcher(logs), directory=directory, places=places, max_deaths=deaths
    ) as service:
        yield routes(service)


@contextlib.asynccontextmanager
async def opened(config: ServeConfig, directory: Path, logs: Path) -> AsyncIterator[Serving]:
    """The model's own weights are live in it as version 0."""
    encoder = (await asyncio.to_thread(ChatEncoder, directory)).with_special_tokens("hide")  # as other servers
    await asyncio.to_thread(logs.mkdir, parents=True, exist_ok=True)
    job, limit = Job("engine", "engine", config.engine.cores), config.engine.max_deaths
    suspects = Suspects(config.engine.ticket_deaths)
    engine = ProcessEngine(open_launcher(logs), job, limit, _unrecorded(), suspects)
    try:
        await engine.launch()
        own = config.engine.for_worker if config.training else config.engine  # beside a trainer it leaves the GPU room
        await engine.open(EngineStart(str(directory), dataclasses.asdict(own), {}))
        serving = Serving(
            engine=engine,
            encoder=encoder,
            name=config.served_name,
            limits=config.limits,
            dtype=config.engine.serving_dtype,
        )
        await serving.load(offer(directory))
        yield serving
    except WorkerDied as error:
        error.add_note(f"its output is in {logs}")
        raise
    finally:
        await engine.close()
