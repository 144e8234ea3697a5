"""Trees of rows through layers that keep a state: shared tokens are forwarded once, and every branch goes on from what they leave.

For models whose layers do not take packed trees: recurrent ones (convolutions, state spaces, delta rules), and attention with sinks, biases or caps of its own.
A segment is forwarded with transformers' own cache, which holds the keys, values and states of its ancestors. A state is a function of what it was
made from, so that its gradient flows from all branches back into the shared tokens:

    prompt [5] -> state -+-> branch [3] -> state -> branch [2]
                         +-> branch [1]
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from headrace.trainer.forward.image_places import image_places
from headrace.trainer.packing import ROOT, Segment

UNABLE = (AttributeError, KeyError, TypeError, ValueError, RuntimeError)
"""The errors of a model that cannot go a way that is tried: each has code of its own."""
TOLERANCE = 1e-3
"""Largest difference from single rows, relative to the root mean square of what is compared: hidden states, or a parameter's gradient."""


_places: ContextVar[Tensor | None] = ContextVar("places of the tokens of the call under way", default=None)


def places_of_call() -> Tensor | None:
    """[T] the places in the pack of the tokens that a running `carried_hidden` forwards now; None where none runs."""
    return _places.get()


def carried_hidden(inner: Any, tokens: Tensor, segments: Sequence[Segment]) -> Tensor:
    """[N, H] hidden states of a pack, by `inner`: a model without its head.

    Layers take a single token in another way, which writes into the state. So one that stands alone behind others is forwarded twice in one call, and the first
    counts; who goes on from it forwards it once more."""
    assert not inner.training, "transformers checkpoints layers in training mode, and gives them no cache then"
    parents = {segment.parent for segment in segments}
    positions = image_places(inner, tokens, segments)
    left: dict[int, tuple[DynamicCache, Tensor]] = {}
    found = []
    for number, segment in enumerate(segments):
        own = torch.arange(segment.start, segment.end, device=tokens.device)
        if segment.parent == ROOT and number not in parents:  # a row alone
            found.append(_forwarded(inner, tokens, own, positions))
            continue
        cache, owed = left.get(segment.parent, (None, own[:0]))
        places = torch.cat([owed, own])
        alone = cache is not None and len(places) == 1
        after = _begun(inner) if cache is None else _copied(cache)
        hidden = _forwarded(inner, tokens, torch.cat([places, own]) if alone else places, positions, after)
        found.append(hidden[len(owed) : len(places)])
        if number in parents:
            left[number] = (cache, places) if alone and cache is not None else (after, own[:0])
    return torch.cat(found)


def _forwarded(
    inner: Any, tokens: Tensor, places: Tensor, positions: Tensor | None, cache: DynamicCache | None = None
) -> Tensor:
    """[T, H]: `cache` then holds these tokens, too. `positions` [N]: None for those that follow from the cache."""
    more: dict[str, Any] = {"use_cache": False} if cache is None else {"use_cache": True, "cache": cache}
    if positions is not None:
        more["position_ids"] = positions[None, places]
    outer = _places.set(places)
    try:
        return inner(input_ids=tokens[None, places], **more).last_hidden_state[0]
    finally:
        _places.reset(outer)


class _Kept(LinearAttentionLayer):
    """Layers of transformers write new states into the old ones' memory, whose values the backward pass of earlier tokens needs: here they take their place."""

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        before = self.conv_states[state_idx] if self.has_previous_state[state_idx] else None
        width = self.conv_kernel_size[state_idx] or conv_kernel_size or conv_states.shape[-1]
        self.conv_kernel_size[state_idx] = width
        whole = conv_states if before is None else torch.cat([before, conv_states], -1)
        if (missing := width - whole.shape[-1]) > 0:
            whole = torch.nn.functional.pad(whole, (missing, 0))
        self.conv_states[state_idx] = whole[..., -width:]
        self.is_conv_states_initialized[state_idx] = self.has_previous_state[state_idx] = True
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        self.is_recurrent_states_initialized[state_idx] = True
        return recurrent_states


def _begun(inner: Any) -> DynamicCache:
    """An empty cache. It forgets no key behind a window: the model's masks say what is seen, as in a pass over a whole row."""
    cache = DynamicCache(config=inner.config.get_text_config(decoder=True))
    cache.layers = [_whole(layer) for layer in cache.layers]
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            layer.__class__ = type("_Kept", (_Kept, type(layer)), {})
    return cache


def _whole(layer: Any) -> Any:
    if isinstance(layer, LinearAttentionAndSlidingWindowAttentionLayer):
        return LinearAttentionAndFullAttentionLayer(number_of_states=layer.number_of_states)
    return DynamicLayer() if isinstance(layer, DynamicSlidingWindowLayer) else layer


def _copied(cache: DynamicCache) -> DynamicCache:
    """A cache that goes on from this one and changes nothing of it."""
    found = copy(cache)
    found.layers = [copy(layer) for layer in cache.layers]
    for layer in found.layers:
        for name, value in vars(layer).items():
            if isinstance(value, dict | list):
                setattr(layer, name, copy(value))
    return found


# --- The trial


def carries(model: Any, inner: Any, tokens: Tensor) -> bool:
    """Whether a tree of these tokens [11 or more] has the hidden states, and the gradients of all vectors among the parameters, of single rows."""
    if "cache" not in inspect.signature(inner.forward).parameters or not model._supports_default_dynamic_cache():
        return False
    segments = (Segment(0, 5), Segment(5, 3, 0), Segment(8, 1, 0), Segment(9, 2, 2))
    rows = ((0, 1), (0, 2, 3))

    def alone() -> Tensor:
        parts: dict[int, Tensor] = {}
        for row in rows:
            each = [segments[number] for number in row]
            places = torch.cat([torch.arange(segment.start, segment.end) for segment in each]).to(tokens.device)
            hidden = inner(input_ids=tokens[None, places], use_cache=False).last_hidden_state[0]
            parts = {**dict(zip(row, hidden.split([segment.length for segment in each]), strict=True)), **parts}
        return torch.cat([parts[number] for number in range(len(segments))])

    with torch.enable_grad(), _vectors_only(model) as vectors:
        try:
            found = _numbers(carried_hidden(inner, tokens, segments), vectors)
        except UNABLE:
            return False
        return all(close(one, other, least=1e-7) for one, other in zip(found, _numbers(alone(), vectors), strict=True))


def _numbers(hidden: Tensor, vectors: Sequence[Tensor]) -> list[Tensor]:
    slope = torch.linspace(-1, 1, hidden.numel(), device=hidden.device).view_as(hidden).cos()
    gradients = torch.autograd.grad((hidden * slope).sum(), vectors, allow_unused=True)
    return [hidden.detach(), *(torch.zeros(1) if gradient is None else gradient for gradient in gradients)]


@contextmanager
def _vectors_only(model: torch.nn.Module) -> Iterator[list[Tensor]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim > 1]
    for parameter in matrices:
        parameter.requires_grad_(False)
    try:
        yield [p for p in trained if p.ndim == 1]
    finally:
        for parameter in matrices:
            parameter.requires_grad_(True)


def close(actual: Tensor, expected: Tensor, least: float = 0.0) -> bool:
    """Whether two computations of one thing differ by rounding alone. `least`: the difference that is none, where all may be zero."""
    scale = expected.square().mean().sqrt()
    return actual.shape == expected.shape and bool((actual - expected).abs().max() <= TOLERANCE * scale + least)
