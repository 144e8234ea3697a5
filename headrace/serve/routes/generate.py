"""`/inference/v1/generate`: tokens in, tokens out, as vLLM 0.32 speaks it (vllm/entrypoints/scale_out/token_in_token_out).

headrace adds to a choice: `spans` (per token: version, version of the oldest KV, whether an update was being streamed in, the
fingerprint of the weights) and, with `prompt_logprobs`, `prompt_version`. vLLM sends `weight_versions` only in the last chunk
of a stream; here every chunk has those of its own tokens.
"""

from __future__ import annotations

import base64
import io
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.core.steps import PromptScores, TokenDetails
from headrace.core.types import Request, RoutingTrace, Stop
from headrace.engine.remote.dialects.headrace import LOWEST
from headrace.models.chat import off_loop
from headrace.serve.sampling import of_generate, work_of
from headrace.serve.serving import Piece, Serving, follow, to_their_ends
from headrace.web.bodies import Generate
from headrace.web.errors import without_paths
from headrace.web.sending import GONE, Events, body_bytes, json_response, read_body, while_there

REASONS: dict[Stop, str] = {"stop": "stop", "length": "length", "interrupted": "abort", "error": "error"}


async def generate(request: HttpRequest) -> Response:
    serving: Serving = request.app.state.serving
    body = await read_body(request, Generate, serving.limits)
    name = body.request_id or uuid.uuid4().hex
    requests = await off_loop(work_of(body, body_bytes(request)), partial(of_generate, serving, body, name))
    serving.room_for(len(requests))
    usage = body.stream_options is not None and body.stream_options.include_usage
    if body.stream:
        return Events(_events(serving, requests, name, usage))
    return await while_there(request, _whole(serving, requests, name)) or GONE


async def _events(
    serving: Serving, requests: Sequence[Request], name: str, usage: bool
) -> AsyncIterator[dict[str, Any]]:
    prompt, sampled = len(requests[0].prompt), 0
    sent_prompt = False
    async with aclosing(follow(serving, requests)) as pieces:
        async for piece in pieces:
            sampled += piece.stop - piece.start
            event = {"request_id": name, "choices": [choice(serving, piece)]}
            if piece.stream.scores and not sent_prompt:
                event |= prompt_logprobs(serving, piece.stream.request.prompt, piece.stream.scores)
                sent_prompt = True
            yield event
    if usage:
        yield {"request_id": name, "choices": [], "usage": usage_of(prompt, sampled)}


async def _whole(serving: Serving, requests: Sequence[Request], name: str) -> Response:
    ended = await to_their_ends(serving, requests)
    return await off_loop(size_of_answer(ended), partial(_answer, serving, requests, name, ended))


def size_of_answer(ended: Sequence[Piece]) -> int:
    """Returns about as many characters as take as long to encode as the log-probs of these completions to write."""
    positions = (
        (len(piece.stream.request.prompt) if piece.stream.scores else 0) + len(piece.stream.tokens) for piece in ended
    )
    return 16 * sum((1 + piece.stream.request.top_logprobs) * n for piece, n in zip(ended, positions, strict=True))


def _answer(serving: Serving, requests: Sequence[Request], name: str, ended: Sequence[Piece]) -> Response:
    answer: dict[str, Any] = {"request_id": name, "choices": [choice(serving, piece) for piece in ended]}
    if scores := ended[0].stream.scores:
        answer |= prompt_logprobs(serving, requests[0].prompt, scores)
    sampled = sum(piece.stop for piece in ended)
    return json_response({**answer, "usage": usage_of(len(requests[0].prompt), sampled)})


def usage_of(prompt: int, sampled: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def choice(serving: Serving, piece: Piece) -> dict[str, Any]:
    stream, tokens, logprobs = piece.stream, piece.tokens, piece.logprobs
    details = stream.details[piece.start : piece.stop]
    spans = serving.spans(stream, piece.start, piece.stop)
    content = [
        {
            "token": f"token_id:{token}",  # where verifiers' client looks for it
            "token_id": token,
            "logprob": logprob,
            "top_logprobs": tops(details[place]) if stream.request.top_logprobs else [],
        }
        for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True))
    ]
    body: dict[str, Any] = {
        "index": piece.index,
        "token_ids": tokens,
        "logprobs": {"content": content},
        "finish_reason": None,
        "weight_versions": _versions(spans, len(tokens)),
        "spans": spans,
    }
    if stream.request.return_mask:
        body["sampling_mask"] = [np.frombuffer(detail.mask, np.int32).tolist() for detail in details]
        if any(detail.set_name for detail in details):
            body["sampling_sets"] = [
                [detail.set_name.hex(), base64.b64encode(detail.set).decode()] for detail in details
            ]
    if piece.ended:
        body["finish_reason"] = REASONS[stream.end.stop] if stream.end else "abort"
        if stream.end and stream.end.error:
            body["error"] = without_paths(stream.end.error)
        if stream.end and stream.end.routing:
            body["routed_experts"] = experts(stream.end.routing)
    return body


def _versions(spans: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    ends = [*(span["start"] for span in spans[1:]), *([count] if spans else [])]
    return [
        {"version": span["version"], "start": span["start"], "end": end} for span, end in zip(spans, ends, strict=True)
    ]


def tops(details: TokenDetails) -> list[dict[str, Any]]:
    """Returns fewer than were asked for where filters or a constraint have left fewer to draw from: the engine fills up with -1."""
    ids, values = np.frombuffer(details.top_tokens, np.int32), np.frombuffer(details.top_logprobs, np.float32)
    return [
        {"token_id": token, "logprob": finite(value), "rank": place + 1}
        for place, (token, value) in enumerate(zip(ids.tolist(), values.tolist(), strict=True))
        if token >= 0
    ]


def finite(value: float) -> float:
    """JSON has no infinity."""
    return max(value, LOWEST)


def prompt_logprobs(serving: Serving, prompt: Sequence[int], scores: PromptScores) -> dict[str, Any]:
    """The prompt's log-probs in vLLM's format: for each token but the first, a mapping from token to log-prob, the prompt's own
    token first."""
    rows: list[dict[str, Any] | None] = [None]
    k = scores.top.k if scores.top else 0
    ids = np.frombuffer(scores.top.tokens, np.int32).reshape(-1, k) if scores.top else None
    values = np.frombuffer(scores.top.logprobs, np.float32).reshape(-1, k) if scores.top else None
    for place, (token, logprob) in enumerate(zip(prompt[1:], scores.logprobs, strict=True)):
        row = {str(token): {"logprob": finite(logprob)}}
        if ids is not None and values is not None:
            for rank, (other, value) in enumerate(zip(ids[place].tolist(), values[place].tolist(), strict=True), 1):
                row[str(other)] = {"logprob": finite(value), "rank": rank}
        rows.append(row)
    label = serving.label(scores.version)
    version = {"version": label.version, "fingerprint": label.fingerprint, "mixed": scores.mixed}
    return {"prompt_logprobs": rows, "prompt_version": version}


def experts(trace: RoutingTrace) -> str:
    """[T', layers, k] as the base64 of a .npy file."""
    numbers = np.frombuffer(trace.experts, np.uint8 if trace.width == 1 else np.uint16)
    file = io.BytesIO()
    np.save(file, numbers.reshape(-1, trace.layers, trace.k))
    return base64.b64encode(file.getvalue()).decode()
