"""The dialect of `headrace serve`: the server reports everything, including the fingerprint of every token's weights."""

from __future__ import annotations

import base64
import io
import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.core.errors import ConfigError
from headrace.core.reports import Capabilities, EngineStats, LoadReport
from headrace.core.steps import Finished, PromptScores, TokenDetails
from headrace.core.types import Request, RoutingTrace, Stop, TopLogprobs
from headrace.core.weights import WeightUpdate
from headrace.engine.remote.connection import Connection, Unreachable
from headrace.engine.remote.dialect import Heard, ServerState, TokenSpan
from headrace.engine.remote.server_kind import HOST, Place, ServerKind, Startable
from headrace.settings.extras import Found, install

if TYPE_CHECKING:
    from headrace.engine.config import EngineConfig

LOWEST = -3.4e38
"""Stands for the log-prob of a token that cannot be sampled: JSON has no infinity."""

_ENDS: dict[str, Stop] = {"stop": "stop", "length": "length", "error": "error"}
_CANNOT = ("forks", "streamed")
"""Fields of `Capabilities` for features that the engine has and that are not requested from its server."""


class HeadraceDialect:
    """Protocol `Dialect`."""

    keeps_requests = True
    counts_busy = True

    def __init__(self, access: Mapping[str, str] | None = None) -> None:
        """`access`: the fields by which the server fetches weights from the trainer (token, certificate). They are in no update, because
        those are recorded."""
        self._access = access or {}

    async def look(self, connection: Connection, seconds: float) -> ServerState:
        answer = await connection.get("/headrace/state", seconds)
        try:
            labels = {"": answer["weights"], **answer["adapters"]}
            can = msgspec.convert(answer["capabilities"], Capabilities)
            return ServerState(
                boot=answer["boot"],
                dtype=answer["dtype"],
                capabilities=msgspec.structs.replace(can, **dict.fromkeys(_CANNOT, False)),
                fingerprints={name: label["fingerprint"] for name, label in labels.items() if label},
                stats=msgspec.convert(answer["stats"], EngineStats),
            )
        except (KeyError, TypeError, AttributeError, msgspec.ValidationError) as error:
            raise ConfigError(
                f"{connection.url} is not a `headrace serve` of this version ({error!r}); set engine.kind to what it is, or start it anew"
            ) from None

    def ask(self, request: Request, wire_id: str) -> tuple[str, dict[str, Any]]:
        sampling = request.sampling
        drawn: dict[str, Any] = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
            "seed": sampling.seed,
            "logprobs": request.top_logprobs,
        }
        if request.prompt_logprobs:
            drawn["prompt_logprobs"] = request.top_logprobs
        body: dict[str, Any] = {
            "request_id": wire_id,
            "token_ids": list(request.prompt),
            "prefix_token_ids": list(request.prefix),
            "sampling_params": drawn,
            "priority": request.priority,
            "return_sampling_mask": request.return_mask,
            "return_routed_experts": request.return_routing,
            "stream": True,
        }
        if sampling.constraint:
            body["constraint"] = msgspec.to_builtins(sampling.constraint)
        if sampling.logit_bias:
            drawn["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
        return "/inference/v1/generate", body | ({"model": request.adapter} if request.adapter else {})

    def ended(self, request: Request) -> Stop | None:
        return None  # the server knows its prefix, and finds out

    def hear(self, event: Any, request: Request) -> Heard:
        try:
            return _heard(event, request)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise Unreachable(f"the server sent what makes no sense: {error!r}") from None

    async def load(self, connection: Connection, update: WeightUpdate, seconds: float) -> LoadReport:
        body = msgspec.to_builtins(update)
        body["where"] |= self._access
        answer = await connection.post("/headrace/weights", body, seconds)
        return msgspec.convert(answer, LoadReport)

    async def unload(self, connection: Connection, adapter: str, seconds: float) -> None:
        await connection.tell("/v1/unload_lora_adapter", {"lora_name": adapter}, seconds)


def _heard(event: Any, request: Request) -> Heard:
    if "error" in event:
        raise Unreachable(str(event["error"]["message"]))
    if not event["choices"]:
        return Heard()
    (choice,) = event["choices"]
    content = choice["logprobs"]["content"]
    tokens, reason = choice["token_ids"], choice["finish_reason"]
    if len(content) != len(tokens):
        raise Unreachable(f"the server sent {len(tokens)} tokens and {len(content)} log-probs")
    scores, scored_by = _scores(event, request)
    return Heard(
        runs=_spans(choice["spans"], tokens, [_number(entry["logprob"]) for entry in content]),
        details=_details(choice, content, request),
        scores=scores,
        scored_by=scored_by,
        end=_end(choice, request) if reason in _ENDS else None,
        cut_off=reason is not None and reason not in _ENDS,
    )


def _spans(spans: Sequence[Any], tokens: Sequence[int], logprobs: Sequence[float]) -> list[TokenSpan]:
    ends = [*(span["start"] for span in spans[1:]), len(tokens)]
    if tokens and (not spans or spans[0]["start"] != 0):
        raise Unreachable("the server sent tokens without their versions")
    return [
        TokenSpan(
            tokens=tokens[span["start"] : end],
            logprobs=logprobs[span["start"] : end],
            version=span["version"],
            kv_version=span["kv_version"],
            fingerprint=span["fingerprint"],
            mixed=span["mixed"],
        )
        for span, end in zip(spans, ends, strict=False)
    ]


def _details(choice: Any, content: Sequence[Any], request: Request) -> list[TokenDetails]:
    if not request.top_logprobs and not request.return_mask:
        return []
    masks = choice["sampling_mask"] if request.return_mask else [()] * len(content)
    if len(masks) != len(content):
        raise Unreachable(f"the server sent {len(content)} tokens and {len(masks)} sampling masks")
    sets = choice.get("sampling_sets") or [("", "")] * len(content)

    def filled(found: list[Any], filler: float) -> list[Any]:
        """Fills a list up to the number that was asked for, as an engine here has it: filters may leave fewer to draw from."""
        return [*found, *[filler] * (request.top_logprobs - len(found))]

    return [
        TokenDetails(
            request.id,
            array("i", filled([top["token_id"] for top in entry["top_logprobs"]], -1)).tobytes(),
            array("f", filled([_number(top["logprob"]) for top in entry["top_logprobs"]], -math.inf)).tobytes(),
            array("i", mask).tobytes(),
            set_name=bytes.fromhex(set_name),
            set=base64.b64decode(one_set),
        )
        for entry, mask, (set_name, one_set) in zip(content, masks, sets, strict=True)
    ]


def _scores(event: Any, request: Request) -> tuple[PromptScores | None, str]:
    if "prompt_logprobs" not in event:
        return None, ""
    rows, by, k = event["prompt_logprobs"][1:], event["prompt_version"], request.top_logprobs
    if len(rows) != len(request.prompt) - 1:
        raise Unreachable(f"the server scored {len(rows)} tokens of a prompt of {len(request.prompt)}")
    logprobs = tuple(_number(row[str(token)]["logprob"]) for row, token in zip(rows, request.prompt[1:], strict=True))
    tops = [
        sorted((entry["rank"], int(token), entry["logprob"]) for token, entry in row.items() if "rank" in entry)
        for row in rows
    ]
    ids = array("i", [token for row in tops for _, token, _ in row[:k]])
    values = array("f", [_number(value) for row in tops for _, _, value in row[:k]])
    top = TopLogprobs(k, ids.tobytes(), values.tobytes()) if k else None
    return PromptScores(request.id, by["version"], logprobs, top, by["mixed"]), by["fingerprint"]


def _end(choice: Any, request: Request) -> Finished:
    trace = None
    if request.return_routing and "routed_experts" in choice:
        import numpy as np

        experts = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
        _, layers, k = experts.shape
        trace = RoutingTrace(layers=layers, k=k, width=experts.dtype.itemsize, experts=experts.tobytes())
    return Finished(request.id, _ENDS[choice["finish_reason"]], choice.get("error", ""), trace)


def _number(value: float | None) -> float:
    """JSON has neither NaN, for which null stands, nor infinity."""
    if value is None:
        return math.nan
    return -math.inf if value <= LOWEST else value


def _command(config: EngineConfig, found: Found, place: Place) -> tuple[list[str], dict[str, str]]:
    from headrace.engine.config import OF_FLEETS, OF_SERVERS

    words = [found.python, "-m", "headrace", "serve", str(place.model), "--host", HOST, "--port", str(place.port)]
    words += ["--token-file", str(place.token_file), "--adapters", str(max(config.max_adapters, place.adapters))]
    usual = type(config)()
    own = [
        field.name for field in fields(config) if field.name not in ("kind", "max_adapters", *OF_SERVERS, *OF_FLEETS)
    ]
    values = {name: getattr(config, name) for name in own} | {"dtype": config.serving_dtype}
    for name, value in values.items():
        if value != getattr(usual, name):
            words += ["--set", f"engine.{name}={json.dumps(value)}"]
    return words, {}


SERVER = ServerKind(
    words="headrace",
    about="the same engine behind HTTP (`headrace serve`), which the run starts, unless `urls` names one",
    dialect=lambda server: HeadraceDialect(server.access),
    starts=Startable(
        modules=[["headrace", "headrace"], ["uvicorn", "uvicorn"], ["starlette", "starlette"]],
        install=install("serve"),
        command=_command,
        needs_headrace="always",
    ),
    fetches=True,
    swaps=True,
)
