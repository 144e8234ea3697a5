"""The page around the plots: headline, verdicts, tables. All text from a model or a user is escaped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from headrace.core.reports import Sight, TextPart
from headrace.facts import run_state
from headrace.facts.facts import FilesChecked, Warned
from headrace.facts.group_numbers import POOLS
from headrace.facts.run_state import RunState
from headrace.facts.texts import clip, counted, dollars, duration, percent, plural, short_time
from headrace.facts.verdicts import advices, all_verdicts, equation, failings, reasons, weight_sync
from headrace.views.report.data import ReportData
from headrace.views.report.gantt import gantt, machine_use
from headrace.views.report.overview import IN_REPORT, overview
from headrace.views.report.plots import all_plots, lag_table
from headrace.views.report.rollouts import rollouts
from headrace.views.report.svg import table

# --- The preflight of a model's files
# What agrees, and one row as the model and as the reward see it. All text is escaped.


AGREEMENT_MARKS = {"agrees": "✓", "remark": "!", "refused": "✗"}


def files_page(checked: FilesChecked) -> str:
    rows = [
        (
            f'<span class="{finding.verdict}">{AGREEMENT_MARKS[finding.verdict]}</span> {escape(finding.what)}',
            escape(finding.text),
        )
        for finding in checked.findings
    ]
    return (_sight(checked.sight) if checked.sight else "") + table(("check", "what the files say"), rows, "found")


def _sight(sight: Sight) -> str:
    given = f"<b>→ {escape(sight.reward)}</b>" if sight.reward else ""
    return (
        f'<p class="note">Row {escape(sight.row)}. In the place of a completion: its own answer, or a sentence.</p><div class="sight">'
        f"<div><h3>The model sees: the prompt</h3><pre>{_parts(sight.asked)}</pre></div>"
        f"<div><h3>The reward sees: prompts</h3><pre>{escape(sight.prompt)}</pre></div>"
        f"<div><h3>The model sees: an answer</h3><pre>{_parts(sight.answered)}</pre></div>"
        f"<div><h3>The reward sees: completions</h3><pre>{escape(sight.completion)}</pre>{given}</div></div>"
    )


def _parts(parts: Sequence[TextPart]) -> str:
    return "".join(
        f'<i class="{escape(part.kind)}" title="{escape(part.kind)}">{escape(part.text)}</i>' for part in parts
    )


# --- page ------------------------------------------------------------


HERE = Path(__file__).parent
STYLE, SCRIPT = HERE / "style.css", HERE / "script.js"
THEME = '<button type="button" id="theme" title="light or dark">◐</button>'
MARKS = {"good": "✓", "bad": "✗", "plain": "•", "unknown": "?"}


def page(data: ReportData) -> str:
    state = data.state
    name = state.started.name if state.started else data.run_dir.name
    parts = "".join(_section(anchor, part.title, part.draw(data)) for anchor, part in PARTS.items())
    return document(
        name,
        _header(data, name) + first_screen(data, IN_REPORT) + parts,
        "Made by headrace from metrics.jsonl and journal of this run.",
    )


def document(name: str, body: str, made: str) -> str:
    """Returns a page that needs no network. `made`: the sentence at its end."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(name)} · headrace</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE.read_text(encoding="utf-8")}</style></head>'
        f"<body><main>{body}<footer>{escape(made)}</footer></main>"
        f'<div id="tip"></div><script>{SCRIPT.read_text(encoding="utf-8")}</script></body></html>'
    )


def _section(name: str, title: str, body: str) -> str:
    return f'<section id="{name}"><h2>{escape(title)}</h2>{body}</section>'


def _curves(data: ReportData) -> str:
    return f'<div class="figures">{all_plots(data)}</div>{lag_table(data)}'


def pools(data: ReportData, shown: RunState | None = None) -> str:
    """Returns the chart of both pools, and who waited for whom. `shown`: the part of the run that is drawn; all of it by default."""
    sentences = filter(None, (data.state.naps.words, data.state.naps.lent_words))
    turns = "".join(f'<p class="note">{escape(words)}.</p>' for words in sentences)
    return gantt(data.state, shown) + turns + machine_use(data.columns) + _waits(data.state) + _scorers(data.state)


def accounting(data: ReportData) -> str:
    return _accounting(data.state) + _chosen(data.state)


def _rollouts(data: ReportData) -> str:
    return rollouts(data.samples)


def warnings(data: ReportData) -> str:
    return _troubles(data.state) + _warnings(data.state)


def setup(data: ReportData) -> str:
    return _where(data.state) + _config(data.config)


def files(data: ReportData) -> str:
    checked = data.state.files
    return files_page(checked) if checked else '<p class="empty">The run recorded no preflight of its model.</p>'


class ReportPart(NamedTuple):
    """A section of the page."""

    title: str
    draw: Callable[[ReportData], str]


