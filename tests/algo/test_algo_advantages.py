"""Advantages of rollouts, tokens, turns and batches against numpy; from scored groups to rows."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.algo.advantages import (
    ADVANTAGES,
    GroupRewards,
    agent_advantages,
    agent_returns,
    best_of_k,
    centred,
    gdpo,
    group_norm,
    has_contrast,
    kl_penalty,
    leave_one_out,
    maxrl,
    opo,
    pass_at_k,
    penalised,
    rae,
    raw,
    return_to_go,
    rewards_of_turns,
    turn_advantages,
    turn_returns,
    whiten,
    z_scores,
)
from headrace.algo.config import AlgoConfig
from headrace.algo.training_rows import algorithm_of
from headrace.core.batches import Group
from headrace.core.errors import ConfigError
from headrace.core.types import Completion, Episode, Prompt, Scored, TeacherTrace, Turn, VersionSpan

rewards = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=2, max_size=12)

COMPARING = [name for name, advantage in ADVANTAGES.items() if advantage.compares]


def group(*values: float, lengths: tuple[int, ...] = ()) -> GroupRewards:
    return GroupRewards(tuple(values), lengths or tuple(range(1, len(values) + 1)))


# -- one number per rollout -------------------------------------------------------------------------------------------------


def maxrl_by_hand(r: np.ndarray) -> np.ndarray:
    """Scaled down to what one success among as many could have."""
    if r.mean() < 1e-8:
        return 0 * r
    advantages = (r - r.mean()) / r.mean()
    return advantages * min(1.0, (len(r) - 1) / np.abs(advantages).max())


def best_of_k_by_hand(r: np.ndarray, k: int) -> np.ndarray:
    """By trying every set."""
    sets = list(itertools.combinations(range(len(r)), min(k, len(r) - 1)))
    best = np.array([r[list(one)].max() for one in sets])
    scores = (best - best.mean()) / (best.std() + 1e-6) if np.ptp(best) > 0 else 0 * best
    return np.array(
        [np.mean([score for score, one in zip(scores, sets, strict=True) if i in one]) for i in range(len(r))]
    )


@given(rewards)
def test_advantages_against_numpy(values):
    r, n = np.array(values), np.arange(1, len(values) + 1)
    best, second = np.sort(r)[-1], np.sort(r)[-2]
    if len(set(values)) == 1:
        expected = dict.fromkeys(COMPARING, np.zeros_like(r))
    else:
        z = (r - r.mean()) / (r.std(ddof=1) + 1e-6)
        expected = {
            "group_norm": z,
            "smoothed": z,  # of a first group
            "centred": r - r.mean(),
            "group_baseline": r - r.mean(),
            "leave_one_out": np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))]),
            "maxrl": maxrl_by_hand(r),
            "opo": r - (n * r).sum() / n.sum(),
            "gdpo": z,
            "pass@k": np.where(np.arange(len(r)) == r.argmax(), best - second, 0.0),
            "best_of_k": best_of_k_by_hand(r, 4),
            "every_pair": np.sign(r[:, None] - r[None, :]).sum(1),
            "best_against_worst": 1.0 * (np.arange(len(r)) == r.argmax()) - (np.arange(len(r)) == r.argmin()),
        }
    expected |= {"raw": r, "return_to_go": r, "gae": r, "implicit": r, "zero": 0 * r}
    assert set(expected) == set(ADVANTAGES)
    for name, (function, *_) in ADVANTAGES.items():
        np.testing.assert_allclose(function(group(*values)), expected[name], rtol=1e-6, atol=1e-9, err_msg=name)


@given(rewards, st.randoms(use_true_random=False))
def test_the_order_of_a_groups_rollouts_does_not_matter(values, random):
    order = list(range(len(values)))
    random.shuffle(order)
    for name, (function, *_) in ADVANTAGES.items():
        if name == "best_against_worst" and values.count(max(values)) + values.count(min(values)) > 2:
            continue  # the first of equal ones
        there, back = group(*values), [0.0] * len(values)
        shuffled = GroupRewards(*(tuple(column[i] for i in order) for column in there[:2]))
        for place, advantage in zip(order, function(shuffled), strict=True):
            back[place] = advantage
        np.testing.assert_allclose(back, function(there), rtol=1e-6, atol=1e-9, err_msg=name)


def test_known_values():
    assert group_norm(group(1, 0)) == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], abs=1e-5)
    assert centred(group(1, 0, 0, 0)) == [0.75, -0.25, -0.25, -0.25]
    assert leave_one_out(group(1, 0, 0, 0)) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert raw(group(1, 0.5)) == [1, 0.5]
    assert maxrl(group(1, 0, 0, 0)) == [3, -1, -1, -1] and maxrl(group(-1, 0)) == [0, 0]
    assert opo(group(1, 0, lengths=(3, 1))) == [0.25, -0.75]
    assert pass_at_k(group(0.5, 2, 1.5)) == [0, 0.5, 0] and pass_at_k(group(1, 1, 0)) == [0, 0, 0]


def passk_training_by_the_authors(n: int, right: int, k: int) -> tuple[float, float]:
    """The advantage of a right and of a wrong answer in their closed form."""
    rho = 1 - math.comb(n - right, k) / math.comb(n, k)
    sigma = math.sqrt(rho * (1 - rho)) + 1e-6
    return (1 - rho) / sigma, (1 - rho - math.comb(n - right - 1, k - 1) / math.comb(n - 1, k - 1)) / sigma


@pytest.mark.parametrize("k", [1, 2, 4, 7])
@pytest.mark.parametrize("right", range(1, 8))
def test_the_best_of_k_is_the_closed_form_of_pass_at_k_training(right, k):
    found = best_of_k(GroupRewards((1.0,) * right + (0.0,) * (8 - right), attempts=k))
    good, bad = passk_training_by_the_authors(8, right, k)
    assert found == pytest.approx([good] * right + [bad] * (8 - right), abs=1e-6)
    assert any(found) == (8 - right >= k), "once every k contain a right one, there is nothing to learn"


def test_k_is_a_setting_and_lower_in_a_group_of_which_few_came_through():
    rewards = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    for k, there in ((2, 6), (3, 6), (5, 4)):
        rows = rows_by(AlgoConfig("pass@k_training", attempts=k), *map(scored, rewards[:there]))
        good, bad = passk_training_by_the_authors(there, 1, min(k, there - 1))
        assert [row.advantages[0] for row in rows] == pytest.approx([good] + [bad] * (there - 1))
    chosen = AlgoConfig("pass@k_training", attempts=2, subset={"kind": "shortest", "keep": 3})
    rows = rows_by(chosen, *(scored(reward, length) for length, reward in enumerate(rewards, 1)))
    good, bad = passk_training_by_the_authors(3, 1, 2)
    assert [row.advantages[0] for row in rows][:3] == pytest.approx([good, bad, bad])


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=12))
def test_maxrl_never_explodes_where_the_mean_comes_near_zero(values):
    assert all(abs(a) <= len(values) - 1 + 1e-9 for a in maxrl(group(*values)))


def test_maxrl_near_a_mean_of_zero():
    assert maxrl(group(1, -0.999)) == pytest.approx([1, -1])  # by the formula 1999
    assert maxrl(group(0.1 + 0.2, -0.3)) == [0, 0]  # a mean that is rounding
    assert maxrl(group(0, 0, 0, 5)) == [-1, -1, -1, 3]  # what rewards without a sign give stays


@pytest.mark.parametrize(
    "values", [[0.3], [0.1] * 3, [0.7, 0.7], [], [0.3, 0.1 + 0.2], [0.1 + 0.2 - 0.3, 0.0], [1e9, 1e9 + 1e-7]]
)
def test_no_contrast_is_exactly_zero(values):
    """The mean of equal floats need not equal them: 0.1 · 3 / 3 would leave a trace that 1e-6 blows up."""
    assert not has_contrast(values)
    for name in COMPARING:
        assert ADVANTAGES[name].function(group(*values)) == [0.0] * len(values), name


def test_contrast_is_seen():
    assert has_contrast([0, 0, 1]) and not has_contrast([1])
    assert has_contrast([0.3, 0.3 + 1e-6]) and has_contrast([0.0, 1e-9])
    assert pass_at_k(group(0, 0.3, 0.1 + 0.2)) == [0, 0, 0]


def test_a_group_is_normalised_by_its_own_members():
    small, large = group(1, 0), group(1, 0, 0, 0, 0)
    assert group_norm(small)[0] != pytest.approx(group_norm(large)[0], abs=0.1)
    assert sum(group_norm(large)) == pytest.approx(0, abs=1e-9)


def test_gdpo_hears_a_quiet_reward_beside_a_loud_one():
    named = {"loud": (100.0, -100.0, 0.0), "quiet": (0.0, 0.01, 0.0), "constant": (1.0, 1.0, 1.0)}
    columns = [np.array(named["loud"]), np.array(named["quiet"])]
    z = [(c - c.mean()) / (c.std(ddof=1) + 1e-6) for c in columns]
    out = gdpo(GroupRewards((100.0, -99.99, 0.0), named=named, weights={"quiet": 2.0}))
    np.testing.assert_allclose(out, z[0] + 2 * z[1], rtol=1e-9)


def test_length_penalty_is_a_share_of_the_groups_mean():
    assert penalised([1.0, 0.0], [10, 5], 0.2, 10) == pytest.approx((1 - 0.5 * 0.2, -0.5 * 0.2 * 0.5))
    assert penalised([0.0, 0.0], [10, 5], 0.2, 10) == (0.0, 0.0)  # nothing is won by short wrong answers


# -- tokens, turns, batches -------------------------------------------------------------------------------------------------


def test_returns_are_carried_through_what_was_not_sampled():
    mask = [True, True, False, False, True]
    assert return_to_go([0, 0, 0, 0, 1.0], mask) == [1, 1, 1, 1, 1]
    out = return_to_go([1.0, 0, 0, 0, 2.0], mask, gamma=0.5)
    assert out[4] == 2 and out[3] == out[2] == 2 and out[1] == 1 and out[0] == 1.5


def test_turns_are_compared_with_their_like():
    out = turn_advantages([[1.0, 0.0], [0.0, 1.0, 5.0], [0.5]], lambda column: leave_one_out(GroupRewards(column)))
    assert out[0] == pytest.approx([1 - 0.25, -1]) and out[1] == pytest.approx([-0.75, 1, 0]) and out[2] == [0.0]
    scores = turn_advantages([[1.0], [0.0], [0.0]], z_scores)
    np.testing.assert_allclose(np.ravel(scores), (np.array([1, 0, 0]) - 1 / 3) / (np.std([1, 0, 0], ddof=1) + 1e-6))


def test_each_turn_gets_the_return_from_it_on_and_its_tokens_that_advantage():
    """Against the sums written down: two rollouts of two and three turns, each with rewards of turns and one at the end."""

    def episode(count: int) -> Episode:
        done = [Completion((10 + i, 20 + i), (-1.0, -2.0), (VersionSpan(0, 0, 0),), "stop") for i in range(count)]
        return Episode(tuple(Turn((7,) if i else (1, 2), one, (i - 1,) if i else ()) for i, one in enumerate(done)))

    one = Scored(episode(2), 1.75, {"won": 1.0, "form": 0.75}, turn_rewards=({"form": 0.5}, {"form": 0.25}))
    other = Scored(episode(3), 0.5, {"won": 0.0, "form": 0.5}, turn_rewards=({}, {"form": 0.5}, {}))
    of = lambda *scored: turn_returns([rewards_of_turns(rollout) for rollout in scored])  # noqa: E731
    assert of(one, other) == [[1.75, 1.25], [0.5, 0.5, 0.0]]
    assert of(Scored(episode(2), 1.0, {"won": 1.0})) == [[1.0, 1.0]], "the end alone: every turn has it"
    prompt = Prompt("p", "?", (1, 2))
    rows = algorithm_of(AlgoConfig("dr_grpo", credit="turn"), 8).rows(prompt, [one, other])
    assert rows[0].tokens == (10, 20, 7, 11, 21) and rows[0].advantages == (0.625, 0.625, 0.375, 0.375, 0.375)
    assert rows[1].advantages == (-0.625,) * 2 + (-0.375,) * 3 + (0.0,) * 3
    plain = algorithm_of(AlgoConfig("dr_grpo"), 8).rows(prompt, [one, other])
    assert plain[0].advantages == (0.625,) * 5 and plain[0].mask == rows[0].mask == (True, True, False, True, True)


def game(moves: str, **rewards: float) -> Scored:
    """A game of white (w) and black (b), each of which has a path of its own. `rewards`: what each got, at its last move."""
    done = Completion((10, 20), (-1.0, -2.0), (VersionSpan(0, 0, 0),), "stop")
    turns: list[Turn] = []
    for move in moves:
        last = next((i for i in reversed(range(len(turns))) if turns[i].agent == move), None)
        turns.append(Turn((7,), done, () if last is None else (last,), agent=move))
    lasts = {name: max(i for i, move in enumerate(moves) if move == name) for name in rewards}
    given = tuple({name: rewards[name] for name, i in lasts.items() if i == place} for place in range(len(moves)))
    return Scored(Episode(tuple(turns)), sum(rewards.values()), dict(rewards), turn_rewards=given)


def test_each_agent_is_compared_with_its_like_in_the_other_rollouts() -> None:
    """Three games, of which white wins two: the sums of each game are equal, so that whole rollouts have nothing to compare."""
    games = [game("wbwb", w=1.0, b=-1.0), game("wb", w=-1.0, b=1.0), game("wbw", w=1.0, b=-1.0)]
    assert agent_returns(games[0], [0.5, 0.25, 0.0, 0.125]) == {"w": 0.5, "b": -1.375}
    prompt = Prompt("p", "?", (7,))
    rows = algorithm_of(AlgoConfig("dr_grpo", credit="agent"), 8).rows(prompt, games)
    white, black = 1 / 3, -1 / 3
    found = [(len(row.tokens), sorted({round(a, 9) for a in row.advantages})) for row in rows]
    assert found == [
        (5, [round(1 - white, 9)]),
        (5, [round(-1 - black, 9)]),
        (2, [round(-1 - white, 9)]),
        (2, [round(1 - black, 9)]),
        (2, [round(-1 - black, 9)]),
        (5, [round(1 - white, 9)]),
    ]
    whole = algorithm_of(AlgoConfig("dr_grpo"), 8)
    assert whole.barren(whole.rows(prompt, games)) == "no_contrast"


def test_what_a_rollout_gets_at_its_end_is_shared_by_its_agents() -> None:
    one = msgspec.structs.replace(game("wb", w=1.0), reward=1.5, rewards={"w": 1.0, "polite": 0.5})
    assert agent_returns(one, [0.0, 0.0]) == {"w": 1.5, "b": 0.5}
    alone = agent_advantages([{"w": 1.0, "judge": 3.0}, {"w": 0.0}], lambda column: centred(GroupRewards(column)))
    assert alone == [{"w": 0.5, "judge": 0.0}, {"w": -0.5}]


@pytest.mark.parametrize("credit", ["turn", "agent"])
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"advantage": "opo"}, "algo.advantage = opo"),
        ({"advantage": "gdpo"}, "algo.advantage = gdpo"),
        ({"length_penalty": 0.5}, "algo.length_penalty"),
    ],
)
def test_credit_of_turns_is_refused_where_it_means_nothing(
    credit: str, settings: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        AlgoConfig("grpo", credit=credit, **settings)  # type: ignore[arg-type]


def test_self_play_baseline_is_updated_after_it_was_used():
    advantages, baseline = rae([1.0, 1.0, 0.0])
    assert advantages == pytest.approx([1.0, 0.95, -(0.95 * 0.05 + 0.05)])
    assert baseline == pytest.approx(0.95 * 0.0975) and rae([0.5], baseline)[0] == [0.5 - baseline]


@given(st.lists(st.lists(st.tuples(st.floats(-3, 3), st.booleans()), max_size=5), max_size=6))
def test_whitening_against_numpy(rows):
    values, valid = [[x for x, _ in row] for row in rows], [[v for _, v in row] for row in rows]
    kept = np.array([x for row in rows for x, v in row if v])
    out = whiten(values, valid)
    assert [len(row) for row in out] == [len(row) for row in rows]
    assert all(x == 0 for row, ok in zip(out, valid, strict=True) for x, v in zip(row, ok, strict=True) if not v)
    if len(kept) > 1:
        expected = (kept - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8)
        white = [x for row, ok in zip(out, valid, strict=True) for x, v in zip(row, ok, strict=True) if v]
        np.testing.assert_allclose(white, expected, atol=1e-6)


def test_kl_penalty_is_the_log_ratio_and_survives_a_missing_number():
    assert kl_penalty(-1.0, -1.5) == 0.5 and kl_penalty(-13.0, -1.0) == -12.0
    assert kl_penalty(-1.0, math.nan) == kl_penalty(-math.inf, -1.0) == 0.0
    assert kl_penalty(0.0, -500.0) == 20.0 and kl_penalty(-500.0, 0.0) == -20.0


# -- the algorithm as the pipeline sees it ------------------------------------------------------------------------------------

PROMPT = Prompt("p", "?", (1, 2))


def completion(count: int, stop: str = "stop", logprob: float = -1.0) -> Completion:
    spans = (VersionSpan(0, 0, 0),) if count else ()
    return Completion(tuple(range(5, 5 + count)), (logprob,) * count, spans, stop)


def scored(reward: float, count: int = 2, references: tuple[tuple[float, ...], ...] = (), **named: float) -> Scored:
    return Scored(Episode((Turn((1, 2), completion(count)),)), reward, named, references=references)


def rows_by(algo: AlgoConfig, *group: Scored):
    return algorithm_of(algo, 10).rows(PROMPT, group)


def test_rows_get_their_rollouts_advantage():
    rows = rows_by(AlgoConfig("dr_grpo"), scored(1.0), scored(0.0, 3))
    assert [row.advantages for row in rows] == [(0.5, 0.5), (-0.5, -0.5, -0.5)]


def test_failed_rollouts_leave_an_uneven_group_to_its_own_members():
    algorithm = algorithm_of(AlgoConfig(), 10)
    assert algorithm.min_rollouts == 2  # of four rollouts two have failed: `scored` is what came through
    first, _ = algorithm.rows(PROMPT, [scored(1.0), scored(0.0)])
    assert first.advantages[0] == pytest.approx(math.sqrt(0.5), abs=1e-5)


def test_kl_in_the_reward_comes_before_the_advantage():
    kl = {"coef": 0.1, "place": "reward", "estimator": "k1"}
    near, far = scored(1.0, references=((-1.0, -1.0),)), scored(1.0, references=((-2.0, -3.0),))
    rows = rows_by(AlgoConfig("dr_grpo", kl=kl), near, far)
    assert [row.advantages[0] for row in rows] == pytest.approx([0.15, -0.15])


def test_reinforce_plus_plus_returns_are_per_token_and_whitened_over_the_batch():
    algo = AlgoConfig("reinforce++", kl={"coef": 0.5, "place": "reward", "estimator": "k1"})
    algorithm = algorithm_of(algo, 10)
    assert algorithm.min_rollouts == 1
    (a,) = algorithm.rows(PROMPT, [scored(1.0, references=((-2.0, -1.0),))])
    (b,) = algorithm.rows(PROMPT, [scored(0.0, references=((-1.0, -1.0),))])
    assert a.advantages == (0.5, 1.0) and b.advantages == (0.0, 0.0)
    masked = replace(b, logprobs=(-1.0, math.nan))
    groups = (Group(0, PROMPT, (), (a,)), Group(1, PROMPT, (), (masked,)))
    white = [row.advantages for group in algorithm.assemble(groups) for row in group.rows]
    valid = np.array([0.5, 1.0, 0.0])  # a token without a sampler's log-prob is in no statistic
    expected = (valid - valid.mean()) / np.sqrt(valid.var(ddof=1) + 1e-8)
    np.testing.assert_allclose([*white[0], white[1][0]], expected)
    assert white[1][1] == 0.0


def test_returns_cross_a_tool_call():
    turns = (Turn((1, 2), completion(2)), Turn((8, 9), completion(1), parents=(0,)))
    (row,) = rows_by(AlgoConfig("reinforce++"), Scored(Episode(turns), 1.0, {}))
    assert row.mask == (True, True, False, False, True) and row.advantages == (1.0, 1.0, 0.0, 0.0, 1.0)


def test_rewards_of_turns_are_discounted_by_every_sampled_token_in_whatever_rows_they_lie():
    """Two turns with rewards, and one at the end; on one path, and after a rewritten history on two."""
    for parents in ((0,), ()):
        turns = (Turn((1, 2), completion(2)), Turn((8, 9) if parents else (1, 2, 8), completion(3), parents=parents))
        one = Scored(Episode(turns), 1.75, {}, turn_rewards=({"form": 0.5}, {"form": 0.25}))
        rows = rows_by(AlgoConfig("reinforce++", gamma=0.5), one)
        sampled = [a for row in rows for a, mask in zip(row.advantages, row.mask, strict=True) if mask]
        last = 0.25 + 1.0  # what the second turn got, and the end
        expected = [0.5**4 * last + 0.5 * 0.5, 0.5**3 * last + 0.5, 0.5**2 * last, 0.5 * last, last]
        assert sampled == pytest.approx(expected)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 1.0), (1.0, 0.0), (0.9, 0.7)])
def test_returns_of_turns_less_the_groups_means_are_gae(gamma, lam):
    """GAE's sum over the definition of δ (arXiv 1506.02438, eq. 16), with the group's mean return at a turn as the value."""
    rewards = [[0.5, 0.0, 1.0], [0.0, 0.25], [0.0, 0.0, 0.0, 2.0]]
    plain = [[sum(gamma**k * r for k, r in enumerate(own[i:])) for i in range(len(own))] for own in rewards]
    value = [np.mean([own[i] for own in plain if i < len(own)]) for i in range(4)]
    for own, found in zip(rewards, turn_returns(rewards, gamma, lam), strict=True):
        after = [*value[1 : len(own)], 0.0]
        delta = [r + gamma * v - value[i] for i, (r, v) in enumerate(zip(own, after, strict=True))]
        gae_ = [sum((gamma * lam) ** (j - i) * delta[j] for j in range(i, len(own))) for i in range(len(own))]
        assert [g - value[i] for i, g in enumerate(found)] == pytest.approx(gae_)


def test_turns_of_an_environment_are_discounted_through_the_settings():
    turns = (Turn((1, 2), completion(2)), Turn((8,), completion(1), parents=(0,)))
    scored_ = [Scored(Episode(turns), reward, {}) for reward in (1.0, 0.0)]
    rows = rows_by(AlgoConfig("dr_grpo", credit="turn", gamma=0.5), *scored_)
    assert rows[0].advantages == pytest.approx((0.25, 0.25, 0.5, 0.5))
    rows = rows_by(AlgoConfig("dr_grpo", credit="turn", lam=0.0), *scored_)
    assert rows[0].advantages == pytest.approx((0.0, 0.0, 0.5, 0.5)), "the first turns are followed by the same mean"


def test_overlong_completions_take_the_reward_at_their_last_token_in_the_loss():
    turns = (Turn((1, 2), completion(2)), Turn((8,), completion(2, stop="length"), parents=(0,)))
    (row,) = rows_by(AlgoConfig("reinforce++", overlong="mask"), Scored(Episode(turns), 1.0, {}))
    assert row.mask == (True, True, False, False, False) and row.advantages[:2] == (1.0, 1.0)


def test_most_algorithms_leave_the_batch_alone():
    rows = rows_by(AlgoConfig(), scored(1.0), scored(0.0))
    groups = (Group(0, PROMPT, (), rows),)
    assert algorithm_of(AlgoConfig(), 10).assemble(groups) is groups


@pytest.mark.parametrize("name", ["reinforce++_baseline", "gdpo"])
def test_group_advantages_are_whitened_over_the_valid_tokens_of_the_batch(name):
    algorithm = algorithm_of(AlgoConfig(name), 10)
    many = [
        [scored(1.0, 3, only=1.0), scored(0.0, 1, only=0.0)],
        [scored(5.0, 2, only=5.0), scored(1.0, 2, only=1.0), scored(0.0, 4, only=0.0)],
    ]
    groups = tuple(Group(i, PROMPT, (), algorithm.rows(PROMPT, members)) for i, members in enumerate(many))
    plain = np.array([a for group in groups for row in group.rows for a in row.advantages])
    white = np.array([a for group in algorithm.assemble(groups) for row in group.rows for a in row.advantages])
    np.testing.assert_allclose(white, (plain - plain.mean()) / np.sqrt(plain.var(ddof=1) + 1e-8))


def test_gdpo_gets_the_weights_of_the_rewards():
    both = [scored(3.0, exact=1.0, short=1.0), scored(0.0, exact=0.0, short=0.0), scored(1.0, exact=1.0, short=0.0)]
    plain = algorithm_of(AlgoConfig("gdpo"), 10).rows(PROMPT, both)
    heavy = algorithm_of(AlgoConfig("gdpo"), 10, {"short": 3.0}).rows(PROMPT, both)
    named = {"exact": (1.0, 0.0, 1.0), "short": (1.0, 0.0, 0.0)}
    assert plain[2].advantages[0] == pytest.approx(gdpo(GroupRewards((), named=named))[2])
    assert heavy[2].advantages[0] == pytest.approx(gdpo(GroupRewards((), named=named, weights={"short": 3.0}))[2])


def test_length_penalty_prefers_the_shorter_of_two_right_answers():
    long, short = rows_by(AlgoConfig("dr_grpo", length_penalty=0.5), scored(1.0, 10), scored(1.0, 2))
    assert short.advantages[0] == pytest.approx(0.2) == -long.advantages[0]


def test_length_penalty_counts_the_sampled_tokens_of_all_turns():
    """Of 24 tokens that can be sampled in three turns of 8, one rollout has 12 and the other 3; what it reads in between costs nothing."""

    def talk(*counts: int) -> Scored:
        first, *later = counts
        turns = [Turn((1, 2), completion(first))]
        turns += [Turn((9,) * 50, completion(count), parents=(place,)) for place, count in enumerate(later)]
        return Scored(Episode(tuple(turns)), 1.0, {})

    long, short = algorithm_of(AlgoConfig("dr_grpo", length_penalty=0.5), 24).rows(PROMPT, [talk(8, 3, 1), talk(2, 1)])
    assert short.advantages[0] == pytest.approx(0.5 * (12 - 3) / 24 / 2) == -long.advantages[0]


def test_length_penalty_never_rewards_length():
    """Not where the mean is negative either: by rewards of -1, or by a divergence that was taken off first."""
    assert penalised((-1.0, -1.0), (10, 2), 0.5, 10) == (-1.0, -1.0)
    kl = {"coef": 0.1, "place": "reward", "estimator": "k1"}
    wrong = [scored(0.0, n, references=((-2.0,) * n,)) for n in (2, 2)]
    rows = rows_by(AlgoConfig("dr_grpo", kl=kl, length_penalty=0.5), *wrong)
    assert all(row.advantages == (0.0, 0.0) for row in rows)


def test_what_teaches_nothing_has_a_name():
    def barren(algo: AlgoConfig, *rows):
        return algorithm_of(algo, 10).barren(rows)

    good, same = (
        rows_by(AlgoConfig("dr_grpo"), scored(1.0), scored(0.0)),
        rows_by(AlgoConfig(), scored(1.0), scored(1.0)),
    )
    assert barren(AlgoConfig(), *good) == "" and barren(AlgoConfig(), *same) == "no_contrast"
    assert barren(AlgoConfig("reinforce"), *same) == ""
    assert barren(AlgoConfig(), replace(good[0], mask=(False, False))) == "overlong"
    untaught = replace(same[0], teacher=TeacherTrace("", (0, 0), (math.nan, math.nan)))
    taught = replace(same[0], teacher=TeacherTrace("t", (0, 0), (-1.0, math.nan)))
    assert barren(AlgoConfig("opd"), untaught) == barren(AlgoConfig("opd"), same[0]) == "no_teacher"
    assert barren(AlgoConfig("opd"), untaught, taught) == ""
    assert barren(AlgoConfig("opd"), replace(taught, mask=(False, False))) == "overlong"
    assert barren(AlgoConfig("reinforce", distill={"kind": "sampled"}), untaught) == ""  # learns from its reward


def test_a_rollout_that_no_teacher_scored_is_in_no_denominator():
    alone = TeacherTrace("t", (0, 0), (math.nan, math.nan))
    seen = TeacherTrace("t", (4, 4), (-1.0, -2.0))
    group = [replace(scored(1.0), teachers=(alone,)), replace(scored(0.0), teachers=(seen,))]
    assert [row.mask for row in rows_by(AlgoConfig("sdpo"), *group)] == [(False, False), (True, True)]
    both = AlgoConfig("grpo", distill={"kind": "sampled"})
    assert all(all(row.mask) for row in rows_by(both, *group)), "its reward teaches it"
    assert algorithm_of(AlgoConfig("sdpo"), 10).barren(rows_by(AlgoConfig("sdpo"), group[0], group[0])) == "no_teacher"


def test_cross_entropy_has_its_own_denominator():
    rows = rows_by(AlgoConfig("ce"), scored(1.0), scored(0.0, 3))
    assert [row.mask for row in rows] == [(True, True), (False, False, False)]
    nothing = rows_by(AlgoConfig("ce"), scored(0.0), scored(0.0))  # a group of weight zero is dropped, not masked
    assert algorithm_of(AlgoConfig("ce"), 10).barren(nothing) == "no_contrast"
    assert all(all(row.mask) for row in rows_by(AlgoConfig("ce"), scored(0.0)))


# -- a user's own advantage ----------------------------------------------------------------------------------------------------


def user(tmp_path, body: str) -> AlgoConfig:
    (tmp_path / "mine.py").write_text(body)
    return AlgoConfig(advantage=f"{tmp_path / 'mine.py'}:advantage")


def test_a_users_advantage_is_used(tmp_path):
    algo = user(tmp_path, "def advantage(group):\n    return [r * n for r, n in zip(group.rewards, group.lengths)]\n")
    rows = rows_by(algo, scored(1.0, 2), scored(0.5, 3))
    assert [row.advantages[0] for row in rows] == [2.0, 1.5]


@pytest.mark.parametrize("result", ["[1.0]", "None", "[float('nan'), 1.0]", "[1e300, 1.0]", "3.0", "['a', 'b']"])
def test_a_wrong_result_is_refused_at_the_first_call(tmp_path, result):
    algo = user(tmp_path, f"def advantage(group):\n    return {result}\n")
    with pytest.raises(ConfigError, match=r"for a group of 2.*; return one finite number per rollout"):
        rows_by(algo, scored(1.0), scored(0.0))


def test_an_advantage_that_raises_ends_the_run_with_its_line(tmp_path):
    algo = user(tmp_path, "def advantage(group):\n    return [1 / 0 for _ in group.rewards]\n")
    with pytest.raises(
        ConfigError, match=r"raised ZeroDivisionError: division by zero \(.*mine\.py:2\) for the rewards \(1\.0, 0\.0\)"
    ):
        rows_by(algo, scored(1.0), scored(0.0))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("def advantages(group): ...", "did you mean advantages?"),
        ("def advantage(): ...", "cannot be called with one argument"),
        ("def advantage(group:", "mine.py:1"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_what_cannot_be_loaded_is_refused_at_start(tmp_path, body, words):
    with pytest.raises(ConfigError, match=r"algo\.advantage = ") as refused:
        algorithm_of(user(tmp_path, body), 10)
    assert words in str(refused.value)


def test_a_missing_file_is_refused():
    with pytest.raises(ConfigError, match="there is no file"):
        algorithm_of(AlgoConfig(advantage="gone.py:advantage"), 10)


# -- the rollouts of a group that are trained ------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([0.0, 0.3, 0.5, 1.0, -2.0]), min_size=3, max_size=8), st.data())
def test_no_subset_has_a_larger_variance_than_the_chosen_one(rewards, data):
    keep = data.draw(st.integers(2, len(rewards) - 1))
    places = GroupRewards(tuple(rewards)).chosen("max_variance", keep)
    assert len(places) == keep == len(set(places)) and places == sorted(places)
    every = itertools.combinations(rewards, keep)
    assert np.var([rewards[place] for place in places]) == pytest.approx(max(map(np.var, every)), abs=1e-12)


def test_the_shortest_and_the_most_efficient_are_chosen_the_first_of_equals():
    of_four = GroupRewards((1.0, 1.0, 0.0, 0.5), (10, 4, 4, 2))
    assert of_four.chosen("shortest", 2) == [1, 3] and of_four.chosen("shortest", 3) == [1, 2, 3]
    assert of_four.chosen("efficient", 2) == [1, 3], "0.1, 0.25, 0 and 0.25 for a token"
    assert of_four.chosen("efficient", 4) == [0, 1, 2, 3]


def roc_by_the_authors(rewards: list[float], penalty: list[float], keep: int) -> tuple[int, list[int]]:
    """How many wrong rollouts their `resample_of_correct` takes, at least one of either kind; and which right ones."""
    right = sorted((weight, place) for place, weight in enumerate(penalty) if rewards[place] > 0)
    wrong = [place for place, reward in enumerate(rewards) if reward <= 0]
    zero, other = (round(len(kind) * keep / len(rewards)) for kind in (wrong, right))
    if zero <= min(1, len(wrong)):
        zero = min(1, len(wrong))
        other = keep - zero
    if other <= min(1, len(right)):
        other = min(1, len(right))
        zero = keep - other
    return zero, sorted(place for _, place in right[:other])


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 1.0, -0.5, 0.3]), st.integers(0, 3)), min_size=3, max_size=10), st.data()
)
def test_the_cleanest_right_rollouts_and_wrong_ones_in_their_share(rollouts, data):
    rewards, penalty = (list(column) for column in zip(*rollouts, strict=True))
    keep = data.draw(st.integers(2, len(rewards) - 1))
    group = GroupRewards(tuple(rewards), tuple(penalty), {"tidy": tuple(-float(value) for value in penalty)})
    places = group.chosen("cleanest", keep, "tidy")
    assert places == group.chosen("cleanest", keep), "by the fewest tokens, which are as many"
    assert len(set(places)) == keep and places == sorted(places)
    zero, right = roc_by_the_authors(rewards, penalty, keep)
    if zero + len(right) == keep:  # theirs rounds both counts, and fails where these do not add up
        assert [place for place in places if rewards[place] > 0] == right


def test_a_reward_of_weight_zero_says_what_is_clean_and_one_that_is_not_there_is_refused():
    four = [scored(1.0, 2, tidy=0.0), scored(1.0, 9, tidy=1.0), scored(0.0, 3, tidy=1.0), scored(0.0, 8, tidy=1.0)]
    trained = lambda **subset: [any(row.mask) for row in rows_by(AlgoConfig("grpo_roc", subset=subset), *four)]  # noqa: E731
    assert trained() == [True, False, True, False] and trained(by="tidy") == [False, True, True, False]
    with pytest.raises(ConfigError, match="algo.subset.by = tdy is the name of no reward; there are tidy"):
        trained(by="tdy")
    assert GroupRewards((1.0, 1.0, 0.0), (1, 1, 1), {"a": (math.nan, 0.0, 0.0)}).chosen("cleanest", 2, "a") == [1, 2]


@pytest.mark.parametrize("name", ["gfpo", "pods"])
def test_chosen_rollouts_are_compared_among_themselves_and_the_others_are_in_no_loss(name):
    four = [scored(1.0, 9), scored(1.0, 2), scored(0.0, 3), scored(0.0, 8)]
    rows = rows_by(AlgoConfig(name), *four)
    trained = {"gfpo": [1, 2], "pods": [0, 2]}[name]
    assert [place for place, row in enumerate(rows) if any(row.mask)] == trained
    alone = rows_by(AlgoConfig("grpo"), *(four[place] for place in trained))
    assert [rows[place].advantages for place in trained] == [row.advantages for row in alone]
    assert all(not any(row.advantages) for place, row in enumerate(rows) if place not in trained)


def test_a_subset_without_contrast_is_barren_though_the_group_has_some():
    algorithm = algorithm_of(AlgoConfig("gfpo"), 10)
    group = [scored(1.0, 9), scored(0.0, 2), scored(0.0, 3), scored(1.0, 8)]
    assert algorithm.barren(algorithm.rows(PROMPT, group)) == "no_contrast"
    assert not algorithm_of(AlgoConfig("grpo"), 10).barren(algorithm_of(AlgoConfig("grpo"), 10).rows(PROMPT, group))


def test_named_rewards_are_those_of_the_chosen_rollouts():
    rows = rows_by(
        AlgoConfig("gdpo", subset={"kind": "shortest", "keep": 2}),
        scored(3.0, 9, a=3.0),
        scored(1.0, 2, a=1.0),
        scored(0.0, 3, a=0.0),
    )
    alone = rows_by(AlgoConfig("gdpo"), scored(1.0, 2, a=1.0), scored(0.0, 3, a=0.0))
    assert [row.advantages for row in rows[1:]] == [row.advantages for row in alone]
