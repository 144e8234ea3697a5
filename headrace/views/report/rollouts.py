"""Some rollouts, token by token, coloured by lag. All text from a model or a user is escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from headrace.facts.rollout_view import CONTEXT, RolloutView, span_list, token_details
from headrace.facts.texts import clip, counted, number
from headrace.facts.verdicts import judged
from headrace.views.report.episode_graph import anchor, episodes
from headrace.views.report.lag_charts import LAST, lag_class
from headrace.views.report.tables import table

MAX_TEXT, MAX_TOKENS = 4000, 400
"""Characters of a prompt, and tokens of a completion, that the table shows."""


def rollouts(views: Sequence[RolloutView]) -> str:
    if not views:
        return '<p class="empty">No trained rollout is in the journal.</p>'
    note = "The best and the worst rollout of one group, for steps spread over the run. headrace board shows any other."
    return f'<p class="note">{note}</p>{rollout_table(views)}'


def rollout_table(views: Sequence[RolloutView]) -> str:
    """Returns the legend, a table with a row for each rollout, and the graphs of the episodes with several turns."""
    head = ("#step", "prompt", "completion", "#reward", "#advantage", "#tokens", "#version", "#lag")
    return _legend(views) + table(head, [_row(one) for one in views], "rollouts") + episodes(views)


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
    return (
        f'<p class="keys">{_colours(views)}<span class="lag-keys">{keys}</span>{"".join(strange)}'
        '<span class="faint">hover over a token for its numbers</span></p>'
    )


def _colours(views: Sequence[RolloutView]) -> str:
    """Returns the choice of what colours the tokens. The page's script applies it; without one they are coloured by lag."""
    compared, measured = any(one.trainer for one in views), any(one.entropies for one in views)
    missing = ' disabled title="the trainer recorded no numbers of these tokens"'
    options = "".join(
        f'<option value="{name}"{"" if known else missing}>{text}</option>'
        for name, text, known in (
            ("lag", "lag", True),
            ("surprise", "surprise (−log-prob of the sampler)", True),
            ("advantage", "advantage", True),
            ("ratio", "ratio trainer / sampler", compared),
            ("gap", "|Δ log-prob|", compared),
            ("entropy", "entropy", measured),
        )
    )
    note = f"ratio, |Δ log-prob| and entropy were not recorded: {views[0].unrecorded}"
    why = "" if compared else f'<span class="faint">{escape(note)}</span>'
    return f'<label>Tokens coloured by <select class="colour-by">{options}</select></label>{why}'


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
        f'<i class="{_classes(one, place)}"{_numbers(one, place)} data-tip="{escape(token_details(one, place))}">{escape(piece)}</i>'
        for place, piece in enumerate(one.pieces[:MAX_TOKENS])
        if piece
    ]
    rest = len(one.pieces) - MAX_TOKENS
    more = f" … ({rest:,} tokens more)" if rest > 0 else ""
    if not cells:
        return '<span class="faint">(empty)</span>'
    return f'<div class="text tokens">{"".join(cells)}{more}</div>{_unrecorded(one)}'


def _unrecorded(one: RolloutView) -> str:
    """Returns the sentence that stands below greyed tokens while a colour is chosen that their numbers do not give."""
    if not one.unrecorded:
        return ""
    return f'<small class="unrecorded" hidden>The trainer\'s numbers of these tokens were not recorded: {escape(one.unrecorded)}.</small>'


def _numbers(one: RolloutView, place: int) -> str:
    """Returns the numbers by which the script colours a sampled token."""
    if one.left_out[place] == CONTEXT:
        return ""
    known = (
        [("p", one.logprobs)]
        + [("a", one.advantages)] * bool(one.advantages)
        + [("t", one.trainer)] * bool(one.trainer)
        + [("e", one.entropies)] * bool(one.entropies)
    )
    return "".join(f' data-{name}="{values[place]:.4f}"' for name, values in known if math.isfinite(values[place]))


def _classes(one: RolloutView, place: int) -> str:
    if one.left_out[place] == CONTEXT:
        return "between"
    marks = " out" * bool(one.left_out[place]) + " mixed" * one.mixed[place]
    return f"{lag_class(one.lags[place])}{marks}"


def _text(text: str) -> str:
    shown = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} … ({len(text) - MAX_TEXT:,} characters more)"
    return f'<div class="text">{escape(shown)}</div>' if shown else '<span class="faint">(empty)</span>'
