"""Draws by the C++ of `src/sampling.h`: tokens, the sets that filters keep, log-probs, the most probable tokens, in one call for all rows.

Log-probs are those that the trainer's kernels compute from the same logits, to the last bit.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.engine.native.draws import DrawDetails, Drawn, Mask, RowScores, Settings, uniforms
from headrace.engine.native.kernels import binding
from headrace.native.memory import address, contiguous


@dataclass(frozen=True)
class LogitRows:
    """Rows of float32 logits in memory, and the decoder whose threads draw from them."""

    library: Any
    decoder: int | None
    at: int
    """Address of the first."""
    vocabulary: int
    width: int
    """Numbers from one row to the next, a multiple of 16."""

    def draw(self, settings: Settings, places: np.ndarray | None, wanted: DrawDetails) -> Drawn:
        """One token for each of these rows; see `Draw` in `forward_pass.py`."""
        rows = len(settings.seed)
        with np.errstate(divide="ignore", invalid="ignore"):  # greedy rows have no filters
            min_p = settings.temperature * np.log(settings.min_p)
        left = np.full(rows, self.vocabulary) if wanted.left is None else wanted.left
        out = _Out(rows, int(wanted.tops.max(initial=0)))
        self._call(
            out,
            rows=contiguous(np.arange(rows) if places is None else places, np.int64),
            temperature=contiguous(settings.temperature, np.float64),
            u=uniforms(settings.seed, settings.counter),
            top_k=contiguous(settings.top_k, np.int64),
            top_p=contiguous(settings.top_p, np.float64),
            min_p=min_p,
            masked=contiguous(wanted.masks, np.bool_),
            tops=contiguous(wanted.tops, np.int32),
            left=contiguous(left, np.int64),
        )
        return Drawn(
            tokens=out.tokens,
            logprobs=out.logprobs,
            finite=~np.isnan(out.logprobs),
            mask=self._mask(out.kept) if wanted.masks.any() else None,
            top_ids=out.top_ids if out.listed else None,
            top_logprobs=out.top_logprobs if out.listed else None,
        )

    def score(self, rows: np.ndarray, tokens: np.ndarray, top: int) -> RowScores:
        """The log-probs of one given token for each of these rows; see `Score` in `forward_pass.py`."""
        out = _Out(len(rows), top)
        self._call(
            out,
            rows=contiguous(rows, np.int64),
            temperature=np.ones(len(rows)),
            tops=np.full(len(rows), top, np.int32),
            given=contiguous(tokens, np.int64),
        )
        return RowScores(out.logprobs, out.top_ids if top else None, out.top_logprobs if top else None)

    def _call(self, out: _Out, **given: np.ndarray) -> None:
        pointers = {name: address(array) for name, array in (*given.items(), *vars(out).items()) if name != "listed"}
        sizes = {"count": len(out.tokens), "vocabulary": self.vocabulary, "listed": out.listed, "width": self.width}
        draws = binding.DrawsStruct(**sizes, logits=self.at, **pointers)
        self.library.headrace_draw(self.decoder, ctypes.byref(draws))

    def _mask(self, counts: np.ndarray) -> Mask:
        offsets = np.concatenate([[0], np.cumsum(counts)])
        ids = np.empty(offsets[-1], np.int32)
        self.library.headrace_kept(self.decoder, address(counts), len(counts), address(ids))
        return Mask(ids, offsets)


class _Out:
    """Arrays that the C++ side writes."""

    def __init__(self, rows: int, listed: int) -> None:
        self.listed = listed
        self.tokens, self.kept = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self.logprobs = np.zeros(rows)
        self.top_ids, self.top_logprobs = np.empty((rows, listed), np.int32), np.empty((rows, listed))
