"""The HTML report: complete, self-contained, escaped, and honest about what was not measured."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from headrace.core.batches import Group
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.reports import Finding, Sight, TextPart
from headrace.core.types import Episode
from headrace.facts.facts import CheckpointSaved, Evaluated, Fact, FilesChecked, StepTrained, Warned
from headrace.facts.index_file import INDEX
from headrace.facts.recorder import Recorder
from headrace.facts.records import Resume, summarise
from headrace.facts.run_state import RunState
from headrace.facts.run_totals import over_steps
from headrace.views.report import write_report
from headrace.views.report.data import bins, load
from support.fact_stream import FactStream, records_of, standing, write_journal, write_run
from support.journal_frames import spoil

VOID = {"meta", "br", "hr", "img", "input", "link"}
SVG_VOID = {"line", "rect", "circle", "path", "polygon"}


class Checker(HTMLParser):
    """Tags must nest; collects what a browser would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [
            str(value) for name, value in attrs if name in ("src", "href") and not str(value).startswith("#")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in SVG_VOID, tag

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def report(
    run_dir: Path, facts: list[Fact], resume: Resume | None = None, pieces: Callable[..., list[str]] | None = None
) -> str:
    recorder = Recorder(run_dir, resume=resume)
    for fact in facts:
        recorder.record(fact)
    recorder.close()
    write_journal(run_dir, records_of(facts))
    html = write_report(run_dir, pieces).read_text()
    checker = Checker()
    checker.feed(html)
    assert checker.open == [] and checker.loads == []
    assert checker.tags.count("script") == 1
    assert "url(" not in html and "@import" not in html and "http" not in html
    assert not re.search(r'="-?(nan|inf)|[ML]-?(nan|inf)', html)
    return html


def test_report_of_a_whole_run_holds_everything(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('name = "demo"\n[algo]\nkind = "grpo"\n')
    html = report(tmp_path, list(FactStream(steps=30).facts()))
    figures = (
        "Reward|Lag of the trained tokens|Completion lengths, drawn against trained|Entropy|Ratio trainer / sampler"
    )
    for title in (figures + "|Clip fraction|Gradient norm|Learning rate").split("|"):
        assert f"<b>{title}</b>" in html
    for word in ("Who waited for whom", "kind = &quot;grpo&quot;", "bound 1 holds", 'class="swap"', 'class="death"'):
        assert word in html
    assert "finished" in html and "not measured" not in html


def test_a_report_is_the_same_with_the_numbers_of_the_run_s_index_and_without(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with_index = write_report(run).read_text()
    assert 'data-of="tokens"' in with_index
    (run / INDEX).unlink()
    assert write_report(run).read_text() == with_index


def test_text_of_models_and_users_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script><img src=x onerror=y>"
    (tmp_path / "config.toml").write_text(f'name = "{evil}"\n')
    stream = FactStream(steps=3)
    facts: list[Fact] = []
    for fact in stream.facts():
        if isinstance(fact, StepTrained):
            groups = tuple(
                msgspec.structs.replace(group, prompt=msgspec.structs.replace(group.prompt, text=evil))
                for group in fact.groups
            )
            fact = msgspec.structs.replace(fact, groups=groups)
        facts.append(fact)
    started = msgspec.structs.replace(stream.start(), name=evil, headline=evil, where={evil: evil})
    seen = Sight(evil, (TextPart(evil, "user"),), (TextPart(evil, evil),), prompt=evil, completion=evil, reward=evil)
    checked = FilesChecked(0.0, (Finding(evil, "remark", evil),), seen)
    html = report(
        tmp_path,
        [started, checked, *facts[1:-1], Warned(stream.t, evil), msgspec.structs.replace(facts[-1], reason=evil)],
    )
    assert "<script>alert" not in html and "<img" not in html
    assert html.count("&lt;script&gt;alert") >= 8


def test_a_killed_run_says_so(tmp_path: Path) -> None:
    facts = list(FactStream(steps=10).facts())
    html = report(tmp_path, facts[: len(facts) // 2])
    assert "did not end by itself" in html and "counted from the facts" in html
    assert "after training: not measured" in html


def test_a_run_without_steps_claims_nothing(tmp_path: Path) -> None:
    html = report(tmp_path, [FactStream().start()])
    assert html.count("not measured") >= 4
    assert "No optimizer step was trained" in html and "no ticket drawn" in html and "No trained rollout" in html


def test_a_run_that_ends_before_its_first_step_with_an_evaluation_that_failed_has_a_report(tmp_path: Path) -> None:
    facts = list(FactStream(steps=2).facts())
    failed = next(replace(fact, reward_mean=math.nan) for fact in facts if isinstance(fact, Evaluated))
    assert "No optimizer step was trained" in report(tmp_path, [facts[0], failed])


def test_an_empty_file_is_an_empty_run(tmp_path: Path) -> None:
    assert "The run recorded no facts" in report(tmp_path, [])


def test_a_resumed_run_has_one_history_and_says_where_it_was_resumed(tmp_path: Path) -> None:
    stream = FactStream(steps=12, troubles=False)
    facts = list(stream.facts())
    saved = next(i for i, fact in enumerate(facts) if isinstance(fact, CheckpointSaved))
    report(tmp_path, facts[: saved + 4])
    again = msgspec.structs.replace(stream.start(resumed_at=10), t=facts[saved].t)
    html = report(tmp_path, [again, *facts[saved + 1 :]], standing(facts[:saved], 10))
    assert "1 resume" not in html and "Resumed 1 time (" in html and ">resumed</span>" in html
    assert [row.report.step for row in load(tmp_path).state.rows] == list(range(12))


def test_what_cannot_be_read_is_left_out_and_said(tmp_path: Path) -> None:
    report(tmp_path, list(FactStream(steps=6, troubles=False).facts()))
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[30] = b"\xff\n"
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    spoil(tmp_path, 1)
    said = write_report(tmp_path).read_text()
    assert "1 line of metrics.jsonl cannot be read and is left out (line 31)" in said
    assert (
        "of the journal cannot be read: record 1 does not match its checksum; record 5 (step 1) trains ticket 0" in said
    )


def test_a_run_that_failed_shows_its_sentence(tmp_path: Path) -> None:
    stream = FactStream(steps=2)
    facts = list(stream.facts())
    html = report(
        tmp_path, [*facts[:-1], msgspec.structs.replace(stream.end(), reason="the trainer process was killed")]
    )
    assert "the trainer process was killed" in html and 'badge bad">stopped' in html


def test_lags_above_the_bound_stand_out(tmp_path: Path) -> None:
    facts: list[Fact] = []
    for fact in FactStream(steps=3).facts():
        facts.append(msgspec.structs.replace(fact, lags={0: 10, 4: 10}) if isinstance(fact, StepTrained) else fact)
    html = report(tmp_path, facts)
    assert 'class="box over"' in html and "ABOVE the bound of 1" in html and 'class="card bad"' in html


def test_numbers_that_are_not_finite_are_left_out_of_the_curves(tmp_path: Path) -> None:
    facts: list[Fact] = []
    for fact in FactStream(steps=4).facts():
        if isinstance(fact, StepTrained) and fact.report.step % 2:
            fact = msgspec.structs.replace(fact, report=msgspec.structs.replace(fact.report, entropy=float("nan")))
        facts.append(fact)
    assert "<b>Entropy</b>" in report(tmp_path, facts)


def test_each_rollout_is_shown_with_its_own_advantage(tmp_path: Path) -> None:
    report(tmp_path, list(FactStream(steps=10).facts()))
    samples = load(tmp_path).samples
    assert len(samples) == 16
    # The stream's advantages are reward minus the group's mean: the best is above it, the worst below.
    assert all(sample.advantage > 0 for sample in samples if sample.reward == 1)
    assert all(sample.advantage < 0 for sample in samples if sample.reward == 0)


def test_each_agent_has_a_curve_of_its_own_rewards(tmp_path: Path) -> None:
    """In a game their sum is 0 at every step; the rewards of white rise, and those of black fall. White has two kinds."""
    facts: list[Fact] = []
    for fact in FactStream(steps=6).facts():
        if isinstance(fact, StepTrained):
            won = fact.report.step / 10
            fact = msgspec.structs.replace(fact, groups=tuple(game(group, won) for group in fact.groups))
        facts.append(fact)
    html = report(tmp_path, facts)
    figure = re.search(r"<figure[^>]*>(?:(?!</figure>).)*<b>Reward of each agent</b>.*?</figure>", html, re.DOTALL)
    assert figure and "mean over the trained rollouts" in figure[0]
    tips = re.findall(r'data-tip="([^"]*)"', figure[0])
    white, black = (
        ("0.500", "0.600", "0.700", "0.800", "0.900", "1"),
        ("0", "-0.100", "-0.200", "-0.300", "-0.400", "-0.500"),
    )
    assert tips == [
        f"step {step}\nwhite: {one}\nblack: {other}"
        for step, (one, other) in enumerate(zip(white, black, strict=True), 1)
    ]
    single = tmp_path / "single"
    single.mkdir()
    assert "Reward of each agent" not in report(single, list(FactStream(steps=6).facts()))


def game(group: Group, won: float) -> Group:
    """White wins `won`, and gets 0.5 for its manners; black loses as much."""
    rewards = {"white.won": won, "white.manners": 0.5, "black.won": -won}
    scored = [
        msgspec.structs.replace(rollout, rewards=rewards, reward=0.5, episode=of_agents(rollout.episode))
        for rollout in group.scored
    ]
    return msgspec.structs.replace(group, scored=tuple(scored))


def of_agents(episode: Episode) -> Episode:
    (turn,) = episode.turns
    return Episode((msgspec.structs.replace(turn, agent="white"), msgspec.structs.replace(turn, agent="black")))


def pieces(tokens: Sequence[int]) -> list[str]:
    """A tokenizer whose token 100 is a tag."""
    return ["<b>" if token == 100 else f" {token}" for token in tokens]


def test_tokens_are_coloured_by_lag_and_say_what_is_known_of_them(tmp_path: Path) -> None:
    facts = list(FactStream(steps=8).facts())
    html = report(tmp_path, facts, pieces=pieces)
    one = load(tmp_path, pieces).samples[-1]
    cells = re.findall(r'<i class="lag(\d)[^"]*"[^>]* data-tip="([^"]*)">([^<]*)</i>', html)
    last = cells[-len(one.tokens) :]
    assert [int(lag) for lag, _, _ in last] == list(one.lags) and last[0][2] == "&lt;b&gt;"
    assert all(f"token {i}, id {one.tokens[i]}\n" in tip for i, (_, tip, _) in enumerate(last))
    assert all(f"log-prob {value:.4f}" in tip for value, (_, tip, _) in zip(one.logprobs, last, strict=True))
    assert "lag 0</span>" in html and "tokenizer was not available" not in html
    assert "tokenizer was not available" in write_report(tmp_path).read_text()


def test_tokens_that_left_the_loss_are_struck_out_with_the_reason(tmp_path: Path) -> None:
    facts: list[Fact] = []
    for fact in FactStream(steps=2).facts():
        if isinstance(fact, StepTrained):
            rows = [msgspec.structs.replace(row, mask=(False,) * len(row.mask)) for row in fact.groups[0].rows]
            group = msgspec.structs.replace(fact.groups[0], rows=tuple(rows))
            fact = msgspec.structs.replace(fact, groups=(group,))
        facts.append(fact)
    html = report(tmp_path, facts, pieces=pieces)
    assert ' out"' in html and "not in the loss: masked" in html


def test_long_runs_are_binned_without_losing_a_step() -> None:
    row = next(summarise(fact) for fact in FactStream(steps=1).facts() if isinstance(fact, StepTrained))
    rows = [msgspec.structs.replace(row, report=msgspec.structs.replace(row.report, step=i)) for i in range(1234)]
    state = RunState()
    state.rows = rows
    made = bins(state, most=200)
    assert len(made) <= 200 and [one for each in made for one in each.rows] == rows
    assert (made[0].first, made[0].last, made[0].name) == (1, 7, "steps 1 to 7")


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run directory"):
        write_report(tmp_path)


def test_a_report_that_cannot_be_written_names_its_path(tmp_path: Path) -> None:
    Recorder(tmp_path).close()
    (tmp_path / "report.html").mkdir()
    with pytest.raises(HeadraceError, match=r"could not write .*report\.html"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html.part").exists()


def test_sampler_against_trainer_by_lag_is_weighted_by_tokens(tmp_path):
    facts = list(FactStream(steps=12).facts())
    html = report(tmp_path, facts)
    steps = [fact.report.lags for fact in facts if isinstance(fact, StepTrained)]
    zeros = [lag for lags in steps for lag in lags if lag.name == "0"]
    tokens = sum(zero.tokens for zero in zeros)
    (joined, *_) = over_steps(load(tmp_path).state.rows)
    assert (joined.name, joined.tokens) == ("0", tokens)
    assert joined.kl == pytest.approx(sum(zero.kl * zero.tokens for zero in zeros) / tokens)
    assert joined.gaps["max"] == max(zero.gaps["max"] for zero in zeros)
    table = html[html.index('<table class="lags">') :]
    assert re.search(rf"<td[^>]*>lag 0</td><td[^>]*>{tokens:,}</td>", table) and "masked: veto" in table
