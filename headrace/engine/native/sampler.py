"""Draws tokens, and reports the distribution that they were drawn from: by the runner if it can, in PyTorch and numpy otherwise.

Logits [R, V] of rows with different settings go through one path, a few rows at a time (so that they stay in the processor's
cache, and no second copy of the logits is made):

    weights = exp((x - max) / temperature) ──▶ rows without filters: sums of blocks ──▶ a block, then a token in it
                                           └─▶ rows with filters: the tokens kept             ──▶ a token among them

Every draw is an inverse CDF, and the log-prob returned is that of the distribution really sampled from. The random number of a
row depends on its seed and on how many tokens its request has sampled; no row depends on what other rows there are. The kernels
(`kernels/drawing.py`) do the same with their own sums: they keep the same tokens, and draw the same ones but where a random number meets a
sum within rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from headrace.engine.native.device_draws import CANDIDATES, FilterColumns, KeptRows, draw_filtered
from headrace.engine.native.draws import (
    BELOW_ONE,
    LOWEST,
    DrawDetails,
    Drawn,
    Filters,
    Mask,
    RowScores,
    Settings,
    uniforms,
)
from headrace.engine.native.forward_pass import ForwardOutput
from headrace.native.uploads import Copied, uploaded, uploaded_together

# --- Computes exactly which tokens top-k
# Computes exactly which tokens top-k, top-p and min-p keep, without sorting the vocabulary.
#
#     logits [R, V] ──▶ maxima of groups of tokens ──▶ cut: surely not above the last token kept ──▶ candidates ──▶ threshold
#                       one pass, sorted: few             a bound from the maxima                     few, sorted, in float64
#
# The passes over the vocabulary run where the logits are, what is decided among the candidates is decided in numpy. Everything
# is done with logits as they come: temperature enters where probabilities do, so that no two tokens become equal by rounding.
#
# Legend: R rows, V vocabulary, M candidates of all rows together, C those of the longest row.


GROUP = 16
"""Tokens of one group. Small: the maxima leave out little probability. Large: there are few of them to sort."""

_SMALL, _LARGE = 1 << 13, 1 << 18
"""Entries of a padded table: below the first padding costs less than one more table, more than the second leave the cache."""


@dataclass(frozen=True)
class Ragged:
    """Tokens of several rows, ascending by id in each: row r holds [offsets[r], offsets[r + 1])."""

    offsets: np.ndarray
    """[R + 1] int64"""
    ids: np.ndarray
    """[M] int64"""
    logits: np.ndarray
    """[M] float32"""

    def counts(self) -> np.ndarray:
        return np.diff(self.offsets)

    def where(self, kept: np.ndarray) -> Ragged:
        """The tokens for which kept [M] is True."""
        before = np.concatenate([[0], np.cumsum(kept)])
        return Ragged(before[self.offsets], self.ids[kept], self.logits[kept])

    def rows(self, chosen: np.ndarray) -> Ragged:
        """The rows for which chosen [R] is True; the others become empty."""
        return self if chosen.all() else self.where(np.repeat(chosen, self.counts()))

    def tables(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(rows, logits [rows, C] with -inf behind the end of each): all rows that are not empty, some at a time."""
        counts = self.counts()
        left = np.flatnonzero(counts)
        left = left[np.argsort(counts[left], kind="stable")]  # long rows together, so that little is padding
        while len(left):
            padded = np.arange(1, len(left) + 1) * counts[left]
            wide = padded > np.clip(2 * np.cumsum(counts[left]), _SMALL, _LARGE)
            rows, left = np.split(left, [max(1, int(wide.argmax())) if wide.any() else len(left)])
            columns = np.arange(counts[rows[-1]])
            places = self.offsets[rows, None] + np.minimum(columns, counts[rows, None] - 1)
            yield rows, np.where(columns < counts[rows, None], self.logits[places], np.float32(-np.inf))


def concatenated(parts: list[Ragged]) -> Ragged:
    counts = np.concatenate([[0], *(part.counts() for part in parts)])
    ids, logits = (np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "logits"))
    return Ragged(np.cumsum(counts), ids, logits)


