"""The members of a fleet, as lines that fit into 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.facts.facts import MemberMoved, MemberSample
from headrace.facts.run_state import RunState
from headrace.facts.texts import clip, plural
from headrace.views.screen.console import PrintableText as Text
from headrace.views.screen.layout import FAINT, Line

STYLES = {"serving": "green", "away": "yellow", "lost": "bold red"}
NAME = 27
"""Characters of a name; a longer one loses its middle."""
WHY = 160


def table(members: Sequence[MemberSample]) -> list[Text]:
    """A heading, then a line for each member, and one more with the reason for those that do not serve."""
    width = min(NAME, max([len("member"), *(len(one.name) for one in members)]))
    lines = [Text(f"{'member':<{width}}  state    version  requests   tok/s     tokens  left", FAINT)]
    for one in members:
        line = Text(f"{short(one.name, width):<{width}}  ")
        line.append(f"{one.state:<7}", STYLES.get(one.state, ""))
        version = str(one.version) if one.version >= 0 else "-"
        rate = f"{one.rate:,.0f}" if one.state == "serving" else "-"
        lines.append(line.append(f"  {version:>7}  {one.running:>8}  {rate:>6}  {one.tokens:>9,}  {one.absences:>4}"))
        if one.why and one.state != "serving":
            lines.append(Text(f"  {clip(one.why, WHY)}", FAINT))
    return lines


def short(name: str, width: int) -> str:
    """The name in `width` characters: its end tells servers on one machine apart, its beginning machines."""
    if len(name) <= width:
        return name
    half = (width - 1) // 2
    return f"{name[:half]}…{name[len(name) - (width - 1 - half) :]}"


def line_of(state: RunState) -> list[Line]:
    """One line about all members, where there are several."""
    if len(state.members) < 2:
        return []
    serving = [one for one in state.members if one.state == "serving"]
    missing = any(one.state not in ("serving", "resting") for one in state.members)
    parts = [Text(f"{len(serving)} of {len(state.members)} serve", "yellow" if missing else "")]
    for one in state.members:
        rate = f"{one.rate:,.0f} tok/s, {plural(one.running, 'request')}" if one.state == "serving" else one.state
        parts.append(
            Text(f"{short(one.name.removeprefix('http://'), NAME)} ", FAINT).append(rate, STYLES.get(one.state, ""))
        )
    return [("members", parts)]


def absences(moves: Sequence[MemberMoved]) -> str:
    """How often members left, and what became of their requests; empty if none did."""
    left = [one for one in moves if one.state in ("away", "lost")]
    if not left:
        return ""
    names = sorted({one.member for one in left})
    back = sum(one.state == "serving" for one in moves)
    lost = sum(one.state == "lost" for one in left)
    words = f"{', '.join(names)} left {plural(len(left), 'time')}, came back {plural(back, 'time')}"
    words += f", {lost} for good" if lost else ""
    moved = sum(one.requests for one in left)
    return (
        f"{words}; {plural(moved, 'request')} went on elsewhere from {plural(sum(one.tokens for one in left), 'token')}"
    )
