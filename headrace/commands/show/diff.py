"""The first difference of every kind between two runs, step by step, from their journals and settings alone.

Groups are matched by ticket: with the same seed, a ticket has the same prompt and the same random numbers in both runs. Times are not
compared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.core.batches import Group, Row
from headrace.core.reports import TrainReport
from headrace.core.types import Completion, Scored
from headrace.durable.journal import Damage, DrawnRecord, GoneRecord, JournalReader, JournalStep, require_journal
from headrace.facts.kept_settings import CONTENTS, settings_of, settings_over
from headrace.facts.texts import clip, plural
from headrace.views.screen.console import Console
from headrace.views.screen.console import PrintableText as Text
from headrace.views.screen.layout import FittedTable, numbers, texts

ROUNDING = {"float32": 1e-3, "bfloat16": 0.15}
"""|Δ log-prob| of one token, in nats, that another order of summation explains, by the engine's dtype."""

KINDS = {
    "prompt": "prompts drawn",
    "length": "steps done",
    "order": "groups of a step",
    "token": "tokens",
    "logprob": "log-probs, exactly",
    "rounding": "log-probs, beyond rounding",
    "version": "versions",
    "reward": "rewards",
    "advantage": "advantages",
    "mask": "masks of the loss",
    "outcome": "groups not trained",
    "report": "reports of the trainer",
}
"""The kinds of differences in causal order: a difference of one kind can cause those of later kinds."""


@dataclass(frozen=True, kw_only=True)
class RunDifference:
    kind: str
    step: int
    """Counted from 1; 0 for a difference that belongs to no step."""
    a: str
    b: str
    ticket: int | None = None
    prompt: str = ""
    rollout: int | None = None
    token: int | None = None
    what: str = ""
    """The name of the reward or field."""

    @property
    def place(self) -> str:
        parts = [f"step {self.step}"] if self.step else []
        parts += [f"ticket {self.ticket}" + f" ({self.prompt})" * bool(self.prompt)] if self.ticket is not None else []
        parts += [f"rollout {self.rollout}"] if self.rollout is not None else []
        parts += [f"token {self.token}"] if self.token is not None else []
        return ", ".join([*parts, self.what] if self.what else parts)


@dataclass
class RunComparison:
    settings: list[tuple[str, Any, Any]]
    """The settings that differ, except names and paths."""
    first: dict[str, RunDifference] = field(default_factory=dict)
    """The first difference of each kind."""
    counts: Counter[str] = field(default_factory=Counter)
    """The number of steps, groups or rollouts that differ, by kind."""
    steps: int = 0
    """Number of steps that both runs have."""
    damage: dict[Path, Damage] = field(default_factory=dict)
    """The parts of each journal that cannot be read, and are not compared."""

    @property
    def earliest(self) -> RunDifference | None:
        order = list(KINDS)

        def when(difference: RunDifference) -> tuple[float, int]:
            return math.inf if difference.kind == "outcome" else difference.step, order.index(difference.kind)

        return min(self.first.values(), key=when, default=None)

    def add(self, difference: RunDifference) -> None:
        self.first.setdefault(difference.kind, difference)
        self.counts[difference.kind] += 1


def compare_runs(a: Path, b: Path) -> RunComparison:
    """Compares two runs. Unreadable parts of the journals are reported, not compared. Raises ConfigError if a directory holds no run."""
    for run in (a, b):
        require_journal(run)
    found = RunComparison(_settings(a, b), damage={a: Damage(), b: Damage()})
    one_reader, other_reader = (JournalReader(run, found.damage[run]) for run in (a, b))
    for difference in _prompts(one_reader, other_reader):
        found.add(difference)
    rounding = max(_rounding(a), _rounding(b))
    for one, other in _pairs(one_reader.steps(), other_reader.steps()):
        found.steps += 1
        for difference in _of_steps(one, other, rounding):
            found.add(difference)
    done = [reader.count_steps() for reader in (one_reader, other_reader)]
    if done[0] != done[1]:
        sides = ["done" if steps == max(done) else "not done" for steps in done]
        found.add(RunDifference(kind="length", step=min(done) + 1, a=sides[0], b=sides[1]))
    for difference in _outcomes(one_reader, other_reader):
        found.add(difference)
    return found


def _pairs(a: Iterator[JournalStep], b: Iterator[JournalStep]) -> Iterator[tuple[JournalStep, JournalStep]]:
    """Pairs of steps that both runs have. Both journals are read to their ends."""
    one, other = next(a, None), next(b, None)
    while one or other:
        if one and other and one.step == other.step:
            yield one, other
            one, other = next(a, None), next(b, None)
        elif other is None or (one and one.step < other.step):
            one = next(a, None)
        else:
            other = next(b, None)


