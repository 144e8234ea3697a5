"""A critic: rewards at their tokens, advantages and targets against the definition, and the loss and gradient of a step in float64, written down a
second time. In how many rows, microbatches and ranks a trajectory lies changes none of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from headrace.algo.config import AlgoConfig
from headrace.algo.critic import Discounts, StepTokens, gae, judge
from headrace.algo.recipe_parts import Critic
from headrace.algo.training_rows import algorithm_of
from headrace.core.batches import Group
from headrace.core.errors import ConfigError
from headrace.core.types import Completion, Episode, Prompt, Scored, Turn, VersionSpan
from headrace.loop.staleness import StalenessConfig
from headrace.loop.staleness import judge as judge_age
from headrace.run.config import load_config

PROMPT = Prompt("p", "?", (1, 2))


def by_definition(reward: Sequence[float], value: Sequence[float], gamma: float, lam: float) -> list[float]:
    """Σ_l (γλ)^l δ_{t+l} of one trajectory, as GAE's paper writes it."""
    behind = [*value[1:], 0.0]
    delta = [r + gamma * following - v for r, v, following in zip(reward, value, behind, strict=True)]
    return [sum((gamma * lam) ** (j - i) * delta[j] for j in range(i, len(delta))) for i in range(len(delta))]


NUMBERS = st.floats(-2, 2, width=32)


@given(
    st.lists(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=7), min_size=1, max_size=5),
    st.floats(0.5, 1),
    st.floats(0, 1),
)
def test_gae_is_the_sum_of_the_definition(trajectories, gamma, lam):
    flat = np.array([token for trajectory in trajectories for token in trajectory])
    lengths = np.array([len(trajectory) for trajectory in trajectories])
    found = gae(flat[:, 0], flat[:, 1], lengths, gamma, np.full(len(lengths), lam))
    expected = [by_definition(*zip(*trajectory, strict=True), gamma, lam) for trajectory in trajectories]
    np.testing.assert_allclose(found, np.concatenate(expected), atol=1e-9)


def test_lambda_of_the_policy_may_depend_on_the_length_and_that_of_the_critic_is_its_own():
    """VAPO (arXiv 2504.05118): λ = 1 - 1/(α·l) for the policy, 1 for the critic."""
    reward, value = [0.0] * 4 + [1.0] + [0.0, 0.5], [0.3, 0.1, -0.2, 0.4, 0.6, 0.2, 0.1]
    tokens = StepTokens(np.array(value), np.array(reward), np.array([3] * 5 + [8] * 2), np.zeros(7, int))
    judged = judge(tokens, Discounts(1.0, 1.0, Critic(lam=1.0, length_rate=0.4)))
    policy = by_definition(reward[:5], value[:5], 1.0, 0.5) + by_definition(reward[5:], value[5:], 1.0, 0.0)
    whitened = (np.array(policy) - np.mean(policy)) / np.sqrt(np.var(policy, ddof=1) + 1e-8)
    np.testing.assert_allclose(judged.advantage, whitened, atol=1e-12)
    np.testing.assert_allclose(judged.target, [1.0] * 5 + [0.5] * 2)
    papers = Critic(lam=1.0, length_rate=0.05, alone_steps=50, imitation=0.1, trunk=0.0)
    assert AlgoConfig("vapo").recipe.critic == papers
    assert judged.succeeded.all() and judged.numbers.advantage_std == pytest.approx(np.std(policy))


def test_rewards_that_cancel_are_no_success():
    """0.3 - 0.2 - 0.1 is 7.5e-9 in float32. Imitation would take such a rollout for a right one."""
    reward = np.array([0.3, -0.2, -0.1, 0.3, -0.2, -0.1 + 1e-5]).astype(np.float32).astype(float)
    assert reward[:3].sum() > 0
    tokens = StepTokens(np.zeros(6), reward, np.array([0] * 3 + [1] * 3), np.zeros(6, int))
    assert judge(tokens, Discounts(1.0, 1.0, Critic())).succeeded.tolist() == [False] * 3 + [True] * 3


