"""Implicit process rewards: the loss of the reward model and the advantages of a step, against formulas on padded rows."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from headrace.algo.config import AlgoConfig
from headrace.algo.implicit import StepOutcomes, credited, numbers_of, taught
from headrace.core.errors import ConfigError
from headrace.run.config import load_config

BETA = 0.3
MINIMAL = {
    "model": {"path": "m"},
    "task": {"kind": "reasoning_gym", "name": "chain_sum"},
    "reward": {"function": "reasoning_gym"},
}


def drawn(seed: int, sizes: tuple[int, ...] = (3, 4, 2)) -> tuple[list[list[list[float]]], list[list[float]]]:
    """(q of the tokens of each rollout of each group, its outcome)"""
    rng = random.Random(seed)
    q = [[[rng.gauss(0, 2) for _ in range(rng.randrange(1, 6))] for _ in range(size)] for size in sizes]
    return q, [[float(rng.random() < 0.5) for _ in range(size)] for size in sizes]


def columns(
    q: list[list[list[float]]], outcomes: list[list[float]], seed: int = 0
) -> tuple[np.ndarray, StepOutcomes, list[tuple[int, int, int]]]:
    """The tokens of a step, of two turns each where there are several: in any order in which those of a turn follow each other. And the places that they had."""
    rng, pieces, firsts = random.Random(seed), [], [0]
    for g, group in enumerate(q):
        for r, rollout in enumerate(group):
            cut = rng.randrange(1, len(rollout) + 1)
            for turn, places in enumerate((range(cut), range(cut, len(rollout)))):
                tokens = [
                    (rollout[t], outcomes[g][r] * (t == len(rollout) - 1), firsts[-1] + r, turn, (g, r, t))
                    for t in places
                ]
                pieces.append(tokens)
        firsts.append(firsts[-1] + len(group))
    rng.shuffle(pieces)
    flat = [token for piece in pieces for token in piece]
    value, reward, trajectory, turn, place = zip(*flat, strict=True)
    step = StepOutcomes(np.array(reward), np.array(trajectory), np.array(turn), firsts[:-1])
    return np.array(value), step, list(place)


def by_verl(q: list[list[list[float]]], outcomes: list[list[float]]) -> dict[tuple[int, int, int], float]:
    """Advantages as `recipe/prime` of verl makes them of padded rows, for groups of any size."""
    found: dict[tuple[int, int, int], float] = {}
    for g, group in enumerate(q):
        n = len(group)
        rewards = [[BETA * value for value in rollout[:-1]] + [0.0] for rollout in group]
        mean = [sum(rollout) / len(rollout) for rollout in rewards]
        for r, rollout in enumerate(rewards):
            given = [value * n / (n - 1) - sum(mean) / (n - 1) for value in rollout]
            given[-1] += outcomes[g][r] * n / (n - 1) - sum(outcomes[g]) / (n - 1)
            found |= {(g, r, t): sum(given[t:]) for t in range(len(given))}
    values = torch.tensor(list(found.values()), dtype=torch.float64)
    white = (values - values.mean()) / (values.var() + 1e-8).sqrt()
    return dict(zip(found, white.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_advantages_are_those_of_verls_prime(seed):
    q, outcomes = drawn(seed)
    value, step, places = columns(q, outcomes, seed)
    expected = by_verl(q, outcomes)
    np.testing.assert_allclose(
        credited(value, step, BETA), [expected[place] for place in places], rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_reward_model_learns_the_cross_entropy_of_right_and_wrong(seed):
    q, outcomes = drawn(seed)
    value, step, places = columns(q, outcomes, seed)
    leaf = torch.tensor(value, requires_grad=True)
    scores = {}
    for number, (g, r, _) in enumerate(places):
        scores[g, r] = scores.get((g, r), 0.0) + BETA * leaf[number]
    right = torch.tensor([outcomes[g][r] for g, r in scores], dtype=torch.float64)
    probability = torch.stack(list(scores.values())).sigmoid()
    loss = torch.nn.functional.binary_cross_entropy(probability, right)
    (gradient,) = torch.autograd.grad(loss, [leaf])
    found = taught(value, step, BETA)
    assert found.loss == pytest.approx(loss.item())
    np.testing.assert_allclose(found.slope, gradient.numpy(), rtol=1e-9)
    agreed = ((probability > 0.5) == (right > 0)).double().mean().item()
    numbers = numbers_of(found, value, BETA)
    assert (numbers.process_loss, numbers.process_accuracy) == (found.loss, pytest.approx(agreed))
    assert numbers.process_reward == pytest.approx(BETA * value.mean())


def test_a_reward_model_that_knows_nothing_is_right_by_half_and_a_large_score_overflows_nothing():
    value, step, _ = columns([[[0.0], [0.0, 0.0]]], [[1.0, 0.0]])
    found = taught(value, step, BETA)
    assert found.accuracy == 0.5 and found.loss == pytest.approx(np.log(2))
    far = taught(np.full(3, -1e5), step, BETA)
    assert np.isfinite(far.slope).all() and far.loss == pytest.approx(BETA * 1e5 / 2)


def test_rewards_that_cancel_are_not_right():
    """0.3 - 0.2 - 0.1 is 7.5e-9 in float32, in which rewards travel."""
    reward = np.array([0.3, -0.2, -0.1, 0.3, -0.2, -0.1 + 1e-5]).astype(np.float32).astype(float)
    step = StepOutcomes(reward, np.array([0] * 3 + [1] * 3), np.zeros(6, int), [0])
    assert (taught(np.zeros(6), step, BETA).slope > 0).tolist() == [True] * 3 + [False] * 3


def test_a_rollout_that_is_alone_has_no_advantage():
    value, step, places = columns([[[1.0, -2.0, 3.0]], [[0.5, 2.0], [1.0, -1.0]]], [[1.0], [1.0, 0.0]])
    found = credited(value, step, BETA)
    alone = [found[number] for number, place in enumerate(places) if place[0] == 0]
    assert len({*np.round(alone, 12)}) == 1, "what whitening makes of 0"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"name": "grpo", "process": {"beta": 0.1}}, 'use algo.name = "prime", or remove it'),
        ({"credit": "turn"}, "algo.advantage = implicit whole rollouts"),
        ({"experience": {"rollouts": 2}}, "algo.experience does not go with"),
        ({"length_penalty": 0.1}, "algo.length_penalty does not go with"),
        ({"kl": {"coef": 0.1, "place": "reward"}}, 'algo.kl.place = "reward" does not go with'),
        ({"loss": "reinforce"}, ""),
    ],
)
def test_what_does_not_combine_is_refused_by_a_sentence(more, said):
    settings = {"name": "prime", **more}
    if not said:
        assert AlgoConfig(**settings).trains_rewards
        return
    with pytest.raises(ValidationError, match=said):
        AlgoConfig(**settings)


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["lora.rank=0"], "beside the policy's own; set lora.rank"),
        (["lora.rank=4", "train.parallel.shard=2"], "on one rank; remove train.parallel"),
        (["lora.rank=4", "rollout.group_size=1"], "nothing to compare a rollout with"),
    ],
)
def test_runs_without_an_adapter_or_of_several_ranks_are_refused(sets, said):
    with pytest.raises(ConfigError, match=said):
        load_config(MINIMAL, ["algo.name=prime", *sets])
    load_config(MINIMAL, ["algo.name=prime", "lora.rank=4"])


def test_one_of_several_adapters_is_refused_a_reward_model():
    several = [
        {"name": name, "lora": {"rank": 4}, "algo": {"name": algo}} for name, algo in (("a", "rloo"), ("b", "prime"))
    ]
    with pytest.raises(ConfigError, match="or train the adapter in a run of its own"):
        load_config({**MINIMAL, "adapters": several})
