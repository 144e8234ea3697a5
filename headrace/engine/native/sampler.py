"""Draws tokens. Every filter is a threshold on the logits, and every draw an inverse CDF in two levels.

Logits [R, V] of rows with different settings go through one path:

    x = logits / temperature  ->  x < threshold becomes -inf  ->  p = softmax(x)  ->  draw  ->  log p[token]

so the log-prob returned is that of the distribution really sampled from. The random number of a row depends on its seed
and on how many tokens its request has sampled, on nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

BLOCK = 256
"""Vocabulary entries whose probabilities are summed before one block is searched. An exponential race would need a random
number and a logarithm per entry: 45 ms against 12 for 64 rows of 49,152 on two cores."""

_BELOW_ONE = 1.0 - 2.0**-52


@dataclass(frozen=True)
class Settings:
    """One value per row: float64 but for `top_k` (int64, 0 = off), `seed` (uint64) and `counter` (int64)."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seed: np.ndarray
    counter: np.ndarray


@dataclass(frozen=True)
class Drawn:
    """`finite` is False for rows whose logits held NaN or infinity; their token and log-prob mean nothing."""

    tokens: np.ndarray
    logprobs: np.ndarray
    finite: np.ndarray


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


def sample(logits: torch.Tensor, settings: Settings) -> Drawn:
    """One token per row of `logits` [R, V]."""
    x = logits.float()
    if x is logits:
        x = x.clone()
    greedy = settings.temperature == 0
    temperature = np.where(greedy, 1.0, settings.temperature)
    if (temperature != 1.0).any():
        x.div_(torch.from_numpy(temperature).to(x)[:, None])
    _truncate(x, settings, greedy)
    p = torch.softmax(x, dim=-1)
    tokens = _draw(p, torch.from_numpy(uniforms(settings.seed, settings.counter)).to(x.device))
    if greedy.any():
        rows = torch.from_numpy(np.flatnonzero(greedy)).to(x.device)
        tokens[rows] = x[rows].argmax(-1)
    chosen = p.gather(1, tokens[:, None])[:, 0]
    # NaN or +inf in a row makes all its probabilities NaN: one column is enough to see it.
    found = torch.stack([tokens.double(), chosen.double().log(), p[:, 0].double()]).cpu().numpy()
    return Drawn(found[0].astype(np.int64), found[1], np.isfinite(found[1]) & np.isfinite(found[2]))


def _truncate(x: torch.Tensor, settings: Settings, greedy: np.ndarray) -> None:
    """Sets what the filters remove to -inf, in place. Ties with the last token that is kept are kept."""
    cut = ~greedy & ((settings.top_k > 0) | (settings.top_p < 1) | (settings.min_p > 0))
    if not cut.any():
        return
    rows = torch.from_numpy(np.flatnonzero(cut)).to(x.device)
    part = x if cut.all() else x[rows]
    threshold = thresholds(part, settings.top_k[cut], settings.top_p[cut], settings.min_p[cut])
    part = part.masked_fill_(part < threshold[:, None], -torch.inf)
    if part is not x:
        x[rows] = part


def thresholds(x: torch.Tensor, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray) -> torch.Tensor:
    """[R] the smallest logit that top-k, then top-p of what is left, then min-p of what is left keep."""
    keep = torch.full(x.shape[:1], -torch.inf, device=x.device)
    if (top_k > 0).any():
        keep = _kth_largest(x, np.where(top_k > 0, np.minimum(top_k, x.shape[1]), x.shape[1]))
    if (top_p < 1).any():
        rows = torch.from_numpy(np.flatnonzero(top_p < 1)).to(x.device)
        left = x[rows]
        left.masked_fill_(left < keep[rows, None], -torch.inf)
        keep[rows] = torch.maximum(keep[rows], _nucleus(left, torch.from_numpy(top_p[top_p < 1]).to(x.device)))
    if (min_p > 0).any():
        # p >= min_p * max(p) says the same of unnormalised log-probs: x >= max(x) + log(min_p).
        with np.errstate(divide="ignore"):
            floor = torch.from_numpy(np.log(min_p)).to(x)
        keep = torch.maximum(keep, x.amax(-1) + floor)
    return keep


def _kth_largest(x: torch.Tensor, k: np.ndarray) -> torch.Tensor:
    """[R] the k-th largest entry of each row; -inf where k is the whole vocabulary."""
    vocabulary = x.shape[1]
    cut = k < vocabulary
    kth = torch.full(x.shape[:1], -torch.inf, device=x.device)
    if cut.any():
        rows = torch.from_numpy(np.flatnonzero(cut)).to(x.device)
        top = x[rows].topk(int(k[cut].max()), dim=-1).values
        kth[rows] = top.gather(1, torch.from_numpy(k[cut] - 1).to(x.device)[:, None])[:, 0]
    return kth


def _nucleus(x: torch.Tensor, top_p: torch.Tensor, first: int = 512) -> torch.Tensor:
    """[R] the logit of the last token of the smallest set whose probabilities sum to `top_p` or more.

    Looks at the `first` largest entries and sorts the whole vocabulary only of the rows that need more.
    """
    size = min(first, x.shape[1])
    top = x.topk(size, dim=-1).values
    mass = (top.double() - torch.logsumexp(x, -1, keepdim=True).double()).exp().cumsum(-1)
    reached = mass >= top_p[:, None]
    last = reached.to(torch.uint8).argmax(-1)
    enough = reached.any(-1)
    if size == x.shape[1]:
        last = torch.where(enough, last, size - 1)  # rounding kept the sum below top_p: everything is kept
        enough = torch.ones_like(enough)
    threshold = top.gather(1, last[:, None])[:, 0]
    if not bool(enough.all()):
        threshold[~enough] = _nucleus(x[~enough], top_p[~enough], x.shape[1])
    return threshold


def _draw(p: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """[R] the entry in which u [R] falls when the probabilities p [R, V] are laid end to end."""
    rows, vocabulary = p.shape
    blocks = -(-vocabulary // BLOCK)
    if vocabulary % BLOCK:
        p = torch.nn.functional.pad(p, (0, blocks * BLOCK - vocabulary))
    p = p.view(rows, blocks, BLOCK)
    block, inside = _search(p.sum(-1), u)
    entry, _ = _search(p[torch.arange(rows, device=p.device), block], inside)
    return (block * BLOCK + entry).clamp_(max=vocabulary - 1)  # rows of NaN end anywhere


def _search(weights: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[R] the column of weights [R, C] in which the share u of their sum falls, and how far into it, from 0 to 1.

    Never a column of weight zero: u below one keeps the target strictly below the sum.
    """
    sums = weights.double().cumsum(-1)
    target = u.clamp(max=_BELOW_ONE) * sums[:, -1]
    column = torch.searchsorted(sums, target[:, None], right=True)
    column.clamp_(max=weights.shape[1] - 1)  # rows of NaN again
    share = weights.gather(1, column).double()
    before = sums.gather(1, column) - share
    inside = (target[:, None] - before) / share
    return column[:, 0], inside.clamp_(0.0, 1.0)[:, 0]
