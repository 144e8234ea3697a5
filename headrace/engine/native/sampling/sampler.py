"""Draws tokens, and reports the distribution that they were drawn from.

Logits [R, V] of rows with different settings go through one path, a few rows at a time (so that they stay in the processor's
cache, and no second copy of the logits is made):

    weights = exp((x - max) / temperature) ──▶ rows without filters: sums of blocks ──▶ a block, then a token in it
                                           └─▶ rows with filters: the tokens kept (filters.py) ──▶ a token among them

Every draw is an inverse CDF, and the log-prob returned is that of the distribution really sampled from. The random number of a
row depends on its seed and on how many tokens its request has sampled; no row depends on what other rows there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from headrace.engine.native.sampling.filters import GROUP, Filters, Ragged, above, concatenated, cuts, keep
from headrace.native.memory import uploaded

BLOCK = 256
"""Vocabulary entries whose weights are summed before one block is searched. An exponential race would need a random number
and a logarithm per entry: 45 ms against 12 for 64 rows of 49,152 on two cores."""

CHUNK = {"cpu": 1 << 19, "cuda": 1 << 26}
"""Logits worked on at once: on a CPU 2 MiB of float32, the second-level cache of a core."""

_BELOW_ONE = 1.0 - 2.0**-52
_MULTIPLE = max(BLOCK, GROUP)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One value per row: float64 but for `top_k` (int64, 0 = off), `seed` (uint64) and `counter` (int64).

    Temperature 0 is greedy: the largest logit is taken, whatever the filters say.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seed: np.ndarray
    counter: np.ndarray

    def filters(self) -> Filters:
        """The filters in force: none on greedy rows, which report the plain distribution."""
        greedy = self.temperature == 0
        return Filters(
            np.where(greedy, 1.0, self.temperature),
            np.where(greedy, 0, self.top_k),
            np.where(greedy, 1.0, self.top_p),
            np.where(greedy, 0.0, self.min_p),
        )


class Mask(NamedTuple):
    """The vocabulary that filters kept: the tokens over which the distribution of each row was normalised.

    An empty row is one from which filters cut nothing: one without filters, a greedy one, one whose filters kept everything, one that
    was not asked for. It cannot be mistaken for a row that keeps nothing, because at least one token is always kept. A row that is
    not finite is empty too.
    """

    token_ids: np.ndarray
    """[M] int32, ascending in each row"""
    offsets: np.ndarray
    """[R + 1] int64: row r holds token_ids[offsets[r]:offsets[r + 1]]"""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """`finite` is False for rows whose logits held NaN or infinity; their token and log-probs mean nothing."""

    tokens: np.ndarray
    """[R] int64"""
    logprobs: np.ndarray
    """[R] float64"""
    finite: np.ndarray
    """[R] bool"""
    mask: Mask | None = None
    top_ids: np.ndarray | None = None
    """[R, top] int32, most probable first; -1 where the distribution has fewer tokens."""
    top_logprobs: np.ndarray | None = None
    """[R, top] float64; -inf if there is no token."""


class RowScores(NamedTuple):
    logprobs: np.ndarray
    """[R] float64; not a number where the logits hold NaN or infinity."""
    top_ids: np.ndarray | None
    """The same as in `Drawn`."""
    top_logprobs: np.ndarray | None


def sample(
    logits: torch.Tensor,
    settings: Settings,
    want_mask: np.ndarray | None = None,
    top: int = 0,
    left: np.ndarray | None = None,
) -> Drawn:
    """One token per row of `logits` [R, V].

    `want_mask` [R] bool: rows whose kept vocabulary is returned. `left` [R]: the tokens that constraints have left of each row, V where there
    is none; None: V everywhere. A row from which filters cut nothing more has an empty mask. `top`: the number of most probable tokens to return, under
    the distribution sampled from (that of temperature 1 for greedy rows).
    """
    filters = settings.filters()
    on = filters.on()
    scan = _scan(logits, filters, top, settings.temperature == 0)
    u = uniforms(settings.seed, settings.counter)
    tokens, chosen, norm = np.zeros(len(on), np.int64), np.zeros(len(on)), np.zeros(len(on))
    rows = np.flatnonzero(~on)
    whole = _draw_whole(logits, scan, rows, settings.temperature[rows], u[rows])
    peak, total, tokens[rows], chosen[rows] = _on_host(scan.summary(), whole)
    norm[rows] = total[rows]
    kept = keep(scan.near, peak, total, filters) if on.any() else scan.near
    for rows, table in kept.rows(on).tables():
        place, norm[rows] = _draw_kept(table, peak[rows], filters.temperature[rows], u[rows])
        place += kept.offsets[rows]
        tokens[rows], chosen[rows] = kept.ids[place], kept.logits[place]
    with np.errstate(divide="ignore", invalid="ignore"):
        base = peak + filters.temperature * np.log(norm)
        logprobs = (chosen - base) / filters.temperature
    mask = None if want_mask is None else _mask(kept, on & want_mask, logits.shape[1] if left is None else left)
    ids, best = _top(kept, base, filters.temperature, top)
    return Drawn(tokens=tokens, logprobs=logprobs, finite=np.isfinite(peak), mask=mask, top_ids=ids, top_logprobs=best)


def _on_host(*parts: torch.Tensor) -> Iterator[np.ndarray]:
    """The rows of tensors [n, R] of one dtype, copied at once: each copy waits for a GPU."""
    whole = torch.cat([part.flatten() for part in parts]).cpu().numpy()
    start = 0
    for rows, width in (part.shape for part in parts):
        yield from whole[start : start + rows * width].reshape(rows, width)
        start += rows * width


def token_logprobs(logits: torch.Tensor, tokens: np.ndarray, top: int = 0) -> RowScores:
    """Log-probs at temperature 1 of one given token per row of `logits` [R, V], and of the `top` most probable ones."""
    rows = len(logits)
    plain = Filters(np.ones(rows), np.zeros(rows, np.int64), np.ones(rows), np.zeros(rows))
    scan = _scan(logits, plain, top, np.zeros(rows, bool))
    given = uploaded(tokens, logits.device)
    chosen = logits.gather(1, given[:, None])[:, 0].double().cpu().numpy()
    peak, total = scan.summary().cpu().numpy()
    with np.errstate(invalid="ignore"):
        base = peak + np.log(total)
        return RowScores(chosen - base, *_top(scan.near, base, plain.temperature, top))


def uniforms(seed: np.ndarray, counter: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) that depend on (seed, counter) alone: splitmix64 (Steele, Lea & Flood, OOPSLA 2014), whose stream
    for a seed can be entered anywhere. The seed is mixed first, so that neighbouring seeds share nothing."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        state = _mix(seed.astype(np.uint64) + golden) + golden * (counter.astype(np.uint64) + np.uint64(1))
    return (_mix(state) >> np.uint64(11)) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


# -- one look at the whole vocabulary ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scan:
    peak: torch.Tensor
    """[R] float64: the largest logit. Not finite if any logit is NaN or +inf, or all are -inf."""
    sums: torch.Tensor
    """[R, blocks] float64: cumulative sums over blocks of BLOCK tokens of the weights exp((x - peak) / temperature)."""
    largest: torch.Tensor
    """[R] int64: the first token of the largest logit, of greedy rows; others hold anything."""
    near: Ragged
    """[R] the likely tokens of rows that have filters, of all rows where the most probable tokens are wanted."""

    def summary(self) -> torch.Tensor:
        """[2, R]: peak, and the total of all weights."""
        return torch.stack([self.peak, self.sums[:, -1]])


def _scan(logits: torch.Tensor, filters: Filters, top: int, greedy: np.ndarray) -> _Scan:
    device, (rows, vocabulary) = logits.device, logits.shape
    width = -(-vocabulary // _MULTIPLE) * _MULTIPLE
    peak, largest = (torch.empty(rows, dtype=dtype, device=device) for dtype in (torch.float32, torch.int64))
    maxima = torch.empty(rows, width // GROUP, device=device)
    sums = torch.zeros(rows, width // BLOCK, device=device)
    weights = torch.empty(_chunk_rows(logits, width), width, device=device)
    scale = None if (filters.temperature == 1).all() else uploaded(1 / filters.temperature, device, np.float32)
    summed = filters.needs_total()
    for part, x in _chunks(logits, width):
        # A group's tokens lie far apart: neighbours in the vocabulary resemble each other.
        torch.amax(x.view(len(x), GROUP, -1), 1, out=maxima[part])
        torch.amax(maxima[part], -1, out=peak[part])
        if greedy[part].any():
            largest[part] = _argmax(x)
        if summed[part].any():
            part_weights = torch.sub(x, peak[part, None], out=weights[: len(x)])
            if scale is not None:
                part_weights.mul_(scale[part, None])
            torch.sum(part_weights.exp_().view(len(x), -1, BLOCK), -1, out=sums[part])
    sums = sums.cumsum(-1, dtype=torch.float64)
    return _Scan(peak.double(), sums, largest, _near(logits, maxima, sums[:, -1], filters, top))


def _chunk_rows(logits: torch.Tensor, width: int) -> int:
    return max(1, min(len(logits), CHUNK.get(logits.device.type, CHUNK["cuda"]) // width))


def _chunks(logits: torch.Tensor, width: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """(rows, their logits [r, width] in float32 with -inf after the vocabulary): views if they have this form already."""
    rows, vocabulary = logits.shape
    size = _chunk_rows(logits, width)
    ready = logits.dtype == torch.float32 and width == vocabulary and logits.is_contiguous()
    room = logits if ready else torch.full((size, width), -torch.inf, device=logits.device)
    for start in range(0, rows, size):
        part = slice(start, min(start + size, rows))
        if ready:
            yield part, logits[part]
        else:
            x = room[: part.stop - start]
            x[:, :vocabulary] = logits[part]
            yield part, x


def _near(logits: torch.Tensor, maxima: torch.Tensor, total: torch.Tensor, filters: Filters, top: int) -> Ragged:
    rows, wanted = len(logits), np.flatnonzero(filters.on() | (top > 0))
    counts = np.zeros(rows + 1, np.int64)
    if not len(wanted):
        return Ragged(counts, np.zeros(0, np.int64), np.zeros(0, np.float32))
    if len(wanted) < rows:
        index = uploaded(wanted, logits.device)
        logits, maxima, total = logits[index], maxima[index], total[index]
    cut = cuts(maxima, total, filters.at(wanted), top)
    width = maxima.shape[1] * GROUP
    found = concatenated([above(x, cut[part]) for part, x in _chunks(logits, width)])
    counts[wanted + 1] = found.counts()
    return Ragged(counts.cumsum(), found.ids, found.logits)


def _argmax(x: torch.Tensor) -> torch.Tensor:
    """Along the last axis. numpy's is 40 times faster on a CPU."""
    return torch.from_numpy(x.numpy().argmax(-1)) if x.device.type == "cpu" else x.argmax(-1)


