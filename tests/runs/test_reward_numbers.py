"""Any number that a reward can give: it is trained with, or its rollout fails by name, and the run goes on."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace
from headrace.algo.advantages import ADVANTAGES
from headrace.algo.config import AlgoConfig
from headrace.algo.training_rows import algorithm_of
from headrace.core import rewards
from headrace.core.batches import Failure, Group
from headrace.core.errors import TrainingError
from headrace.core.rewards import LARGEST, number_of
from headrace.core.types import Completion, Episode, Prompt, Scored, Turn, VersionSpan
from headrace.episodes import episodes as episodes_module
from headrace.episodes.episodes import with_rewards
from headrace.episodes.rollout_session import Played
from headrace.episodes.scoring import job, reward_scorer
from headrace.episodes.scoring.config import RewardConfig
from headrace.episodes.scoring.reward_scorer import RewardScorer
from headrace.facts.facts import GroupEnded, RunEnded, Warned
from headrace.facts.group_numbers import Histogram
from headrace.facts.records import StepRow
from headrace.loop.evaluation import _standard_error
from support.tiny_run import of, tiny_config

PROMPT = Prompt("p", "?", (1, 2))
STRANGE = [
    1e308,
    -1e300,
    1e15,
    -1e15,
    1.0000001e15,
    5e-324,
    -5e-324,
    0.0,
    -0.0,
    math.nan,
    math.inf,
    -math.inf,
    10**400,
    -(10**15),
]
number = (
    st.sampled_from(STRANGE)
    | st.floats()
    | st.floats(-2, 2)
    | st.integers()
    | st.booleans()
    | st.floats(width=32).map(np.float32)
    | st.integers(-(2**63), 2**63 - 1).map(np.int64)
    | st.floats(width=16).map(np.float16)
    | st.just(Fraction(1, 3))
    | st.just(np.longdouble("1e400"))
)


def episodes(count: int) -> list[Episode]:
    done = [
        Completion((5, 6, 2)[: 1 + i % 3], (-0.1,) * (1 + i % 3), (VersionSpan(0, 0, 0),), "stop", "a")
        for i in range(count)
    ]
    return [Episode((Turn((1, 2), one),)) for one in done]


def judged(*given: list[Any]) -> list[Scored | Failure]:
    """The rollouts of a group, scored by one function for each list."""
    functions = [lambda completions, values=values: values for values in given]
    scorer = RewardScorer(RewardConfig(), functions)
    played = [Played(episode, {}, ()) for episode in episodes(len(given[0]))]
    return with_rewards(asyncio.run(scorer.score(PROMPT, [one.episode for one in played])), played)


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name != "zero"])
@settings(max_examples=40)
@given(
    columns=st.integers(2, 6).flatmap(
        lambda n: st.lists(st.lists(number, min_size=n, max_size=n), min_size=1, max_size=2)
    )
)
def test_every_reward_gives_a_finite_advantage_or_a_failure_with_a_name(name: str, columns: list[list[Any]]) -> None:
    found = judged(*columns)
    for one in found:
        if isinstance(one, Failure):
            assert one.reason in ("reward_nan", "reward_too_large", "reward_wrong_type") and one.detail
    row = ADVANTAGES[name]
    penalised = row.reads_sum and not row.remembers and not row.implicit
    about: dict[str, Any] = {"name": "dpo"} if row.pairs else {"length_penalty": 0.5} if penalised else {}
    algo = AlgoConfig(advantage=name, **about)
    algorithm = algorithm_of(algo, longest=8)
    scored = tuple(one for one in found if isinstance(one, Scored))
    rows = algorithm.rows(PROMPT, scored)
    if not rows or algorithm.barren(rows):
        return
    (group,) = algorithm.assemble((Group(0, PROMPT, scored, rows, pairs=algorithm.pairs(scored)),))
    with np.errstate(all="raise", under="ignore"):
        trained = np.concatenate([np.array(row.advantages, np.float32) for row in group.rows])
        assert np.isfinite(trained).all() and np.isfinite(np.square(trained).sum())


@given(st.lists(st.floats(allow_nan=False), min_size=2, max_size=6))
def test_statistics_of_any_numbers_raise_nothing(values: list[float]) -> None:
    """Journals and metrics of earlier versions may hold any."""
    found = Histogram()
    found.add(values)
    assert found.variance is not None
    _standard_error(values)


@given(number)
def test_a_number_is_taken_as_it_is_or_not_at_all(value: Any) -> None:
    got = number_of(value)
    if isinstance(got, float):
        assert got == value and abs(got) <= LARGEST
    else:
        assert got.said.startswith("is ") and len(got.said) < 150


@pytest.mark.parametrize(
    "remedy", [lambda x: x / 1e290, lambda x: max(-1e15, min(x, 1e15))], ids=["divided", "clipped"]
)
def test_the_remedy_for_a_reward_that_is_too_large_works(remedy: Any) -> None:
    values = [1e300, -1e300]
    assert all(
        isinstance(one, Failure) and "divide it by a constant, or clip it" in one.detail for one in judged(values)
    )
    assert all(isinstance(one, Scored) for one in judged([remedy(value) for value in values]))


# --- whole runs --------------------------------------------------------------------------------------------------------------


def huge(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [1e300 if i == 0 else float(len(set(text))) + i for i, text in enumerate(completions)]


def tame(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(len(set(text))) + i for i, text in enumerate(completions)]


@pytest.fixture
def run(tiny_llama: Path, tmp_path: Path) -> Iterator[dict[str, Any]]:
    config = tiny_config(tmp_path, tiny_llama, train={"steps": 3}, watch={"failed_pause": 1.0})
    del config["reward"]
    yield config


@pytest.mark.slow
def test_one_enormous_reward_in_a_group_fails_its_rollout(run: dict[str, Any]) -> None:
    first = iter([tame])  # the rehearsal's
    result = headrace.train(run, reward=lambda **given: next(first, huge)(**given))
    assert result.reason == "finished" and result.step == 3
    ended = [fact for fact in of(result.directory, GroupEnded) if fact.outcome == "ready"]
    assert sum((Counter(one.failures) for one in ended), Counter()) == {"reward_too_large": len(ended)}
    assert all(row.reward_std < 10 for row in of(result.directory, StepRow))


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["grpo", "dr_grpo"])
def test_a_run_that_enormous_rewards_have_ended_goes_on(
    run: dict[str, Any], algo: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the guard the first process is one of a version that had none: an error ends it, or steps that are not finite."""
    with monkeypatch.context() as unguarded:
        unguarded.setattr(rewards, "LARGEST", 1e308)
        with pytest.raises((TrainingError, OverflowError)):
            headrace.train({**run, "algo": {"name": algo}}, reward=huge)
    directory = Path(run["out"]) / run["name"]
    result = headrace.train(resume=directory, reward=tame)
    assert result.reason == "finished" and result.step == 3
    assert of(directory, RunEnded)[-1].accounting.balance() == 0
    shown = capsys.readouterr().out
    assert "Reward, drawn" in shown and "00000000" not in shown, "a number of three hundred digits"


