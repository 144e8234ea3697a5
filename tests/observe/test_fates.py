"""Which of the drawn groups are trained: what discarding does to lengths and solve rates, and what a run says about it."""

from __future__ import annotations

import io
import math
import statistics
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.commands.plan.measure import Scenario, planned_world
from headrace.commands.plan.rates.rates import EngineRates, Rates, TrainerRates
from headrace.core.batches import Group, Row
from headrace.core.reports import LoadReport, TrainReport
from headrace.core.types import Completion, Episode, Prompt, Scored, Turn, VersionSpan
from headrace.core.weights import WeightUpdate
from headrace.durable.spelling import encode
from headrace.episodes.rollout import RolloutConfig
from headrace.facts import run_state, verdicts
from headrace.facts.facts import GroupEnded, StepTrained, WeightsLive
from headrace.facts.group_numbers import Histogram, length_shift, reward_shift
from headrace.facts.recorder import Recorder
from headrace.facts.records import StepRow, summarise
from headrace.facts.run_state import RunState
from headrace.facts.run_totals import trimmed
from headrace.loop.staleness import StalenessConfig
from headrace.loop.world import virtual_time
from headrace.loop.world.surroundings import Distribution
from headrace.views.report import write_report
from headrace.views.screen.console import Console
from headrace.views.screen.summary import summary
from support.fact_stream import FactStream


def ended(ticket: int, lengths: tuple[int, ...], reason: str = "", reward: float = 0.5, lost: int = 0) -> GroupEnded:
    outcome = "dropped" if reason else "ready"
    rewards = (reward,) * len(lengths)
    return GroupEnded(1.0, ticket, f"p{ticket}", outcome, reason, rewards=rewards, lengths=lengths, lost_tokens=lost)  # type: ignore[arg-type]


def trained(*tickets: int, **fields: Any) -> StepRow:
    report = TrainReport(fields.pop("step", 0), 1, loss_tokens=4)
    given_ = {"lags": {0: 4}, "lengths": (2, 2), **fields}
    return StepRow(2.0, report, given_.pop("lags"), 0.5, 0.1, 0.5, 0.0, tickets, {}, given_.pop("lengths"), 0, **given_)


def folded(*facts: Any) -> RunState:
    state = RunState()
    state.fold(msgspec.structs.replace(FactStream(groups=2, size=2).start()))
    for fact in facts:
        state.fold(fact)
    return state


def text_of(state: RunState) -> str:
    console = Console(file=io.StringIO(), width=100, no_color=True)
    console.print(summary(state))
    return console.file.getvalue()  # type: ignore[attr-defined]


# -- numbers ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=30))
def test_a_histogram_has_the_mean_and_variance_of_its_values(values: list[int]) -> None:
    one = Histogram()
    one.add(values)
    assert one.count == len(values) and one.mean == pytest.approx(statistics.mean(values))
    assert one.variance == pytest.approx(statistics.variance(values))


def test_of_too_few_values_nothing_is_said() -> None:
    empty, single = Histogram(), Histogram()
    single.add([3])
    assert empty.mean is None and math.isnan(empty.variance) and math.isnan(single.variance)


def test_a_shift_by_hand() -> None:
    """Trained: means 2, 3, 4; discarded: 8, 12. Welch: (3 - 10) / sqrt(1 / 3 + 8 / 2)."""
    state = folded(
        *(ended(i, (length, length), reward=0.9) for i, length in enumerate((2, 3, 4))),
        ended(3, (7, 9), reward=0.1), ended(3, (7, 9), "overdue", 0.1), ended(4, (12, 12), "interrupted", 0.3),
        trained(0, 1, 2),
    )  # fmt: skip
    lengths, rewards = length_shift(state.fates), reward_shift(state.fates)
    assert lengths and rewards
    assert (lengths.trained, lengths.drawn) == (3.0, pytest.approx((2 + 3 + 4 + 8 + 12) / 5))
    assert lengths.errors == pytest.approx((3 - 10) / math.sqrt(1 / 3 + 8 / 2))
    assert (rewards.trained, rewards.drawn) == (pytest.approx(0.9), pytest.approx((2.7 + 0.4) / 5))
    assert run_state.lost_tokens(state) == 16 + 24