# -- draws ------------------------------------------------------------------------------------------------------------------


def _draw_whole(
    logits: torch.Tensor, scan: _Scan, rows: np.ndarray, temperature: np.ndarray, u: np.ndarray
) -> torch.Tensor:
    """[2, n] float64, tokens and their logits, of rows without filters: first a block of the vocabulary, then an entry of it.

    Nothing in here waits for a GPU.
    """
    device, vocabulary, greedy = logits.device, logits.shape[1], temperature == 0
    index = uploaded(rows, device)
    block, inside = _search(scan.sums[index], uploaded(u, device, np.float64))
    columns = block[:, None] * BLOCK + torch.arange(BLOCK, device=device)
    x = logits[index[:, None], columns.clamp(max=vocabulary - 1)].double()
    x.masked_fill_(columns >= vocabulary, -torch.inf)
    scale = uploaded(np.where(greedy, 1.0, temperature)[:, None], device, np.float64)
    entry, _ = _search(((x - scan.peak[index, None]) / scale).exp_().cumsum(-1), inside)
    tokens = (block * BLOCK + entry).clamp_(max=vocabulary - 1)  # rows of NaN end anywhere
    tokens = torch.where(uploaded(greedy, device, np.bool_), scan.largest[index], tokens)
    return torch.stack([tokens.double(), logits[index, tokens].double()])


