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
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch

from headrace.engine.native.forward_pass import ForwardOutput
from headrace.native.memory import uploaded

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

LOWEST = float(torch.finfo(torch.float32).min)
"""A cut here lets everything through but tokens of logit -inf, which the model itself forbids."""

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


@dataclass(frozen=True)
class Filters:
    """One value per row. A row of top_k 0, top_p 1 and min_p 0 keeps everything."""

    temperature: np.ndarray
    """[R] float64 > 0: top-p and min-p are about probabilities at this temperature."""
    top_k: np.ndarray
    """[R] int64"""
    top_p: np.ndarray
    """[R] float64"""
    min_p: np.ndarray
    """[R] float64"""

    def on(self) -> np.ndarray:
        return (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)

    def needs_total(self) -> np.ndarray:
        """[R] whether the sum over the whole vocabulary matters: not where the tokens kept say it all."""
        return ~self.on() | ((self.top_k == 0) & (self.top_p < 1))

    def at(self, rows: np.ndarray | slice) -> Filters:
        return Filters(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


def cuts(maxima: torch.Tensor, total: torch.Tensor, filters: Filters, at_least: int) -> np.ndarray:
    """[R] float32: a logit not above that of the last token kept; in rows without filters, of the `at_least` most probable ones.

    maxima [R, V / GROUP] float32, those of groups of tokens. total [R] float64, the sum of exp((x - max) / temperature), which
    only rows that `needs_total` look at. Not a number where the maximum is not finite.

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


# --- Draws tokens
# By the runner if it can and only the token is wanted, by the sampler otherwise. A runner that shares its arithmetic with a trainer says
# what log-probs tokens with recorded masks have, because a trainer can repeat its sums.
#
# The choice is made for each row, because the two add up in different orders, and the tokens of a request must not depend on
# the settings of other requests.


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