PARTS = {
    "curves": ReportPart("Learning and staleness", _curves),
    "pools": ReportPart("Both pools over time", pools),
    "accounting": ReportPart("What became of every prompt", accounting),
    "files": ReportPart("What the model sees, what the reward sees", files),
    "rollouts": ReportPart("Rollouts", _rollouts),
    "warnings": ReportPart("Warnings", warnings),
    "setup": ReportPart("What ran where", setup),
}
"""The sections by their anchor, in order."""


def _header(data: ReportData, name: str) -> str:
    links = "".join(f'<a href="#{anchor}">{anchor}</a>' for anchor in PARTS)
    return (
        f'<header><div class="top"><h1>{escape(name)}</h1>{_badge(data)}<nav>{links}</nav>'
        f"{THEME}</div>{headline(data.state)}</header>{banner(data)}"
    )


def first_screen(data: ReportData, links: Mapping[str, str]) -> str:
    """Returns the Overview, with the verdicts behind its rows."""
    records = f'<details class="records"><summary>The records behind it</summary>{cards(data.state)}</details>'
    return overview(data, links) + records


def headline(state: RunState) -> str:
    """Returns what is trained on what, and the size of the run."""
    started = state.started
    line = escape(started.headline) if started else "The run recorded no facts."
    facts = []
    if started:
        facts = [
            f"step {state.step:,} of {started.steps:,}",
            f"{started.groups_per_step} groups of {started.group_size} a step",
            f"lag bound {started.max_lag} ({started.slots} slots, window {started.window})",
            f"seed {started.seed}",
            duration(state.now),
        ]
    meta = "".join(f"<span>{escape(fact)}</span>" for fact in facts)
    return f'<p class="headline">{line}</p><p class="meta">{meta}</p>'


def _badge(data: ReportData) -> str:
    state = data.state
    if not state.ended and data.standing and data.standing.mark != "bad":
        return f'<span class="badge plain">{escape(data.standing.words)}</span>'
    if not state.ended:
        return '<span class="badge bad">did not end by itself</span>'
    word = run_state.phase(state)
    return f'<span class="badge {"good" if word == "finished" else "plain" if word == "interrupted" else "bad"}">{word}</span>'


def banner(data: ReportData) -> str:
    """Returns what is not known of the end of a run, and where it was resumed. How it ended, the verdict says."""
    state, lines = data.state, []
    if not state.ended and data.standing is None:
        lines.append(f"The last fact is from {duration(state.now)}: the run is still going on, or was killed.")
    if len(state.sessions) > 1:
        at = ", ".join(duration(start) for start in state.sessions[1:])
        lines.append(f"Resumed {plural(len(state.sessions) - 1, 'time')} (at {at}).")
    return "".join(f'<p class="banner">{escape(line)}</p>' for line in lines)


def cards(state: RunState) -> str:
    sync = weight_sync(state)
    cards = "".join(
        f'<div class="card {verdict.mood}"><h3>{escape(verdict.title)}<i>{MARKS[verdict.mood]}</i></h3><b>{escape(verdict.value)}</b>'
        f"<p>{escape(verdict.detail)}</p></div>"
        for verdict in (*all_verdicts(state), *([sync] if sync.mood != "unknown" else []))
    )
    tiles = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in _tiles(state))
    return f'<div class="cards">{cards}</div><div class="tiles">{tiles}</div>'


def _tiles(state: RunState) -> list[tuple[str, str]]:
    engine, trainer = run_state.idle_shares(state)
    total = state.shares.total
    gap, rates = run_state.mean_swap(state), (state.engine.rate, run_state.trainer_rate(state))
    return [
        ("tokens a second sampled", _rate(rates[0])),
        ("tokens a second trained", _rate(rates[1])),
        ("engine idle", percent(engine)),
        ("trainer idle", percent(trainer)),
        ("mean gap of a swap", short_time(gap) if gap is not None else "no swap"),
        ("worker deaths", str(len(state.deaths))),
        ("rollouts cut off, whole run", percent(total.truncated_share)),
        ("rollouts failed, whole run", percent(total.failed_share)),
        ("groups without contrast, whole run", percent(total.no_contrast_share)),
        ("groups dropped otherwise, whole run", percent(total.dropped_share)),
        *((name, dollars(value)) for name, value in run_state.cost_numbers(state).items()),
    ]


def _rate(rate: float | None) -> str:
    return "not measured" if rate is None else f"{rate:,.0f}"


def _waits(state: RunState) -> str:
    """Returns the table of waits, the longest first."""
    ordered = sorted(state.waits.items(), key=lambda pair: -pair[1].seconds)
    if not ordered:
        return '<p class="empty">No wait was recorded.</p>'
    rows = [
        (
            escape(owner),
            escape(what),
            f"{total.count:,}",
            short_time(total.seconds),
            short_time(total.seconds / total.count),
            short_time(total.longest),
        )
        for (owner, what), total in ordered[:14]
    ]
    if rest := ordered[14:]:
        seconds = sum(total.seconds for _, total in rest)
        longest = max(total.longest for _, total in rest)
        count = sum(total.count for _, total in rest)
        rows.append(
            (
                "others",
                f"{len(rest)} more",
                f"{count:,}",
                short_time(seconds),
                short_time(seconds / count),
                short_time(longest),
            )
        )
    return "<h3>Who waited for whom</h3>" + table(("who", "for what", "#times", "#total", "#mean", "#longest"), rows)


