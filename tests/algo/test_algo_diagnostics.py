"""Sampler against trainer by lag: statistics against numpy, and that microbatches and ranks add up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.algo.diagnostics import Diagnostics
from headrace.algo.policy.tokens import TokenLoss, Tokens


def step(count: int, seed: int) -> tuple[Tokens, TokenLoss, torch.Tensor]:
    rng = np.random.default_rng(seed)
    sampled = -rng.exponential(1, count)
    lp = torch.tensor(sampled + rng.normal(0, 0.1, count) * (rng.random(count) < 0.9))
    lag, apart = torch.tensor(rng.integers(0, 6, count)).float(), torch.tensor(rng.choice([0, 0, 0, 0, 0, 1, 2], count))
    tokens = Tokens(lp, torch.tensor(sampled), torch.zeros(count), torch.zeros(count, dtype=torch.long), lag)
    masked = {"veto": torch.tensor(rng.random(count) < 0.3)}
    return tokens, TokenLoss(torch.zeros(count), torch.tensor(rng.random(count) < 0.4), masked), apart


def part(
    tokens: Tokens, result: TokenLoss, apart: torch.Tensor, where: slice
) -> tuple[Tokens, TokenLoss, torch.Tensor]:
    some = tokens._replace(**{name: getattr(tokens, name)[where] for name in Tokens._fields[:5]})
    masked = {name: mask[where] for name, mask in result.masked.items()}
    return some, TokenLoss(result.loss[where], result.clipped[where], masked), apart[where]


def test_statistics_of_every_bucket_against_numpy():
    tokens, result, apart = step(4000, 0)
    diagnostics = Diagnostics()
    diagnostics.add(tokens, result, apart)
    report = {one.name: one for one in diagnostics.report()}
    assert list(report) == ["0", "1", "2", "3+", "swapped", "experience"]
    lag, gap, others = tokens.lag.numpy(), (tokens.logprob - tokens.sampled).numpy(), apart.numpy()
    chosen = {"0": lag == 0, "1": lag == 1, "2": lag == 2, "3+": lag >= 3}
    for name, where in [
        *((n, w & (others == 0)) for n, w in chosen.items()),
        ("swapped", others == 1),
        ("experience", others == 2),
    ]:
        one, r = report[name], np.exp(gap[where])
        assert one.tokens == where.sum()
        assert one.ratio == pytest.approx(r.mean()) and one.chi2 == pytest.approx(((r - 1) ** 2).mean())
        assert one.ess == pytest.approx(r.sum() ** 2 / (len(r) * (r**2).sum()))
        assert one.kl == pytest.approx((r - np.log(r) - 1).mean())
        assert one.clipped == pytest.approx(result.clipped.numpy()[where].mean())
        assert one.masked == {"veto": pytest.approx(result.masked["veto"].numpy()[where].mean())}
        for quantile, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            exact = np.quantile(np.abs(gap[where]), share, method="inverted_cdf")
            assert one.gaps[quantile] == pytest.approx(exact, rel=0.036)
        assert one.gaps["max"] == np.abs(gap[where]).max()


@given(st.integers(1, 40), st.integers(0, 1000), st.integers(0, 40))
@settings(max_examples=40)
def test_microbatches_and_ranks_add_up(count, seed, cut):
    whole, left, right = Diagnostics(), Diagnostics(), Diagnostics()
    everything = step(count, seed)
    whole.add(*everything)
    left.add(*part(*everything, slice(cut)))
    right.add(*part(*everything, slice(cut, None)))
    given: list[torch.Tensor] = []
    right.combine(lambda values: given.append(values) or values, lambda values: given.append(values) or values)
    left.combine(lambda values: values + given[0], lambda values: torch.maximum(values, given[1]))
    torch.testing.assert_close(left.sums, whole.sums)
    assert torch.equal(left.histogram, whole.histogram) and torch.equal(left.peak, whole.peak)
    assert [one.name for one in left.report()] == [one.name for one in whole.report()]


def test_on_policy_nothing_is_off():
    zeros = torch.zeros(5)
    diagnostics = Diagnostics()
    diagnostics.add(
        Tokens(zeros, zeros, zeros, zeros.long(), zeros), TokenLoss(zeros, zeros.bool()), zeros.to(torch.int8)
    )
    (one,) = diagnostics.report()
    assert (one.name, one.tokens, one.ratio, one.kl, one.ess, one.chi2, one.clipped) == (
        "0",
        5,
        1.0,
        0.0,
        1.0,
        0.0,
        0.0,
    )
    assert one.masked == {} and set(one.gaps.values()) == {0.0}


def test_no_tokens_no_buckets_and_absurd_gaps_stay_in_the_last_bin():
    diagnostics = Diagnostics()
    assert diagnostics.report() == ()
    zeros = torch.zeros(2)
    tokens = Tokens(torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0]), zeros, zeros.long(), zeros)
    diagnostics.add(tokens, TokenLoss(zeros, zeros.bool()), zeros.to(torch.int8))
    (one,) = diagnostics.report()
    assert one.gaps["max"] == 500.0 and one.gaps["p50"] == pytest.approx(40, rel=0.036)
