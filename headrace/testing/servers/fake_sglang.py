"""An SGLang server without SGLang: its routes, over an engine of headrace. For tests of everything that speaks to SGLang.

It takes the fields that SGLang documents (docs.sglang.io; `managers/io_struct.py`, `sampling/sampling_params.py`), and refuses any other
with 400, where SGLang itself would ignore some: a client that misspells a field is found out. It has the traps of the real one, too:
weights that are read while a request is there cannot clear the cache, which ends the scheduler (500, and nothing works afterwards); a request
whose client has left goes on for a while, and then takes every other with it whose id begins with its own; and `ignore_eos` ignores
`stop_token_ids`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from headrace.core.errors import HeadraceError
from headrace.core.reports import EngineStats
from headrace.core.types import Request, Sampling
from headrace.serve.serving import Piece, Serving, Stream, follow, to_their_ends
from headrace.testing.servers.sglang_bodies import (
    SglangAbort,
    SglangContinue,
    SglangGenerate,
    SglangLoadLora,
    SglangNewVersion,
    SglangPause,
    SglangUnloadLora,
    SglangUpdateFromDisk,
)
from headrace.web.application import Guard
from headrace.web.errors import Refused, answer_error
from headrace.web.sending import GONE, Events, json_response, read_body, while_there
from headrace.weight_sync.files import RECORD, UpdateRecord

VERSION = "0.5.19"
FAULTS = ("weights_ignored", "adapter_ignored", "load_fails", "masks_ignored")
"""Errors that a server may make: report weights or an adapter as loaded without having done it; fail to load; leave masks out."""

LINGER = 0.2
"""Seconds for which a request goes on after its client has left (SGLang: 2, `create_abort_task`)."""


class FakeSglang:
    """The state of the server beside its engine's. `arguments` replace those that `/get_server_info` reports."""

    def __init__(self, serving: Serving, *, faults: Collection[str] = (), **arguments: Any) -> None:
        assert set(faults) <= set(FAULTS)
        self.serving, self.faults = serving, set(faults)
        self.label, self.dead, self.reloads = "default", False, 0
        self.bodies: list[SglangGenerate] = []
        """Requests that were served, for tests to look at."""
        self._rids: set[str] = set()
        self._arguments = {
            "dtype": "float32",
            "incremental_streaming_output": True,
            "enable_lora": None,
            "max_loras_per_batch": 8,
            "max_loaded_loras": None,
            "enable_priority_scheduling": False,
            "enable_metrics": False,
            **arguments,
        }

    # -- generation -----------------------------------------------------------------------------------------------------

    async def generate(self, request: HttpRequest) -> Response:
        self._alive()
        body = await read_body(request, SglangGenerate, self.serving.limits)
        if problem := self._problem(body):
            error = {"message": problem, "type": "BadRequest", "code": 400}
            return Events(_told({"error": error})) if body.stream else json_response({"error": error}, 400)
        self.bodies.append(body)
        if body.stream:
            return Events(self._events(body))
        return await while_there(request, self._whole(body)) or GONE

    def _problem(self, body: SglangGenerate) -> str:
        asked = len(body.input_ids) + body.sampling_params.max_new_tokens
        if asked > (room := self.serving.engine.capabilities.context_length):
            return f"Requested token count exceeds the model's maximum context length of {room} tokens."
        if body.priority is not None and not self._arguments["enable_priority_scheduling"]:
            return "Using priority is disabled for this server."
        if body.lora_path and not self._arguments["enable_lora"]:
            return "LoRA is not enabled. Please set `--enable-lora`"
        if body.rid in self._rids:
            return f"Duplicate request ID detected: {body.rid}"
        return ""

    def _request(self, body: SglangGenerate) -> Request:
        drawn = body.sampling_params
        adapter = self.serving.adapter_of(body.lora_path)
        return Request(
            id=f"{body.rid}#0",
            prompt=tuple(body.input_ids),
            sampling=Sampling(
                max_tokens=drawn.max_new_tokens,
                temperature=drawn.temperature,
                top_p=drawn.top_p,
                top_k=max(drawn.top_k, 0),
                min_p=drawn.min_p,
                stop_token_ids=() if drawn.ignore_eos else tuple(drawn.stop_token_ids or ()),
                ignore_eos=drawn.ignore_eos,
                seed=hash(body.rid) % (1 << 62),
            ),
            adapter="" if "adapter_ignored" in self.faults else adapter,
            prompt_logprobs=body.logprob_start_len == 0,
            return_mask=body.return_sampling_mask and self.serving.engine.capabilities.path != "fake",
        )

    async def _events(self, body: SglangGenerate) -> AsyncIterator[dict[str, Any]]:
        events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        sampling = asyncio.ensure_future(self._sample(body, events))
        try:
            while event := await events.get():
                yield event
            await sampling
        finally:
            if not sampling.done():
                asyncio.get_running_loop().call_later(LINGER, self._left, body.rid)

    async def _sample(self, body: SglangGenerate, events: asyncio.Queue[dict[str, Any] | None]) -> None:
        self._rids.add(body.rid)
        spans: list[dict[str, Any]] = []
        try:
            async with aclosing(follow(self.serving, [self._request(body)])) as pieces:
                async for piece in pieces:
                    self._extend(spans, piece)
                    if piece.ended or piece.stop > piece.start:
                        events.put_nowait(self._event(body, piece, spans))
        finally:
            self._rids.discard(body.rid)
            events.put_nowait(None)

    def _left(self, rid: str) -> None:
        """Aborts the requests of a client that is gone."""
        self.serving.abort([request for request in self._rids if request.startswith(rid)])

    async def _whole(self, body: SglangGenerate) -> Response:
        (piece,) = await to_their_ends(self.serving, [self._request(body)])
        spans: list[dict[str, Any]] = []
        self._extend(spans, piece)
        return json_response(self._event(body, piece, spans))

    def _extend(self, spans: list[dict[str, Any]], piece: Piece) -> None:
        """Adds a piece's tokens to the spans of labels. A request has one span at least, which may be empty."""
        if not spans or (piece.stop > piece.start and spans[-1]["version"] != self.label):
            spans.append({"version": self.label, "start": piece.start})
        spans[-1]["end"] = piece.stop

    def _event(self, body: SglangGenerate, piece: Piece, spans: list[dict[str, Any]]) -> dict[str, Any]:
        stream = piece.stream
        meta: dict[str, Any] = {
            "id": body.rid,
            "finish_reason": _finish(stream) if piece.ended else None,
            "prompt_tokens": len(body.input_ids),
            "completion_tokens": piece.stop,
            "cached_tokens": 0,
            "weight_version": spans[-1]["version"],
            "weight_versions": [dict(span) for span in spans],
        }
        if body.return_logprob:
            # With masks, these are of another distribution than the tokens were drawn from: a client that reads them is found out.
            shift = 100.0 if body.return_sampling_mask else 0.0
            sampled = zip(piece.logprobs, piece.tokens, strict=True)
            meta["output_token_logprobs"] = [(logprob - shift, token, None) for logprob, token in sampled]
            meta["input_token_logprobs"] = _scored(body, stream)
        if body.return_sampling_mask and "masks_ignored" not in self.faults:
            meta["output_token_sampling_mask"] = [_mask(stream, place) for place in range(piece.start, piece.stop)]
            meta["output_token_sampling_logprobs"] = piece.logprobs
        return {"text": "", "output_ids": piece.tokens, "meta_info": meta}

    async def abort(self, request: HttpRequest) -> Response:
        body = await read_body(request, SglangAbort, self.serving.limits)
        if body.abort_all:
            self.serving.abort(None)
        elif body.rid:
            self._left(body.rid)
        return Response()

    # -- weights --------------------------------------------------------------------------------------------------------

    async def pause(self, request: HttpRequest) -> Response:
        self._alive()
        mode = (await read_body(request, SglangPause, self.serving.limits)).mode
        await self.serving.pause("abort" if mode == "abort" else "keep")
        while mode == "abort" and self.serving.under_way:
            self.serving.abort(None)
            await asyncio.sleep(0.01)
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: HttpRequest) -> Response:
        await read_body(request, SglangContinue, self.serving.limits)
        await self.serving.resume()
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def update(self, request: HttpRequest) -> Response:
        self._alive()
        body = await read_body(request, SglangUpdateFromDisk, self.serving.limits)
        path = Path(body.model_path) / RECORD
        if "load_fails" in self.faults or not path.exists():
            return _outcome(f"Failed to get weights iterator: {body.model_path}, safetensors.", done=False)
        if not self.serving.paused:
            raise Refused(400, "weights are read while the server is not paused: tokens of both would be mixed")
        if body.flush_cache and self.serving.under_way:
            self.dead = True
            raise RuntimeError("Cache flush failed after updating weights")
        record = msgspec.json.decode(path.read_bytes(), type=UpdateRecord)
        if "weights_ignored" not in self.faults:
            await asyncio.shield(asyncio.ensure_future(self.serving.load(record.update)))
        self.label = body.weight_version or self.label
        self.reloads += 1
        return _outcome(f"Succeeded to update model weights. Weight version updated to {self.label}.")

    async def relabel(self, request: HttpRequest) -> Response:
        body = await read_body(request, SglangNewVersion, self.serving.limits)
        if body.abort_all_requests:
            self.serving.abort(None)
        self.label = body.new_version
        return json_response({"success": True, "message": "", "new_version": self.label})

    async def load_lora(self, request: HttpRequest) -> Response:
        body = await read_body(request, SglangLoadLora, self.serving.limits)
        if not self._arguments["enable_lora"]:
            return _outcome("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.", done=False)
        if body.lora_name in self.serving.loaded:
            return _outcome(f"LoRA with name {body.lora_name} already exists.", done=False)
        try:
            await self.serving.load_adapter(body.lora_name, Path(body.lora_path))
        except (HeadraceError, ValueError) as error:
            return _outcome(str(error), done=False)
        return _outcome("")

    async def unload_lora(self, request: HttpRequest) -> Response:
        body = await read_body(request, SglangUnloadLora, self.serving.limits)
        while True:
            try:
                await self.serving.unload(body.lora_name)
                return _outcome("")
            except Refused as refused:  # it waits for the requests that use it
                if refused.status != 409:
                    return _outcome(refused.message, done=False)
                await asyncio.sleep(0.01)

    # -- what it is -----------------------------------------------------------------------------------------------------

    def _alive(self) -> None:
        if self.dead:
            raise Refused(503, "the scheduler has died")

    async def health(self, request: HttpRequest) -> Response:
        self._alive()
        return Response()

    async def model_info(self, request: HttpRequest) -> Response:
        return json_response({"model_path": "m", "is_generation": True, "weight_version": self.label})

    async def server_info(self, request: HttpRequest) -> Response:
        self._alive()
        length = self.serving.engine.capabilities.context_length
        scheduler = {"max_req_input_len": length, "max_total_num_tokens": 4 * length}
        return json_response({**self._arguments, **scheduler, "internal_states": [{}], "version": VERSION})

    async def metrics(self, request: HttpRequest) -> Response:
        if not self._arguments["enable_metrics"]:
            raise Refused(404, "Not Found")
        return PlainTextResponse(_metrics(await self.serving.engine.stats()))

    # -- together -------------------------------------------------------------------------------------------------------

    def app(self, api_key: str = "") -> Starlette:
        routes = [
            Route("/health", self.health),
            Route("/model_info", self.model_info),
            Route("/get_server_info", self.server_info),
            Route("/metrics", self.metrics),
            _post("/generate", self.generate),
            _post("/abort_request", self.abort),
            _post("/pause_generation", self.pause),
            _post("/continue_generation", self.resume),
            _post("/update_weights_from_disk", self.update),
            _post("/update_weight_version", self.relabel),
            _post("/load_lora_adapter", self.load_lora),
            _post("/unload_lora_adapter", self.unload_lora),
        ]
        kinds = [Refused, HeadraceError, ValueError, 404, 405, Exception]
        return Starlette(
            routes=routes,
            middleware=[Middleware(Guard, token=api_key)],
            exception_handlers=dict.fromkeys(kinds, answer_error),
        )


