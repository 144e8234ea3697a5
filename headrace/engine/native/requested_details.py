"""Details that requests can ask for: top log-probs, sampling masks, log-probs of the prompt. They are returned as bytes."""

from __future__ import annotations

import numpy as np
import torch

from headrace.core.steps import PromptScores, TokenDetails
from headrace.core.types import TopLogprobs
from headrace.engine.native.sampling.guides import reported
from headrace.engine.native.sampling.sampler import Drawn, RowScores, token_logprobs
from headrace.engine.native.schedule.passes import Chunk
from headrace.engine.native.schedule.sequences import Running, Sequence


def token_details(running: Running, rows: np.ndarray, drawn: Drawn) -> tuple[TokenDetails, ...]:
    """`rows`: those that `drawn` is about, in its order."""
    top, mask = running.columns["top"][rows], running.columns["mask"][rows]
    wanted = np.flatnonzero(((top > 0) | mask) & drawn.finite)
    return tuple(
        TokenDetails(
            running.sequences[rows[place]].id,
            *(_row_of_top(drawn, place, int(top[place])) if top[place] else (b"", b"")),
            **(_mask_of(running.sequences[rows[place]], drawn, place) if mask[place] else {}),
        )
        for place in wanted.tolist()
    )


def _row_of_top(drawn: Drawn, place: int, k: int) -> tuple[bytes, bytes]:
    assert drawn.top_ids is not None and drawn.top_logprobs is not None
    return (
        drawn.top_ids[place, :k].astype(np.int32).tobytes(),
        drawn.top_logprobs[place, :k].astype(np.float32).tobytes(),
    )


def _mask_of(sequence: Sequence, drawn: Drawn, place: int) -> dict[str, bytes]:
    """The tokens that filters kept, or name and encoding of the set that they were drawn from if filters cut nothing more: fields of
    `TokenDetails`."""
    assert drawn.mask is not None
    offsets = drawn.mask.offsets
    kept = drawn.mask.token_ids[offsets[place] : offsets[place + 1]]
    guide = sequence.guide
    if guide is not None and guide.allowed is not None and not len(kept):
        name, encoded = reported(guide)
        return {"set_name": name, "set": encoded}
    return {"mask": kept.tobytes()}


def score_chunk(logits: torch.Tensor, running: Running, chunk: Chunk) -> bool:
    """Appends the log-probs of the tokens after a chunk's positions to those of its sequence. `logits` [scores, V]. False if
    one of them is not finite."""
    sequence = running.sequences[chunk.row]
    following = running.history[chunk.row, chunk.start + 1 : chunk.start + 1 + chunk.scores]
    scores = token_logprobs(logits, following.astype(np.int64), sequence.request.top_logprobs)
    sequence.scores.append(scores)
    return bool(np.isfinite(scores.logprobs).all())


def prompt_scores(sequence: Sequence, version: int, mixed: bool) -> PromptScores:
    """Returns the scores of the whole prompt, once they are complete."""
    parts: list[RowScores] = sequence.scores
    k = sequence.request.top_logprobs
    logprobs = tuple(float(value) for part in parts for value in part.logprobs)
    ids = b"".join(part.top_ids.astype(np.int32).tobytes() for part in parts if part.top_ids is not None)
    values = b"".join(part.top_logprobs.astype(np.float32).tobytes() for part in parts if part.top_logprobs is not None)
    return PromptScores(sequence.id, version, logprobs, TopLogprobs(k, ids, values) if k else None, mixed)
