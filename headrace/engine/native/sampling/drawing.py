"""Draws tokens: by the runner if it can and only the token is wanted, by the sampler otherwise. A runner that shares its arithmetic with a
trainer says what log-probs tokens with recorded masks have, because a trainer can repeat its sums.

The choice is made for each row, because the two add up in different orders, and the tokens of a request must not depend on
the settings of other requests.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from headrace.engine.native.forward_pass import ForwardOutput
from headrace.engine.native.sampling.sampler import Drawn, Mask, Settings, sample, uniforms
from headrace.native.memory import uploaded


def draw(
    forward: ForwardOutput,
    settings: Settings,
    places: np.ndarray | None,
    masks: np.ndarray,
    tops: np.ndarray,
    *,
    left: np.ndarray | None = None,
) -> Drawn:
    """`places` [R]: where the rows are among the logits, None for all in order. `masks` [R] bool and `tops` [R]: whose kept
    vocabulary, and how many of whose most probable tokens, are wanted. `left` [R]: as for `sample`."""
    special = masks | (tops > 0) | settings.filters().on()
    at = np.arange(len(special)) if places is None else places
    if forward.draw is None or special.all():
        return _sample(forward, settings, places, masks, tops, left=left)
    plain, rest = np.flatnonzero(~special), np.flatnonzero(special)
    u = uniforms(settings.seed[plain], settings.counter[plain])
    tokens, logprobs = forward.draw(settings.temperature[plain], u, at[plain])
    if not len(rest):
        return Drawn(tokens=tokens, logprobs=logprobs, finite=np.isfinite(logprobs))
    part = _sample(
        forward, _only(settings, rest), at[rest], masks[rest], tops[rest], left=None if left is None else left[rest]
    )
    drawn = Drawn(
        tokens=_spread(part.tokens, rest, len(special), 0),
        logprobs=_spread(part.logprobs, rest, len(special), 0.0),
        finite=_spread(part.finite, rest, len(special), False),
        mask=None if part.mask is None else _spread_mask(part.mask, rest, len(special)),
        top_ids=None if part.top_ids is None else _spread(part.top_ids, rest, len(special), -1),
        top_logprobs=None if part.top_logprobs is None else _spread(part.top_logprobs, rest, len(special), -np.inf),
    )
    drawn.tokens[plain], drawn.logprobs[plain], drawn.finite[plain] = tokens, logprobs, np.isfinite(logprobs)
    return drawn


def _sample(
    forward: ForwardOutput,
    settings: Settings,
    places: np.ndarray | None,
    masks: np.ndarray,
    tops: np.ndarray,
    *,
    left: np.ndarray | None,
) -> Drawn:
    logits = forward.logits
    if places is not None:
        logits = logits[uploaded(places, logits.device)]
    drawn = sample(logits, settings, masks if masks.any() else None, int(tops.max(initial=0)), left)
    if forward.score is None or drawn.mask is None:
        return drawn
    rows = np.flatnonzero(masks)  # the others kept nothing, so that what these kept adjoins
    at, offsets = rows if places is None else places[rows], np.append(drawn.mask.offsets[rows], drawn.mask.offsets[-1])
    scores = forward.score(drawn.tokens[rows], settings.temperature[rows], at, offsets, drawn.mask.token_ids)
    drawn.logprobs[rows] = scores
    return drawn


def _only(settings: Settings, rows: np.ndarray) -> Settings:
    return Settings(**{field.name: getattr(settings, field.name)[rows] for field in fields(settings)})


def _spread(values: np.ndarray, rows: np.ndarray, count: int, nothing: float) -> np.ndarray:
    """`values` of some rows as those of `count` rows."""
    out = np.full((count, *values.shape[1:]), nothing, dtype=values.dtype)
    out[rows] = values
    return out


def _spread_mask(mask: Mask, rows: np.ndarray, count: int) -> Mask:
    sizes = _spread(np.diff(mask.offsets), rows, count, 0)
    return Mask(mask.token_ids, np.concatenate([[0], np.cumsum(sizes)]).astype(mask.offsets.dtype))
