"""Some rollouts, token by token, coloured by lag, and the samples of evaluation sets. All text from a model or a user is escaped."""

from __future__ import annotations

import base64
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from html import escape
from pathlib import Path

from headrace.facts.facts import Evaluated, HeldOutLook
from headrace.facts.rollout_view import CONTEXT, HeardMessage, RolloutView, TurnView, span_list, token_details
from headrace.facts.run_state import RunState
from headrace.facts.texts import clip, counted, number, plural, reward_text
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
    shown = [view for view in views if len(view.graph) > 1]
    if not shown:
        return ""
    note = (
        "Each row is a turn. Lines join it to the turn whose tokens it continues; another agent, a branch, or a path that begins anew has a lane of its own. "
        "The bar under a turn has its tokens by the weights that sampled them, coloured by lag."
    )
    drawn = "".join(_episode(view, is_open=place < OPEN) for place, view in enumerate(shown))
    return f'<h3>Episodes as graphs</h3><p class="note">{note}</p>{drawn}'


def anchor(view: RolloutView) -> str:
    return f"episode-{view.step}-{view.ticket}-{view.rollout}"


def _episode(view: RolloutView, is_open: bool) -> str:
    rewards = ", ".join(f"{name} {number(value)}" for name, value in view.rewards.items())
    calls = sum(heard.tool for turn in view.graph for heard in turn.heard)
    facts = [f"step {view.step}", f"ticket {view.ticket}, rollout {view.rollout}", plural(len(view.graph), "turn")]
    facts += [plural(calls, "tool call")] * bool(calls)
    total = f"reward {number(view.reward)}" + (f" ({rewards})" if len(view.rewards) > 1 else "")
    colours = {agent: f"c{place % COLOURS + 1}" for place, agent in enumerate(_agents(view))}
    legend = "".join(
        f'<span class="key"><i class="{colour}"></i>{escape(agent or "the first agent")}</span>'
        for agent, colour in colours.items()
    )
    keys = f'<p class="keys">{legend}</p>' if len(colours) > 1 else ""
    wide = max(turn.lane for turn in view.graph) + 1
    rows = "".join(_graph_row(view, place, colours) for place in range(len(view.graph)))
    ends = f'<li class="over">cut off at its limit of {escape(view.cut)}</li>' if view.cut else ""
    return (
        f'<details class="episode" id="{anchor(view)}"{" open" * is_open}><summary>{escape(" · ".join(facts))} · '
        f'<b>{escape(total)}</b></summary>{keys}<ol class="graph" style="--lanes:{wide}">{rows}{ends}</ol></details>'
    )


def _agents(view: RolloutView) -> list[str]:
    return list(dict.fromkeys(turn.agent for turn in view.graph))


def _graph_row(view: RolloutView, place: int, colours: dict[str, str]) -> str:
    turn = view.graph[place]
    colour = colours[turn.agent]
    head = [f"<b>turn {place + 1}</b>"]
    head += [f'<span class="{colour} who">{escape(turn.agent)}</span>'] * bool(turn.agent)
    head.append(f"{turn.sampled} tokens{', cut off' if turn.stop == 'length' else ''}")
    head += ["<em>begins anew: earlier messages were rewritten</em>"] * turn.rewritten
    unknown = "advantages by the trainer" if turn.judged else "not in the loss"
    head.append(unknown if math.isnan(turn.advantage) else f"advantage {turn.advantage:+.3f}")
    chips = "".join(
        f'<span class="chip {"good" if value > 0 else "bad" if value < 0 else "plain"}">{escape(name)} {number(value)}</span>'
        for name, value in turn.rewards.items()
    )
    heard = "".join(_heard(message) for message in turn.heard)
    calls = "".join(f'<p class="call">{escape(call)}</p>' for call in turn.calls)
    text = f'<div class="said">{escape(clip(turn.said, MOST_TEXT))}</div>' if turn.said else ""
    nothing = "" if text or calls else '<span class="faint">(nothing)</span>'
    lines = "".join(_lines(view.graph, place, colours))
    return (
        f'<li><div class="rails">{lines}</div><div class="turn"><p class="head">{" · ".join(head)} {chips}</p>'
        f"{heard}{text}{calls}{nothing}{_bar(turn)}</div></li>"
    )