def _post(path: str, answer: Callable[[HttpRequest], Any]) -> Route:
    return Route(path, answer, methods=["POST"])


async def _told(event: Any) -> AsyncIterator[Any]:
    yield event


def _outcome(message: str, done: bool = True) -> Response:
    return json_response({"success": done, "message": message, "num_paused_requests": 0}, 200 if done else 400)


def _finish(stream: Stream) -> dict[str, Any]:
    stop = stream.end.stop if stream.end else "interrupted"
    if stop == "stop":
        return {"type": "stop", "matched": stream.tokens[-1] if stream.tokens else None}
    if stop == "length":
        return {"type": "length", "length": len(stream.tokens)}
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def _scored(body: SglangGenerate, stream: Stream) -> list[tuple[float | None, int, None]]:
    if not stream.scores:
        return []
    logprobs = [None, *stream.scores.logprobs]
    return [(logprob, token, None) for logprob, token in zip(logprobs, body.input_ids, strict=True)]


def _mask(stream: Stream, place: int) -> list[int]:
    """An engine without a model keeps the sampled token alone."""
    if not stream.request.return_mask:
        return [stream.tokens[place]]
    kept: list[int] = np.frombuffer(stream.details[place].mask, np.int32).tolist()
    return kept


def _metrics(stats: EngineStats) -> str:
    rows = [
        ("num_running_reqs", stats.running),
        ("num_queue_reqs", stats.waiting),
        ("token_usage", stats.kv_used),
        ("generation_tokens_total", stats.sampled_tokens),
        ("prompt_tokens_total", stats.asked_tokens),
        ("cached_tokens_total", stats.cached_tokens),
    ]
    return "".join(f'sglang:{name}{{model_name="m"}} {float(value)}\n' for name, value in rows)