@pytest.mark.slow
def test_a_finished_group_with_an_enormous_reward_is_dropped_by_name(
    run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the buffer, and in the journal, of a run that an earlier version began."""
    for door in (reward_scorer, episodes_module):
        monkeypatch.setattr(door, "usable", lambda one: one)
    monkeypatch.setattr(job, "number_of", float)
    calls = itertools.count()
    mostly = lambda **given: (huge if next(calls) % 3 == 2 else tame)(**given)  # noqa: E731
    result = headrace.train({**run, "algo": {"name": "dr_grpo"}}, reward={"mostly": mostly})
    assert result.reason == "finished" and result.step == 3
    ended = of(result.directory, RunEnded)[-1]
    assert ended.accounting.balance() == 0 and ended.accounting.dropped["reward_too_large"]
    message = "is dropped (reward_too_large): the reward mostly is 1e+300"
    assert any(message in warning.message for warning in of(result.directory, Warned))


# --- sums, and texts that nothing can hold ------------------------------------------------------------------------------------


def test_rewards_that_are_too_large_together_fail_the_rollout() -> None:
    (episode,) = episodes(1)
    scored = Scored(episode, 6e14, {"function": 6e14})
    whole = Played(episode, {"environment": 6e14}, ())
    turns = Played(episode, {}, ({"step": 6e14, "leap": 6e14},))
    first, second, third = with_rewards(
        [scored, scored, scored], [whole, turns, Played(episode, {"environment": 1.0}, ())]
    )
    assert isinstance(first, Failure) and first.reason == "reward_too_large"
    assert first.detail.startswith(
        "the weighted sum of function = 6e+14, environment = 6e+14 is 1.2e+15, and at most 1e+15"
    )
    assert isinstance(second, Failure) and second.reason == "reward_too_large"
    assert isinstance(third, Scored)


def test_a_failure_can_be_written_down_whatever_it_quotes() -> None:
    failure = Failure("agent_failed", "half \ud800", "frames\nE: \udfff")
    assert msgspec.json.decode(msgspec.json.encode(failure), type=Failure) == failure
    assert (failure.detail, failure.kind) == (r"half \ud800", "E")