def test_tokens_of_a_trajectory_are_ordered_by_their_turns_wherever_they_stand():
    """Two trajectories, whose turns come in two orders."""
    tokens = StepTokens(
        np.arange(6) / 10, np.array([0, 1.0, 2, 0, 0, 3]), np.array([0, 0, 1, 0, 0, 1]), np.array([0, 0, 4, 2, 2, 1])
    )
    order = [2, 0, 1, 5, 3, 4]  # turn 4 of the second trajectory before its turn 1
    moved = StepTokens(*(column[order] for column in tokens))
    one, other = (judge(given, Discounts(0.9, 0.8, Critic())) for given in (tokens, moved))
    np.testing.assert_array_equal(one.advantage[order], other.advantage)
    np.testing.assert_array_equal(one.target[order], other.target)
    second = by_definition([3.0, 2.0], [0.5, 0.2], 0.9, 0.8)
    np.testing.assert_allclose(one.target[[5, 2]], np.array([0.5, 0.2]) + second)
    assert one.numbers == other.numbers


def test_a_critic_that_knows_the_returns_explains_all_of_them_and_a_constant_nothing():
    reward = np.array([0, 0, 1.0, 0, 0, 0, 0.5])
    where = (np.array([0] * 3 + [1] * 2 + [2] * 2), np.zeros(7, int))
    returns = np.array([1, 1, 1, 0, 0, 0.5, 0.5])
    exact, constant, wrong = (
        judge(StepTokens(value, reward, *where), Discounts(1.0, 1.0, Critic())).numbers
        for value in (returns, np.full(7, 0.25), -returns)
    )
    assert (exact.explained_variance, exact.value_loss, exact.advantage_std) == (1.0, 0.0, 0.0)
    assert constant.explained_variance == pytest.approx(0.0) and wrong.explained_variance < -1
    assert constant.return_mean == pytest.approx(returns.mean()) and constant.value_mean == 0.25
    assert (
        judge(StepTokens(returns, 0 * reward, *where), Discounts(1.0, 1.0, Critic())).numbers.explained_variance == 0.0
    )


@given(arrays(np.float64, st.integers(0, 3), elements=st.floats(-1, 1)))
def test_a_step_of_hardly_any_tokens_has_no_advantage(value):
    count = len(value)
    judged = judge(
        StepTokens(value, np.zeros(count), np.zeros(count, int), np.zeros(count, int)), Discounts(1, 1, Critic())
    )
    assert np.isfinite(judged.advantage).all() and len(judged.target) == count
    assert count != 1 or judged.advantage[0] == 0


# -- where rewards are put --------------------------------------------------------------------------------------------------


def done(*tokens: int, logprobs: tuple[float, ...] = ()) -> Completion:
    return Completion(tokens, logprobs or (-1.0,) * len(tokens), (VersionSpan(0, 0, 0),), "stop")


def rows(algo: AlgoConfig, rollout: Scored) -> Any:
    return algorithm_of(algo, 16).rows(PROMPT, [rollout])


def test_a_reward_stands_at_the_token_where_it_was_given():
    """Of turns at their last token, of the end at the last one, in one row or in two; context has none."""
    first, second = done(10, 11), done(12, 13, 14)
    rewards = {"turn_rewards": ({"form": 0.25}, {"form": 0.5})}
    path = Episode((Turn((1, 2), first), Turn((7, 8), second, (0,))))
    (row,) = rows(AlgoConfig("ppo"), Scored(path, 1.75, {"won": 1.0, "form": 0.75}, **rewards))
    assert row.advantages == (0, 0.25, 0, 0, 0, 0, 1.5) and row.turns == (0, 0, 1, 1, 1, 1, 1)
    rewritten = Episode((Turn((1, 2), first), Turn((1, 2, 9), second)))
    one, other = rows(AlgoConfig("ppo"), Scored(rewritten, 1.75, {"won": 1.0, "form": 0.75}, **rewards))
    assert (one.advantages, one.turns) == ((0, 0.25), (0,)) and (other.advantages, other.turns) == ((0, 0, 1.5), (1,))
    assert algorithm_of(AlgoConfig("grpo"), 16).rows(PROMPT, [Scored(path, 1.0, {})])[0].turns == ()


