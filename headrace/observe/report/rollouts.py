"""Some rollouts, token by token, coloured by lag. All text from a model or a user is escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from headrace.observe.diagnosis.troubles import judged
from headrace.observe.numbers.rollout_view import CONTEXT, RolloutView, span_list, token_details
from headrace.observe.report.draw.tables import table
from headrace.observe.report.episode_graph import anchor, episodes
from headrace.observe.report.lag_charts import LAST, lag_class
from headrace.observe.texts import clip, counted, number

MAX_TEXT, MAX_TOKENS = 4000, 400
"""Characters of a prompt, and tokens of a completion, that the table shows."""


def rollouts(views: Sequence[RolloutView]) -> str:
    if not views:
        return '<p class="empty">No trained rollout is in the journal.</p>'
    note = (
        "The best and the worst rollout of one group, for steps spread over the run. headrace inspect shows any other."
    )
    head = ("#step", "prompt", "completion", "#reward", "#advantage", "#tokens", "#version", "#lag")
    return (
        f'<p class="note">{note}</p>{_legend(views)}'
        + table(head, [_row(one) for one in views], "rollouts")
        + episodes(views)
    )


def _legend(views: Sequence[RolloutView]) -> str:
    if not any(one.decoded for one in views):
        return '<p class="note">The model\'s tokenizer was not available, so tokens are not shown separately.</p>'
    lags = sorted({min(lag, LAST) for one in views for lag in one.lags})
    keys = "".join(
        f'<span class="key"><i class="{lag_class(lag)}"></i>lag {lag}{"+" * (lag == LAST)}</span>' for lag in lags
    )
    strange = [
        f'<span class="tokens"><i class="{name}">{word}</i></span>'
        for name, word, there in (
            ("out", "not in the loss", any(one.reasons.keys() - {CONTEXT} for one in views)),
            ("mixed", "mixed weights", any(any(one.mixed) for one in views)),
            ("between", "between turns, not sampled", any(CONTEXT in one.reasons for one in views)),
        )
        if there
    ]
    return f'<p class="keys">{keys}{"".join(strange)}<span class="faint">hover over a token for its numbers</span></p>'


def _row(one: RolloutView) -> tuple[str, ...]:
    listed = ", ".join(f"{name} {number(value)}" for name, value in one.rewards.items())
    parts = f"<small>{escape(listed)}</small>" if len(one.rewards) > 1 else ""
    versions = sorted({span.version for span in one.spans}) or [0]
    shown = str(versions[0]) if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
    seen = judged(clip(one.answer, 200), {name: clip(text, 200) for name, text in one.extracted.items()})
    left_out = f"<small>{escape(counted(one.reasons))}</small>" if one.reasons else ""
    return (
        f"{one.step}<small>ticket {one.ticket}</small>",
        _text(one.prompt),
        _story(one)
        + (_tokens(one) if one.decoded else _text(one.text))
        + (f"<small>{escape(seen)}</small>" if seen else ""),
        f"{number(one.reward)}{parts}",
        "not trained" if math.isnan(one.advantage) else f"{one.advantage:+.3f}",
        f"{len(one.sampled)}<small>{escape(one.stop)}</small>{left_out}",
        f'<span data-tip="{escape(span_list(one))}">{shown}</span>',
        str(max(one.lags, default=0)),
    )


def _story(one: RolloutView) -> str:
    """Returns a link to the graph of an episode of several turns."""
    several = len(one.graph) > 1
    return f'<p class="note"><a href="#{anchor(one)}">{len(one.graph)} turns as a graph</a></p>' if several else ""


def _tokens(one: RolloutView) -> str:
    cells = [
        f'<i class="{_classes(one, place)}" data-tip="{escape(token_details(one, place))}">{escape(piece)}</i>'
        for place, piece in enumerate(one.pieces[:MAX_TOKENS])
        if piece
    ]
    rest = len(one.pieces) - MAX_TOKENS
    more = f" … ({rest:,} tokens more)" if rest > 0 else ""
    return f'<div class="text tokens">{"".join(cells)}{more}</div>' if cells else '<span class="faint">(empty)</span>'


def _classes(one: RolloutView, place: int) -> str:
    if one.left_out[place] == CONTEXT:
        return "between"
    marks = " out" * bool(one.left_out[place]) + " mixed" * one.mixed[place]
    return f"{lag_class(one.lags[place])}{marks}"


def _text(text: str) -> str:
    shown = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} … ({len(text) - MAX_TEXT:,} characters more)"
    return f'<div class="text">{escape(shown)}</div>' if shown else '<span class="faint">(empty)</span>'
