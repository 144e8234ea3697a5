"""Every policy loss against its formula: values in float64 numpy, gradients by finite differences of the same formula.

A reference is written from the paper, token by token: `lp` are the log-probs that carry gradients, `sg` the same numbers where
the formula stops the gradient. Differences are taken with `sg` held fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from headrace.algo.policy.clipped import ASPO, BAPO, CEGPPO, DCPO, GMPO, GSPO, M2PO, SRFT, GSPOToken, PPOClip
from headrace.algo.policy.loss import Loss, settings_of
from headrace.algo.policy.pairs import KTO
from headrace.algo.policy.region import DPPOKL, DPPOTV, IPO, SAPO, DPPOTVQuadratic, Kimi, KLCov
from headrace.algo.policy.tokens import TokenLoss, Tokens, k3, ratio_of, sequence_mean, sequence_sum
from headrace.algo.policy.weighted import CISPO, TOPR, VESPO, CrossEntropy, Importance, Reinforce, TOPRToken
from headrace.algo.recipes import LOSSES, RECIPES, REFERENCES, Recipe

Array = np.ndarray
OF_TOKENS = sorted(name for name, loss in LOSSES.items() if not loss.pairs)
SEQUENCE = np.array([0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 3, 3])


def members(seq: Array, t: int) -> Array:
    return np.flatnonzero(seq == seq[t])


def ppo(lp: float, old: float, adv: float, low: float, high: float, dual: float = 0.0) -> float:
    """By cases: a good token stops gaining above 1 + high, a bad one stops losing below 1 - low and, dual, above `dual`."""
    r = math.exp(lp - old)
    if adv > 0:
        return -adv * min(r, 1 + high)
    bad = -adv * max(r, 1 - low)
    return min(bad, -adv * dual) if dual else bad


def ref_ppo(lp, sg, old, adv, seq, c):
    return [ppo(*x, c["clip_low"], c["clip_high"], c["dual_clip"]) for x in zip(lp, old, adv, strict=True)]


ENTROPY = np.random.default_rng(5).uniform(0.1, 3.0, len(SEQUENCE))
"""Of the policy at each token, in nats."""


def ref_srft(lp, sg, old, adv, seq, c):
    weight = [c["good_weight"] * math.exp(h) if a > 0 else 1.0 for h, a in zip(ENTROPY, adv, strict=True)]
    return [w * loss for w, loss in zip(weight, ref_ppo(lp, sg, old, adv, seq, c), strict=True)]


def ref_importance(lp, sg, old, adv, seq, c):
    return [-math.exp(a - b) * x for a, b, x in zip(lp, old, adv, strict=True)]


def ref_reinforce(lp, sg, old, adv, seq, c):
    return [-min(math.exp(s - o), c["cap"]) * a * x for x, s, o, a in zip(lp, sg, old, adv, strict=True)]


def ref_gspo(lp, sg, old, adv, seq, c):
    means = [np.mean([lp[u] - old[u] for u in members(seq, t)]) for t in range(len(lp))]
    return [ppo(mean, 0.0, a, c["clip_low"], c["clip_high"]) for mean, a in zip(means, adv, strict=True)]


def ref_gspo_token(lp, sg, old, adv, seq, c):
    means = [np.mean([sg[u] - old[u] for u in members(seq, t)]) for t in range(len(lp))]
    return [ppo(means[t] + lp[t] - sg[t], 0.0, adv[t], c["clip_low"], c["clip_high"]) for t in range(len(lp))]


def ref_cispo(lp, sg, old, adv, seq, c):
    weights = [min(max(math.exp(s - o), 1 - c["clip_low"]), 1 + c["clip_high"]) for s, o in zip(sg, old, strict=True)]
    return [-w * a * x for w, a, x in zip(weights, adv, lp, strict=True)]


def ref_sapo(lp, sg, old, adv, seq, c):
    def gate(r: float, a: float) -> float:
        tau = c["tau"] if a > 0 else c["tau_negative"]
        return 4 / tau / (1 + math.exp(-tau * (r - 1)))

    return [-gate(math.exp(x - o), a) * a for x, o, a in zip(lp, old, adv, strict=True)]


def too_far(sg: float, old: float, adv: float, delta: float) -> bool:
    moved = math.exp(sg) - math.exp(old)
    return moved > delta if adv > 0 else moved < -delta


def ref_dppo_tv(lp, sg, old, adv, seq, c):
    return [
        0.0 if too_far(s, o, a, c["delta"]) else -a * min(math.exp(s - o), c["cap"]) * x
        for x, s, o, a in zip(lp, sg, old, adv, strict=True)
    ]


def binary_divergence(old: float, now: float) -> float:
    q, p = math.exp(old), math.exp(now)
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def ref_dppo_kl(lp, sg, old, adv, seq, c):
    def left(s: float, o: float, a: float) -> bool:
        return (s > o if a > 0 else s < o) and binary_divergence(o, s) > c["delta"]

    return [
        0.0 if left(s, o, a) else -a * min(math.exp(s - o), c["cap"]) * x
        for x, s, o, a in zip(lp, sg, old, adv, strict=True)
    ]


def ref_dppo_tv_quadratic(lp, sg, old, adv, seq, c):
    return [
        (0.0 if too_far(s, o, a, c["delta"]) else -a * math.exp(x - o)) + c["penalty"] * (x - o) ** 2
        for x, s, o, a in zip(lp, sg, old, adv, strict=True)
    ]


def ref_ipo(lp, sg, old, adv, seq, c):
    return [
        (0.0 if abs(math.exp(s) - math.exp(o)) > c["delta"] else -a * math.exp(x - o)) + c["penalty"] * (x - o) ** 2
        for x, s, o, a in zip(lp, sg, old, adv, strict=True)
    ]


def ref_kimi(lp, sg, old, adv, seq, c):
    return [-a * x + c["tau"] / 2 * (x - o) ** 2 for x, o, a in zip(lp, old, adv, strict=True)]


def ref_topr(lp, sg, old, adv, seq, c):
    ratios = [math.exp(sum(sg[u] - old[u] for u in members(seq, t))) for t in range(len(lp))]
    return [-a * x if a > 0 else -min(r, 1.0) * a * x for x, a, r in zip(lp, adv, ratios, strict=True)]


def ref_topr_token(lp, sg, old, adv, seq, c):
    return [
        -a * x if a > 0 else -min(math.exp(s - o), 1.0) * a * x for x, s, o, a in zip(lp, sg, old, adv, strict=True)
    ]


def ref_gmpo(lp, sg, old, adv, seq, c):
    def inside(t: int) -> float:
        return min(lp[t] - old[t], c["clip_high"]) if adv[t] > 0 else max(lp[t] - old[t], -c["clip_low"])

    products = [np.prod([math.exp(inside(u)) for u in members(seq, t)]) for t in range(len(lp))]
    return [-a * p ** (1 / len(members(seq, t))) for t, (a, p) in enumerate(zip(adv, products, strict=True))]


def ref_m2po(lp, sg, old, adv, seq, c):
    """The largest of the harmful distances, or 0, whose cap keeps their mean square below τ; by trying all of them."""
    gaps = [s - o for s, o, a in zip(sg, old, adv, strict=True) if (s > o and a > 0) or (s < o and a < 0)]
    mean = lambda cap: np.mean([min(gap**2, cap**2) for gap in gaps]) if gaps else 0.0  # noqa: E731
    tried = [0.0, *map(abs, gaps)]
    bound = 100.0 if mean(100.0) <= c["tau"] else max(cap for cap in tried if mean(cap) < c["tau"])
    low, high = min(math.exp(-bound), 1 - c["clip_low"]), max(math.exp(bound), 1 + c["clip_high"])
    return [ppo(x, o, a, 1 - low, high - 1) for x, o, a in zip(lp, old, adv, strict=True)]


def ref_ce_gppo(lp, sg, old, adv, seq, c):
    def one_of(x: float, s: float, o: float, a: float) -> float:
        r, now = math.exp(x - o), math.exp(s - o)
        if a < 0 and now < 1 - c["clip_low"]:
            return -c["beyond_low"] * (1 - c["clip_low"]) / now * r * a
        if a > 0 and now > 1 + c["clip_high"]:
            return -c["beyond_high"] * (1 + c["clip_high"]) / now * r * a
        return -r * a

    return [one_of(*token) for token in zip(lp, sg, old, adv, strict=True)]


def ref_aspo(lp, sg, old, adv, seq, c):
    """Whose values are those of the authors' gradient: theirs is -A·(r/sg(r))·sg(1/r) for a good token."""

    def one_of(x: float, s: float, o: float, a: float) -> float:
        now = math.exp(s - o)
        if a > 0:
            return 0.0 if now > 1 + c["clip_high"] else -a * min(1 / now, c["dual_clip"]) * x
        return 0.0 if now < 1 - c["clip_low"] else -a * min(now, c["dual_clip"]) * x

    return [one_of(*token) for token in zip(lp, sg, old, adv, strict=True)]


