"""Advantages, losses, aggregation and rows against values computed here by other means."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace.algo.advantages import ADVANTAGES, centred, group_norm, has_contrast, leave_one_out, raw
from headrace.algo.aggregate import AGGREGATIONS, seq_mean_token_mean, seq_mean_token_sum, token_mean, token_sum
from headrace.algo.config import RECIPES, AlgoConfig
from headrace.algo.groups import advantages_of, rows_of
from headrace.algo.losses import LOSSES, k3, loss_of, ppo_clip, ratio_of, reinforce
from headrace.types import Completion, Episode, Prompt, Scored, Turn, VersionSpan

rewards = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=2, max_size=12)


# -- configuration ----------------------------------------------------------------------------------------------------------


def test_every_recipe_names_functions_that_exist():
    for name, recipe in RECIPES.items():
        assert recipe.advantage in ADVANTAGES and recipe.loss in LOSSES and recipe.aggregation in AGGREGATIONS, name


def test_settings_replace_the_values_of_the_recipe():
    recipe = AlgoConfig("rloo", clip_high=0.28, aggregation="token_mean").recipe
    assert recipe == ("leave_one_out", "ppo_clip", "token_mean", 0.2, 0.28)
    assert AlgoConfig("rloo").recipe == RECIPES["rloo"]


def test_length_constant_is_filled_in_once():
    assert AlgoConfig("dr_grpo").with_length(12).length_constant == 12
    assert AlgoConfig("dr_grpo", length_constant=7).with_length(12).length_constant == 7


@pytest.mark.parametrize("wrong", [{"name": "ppo"}, {"clip_low": 0}, {"clip_low": 1.5}, {"clip_hi": 0.2}])
def test_bad_settings_are_refused(wrong):
    with pytest.raises(ValidationError):
        AlgoConfig(**wrong)


def test_clip_without_ppo_is_refused():
    with pytest.raises(ValidationError, match="have no meaning with algo.loss = reinforce; remove them"):
        AlgoConfig(loss="reinforce", clip_low=0.1)


def test_the_controllers_half_imports_no_torch():
    code = "import sys, headrace.algo.groups, headrace.trainer.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- advantages -------------------------------------------------------------------------------------------------------------


@given(rewards)
def test_advantages_against_numpy(values):
    r = np.array(values)
    if len(set(values)) == 1:
        expected = dict.fromkeys(("group_norm", "centred", "leave_one_out"), np.zeros_like(r))
    else:
        expected = {
            "group_norm": (r - r.mean()) / (r.std(ddof=1) + 1e-6),
            "centred": r - r.mean(),
            "leave_one_out": np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))]),
        }
    expected["raw"] = r
    for name, function in ADVANTAGES.items():
        np.testing.assert_allclose(function(values), expected[name], rtol=1e-6, atol=1e-9)


def test_known_values():
    assert group_norm([1, 0]) == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], abs=1e-5)
    assert centred([1, 0, 0, 0]) == [0.75, -0.25, -0.25, -0.25]
    assert leave_one_out([1, 0, 0, 0]) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert raw([1, 0.5]) == [1, 0.5]


@pytest.mark.parametrize("values", [[0.3], [0.1] * 3, [0.7, 0.7], []])
def test_no_contrast_is_exactly_zero(values):
    """The mean of equal floats need not equal them: 0.1 · 3 / 3 would leave a trace that 1e-6 blows up."""
    assert not has_contrast(values)
    for function in (group_norm, centred, leave_one_out):
        assert function(values) == [0.0] * len(values)


def test_contrast_is_seen():
    assert has_contrast([0, 0, 1]) and not has_contrast([1])


def test_a_group_is_normalised_by_its_own_members():
    small, large = [1.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]
    assert group_norm(small)[0] != pytest.approx(group_norm(large)[0], abs=0.1)
    assert sum(group_norm(large)) == pytest.approx(0, abs=1e-9)


# -- losses -----------------------------------------------------------------------------------------------------------------


def numbers(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    old = -rng.exponential(2, count)
    return old + rng.normal(0, 0.4, count), old, rng.normal(0, 1, count)


def ppo_by_cases(lp: float, old: float, adv: float, low: float, high: float) -> float:
    ratio = math.exp(lp - old)
    if adv >= 0:
        return -min(ratio, 1 + high) * adv
    return -max(ratio, 1 - low) * adv


@pytest.mark.parametrize("seed", range(3))
def test_ppo_clip_against_its_cases(seed):
    lp, old, adv = numbers(200, seed)
    out = ppo_clip(torch.tensor(lp), torch.tensor(old), torch.tensor(adv), 0.2, 0.28)
    expected = [ppo_by_cases(*three, 0.2, 0.28) for three in zip(lp, old, adv, strict=True)]
    np.testing.assert_allclose(out.loss, expected, rtol=1e-12)


@pytest.mark.parametrize("name", ["ppo_clip", "reinforce"])
def test_gradient_vanishes_exactly_where_ppo_clips_and_is_right_elsewhere(name):
    lp, old, adv = map(torch.tensor, numbers(200, 7))
    lp.requires_grad_()
    out = LOSSES[name](lp, old, adv, 0.2, 0.2)
    (grad,) = torch.autograd.grad(out.loss.sum(), lp)
    ratio = torch.exp(lp - old).detach()
    if name == "ppo_clip":
        assert out.clipped.any() and torch.equal(grad == 0, out.clipped)
        torch.testing.assert_close(grad[~out.clipped], -(ratio * adv)[~out.clipped])
    else:
        assert out.clipped.any() and torch.equal(out.clipped, ratio > 2)
        torch.testing.assert_close(grad, -ratio.clamp(max=2) * adv)


def test_ppo_gradient_by_finite_differences():
    lp, old, adv = map(torch.tensor, numbers(50, 3))
    lp.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ppo_clip(x, old, adv, 0.2, 0.2).loss, (lp,))


def test_reinforce_on_policy_is_plain():
    lp = torch.tensor([-1.0, -2.0], requires_grad=True)
    reinforce(lp, lp.detach(), torch.tensor([2.0, -1.0]), 0.2, 0.2).loss.sum().backward()
    assert lp.grad is not None and lp.grad.tolist() == [-2.0, 1.0]


def test_ratio_stays_finite():
    ratio = ratio_of(torch.tensor([0.0, -1000.0]), torch.tensor([-1000.0, 0.0]))
    assert ratio.tolist() == pytest.approx([math.exp(20), math.exp(-20)])


def test_loss_of_fills_in_the_clip_range():
    lp, old, adv = torch.tensor([0.0]), torch.tensor([-1.0]), torch.tensor([1.0])
    assert loss_of(AlgoConfig(clip_high=0.5))(lp, old, adv).loss.item() == pytest.approx(-1.5)
    assert loss_of(AlgoConfig())(lp, old, adv).loss.item() == pytest.approx(-1.2)
    assert loss_of(AlgoConfig(loss="reinforce"))(lp, old, adv).loss.item() == 0


def test_k3_estimates_the_divergence_of_sampler_from_trainer():
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    estimate = (p * k3(q.log(), p.log())).sum()  # the expectation under the sampler p
    torch.testing.assert_close(estimate, (p * (p / q).log()).sum())
    assert (k3(q.log(), p.log()) >= 0).all()


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


# -- rows -------------------------------------------------------------------------------------------------------------------

PROMPT = Prompt("p", "?", (1, 2))


def completion(*tokens: int, version: int = 0, stop: str = "stop") -> Completion:
    return Completion(
        tokens, tuple(-0.1 * t for t in tokens), (VersionSpan(0, version, version),) if tokens else (), stop
    )


def scored(*turns: Turn) -> Scored:
    return Scored(Episode(turns), 1.0, {})


def test_a_single_turn_is_a_row():
    rows = rows_of(
        PROMPT, [scored(Turn((1, 2), completion(5, 6, version=3))), scored(Turn((), completion(7)))], [0.5, -1]
    )
    assert [row.prompt for row in rows] == [(1, 2), (1, 2)]
    assert rows[0].tokens == (5, 6) and rows[0].logprobs == pytest.approx((-0.5, -0.6))
    assert rows[0].advantages == (0.5, 0.5) and rows[0].mask == (True, True) and rows[0].versions == (3, 3)
    assert rows[1].tokens == (7,) and rows[1].advantages == (-1.0,)


def test_overlong_completions_are_trained_or_masked_by_choice():
    both = [scored(Turn((1, 2), completion(5, 6, stop="length"))), scored(Turn((1, 2), completion(7)))]
    assert [row.mask for row in rows_of(PROMPT, both, [1, -1], "mask")] == [(False, False), (True,)]
    assert [row.mask for row in rows_of(PROMPT, both, [1, -1], "train")] == [(True, True), (True,)]


def test_a_second_turn_keeps_what_lies_between_as_context():
    episode = scored(Turn((1, 2), completion(5, 6, version=1)), Turn((8, 9), completion(7, version=2), parents=(0,)))
    (row,) = rows_of(PROMPT, [episode], [2.0])
    assert row.tokens == (5, 6, 8, 9, 7)
    assert row.mask == (True, True, False, False, True)
    assert row.logprobs == pytest.approx((-0.5, -0.6, 0, 0, -0.7))
    assert row.versions == (1, 1, 2, 2, 2)


def test_a_fork_trains_its_shared_completion_once():
    episode = scored(
        Turn((1, 2), completion(5)), Turn((8,), completion(6), parents=(0,)), Turn((9,), completion(7), parents=(0,))
    )
    first, second = rows_of(PROMPT, [episode], [1.0])
    assert (first.tokens, first.mask) == ((5, 8, 6), (True, False, True))
    assert (second.tokens, second.mask) == ((5, 9, 7), (False, False, True))


def test_an_empty_completion_gives_an_empty_row():
    (row,) = rows_of(PROMPT, [scored(Turn((1, 2), completion()))], [1.0])
    assert row.tokens == () and row.mask == ()


def test_advantages_of_is_the_recipes_function():
    assert advantages_of(AlgoConfig("dr_grpo"))([1, 0]) == [0.5, -0.5]
    assert advantages_of(AlgoConfig("reinforce"))([1.0]) == [1.0]
