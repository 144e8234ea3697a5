"""Bounds inside rounding: what a run measures of its own noise, and what it says of a bound that is narrower."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import headrace
from headrace.algo.config import AlgoConfig
from headrace.algo.diagnostics import Diagnostics
from headrace.algo.noise import NoiseWatch, inside_rounding
from headrace.algo.objective import objective_of
from headrace.algo.policy.tokens import TokenLoss, Tokens
from headrace.algo.recipes import RECIPES
from headrace.core.reports import TrainReport
from headrace.durable.journal import read_steps
from headrace.episodes.scoring.reward_scorer import soft_overlong_punishment
from headrace.facts.facts import Warned
from headrace.facts.records import StepRow
from headrace.run.run import RunResult
from support.tiny_run import of, tiny_config

TOKEN_RMS = 0.04
"""About that of SmolLM2-135M in bfloat16 (docs/algorithms.md)."""
LENGTH = 20


def fresh(sequences: int, seed: int, lag: float = 0.0) -> Tokens:
    """Tokens that differ from the sampler's by rounding alone."""
    rng = np.random.default_rng(seed)
    count = sequences * LENGTH
    lp = -rng.exponential(1, count) - TOKEN_RMS * 6
    sequence = np.arange(count) // LENGTH
    advantage = rng.choice([-1.0, 1.0], sequences)[sequence]
    noise = rng.normal(0, TOKEN_RMS, count)
    return Tokens(*map(torch.tensor, (lp, lp + noise, advantage, sequence)), torch.full((count,), lag))


def report_of(algo: AlgoConfig, sequences: int = 200, seed: int = 0, lag: float = 0.0) -> TrainReport:
    tokens, diagnostics = fresh(sequences, seed, lag), Diagnostics()
    if algo.recipe.select.kind != "none":
        tokens = tokens._replace(keep=torch.ones(len(tokens.lag), dtype=torch.bool))
    tokens = tokens._replace(entropy=torch.ones_like(tokens.logprob))
    result = objective_of(algo)(tokens)
    diagnostics.add(tokens, result, torch.zeros(len(tokens.lag), dtype=torch.int8))
    return TrainReport(0, 1, lags=diagnostics.report(), noise=diagnostics.noise())


PAPERS = {
    "gspo": AlgoConfig("gspo", clip_low=3e-4, clip_high=4e-4),
    "opsm": AlgoConfig("opsm", correction={"opsm": 1e-4}),
    "mis_geometric": AlgoConfig("mis_geometric", correction={"low": 0.99, "high": 1.001}),
}


def test_the_noise_of_tokens_and_of_sequences_against_numpy():
    tokens, diagnostics = fresh(30, 0), Diagnostics()
    nothing = torch.zeros(len(tokens.lag), dtype=torch.bool)
    lag = tokens.lag.clone()
    lag[:25] = 1  # of the first sequence all tokens, of the second one some
    gap = (tokens.logprob - tokens.sampled).numpy()
    for rows in (slice(0, 5 * LENGTH), slice(5 * LENGTH, None)):  # microbatches hold whole sequences
        part = Tokens(*(column[rows] for column in tokens._replace(lag=lag)[:5]))
        part = part._replace(sequence=part.sequence - part.sequence[0])
        diagnostics.add(part, TokenLoss(part.advantage, nothing[rows]), nothing[rows].to(torch.int8))
    noise = diagnostics.noise()
    assert noise is not None and (noise.tokens, noise.sequences) == (len(gap) - 25, 28)
    assert noise.token_rms == pytest.approx(math.sqrt((gap[25:] ** 2).mean()))
    means = gap.reshape(-1, LENGTH).mean(1)[2:]
    assert noise.sequence_rms == pytest.approx(math.sqrt((means**2).mean()))
    assert Diagnostics().noise() is None


@pytest.mark.parametrize("name", sorted(PAPERS))
def test_a_bound_inside_rounding_is_said_once_with_its_cost(name):
    algo, watch = PAPERS[name], NoiseWatch(PAPERS[name])
    report = report_of(algo)
    (said,) = watch.check(report)
    (stats,) = report.lags
    share = stats.clipped if name == "gspo" else sum(stats.masked.values())
    assert share > 0.2 and f"stopped {100 * share:.0f} % of 4,000 tokens" in said
    assert report.noise is not None and f"{report.noise.sequence_rms:.2g} in the mean of a sequence" in said
    assert watch.check(report_of(algo, seed=1)) == []