def ref_bapo(lp, sg, old, adv, seq, c):
    """The first of all pairs of bounds, in the order in which the authors' code tries them, that gives good tokens their share; or the last."""

    def share(low: float, high: float) -> float:
        good = sum(a * min(math.exp(s - o), high) for s, o, a in zip(sg, old, adv, strict=True) if a > 0)
        bad = sum(-a * max(math.exp(s - o), low) for s, o, a in zip(sg, old, adv, strict=True) if a < 0)
        return good / (good + bad)

    begin, end = 1 - c["clip_low"], 1 - c["clip_low_least"]
    lows = [*np.arange(begin, end, 0.02), end]
    begin, top = 1 + c["clip_high"], 1 + c["clip_high_most"]
    highs = [*np.arange(begin, top, 0.05), top]
    tried = [*((low, highs[0]) for low in lows), *((lows[-1], high) for high in highs)]
    low, high = next((pair for pair in tried if share(*pair) >= c["good_share"]), tried[-1])
    return [ppo(x, o, a, 1 - low, high - 1) for x, o, a in zip(lp, old, adv, strict=True)]


def ref_dcpo(lp, sg, old, adv, seq, c):
    """The bounds are the roots of |(p/q - 1)·p| = ε in p/q, by which the paper defines them."""

    def one_of(x: float, o: float, a: float) -> float:
        q = math.exp(o)
        low = max(np.roots([1, -1, c["clip_low"] / q]).real)
        high = min(max(np.roots([1, -1, -c["clip_high"] / q]).real), c["cap"])
        return ppo(x, o, a, 1 - low, high - 1, c["cap"])

    return [one_of(*token) for token in zip(lp, old, adv, strict=True)]