def _heard(message: HeardMessage) -> str:
    if not message.tool:
        return f'<p class="heard"><b>{escape(message.who)}</b> {escape(message.words(MOST_TEXT))}</p>'
    mood, mark = ("bad", "✗") if message.problem else ("good", "✓")
    why = f" ({escape(message.problem.replace('_', ' '))})" if message.problem else ""
    text = escape(message.words(MOST_TEXT))
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
    return _legend(views) + table(head, [_row(view) for view in views], "rollouts") + episodes(views)


def _legend(views: Sequence[RolloutView]) -> str:
    if not any(view.decoded for view in views):
        return '<p class="note">The model\'s tokenizer was not available, so tokens are not shown separately.</p>'
    lags = sorted({min(lag, LAST) for view in views for lag in view.lags})
    keys = "".join(
        f'<span class="key"><i class="{lag_class(lag)}"></i>lag {lag}{"+" * (lag == LAST)}</span>' for lag in lags
    )
    strange = [
        f'<span class="tokens"><i class="{name}">{word}</i></span>'
        for name, word, there in (
            ("out", "not in the loss", any(view.reasons.keys() - {CONTEXT} for view in views)),
            ("mixed", "mixed weights", any(any(view.mixed) for view in views)),
            ("between", "between turns, not sampled", any(CONTEXT in view.reasons for view in views)),
        )
        if there
    ]
    return (
        f'<p class="keys">{_colours(views)}<span class="lag-keys">{keys}</span>{"".join(strange)}'
        '<span class="faint">hover over a token for its numbers</span></p>'
    )


def _colours(views: Sequence[RolloutView]) -> str:
    """Returns the choice of what colours the tokens. The page's script applies it; without one they are coloured by lag."""
    compared, measured = any(view.trainer for view in views), any(view.entropies for view in views)
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


def _row(view: RolloutView) -> tuple[str, ...]:
    listed = ", ".join(f"{name} {number(value)}" for name, value in view.rewards.items())
    parts = f"<small>{escape(listed)}</small>" if len(view.rewards) > 1 else ""
    group = f"<small>group {hits(view.of_group)}</small>" if len(view.of_group) > 1 else ""
    versions = sorted({span.version for span in view.spans}) or [0]
    shown = str(versions[0]) if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
    seen = judged(clip(view.answer, 200), {name: clip(text, 200) for name, text in view.extracted.items()})
    left_out = f"<small>{escape(counted(view.reasons))}</small>" if view.reasons else ""
    return (
        f'{view.step}<small class="place" data-place="{view.ticket}.{view.rollout}">ticket {view.ticket}</small>',
        _pictures(view) + _text(view.prompt),
        _story(view)
        + (_tokens(view) if view.decoded else _text(view.text))
        + (f"<small>{escape(seen)}</small>" if seen else ""),
        f"{number(view.reward)}{parts}{group}",
        view.advantage_words,
        f"{len(view.sampled)}<small>{escape(view.stop)}</small>{left_out}",
        f'<span data-tip="{escape(span_list(view))}">{shown}</span>',
        str(max(view.lags, default=0)),
    )


_FORMATS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}
"""The first bytes of the formats that browsers show."""
LARGEST = 400_000
"""Bytes of an image that is put into the page, which holds all that it shows."""


def _pictures(view: RolloutView) -> str:
    """Returns the images that the model was shown; the name of one that is gone, or too large for a page."""
    return f'<p class="pictures">{"".join(map(_picture, view.images))}</p>' if view.images else ""


def _picture(name: str) -> str:
    path = Path(name)
    known = path.is_file() and path.stat().st_size <= LARGEST
    data = path.read_bytes() if known else b""
    kind = next((kind for begin, kind in _FORMATS.items() if data.startswith(begin)), "")
    if not kind:
        return f'<span class="faint" data-tip="{escape(name)}">image {escape(path.name[:12])}</span>'
    return (
        f'<img src="data:image/{kind};base64,{base64.b64encode(data).decode()}" alt="image {escape(path.name[:12])}">'
    )


