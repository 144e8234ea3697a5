"""Samples of the evaluation sets: each prompt that evaluations keep, as it was answered first and last, with what differs marked, and the hits of
its rollouts. All text from a model or a user is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from html import escape

from headrace.facts.facts import Evaluated, HeldOutLook
from headrace.facts.run_state import RunState
from headrace.facts.texts import reward_text

WORDS = re.compile(r"\s+|\w+|[^\w\s]")
ALIKE = 0.25
"""Share of common words below which two texts are different ones: marks would be everywhere."""
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
    """Returns two texts as HTML, in which words are marked that the other one has not; unmarked where they have little in common."""
    old, new = WORDS.findall(then), WORDS.findall(now)
    compared = SequenceMatcher(None, old, new, autojunk=False)
    if compared.ratio() < ALIKE:
        return escape(then), escape(now)
    left, right = [], []
    for what, a, b, c, d in compared.get_opcodes():
        gone, come = escape("".join(old[a:b])), escape("".join(new[c:d]))
        left.append(gone if what == "equal" or not gone.strip() else f"<del>{gone}</del>")
        right.append(come if what == "equal" or not come.strip() else f"<ins>{come}</ins>")
    return "".join(left), "".join(right)


def hits(rewards: Sequence[float]) -> str:
    """Draws rewards of 0 and 1 as circles; of others it returns the mean."""
    mean = f"reward {reward_text(sum(rewards) / len(rewards))}"
    if set(rewards) <= {0.0, 1.0} and len(rewards) <= CIRCLES:
        circles = "".join("●" if reward else "○" for reward in rewards)
        return f'<span class="hits" title="{mean}">{circles}</span>'
    return mean + (f", mean of {len(rewards)}" if len(rewards) > 1 else "")
