"""The content of the next forward pass: one token of every decoding row, and chunks of prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.engine.native.forward_pass import BLOCK, ForwardInput
from headrace.engine.native.schedule.sequences import Running

SCORE_CHUNK = 128
"""Positions of prompts scored in one pass: each needs a row of logits as wide as the vocabulary."""


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, stop) of a row that are still to be computed."""

    row: int
    start: int
    stop: int
    scores: int
    """The number of positions, from `start` on, whose logits score the next token."""
    samples: bool
    """Whether its last logits are drawn from."""


@dataclass(frozen=True)
class Plan:
    batch: ForwardInput
    decoding: np.ndarray
    """Rows, each a segment of one token; these segments come first."""
    chunks: list[Chunk]
    rows: np.ndarray
    """Rows that get a token, in the order of their logits."""
    drawn: np.ndarray | None
    """The indices of these rows among the logits; None if there are no other logits."""


class Planner:
    def __init__(self, slots: int, prefill_chunk: int, exact: bool, routing: bool) -> None:
        """`exact`: prompts are cut at multiples of the chunk from their start, whatever else there is to do."""
        self._chunk = -(-prefill_chunk // BLOCK) * BLOCK if exact else prefill_chunk
        self._exact, self._routing = exact, routing
        self._places = np.arange(slots + 1, dtype=np.int64)
        self._starts = np.arange(slots + 1, dtype=np.int32)

    def plan(self, running: Running) -> Plan | None:
        """Returns the next pass, or None if there is nothing to compute."""
        columns = running.columns[: len(running)]
        decodes = (columns["known"] - columns["computed"] == 1) & ~columns["scored"]
        count = np.count_nonzero(decodes)
        if count == len(running):
            return self._decoding(running) if count else None
        return self._mixed(running, np.flatnonzero(decodes), self._chunks(running, np.flatnonzero(~decodes)))

    def _decoding(self, running: Running) -> Plan:
        n, columns = len(running), running.columns[: len(running)]
        rows = self._places[:n]
        batch = ForwardInput(
            tokens=columns["token"].copy(),
            starts=self._starts[: n + 1],
            context=columns["computed"].copy(),
            tables=np.ascontiguousarray(running.tables[:n, : columns["blocks"].max()]),
            rows=rows,
            adapters=columns["adapter"].copy(),
            routing=self._routing,
        )
        return Plan(batch, rows, [], rows, None)

    def _mixed(self, running: Running, decoding: np.ndarray, chunks: list[Chunk]) -> Plan:
        columns = running.columns
        rows = np.concatenate([decoding, [chunk.row for chunk in chunks]]).astype(np.int64)
        lengths = [chunk.stop - chunk.start for chunk in chunks]
        starts = np.cumsum([0, *[1] * len(decoding), *lengths], dtype=np.int32)
        wanted, drawn = list(range(len(decoding))), list(range(len(decoding)))
        for chunk, start in zip(chunks, starts[len(decoding) :].tolist(), strict=False):
            wanted += range(start, start + chunk.scores)
            if chunk.samples:
                drawn.append(len(wanted))
                wanted.append(start + chunk.stop - chunk.start - 1)
        parts = [running.history[chunk.row, chunk.start : chunk.stop] for chunk in chunks]
        width = columns["blocks"][rows].max(initial=1)
        batch = ForwardInput(
            tokens=np.concatenate([columns["token"][decoding], *parts]),
            starts=starts,
            context=columns["computed"][rows],
            tables=np.ascontiguousarray(running.tables[rows, :width]),
            rows=np.array(wanted, dtype=np.int64),
            adapters=columns["adapter"][rows],
            routing=self._routing,
        )
        sampling = np.array([*decoding, *(chunk.row for chunk in chunks if chunk.samples)], dtype=np.int64)
        return Plan(
            batch, decoding, chunks, sampling, np.array(drawn, dtype=np.int64) if len(drawn) < len(wanted) else None
        )

    def _chunks(self, running: Running, rows: np.ndarray) -> list[Chunk]:
        """First those first in order, `prefill_chunk` tokens in all (exact: more, when the first alone is longer)."""
        chunks: list[Chunk] = []
        room, scores = self._chunk, SCORE_CHUNK
        for row in sorted(rows.tolist(), key=lambda row: running.sequences[row].order):
            start, known = int(running.columns["computed"][row]), int(running.columns["known"][row])
            scored = bool(running.columns["scored"][row])
            stop = min(known, start + (min(room, scores) if scored else room))
            if self._exact:
                unit = SCORE_CHUNK if scored else self._chunk
                stop = min(known, (start // unit + 1) * unit)
                if chunks and stop - start > (min(room, scores) if scored else room):
                    break
            if stop <= start:
                continue
            last = running.sequences[row].prompt - 1 if scored else 0
            chunk = Chunk(
                row, start, stop, max(0, min(stop, last) - start), stop == known and bool(running.columns["limit"][row])
            )
            chunks.append(chunk)
            room, scores = room - (stop - start), scores - chunk.scores
            if room <= 0:
                break
        return chunks