def test_what_is_given_to_a_token_outside_of_the_loss_belongs_to_the_one_before():
    """A token whose log-prob is not known, a turn that is context, and one without any token."""
    lost = done(12, 13, logprobs=(-1.0, float("nan")))
    turns = (
        Turn((1, 2), done(10, 11)),
        Turn((), lost, (0,)),
        Turn((5,), done(14), (1,), trained=False),
        Turn((6,), done(), (2,)),
    )
    rollout = Scored(Episode(turns), 8.0, {}, turn_rewards=({"a": 1.0}, {"a": 2.0}, {"a": 3.0}, {}))
    (row,) = rows(AlgoConfig("ppo"), rollout)
    assert row.tokens == (10, 11, 12, 13, 5, 14, 6)
    assert row.advantages == (0, 1.0, 2.0 + 3.0 + 2.0, 0, 0, 0, 0)


def test_the_reward_of_a_token_that_is_too_old_stays_with_what_came_before_it():
    """Both turns are asked for at once; the second one ends early, and the first is still sampled under the next weights."""
    first = Completion((10, 11, 12), (-1.0,) * 3, (VersionSpan(0, 0, 0), VersionSpan(1, 1, 1)), "stop")
    turns = (Turn((1, 2), first), Turn((1, 2, 9), done(13, 14)), Turn((1, 2), done(15), agent="b"))
    whole = Scored(Episode(turns), 1.0, {}, turn_rewards=({"form": 0.25}, {}, {}))
    group = Group(0, PROMPT, (whole,), rows(AlgoConfig("ppo"), whole))
    assert [row.advantages for row in group.rows] == [(0, 0, 0.25), (0, 0.75), (0.75,)]
    kept = judge_age(group, 1, StalenessConfig(max_lag=0, overdue="trim", groups_per_step=1))
    assert kept and [row.mask for row in kept.rows] == [(False, True, True), (False,) * 2, (False,)]
    assert [row.advantages for row in kept.rows] == [(0, 0, 1.0), (0, 0), (0,)], (
        "the other agent has nothing left to learn"
    )
    assert judge_age(group, 0, StalenessConfig(max_lag=0, overdue="trim", groups_per_step=1)) is group


def test_every_agent_has_the_rewards_of_its_own_turns_and_that_of_the_end():
    turns = (
        Turn((1, 2), done(10), agent="a"),
        Turn((9,), done(11), (0,), agent="b"),
        Turn((), done(12), (1,), agent="a"),
    )
    rollout = Scored(Episode(turns), 2.0, {}, turn_rewards=({"x": 0.5}, {"x": 0.25}, {}))
    (row,) = rows(AlgoConfig("ppo"), rollout)
    assert row.trajectories == (0, 1, 1, 0) and row.advantages == (0.5, 0, 0.25 + 1.25, 1.25)


def test_steps_of_a_process_reward_and_the_divergence_are_rewards_of_tokens():
    """The weighted returns of steps are 0.9, 0.6, 0.2: the steps give 0.3, 0.4, 0.2, and the rest of the reward is the end's."""
    segments = (((2, 1.0, 0.9), (3, 1.0, 0.6), (4, 1.0, 0.2)),)
    episode = Episode((Turn((1, 2), done(10, 11, 12, 13)),))
    scored = Scored(episode, 1.4, {}, segments=segments, references=((-1.5, -1.0, -0.5, -1.0),))
    (row,) = rows(AlgoConfig("ppo"), scored)
    assert row.advantages == pytest.approx((0, 0.3, 0.4, 0.2 + 0.5))
    (punished,) = rows(AlgoConfig("ppo", kl={"coef": 0.1, "place": "reward"}), scored)
    assert punished.advantages == pytest.approx((-0.05, 0.3, 0.4 + 0.05, 0.7))
    assert sum(row.advantages) == pytest.approx(scored.reward)
    heard = Turn((5,), done(14), (0,), trained=False)
    more = Scored(Episode((*episode.turns, heard)), 1.0, {}, references=(scored.references[0], ()))
    (context,) = rows(AlgoConfig("ppo", kl={"coef": 0.1, "place": "reward"}), more)
    assert context.advantages == pytest.approx((-0.05, 0, 0.05, 1.0, 0, 0)), "no divergence of what is not trained"


