"""A vLLM server without vLLM: its routes, over an engine of headrace. For tests of everything that speaks to vLLM.

It takes the fields that vLLM 0.32 documents in its source (`entrypoints/scale_out/token_in_token_out/protocol.py`, `entrypoints/rl/online`,
`entrypoints/serve`), and refuses any other with 400, where vLLM itself would ignore some: a client that misspells a field is found out. It
is strict about the order of an update, too: weights are read while the server is paused, and no cache salt outlives its weights. Its sleep
(`fake_sleep.py`) gives no memory back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.core.errors import HeadraceError
from headrace.core.reports import EngineStats
from headrace.core.types import Request, Sampling
from headrace.core.weights import WeightUpdate
from headrace.serve.serving import Piece, Serving, follow, to_their_ends
from headrace.testing.servers.fake_sleep import FakeSleep
from headrace.testing.servers.fake_transfer import FakeTransfer
from headrace.testing.servers.runtime_checksums import checksums_of
from headrace.web.bodies import Body, LoadAdapter, StreamOptions, Token, UnloadAdapter
from headrace.web.errors import Refused, answer_error, response_of
from headrace.web.sending import GONE, Events, json_response, read_body, while_there
from headrace.weight_sync.files import RECORD, UpdateRecord

VERSION = "0.32.0"
GUARDED = ("/v1", "/v2", "/inference", "/cohere")
"""Paths that `--api-key` guards (`entrypoints/serve/middleware/authenticate.py`); the others are open to everybody."""

Positive = Annotated[int, Meta(ge=1)]
FAULTS = ("weights_ignored", "adapter_ignored", "load_fails", "norm_ignored")
"""Errors that a server may make: report weights, an adapter or one tensor as loaded without having done it; fail to load."""


class VllmSampling(Body, kw_only=True):
    """Fields of vLLM's `SamplingParams` that a client of ours may send."""

    max_tokens: Positive = 16
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[Token] = []
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=-1)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=-1)] | None = None
    detokenize: bool = True
    structured_outputs: dict[str, Any] | None = None


class VllmGenerate(Body, kw_only=True):
    token_ids: Annotated[list[Token], Meta(min_length=1)]
    sampling_params: VllmSampling
    request_id: str = "none"
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    priority: int = 0


class Rpc(Body, kw_only=True):
    method: str
    args: list[str] = []
    kwargs: dict[str, str] = {}
    timeout: float | None = None


class NewVersion(Body, kw_only=True):
    new_version: str


class CheckWeights(Body, kw_only=True):
    """vLLM can also `reset` its weights, and `compare` them with a `baseline`; a client of ours asks for neither."""

    action: Literal["checksum"]


