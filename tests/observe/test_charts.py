"""The report's charts as a reader sees them: ticks, labels, colours, ranges, and the page on a phone."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_report import report

from headrace.core.reports import CriticNumbers, EngineStats, ProcessNumbers
from headrace.facts import number_tables
from headrace.facts.facts import EngineSample, Evaluated, Fact, GroupEnded, StepTrained
from headrace.facts.group_numbers import NO_CONTRAST
from headrace.facts.number_tables import TITLES, scalars, title_of
from headrace.facts.records import StepRow, summarise
from headrace.facts.run_state import RunState
from headrace.views.report import write_report
from headrace.views.report.data import load
from headrace.views.report.svg import Chart, clock_ticks, extent, labels, ticks
from support.fact_stream import FactStream

STYLE = Path(write_report.__code__.co_filename).with_name("style.css").read_text()
PHONE, DIGIT = 390 - 2 * (12 + 12 + 1), 7.7
"""Pixels between the edges of a figure on a phone, and of a digit of the widest of the fonts."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return report(tmp_path_factory.mktemp("run"), list(FactStream(steps=30).facts()))


def charts(html: str) -> dict[str, str]:
    """By title."""
    return {
        found[1]: found[0]
        for found in re.finditer(r"<figure.*?<b>(.*?)</b>.*?</figure>", html, re.S)
    }  # fmt: skip


def placed(chart: str, name: str) -> list[tuple[str, float, str]]:
    """Class, place in per cent and text of what is written along one axis."""
    (row,) = re.findall(rf'<div class="{name}">(.*?)</div>', chart)
    found = re.findall(r'<span(?: class="(\w+)")? style="(?:left|top):([-\d.]+)%">(.*?)</span>', row)
    return [(kind, float(at), text) for kind, at, text in found]


# -- axes -------------------------------------------------------------------------------------------------------------


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(3, 57, 5) == [20, 40]
    assert extent([], zero=True) == (0.0, 1.0) and extent([2.0, 2.0]) == (1.0, 3.0)


def test_steps_have_no_halves() -> None:
    assert ticks(0.5, 2.5, 7, whole=True) == [1, 2] and ticks(0.5, 3.5, 7) == [0.5, 1, 1.5, 2, 2.5, 3, 3.5]
    assert ticks(0.5, 18.5, 7, whole=True) == [5, 10, 15]


@given(low=st.integers(0, 10**6), steps=st.integers(1, 10**6))
def test_ticks_of_steps_are_whole_whatever_their_number(low: int, steps: int) -> None:
    assert all(tick == int(tick) for tick in ticks(low + 0.5, low + steps + 0.5, 7, whole=True))


@given(
    low=st.floats(-1e6, 1e6),
    width=st.floats(-9, 6).map(lambda power: 10**power),
    percent=st.booleans(),
)
def test_no_two_labels_of_an_axis_are_alike_and_each_says_its_value(low: float, width: float, percent: bool) -> None:
    values = ticks(low, low + width)
    texts = labels(values, percent=percent)
    assert len(set(texts)) == len(set(values))
    scale = 0.01 if percent else 1.0
    for value, text in zip(values, texts, strict=True):
        assert float(text.removesuffix(" %").replace(",", "")) * scale == pytest.approx(
            value, rel=1e-6, abs=1e-2 * width
        )


def test_labels_have_the_digits_that_they_need() -> None:
    assert labels([0.9998, 0.9999, 1.0]) == ["0.9998", "0.9999", "1.0000"]
    assert labels([0, 2.5e-6, 5e-6]) == ["0", "2.5e-06", "5.0e-06"]
    assert labels([0, 0.025, 0.05], percent=True) == ["0.0 %", "2.5 %", "5.0 %"]
    assert labels([-0.0, 10_000, 20_000]) == ["0", "10,000", "20,000"]


@given(start=st.floats(0, 1e5), width=st.floats(0.5, 1e6))
def test_a_clock_never_shows_a_moment_twice(start: float, width: float) -> None:
    found = clock_ticks(start, start + width)
    assert all(t == int(t) for t in found) and len(found) <= 9


def test_a_range_stays_within_what_can_be() -> None:
    assert extent([0.0, 1.0], within=(0, 1)) == (0, 1)
    low, high = extent([0.3, 0.3], within=(0, 1))
    assert 0 <= low < 0.3 < high <= 1
    assert extent([0.0, 0.0], within=(0, math.inf)) == (0, 1)