def test_groups_of_one_and_groups_without_contrast_are_trained():
    algorithm = algorithm_of(AlgoConfig("ppo"), 16)
    same = [Scored(Episode((Turn((1, 2), done(10 + n)),)), 0.0, {}) for n in range(2)]
    assert algorithm.min_rollouts == 1
    assert algorithm.barren(algorithm.rows(PROMPT, same[:1])) == algorithm.barren(algorithm.rows(PROMPT, same)) == ""
    grouped = algorithm_of(AlgoConfig("grpo"), 16)
    assert grouped.barren(grouped.rows(PROMPT, same)) == "no_contrast"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "grpo", "critic": {"trunk": 0.1}}, 'use algo.name = "ppo"'),
        ({"name": "ppo", "credit": "turn"}, "remove algo.credit"),
        ({"name": "vapo", "lam": 0.95}, "set algo.critic.length_rate = 0"),
        ({"name": "grpo", "lam": 0.95}, 'set algo.name = "ppo"'),
        ({"name": "ppo", "loss": "ce"}, "remove algo.loss"),
        ({"name": "ppo", "critic": {"model": "m", "trunk": 0.1}}, "another model, which gets all of it; remove one"),
        ({"name": "ppo", "critic": {"model_learning_rate": 1e-5}}, "set that, or remove this one"),
        ({"name": "vapo", "kl": {"coef": 0.1, "place": "reward"}}, "or algo.critic.imitation = 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused_with_what_to_do(settings, message):
    with pytest.raises(ValueError, match=message):
        AlgoConfig(**settings)
    followed = {
        "critic": {"name": "ppo", "critic": {"trunk": 0.1}},
        "credit": {"name": "ppo"},
        "lam": {"name": settings["name"].replace("grpo", "ppo"), "lam": 0.95, "critic": {"length_rate": 0}},
        "loss": {"name": "ppo"},
        "kl": settings | {"critic": {"imitation": 0.0}},
    }
    AlgoConfig(**followed[next(name for name in settings if name != "name")])


# -- settings of a run ------------------------------------------------------------------------------------------------------

MINIMAL = {
    "model": {"path": "m"},
    "task": {"kind": "reasoning_gym", "name": "chain_sum"},
    "reward": {"function": "reasoning_gym"},
    "algo": {"name": "ppo"},
}


@pytest.mark.parametrize(
    ("given", "message", "remedy"),
    [
        (
            ["train.parallel.pipeline=2"],
            "set train.parallel.shard instead",
            ["train.parallel.shard=2"],
        ),
        (
            ["rollout.forks.alternatives=2", "environment.function=e.py:f"],
            "choose another algo.name",
            ["algo.name=grpo", "rollout.forks.alternatives=2", "environment.function=e.py:f"],
        ),
        (
            ["algo.name=vapo", "train.steps=50"],
            "raise train.steps, or lower algo.critic.alone_steps",
            ["algo.name=vapo", "train.steps=51"],
        ),
        (
            ["algo.name=vapo", "train.minutes=6"],
            "set one of the two to 0",
            ["algo.name=vapo", "train.minutes=6", "algo.critic.alone_steps=0"],
        ),
        (
            ["algo.critic.model=c", "train.parallel.pipeline=2"],
            "reads them, or those of its own model, on every rank; set train.parallel.shard",
            ["algo.critic.model=c", "train.parallel.shard=2", "train.parallel.tensor=2", "train.parallel.replicate=2"],
        ),
        (
            [
                "algo.critic.model=c",
                "task.kind=jsonl",
                "task.name=''",
                "task.path=r.jsonl",
                "task.images=['image']",
                "reward.function=e.py:f",
            ],
            "images are tokens of the policy's model alone; remove algo.critic.model",
            ["task.kind=jsonl", "task.name=''", "task.path=r.jsonl", "task.images=['image']", "reward.function=e.py:f"],
        ),
        (
            ["algo.critic.model=c", "lora.rank=4", "adapters=[{name = 'a', algo = {}}, {name = 'b', algo = {}}]"],
            "trains a second model beside that of one policy; remove it",
            ["algo.critic.model=c", "lora.rank=4"],
        ),
    ],
    ids=["pipeline", "forks", "steps", "minutes", "stages of its own", "images", "adapters"],
)
def test_a_run_in_which_a_critic_cannot_work_is_refused_and_its_remedy_is_not(given, message, remedy):
    with pytest.raises(ConfigError, match=message):
        load_config(MINIMAL, given)
    load_config(MINIMAL, remedy)
    load_config(MINIMAL, ["rollout.group_size=1"])