def cuts(maxima: torch.Tensor, total: torch.Tensor, filters: Filters, at_least: int) -> np.ndarray:
    """[R] float32: a logit not above that of the last token kept; in rows without filters, of the `at_least` most probable ones.

    maxima [R, V / GROUP] float32, those of groups of tokens. total [R] float64, the sum of exp((x - max) / temperature), at which
    only rows look whose top-p is a `share_of_all`. Not a number where the maximum is not finite.

    - top-k: the k-th largest of maxima, as k tokens at least reach it.
    - top-p: the first of the maxima whose probabilities sum to top_p; where all of them together do not, the logit below which
      V tokens cannot sum to 1 - top_p.
    - min-p: its own threshold. Not beside top-k, whose sum needs all k tokens.
    """
    maxima = _descending(maxima)
    k, groups = np.where(filters.on(), filters.top_k, at_least), maxima.shape[1]
    column = uploaded(np.clip(k, 1, groups) - 1, maxima.device)
    found = torch.stack([maxima[:, 0], maxima.gather(1, column[:, None])[:, 0]]).cpu().numpy()
    peak, kth = found.astype(np.float64)
    cut = np.where((k > 0) & (k <= groups), kth, LOWEST)
    alone = filters.on() & (k == 0)
    if alone.any():
        with np.errstate(divide="ignore", invalid="ignore"):
            bound = np.log((1 - filters.top_p) * total.cpu().numpy() / (groups * GROUP))
            lower = peak + filters.temperature * np.maximum(bound, np.log(filters.min_p))
        lower = np.maximum(lower, _reach(maxima, total, filters, alone))
        cut = np.where(alone, np.nextafter(lower.astype(np.float32), np.float32(-np.inf)), cut)
    cut = np.maximum(cut, LOWEST)
    return np.where(np.isfinite(peak), cut, np.nan).astype(np.float32)


def above(x: torch.Tensor, cut: np.ndarray) -> Ragged:
    """The tokens of x [R, V] float32 that reach the cut of their row. numpy compares with AVX-512: 5 times faster on a CPU."""
    if x.device.type == "cpu":
        places = np.flatnonzero(x.numpy() >= cut[:, None])
        logits = x.numpy().reshape(-1)[places]
    else:
        found = (x >= uploaded(cut, x.device, np.float32)[:, None]).view(-1).nonzero()[:, 0]
        places, logits = found.cpu().numpy(), x.reshape(-1)[found].cpu().numpy()
    rows, width = x.shape
    offsets = np.searchsorted(places, np.arange(rows + 1) * width)
    return Ragged(offsets, places - np.repeat(np.arange(rows) * width, np.diff(offsets)), logits)


def _descending(maxima: torch.Tensor) -> torch.Tensor:
    """Sorted along the last axis. numpy sorts with AVX-512: 25 times faster than torch on a CPU."""
    if maxima.device.type != "cpu":
        return maxima.sort(-1, descending=True).values
    return torch.from_numpy(np.negative(np.sort(np.negative(maxima.numpy()), axis=-1)))


def _reach(maxima: torch.Tensor, total: torch.Tensor, filters: Filters, rows: np.ndarray) -> np.ndarray:
    """[R] the first of the maxima at which they sum to top_p; -inf where they never do."""
    reach = np.full(len(maxima), -np.inf)
    rows = np.flatnonzero(rows & (filters.top_p < 1))
    if len(rows):
        index = uploaded(rows, maxima.device)
        temperature, top_p = (
            uploaded(c[rows, None], total.device, np.float64) for c in (filters.temperature, filters.top_p)
        )
        sorted_ = maxima[index]
        mass = ((sorted_ - sorted_[:, :1]) / temperature.float()).exp_().cumsum(-1, dtype=torch.float64)
        # Rounded up: these are float32 terms, and a cut that is too low costs a few candidates only.
        column = torch.searchsorted(mass, top_p * total[index, None] * (1 + 1e-5))
        found = sorted_.gather(1, column.clamp(max=maxima.shape[1] - 1))
        reach[rows] = found.masked_fill_(column == maxima.shape[1], -torch.inf)[:, 0].cpu().numpy()
    return reach