# -- before the first step --------------------------------------------------------------------------------------------------


def _settings(a: Path, b: Path) -> list[tuple[str, Any, Any]]:
    one, other = settings_over(a), settings_over(b)
    names = sorted(one.keys() | other.keys())
    return [(name, one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)
            and name not in ("name", "out") and not (name.startswith(CONTENTS) and None in (one.get(name), other.get(name)))]  # fmt: skip


def _rounding(run: Path) -> float:
    engine = settings_of(run).get("engine")
    dtype = engine.get("dtype", "") if isinstance(engine, dict) else ""
    return ROUNDING["float32" if dtype == "float32" else "bfloat16"]


def _prompts(a: JournalReader, b: JournalReader) -> Iterator[RunDifference]:
    one, other = ({record.ticket: record.prompt for record in run.records(DrawnRecord)} for run in (a, b))
    for ticket in sorted(one.keys() & other.keys()):
        left, right = one[ticket], other[ticket]
        if (left.id, left.tokens) != (right.id, right.tokens) or not _same(left.columns, right.columns):
            what = "" if left.id != right.id else "other tokens" if left.tokens != right.tokens else "other columns"
            yield RunDifference(kind="prompt", step=0, a=left.id, b=right.id, ticket=ticket, prompt=left.id, what=what)


def _outcomes(a: JournalReader, b: JournalReader) -> Iterator[RunDifference]:
    """Groups that only one run trained, or that ended for different reasons."""
    one, other = (
        {record.ticket: f"{record.outcome}: {record.reason}" for record in run.records(GoneRecord)} for run in (a, b)
    )
    last = min(max(gone, default=-1) for gone in (one, other))
    for ticket in sorted(one.keys() | other.keys()):
        left, right = one.get(ticket, "-"), other.get(ticket, "-")
        if left != right and ticket <= last:
            yield RunDifference(kind="outcome", step=0, a=left, b=right, ticket=ticket, prompt="")


# -- one step ---------------------------------------------------------------------------------------------------------------


def _of_steps(a: JournalStep, b: JournalStep, rounding: float) -> Iterator[RunDifference]:
    step = a.step + 1
    left, right = ({group.ticket: group for group in journal_step.groups} for journal_step in (a, b))
    if list(left) != list(right):
        yield RunDifference(kind="order", step=step, a=f"tickets {_listed(left)}", b=f"tickets {_listed(right)}")
    for ticket, group in left.items():
        if ticket in right:
            yield from _of_groups(step, group, right[ticket], rounding)
    yield from _of_reports(step, a.report, b.report)


def _of_groups(step: int, a: Group, b: Group, rounding: float) -> Iterator[RunDifference]:
    if len(a.scored) != len(b.scored):
        counts = [f"{len(group.scored)} rollouts" for group in (a, b)]
        yield RunDifference(kind="order", step=step, a=counts[0], b=counts[1], ticket=a.ticket, prompt=a.prompt.id)
        return
    for i, (one, other) in enumerate(zip(a.scored, b.scored, strict=True)):
        for kind, token, left, right, what in _of_rollouts(one, other, rounding):
            yield RunDifference(
                kind=kind,
                step=step,
                a=left,
                b=right,
                ticket=a.ticket,
                prompt=a.prompt.id,
                rollout=i,
                token=token,
                what=what,
            )
    if len(a.rows) == len(b.rows):
        for i, (row, again) in enumerate(zip(a.rows, b.rows, strict=True)):
            for kind, token, left, right in _of_rows(row, again):
                yield RunDifference(
                    kind=kind, step=step, a=left, b=right, ticket=a.ticket, prompt=a.prompt.id, rollout=i, token=token
                )


def _of_rollouts(a: Scored, b: Scored, rounding: float) -> Iterator[tuple[str, int | None, str, str, str]]:
    for one, other in zip(a.episode.turns, b.episode.turns, strict=False):
        for kind, token, left, right in _of_completions(one.completion, other.completion, rounding):
            yield kind, token, left, right, ""
    for name in sorted(a.rewards.keys() | b.rewards.keys()):
        given, again = a.rewards.get(name, math.nan), b.rewards.get(name, math.nan)
        if not _same(given, again):
            yield "reward", None, *_two(given, again), name