class FakeVllm:
    """The state of the server beside its engine's. `absent`: groups of routes ("dev", "scale_out", "lora", "checker"), and the
    "transfer" engine of headrace."""

    def __init__(
        self,
        serving: Serving,
        *,
        weights: Path | None = None,
        dtype: str = "float32",
        max_loras: int = 0,
        logprobs_mode: str = "processed_logprobs",
        faults: Collection[str] = (),
        absent: Collection[str] = (),
        sleep_mode: bool = False,
    ) -> None:
        """`weights`: the directory of those that it begins with; without one it has no checksums. `sleep_mode`: `--enable-sleep-mode`."""
        assert set(faults) <= set(FAULTS)
        self.serving, self.dtype, self.max_loras, self.logprobs_mode = serving, dtype, max_loras, logprobs_mode
        self.faults, self.absent = set(faults), set(absent)
        self.label = "default"
        self.bodies: list[VllmGenerate] = []
        """Requests that were served, for tests to look at."""
        self._salts: dict[str, str] = {}
        """The fingerprint of the weights under which each salt was used first."""
        self._told, self.reloads = "", 0
        """The fingerprint of what it was last told to load; how often that was."""
        self._checksums = checksums_of(weights) if weights else {}
        self.rest = FakeSleep(serving, sleep_mode)

    # -- generation -----------------------------------------------------------------------------------------------------

    async def generate(self, request: HttpRequest) -> Response:
        if "scale_out" in self.absent:
            message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            raise Refused(403, message)
        body = await read_body(request, VllmGenerate, self.serving.limits)
        self._check(body)
        self.bodies.append(body)
        if body.stream:
            return Events(self._events(body))
        return await while_there(request, self._whole(body)) or GONE

    def _check(self, body: VllmGenerate) -> None:
        drawn = body.sampling_params
        self.rest.check_weights()
        if body.priority:
            raise Refused(400, "the server does not use priority scheduling (--scheduling-policy priority)")
        if drawn.stop and not drawn.detokenize:
            raise Refused(400, "stop strings are only supported when detokenize is True")
        room = self.serving.engine.capabilities.context_length - len(body.token_ids)
        if room < 1:
            raise Refused(400, f"the prompt has {len(body.token_ids)} tokens and leaves room for {room}")
        if self._salts.setdefault(body.cache_salt or "", self._told) != self._told:
            raise Refused(400, f"cache_salt {body.cache_salt} was used with other weights, whose KV it would be given")

    def _request(self, body: VllmGenerate, name: str, scores: bool = False) -> Request:
        drawn = body.sampling_params
        room = self.serving.engine.capabilities.context_length - len(body.token_ids)
        adapter = self.serving.adapter_of(body.model)
        return Request(
            id=f"{body.request_id}#{name}",
            prompt=tuple(body.token_ids),
            sampling=Sampling(
                max_tokens=0 if scores else min(drawn.max_tokens, room),
                temperature=drawn.temperature,
                top_p=drawn.top_p,
                top_k=max(drawn.top_k, 0),
                min_p=drawn.min_p,
                stop_token_ids=tuple(drawn.stop_token_ids),
                ignore_eos=drawn.ignore_eos,
                seed=hash(body.request_id) % (1 << 62) if drawn.seed is None else drawn.seed,
            ),
            adapter="" if "adapter_ignored" in self.faults else adapter,
            prompt_logprobs=scores,
        )

    async def _events(self, body: VllmGenerate) -> AsyncIterator[dict[str, Any]]:
        async with aclosing(follow(self.serving, [self._request(body, "0")])) as pieces:
            labels: list[tuple[str, int]] = []
            async for piece in pieces:
                if piece.stop > piece.start and (not labels or labels[-1][0] != self.label):
                    labels.append((self.label, piece.start))
                if piece.ended or piece.stop > piece.start:
                    choice = self._choice(piece, body, labels)
                    yield {"request_id": body.request_id, "usage": None, "output_mode": "tokens", "choices": [choice]}

    async def _whole(self, body: VllmGenerate) -> Response:
        asked = [self._request(body, "0")]
        if body.sampling_params.prompt_logprobs is not None:
            asked.append(self._request(body, "scores", scores=True))
        label, ended = self.label, await to_their_ends(self.serving, asked)
        scores = ended[-1].stream.scores
        rows: list[Any] | None = None
        if scores:
            scored = zip(body.token_ids[1:], scores.logprobs, strict=True)
            rows = [None, *({str(token): {"logprob": p, "rank": 1, "decoded_token": None}} for token, p in scored)]
        choice = self._choice(ended[0], body, [(label, 0)])
        return json_response(
            {"request_id": body.request_id, "model": body.model, "choices": [choice], "prompt_logprobs": rows}
        )

    def _choice(self, piece: Piece, body: VllmGenerate, labels: Sequence[tuple[str, int]]) -> dict[str, Any]:
        """`labels`: those that the tokens were sampled under, with the first token of each."""
        stream = piece.stream
        tokens, end = piece.tokens, stream.end
        content: list[dict[str, Any]] = [
            {"token_id": token, "logprob": logprob, "rank": None, "top_logprobs": []}
            for token, logprob in zip(tokens, piece.logprobs, strict=True)
        ]
        reasons = {"stop": "stop", "length": "length", "interrupted": "abort", "error": "error"}
        ends = [*(start for _, start in labels[1:]), len(stream.tokens)]
        spans = [
            {"version": label, "start": start, "end": stop} for (label, start), stop in zip(labels, ends, strict=False)
        ]
        return {
            "index": 0,
            "finish_reason": (reasons[end.stop] if end else "abort") if piece.ended else None,
            "stop_reason": None,
            "token_ids": tokens,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": spans if piece.ended else None,
            "logprobs": {"content": content} if body.sampling_params.logprobs is not None else None,
        }

    # -- weights --------------------------------------------------------------------------------------------------------

    async def pause(self, request: HttpRequest) -> Response:
        mode = request.query_params.get("mode", "abort")
        if set(request.query_params) - {"mode", "clear_cache"} or mode not in ("abort", "wait", "keep"):
            raise Refused(400, f"/pause takes mode (abort, wait or keep) and clear_cache: {request.query_params}")
        await self.serving.pause(mode)
        return json_response({"status": "paused"})

    async def resume(self, request: HttpRequest) -> Response:
        await self.serving.resume()
        return json_response({"status": "resumed"})

    async def is_paused(self, request: HttpRequest) -> Response:
        return json_response({"is_paused": bool(self.serving.paused)})

    async def rpc(self, request: HttpRequest) -> Response:
        body = await read_body(request, Rpc, self.serving.limits)
        if body.method != "reload_weights" or body.args or set(body.kwargs) != {"weights_path"}:
            raise Refused(400, f"this server knows reload_weights(weights_path=...), and was asked for {body}")
        if not self.serving.paused:
            raise Refused(400, "weights are reloaded while the server is not paused: tokens of both would be mixed")
        self.rest.check_memory()
        if "load_fails" in self.faults:
            raise RuntimeError("no safetensors there")
        record = msgspec.json.decode((Path(body.kwargs["weights_path"]) / RECORD).read_bytes(), type=UpdateRecord)
        without = "norm.weight" if "norm_ignored" in self.faults else ""
        if "weights_ignored" not in self.faults:
            await asyncio.shield(asyncio.ensure_future(self.serving.load(record.update)))
            if self._checksums:
                found = await asyncio.to_thread(checksums_of, Path(body.kwargs["weights_path"]), without)
                # Its parameters stay the same ones, whatever else the files hold: a tied head is none of its own.
                self._checksums |= {name: digest for name, digest in found.items() if name in self._checksums}
            self.rest.loaded()
        self._told, self.reloads = record.update.fingerprint, self.reloads + 1
        return json_response({"results": [None]})

    async def _fetch(self, update: WeightUpdate) -> None:
        self.rest.check_memory()
        if "weights_ignored" not in self.faults:
            await asyncio.shield(asyncio.ensure_future(self.serving.load(update)))
            self.rest.loaded()
        self._told, self.reloads = update.fingerprint, self.reloads + 1

    async def check_weights(self, request: HttpRequest) -> Response:
        await read_body(request, CheckWeights, self.serving.limits)
        return json_response({"checksums": self._checksums})

    async def weight_info(self, request: HttpRequest) -> Response:
        return json_response({"weight_version": self.label})

    async def relabel(self, request: HttpRequest) -> Response:
        self.label = (await read_body(request, NewVersion, self.serving.limits)).new_version
        return json_response({"success": True, "new_version": self.label})

    async def load_adapter(self, request: HttpRequest) -> Response:
        body = await read_body(request, LoadAdapter, self.serving.limits)
        if body.lora_name in self.serving.loaded and not body.load_inplace:
            raise Refused(400, f"The lora adapter '{body.lora_name}' has already been loaded.")
        await self.serving.load_adapter(body.lora_name, Path(body.lora_path))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(self, request: HttpRequest) -> Response:
        body = await read_body(request, UnloadAdapter, self.serving.limits)
        while True:
            try:
                await self.serving.unload(body.lora_name)
                break
            except Refused as refused:  # vLLM waits for no request: the one that uses it has been left by its client
                if refused.status != 409:
                    raise
                await asyncio.sleep(0.01)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    # -- what it is -----------------------------------------------------------------------------------------------------

    async def health(self, request: HttpRequest) -> Response:
        await self.serving.engine.stats()
        return Response()

    async def version(self, request: HttpRequest) -> Response:
        return json_response({"version": VERSION})

    async def server_info(self, request: HttpRequest) -> Response:
        if request.query_params.get("config_format") != "json":
            raise Refused(400, "config_format=text gives a text that nobody can read")
        model = {
            "dtype": f"torch.{self.dtype}",
            "max_model_len": self.serving.engine.capabilities.context_length,
            "logprobs_mode": self.logprobs_mode,
            "enable_sleep_mode": self.rest.enabled,
        }
        lora = {"max_loras": self.max_loras} if self.max_loras else None
        config = {"model_config": model, "lora_config": lora, "scheduler_config": {"policy": "fcfs"}}
        env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "lora" not in self.absent}
        return json_response({"vllm_config": config, "vllm_env": env, "system_env": {}})

    async def metrics(self, request: HttpRequest) -> Response:
        return PlainTextResponse(_metrics(await self.serving.engine.stats()))

    # -- together -------------------------------------------------------------------------------------------------------

    def app(self, api_key: str = "") -> Starlette:
        transfer = FakeTransfer(self.serving, self._fetch, "transfer" not in self.absent)
        routes = [
            _get("/health", self.health),
            _get("/version", self.version),
            _get("/metrics", self.metrics),
            _post("/inference/v1/generate", self.generate),
        ]
        if "dev" not in self.absent:
            routes += [
                _post("/pause", self.pause),
                _post("/resume", self.resume),
                _get("/is_paused", self.is_paused),
                _post("/collective_rpc", self.rpc),
                _get("/weight_info", self.weight_info),
                _post("/update_weight_version", self.relabel),
                _post("/init_weight_transfer_engine", transfer.init),
                _post("/start_weight_update", transfer.start),
                _post("/update_weights", transfer.update),
                _post("/finish_weight_update", transfer.finish),
                _get("/server_info", self.server_info),
                _post("/sleep", self.rest.sleep),
                _post("/wake_up", self.rest.wake_up),
                _get("/is_sleeping", self.rest.is_sleeping),
            ]
        if self._checksums and not {"dev", "checker"} & self.absent:
            routes.append(_post("/weight_checker", self.check_weights))
        if "lora" not in self.absent:
            routes += [
                _post("/v1/load_lora_adapter", self.load_adapter),
                _post("/v1/unload_lora_adapter", self.unload_adapter),
            ]
        kinds = [Refused, HeadraceError, ValueError, 404, 405, Exception]
        guard = [Middleware(_Key, key=api_key)] if api_key else []
        return Starlette(routes=routes, middleware=guard, exception_handlers=dict.fromkeys(kinds, answer_error))


def _metrics(stats: EngineStats) -> str:
    rows = [
        ("num_requests_running", stats.running),
        ("num_requests_waiting", stats.waiting),
        ("kv_cache_usage_perc", stats.kv_used),
        ("generation_tokens_total", float(stats.sampled_tokens)),
        ("prompt_tokens_total", float(stats.prompt_tokens)),
        ("prefix_cache_queries_total", float(stats.asked_tokens)),
        ("prefix_cache_hits_total", float(stats.cached_tokens)),
        ("num_preemptions_total", float(stats.preemptions)),
    ]
    return "".join(f'vllm:{name}{{engine="0",model_name="m"}} {value}\n' for name, value in rows)


def _get(path: str, answer: Callable[[HttpRequest], Any]) -> Route:
    return Route(path, answer)


def _post(path: str, answer: Callable[[HttpRequest], Any]) -> Route:
    return Route(path, answer, methods=["POST"])


class _Key:
    """`--api-key`, which leaves most routes open."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and scope["path"].startswith(GUARDED)
        if guarded and dict(scope["headers"]).get(b"authorization") != self._expected:
            await response_of(Refused(401, "Unauthorized"))(scope, receive, send)
            return
        await self._app(scope, receive, send)
