"""Settings of draws, logits, and the distribution that a draw is from, written for one row in float64 and without shortcuts."""

from __future__ import annotations

import numpy as np
import torch

from headrace.engine.native.draws import Settings


def same(rows: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, counter=0) -> Settings:
    """Settings with one value for all rows, or an array."""

    def column(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), rows).copy()

    return Settings(
        temperature=column(temperature, np.float64),
        top_k=column(top_k, np.int64),
        top_p=column(top_p, np.float64),
        min_p=column(min_p, np.float64),
        seed=column(seed, np.uint64),
        counter=column(counter, np.int64),
    )


def reference(logits: np.ndarray, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """[V] the distribution sampled from, written for one row and without shortcuts."""
    if temperature == 0:
        temperature, top_k, top_p, min_p = 1.0, 0, 1.0, 0.0
    x = logits.astype(np.float64) / temperature

    def normalised(x):
        p = np.exp(x - x.max())
        return p / p.sum()

    if top_k:
        kth = np.sort(x)[::-1][min(top_k, len(x)) - 1]
        x = np.where(x < kth, -np.inf, x)
    if top_p < 1:
        order = np.argsort(-x, kind="stable")
        p = normalised(x)
        mass, last = 0.0, order[0]
        for last in order:
            mass += p[last]
            if mass >= top_p:
                break
        x = np.where(x < x[last], -np.inf, x)
    if min_p:
        p = normalised(x)
        x = np.where(p < min_p * p.max(), -np.inf, x)
    return normalised(x)


def random_logits(rows: int, vocabulary: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread
