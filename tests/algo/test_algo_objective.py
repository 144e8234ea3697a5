"""The composed objective: anchors, corrections, divergences, teachers, selections; and that no split of a step matters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import starmap
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.algo.advantages import kl_penalty
from headrace.algo.config import AlgoConfig
from headrace.algo.objective import (
    AGGREGATIONS,
    KeptCounts,
    _with_tail,
    covariance,
    importance_weight,
    kl_estimate,
    kl_loss,
    objective_of,
    old_of,
    reach_of,
    second_moment,
    seq_mean_token_mean,
    seq_mean_token_sum,
    token_mean,
    token_sum,
    top_divergence,
)
from headrace.algo.policy.region import KLCov
from headrace.algo.policy.tokens import Tokens, TopTokens
from headrace.algo.recipe_parts import Distill
from headrace.algo.recipes import RECIPES
from headrace.algo.rules import larger_binary_kl
from headrace.core.errors import ConfigError
from headrace.trainer.placement.port import Single
from headrace.trainer.step.whole_step import parts_of
from support.few import few

SEQUENCE = np.array([0, 0, 0, 1, 2, 2, 2, 2])


def data(seed: int, spread: float = 0.4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    sampled = -rng.exponential(0.8, len(SEQUENCE)) - 0.05
    return np.minimum(sampled + rng.normal(0, spread, len(SEQUENCE)), -1e-3), sampled, rng.normal(0, 1, len(SEQUENCE))


def tokens_of(seed: int = 0, spread: float = 0.4, **more: Any) -> Tokens:
    lp, sampled, advantage = map(torch.tensor, data(seed, spread))
    given = {"lag": torch.ones(len(SEQUENCE)), **more}
    return Tokens(lp.requires_grad_(), sampled, advantage, torch.tensor(SEQUENCE), **given)


OF_TOKENS = {name for name, recipe in RECIPES.items() if not recipe.loss.pairs}
"""Recipes whose loss is one of tokens. Those of pairs: `tests/algo/test_preferring.py`."""
TAUGHT = {name for name, recipe in RECIPES.items() if recipe.distill.kind != "none"}
"""Recipes that learn from a teacher."""


def gradient(loss: Tensor, by: Tensor) -> np.ndarray:
    return torch.autograd.grad(loss.sum(), by, retain_graph=True)[0].numpy()


def grpo(**given: Any) -> AlgoConfig:
    return AlgoConfig(**given)


# -- on policy, all recipes are one ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(OF_TOKENS - TAUGHT - {"clip_cov", "kto", "srft"}))
def test_on_policy_every_recipe_is_the_policy_gradient(name):
    """With nothing to correct, clip or penalise, the step is that of REINFORCE: -A for every token of a sequence."""
    algo = AlgoConfig(name)
    sequence = torch.tensor(SEQUENCE)
    lp = torch.tensor(data(0)[0], requires_grad=True)
    advantage = torch.tensor([1.0, -0.5, 2.0]).double()[sequence]
    tokens = Tokens(lp, lp.detach(), advantage, sequence, torch.zeros(len(SEQUENCE)))
    result = objective_of(algo)(tokens)
    np.testing.assert_allclose(gradient(result.loss, lp), -advantage, rtol=1e-9)
    assert not result.clipped.any() and not any(mask.any() for mask in result.masked.values())


# -- anchors ----------------------------------------------------------------------------------------------------------------


def test_the_trainers_own_anchor_makes_every_ratio_one():
    tokens = tokens_of()
    result = objective_of(grpo(old="trainer"))(tokens)
    np.testing.assert_allclose(result.loss.detach(), -tokens.advantage)
    np.testing.assert_allclose(gradient(result.loss, tokens.logprob), -tokens.advantage)


def test_the_proximal_policy_lies_one_step_behind_on_the_way_from_the_sampler():
    lag = torch.tensor([0.0, 1, 2, 4, 0, 1, 2, 4])
    tokens = tokens_of(lag=lag)
    lp, sampled, _ = data(0)
    alpha = np.array([0, 0, 1 / 2, 3 / 4] * 2)
    old = old_of(tokens, "loglinear")
    np.testing.assert_allclose(old, sampled + alpha * (lp - sampled))
    assert not old.requires_grad


def test_decoupled_ppo_clips_around_the_proximal_policy_and_weighs_it_against_the_sampler():
    tokens = tokens_of(lag=torch.full((len(SEQUENCE),), 4.0))
    lp, sampled, advantage = data(0)
    prox = sampled + 0.75 * (lp - sampled)
    ratio, weight = np.exp(lp - prox), np.exp(prox - sampled)
    expected = -weight * np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
    np.testing.assert_allclose(objective_of(AlgoConfig("decoupled_ppo"))(tokens).loss.detach(), expected, rtol=1e-6)
    bound = float(np.median(weight))
    capped = objective_of(AlgoConfig("decoupled_ppo", correction={"high": bound}))(tokens)
    np.testing.assert_array_equal(capped.masked["mask"], weight > bound)
    assert (capped.loss[capped.masked["mask"]] == 0).all() and capped.masked["mask"].any()


# -- corrections ------------------------------------------------------------------------------------------------------------


def weights_by_hand(lp: np.ndarray, sampled: np.ndarray, level: str) -> list[float]:
    weights = []
    for t in range(len(lp)):
        gaps = [lp[u] - sampled[u] for u in range(len(lp)) if SEQUENCE[u] == SEQUENCE[t]]
        weights.append(
            {
                "token": math.exp(lp[t] - sampled[t]),
                "sequence": math.exp(sum(gaps)),
                "geometric": math.exp(sum(gaps) / len(gaps)),
            }[level]
        )
    return weights


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_correction_levels_and_modes(level, mode):
    tokens = tokens_of(3)
    lp, sampled, advantage = data(3)
    expected = np.array(weights_by_hand(lp, sampled, level))
    apart = np.unique(expected.round(9))
    low, high = float(apart[:2].mean()), float(apart[-2:].mean())
    np.testing.assert_allclose(importance_weight(tokens.logprob.detach(), tokens, level), expected)  # type: ignore[arg-type]
    outside = (expected < low) | (expected > high)
    assert outside.any() and not outside.all()
    correction = {"mode": mode, "level": level, "low": low, "high": high}
    result = objective_of(grpo(old="trainer", correction=correction))(tokens)
    factor = np.clip(expected, low, high) if mode == "truncate" else np.where(outside, 0.0, expected)
    np.testing.assert_allclose(result.loss.detach(), -factor * advantage)
    np.testing.assert_allclose(
        gradient(result.loss, tokens.logprob), -factor * advantage, atol=1e-12
    )  # weight: no gradient
    assert (mode == "mask") == ("mask" in result.masked)
    if mode == "mask":
        np.testing.assert_array_equal(result.masked["mask"], outside)


def test_a_product_over_a_long_sequence_stays_finite():
    zeros = torch.zeros(1000).double()
    tokens = Tokens(zeros, zeros - 1, zeros, torch.zeros(1000, dtype=torch.long), zeros)
    assert importance_weight(zeros, tokens, "sequence")[0].item() == pytest.approx(math.exp(20))
    assert importance_weight(zeros, tokens, "geometric")[0].item() == pytest.approx(math.e)


def test_a_veto_drops_the_whole_sequence():
    tokens = tokens_of()
    sampled = tokens.sampled.clone()
    sampled[5] = tokens.logprob[5].detach() + 10  # ratio exp(-10) < 1e-4
    result = objective_of(grpo(correction={"veto": 1e-4}))(tokens._replace(sampled=sampled))
    assert result.masked["veto"].tolist() == [False] * 4 + [True] * 4
    assert (result.loss[4:] == 0).all() and (result.loss[:4] != 0).all()
    assert not (gradient(result.loss, tokens.logprob)[4:]).any()


def test_kpop_is_the_larger_of_both_binary_divergences():
    lp, sampled, _ = data(1)
    p, q = np.exp(lp), np.exp(sampled)
    forward = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    backward = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
    np.testing.assert_allclose(larger_binary_kl(torch.tensor(lp), torch.tensor(sampled)), np.maximum(forward, backward))
    result = objective_of(grpo(correction={"kpop": 0.02}))(tokens_of(1))
    np.testing.assert_array_equal(result.masked["kpop"], np.maximum(forward, backward) > 0.02)
    sure = torch.tensor([0.0, -20.0])  # a probability of one
    assert larger_binary_kl(sure, sure.flip(0)).isfinite().all() and larger_binary_kl(sure, sure).tolist() == [0.0, 0.0]


def test_opsm_drops_bad_tokens_of_sequences_the_policy_has_left():
    tokens = tokens_of(2)
    lp, sampled, advantage = data(2)
    drift = np.array([(sampled - lp)[SEQUENCE[t] == SEQUENCE].mean() for t in range(len(lp))])
    expected = (advantage < 0) & (drift > 0.05)
    assert expected.any() and (drift > 0.05).sum() > expected.sum()
    result = objective_of(grpo(correction={"opsm": 0.05}))(tokens)
    np.testing.assert_array_equal(result.masked["opsm"], expected)


def test_lag_weights():
    lag = torch.tensor([0.0, 0, 0, 1, 2, 2, 3, 3])
    tokens = tokens_of(lag=lag)
    plain = objective_of(grpo())(tokens).loss.detach()
    faded = objective_of(grpo(lag={"kind": "exponential", "decay": 0.5}))(tokens)
    torch.testing.assert_close(faded.loss.detach(), plain * 0.5**lag)
    assert not faded.masked
    trimmed = objective_of(grpo(lag={"kind": "trim", "maximum": 2}))(tokens)
    assert trimmed.masked["lag"].tolist() == [False] * 6 + [True] * 2
    torch.testing.assert_close(trimmed.loss.detach(), torch.where(lag > 2, 0.0, plain))


def test_what_is_taken_out_is_not_counted_as_clipped():
    tokens = tokens_of(lag=torch.full((len(SEQUENCE),), 5.0))
    assert objective_of(grpo(clip_low=0.01, clip_high=0.01))(tokens).clipped.any()
    assert not objective_of(grpo(clip_low=0.01, clip_high=0.01, lag={"kind": "trim", "maximum": 1}))(
        tokens
    ).clipped.any()


# -- divergence from a reference ---------------------------------------------------------------------------------------------

LOGITS = torch.tensor([0.3, -0.4, 1.0, 0.0]).double()
OTHER = torch.log_softmax(torch.tensor([0.0, 0.5, -0.3, 0.4]).double(), 0)


def expected_gradient(estimate: Any, weigh: Tensor) -> np.ndarray:
    """Gradient by the logits of Σ_v weigh_v · estimate_v: what sampling from `weigh` gives in expectation."""
    logits = LOGITS.clone().requires_grad_()
    lp = torch.log_softmax(logits, 0)
    return torch.autograd.grad((weigh * estimate(lp)).sum(), logits)[0].numpy()


def kl_gradient(forward: bool) -> np.ndarray:
    logits = LOGITS.clone().requires_grad_()
    lp = torch.log_softmax(logits, 0)
    kl = (lp.exp() * (lp - OTHER)).sum() if not forward else (OTHER.exp() * (OTHER - lp)).sum()
    return torch.autograd.grad(kl, logits)[0].numpy()


def test_estimators_of_the_divergence():
    lp = torch.log_softmax(LOGITS, 0)
    exact = (lp.exp() * (lp - OTHER)).sum()
    for name in ("k1", "k3"):
        torch.testing.assert_close((lp.exp() * kl_estimate(lp, OTHER, name)).sum(), exact)  # type: ignore[arg-type]
    torch.testing.assert_close(kl_estimate(lp, OTHER, "k2"), (lp - OTHER) ** 2 / 2)
    far = kl_estimate(torch.tensor([-100.0, 0.0]).double(), torch.tensor([0.0, -100.0]).double(), "k3")
    assert far.tolist() == pytest.approx(
        [math.exp(20) - 21, math.exp(-20) + 19]
    )  # the log ratio is clamped, the value is not


IN_THE_LOSS = [("k2", False), ("k3", False), ("k3", True)]
"""Every estimator that `AlgoConfig` lets into the loss."""


@pytest.mark.parametrize(("estimator", "unbiased"), IN_THE_LOSS)
def test_descent_on_a_tokens_divergence_ends_at_the_reference_from_any_distance(estimator, unbiased):
    lp = torch.tensor([-60.0, -25, -12, -3, -0.5, 0.5, 3, 12, 25, 60]).double()
    for _ in range(700):  # 0.1 a step at most, as the clipped norm of a step has it
        moving = lp.clone().requires_grad_()
        loss = kl_loss(moving, lp, torch.zeros_like(lp), estimator, unbiased)
        (grad,) = torch.autograd.grad(loss.sum(), moving)
        assert (grad * lp > 0)[lp.abs() > 1e-3].all()  # never away from the reference, and never nothing
        lp = lp - 0.1 * grad.clamp(-1, 1)
    assert lp.abs().max() < 1e-3


def descended(loss_of: Any, start: Sequence[float]) -> float:
    """KL(policy || OTHER) after descent on the expectation of `loss_of`, sampled anew by every step's policy."""
    logits = torch.tensor(start).double().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for _ in range(800):
        lp = torch.log_softmax(logits, 0)
        optimizer.zero_grad()
        (lp.detach().exp() * loss_of(lp)).sum().backward()
        optimizer.step()
    lp = torch.log_softmax(logits.detach(), 0)
    return float((lp.exp() * (lp - OTHER)).sum())


FAR = ([3.0, -4.0, 1.0, 0.0], [14.0, 0.0, 0.0, -3.0])


@pytest.mark.parametrize("start", few(FAR, keep=1))
@pytest.mark.parametrize(("estimator", "unbiased"), few(starmap(pytest.param, IN_THE_LOSS), keep=1))
def test_descent_on_the_divergence_alone_ends_at_the_reference_from_far_away(estimator, unbiased, start):
    assert descended(lambda lp: kl_loss(lp, lp.detach(), OTHER, estimator, unbiased), start) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("start", FAR)
def test_in_the_reward_only_the_log_ratio_leads_to_the_reference(start):
    """-A·lp with the penalty as a negative reward: k1 is the gradient of the KL; k2 and k3 lead away, so they are refused."""
    penalties = lambda lp: torch.tensor([kl_penalty(*one) for one in zip(lp.tolist(), OTHER.tolist(), strict=True)])  # noqa: E731
    assert descended(lambda lp: lp * penalties(lp), start) < 1e-4
    for estimator in ("k2", "k3"):
        assert descended(lambda lp, e=estimator: lp * kl_estimate(lp.detach(), OTHER, e), start) > 0.1  # type: ignore[misc]
        with pytest.raises(ValueError, match="away from the reference"):
            AlgoConfig(kl={"coef": 0.1, "place": "reward", "estimator": estimator})


@pytest.mark.parametrize("loss", ["kimi", "dppo_tv_quadratic", "kl_cov"])
def test_the_pull_of_a_penalty_does_not_end_beyond_the_bound_of_the_log_ratio(loss):
    lp = torch.tensor([-40.0, 40.0]).double().requires_grad_()
    tokens = Tokens(lp, torch.zeros(2).double(), torch.zeros(2).double(), torch.arange(2), torch.zeros(2))
    if loss == "kl_cov":
        result = KLCov()(tokens._replace(keep=torch.zeros(2, dtype=torch.bool)), tokens.sampled)
    else:
        result = objective_of(AlgoConfig(loss=loss))(tokens)
    grad = gradient(result.loss, lp)
    assert grad[0] < 0 < grad[1]


def test_expected_gradients_of_the_estimators_are_what_their_docstring_says():
    on_policy = torch.log_softmax(LOGITS, 0).exp()
    np.testing.assert_allclose(expected_gradient(lambda lp: kl_estimate(lp, OTHER, "k1"), on_policy), 0, atol=1e-12)
    k2 = expected_gradient(lambda lp: kl_estimate(lp, OTHER, "k2"), on_policy)
    np.testing.assert_allclose(k2, kl_gradient(forward=False), atol=1e-12)
    k3 = expected_gradient(lambda lp: kl_estimate(lp, OTHER, "k3"), on_policy)
    np.testing.assert_allclose(k3, kl_gradient(forward=True), atol=1e-12)


def test_the_unbiased_estimate_is_right_under_another_sampler():
    sampler = torch.log_softmax(torch.tensor([0.1, 0.9, -0.2, 0.0]).double(), 0)
    unbiased = expected_gradient(lambda lp: kl_loss(lp, sampler, OTHER, "k3", True), sampler.exp())
    np.testing.assert_allclose(unbiased, kl_gradient(forward=False), atol=1e-12)
    biased = expected_gradient(lambda lp: kl_loss(lp, sampler, OTHER, "k3", False), sampler.exp())
    assert np.abs(biased - kl_gradient(forward=False)).max() > 0.01


def test_kl_in_the_loss_is_added_and_survives_a_mask():
    reference = torch.tensor(data(9)[0])
    tokens = tokens_of(reference=reference, lag=torch.full((len(SEQUENCE),), 5.0))
    with_kl = objective_of(grpo(kl={"coef": 0.2}, lag={"kind": "trim", "maximum": 1}))(tokens)
    expected = 0.2 * kl_estimate(tokens.logprob, reference, "k3")
    torch.testing.assert_close(with_kl.loss, expected)
    plain = objective_of(grpo())(tokens).loss
    torch.testing.assert_close(objective_of(grpo(kl={"coef": 0.2}))(tokens).loss, plain + expected)
    in_reward = objective_of(grpo(kl={"coef": 0.2, "place": "reward"}))(tokens._replace(reference=None))
    torch.testing.assert_close(in_reward.loss, plain)


# -- teachers ---------------------------------------------------------------------------------------------------------------


def test_the_teacher_is_an_advantage_without_a_gradient():
    lp, sampled, advantage = data(0)
    teacher = torch.tensor(data(5)[0])
    teacher[2] = math.nan
    tokens = tokens_of(teacher=teacher)
    gap = np.nan_to_num(teacher.numpy() - lp)
    ratio = np.exp(lp - sampled)
    pure = objective_of(AlgoConfig("opd"))(tokens._replace(advantage=torch.zeros(len(lp)).double()))
    np.testing.assert_allclose(gradient(pure.loss, tokens.logprob), -np.minimum(ratio, 2) * gap, atol=1e-12)
    assert pure.loss[2] == 0
    mixed = objective_of(AlgoConfig(loss="importance", distill={"kind": "sampled", "coef": 0.5}))(tokens)
    np.testing.assert_allclose(mixed.loss.detach(), -ratio * (advantage + 0.5 * gap))


def test_the_sampled_token_estimates_the_gradient_of_the_reverse_divergence():
    logits = LOGITS.clone().requires_grad_()
    lp = torch.log_softmax(logits, 0)
    zeros = torch.zeros(4).double()
    tokens = Tokens(lp, lp.detach(), zeros, torch.arange(4), zeros, teacher=OTHER)
    loss = (lp.detach().exp() * objective_of(AlgoConfig("opd"))(tokens).loss).sum()  # the expectation under the student
    np.testing.assert_allclose(torch.autograd.grad(loss, logits)[0], kl_gradient(forward=False), atol=1e-12)


def divergence_by_hand(student: np.ndarray, teacher: np.ndarray, kind: str, beta: float) -> float:
    """Of two distributions over k tokens and the rest, as probabilities."""
    p, q = (np.append(x, 1 - x.sum()) for x in (teacher, student))
    kl = lambda a, b: float((a * np.log(a / b)).sum())  # noqa: E731
    if kind == "jsd":
        m = beta * p + (1 - beta) * q
        return beta * kl(p, m) + (1 - beta) * kl(q, m)
    return kl(p, q) if kind == "forward" else kl(q, p)


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_top_k_divergences_with_a_bucket_for_the_rest(kind):
    rng = np.random.default_rng(0)
    student, teacher = (rng.dirichlet(np.ones(9), 6)[:, :4] for _ in range(2))
    tops = torch.tensor(np.log(student), requires_grad=True), torch.tensor(np.log(teacher))
    distill = Distill(kind, beta=0.3)
    expected = [divergence_by_hand(s, t, kind, 0.3) for s, t in zip(student, teacher, strict=True)]
    np.testing.assert_allclose(top_divergence(TopTokens(*tops), distill).detach(), expected)
    assert torch.autograd.gradcheck(lambda x: top_divergence(TopTokens(x, tops[1]), distill), (tops[0],))


@pytest.mark.parametrize(("name", "beta"), [("opsd", 0.5), ("sdpo", 0.5), ("opsd", 0.1), ("sdpo", None)])
def test_self_distillation_has_the_loss_and_the_gradient_of_its_paper(name, beta):
    """Over a whole vocabulary of five tokens. By hand: with q the student, p the teacher and m = beta p + (1 - beta) q, the derivative of the
    divergence by q is (1 - beta) log(q / m) for the JSD and log(q / p) + 1 for the reverse KL; that by a logit is q (d - sum q d)."""
    rng = np.random.default_rng(3)
    logits = torch.tensor(rng.normal(0, 1, (len(SEQUENCE), 5)), requires_grad=True)
    p = rng.dirichlet(np.ones(5), len(SEQUENCE))
    lp = torch.log_softmax(logits, 1)
    tokens = tokens_of(top=TopTokens(lp, torch.tensor(np.log(p))))._replace(
        advantage=torch.zeros(len(SEQUENCE)).double()
    )
    distill = {"beta": beta} if beta else {"kind": "reverse"}
    result = objective_of(AlgoConfig(name, distill=distill if beta != 0.5 else {}))(tokens)
    q = lp.detach().exp().numpy()
    if beta:
        m = beta * p + (1 - beta) * q
        expected = (beta * p * np.log(p / m) + (1 - beta) * q * np.log(q / m)).sum(1)
        by_q = (1 - beta) * np.log(q / m)
    else:
        expected, by_q = (q * np.log(q / p)).sum(1), np.log(q / p) + 1
    np.testing.assert_allclose(result.loss.detach(), expected, atol=1e-9)
    found = torch.autograd.grad(result.loss.sum(), logits)[0]
    np.testing.assert_allclose(found, q * (by_q - (q * by_q).sum(1, keepdims=True)), atol=1e-9)


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_padding_counts_nothing_and_a_missing_teacher_teaches_nothing(kind):
    distill = Distill(kind)
    student = torch.log(torch.tensor([[0.5, 0.2, 0.1], [0.5, 0.2, 0.1]]).double()).requires_grad_()
    teacher = torch.log(torch.tensor([[0.3, 0.3, 0.0], [0.0, 0.0, 0.0]]).double())
    value = top_divergence(TopTokens(student, teacher), distill)
    short = top_divergence(TopTokens(student[:1, :2], teacher[:1, :2]), distill)
    assert value[0].item() == pytest.approx(short.item()) and value[1] == 0
    grad = gradient(value, student)
    assert np.isfinite(grad).all() and not grad[1].any() and grad[0, 2] == 0 and grad[0, 0] != 0


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_the_whole_vocabulary_leaves_an_empty_tail(kind):
    logits = LOGITS.clone().requires_grad_()
    lp = torch.log_softmax(logits, 0)
    value = top_divergence(TopTokens(lp[None], OTHER[None]), Distill(kind)).sum()
    if kind != "jsd":
        exact = kl_gradient(forward=kind == "forward")
        np.testing.assert_allclose(torch.autograd.grad(value, logits)[0], exact, atol=1e-6)
    same = top_divergence(TopTokens(OTHER[None], OTHER[None]), Distill(kind))
    assert same.item() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_tokens_of_no_probability_under_both_stay_finite(kind):
    """In float32, in which exp(-120) is 0: among the most probable tokens of a sure student, or at a low temperature."""
    student = torch.tensor([[-1e-3, -120.0]], requires_grad=True)
    value = top_divergence(TopTokens(student, torch.tensor([[-2e-3, -130.0]])), Distill(kind))
    assert value.isfinite().all() and np.isfinite(gradient(value, student)).all()


@pytest.mark.parametrize("rest", [1e-3, 1e-6, 1e-8, 1e-10])
def test_the_bucket_for_the_rest_keeps_its_digits_in_float32(rest):
    """1 - Σp in float32 has none left below 1e-6; the log-probs themselves do."""
    logprob = torch.tensor([[math.log1p(-3 * rest), math.log(2 * rest)]], dtype=torch.float32)
    found = _with_tail(logprob, torch.isfinite(logprob))
    assert found.dtype == torch.float32 and found[0, -1].item() == pytest.approx(math.log(rest), abs=1e-4)


def test_top_k_distillation_is_added_to_the_objective():
    top = TopTokens(torch.full((len(SEQUENCE), 2), -2.0).double(), torch.full((len(SEQUENCE), 2), -1.5).double())
    tokens = tokens_of(top=top)
    both = objective_of(AlgoConfig(distill={"kind": "forward", "k": 2, "coef": 0.3}))(tokens)
    expected = objective_of(AlgoConfig())(tokens).loss + 0.3 * top_divergence(top, Distill("forward"))
    torch.testing.assert_close(both.loss, expected)


@pytest.mark.parametrize("kind", ["sampled", "forward", "reverse", "jsd"])
def test_a_microbatch_that_no_teacher_has_seen_learns_from_its_rewards(kind):
    untaught = torch.full((len(SEQUENCE),), math.nan).double()
    found = objective_of(AlgoConfig(distill={"kind": kind}))(tokens_of(teacher=untaught))
    torch.testing.assert_close(found.loss, objective_of(AlgoConfig())(tokens_of()).loss)


# -- what is rejected, and the denominator ------------------------------------------------------------------------------------

REJECTING = {"correction": {"veto": 0.5, "kpop": 0.05}}


def kept_by_hand(losses: np.ndarray, rejected: np.ndarray, aggregation: str) -> float:
    """As if the rejected tokens had not been sampled."""
    rows = [losses[(s == SEQUENCE) & ~rejected] for s in range(3)]
    rows = [row for row in rows if len(row)]
    return {
        "token_mean": sum(row.sum() for row in rows) / sum(map(len, rows)),
        "seq_mean_token_mean": np.mean([row.mean() for row in rows]),
        "seq_mean_token_sum": np.mean([row.sum() for row in rows]),
        "token_sum": sum(row.sum() for row in rows) / (9 * len(rows)),
    }[aggregation]


@pytest.mark.parametrize("aggregation", sorted(set(AGGREGATIONS) - {"pair_mean"}))
def test_kept_is_the_loss_of_what_is_left(aggregation):
    algo = grpo(**REJECTING, denominator="kept", aggregation=aggregation, kl={"coef": 0.3}).with_length(9)
    tokens = tokens_of(1, reference=torch.tensor(data(9)[0]))
    result = objective_of(algo)(tokens)
    rejected = result.rejected.numpy()
    assert rejected.any() and not rejected.all() and (result.loss[result.rejected] == 0).all()
    weights = AGGREGATIONS[aggregation]([3, 1, 4], algo.length_constant)
    weight = torch.tensor(weights).double()[tokens.sequence]
    kept = KeptCounts(algo.recipe.aggregation)
    found = (result.loss * weight * kept.within_sequences(tokens.sequence, result.rejected)).sum() * kept.factor
    losses = objective_of(grpo(kl={"coef": 0.3}))(tokens).loss.detach().numpy()
    assert found.item() == pytest.approx(kept_by_hand(losses, rejected, aggregation), rel=1e-6)


def test_all_keeps_the_divergence_of_what_is_rejected_and_its_place_in_the_denominator():
    tokens = tokens_of(1, reference=torch.tensor(data(9)[0]))
    result = objective_of(grpo(**REJECTING, kl={"coef": 0.3}))(tokens)
    kl = 0.3 * kl_estimate(tokens.logprob, tokens.reference, "k3")
    torch.testing.assert_close(result.loss[result.rejected], kl[result.rejected])


def test_a_step_of_which_nothing_is_kept_divides_by_nothing():
    for aggregation in AGGREGATIONS:
        kept = KeptCounts(aggregation)  # type: ignore[arg-type]
        assert kept.within_sequences(torch.tensor(SEQUENCE), torch.ones(8, dtype=torch.bool)).isfinite().all()
        assert math.isfinite(kept.factor)


# -- selections over the whole step ------------------------------------------------------------------------------------------


def test_the_second_moment_takes_the_largest_until_the_rest_is_calm():
    rng = np.random.default_rng(0)
    gap = rng.normal(0, 0.4, 200)
    keep = second_moment(torch.tensor(gap), torch.zeros(200).double(), 0.04).numpy()
    assert (gap[keep] ** 2).mean() < 0.04 and keep.any()
    back = keep.copy()  # one more of them, the smallest of those taken out, would be one too many
    back[np.flatnonzero(~keep)[(gap[~keep] ** 2).argmin()]] = True
    assert (gap[back] ** 2).mean() >= 0.04
    assert (gap[~keep] ** 2).min() >= (gap[keep] ** 2).max()
    assert second_moment(torch.zeros(3), torch.zeros(3), 0.04).all()


def test_covariance_takes_the_share_of_tokens_that_drive_entropy_down():
    rng = np.random.default_rng(1)
    lp, advantage = -rng.exponential(1, 1000), rng.normal(0, 1, 1000)
    keep = covariance(torch.tensor(lp), torch.tensor(lp), torch.tensor(advantage), 0.01).numpy()
    value = (lp - lp.mean()) * (advantage - advantage.mean())
    assert set(np.flatnonzero(~keep)) == set(np.argsort(-value)[:10])
    assert (~covariance(torch.tensor(lp), torch.tensor(lp), torch.tensor(advantage), 2e-4)).sum() == 1  # at least one


@pytest.mark.parametrize("name", ["second_moment", "clip_cov"])
def test_what_is_not_kept_has_no_policy_loss(name):
    result = objective_of(AlgoConfig(name))(tokens_of())
    taken = result.masked[name]
    assert taken.any() and not taken.all() and torch.equal(result.loss == 0, taken)


# -- a user's own loss ---------------------------------------------------------------------------------------------------------


def user(tmp_path: Any, body: str, **more: Any) -> AlgoConfig:
    (tmp_path / "mine.py").write_text(f"import torch\nfrom headrace.algo.policy.tokens import TokenLoss\n\n{body}\n")
    return AlgoConfig(loss=f"{tmp_path / 'mine.py'}:loss", **more)


def test_a_users_loss_is_used_and_composed(tmp_path):
    tokens = tokens_of(reference=torch.tensor(data(9)[0]))
    algo = user(tmp_path, "def loss(tokens):\n    return -tokens.advantage * tokens.logprob", kl={"coef": 0.1})
    expected = -tokens.advantage * tokens.logprob + 0.1 * kl_estimate(tokens.logprob, tokens.reference, "k3")
    torch.testing.assert_close(objective_of(algo)(tokens).loss, expected)


def test_a_users_masks_are_counted(tmp_path):
    body = "def loss(t):\n    m = t.advantage < 0\n    return TokenLoss(-t.logprob, m, {'bad': m})"
    tokens = tokens_of()
    result = objective_of(user(tmp_path, body))(tokens)
    assert torch.equal(result.masked["mine"], tokens.advantage < 0)
    assert (result.loss[tokens.advantage < 0] == 0).all()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("def loss(t):\n    return (t.logprob * t.advantage).sum()", "one loss a token, not their sum or mean"),
        ("def loss(t):\n    return 1.0", "returned a float for 8 tokens"),
        ("def loss(t):\n    return t.logprob.detach()", "has no gradient"),
        ("def loss(t):\n    return t.logprob / 0.0", "not finite for log-probs that are; guard what divides"),
    ],
)
def test_a_users_wrong_result_is_refused_at_the_first_call(tmp_path, body, words):
    with pytest.raises(ConfigError, match=words):
        objective_of(user(tmp_path, body))(tokens_of())


def test_a_users_loss_that_cannot_be_loaded_is_refused_at_start(tmp_path):
    with pytest.raises(ConfigError, match=r"algo\.loss = .*defines no loss; did you mean loss_of"):
        objective_of(user(tmp_path, "def loss_of(tokens): ..."))


# -- aggregation ------------------------------------------------------------------------------------------------------------


def test_aggregations_against_their_formulas():
    losses = [[1.0, 2.0, 3.0], [], [10.0]]
    counts = [len(row) for row in losses]
    total = lambda weights: sum(w * sum(row) for w, row in zip(weights, losses, strict=True))  # noqa: E731
    assert total(token_mean(counts, 0)) == pytest.approx(16 / 4)
    assert total(seq_mean_token_mean(counts, 0)) == pytest.approx((2 + 10) / 2)
    assert total(seq_mean_token_sum(counts, 0)) == pytest.approx((6 + 10) / 2)
    assert total(token_sum(counts, 8)) == pytest.approx(16 / (2 * 8))


def test_nothing_to_weigh_divides_by_nothing():
    for function in AGGREGATIONS.values():
        assert all(math.isfinite(weight) for weight in function([0, 0], 4))


# -- no split of a step changes its gradient -----------------------------------------------------------------------------------

H, V = 3, 7


class Step:
    """Rows of one step for a linear model [H, V]: random contexts, sampled tokens, and everything a loss may ask for."""

    def __init__(self, lengths: Sequence[int], seed: int) -> None:
        rng = np.random.default_rng(seed)
        make = lambda *shape: torch.tensor(rng.normal(0, 1, shape))  # noqa: E731
        self.model = make(H, V) * 0.5
        self.context = [make(n, H) for n in lengths]
        self.target = [torch.tensor(rng.integers(0, V, n)) for n in lengths]
        self.noise = [make(n) * 0.3 for n in lengths]
        self.advantage = [make(1).expand(n) for n in lengths]
        self.lag = [torch.tensor(rng.integers(0, 4, n)).double() for n in lengths]
        self.reference = [torch.log_softmax(make(n, V), 1)[:, 0] for n in lengths]
        self.teacher = [torch.log_softmax(make(n, V), 1)[:, :2] for n in lengths]
        self.counts = list(lengths)

    def tokens(self, rows: Sequence[int], model: Tensor) -> Tokens:
        join = lambda columns: torch.cat([columns[i] for i in rows])  # noqa: E731
        target = join(self.target)
        lp = torch.log_softmax(join(self.context) @ model, 1)
        chosen = lp.gather(1, target[:, None])[:, 0]
        sampled = torch.log_softmax(join(self.context) @ self.model, 1).gather(1, target[:, None])[:, 0] + join(
            self.noise
        )
        sequence = torch.cat([torch.full((self.counts[i],), place) for place, i in enumerate(rows)])
        teacher = join(self.teacher)
        return Tokens(
            chosen,
            sampled,
            join(self.advantage),
            sequence,
            join(self.lag),
            join(self.reference),
            teacher[:, 0],
            TopTokens(lp[:, :2], teacher),
            entropy=-(lp.exp() * lp).sum(1),
        )

    def gradient(self, algo: AlgoConfig, splits: Sequence[Sequence[int]]) -> np.ndarray:
        """Summed over microbatches: `splits` are the rows of each."""
        algo = algo.with_length(9)
        model = self.model.clone().requires_grad_()
        weights = AGGREGATIONS[algo.recipe.aggregation](self.counts, algo.length_constant)
        objective, at_once = objective_of(algo), reach_of(algo) == "step"
        parts = [self.tokens(rows, model) for rows in splits]
        given = [
            torch.cat([torch.full((self.counts[i],), weights[i], dtype=torch.float64) for i in rows]) for rows in splits
        ]
        if at_once:
            found, _ = parts_of(objective, *self.packs(splits, parts, given), placement=Single(), kept=None, top=2)
            losses = [part.of(tokens).loss for part, tokens in zip(found, parts, strict=True)]
        else:
            losses = [objective(tokens).loss for tokens in parts]
        sum((loss * weight).sum() for loss, weight in zip(losses, given, strict=True)).backward()
        assert model.grad is not None
        return model.grad.numpy()

    def packs(self, splits: Sequence[Sequence[int]], parts: Sequence[Tokens], weights: Sequence[Tensor]) -> Any:
        """Packs with the columns that `parts_of` reads, and their tokens."""
        rows = [torch.cat([torch.full((self.counts[i],), i) for i in rows]) for rows in splits]
        packs = [
            SimpleNamespace(trajectory=row, weight=weight, target=row)
            for row, weight in zip(rows, weights, strict=True)
        ]
        return packs, parts


ALGORITHMS = [
    *(AlgoConfig(name) for name in sorted(OF_TOKENS)),
    AlgoConfig("grpo", kl={"coef": 0.1, "unbiased": True}, correction={"veto": 0.5, "opsm": 0.01, "kpop": 0.1}),
    AlgoConfig("gspo", lag={"kind": "exponential"}, aggregation="token_sum"),
    AlgoConfig("second_moment", select={"tau": 0.01}, lag={"kind": "trim", "maximum": 1}, distill={"kind": "jsd"}),
    AlgoConfig("clip_cov", select={"fraction": 0.3}, aggregation="seq_mean_token_mean"),
]


@pytest.mark.parametrize("algo", ALGORITHMS, ids=lambda algo: algo.name)
@given(st.lists(st.integers(1, 5), min_size=2, max_size=6), st.integers(0, 10**6), st.data())
@settings(max_examples=12)
def test_order_microbatches_and_ranks_never_change_the_gradient(algo, lengths, seed, draw):
    """Ranks add their gradients up as microbatches do: a split over both is one split.

    Two tokens have equal covariances, of which a selection may not choose by place.
    """
    step = Step(lengths, seed)
    order = draw.draw(st.permutations(range(len(lengths))))
    cuts = sorted(draw.draw(st.sets(st.integers(1, len(lengths) - 1))))
    splits = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    whole = step.gradient(algo, [range(len(lengths))])
    np.testing.assert_allclose(step.gradient(algo, splits), whole, rtol=1e-9, atol=1e-12)


def test_a_mean_of_microbatch_means_would_be_seen():
    """TRL #7206: the property above fails where every microbatch has a denominator of its own."""
    step = Step([5, 1, 1], 0)
    whole = step.gradient(AlgoConfig(), [[0, 1, 2]])
    parts = []
    for rows in ([0], [1, 2]):
        alone = Step([5, 1, 1], 0)
        alone.counts = [n if i in rows else 0 for i, n in enumerate(alone.counts)]  # its own denominator
        parts.append(alone.gradient(AlgoConfig(), [rows]))
    assert np.abs(np.mean(parts, axis=0) - whole).max() > 1e-3
