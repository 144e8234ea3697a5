"""The preflight of a model's files: what agrees, and one row as the model and as the reward see it. All text is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from headrace.core.reports import Sight, TextPart
from headrace.facts.facts import FilesChecked
from headrace.views.report.tables import table

MARKS = {"agrees": "✓", "remark": "!", "refused": "✗"}


def files_page(checked: FilesChecked) -> str:
    rows = [
        (f'<span class="{one.verdict}">{MARKS[one.verdict]}</span> {escape(one.what)}', escape(one.text))
        for one in checked.findings
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