@pytest.mark.parametrize("name", sorted(set(RECIPES) - {"mis"}))
def test_no_default_lies_inside_the_rounding_of_bfloat16(name):
    """`mis` multiplies the ratios of a whole sequence, whose noise grows with its length: `AlgoConfig.caveats` says so."""
    algo = AlgoConfig(name)
    if algo.teacher_top or algo.recipe.distill.kind != "none" or algo.recipe.loss.whole:
        return
    assert NoiseWatch(algo).check(report_of(algo)) == [] == inside_rounding(algo, TOKEN_RMS, LENGTH)


def test_the_remedy_that_is_named_helps():
    wide = 5 * report_of(AlgoConfig("gspo")).noise.sequence_rms  # type: ignore[union-attr]
    assert (
        NoiseWatch(AlgoConfig("gspo", clip_low=wide, clip_high=wide)).check(
            report_of(AlgoConfig("gspo", clip_low=wide, clip_high=wide))
        )
        == []
    )


def test_what_older_weights_sampled_is_no_noise_and_few_tokens_say_nothing_yet():
    algo = PAPERS["gspo"]
    watch = NoiseWatch(algo)
    assert watch.check(report_of(algo, lag=1.0)) == []
    assert watch.check(report_of(algo, sequences=6)) == []
    assert len(watch.check(report_of(algo, sequences=6, seed=1))) == 1  # together enough


@pytest.mark.parametrize("name", sorted(PAPERS))
def test_the_probe_says_it_before_the_first_step(name):
    report = report_of(PAPERS[name])
    share = report.lags[0].clipped if name == "gspo" else sum(report.lags[0].masked.values())
    (said,) = inside_rounding(PAPERS[name], TOKEN_RMS, LENGTH)
    told = float(said.split("about ")[1].split(" %")[0]) / 100
    assert told == pytest.approx(share, abs=0.1)
    assert inside_rounding(PAPERS[name], 1e-6, LENGTH) == [] == inside_rounding(PAPERS[name], 0.0, LENGTH)


@pytest.fixture(scope="module")
def result(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """Engine and trainer in bfloat16, which is where people meet it."""
    directory = tmp_path_factory.mktemp("run")
    tables = {"train": {"steps": 1, "dtype": "bfloat16"}, "engine": {"dtype": "bfloat16"}, "staleness": {"max_lag": 0}}
    algo = {"name": "gspo", "clip_low": 1e-6, "clip_high": 1e-6}
    rollout = {"group_size": 8, "max_tokens": 16}
    reward = {"soft_overlong_punishment": {"cache": 8, "weight": 0.5}}
    config = tiny_config(
        directory,
        tiny_llama,
        algo=algo,
        rollout=rollout,
        reward=reward,
        checkpoint={"every": 0},
        eval={"prompts": 4},
        **tables,
    )
    return headrace.train(config)


@pytest.mark.slow
def test_a_run_says_that_its_bound_lies_inside_rounding(result: RunResult) -> None:
    messages = [fact.message for fact in of(result.directory, Warned)]
    assert any("algo.clip_low = 1e-06 and algo.clip_high = 1e-06 will stop about" in one for one in messages), messages
    assert any("algo.clip_low = 1e-06 and algo.clip_high = 1e-06 lies inside rounding" in one for one in messages), (
        messages
    )
    assert "inside rounding" in result.report.read_text()


def test_a_run_names_the_punishment_among_its_rewards_and_measures_without_it(result: RunResult) -> None:
    (step,) = read_steps(result.directory)
    for rollout in (rollout for group in step.groups for rollout in group.scored):
        punishment = soft_overlong_punishment(len(rollout.episode.last.tokens), 16, 8)
        assert rollout.rewards["soft_overlong_punishment"] == punishment
        assert rollout.reward == pytest.approx(rollout.rewards["share_of_e"] + 0.5 * punishment)
    (row,) = of(result.directory, StepRow)
    assert -1 <= row.components["soft_overlong_punishment"] < 0
    assert result.before is not None and result.before.reward_mean >= 0  # share_of_e alone
