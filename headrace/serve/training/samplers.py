"""Samplers of clients: samples from the base model or from saved weights, and log-probs of prompts."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.core.errors import IdentityError
from headrace.core.types import Request, Sampling
from headrace.core.weights import WeightUpdate
from headrace.serve.sampling import check_logprobs
from headrace.serve.serving import Label, Piece, Serving, Stream, to_their_ends
from headrace.serve.training.futures import FutureAnswer, Promise
from headrace.serve.training.tinker_messages import MESSAGES, STOPPED, TOO_LONG, Params, SampleBody
from headrace.web.errors import Refused

# --- Adapters of clients in the engine, which holds a few at once
# Each is loaded when it is sampled from, and gives way to others when nobody samples from it.


GONE = "the weights of this sampler are not there any more: they have expired, or others were saved under their name; make another sampler"
FULL = "all places for adapters in the engine are in use; it was started with too few (--adapters), or has to finish other samples first"


@dataclass(eq=False)
class SavedAdapter:
    """The weights that a sampler samples from. `update` changes where later weights take its place (`kind = "inflight"`)."""

    update: WeightUpdate

    @property
    def name(self) -> str:
        """The adapter's in the engine."""
        assert self.update.adapter is not None
        return self.update.adapter.name

    @property
    def label(self) -> Label:
        return Label(self.update.version, self.update.fingerprint)


class Shelf:
    def __init__(self, serving: Serving, places: int) -> None:
        """`places`: adapters that the engine can hold."""
        self._serving, self._places = serving, places
        self._users: Counter[str] = Counter()
        """Samples under way, by adapter: several samplers may have the same weights."""
        self._used: dict[str, int] = {}
        """The number of the last use of each adapter."""
        self._turn = asyncio.Lock()
        """Held by whoever comes next, also while it waits for a place: who came later waits behind it, and nobody starves."""
        self._freed = asyncio.Event()
        self._uses = itertools.count(1)

    @asynccontextmanager
    async def borrowed(self, weights: SavedAdapter, promise: Promise) -> AsyncIterator[None]:
        """Within it, the engine serves these weights. Raises Refused where they are not what was saved."""
        async with self._turn:
            await self._ready(weights, promise)
            self._users[weights.name] += 1
            self._used[weights.name] = next(self._uses)
        try:
            yield
        finally:
            self._users -= Counter([weights.name])  # keeps no zeros
            self._freed.set()

    async def forget(self, weights: SavedAdapter) -> None:
        """Takes it out of the engine, when the last request that uses it has ended."""
        async with self._turn:
            while weights.name in self._users:
                await self._until_freed()
            if self._used.pop(weights.name, None) and weights.name in self._serving.loaded:
                await self._serving.unload(weights.name)

    async def _ready(self, weights: SavedAdapter, promise: Promise) -> None:
        loaded = self._serving.loaded
        while weights.name not in loaded and len([name for name in loaded if name]) >= self._places:
            idle = [name for name in self._used if name in loaded and name not in self._users]
            if idle:
                await self._serving.unload(min(idle, key=self._used.__getitem__))
                continue
            promise.waiting_for = FULL
            await self._until_freed()
        promise.waiting_for = ""
        if weights.name not in loaded or loaded[weights.name].label != weights.label:
            try:
                await self._serving.load(weights.update)
            except IdentityError as error:
                raise Refused(410, f"{GONE} ({error})", "gone") from None

    async def _until_freed(self) -> None:
        self._freed.clear()
        await self._freed.wait()


# --- samplers ------------------------------------------------------------


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
        stop=tuple(stop for stop in stops if isinstance(stop, str)),
        stop_token_ids=tuple(stop for stop in stops if not isinstance(stop, str)),
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
            b"".join(getattr(detail, field) for detail in stream.details) for field in ("top_tokens", "top_logprobs")
        )
        _put_top(sequence.topk_sampled_logprobs, *_top(ids, values, k, top))


def _top(tokens: bytes, logprobs: bytes, there: int, wanted: int) -> tuple[np.ndarray, np.ndarray]:
    """[T, k] the first `wanted` of each row."""
    ids = np.frombuffer(tokens, np.int32).reshape(-1, there)
    values = np.frombuffer(logprobs, np.float32).reshape(-1, there)
    ids, values = ids[:, :wanted], values[:, :wanted]
    return np.where(ids < 0, 0, ids), np.where(ids < 0, np.float32(NOTHING), values)  # filters have left fewer


def _put_top(message: Any, ids: np.ndarray, values: np.ndarray) -> None:
    message.token_ids, message.logprobs = np.ascontiguousarray(ids).tobytes(), np.ascontiguousarray(values).tobytes()
    message.length, message.k = ids.shape