def _of_completions(a: Completion, b: Completion, rounding: float) -> Iterator[tuple[str, int, str, str]]:
    """Compares up to the first token that differs: nothing after it is comparable."""
    same = _first(a.tokens, b.tokens)
    if same is not None:
        yield "token", same, _at(a.tokens, same, "ended"), _at(b.tokens, same, "ended")
    count = min(len(a.tokens), len(b.tokens)) if same is None else same
    for kind, left, right in (
        ("logprob", a.logprobs[:count], b.logprobs[:count]),
        ("version", a.versions()[:count], b.versions()[:count]),
    ):
        if (place := _first(left, right)) is not None:
            yield kind, place, *_two(left[place], right[place])
    for place, (x, y) in enumerate(zip(a.logprobs[:count], b.logprobs[:count], strict=True)):
        if not (_same(x, y) or abs(x - y) <= rounding):
            yield "rounding", place, *_two(x, y)
            break


def _of_rows(a: Row, b: Row) -> Iterator[tuple[str, int, str, str]]:
    columns = (("advantage", a.advantages, b.advantages), ("mask", a.mask, b.mask))
    for kind, left, right in columns:
        count = min(len(left), len(right))
        if (place := _first(left[:count], right[:count])) is not None:
            yield kind, place, *_two(left[place], right[place])


def _of_reports(step: int, a: TrainReport, b: TrainReport) -> Iterator[RunDifference]:
    for name in a.__struct_fields__:
        left, right = getattr(a, name), getattr(b, name)
        if name != "seconds" and repr(left) != repr(right):
            sides = ("", "") if isinstance(left, tuple) else _two(left, right)
            yield RunDifference(kind="report", step=step, a=sides[0], b=sides[1], what=name)


def _first(a: Sequence[Any], b: Sequence[Any]) -> int | None:
    """The first place where two columns differ. A shorter column differs at its end."""
    if a == b:
        return None
    both = zip(a, b, strict=False)
    place = next((i for i, (x, y) in enumerate(both) if not _same(x, y)), min(len(a), len(b)))
    return place if place < max(len(a), len(b)) else None


def _same(a: Any, b: Any) -> bool:
    return a == b or repr(a) == repr(b)  # NaN is not equal to itself


def _two(a: Any, b: Any) -> tuple[str, str]:
    """Returns both values as text, with as many digits as are needed to see the difference."""
    if isinstance(a, float) and isinstance(b, float) and f"{a:.5g}" != f"{b:.5g}":
        return f"{a:.5g}", f"{b:.5g}"
    return repr(a), repr(b)


def _at(values: Sequence[Any], place: int, otherwise: str) -> str:
    return repr(values[place]) if place < len(values) else otherwise


def _listed(tickets: Mapping[int, Any]) -> str:
    return " ".join(map(str, tickets))


# --- The output of `headrace diff RUN_A RUN_B`
# Settings that differ, the earliest difference, and the first one of every kind.


def report(a: Path, b: Path, console: Console | None = None) -> int:
    """Prints the comparison. Returns 0 if the journals are equal; 1 if they differ or cannot be read completely."""
    console = console or Console()
    found = compare_runs(a, b)
    console.print(f"A = {a}, B = {b}: {plural(found.steps, 'step')} in both")
    if found.settings:
        console.print(_settings_view(found))
    for run, damage in found.damage.items():
        if damage:
            console.print(Text(f"Parts of {run} cannot be read and are not compared: {damage}", "yellow"))
    if earliest := found.earliest:
        kind = KINDS[earliest.kind]
        head = Text(f"The first difference is at {earliest.place or 'the start'}", "bold")
        console.print(head.append(f": {kind}, {_clipped(earliest.a)} | {_clipped(earliest.b)}", "not bold"))
        console.print(_kinds(found))
        return 1
    if any(found.damage.values()):
        console.print("The readable parts of both are the same")
        return 1
    console.print(
        Text("Prompts, tokens, log-probs, versions, rewards, advantages, masks and reports are the same", "green")
    )
    return 0


def _settings_view(found: RunComparison) -> FittedTable:
    table = FittedTable(texts("setting", "A", "B"))
    for name, a, b in found.settings:
        table.add_row(name, *("-" if setting is None else str(setting) for setting in (a, b)))
    return table


def _kinds(found: RunComparison) -> FittedTable:
    table = FittedTable([*texts("", "first difference", "A", "B"), *numbers("in all")])
    for kind, title in KINDS.items():
        difference = found.first.get(kind)
        if difference is None:
            table.add_row(title, Text("none", "green"), "", "", "")
        else:
            table.add_row(
                title, difference.place, _clipped(difference.a), _clipped(difference.b), f"{found.counts[kind]:,}"
            )
    return table


def _clipped(text: str) -> str:
    return clip(text, 60)
