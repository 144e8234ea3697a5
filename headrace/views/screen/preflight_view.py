"""The output of `headrace preflight`, which is also the last part of `headrace train --dry-run`: what agrees, and one row in two columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table

from headrace.core.reports import Finding, Sight, TextPart
from headrace.facts.texts import plural
from headrace.views.screen.console import UNBOUNDED, Console
from headrace.views.screen.console import PrintableText as Text
from headrace.views.screen.layout import FAINT, LABEL

MARKS = {"agrees": ("✓", "green"), "remark": ("!", "yellow"), "refused": ("✗", "bold red")}
STYLES = {
    "special": "bold magenta",
    "template": FAINT,
    "system": "yellow",
    "user": "cyan",
    "assistant": "green",
    "tool": "blue",
}
"""Colours by the kind of text. Roles that are not named are written as they are."""
WIDEST = 120
"""Columns of both sides together: wider ones are hard to read."""
LINES = 16
"""The most lines of a prompt or a completion; a longer one loses its middle."""


def show_preflight(console: Console, findings: Sequence[Finding], sight: Sight | None) -> None:
    width = 80 if console.width == UNBOUNDED else min(console.width, WIDEST)
    console.print(_findings(findings), width=width)
    if sight:
        console.print(_columns(console, sight, width), width=width)
    console.print(_verdict(findings), width=width)


def _findings(findings: Sequence[Finding]) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column(style=LABEL, no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        mark, style = MARKS[finding.verdict]
        table.add_row(Text(mark, style), finding.what, Text(finding.text))
    return table


def _columns(console: Console, sight: Sight, whole: int) -> RenderableType:
    left = whole * 11 // 20
    right = whole - left - 3
    table = Table(box=None, padding=0, pad_edge=False, show_header=False, width=whole)
    for width in (left, 3, right):
        table.add_column(width=width, overflow="fold")
    line = Text(" │ ", FAINT)

    def row(one: RenderableType, other: RenderableType) -> None:
        one, other = Group(one), Group(other)
        height = max(
            len(console.render_lines(side, console.options.update(width=w)))
            for side, w in ((one, left), (other, right))
        )
        table.add_row(one, Text("\n").join([line] * height), other)

    row(Text("What the model sees", "bold"), Text("What the reward sees", "bold"))
    row(Text("─" * left, FAINT), Text("─" * right, FAINT))
    row(_seen(sight.asked, left), _given("prompts", sight.prompt, right))
    row(Text(), Text())
    answer = _given("completions", sight.completion, right)
    row(
        _seen(sight.answered, left),
        Group(answer, Text(f"→ {sight.reward}", "bold")) if sight.reward else answer,
    )
    legend = Text(" ").join(
        [Text(kind, STYLES[kind]) for kind in ("special", "template", "system", "user", "assistant", "tool")]
    )
    return Group(Text(), table, Text(), Text(f"row {sight.row} · ", FAINT) + legend)


def _seen(parts: Sequence[TextPart], width: int) -> RenderableType:
    text = Text()
    for part in parts:
        for number, line in enumerate(part.text.replace("\t", "    ").split("\n")):
            if number:
                text.append("⏎\n", FAINT)
            text.append(line, STYLES.get(part.kind, ""))
    return _shortened(text, width)


def _given(name: str, value: str, width: int) -> RenderableType:
    text = Text("\n").join(Text(line) for line in value.replace("\t", "    ").split("\n"))
    shown = _shortened(text, width) if value else Text("(nothing)", FAINT)
    return Group(Text(f"{name}:", FAINT), shown)


def _shortened(text: Any, width: int) -> Any:
    lines = [piece for line in text.split("\n", allow_blank=True) for piece in _folded(line, width)]
    if len(lines) > LINES:
        tail = LINES // 3
        left_out = Text(f"… {len(lines) - LINES + 1} lines …", FAINT)
        return Text("\n").join([*lines[: LINES - tail - 1], left_out, *lines[len(lines) - tail :]])
    return Text("\n").join(lines)


def _folded(line: Any, width: int) -> list[Any]:
    """Cuts a line at the width, wherever that is: a break between words would look like one that the text has."""
    cuts, used = list[int](), 0
    for at, letter in enumerate(line.plain):
        if (used := used + cell_len(letter)) > width:
            cuts.append(at)
            used = cell_len(letter)
    return list(line.divide(cuts)) if cuts else [line]


def _verdict(findings: Sequence[Finding]) -> Text:
    refused, remarks = (sum(finding.verdict == verdict for finding in findings) for verdict in ("refused", "remark"))
    if refused:
        message = f"✗ {plural(refused, 'contradiction')}: a run with this model is refused until {'they are' if refused > 1 else 'it is'} mended"
        return Text(f"\n{message}", "bold red")
    more = f", with {plural(remarks, 'remark')}" if remarks else ""
    return Text(f"\n✓ Config, tokenizer, template and weights agree{more}.", "bold green")