def _story(view: RolloutView) -> str:
    """Returns a link to the graph of an episode of several turns."""
    several = len(view.graph) > 1
    return f'<p class="note"><a href="#{anchor(view)}">{len(view.graph)} turns as a graph</a></p>' if several else ""


def _tokens(view: RolloutView) -> str:
    cells = [
        f'<i class="{_classes(view, place)}"{_numbers(view, place)} data-tip="{escape(token_details(view, place))}">{escape(piece)}</i>'
        for place, piece in enumerate(view.pieces[:MAX_TOKENS])
        if piece
    ]
    rest = len(view.pieces) - MAX_TOKENS
    more = f" … ({rest:,} tokens more)" if rest > 0 else ""
    if not cells:
        return '<span class="faint">(empty)</span>'
    return f'<div class="text tokens">{"".join(cells)}{more}</div>{_unrecorded(view)}'


def _unrecorded(view: RolloutView) -> str:
    """Returns the sentence that stands below greyed tokens while a colour is chosen that their numbers do not give."""
    if not view.unrecorded:
        return ""
    return f'<small class="unrecorded" hidden>The trainer\'s numbers of these tokens were not recorded: {escape(view.unrecorded)}.</small>'


def _numbers(view: RolloutView, place: int) -> str:
    """Returns the numbers by which the script colours a sampled token."""
    if view.left_out[place] == CONTEXT:
        return ""
    known = (
        [("p", view.logprobs)]
        + [("a", view.advantages)] * bool(view.advantages)
        + [("t", view.trainer)] * bool(view.trainer)
        + [("e", view.entropies)] * bool(view.entropies)
    )
    return "".join(f' data-{name}="{values[place]:.4f}"' for name, values in known if math.isfinite(values[place]))


def _classes(view: RolloutView, place: int) -> str:
    if view.left_out[place] == CONTEXT:
        return "between"
    marks = " out" * bool(view.left_out[place]) + " mixed" * view.mixed[place]
    return f"{lag_class(view.lags[place])}{marks}"


def _text(text: str) -> str:
    shown = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} … ({len(text) - MAX_TEXT:,} characters more)"
    return f'<div class="text">{escape(shown)}</div>' if shown else '<span class="faint">(empty)</span>'


# --- Samples of the evaluation sets: each prompt that evaluations keep, as it was answered first and last, with what differs marked


WORDS = re.compile(r"\s+|\w+|[^\w\s]")
ALIKE = 0.25
"""Share of common words below which two texts are different ones: marks would be everywhere."""
MOST_PAIRS = 1_000_000
"""Pairs of equal words, one of either text, that are looked at: a policy that says one word again and again has their product."""
CIRCLES = 16
"""Rewards that are drawn as circles at most."""


def held_out_samples(state: RunState) -> str:
    """Returns a section with the samples of all sets; empty if evaluations kept none."""
    first = state.evals[-1].name if state.evals else ""
    named = {(first if state.sets else "") or "held out": state.evals, **state.sets}
    shown = {name: made for name, evals in named.items() if (made := "".join(map(_pair, *_looks(evals))))}
    if not shown:
        return ""
    parts = "".join(f"<h4>{escape(name)}</h4>{made}" if len(named) > 1 else made for name, made in shown.items())
    note = "At the first and at the last evaluation; the text is that of the first rollout. Marked: words that are gone, and words that are new."
    return f'<section class="looks"><h3>Held-out samples</h3><p class="note">{note}</p>{parts}</section>'


