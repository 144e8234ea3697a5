"""Episodes of several turns as graphs: a row for each turn in the order of sampling, a lane for each agent and each path. All text from a
model or a user is escaped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from headrace.facts.rollout_view import HeardMessage, RolloutView, TurnView
from headrace.facts.texts import clip, number, plural
from headrace.views.report.lag_charts import lag_class

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
    rows = "".join(_row(one, place, colours) for place in range(len(one.graph)))
    ends = f'<li class="over">cut off at its limit of {escape(one.cut)}</li>' if one.cut else ""
    return (
        f'<details class="episode" id="{anchor(one)}"{" open" * is_open}><summary>{escape(" · ".join(facts))} · '
        f'<b>{escape(total)}</b></summary>{keys}<ol class="graph" style="--lanes:{wide}">{rows}{ends}</ol></details>'
    )


def _agents(one: RolloutView) -> list[str]:
    return list(dict.fromkeys(turn.agent for turn in one.graph))


def _row(one: RolloutView, place: int, colours: dict[str, str]) -> str:
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