def test_what_every_policy_drops_is_no_bias() -> None:
    easy = [ended(i, (1, 1), "no_contrast", 1.0) for i in range(50)]
    kept = [ended(50 + i, (9, 9 + i)) for i in range(4)]
    state = folded(*easy, *kept, trained(50, 51, 52, 53))
    assert verdicts.bias(state) == ("Selection bias", "none", "no group was discarded for its age", "good")
    assert length_shift(state.fates) is None and run_state.lost_tokens(state) == 0
    assert (state.lengths.drawn.count, state.lengths.trainable.count, state.lengths.trained.count) == (108, 8, 8)
    assert (state.solve_rates.drawn.count, state.solve_rates.trainable.count, state.solve_rates.trained.count) == (
        54,
        4,
        4,
    )


def discarding(reason: str, lengths: list[int], lost: list[int] | None = None) -> RunState:
    """21 groups of 10 to 12 tokens a rollout are trained."""
    kept = [ended(i, (10 + i % 3, 10 + i % 3)) for i in range(21)]
    away = [ended(100 + i, (length, length), reason) for i, length in enumerate(lengths)]
    away += [ended(200 + i, (), reason, lost=tokens) for i, tokens in enumerate(lost or [])]
    return folded(*kept, *away, trained(*range(21)))


@pytest.mark.parametrize(
    ("state", "mood", "said"),
    [
        (discarding("overdue", [40, 44, 48, 52]), "bad", "BIASED this run: tokens 11.0 trained, 16.6 drawn"),
        (discarding("overdue", [10, 11, 12, 11]), "plain", "none beyond 3 standard errors"),
        (discarding("interrupted", [], [160, 170, 180]), "bad", "tokens 11.0 trained, at least 20."),
        (discarding("interrupted", [], [8, 10, 6]), "unknown", "unknown: "),
        (discarding("interrupted", [], [8, 10, 6]), "unknown", "3 groups cancelled before completion"),
    ],
)
def test_a_run_says_whether_discarding_has_biased_it(state: RunState, mood: str, said: str) -> None:
    verdict = verdicts.bias(state)
    assert verdict.mood == mood and said in verdict.detail


def test_trimming_is_not_called_innocent() -> None:
    state = folded(ended(0, (4, 8)), trained(0, lags={0: 9}, outside={2: 3}))
    assert verdicts.bias(state)[1] == "25 % trimmed" and verdicts.bias(state).mood == "plain"


def test_equal_groups_on_both_sides_are_no_bias_and_unequal_ones_without_spread_are() -> None:
    kept = [ended(i, (5, 5)) for i in range(3)]
    same = folded(*kept, *(ended(9 + i, (5, 5), "overdue") for i in range(3)), trained(0, 1, 2))
    other = folded(*kept, *(ended(9 + i, (6, 6), "overdue") for i in range(3)), trained(0, 1, 2))
    assert verdicts.bias(same).mood == "plain" and verdicts.bias(other).mood == "bad"


# -- swaps inside a batch and inside a rollout ---------------------------------------------------------------------------


def test_what_a_step_row_tells_of_swaps_and_of_tokens_out_of_the_loss() -> None:
    spans = (VersionSpan(0, 1, 1), VersionSpan(2, 1, 1, mixed=True), VersionSpan(3, 3, 1))
    done = [
        Completion((5,) * 5, (-1.0,) * 5, spans, "stop"),
        Completion((5,) * 3, (-1.0,) * 3, (VersionSpan(0, 3, 3),), "length"),
        Completion((), (), (), "stop"),
    ]
    scored = tuple(Scored(Episode((Turn((1,), one),)), 0.0, {}) for one in done)
    rows = tuple(
        Row((1,), one.tokens, one.logprobs, (1.0,) * len(one.tokens), mask, tuple(one.versions()))
        for one, mask in zip(done, [(False, False, True, True, True), (True,) * 3, ()], strict=True)
    )
    group = Group(0, Prompt("p", "", (1,)), scored, rows)
    row = summarise(StepTrained(1.0, TrainReport(3, 4), (group,), {0: 5, 2: 1}, 0.0, 0.0, 0.0, 0.0))
    assert (row.swapped, row.mixed_tokens, row.old_cache_tokens, row.outside) == (1, 1, 2, {2: 2})
    assert trimmed(row, 1) == 2 and trimmed(row, 2) == 0


def test_the_summary_tells_of_versions_trimming_and_interruptions() -> None:
    update = WeightUpdate(version=1, kind="full", fingerprint="", nbytes=8, seconds=0.1)
    state = folded(
        ended(0, (2, 2)), ended(1, (9, 9), "overdue"),
        WeightsLive(1.5, update, LoadReport(1, 0.1, 0.001), interrupted=7, pause=0.5),
        trained(0, lags={0: 3, 1: 1}, outside={2: 6, 0: 1}, swapped=1, mixed_tokens=3),
    )  # fmt: skip
    text = " ".join(text_of(state).replace("│", " ").split())
    assert run_state.version_spread(state) == (1.0, 1) and run_state.trimmed_tokens(state) == 6
    assert "2 in a batch, at most 2; 50 % of rollouts met a swap; 3 tokens of mixed weights" in text
    assert "groups overdue 1, 18 tokens; 6 tokens trimmed" in text
    assert "generation held back 0.5 s for each; 7 rollouts interrupted" in text