def _looks(evals: Sequence[Evaluated]) -> tuple[list[tuple[int, HeldOutLook]], list[tuple[int, HeldOutLook] | None]]:
    """Returns the prompts of the first evaluation with its step, and those of the last one; None where that has none of the prompt."""
    if not evals:
        return [], []
    first, last = evals[0], evals[-1]
    later = {look.prompt_id: (last.step, look) for look in last.looks if look.rewards} if len(evals) > 1 else {}
    scored = [look for look in first.looks if look.rewards]
    return [(first.step, look) for look in scored], [later.get(look.prompt_id) for look in scored]


def _pair(then: tuple[int, HeldOutLook], now: tuple[int, HeldOutLook] | None) -> str:
    step, look = then
    old, new = marked(look.text, now[1].text) if now else (escape(look.text), "")
    parts = [_answer(step, look.rewards, old)] + ([_answer(now[0], now[1].rewards, new)] if now else [])
    return f'<div class="then"><pre class="asked">{escape(look.prompt)}</pre><div class="pair">{"".join(parts)}</div></div>'


def _answer(step: int, rewards: Sequence[float], text: str) -> str:
    return f'<div class="look"><p class="note">step {step} {hits(rewards)}</p><pre>{text or "(empty)"}</pre></div>'


def marked(then: str, now: str) -> tuple[str, str]:
    """Returns two texts as HTML, in which words are marked that the other one lacks; unmarked where they have little in common. What lies
    between their common begin and their common end is marked as a whole where words repeat so often that comparing them would take seconds."""
    old, new = WORDS.findall(then), WORDS.findall(now)
    begin = _common(old, new)
    end = _common(old[begin:][::-1], new[begin:][::-1])
    old_middle, new_middle = old[begin : len(old) - end], new[begin : len(new) - end]
    changes = _changes(old_middle, new_middle)
    alike = begin + end + sum(b - a for what, a, b, _, _ in changes if what == "equal")
    if 2 * alike < ALIKE * (len(old) + len(new)):
        return escape(then), escape(now)
    left, right = [escape("".join(old[:begin]))], [escape("".join(new[:begin]))]
    for what, a, b, c, d in changes:
        gone, come = escape("".join(old_middle[a:b])), escape("".join(new_middle[c:d]))
        left.append(gone if what == "equal" or not gone.strip() else f"<del>{gone}</del>")
        right.append(come if what == "equal" or not come.strip() else f"<ins>{come}</ins>")
    left.append(escape("".join(old[len(old) - end :])))
    right.append(escape("".join(new[len(new) - end :])))
    return "".join(left), "".join(right)


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    """Returns the number of elements with which both begin."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def _changes(old: Sequence[str], new: Sequence[str]) -> Sequence[tuple[str, int, int, int, int]]:
    """Returns what became of the words, as `SequenceMatcher.get_opcodes` does."""
    often = Counter(new)
    if sum(often[word] for word in old) > MOST_PAIRS:
        return [("replace", 0, len(old), 0, len(new))]
    return SequenceMatcher(None, old, new, autojunk=False).get_opcodes()


def shortened(text: str, most: int, begin: int = 0) -> str:
    """Returns so many characters of a text from `begin` on, and says how many are left out."""
    before = f"({begin:,} characters before) … " if begin else ""
    more = len(text) - begin - most
    return before + text[begin : begin + most] + (f" … ({more:,} characters more)" if more > 0 else "")


def from_first_difference(first: str, second: str, most: int) -> tuple[str, str]:
    """Returns two texts, shortened to so many characters. Where one is longer, half of them at most lie before the first difference."""
    longest = max(len(first), len(second))
    begin = max(0, _common(first, second) - most // 2) if longest > most else 0
    return shortened(first, most, begin), shortened(second, most, begin)


def hits(rewards: Sequence[float]) -> str:
    """Draws rewards of 0 and 1 as circles; of others it returns the mean."""
    mean = f"reward {reward_text(sum(rewards) / len(rewards))}"
    if set(rewards) <= {0.0, 1.0} and len(rewards) <= CIRCLES:
        circles = "".join("●" if reward else "○" for reward in rewards)
        return f'<span class="hits" title="{mean}">{circles}</span>'
    return mean + (f", mean of {len(rewards)}" if len(rewards) > 1 else "")