def _scorers(state: RunState) -> str:
    """Returns the table of the parts of the reward."""
    rows = [
        (
            escape(name),
            scorer.what,
            f"{scorer.calls:,}",
            short_time(scorer.seconds / scorer.calls),
            short_time(scorer.longest),
            short_time(scorer.waited),
            f"{scorer.attempts:,}",
            f"{scorer.retries:,}",
            f"{scorer.tokens:,}",
            escape(counted(scorer.failures)),
        )
        for name, scorer in state.scorers.items()
    ]
    if not rows:
        return ""
    names = (
        "reward",
        "from a",
        "#groups",
        "#mean",
        "#longest",
        "#waited for a turn",
        "#requests",
        "#retries",
        "#tokens",
        "failed rollouts",
    )
    return "<h3>What each part of the reward took</h3>" + table(names, rows)


def _accounting(state: RunState) -> str:
    counts = state.accounting
    rows = [
        ("drawn", f"{counts.drawn:,}", ""),
        ("trained", f"{counts.trained:,}", ""),
        ("dropped", f"{sum(counts.dropped.values()):,}", escape(counted(counts.dropped))),
        ("failed", f"{sum(counts.failed.values()):,}", escape(counted(counts.failed))),
        ("in the pipeline", f"{counts.in_pipeline:,}", "generating, being scored, or ready for the trainer"),
        ("in the checkpoint", f"{counts.in_checkpoint:,}", "a resumed run continues them"),
    ]
    off = counts.balance()
    mood = "bad" if off else "good"
    source = "Counted by the controller." if state.ended else "Counted from the facts."
    extra = "".join(
        f"<li>{escape(line)}</li>" for line in reasons(counts)[-2:] if not line.startswith(("dropped", "failed"))
    )
    return (
        f'<p class="equation {mood}"><i>{MARKS[mood]}</i>{equation(counts)}</p>'
        + table(("tickets", "#groups", "reasons"), rows)
        + f'<p class="note">{source}</p><ul>{extra}</ul>'
    )


def _chosen(state: RunState) -> str:
    """Returns the table of the pools from which a curriculum drew."""
    chosen = state.choices
    if not chosen.draws:
        return ""
    offered = chosen.offered.total()
    rows = [
        (
            pool,
            f"{chosen.drawn[pool]:,}",
            percent(chosen.drawn[pool] / chosen.draws),
            percent(chosen.offered[pool] / offered),
            percent(chosen.flat[pool] / chosen.drawn[pool]) if chosen.drawn[pool] else "",
        )
        for pool in POOLS
        if chosen.offered[pool]
    ]
    names = ("pool of the prompt", "#groups drawn", "#share", "#share of the candidates", "#without contrast")
    return "<h3>Which prompts were chosen</h3>" + table(names, rows)


def _troubles(state: RunState) -> str:
    """Returns the advice, and the failures with their tracebacks."""
    advice = "".join(f"<li><b>{escape(advice.name)}</b>: {escape(advice.sentence)}</li>" for advice in advices(state))
    failed = "".join(
        f"<h3>{escape(failing.kind)}: {plural(failing.rollouts, 'rollout')} failed</h3>"
        + (f"<pre>{escape(failing.first.traceback or failing.first.detail)}</pre>" if failing.first else "")
        for failing in failings(state)[:8]
    )
    return f"<ul>{advice}</ul>{failed}" if advice else failed


def _warnings(state: RunState) -> str:
    found = [
        (death.t, f"the {death.who} process {death.how}; {death.requests_reissued} requests re-issued")
        for death in state.deaths
    ]
    found += [(warning.t, warning.message + _past(state, warning)) for warning in state.warnings]
    found += [(failure.t, f"the first {failure.reason}: {failure.detail}") for failure in state.failures.values()]
    found += [
        (checkpoint.t, f"checkpoint of step {checkpoint.step} failed: {checkpoint.error}")
        for checkpoint in state.checkpoints
        if checkpoint.error
    ]
    found += [(probe.t, f"identity probe FAILED at version {probe.version}") for probe in state.probed.failed]
    if not found:
        return "" if advices(state) or failings(state) else '<p class="empty">None.</p>'
    rows = [(duration(t), escape(clip(message, 2000))) for t, message in sorted(found)[-200:]]
    return table(("#at", "what"), rows)


def _past(state: RunState, warning: Warned) -> str:
    if not run_state.is_withdrawn(state, warning):
        return ""
    return f" — no longer true since {duration(state.withdrawn[warning.key])}"


def _where(state: RunState) -> str:
    if not state.started or not state.started.where:
        return ""
    return table(("part", "runs on"), [(escape(part), escape(place)) for part, place in state.started.where.items()])


def _config(text: str) -> str:
    if not text:
        return '<p class="empty">The run directory has no config.toml.</p>'
    return f"<details><summary>Resolved config</summary><pre>{escape(text)}</pre></details>"