def ref_vespo(lp, sg, old, adv, seq, c):
    def weight(t: int) -> float:
        w = math.exp(sum(sg[u] - old[u] for u in members(seq, t)))
        kind = "" if adv[t] >= 0 else "_negative"
        power, rate = c[f"kernel_power{kind}"], c[f"kernel_rate{kind}"]
        return w**power * math.exp(rate * (1 - w))

    return [-weight(t) * a * x for t, (x, a) in enumerate(zip(lp, adv, strict=True))]


def ref_kto(lp, sg, old, adv, seq, c):
    """The reference has the log-probs `old`."""
    rollouts = {int(number): np.flatnonzero(seq == number) for number in np.unique(seq)}
    z = max(0.0, np.mean([sum(sg[places] - old[places]) for places in rollouts.values()]))

    def one_of(t: int) -> float:
        places = rollouts[int(seq[t])]
        gain = sum(lp[places] - old[places])
        if adv[t] > 0:
            return c["desirable_weight"] * (1 - 1 / (1 + math.exp(-c["pair_beta"] * (gain - z)))) / len(places)
        return c["undesirable_weight"] * (1 - 1 / (1 + math.exp(-c["pair_beta"] * (z - gain)))) / len(places)

    return [one_of(t) for t in range(len(lp))]


def ref_ce(lp, sg, old, adv, seq, c):
    return [-a * x for x, a in zip(lp, adv, strict=True)]


def ref_kl_cov(lp, sg, old, adv, seq, c):
    keep = np.arange(len(lp)) % 3 > 0
    return [
        -math.exp(x - o) * a + (0.0 if k else c["penalty"] * abs(x - o))
        for x, o, a, k in zip(lp, old, adv, keep, strict=True)
    ]


CASES: list[tuple[Loss, Callable[..., list[float]]]] = [  # constants such that both sides of every bound are met
    (PPOClip(clip_low=0.2, clip_high=0.28, dual_clip=1.3), ref_ppo),
    (SRFT(clip_low=0.2, clip_high=0.28, good_weight=0.3), ref_srft),
    (Importance(), ref_importance),
    (Reinforce(cap=1.2), ref_reinforce),
    (GSPO(clip_low=0.05, clip_high=0.04), ref_gspo),
    (GSPOToken(clip_low=0.05, clip_high=0.04), ref_gspo_token),
    (CISPO(clip_low=0.2, clip_high=0.3), ref_cispo),
    (SAPO(tau=1.0, tau_negative=1.05), ref_sapo),
    (DPPOTV(delta=0.05, cap=1.2), ref_dppo_tv),
    (DPPOKL(delta=0.03, cap=1.2), ref_dppo_kl),
    (DPPOTVQuadratic(delta=0.05, penalty=0.1), ref_dppo_tv_quadratic),
    (IPO(delta=0.05, penalty=0.1), ref_ipo),
    (Kimi(tau=0.3), ref_kimi),
    (TOPR(), ref_topr),
    (TOPRToken(), ref_topr_token),
    (M2PO(tau=1e-4, clip_low=0.2, clip_high=0.25), ref_m2po),
    (GMPO(clip_low=0.2, clip_high=0.3), ref_gmpo),
    (CEGPPO(clip_low=0.2, clip_high=0.28, beyond_low=0.5, beyond_high=0.8), ref_ce_gppo),
    (VESPO(), ref_vespo),
    (BAPO(clip_low=0.3, clip_low_least=0.11, clip_high_most=0.55, good_share=0.48), ref_bapo),
    (ASPO(clip_low=0.2, clip_high=0.28, dual_clip=1.3), ref_aspo),
    (DCPO(clip_low=0.05, clip_high=0.1, cap=1.4), ref_dcpo),
    (KLCov(penalty=0.7), ref_kl_cov),
    (CrossEntropy(), ref_ce),
    (KTO(pair_beta=0.7, desirable_weight=1.3, undesirable_weight=0.6), ref_kto),
]
BY_NAME = {loss.name: loss for loss, _ in CASES}


def run(loss: Loss, lp: Any, old: Array, adv: Array) -> TokenLoss:
    return loss(tokens_of(lp, old, adv), torch.tensor(old))


def numbers(seed: int, spread: float = 0.4) -> tuple[Array, Array, Array]:
    """Log-probs, those of the sampler, advantages; of tokens likely enough for probabilities to move."""
    rng = np.random.default_rng(seed)
    count = len(SEQUENCE)
    old = -rng.exponential(0.7, count) - 0.1
    lp = np.minimum(old + rng.normal(0, spread, count), -1e-3)
    return lp, old, rng.normal(0, 1, count)


def tokens_of(lp: Any, old: Array, adv: Array) -> Tokens:
    keep = torch.tensor(np.arange(len(adv)) % 3 > 0)
    lag = torch.zeros(len(adv))
    more = {"keep": keep, "reference": torch.tensor(old), "entropy": torch.tensor(ENTROPY)}
    return Tokens(lp, torch.tensor(old), torch.tensor(adv), torch.tensor(SEQUENCE), lag, **more)


def test_every_loss_has_a_reference():
    """Losses of pairs have theirs in `tests/algo/test_preferring.py`."""
    assert sorted(BY_NAME) == OF_TOKENS and len(CASES) == len(OF_TOKENS)


def without_reference(recipes: dict[str, Recipe]) -> list[str]:
    """Recipes that do not name what they were compared with, name a paper that they do not have, or whose loss has no formula here."""
    own = lambda recipe: recipe.loss.pairs or recipe.loss.name in BY_NAME  # noqa: E731
    named = lambda name, recipe: REFERENCES.get(name) and (recipe.papers or "paper" not in REFERENCES[name])  # noqa: E731
    return [name for name, recipe in recipes.items() if not (named(name, recipe) and own(recipe))]


def test_every_recipe_names_the_reference_it_was_compared_with():
    assert without_reference(RECIPES) == [] and REFERENCES.keys() == RECIPES.keys()
    assert without_reference({"new": RECIPES["grpo"], "ipo": RECIPES["ipo"]}) == ["new"]
    assert without_reference({"grpo": replace(RECIPES["grpo"], papers=())}) == ["grpo"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("loss", "reference"), CASES, ids=[loss.name for loss, _ in CASES])
def test_loss_and_gradient_against_the_formula(loss, reference, seed):
    lp, old, adv = numbers(seed)
    weight = np.random.default_rng(seed + 10).uniform(0.5, 1.5, len(lp))
    moving = torch.tensor(lp, requires_grad=True)
    out, constants = run(loss, moving, old, adv), loss.constants()
    np.testing.assert_allclose(out.loss.detach(), reference(lp, lp, old, adv, SEQUENCE, constants), rtol=1e-10)

    def weighted(values: Array) -> float:
        return float(np.dot(weight, reference(values, lp, old, adv, SEQUENCE, constants)))

    step = 1e-6 * np.eye(len(lp))
    expected = [(weighted(lp + e) - weighted(lp - e)) / 2e-6 for e in step]
    (grad,) = torch.autograd.grad((out.loss * torch.tensor(weight)).sum(), moving)
    np.testing.assert_allclose(grad, expected, rtol=1e-6, atol=1e-8)


def clips(name: str, lp: Array, old: Array, adv: Array) -> Array:
    return run(BY_NAME[name], torch.tensor(lp), old, adv).clipped.numpy()


def test_clipped_is_what_lost_its_gradient():
    """For the losses that cut the gradient off; the others report where a weight hit its bound."""
    for name in ("ppo_clip", "gspo_token", "dppo_tv", "dppo_kl"):
        lp, old, adv = numbers(1)
        moving = torch.tensor(lp, requires_grad=True)
        out = run(BY_NAME[name], moving, old, adv)
        (grad,) = torch.autograd.grad(out.loss.sum(), moving)
        assert out.clipped.any() and not out.clipped.all(), name
        assert torch.equal(grad == 0, out.clipped), name


def test_clipped_counts_weights_at_their_bound():
    lp, old, adv = numbers(2)
    ratio = np.exp(lp - old)
    assert clips("reinforce", lp, old, adv).tolist() == (ratio > 1.2).tolist()
    assert clips("cispo", lp, old, adv).tolist() == ((ratio > 1.3) | (ratio < 0.8)).tolist()
    np.testing.assert_array_equal(clips("gmpo", lp, old, adv), np.where(adv > 0, lp - old > 0.3, lp - old < -0.2))
    assert not clips("sapo", lp, old, adv).any()


def test_dual_clip_bounds_the_loss_of_a_bad_token():
    tokens = tokens_of(torch.zeros(13).double(), np.full(13, -3.0), np.full(13, -2.0))
    plain, dual = PPOClip(), PPOClip(dual_clip=3.0)
    assert plain(tokens, tokens.sampled).loss[0].item() == pytest.approx(2 * math.exp(3))
    assert dual(tokens, tokens.sampled).loss[0].item() == pytest.approx(6.0)
    good = tokens._replace(advantage=-tokens.advantage)
    assert dual(good, good.sampled).loss[0].item() == pytest.approx(-2.4)


def test_cispo_of_the_paper_clamps_above_five_and_not_below():
    loss = RECIPES["cispo"].loss
    tokens = tokens_of(
        torch.tensor([-0.1, -9.0] + [-1.0] * 11).double(), np.array([-9.0, -0.1] + [-1.0] * 11), np.ones(13)
    )
    expected = [5 * 0.1, math.exp(-8.9) * 9.0, 1.0]
    assert loss(tokens, tokens.sampled).loss[:3].tolist() == pytest.approx(expected)


def test_both_gspo_forms_have_one_value_and_spread_the_gradient_differently():
    lp, old, adv = numbers(4, spread=0.01)  # inside the bounds
    for advantage, alike in ((np.where(SEQUENCE % 2, 1.0, -1.0), True), (adv, False)):
        grads = []
        for loss in (GSPO(clip_low=0.5, clip_high=0.5), GSPOToken(clip_low=0.5, clip_high=0.5)):
            moving = torch.tensor(lp, requires_grad=True)
            out = run(loss, moving, old, advantage)
            grads.append(torch.autograd.grad(out.loss.sum(), moving)[0])
        assert torch.allclose(grads[0], grads[1]) == alike  # one advantage a sequence makes them the same


def test_topr_goes_by_the_trajectory_and_topr_token_by_the_token():
    lp, old = np.full(13, -1.0), np.full(13, -1.0)
    lp[0], lp[1] = -2.0, -0.5  # product exp(-0.5), tokens exp(-1) and exp(0.5)
    tokens = tokens_of(torch.tensor(lp), old, np.full(13, -1.0))
    trajectory, token = (loss(tokens, tokens.sampled).loss[:3].tolist() for loss in (TOPR(), TOPRToken()))
    assert trajectory == pytest.approx([math.exp(-0.5) * x for x in (-2.0, -0.5, -1.0)])
    assert token == pytest.approx([math.exp(-1) * -2.0, -0.5, -1.0])


@pytest.mark.parametrize("name", OF_TOKENS)
def test_no_loss_explodes_on_an_absurd_gap(name):
    lp, old, adv = numbers(0)
    lp[0], old[0], lp[5], old[5] = -1e-3, -300.0, -300.0, -1e-3
    moving = torch.tensor(lp, requires_grad=True)
    out = run(BY_NAME[name], moving, old, adv)
    (grad,) = torch.autograd.grad(out.loss.sum(), moving)
    assert out.loss.isfinite().all() and grad.isfinite().all()


def test_ratio_stays_finite():
    ratio = ratio_of(torch.tensor([0.0, -1000.0]), torch.tensor([-1000.0, 0.0]))
    assert ratio.tolist() == pytest.approx([math.exp(20), math.exp(-20)])


def test_k3_estimates_the_divergence_of_sampler_from_trainer():
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    estimate = (p * k3(q.log(), p.log())).sum()  # the expectation under the sampler p
    torch.testing.assert_close(estimate, (p * (p / q).log()).sum())
    assert (k3(q.log(), p.log()) >= 0).all()


def test_sums_and_means_over_sequences():
    values = torch.arange(13.0)
    sums = [sum(float(i) for i in members(SEQUENCE, t)) for t in range(13)]
    assert sequence_sum(values, torch.tensor(SEQUENCE)).tolist() == sums
    means = [s / len(members(SEQUENCE, t)) for t, s in enumerate(sums)]
    assert sequence_mean(values, torch.tensor(SEQUENCE)).tolist() == pytest.approx(means)
    assert sequence_sum(values[:0], torch.tensor(SEQUENCE[:0])).shape == (0,)


def test_a_constant_out_of_bounds_is_refused():
    with pytest.raises(ValidationError):
        PPOClip(clip_low=1.5)
    with pytest.raises(ValidationError):
        Kimi(tau=0.0)


def test_two_losses_with_one_constant_agree_on_its_bounds():
    @dataclass(frozen=True, kw_only=True)
    class Other(Loss):
        name: ClassVar[str] = "other"
        tau: float = 1.0

    with pytest.raises(AssertionError, match="one setting has one type"):
        settings_of([Kimi, Other], before="correction")


@pytest.mark.parametrize("seed", range(6))
def test_m2po_against_the_authors_rule(seed):
    """The token that gives the bound lies on it, where differences of the formula have no derivative: it is clipped."""
    lp, old, adv = numbers(seed)
    loss = M2PO(tau=0.03, clip_low=0.01, clip_high=0.01)
    moving = torch.tensor(lp, requires_grad=True)
    out = run(loss, moving, old, adv)
    expected = np.array(ref_m2po(lp, lp, old, adv, SEQUENCE, loss.constants()))
    np.testing.assert_allclose(out.loss.detach(), expected, rtol=1e-9)
    free = -adv * np.exp(lp - old)
    stopped = ~np.isclose(expected, free, rtol=1e-6)
    (grad,) = torch.autograd.grad(out.loss.sum(), moving)
    clipped = out.clipped.numpy()
    assert (clipped | ~stopped).all()
    assert clipped.sum() == stopped.sum() + stopped.any()  # and the one that gives the bound
    np.testing.assert_allclose(grad, np.where(clipped, 0.0, free))


def m2po_bounds(gaps: Array, advantage: Array, tau: float = 0.04) -> list[bool]:
    """Which tokens M2PO clips, with its own least bounds."""
    old = np.full(len(gaps), -2.0)
    lp = torch.tensor(old + gaps, requires_grad=True)
    given = torch.tensor(old), torch.tensor(advantage), torch.arange(len(gaps)), torch.zeros(len(gaps))
    return M2PO(tau=tau)(Tokens(lp, *given), torch.tensor(old)).clipped.tolist()


def test_m2po_counts_harmful_tokens_alone_and_gives_a_good_token_back_its_gradient():
    """The ratio of the last token is e^-3, and its advantage is positive: it is lost, and must be learned again."""
    gaps, advantage = np.array([0.6, 0.1, -0.2, -3.0]), np.array([1.0, 1.0, -1.0, 1.0])
    assert m2po_bounds(gaps, advantage) == [True, False, False, False]
    assert m2po_bounds(gaps, advantage, tau=0.2) == [False] * 4  # (0.36 + 0.01 + 0.04) / 3


def test_m2po_is_never_tighter_than_its_least_bounds():
    gaps, advantage = np.array([0.40, 0.41, -0.35, -0.36, 3.0]), np.array([1.0, 1.0, -1.0, -1.0, 1.0])
    assert m2po_bounds(gaps, advantage, tau=1e-6) == [
        False,
        True,
        False,
        True,
        True,
    ]  # log 1.5 = 0.405, log 0.7 = -0.357


def bapo_ratios(gaps: list[float], advantage: list[float]) -> tuple[float, float]:
    """The effective ratio of the first token, which is good, and of the second, which is bad: the bounds, where both lie far beyond them."""
    old, signs = np.full(len(gaps), -2.0), np.array(advantage)
    tokens = Tokens(
        torch.tensor(old + gaps),
        torch.tensor(old),
        torch.tensor(signs),
        torch.arange(len(gaps)),
        torch.zeros(len(gaps)),
    )
    found = BAPO()(tokens, tokens.sampled).loss
    return -found[0].item() / advantage[0], -found[1].item() / advantage[1]


def test_bapo_moves_its_bounds_where_good_tokens_fall_short_and_no_further_than_they_need():
    far = [3.0, -3.0]
    assert bapo_ratios(far, [1.0, -1.0]) == pytest.approx((1.2, 0.6))  # good tokens have two thirds
    assert bapo_ratios(far, [1.0, -3.9]) == pytest.approx((2.35, 0.9))  # 0.4 of 2.34 + 0.9 * 3.9 is 2.34
    assert bapo_ratios(far, [1.0, -9.0]) == pytest.approx((3.0, 0.9))  # never enough


def test_aspo_counts_a_good_token_more_the_less_probable_it_has_become():
    lp, old = np.full(13, -1.0), np.full(13, -1.0)
    lp[:3] = -1.5, -3.0, -0.5
    moving = torch.tensor(lp, requires_grad=True)
    out = ASPO()(tokens_of(moving, old, np.ones(13)), torch.tensor(old))
    (slope,) = torch.autograd.grad(out.loss.sum(), moving)
    assert slope[:4].tolist() == pytest.approx([-math.exp(0.5), -3.0, 0.0, -1.0])
    assert out.clipped[:4].tolist() == [False, False, True, False]


def test_dcpo_leaves_a_rare_token_room_and_a_likely_one_little():
    """By the table of the authors' README: 0.01 may grow to 0.05 and fall to 0.005, and 0.9 may fall to 0.69."""
    old = np.log([0.01, 0.01, 0.01, 0.01, 0.9, 0.9])
    lp = np.log([0.049, 0.051, 0.0051, 0.0049, 0.70, 0.68])
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, -1.0])
    tokens = Tokens(torch.tensor(lp), torch.tensor(old), signs, torch.arange(6), torch.zeros(6))
    assert DCPO()(tokens, tokens.sampled).clipped.tolist() == [False, True] * 3


def test_kto_stops_at_a_gain_that_is_enough_and_never_judges_against_less_than_the_reference():
    """A rollout far above the divergence from the reference teaches nothing more; below the reference, that divergence counts as 0."""
    slopes = []
    for gap in (0.0, 20.0, -20.0):
        lp = torch.full((13,), -30.0).double()
        lp[SEQUENCE == 0] += gap / 4
        lp.requires_grad_()
        out = run(KTO(pair_beta=1.0), lp, np.full(13, -30.0), np.where(SEQUENCE == 0, 1.0, -1.0))
        slopes.append(torch.autograd.grad(out.loss.sum(), lp)[0])
    assert slopes[0].tolist() == pytest.approx([-0.25] * 4 + [0.25] * 9)  # at the reference: β·σ(0)·(1 - σ(0))
    assert (slopes[1][:4].abs() < 1e-6).all() and (slopes[1][4:] > 0).all()  # z = 20 / 4 rollouts
    assert slopes[2][4:].tolist() == pytest.approx([0.25] * 9)
