"""Turns that began in equal states (GiGPO), against the paper's formulas in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.algo.advantages import met_again, states_of
from headrace.algo.config import AlgoConfig
from headrace.algo.training_rows import algorithm_of
from headrace.core.errors import ConfigError
from headrace.core.types import Completion, Episode, Prompt, Scored, Turn, VersionSpan
from headrace.run.config import load_config

DONE = Completion((10, 20), (-1.0, -2.0), (VersionSpan(0, 0, 0),), "stop")
PROMPT = Prompt("p", "?", (1, 2))
MINIMAL = {"model": {"path": "m"}, "task": {"kind": "jsonl", "path": "rows.jsonl"}, "reward": {"function": "a.py:f"}}


def walk(states: str, reward: float = 0.0, given: dict[int, float] | None = None) -> Scored:
    """A rollout of a turn for each letter, which is the state that it began in. `given`: rewards of turns, beside that at the end."""
    turns = tuple(Turn((7,), DONE, (i - 1,) if i else (), state=state) for i, state in enumerate(states))
    given = given or {}
    rewards = tuple({"step": given[i]} if i in given else {} for i in range(len(turns)))
    return Scored(
        Episode(turns), reward + sum(given.values()), {"end": reward, "step": sum(given.values())}, turn_rewards=rewards
    )


def by_the_paper(
    paths: list[str], rewards: list[list[float]], gamma: float, weight: float, *, divided: bool
) -> list[list[float]]:
    """Equations 3 to 8 of arXiv 2505.10978. `divided`: F_norm is the standard deviation, otherwise 1. `rewards`: of each turn."""

    def relative(value: float, among: list[float]) -> float:
        if len(among) < 2 or np.ptp(among) == 0:
            return 0.0
        return (value - np.mean(among)) / ((np.std(among, ddof=1) + 1e-6) if divided else 1.0)

    totals = [sum(own) for own in rewards]
    returns = [[sum(gamma ** (k - t) * own[k] for k in range(t, len(own))) for t in range(len(own))] for own in rewards]
    pairs = [(path[t], returns[i][t]) for i, path in enumerate(paths) for t in range(len(path))]
    return [
        [
            relative(totals[i], totals)
            + weight * relative(returns[i][t], [value for state, value in pairs if state == path[t]])
            for t in range(len(path))
        ]
        for i, path in enumerate(paths)
    ]


amounts = st.integers(-8, 8).map(lambda eighths: eighths / 8)


@given(
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=2, max_size=5),
    st.data(),
    st.sampled_from([1.0, 0.95, 0.5]),
    st.sampled_from([None, 1.0, 0.25]),
    st.booleans(),
)
def test_each_turn_has_its_rollouts_advantage_and_that_among_turns_in_its_state(paths, data, gamma, weight, divided):
    rewards = [data.draw(st.lists(amounts, min_size=len(path), max_size=len(path))) for path in paths]
    group = [walk(path, 0.0, dict(enumerate(own))) for path, own in zip(paths, rewards, strict=True)]
    advantage = "group_norm" if divided else None
    algo = AlgoConfig("gigpo", gamma=gamma, state_weight=weight, advantage=advantage)
    found = [row.advantages for row in algorithm_of(algo, 8).rows(PROMPT, group)]
    expected = by_the_paper(paths, rewards, gamma, weight or 1.0, divided=divided)
    for row, of_turns in zip(found, expected, strict=True):  # a turn is two tokens, with one of context before the next
        np.testing.assert_allclose([row[3 * t] for t in range(len(of_turns))], of_turns, atol=1e-9)
        assert all(row[3 * t] == row[3 * t + 1] for t in range(len(of_turns)))


def test_the_recipe_has_the_papers_constants_and_another_credit_has_no_discount():
    recipe = AlgoConfig("gigpo").recipe
    assert (recipe.credit, recipe.gamma, recipe.advantage) == ("state", 0.95, "centred")
    assert AlgoConfig("grpo").recipe.gamma == 1.0 and AlgoConfig("gigpo", gamma=0.9).recipe.gamma == 0.9


def test_turns_of_one_index_in_other_states_are_not_compared():
    """Two rollouts go to other rooms, where each is alone; both begin in one."""
    rows = algorithm_of(AlgoConfig("gigpo", gamma=1.0), 8).rows(PROMPT, [walk("ab", 1.0), walk("ac", 0.0)])
    assert [row.advantages for row in rows] == [(1.0, 1.0, 0.5, 0.5, 0.5), (-1.0, -1.0, -0.5, -0.5, -0.5)]


def chat(*texts: str, agent: str = "", call: str = "call00001") -> Turn:
    messages = tuple(
        {"role": "tool", "content": text, "tool_call_id": call, "name": "look", "problem": "raised"} for text in texts
    )
    return Turn((3, 4), DONE, agent=agent, messages=messages)


def test_a_state_is_its_name_or_else_what_the_agent_was_told():
    def equal(one: Turn, other: Turn) -> bool:
        return states_of(Episode((one,))) == states_of(Episode((other,)))

    assert equal(chat("a door"), chat("a door", call="call00007")), "ids of calls say nothing"
    assert not equal(chat("a door"), chat("a wall")) and not equal(chat("a", "b"), chat("ab"))
    assert not equal(chat("a door", agent="white"), chat("a door", agent="black"))
    named = [Turn((3, 4), DONE, messages=chat(text).messages, state="hall") for text in ("a door", "a wall")]
    assert equal(*named) and not equal(named[0], chat("a door"))
    assert equal(Turn((3, 4), DONE), Turn((3, 4), DONE)) and not equal(Turn((3, 4), DONE), Turn((3, 5), DONE))


def test_later_turns_in_a_state_that_was_met_again_are_counted():
    episodes = [walk("aba").episode, walk("acb").episode, walk("ad").episode]
    assert met_again(episodes) == (5, 3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "gigpo", "advantage": "opo"}, 'algo.credit = "state" compares states, and algo.advantage = opo'),
        ({"name": "gigpo", "credit": "rollout"}, "remove algo.credit, or use algo.name"),
        ({"name": "gigpo", "length_penalty": 0.5}, "algo.length_penalty compares whole rollouts"),
        ({"name": "gigpo", "lam": 0.5}, 'algo.credit = "turn", or remove algo.lam'),
        ({"name": "grpo", "state_weight": 0.5}, 'set algo.credit = "state", or remove it'),
        ({"name": "kto", "credit": "state"}, "algo.credit weighs single tokens or turns"),
    ],
)
def test_what_means_nothing_between_states_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        AlgoConfig(**settings)


def test_a_rollout_of_one_turn_has_no_later_states():
    with pytest.raises(ConfigError, match="a rollout has one turn here.* set environment.function"):
        load_config(MINIMAL, ["algo.name=gigpo"])
    load_config(MINIMAL, ["algo.name=gigpo", "environment.function=e.py:play"])
