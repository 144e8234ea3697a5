"""The application: all routes, protected by the guard."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from headrace.serve.routes import control, generate, openai, shared_formats
from headrace.serve.serving import Serving
from headrace.web.application import Guard, make_application
from headrace.web.formats.responses import StoredResponses

ROUTES = [
    Route("/health", control.health),
    Route("/metrics", control.metrics),
    Route("/v1/models", openai.models),
    Route("/v1/models/{name:path}", openai.model),
    Route("/v1/completions", openai.completions, methods=["POST"]),
    Route("/v1/chat/completions", openai.chat, methods=["POST"]),
    Route("/v1/responses", shared_formats.responses, methods=["POST"]),
    Route("/v1/messages", shared_formats.messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", shared_formats.count_tokens, methods=["POST"]),
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