def test_a_run_without_interruptions_says_nothing_of_them() -> None:
    state = folded(ended(0, (2, 2)), trained(0))
    assert "Discarded" not in text_of(state) and "interrupted" not in text_of(state)


def test_the_report_draws_both_histograms_and_names_the_bias(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.record(FactStream(groups=2, size=2).start())
    for fact in [
        *(ended(i, (10 + i % 3, 10), reward=0.5 + 0.1 * (i % 3)) for i in range(20)),
        *(ended(100 + i, (60, 60 + i), "overdue", 0.1) for i in range(5)),
        ended(300, (4, 4), "no_contrast", 1.0),
        ended(301, (), "interrupted", lost=44),
    ]:
        recorder.record(fact)
    recorder.record(
        WeightsLive(
            1.0,
            WeightUpdate(version=1, kind="full", fingerprint="", nbytes=8, seconds=0.1),
            LoadReport(1, 0.1, 0.001),
            3,
            0.25,
        )
    )
    recorder.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(encode(trained(*range(20), swapped=1, outside={2: 5})) + b"\n")
    html = write_report(tmp_path).read_text()
    for title in (
        "Trimmed tokens",
        "Completions that met a swap",
        "Generation held back by swaps",
        "Solve rates of prompts",
    ):
        assert f"<b>{title}" in html
    assert "0.25 s, 3 rollouts interrupted" in html and "discarding has BIASED this run" in html
    assert "Completion lengths, drawn against trained" in html and "Selection bias" in html
    assert "could be trained: 40, mean" in html and "drawn: 52, mean" in html
    assert "1 group cancelled before completion: missing here." in html


# -- through the real pipeline, in virtual time -----------------------------------------------------------------------------


class Watcher:
    def __init__(self) -> None:
        self.state = RunState()

    def record(self, fact: Any) -> None:
        self.state.fold(summarise(fact) if isinstance(fact, StepTrained) else fact)


def simulated(**staleness: Any) -> RunState:
    """Prompts that are hard have long completions, and the trainer is fast: the long ones are overdue when they are done."""
    scenario = Scenario(
        rates=Rates(EngineRates(((1.0, 0.01), (64.0, 0.02))), TrainerRates(0.0, 0.2)),
        completions=Distribution("lognormal", mean=40, sigma=1.2, correlation=0.7),
        staleness=StalenessConfig(groups_per_step=4, **staleness),
        rollout=RolloutConfig(group_size=4, max_tokens=400),
        steps=40,
        solved=0.5,
        grain=4,
    )
    watcher = Watcher()
    virtual_time.run(planned_world(scenario, watcher).run())
    return watcher.state


def test_pacing_trains_what_it_draws() -> None:
    state = simulated(max_lag=2)
    assert state.lengths.trainable.counts == state.lengths.trained.counts
    assert state.solve_rates.trainable.counts == state.solve_rates.trained.counts
    assert state.lengths.drawn.count > state.lengths.trainable.count, "some groups have no contrast"
    assert verdicts.bias(state).mood == "good"


def test_discarding_trains_the_short_and_the_easy_ones_and_is_told_of_it() -> None:
    state = simulated(max_lag=2, overdue="drop", in_flight=12)
    verdict = verdicts.bias(state)
    lengths, rewards = length_shift(state.fates), reward_shift(state.fates)
    assert lengths and rewards and lengths.trained < lengths.drawn and rewards.trained > rewards.drawn
    assert verdict.mood == "bad" and "BIASED" in verdict.detail
    assert state.accounting.balance() == 0


def test_of_cancelled_groups_no_innocence_is_claimed() -> None:
    state = simulated(max_lag=2, overdue="cancel", in_flight=12)
    verdict = verdicts.bias(state)
    assert state.fates.of("overdue").unfinished > 0
    assert verdict.mood in ("bad", "unknown") and "cancelled before completion" in verdict.detail


def test_trimming_is_counted() -> None:
    state = simulated(max_lag=2, overdue="trim", in_flight=12)
    assert sum(trimmed(row, 2) for row in state.rows) > 0 and max(state.lags) <= 2
