"""Samplers of clients: samples from the base model or from saved weights, and log-probs of prompts."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.core.types import Request, Sampling
from headrace.serve.following import Piece, to_their_ends
from headrace.serve.sampling import check_logprobs
from headrace.serve.serving import Serving, Stream
from headrace.serve.training.futures import FutureAnswer, Promise
from headrace.serve.training.messages.json_bodies import Params, SampleBody
from headrace.serve.training.messages.protobuf import MESSAGES, STOPPED, TOO_LONG
from headrace.serve.training.shelf import SavedAdapter, Shelf
from headrace.web.errors import Refused

UNSERVED = {
    "target_prompt_logprobs": (None,),
    "prompt_alt_tokens_k": (0,),
    "record_stability_info": (None, False),
}
"""Fields that are not served, and the values with which they ask for nothing."""

NOTHING = -99999.0
"""The API's sign of a position without log-probs, together with the token 0."""


@dataclass(kw_only=True)
class Sampler:
    id: str
    session: str
    path: str | None = None
    """The path of its weights; None for the base model, and for weights that change (`inflight`)."""
    weights: SavedAdapter | None = None
    """None: the base model's own."""
    clones: int = 0
    samples: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0

    @property
    def mark(self) -> str:
        """Names the weights in the ids of sequences."""
        if self.weights is None:
            return "base"
        return f"v{self.weights.update.version}" if self.path else "inflight"

    def report(self) -> dict[str, Any]:
        return {
            "weights": self.path or self.mark,
            "version": self.weights.update.version if self.weights else None,
            "fingerprint": self.weights.update.fingerprint if self.weights else None,
            "samples": self.samples,
            "prompt_tokens": self.prompt_tokens,
            "sampled_tokens": self.sampled_tokens,
        }


def number_used(sampler: Sampler) -> str:
    return (
        f"the sampler {sampler.id} is there already, and samples from {sampler.path or sampler.mark}; give another sampling_session_seq_id to "
        "one for other weights"
    )


def requests_of(serving: Serving, sampler: Sampler, body: SampleBody, name: str) -> list[Request]:
    """Raises Refused for what is not served, or cannot be."""
    for field, values in UNSERVED.items():
        if getattr(body, field) not in values:
            raise Refused(400, f"{field} is not served; leave it out", "unsupported_parameter")
    size, longest = sum(len(chunk.tokens) for chunk in body.prompt.chunks), serving.engine.capabilities.context_length
    prompt = tokens_of(body) if size < longest else ()
    room = longest - size
    most = room if body.sampling_params.max_tokens is None else body.sampling_params.max_tokens
    if most > room or room < 1:
        raise Refused(
            400,
            f"a prompt of {size} tokens leaves room for {max(room, 0)}, and max_tokens = {most}; prompt and sample together may have "
            f"{serving.engine.capabilities.context_length} tokens",
            "context_length_exceeded",
        )
    if body.prompt_logprobs_last_n is not None and not (
        body.prompt_logprobs and body.prompt_logprobs_last_n < len(prompt)
    ):
        raise Refused(400, "prompt_logprobs_last_n needs prompt_logprobs, and must be below the length of the prompt")
    scores = bool(body.prompt_logprobs or body.topk_prompt_logprobs)
    top = max(body.topk_prompt_logprobs, body.topk_sample_logprobs)
    check_logprobs(serving, top, most * body.num_samples + len(prompt) * scores)
    return [
        Request(
            id=f"{name}#{index}",
            prompt=prompt,
            sampling=_sampling(body.sampling_params, most, index),
            adapter=sampler.weights.name if sampler.weights else "",
            prompt_logprobs=scores and index == 0,
            top_logprobs=top,
        )
        for index in range(body.num_samples)
    ]


def tokens_of(body: SampleBody) -> tuple[int, ...]:
    for chunk in body.prompt.chunks:
        if chunk.type != "encoded_text":
            raise Refused(400, f"the prompt has a chunk of {chunk.type}; only tokens are served")
    prompt = tuple(token for chunk in body.prompt.chunks for token in chunk.tokens)
    if not prompt:
        raise Refused(400, "the prompt has no tokens; begin with a start token at least")
    return prompt


