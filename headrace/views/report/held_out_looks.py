"""Samples of the evaluation sets: each prompt that evaluations keep, as it was answered first and last, with what differs marked, and the hits of
its rollouts. All text from a model or a user is escaped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from html import escape

from headrace.facts.facts import Evaluated, HeldOutLook
from headrace.facts.run_state import RunState
from headrace.facts.texts import reward_text

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
    """Returns two texts as HTML, in which words are marked that the other one has not; unmarked where they have little in common. What lies
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
