"""Some rollouts, token by token, coloured by lag. All text from a model or a user is escaped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from headrace.facts.rollout_view import CONTEXT, HeardMessage, RolloutView, TurnView, span_list, token_details
from headrace.facts.texts import clip, counted, number, plural
from headrace.facts.verdicts import judged
from headrace.views.report.plots import LAST, lag_class
from headrace.views.report.svg import table

# --- Episodes of several turns as graphs
# A row for each turn in the order of sampling, a lane for each agent and each path. All text from a model or a user is escaped.


MOST_TEXT = 1200
"""Characters of a message or an answer."""
OPEN = 2
"""Episodes whose graphs are open; the others open with a click."""
COLOURS = 6
"""Colours of agents, which are used again for more."""


def episodes(views: Sequence[RolloutView]) -> str:
    """Returns the graphs of all rollouts that have several turns; empty if none has."""
    shown = [one for one in views if len(one.graph) > 1]
    if not shown:
        return ""
    note = (
        "Each row is a turn. Lines join it to the turn whose tokens it continues; another agent, a branch, or a path that begins anew has a lane of its own. "
        "The bar under a turn has its tokens by the weights that sampled them, coloured by lag."
    )
    drawn = "".join(_episode(one, is_open=place < OPEN) for place, one in enumerate(shown))
    return f'<h3>Episodes as graphs</h3><p class="note">{note}</p>{drawn}'


def anchor(one: RolloutView) -> str:
    return f"episode-{one.step}-{one.ticket}-{one.rollout}"


def _episode(one: RolloutView, is_open: bool) -> str:
    rewards = ", ".join(f"{name} {number(value)}" for name, value in one.rewards.items())
    calls = sum(heard.tool for turn in one.graph for heard in turn.heard)
    facts = [f"step {one.step}", f"ticket {one.ticket}, rollout {one.rollout}", plural(len(one.graph), "turn")]
    facts += [plural(calls, "tool call")] * bool(calls)
    total = f"reward {number(one.reward)}" + (f" ({rewards})" if len(one.rewards) > 1 else "")
    colours = {agent: f"c{place % COLOURS + 1}" for place, agent in enumerate(_agents(one))}
    legend = "".join(
        f'<span class="key"><i class="{colour}"></i>{escape(agent or "the first agent")}</span>'
        for agent, colour in colours.items()
    )
    keys = f'<p class="keys">{legend}</p>' if len(colours) > 1 else ""
    wide = max(turn.lane for turn in one.graph) + 1
    rows = "".join(_graph_row(one, place, colours) for place in range(len(one.graph)))
    ends = f'<li class="over">cut off at its limit of {escape(one.cut)}</li>' if one.cut else ""
    return (
        f'<details class="episode" id="{anchor(one)}"{" open" * is_open}><summary>{escape(" · ".join(facts))} · '
        f'<b>{escape(total)}</b></summary>{keys}<ol class="graph" style="--lanes:{wide}">{rows}{ends}</ol></details>'
    )


def _agents(one: RolloutView) -> list[str]:
    return list(dict.fromkeys(turn.agent for turn in one.graph))


def _graph_row(one: RolloutView, place: int, colours: dict[str, str]) -> str:
    turn = one.graph[place]
    colour = colours[turn.agent]
    head = [f"<b>turn {place + 1}</b>"]
    head += [f'<span class="{colour} who">{escape(turn.agent)}</span>'] * bool(turn.agent)
    head.append(f"{turn.sampled} tokens{', cut off' if turn.stop == 'length' else ''}")
    head += ["<em>begins anew: earlier messages were rewritten</em>"] * turn.rewritten
    head.append("not in the loss" if math.isnan(turn.advantage) else f"advantage {turn.advantage:+.3f}")
    chips = "".join(
        f'<span class="chip {"good" if value > 0 else "bad" if value < 0 else "plain"}">{escape(name)} {number(value)}</span>'
        for name, value in turn.rewards.items()
    )
    heard = "".join(_heard(message) for message in turn.heard)
    calls = "".join(f'<p class="call">{escape(call)}</p>' for call in turn.calls)
    said = f'<div class="said">{escape(clip(turn.said, MOST_TEXT))}</div>' if turn.said else ""
    nothing = "" if said or calls else '<span class="faint">(nothing)</span>'
    lines = "".join(_lines(one.graph, place, colours))
    return (
        f'<li><div class="rails">{lines}</div><div class="turn"><p class="head">{" · ".join(head)} {chips}</p>'
        f"{heard}{said}{calls}{nothing}{_bar(turn)}</div></li>"
    )


def _heard(message: HeardMessage) -> str:
    if not message.tool:
        return f'<p class="heard"><b>{escape(message.who)}</b> {escape(clip(message.text, MOST_TEXT))}</p>'
    mood, mark = ("bad", "✗") if message.problem else ("good", "✓")
    why = f" ({escape(message.problem.replace('_', ' '))})" if message.problem else ""
    text = escape(clip(message.text, MOST_TEXT))
    return f'<p class="heard tool {mood}"><b>{mark} {escape(message.who)}{why}</b> {text}</p>'


def _bar(turn: TurnView) -> str:
    """Returns the tokens of a turn by version, as wide as they are many."""
    parts = "".join(
        f'<i class="{lag_class(part.lag)}{" mixed" * part.mixed}" style="flex:{part.count}" '
        f'data-tip="{part.count} tokens of version {part.version}, lag {part.lag}{", mixed weights" * part.mixed}"></i>'
        for part in turn.tokens
    )
    versions = sorted({part.version for part in turn.tokens})
    shown = (
        f"version {versions[0]}"
        if len(versions) == 1
        else f"versions {versions[0]} to {versions[-1]}"
        if versions
        else ""
    )
    return f'<p class="bar"><span>{parts}</span><small>{shown}</small></p>' if parts else ""


def _lines(turns: Sequence[TurnView], place: int, colours: dict[str, str]) -> Iterator[str]:
    """Yields the lines and the dot of one row. A line runs in the lane of the parent down to the row of the turn that continues it."""
    for child, turn in enumerate(turns):
        for parent in turn.parents:
            if parent <= place <= child:
                yield from _piece(turns[parent].lane, turn.lane, colours[turn.agent], (place == parent, place == child))
    yield f'<i class="dot {colours[turns[place].agent]}" style="--at:{turns[place].lane}"></i>'


def _piece(start: int, lane: int, colour: str, ends: tuple[bool, bool]) -> Iterator[str]:
    """`ends`: whether the line begins in this row, and whether it ends there."""
    begins, over = ends
    kind = "down" if begins else "up" if over else "through"
    yield f'<i class="{kind} {colour}" style="--at:{start}"></i>'
    if over and lane != start:
        left, right = sorted((start, lane))
        yield f'<i class="across {colour}" style="--at:{left};--to:{right}"></i>'


# --- rollouts ------------------------------------------------------------


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
