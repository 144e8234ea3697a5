"""Routes for a trainer or an operator: weights, adapters, pauses, and the server's health.

`/pause`, `/resume`, `/is_paused`, `/v1/load_lora_adapter`, `/v1/unload_lora_adapter` and `/inference/v1/abort_requests` have
vLLM's format. `/headrace/weights` takes a `WeightUpdate` (weights.py) whose `where` names files, and answers when it is live.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from headrace.core.weights import WeightUpdate
from headrace.serve.serving import Serving
from headrace.version import __version__
from headrace.web.bodies import Abort, LoadAdapter, UnloadAdapter
from headrace.web.errors import Refused
from headrace.web.sending import json_response, read_body
from headrace.weight_sync.unprepared import place_of

T = TypeVar("T")
MODES = ("keep", "wait", "abort")


def of(request: HttpRequest) -> Serving:
    serving: Serving = request.app.state.serving
    return serving


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Completes an update even if the client disconnects, so that none is ever half applied."""
    return await asyncio.shield(asyncio.ensure_future(work))


async def health(request: HttpRequest) -> Response:
    """200 while the engine works; 503 with the reason when it was lost for good."""
    await of(request).engine.stats()
    return Response()


async def state(request: HttpRequest) -> Response:
    """The state that a client checks before it uses a server, and after an outage."""
    serving = of(request)
    labels = {name: loaded.label for name, loaded in serving.loaded.items()}
    return json_response(
        {
            "headrace": __version__,
            "boot": serving.boot,
            "model": serving.name,
            "dtype": serving.dtype,
            "capabilities": serving.engine.capabilities,
            "weights": labels.get(""),
            "adapters": {name: label for name, label in labels.items() if name},
            "paused": serving.paused,
            "stats": await serving.engine.stats(),
        }
    )


async def load_weights(request: HttpRequest) -> Response:
    serving = of(request)
    update = await read_body(request, WeightUpdate, serving.limits)
    if not isinstance(update.where.get("path"), str) and not place_of(update):
        raise Refused(
            400,
            "where.path must name the directory of the update (headrace/weight_sync/files.py), or where.url, or where.host and where.port, its trainer "
            "(weight_sync/unprepared.py)",
        )
    try:
        msgspec.msgpack.encode(update)
    except OverflowError:
        raise Refused(400, "a number of the update does not fit into 64 bits") from None
    if isinstance(path := update.where.get("path"), str):
        await serving.look_at(Path(path))
    return json_response(await to_the_end(serving.load(update)))


async def load_adapter(request: HttpRequest) -> Response:
    serving = of(request)
    body = await read_body(request, LoadAdapter, serving.limits)
    if body.is_3d_lora_weight:
        raise Refused(400, "is_3d_lora_weight is not served; leave it out", "unsupported_parameter")
    if body.lora_name in serving.loaded and not body.load_inplace:
        raise Refused(400, f"the adapter {body.lora_name} is loaded already; set load_inplace, or unload it first")
    report = await to_the_end(serving.load_adapter(body.lora_name, Path(body.lora_path)))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added, version {report.version}.")


async def unload_adapter(request: HttpRequest) -> Response:
    serving = of(request)
    body = await read_body(request, UnloadAdapter, serving.limits)
    await to_the_end(serving.unload(body.lora_name))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed.")


async def pause(request: HttpRequest) -> Response:
    mode = request.query_params.get("mode", "abort")
    if mode not in MODES:
        raise Refused(400, f"mode = {mode} is none; choose {', '.join(MODES)}")
    await to_the_end(of(request).pause(mode))
    return json_response({"status": "paused"})


async def resume(request: HttpRequest) -> Response:
    await to_the_end(of(request).resume())
    return json_response({"status": "resumed"})


async def is_paused(request: HttpRequest) -> Response:
    return json_response({"is_paused": bool(of(request).paused)})


async def abort(request: HttpRequest) -> Response:
    serving = of(request)
    body = await read_body(request, Abort, serving.limits)
    return json_response({"aborted": serving.abort(body.request_ids)})


async def metrics(request: HttpRequest) -> Response:
    """Prometheus text format 0.0.4 (https://prometheus.io/docs/instrumenting/exposition_formats/)."""
    serving = of(request)
    stats, counted, base = await serving.engine.stats(), serving.counters, serving.loaded.get("")
    rows = [
        ("requests_running", "gauge", "Completions that are being sampled.", stats.running),
        ("requests_waiting", "gauge", "Completions that wait for room.", stats.waiting),
        ("kv_cache_usage_ratio", "gauge", "Share of the KV budget that requests hold.", stats.kv_used),
        ("weights_version", "gauge", "Version of the base weights, as their owner numbers them.", base.label.version if base else -1),
        ("adapters_loaded", "gauge", "LoRA adapters.", sum(map(bool, serving.loaded))),
        ("paused", "gauge", "1 while the engine is paused.", int(bool(serving.paused))),
        ("completions_total", "counter", "Completions that were begun.", counted.completions),
        ("completions_cancelled_total", "counter", "Those that ended because the client left or asked for it.", counted.cancelled),
        ("requests_refused_total", "counter", "Requests that found no room (503).", counted.refused),
        ("special_texts_total", "counter", "Chats that hold the text of control tokens, which stays text.", counted.specials),
        ("prompt_tokens_total", "counter", "Tokens of prompts.", counted.prompt_tokens),
        ("generation_tokens_total", "counter", "Tokens that were sampled.", counted.sampled_tokens),
        ("prefix_cached_tokens_total", "counter", "Prompt tokens found in the prefix cache.", stats.cached_tokens),
        ("preemptions_total", "counter", "Completions that had to make room for others.", stats.preemptions),
        ("weight_loads_total", "counter", "Updates of weights and adapters.", counted.loads),
        ("engine_busy_seconds_total", "counter", "Time in forward passes.", stats.busy_seconds),
    ]  # fmt: skip
    text = "".join(
        f"# HELP headrace_{name} {about}\n# TYPE headrace_{name} {kind}\nheadrace_{name} {value}\n"
        for name, kind, about, value in rows
    )
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
