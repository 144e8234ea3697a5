"""Who draws the tokens of a pass, the runner or the sampler: each row gets its own random number either way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.engine.native.forward_pass import ForwardOutput
from headrace.engine.native.sampler import Settings, draw, sample, uniforms

VOCABULARY = 50


class DrawingRunner:
    """A runner's own draws over logits: an inverse CDF in the order of the vocabulary, as the sampler's is."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits.double().numpy()
        self.rows: list[int] = []

    def __call__(
        self, temperature: np.ndarray, u: np.ndarray, places: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        at = np.arange(len(u)) if places is None else places
        self.rows += at.tolist()
        x = self._logits[at] / temperature[:, None]
        p = np.exp(x - x.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        tokens = np.array([np.searchsorted(row.cumsum(), one, side="right") for row, one in zip(p, u, strict=True)])
        return tokens, np.log(p[np.arange(len(u)), tokens])


def settings_of(rng: np.random.Generator, rows: int) -> Settings:
    return Settings(
        temperature=rng.choice([0.7, 1.0, 1.5], rows),
        top_k=rng.choice([0, 0, 3], rows),
        top_p=rng.choice([1.0, 1.0, 0.8], rows),
        min_p=np.zeros(rows),
        seed=rng.integers(0, 1 << 63, rows, dtype=np.uint64),
        counter=rng.integers(0, 4000, rows),
    )


@pytest.mark.parametrize("case", range(20))
def test_a_row_gets_the_same_token_whoever_draws_it(case: int) -> None:
    """Where rows lie among others (`places`), and what their neighbours ask for, is part of it."""
    rng = np.random.default_rng(case)
    total, rows = 9, int(rng.integers(1, 9))
    logits = torch.from_numpy(rng.normal(0, 2, (total, VOCABULARY))).float()
    places = None if rows == total else rng.permutation(total)[:rows]
    settings = settings_of(rng, rows)
    masks, tops = rng.random(rows) < 0.3, np.where(rng.random(rows) < 0.3, 2, 0)
    runner = DrawingRunner(logits)
    alone = draw(ForwardOutput(logits), settings, places, masks, tops)
    both = draw(ForwardOutput(logits, draw=runner), settings, places, masks, tops)
    chosen = logits if places is None else logits[torch.from_numpy(places)]
    expected = sample(chosen, settings)
    assert both.tokens.tolist() == alone.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(both.logprobs, expected.logprobs, atol=1e-5)
    plain = ~(masks | (tops > 0) | settings.filters().on())
    assert sorted(runner.rows) == sorted((np.arange(rows) if places is None else places)[plain].tolist())


@pytest.mark.parametrize("by_runner", [True, False])
def test_every_token_of_a_request_has_a_number_of_its_own(by_runner: bool) -> None:
    """The tokens of one request, drawn one after the other from one distribution, have its frequencies."""
    count = 2000
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(0)).expand(count, -1)
    zeros = np.zeros(count)
    settings = Settings(
        temperature=zeros + 1,
        top_k=zeros.astype(np.int64),
        top_p=zeros + 1,
        min_p=zeros,
        seed=zeros.astype(np.uint64) + 7,
        counter=np.arange(count),
    )
    forward = ForwardOutput(logits, draw=DrawingRunner(logits) if by_runner else None)
    drawn = draw(forward, settings, None, zeros > 0, zeros.astype(np.int64))
    found = np.bincount(drawn.tokens, minlength=VOCABULARY) / count
    assert abs(found - logits[0].softmax(-1).numpy()).max() < 0.03
    assert len(np.unique(uniforms(settings.seed, settings.counter))) == count