def keep(near: Ragged, peak: np.ndarray, total: np.ndarray, filters: Filters) -> Ragged:
    """Applies top-k, then top-p and then min-p to the tokens that are left. Ties with the last kept token are kept.

    near: what is `above` the `cuts` of these rows; peak [R] their maxima and total [R] as there, float64.
    """
    threshold = np.full(len(peak), -np.inf)
    for rows, table in near.tables():
        threshold[rows] = _thresholds(table, near.counts()[rows], peak[rows], total[rows], filters.at(rows))
    return near.where(near.logits >= np.repeat(threshold, near.counts()))


def _thresholds(
    table: np.ndarray, count: np.ndarray, peak: np.ndarray, total: np.ndarray, filters: Filters
) -> np.ndarray:
    """[R] float64: the logit of the last token kept in each row of a table [R, C] of candidates."""
    ordered = np.negative(np.sort(np.negative(table), axis=-1))
    place = np.arange(len(table))
    k = filters.top_k
    kth = np.where(k > 0, ordered[place, np.clip(k, 1, count) - 1], -np.inf)
    threshold = kth
    if (filters.top_p < 1).any():
        mass = np.exp((ordered - peak[:, None]) / filters.temperature[:, None])
        mass[ordered < kth[:, None]] = 0.0
        mass.cumsum(axis=-1, out=mass)
        reached = mass >= (filters.top_p * np.where(k > 0, mass[:, -1], total))[:, None]
        # Rounding can keep the sum of all below top_p: then all are kept.
        last = np.where(reached[:, -1], reached.argmax(-1), count - 1)
        threshold = np.where(filters.top_p < 1, np.maximum(kth, ordered[place, last]), kth)
    with np.errstate(divide="ignore"):
        return np.maximum(threshold, peak + filters.temperature * np.log(filters.min_p))


# --- sampler ------------------------------------------------------------


BLOCK = 256
"""Vocabulary entries whose weights are summed before one block is searched. An exponential race would need a random number
and a logarithm per entry: 45 ms against 12 for 64 rows of 49,152 on two cores."""

CHUNK = {"cpu": 1 << 19, "cuda": 1 << 26}
"""Logits worked on at once: on a CPU 2 MiB of float32, the second-level cache of a core."""

_MULTIPLE = max(BLOCK, GROUP)


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
    u, rows = uniforms(settings.seed, settings.counter), np.flatnonzero(~on)
    there, index = _columns_there(filters, settings.temperature == 0, u, logits.device, [rows])
    scan = _scan(logits, filters, settings.temperature == 0, there)
    near = _near(logits, scan, filters, top)
    tokens, chosen, norm = np.zeros(len(on), np.int64), np.zeros(len(on)), np.zeros(len(on))
    peak, total, tokens[rows], chosen[rows] = _on_host(scan.summary(), _draw_whole(logits, scan, index, there))
    norm[rows] = total[rows]
    kept = keep(near, peak, total, filters) if on.any() else near
    for rows, table in kept.rows(on).tables():
        place, norm[rows] = _draw_kept(table, peak[rows], filters.temperature[rows], u[rows])
        place += kept.offsets[rows]
        tokens[rows], chosen[rows] = kept.ids[place], kept.logits[place]
    base, logprobs = _logprobs(chosen, peak, norm, filters.temperature)
    mask = None if want_mask is None else _mask(kept, on & want_mask, logits.shape[1] if left is None else left)
    ids, best = _top(kept, base, filters.temperature, top)
    return Drawn(tokens=tokens, logprobs=logprobs, finite=np.isfinite(peak), mask=mask, top_ids=ids, top_logprobs=best)