def _sampling(params: Params, most: int, index: int) -> Sampling:
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
    seed = secrets.randbits(62) if params.seed is None else (params.seed + index) % (1 << 64)
    return Sampling(
        max_tokens=most,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        stop=tuple(one for one in stops if isinstance(one, str)),
        stop_token_ids=tuple(one for one in stops if not isinstance(one, str)),
        ignore_eos=params.stop == [],
        seed=seed,
    )


async def sample(
    serving: Serving, shelf: Shelf, *, sampler: Sampler, requests: Sequence[Request], body: SampleBody, promise: Promise
) -> FutureAnswer:
    """Samples all, and counts what they were."""
    if sampler.weights is None:
        pieces = await to_their_ends(serving, requests)
    else:
        async with shelf.borrowed(sampler.weights, promise):
            pieces = await to_their_ends(serving, requests)
    sampler.samples += len(pieces)
    sampler.prompt_tokens += len(requests[0].prompt)
    sampler.sampled_tokens += sum(piece.stop for piece in pieces)
    return FutureAnswer.protobuf(response_of(pieces, body))


def response_of(pieces: Sequence[Piece], body: SampleBody) -> bytes:
    """Raises ValueError where a sample was ended by somebody else."""
    answer = MESSAGES["SampleResponse"]()
    for piece in pieces:
        _add_sequence(answer, piece.stream, body.topk_sample_logprobs)
    scores = pieces[0].stream.scores
    if scores is not None:
        length = len(pieces[0].stream.request.prompt)
        first = length - body.prompt_logprobs_last_n if body.prompt_logprobs_last_n else 1
        if body.prompt_logprobs:
            logprobs = np.full(length, np.nan, np.float32)
            logprobs[first:] = scores.logprobs[first - 1 :]
            answer.prompt_logprobs = logprobs.tobytes()
        if scores.top and body.topk_prompt_logprobs:
            ids, values = _top(scores.top.tokens, scores.top.logprobs, scores.top.k, body.topk_prompt_logprobs)
            none = np.zeros((first, ids.shape[1]), np.int32), np.full((first, ids.shape[1]), NOTHING, np.float32)
            rows = np.concatenate([none[0], ids[first - 1 :]]), np.concatenate([none[1], values[first - 1 :]])
            _put_top(answer.topk_prompt_logprobs, *rows)
    return bytes(answer.SerializeToString())


def _add_sequence(answer: Any, stream: Stream, top: int) -> None:
    end = stream.end
    if end is None or end.stop not in ("stop", "length"):
        why = end.error if end and end.error else "it was aborted"
        raise ValueError(f"a sample did not come to its end: {why}")
    sequence = answer.sequences.add()
    sequence.stop_reason = STOPPED if end.stop == "stop" else TOO_LONG
    sequence.tokens = np.array(stream.tokens, np.int32).tobytes()
    sequence.logprobs = np.array(stream.logprobs, np.float32).tobytes()
    if top and stream.details:
        k = len(stream.details[0].top_tokens) // 4
        ids, values = (
            b"".join(getattr(one, field) for one in stream.details) for field in ("top_tokens", "top_logprobs")
        )
        _put_top(sequence.topk_sampled_logprobs, *_top(ids, values, k, top))


def _top(tokens: bytes, logprobs: bytes, there: int, wanted: int) -> tuple[np.ndarray, np.ndarray]:
    """[T, k] the first `wanted` of each row."""
    ids = np.frombuffer(tokens, np.int32).reshape(-1, there)
    values = np.frombuffer(logprobs, np.float32).reshape(-1, there)
    return ids[:, :wanted], values[:, :wanted]


def _put_top(message: Any, ids: np.ndarray, values: np.ndarray) -> None:
    message.token_ids, message.logprobs = np.ascontiguousarray(ids).tobytes(), np.ascontiguousarray(values).tobytes()
    message.length, message.k = ids.shape