# -- what is written around a chart -----------------------------------------------------------------------------------


def labels_fit(chart: str) -> None:
    """On a phone: labels of y in their column, labels of x apart from each other and inside the figure."""
    left, right = (float(one) for one in re.findall(r"--(?:left|right):([\d.]+)ch", chart))
    ys, xs = placed(chart, "ys"), [one for one in placed(chart, "xs") if one[0] != "more"]
    assert all(0 <= at <= 100 for _, at, _ in ys + xs)
    assert all(len(text) + text.count("%") < left for _, _, text in ys)
    plot = PHONE - (left + right) * DIGIT
    places = [(at / 100 * plot, len(text) * DIGIT / 2) for _, at, text in xs]
    for (a, half), (b, other) in itertools.pairwise(places):
        assert b - a > half + other
    assert all(left * DIGIT + x - half >= 0 and x + half <= plot + right * DIGIT + 1 for x, half in places)
    assert all(b - a >= 16 / 150 * 100 for (_, b, _), (_, a, _) in itertools.pairwise(ys))  # lines of 16 pixels


@given(
    last=st.integers(1, 20_000),
    low=st.floats(0, 2e4),
    width=st.floats(-4, 4).map(lambda power: 10**power),
    percent=st.booleans(),
)
def test_labels_lie_inside_the_figure_and_apart_on_a_phone(last: int, low: float, width: float, percent: bool) -> None:
    ends = (low, low + width) if not percent else (0.0, min(1.0, width))
    labels_fit(Chart((0.5, last + 0.5), ends, percent=percent).html("a chart"))


def test_every_chart_of_a_run_has_labels_that_fit(page: str) -> None:
    found = charts(page)
    assert len(found) >= 16
    drawings = [part for chart in found.values() for part in chart.split('<div class="chart"')[1:]]
    assert len(drawings) >= len(found) + 2, "the reward is drawn over steps, minutes and tokens"
    for chart in drawings:
        labels_fit(chart)
        texts = [text for _, _, text in placed(chart, "ys")]
        assert len(set(texts)) == len(texts)


def test_words_in_a_chart_do_not_overlap_nor_leave_it() -> None:
    chart = Chart((0, 100), (0, 1))
    for x in (10, 11, 12, 60, 99):
        chart.mark(x, "resumed")
    html = chart.html("t")
    assert html.count('class="rule"') == 5 and html.count(">resumed<") == 3
    assert '<span class="word before" style="left:99.00%">' in html


def test_chart_maps_data_to_its_frame() -> None:
    chart = Chart((0, 10), (0, 1))
    assert (chart.x(0), chart.x(10)) == (0, 1000) and (chart.y(0), chart.y(1)) == (200, 0)
    assert 'd="M0.0 200.0L1000.0 0.0"' in chart.line([(0, 0), (10, 1)], "c1").html("t")


# -- what is drawn ----------------------------------------------------------------------------------------------------


def test_no_band_and_no_axis_goes_beyond_the_rewards(page: str) -> None:
    chart = charts(page)["Reward"]
    ys = placed(chart, "ys")
    assert (ys[0][2], ys[0][1]) == ("0.0", 100) and (ys[-1][2], ys[-1][1]) == ("1.0", 0)
    (band,) = re.findall(r'class="band c5" points="([^"]*)"', chart)
    heights = [float(point.split(",")[1]) for point in band.split()]
    assert min(heights) >= 0 and max(heights) <= 200 and max(heights) > 150


def colours_of(theme: str) -> dict[str, str]:
    (block,) = re.findall(r":root \{(.*?)\}" if theme == "light" else r'data-theme="dark"\] \{(.*?)\}', STYLE, re.S)
    return dict(re.findall(r"--([\w-]+): (#\w{6})", block))