def _search(sums: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[R] the column of cumulative sums [R, C] in which the share u of all falls, and how far into it, from 0 to 1.

    Never a column that adds nothing: u below one keeps the target strictly below the sum.
    """
    target = (u.clamp(max=_BELOW_ONE) * sums[:, -1])[:, None]
    column = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)  # rows of NaN again
    before = sums.gather(1, (column - 1).clamp(min=0)).masked_fill_(column == 0, 0.0)
    inside = (target - before) / (sums.gather(1, column) - before)
    return column[:, 0], inside.clamp_(0.0, 1.0)[:, 0]


def _draw_kept(
    table: np.ndarray, peak: np.ndarray, temperature: np.ndarray, u: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(columns of a table [R, C] of logits, total weights)."""
    sums = np.exp((table - peak[:, None]) / temperature[:, None]).cumsum(-1)
    total = sums[:, -1]
    return (sums <= (np.minimum(u, _BELOW_ONE) * total)[:, None]).sum(-1), total


# -- details on request ------------------------------------------------------------------------------------------------------


def _mask(kept: Ragged, rows: np.ndarray, left: np.ndarray | int) -> Mask:
    masked = kept.rows(rows & (kept.counts() < left))
    return Mask(masked.ids.astype(np.int32), masked.offsets)


def _top(
    tokens: Ragged, base: np.ndarray, temperature: np.ndarray, top: int
) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """(ids, log-probs) [R, top]; of tokens that are equally probable, the smaller id first. base [R]: the logit of log-prob 0."""
    if not top:
        return None, None
    rows = len(base)
    ids, logprobs = np.full((rows, top), -1, np.int32), np.full((rows, top), -np.inf)
    likely = Filters(temperature, np.full(rows, top), np.ones(rows), np.zeros(rows))
    tokens = keep(tokens, base, base, likely)
    for some, table in tokens.tables():
        order = np.argsort(-table, axis=-1, kind="stable")[:, :top]
        found = np.take_along_axis(table, order, axis=-1)
        place = np.minimum(tokens.offsets[some, None] + order, len(tokens.ids) - 1)
        ids[some, : order.shape[1]] = np.where(np.isfinite(found), tokens.ids[place], -1)
        logprobs[some, : order.shape[1]] = (found - base[some, None]) / temperature[some, None]
    return ids, logprobs