def _logprobs(
    chosen: np.ndarray, peak: np.ndarray, norm: np.ndarray, temperature: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ([R] the logit of log-prob 0, [R] the log-probs of the chosen logits), all float64. `norm`: the sum of weights of what was kept."""
    with np.errstate(divide="ignore", invalid="ignore"):
        base = peak + temperature * np.log(norm)
        return base, (chosen - base) / temperature


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
    there, given = _columns_there(plain, np.zeros(rows, bool), np.zeros(rows), logits.device, [tokens])
    scan = _scan(logits, plain, np.zeros(rows, bool), there)
    chosen = logits.gather(1, given[:, None])[:, 0].double().cpu().numpy()
    peak, total = scan.summary().cpu().numpy()
    with np.errstate(invalid="ignore"):
        base = peak + np.log(total)
        return RowScores(chosen - base, *_top(_near(logits, scan, plain, top), base, plain.temperature, top))


# -- one look at the whole vocabulary ---------------------------------------------------------------------------------------


class _There(NamedTuple):
    """Columns of a draw where the logits are, [R] each."""

    temperature: torch.Tensor
    """float64: that of the filters, 1 for greedy rows."""
    inverse: torch.Tensor
    """float32"""
    u: torch.Tensor
    """float64: the random numbers."""
    greedy: torch.Tensor
    """bool"""
    shares: torch.Tensor
    """bool: see `Filters.share_of_all`."""


def _columns_there(
    filters: Filters, greedy: np.ndarray, u: np.ndarray, device: torch.device, more: Sequence[np.ndarray]
) -> tuple[Any, ...]:
    """Returns the columns on the device, and `more` arrays behind them, through one copy."""
    found = filters.temperature, (1 / filters.temperature).astype(np.float32), u, greedy, filters.share_of_all()
    own, others = (there := uploaded_together([*found, *more], device))[: len(found)], there[len(found) :]
    return _There(*own), *others


@dataclass(frozen=True)
class _Scan:
    peak: torch.Tensor
    """[R] float64: the largest logit. Not finite if any logit is NaN or +inf, or all are -inf."""
    sums: torch.Tensor
    """[R, blocks] float64: cumulative sums over blocks of BLOCK tokens of the weights exp((x - peak) / temperature), of rows without filters."""
    total: torch.Tensor
    """[R] float64: the sum of all weights, of rows without filters and of those whose top-p is a share of it; others hold anything."""
    largest: torch.Tensor
    """[R] int64: the first token of the largest logit, of greedy rows; others hold anything."""
    maxima: torch.Tensor
    """[R, V / GROUP] float32: those of groups of tokens."""

    def summary(self) -> torch.Tensor:
        """[2, R]: peak, and the total of all weights."""
        return torch.stack([self.peak, self.total])


def _scan(logits: torch.Tensor, filters: Filters, greedy: np.ndarray, there: _There) -> _Scan:
    """Looks at all logits once. Nothing in here waits for a GPU."""
    device, (rows, vocabulary) = logits.device, logits.shape
    width = -(-vocabulary // _MULTIPLE) * _MULTIPLE
    peak, largest = (torch.empty(rows, dtype=dtype, device=device) for dtype in (torch.float32, torch.int64))
    maxima = torch.empty(rows, width // GROUP, device=device)
    sums = torch.zeros(rows, width // BLOCK, device=device)
    weights = torch.empty(_chunk_rows(logits, width), width, device=device)
    scale = None if (filters.temperature == 1).all() else there.inverse
    summed, shares = ~filters.on(), filters.share_of_all()
    exact = torch.zeros(rows, dtype=torch.float64, device=device)
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
        if shares[part].any():
            exact[part] = _total(x, peak[part], there.temperature[part])
    sums = sums.cumsum(-1, dtype=torch.float64)
    return _Scan(peak.double(), sums, torch.where(there.shares, exact, sums[:, -1]), largest, maxima)


def _total(x: torch.Tensor, peak: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """[R] float64, of float64 terms: a sum of float32 terms would keep other tokens than the kernels where it meets top_p within rounding."""
    return (x.double() - peak.double()[:, None]).div_(temperature[:, None]).exp_().sum(-1)


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


def _near(logits: torch.Tensor, scan: _Scan, filters: Filters, top: int) -> Ragged:
    """[R] the likely tokens of rows that have filters, of all rows where the most probable tokens are wanted."""
    maxima, total = scan.maxima, scan.total
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


def _draw_whole(logits: torch.Tensor, scan: _Scan, index: torch.Tensor, there: _There) -> torch.Tensor:
    """[2, n] float64, tokens and their logits, of rows without filters: first a block of the vocabulary, then an entry of it.

    `index` [n]: those rows. Nothing in here waits for a GPU.
    """
    device, vocabulary = logits.device, logits.shape[1]
    block, inside = _search(scan.sums[index], there.u[index])
    columns = block[:, None] * BLOCK + torch.arange(BLOCK, device=device)
    x = logits[index[:, None], columns.clamp(max=vocabulary - 1)].double()
    x.masked_fill_(columns >= vocabulary, -torch.inf)
    entry, _ = _search(((x - scan.peak[index, None]) / there.temperature[index, None]).exp_().cumsum(-1), inside)
    tokens = (block * BLOCK + entry).clamp_(max=vocabulary - 1)  # rows of NaN end anywhere
    tokens = torch.where(there.greedy[index], scan.largest[index], tokens)
    return torch.stack([tokens.double(), logits[index, tokens].double()])


def _search(sums: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[R] the column of cumulative sums [R, C] in which the share u of all falls, and how far into it, from 0 to 1.

    Never a column that adds nothing: u below one keeps the target strictly below the sum.
    """
    target = (u.clamp(max=BELOW_ONE) * sums[:, -1])[:, None]
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
    return (sums <= (np.minimum(u, BELOW_ONE) * total)[:, None]).sum(-1), total


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


# --- A draw on a device
# Nothing is waited for between the logits and one copy of what was drawn; where masks are wanted, a second one of the kept tokens.


class PendingDraw:
    """A draw that the device may still be computing."""

    def __init__(
        self, logits: torch.Tensor, settings: Settings, wanted: DrawDetails, candidates: int = CANDIDATES
    ) -> None:
        """`wanted`: no most probable tokens."""
        self._filters, self._wanted, self._vocabulary = settings.filters(), wanted, logits.shape[1]
        on = self._filters.on()
        self._whole, self._some = np.flatnonzero(~on), np.flatnonzero(on)
        greedy, u = settings.temperature == 0, uniforms(settings.seed, settings.counter)
        some = self._filters.at(self._some)
        with np.errstate(divide="ignore"):
            columns = some.top_k, some.top_p, some.temperature * np.log(some.min_p), some.temperature, u[self._some]
        there, whole, at, *own = _columns_there(
            self._filters, greedy, u, logits.device, [self._whole, self._some, *columns]
        )
        scan = _scan(logits, self._filters, greedy, there)
        drawn = _draw_whole(logits, scan, whole, there)
        self.tokens = torch.zeros(len(on), dtype=torch.int64, device=logits.device)
        """[R] int64 on the device."""
        self.tokens[whole] = drawn[0].long()
        self._filtered = (logits[at], scan.peak[at], scan.total[at], FilterColumns(*own)) if len(self._some) else None
        self._kept: KeptRows | None = None
        parts = [scan.summary(), drawn]
        if self._filtered:
            self._kept = kept = draw_filtered(*self._filtered, most=candidates)
            self.tokens[at] = kept.tokens
            found = (kept.tokens, kept.chosen, kept.norm, kept.counts, kept.short)
            parts.append(torch.stack([column.double() for column in found]))
        self._shapes = [part.shape for part in parts]
        self._copied = Copied(torch.cat([part.flatten() for part in parts]))
        masked = self._kept is not None and wanted.masks.any()
        self._ids = Copied(self._kept.ids.int()) if masked and self._kept else None

    def result(self) -> tuple[Drawn, bool]:
        """Waits for the draw. Returns it, and whether `tokens` are its tokens: where filters kept more than was looked at, they are not."""
        numbers = _split(self._copied.array(), self._shapes)
        (peak, total), (drawn, chosen) = numbers[0], numbers[1]
        rows, counts = len(peak), np.zeros(len(peak), np.int64)
        tokens, picked, norm = np.zeros(rows, np.int64), np.zeros(rows), np.zeros(rows)
        tokens[self._whole], picked[self._whole], norm[self._whole] = drawn, chosen, total[self._whole]
        lists: dict[int, np.ndarray] = {}
        short = np.zeros(0, np.int64)
        if self._kept is not None:
            at = self._some
            tokens[at], picked[at], norm[at], counts[at], is_short = numbers[2]
            short = np.flatnonzero(is_short)
            for row, (token, logit, weight, ids) in self._again(short).items():
                tokens[row], picked[row], norm[row], counts[row], lists[row] = token, logit, weight, len(ids), ids
        _, logprobs = _logprobs(picked, peak, norm, self._filters.temperature)
        mask = self._mask(counts, lists, np.isfinite(peak)) if self._wanted.masks.any() else None
        return Drawn(tokens=tokens, logprobs=logprobs, finite=np.isfinite(peak), mask=mask), not len(short)

    def _again(self, short: np.ndarray) -> dict[int, tuple[int, float, float, np.ndarray]]:
        """Draws from all logits of those of the filtered rows that are `short`."""
        if not len(short):
            return {}
        assert self._filtered is not None
        x, peak, total, filters = self._filtered
        index = uploaded(short, x.device)
        kept = draw_filtered(
            x[index], peak[index], total[index], FilterColumns(*(c[index] for c in filters)), self._vocabulary
        )
        values = [part.cpu().numpy() for part in (kept.tokens, kept.chosen, kept.norm, kept.counts, kept.ids)]
        return {
            int(self._some[place]): (int(token), float(logit), float(weight), ids[:count])
            for place, token, logit, weight, count, ids in zip(short.tolist(), *values, strict=True)
        }

    def _mask(self, counts: np.ndarray, lists: dict[int, np.ndarray], finite: np.ndarray) -> Mask:
        """`counts` [R]: tokens that filters kept; `lists`: those of rows that were drawn again."""
        left = self._vocabulary if self._wanted.left is None else self._wanted.left
        told = self._wanted.masks & self._filters.on() & (counts < left) & finite
        places = dict(zip(self._some.tolist(), range(len(self._some)), strict=True))
        ids = self._ids.array() if self._ids else None
        parts = [np.zeros(0, np.int32)]
        for row in np.flatnonzero(told).tolist():
            assert ids is not None
            parts.append(lists[row] if row in lists else ids[places[row], : counts[row]])
        sizes = np.where(told, counts, 0)
        return Mask(np.concatenate(parts).astype(np.int32), np.concatenate([[0], np.cumsum(sizes)]))


def _split(numbers: np.ndarray, shapes: Sequence[torch.Size]) -> list[np.ndarray]:
    ends = np.cumsum([shape.numel() for shape in shapes])[:-1]
    return [part.reshape(shape) for part, shape in zip(np.split(numbers, ends), shapes, strict=True)]


# --- Who draws: the runner if it can, the sampler otherwise.


def draw(forward: ForwardOutput, settings: Settings, places: np.ndarray | None, wanted: DrawDetails) -> Drawn:
    """`places` [R]: where the rows are among the logits, None for all in order."""
    if forward.draw is not None:
        return forward.draw(settings, places, wanted)
    logits = forward.logits if places is None else forward.logits[uploaded(places, forward.logits.device)]
    if logits.device.type != "cpu" and not wanted.tops.any():
        return PendingDraw(logits, settings, wanted).result()[0]
    masks = wanted.masks if wanted.masks.any() else None
    return sample(logits, settings, masks, int(wanted.tops.max(initial=0)), wanted.left)


def score(forward: ForwardOutput, rows: np.ndarray, tokens: np.ndarray, top: int = 0) -> RowScores:
    """Log-probs at temperature 1 of one given token for each of these rows [n] of the logits, and of the `top` most probable ones."""
    if forward.score is not None:
        return forward.score(rows, tokens, top)
    return token_logprobs(forward.logits[uploaded(rows, forward.logits.device)], tokens, top)