def lab(colour: str) -> tuple[float, float, float]:
    """CIE L*a*b* of an sRGB colour, D65."""
    srgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in srgb)
    x, y, z = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (one ** (1 / 3) if one > 0.008856 else 7.787 * one + 16 / 116 for one in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def legends(html: str) -> Iterator[list[tuple[str, str]]]:
    """(class, text) of all keys beneath or above one drawing."""
    for keys in re.findall(r'<(?:span|div|p) class="keys">(.*?)</(?:figcaption|div|p)>', html, re.S):
        yield re.findall(r'<i class="(\w+)"></i>([^<]*)', keys)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_that_stand_side_by_side_can_be_told_apart(page: str, theme: str) -> None:
    colours = colours_of(theme)
    names = dict(re.findall(r"\.([\w-]+) \{ --as: var\(--([\w-]+)\)", STYLE))
    names["publishes"] = names["swap"]
    together = [[name for name, _ in keys] for keys in legends(page)] + [[f"lag{lag}" for lag in range(6)] + ["over"]]
    assert max(map(len, together)) >= 7
    for classes in together:
        used = {names[kind] for kind in classes}
        for a, b in itertools.combinations([*used, "panel"], 2):
            assert math.dist(lab(colours[a]), lab(colours[b])) > 20, (a, b)


def test_a_lag_has_one_colour_in_every_chart_and_in_the_texts(page: str) -> None:
    told = [(name, text) for keys in legends(page) for name, text in keys if text.startswith("lag ")]
    assert len({text for _, text in told}) >= 2 and len(told) >= 4
    assert all(name == f"lag{text[4]}" for name, text in told)
    found = charts(page)
    assert 'class="line lag1"' in found["KL(sampler ‖ trainer) by lag"]
    assert 'class="box lag1"' in found["Lag of the trained tokens"]


# -- courses over steps -----------------------------------------------------------------------------------------------


def test_loss_lengths_shares_throughput_and_held_out_have_their_charts(page: str) -> None:
    found = charts(page)
    for title in ("Loss", "Completion length", "Tokens a second", "Held-out reward"):
        assert 'class="line' in found[title]
    shares = found["Cut off, without contrast, dropped, failed"]
    assert "groups without contrast</span>" in shares and "rollouts failed</span>" in shares


def test_what_ended_between_two_steps_is_counted_once(tmp_path: Path) -> None:
    facts = list(FactStream(steps=25).facts())
    report(tmp_path, facts)
    ended = [point.ended for point in load(tmp_path).bins]
    groups = [fact for fact in facts[: _last_step(facts)] if isinstance(fact, GroupEnded)]
    assert sum(one.groups for one in ended) == len(groups)
    assert sum(one.no_contrast for one in ended) == sum(group.reason == NO_CONTRAST for group in groups) > 0
    assert sum(one.failed for one in ended) == sum(sum(group.failures.values()) for group in groups) > 0
    assert sum(one.truncated for one in ended) == sum(group.truncated for group in groups)
    assert sum(one.tokens for one in ended) == sum(sum(group.lengths) for group in groups)


def _last_step(facts: list[Fact]) -> int:
    return max(place for place, fact in enumerate(facts) if isinstance(fact, StepTrained))


def test_tokens_a_second_are_those_of_the_step_also_where_it_is_shorter_than_a_sample(tmp_path: Path) -> None:
    """Samples of the engine are about a second apart."""
    facts: list[Fact] = []
    for fact in FactStream(steps=6, troubles=False).facts():
        if isinstance(fact, EngineSample):
            fact = EngineSample(fact.t, EngineStats(sampled_tokens=round(100 * fact.t), steps=1, busy_seconds=fact.t))
        facts.append(fact)
    chart = charts(report(tmp_path, facts))["Tokens a second"]
    tips = re.findall(r"step (\d+)\nsampled: ([\d.,]+)\ntrained: ([\d.,]+)", chart)
    assert [int(step) for step, _, _ in tips] == [1, 2, 3, 4, 5, 6]
    assert all(float(rate) == pytest.approx(100, rel=0.02) for _, rate, _ in tips)
    rows, state = load(tmp_path).state.rows, load(tmp_path).state
    began = [state.windows[0][0], *(row.t for row in rows)]
    for row, start, (_, _, rate) in zip(rows, began, tips, strict=False):
        assert float(rate) == pytest.approx(row.report.loss_tokens / (row.t - start), rel=0.01)


def test_held_out_prompts_that_failed_stand_beside_the_measurement(tmp_path: Path) -> None:
    facts = [
        msgspec.structs.replace(fact, failures={"reward_raised": 5}, kinds={"KeyError": 5}, asked=66)
        if isinstance(fact, Evaluated)
        else fact
        for fact in FactStream(steps=4).facts()
    ]
    chart = charts(report(tmp_path, facts))["Held-out reward"]
    assert "step 4 on 64 of 66 prompts, 2 failed: KeyError" in chart and 'class="whisker c2"' in chart
    assert re.search(r'data-tip="step 0, before\n0\.\d+ ± 0\.027\non 64 of 66 prompts', chart)


# -- the page on a phone ----------------------------------------------------------------------------------------------


def test_the_page_has_a_style_for_a_phone_with_links_to_every_section(page: str) -> None:
    assert '<meta name="viewport"' in page and "@media (max-width: 640px)" in page
    sections = re.findall(r'<section id="(\w+)">', page)
    assert re.findall(r'<a href="#(\w+)">', page) == sections and len(sections) == 7
    assert not re.search(r"nav a[^{}]*\{[^{}]*display: none", STYLE)


def test_rows_of_tables_become_blocks_on_a_phone_with_the_names_of_their_columns(page: str) -> None:
    cells = re.findall(r"<td[^>]*>", page)
    assert len(cells) > 100 and all('data-head="' in cell for cell in cells)
    phone = STYLE[STYLE.index("@media (max-width: 640px)") :]
    assert "attr(data-head)" in phone and re.search(r"\n  tr \{ display: block", phone)


def test_moments_beneath_the_pools_are_whole_and_distinct(page: str) -> None:
    axis = re.search(r'<div class="gantt-axis">(.*?)</div>', page)[1]  # type: ignore[index]
    told = re.findall(r">([\d:]+)<", axis)
    assert len(told) >= 2 and len(set(told)) == len(told)
    (rule,) = re.findall(r"\.gantt-axis \{(.*?)\}", STYLE, re.S)
    assert "overflow" not in rule and re.search(r"margin: 0 26px", rule)


def test_every_number_has_a_title_that_says_what_it_is() -> None:
    """Of a run, and of the names that the code has: a new one needs a row."""
    state, seen = RunState(), set[str]()
    for fact in FactStream(steps=20).facts():
        fact = summarise(fact) if isinstance(fact, StepTrained) else fact
        state.fold(fact)  # type: ignore[arg-type]
        seen |= scalars(fact, state)[1].keys()  # type: ignore[arg-type]
        seen |= set(fact.uncommon) if isinstance(fact, StepRow) else set()
    source = inspect.getsource(number_tables)
    body = (
        source[source.index("def scalars(") : source.index("TITLES = {")] + source[source.index("def _step_scalars") :]
    )
    seen |= set(
        re.findall(
            r'"((?:cost|experience|held_out|identity|lag|length|prompts|reward|share|sync|time|train|warm_start)/[a-z_]+)"',
            body,
        )
    )
    seen |= {f"train/{name}" for judge in (CriticNumbers, ProcessNumbers) for name in judge.__struct_fields__}
    assert len(seen) > 60 and {"train/kl", "by_lag_1/ess", "cost/dollars"} <= seen
    assert [name for name in sorted(seen) if title_of(name) == name] == []
    assert set(TITLES) <= seen | {f"train/{name}" for name in re.findall(r'"([a-z_]+)"', body)}, "nothing else"
    assert title_of("train/kl") == "Trainer against sampler: KL, nats a token" and title_of("of/later") == "of/later"
    assert title_of("by_lag_3+/masked_veto") == "Tokens of lag 3+: taken out by veto, share"


def test_numbers_of_a_critic_are_there_where_there_is_one_zeros_too():
    """It begins with a value of 0 that explains nothing."""
    fact = next(fact for fact in FactStream(steps=2).facts() if isinstance(fact, StepTrained))
    row = summarise(fact)
    state = RunState()
    state.fold(row)
    assert not [name for name in scalars(row, state)[1] if "value" in name or "variance" in name]
    critic = CriticNumbers(0.125, 0.0, 0.25, 0.0, 0.5)
    judged = msgspec.structs.replace(row, report=msgspec.structs.replace(row.report, critic=critic))
    found = scalars(judged, state)[1]
    named = {f"train/{name}": getattr(critic, name) for name in critic.__struct_fields__}
    assert len(named) == 5 and {name: found[name] for name in named} == named and all(map(TITLES.get, named))
