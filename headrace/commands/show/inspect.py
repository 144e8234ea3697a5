"""`headrace inspect RUN`: shows the rollouts of a step, from the journal. On request the trainer of that step scores them again."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from headrace.commands.replay.rerun import ReplayState, plan_rerun, rerun
from headrace.core.errors import ConfigError
from headrace.core.printing import echo, printable_json, say
from headrace.core.reports import TrainReport
from headrace.core.types import Struct
from headrace.durable.journal import AnyRecord, Damage, GoneRecord, JournalReader, JournalStep, require_journal
from headrace.durable.spelling import encode
from headrace.facts.kept_settings import settings_by_step
from headrace.facts.rollout_view import Place, RolloutView, row_of, trimmed_below, view_step
from headrace.facts.texts import counted, number
from headrace.run.pieces import pieces_of
from headrace.views.screen.console import Console
from headrace.views.screen.console import PrintableText as Text
from headrace.views.screen.inspect_view import show

SHOWN = 3
"""The number of rollouts that are shown token by token by default."""


class Inspected(Struct, frozen=True):
    """The output of `--json`."""

    report: TrainReport
    rollouts: tuple[RolloutView, ...]
    source: str
    unreadable: str = ""
    """The parts of the journal that cannot be read."""


def inspect(
    run_dir: Path,
    step: int | None = None,
    *,
    ticket: int | None = None,
    worst: int = SHOWN,
    rescore: bool = False,
    as_json: bool = False,
    tokens: bool = False,
    console: Console | None = None,
) -> int:
    """`step`: counted from 1; by default the last one. `worst`: how many rollouts are shown token by token. `tokens`: show these also with
    one token per line."""
    console, damage = console or Console(), Damage()
    journaled = find_step(run_dir, step, ticket, damage)
    trainer, source = _trainer_side(run_dir, journaled, ticket, rescore)
    oldest = trimmed_below(settings_by_step(run_dir)(journaled.step), journaled.step)
    views = [
        view for view in view_step(journaled, pieces_of(run_dir), oldest, trainer) if ticket in (None, view.ticket)
    ]
    if as_json:
        echo(printable_json(encode(Inspected(journaled.report, tuple(views), source, str(damage))).decode()))
        return 0
    show(
        console,
        views,
        chosen=sorted(views, key=_worst_first)[:worst],
        report=journaled.report,
        source=source,
        tokens=tokens,
    )
    if damage:
        console.print(Text(f"parts of the journal cannot be read: {damage}", "yellow"))
    return 0


class NumberedRecord(Struct, frozen=True):
    """A line of `--records`."""

    n: int
    record: AnyRecord


def print_records(run_dir: Path, step: int | None = None, ticket: int | None = None) -> int:
    """Prints the journal, or what it holds about a step (counted from 1) or a ticket. Returns 1 if parts cannot be read, which are named on
    stderr."""
    require_journal(run_dir)
    reader = JournalReader(run_dir)
    found = reader.about(None if step is None else step - 1, ticket)
    for place, record in found:
        echo(printable_json(encode(NumberedRecord(place, record)).decode()))
    if reader.damage:
        say(f"parts of the journal cannot be read: {reader.damage}")
    return 1 if reader.damage else 0


def _worst_first(view: RolloutView) -> tuple[float, float, int]:
    """A sort key: the largest gap between trainer and sampler first, then the lowest reward, then the longest rollout."""
    return (-view.gap if math.isfinite(view.gap) else 0.0), view.reward, -len(view.tokens)


def find_step(run_dir: Path, step: int | None, ticket: int | None, damage: Damage | None = None) -> JournalStep:
    """Finds a journaled step. Raises ConfigError if it does not exist or cannot be read, or if the group was not trained. Unreadable parts
    of the journal are added to `damage`."""
    require_journal(run_dir)
    reader = JournalReader(run_dir, damage)
    count = reader.count_steps()
    if step is None and ticket is not None:
        return _step_of(run_dir, ticket, reader)
    wanted = step or count
    if not 1 <= wanted <= count:
        raise ConfigError(
            f"the journal of {run_dir} has {count} steps" + (f", so there is no step {wanted}" if count else "")
        )
    found = reader.step(wanted - 1) or next(reader.steps({wanted - 1}), None)  # the latter names all that is missing
    if found is None:
        raise ConfigError(
            f"step {wanted} of {run_dir} cannot be read (its journal: {reader.damage}); other steps can (--step)"
        )
    if ticket is not None and all(group.ticket != ticket for group in found.groups):
        tickets = " ".join(str(group.ticket) for group in found.groups)
        raise ConfigError(f"step {wanted} did not train ticket {ticket}; it trained {tickets}")
    return found


def _step_of(run_dir: Path, ticket: int, reader: JournalReader) -> JournalStep:
    if found := reader.step_of(ticket):
        return found
    gone = reader.gone(ticket)
    why = (
        f": it was {gone.outcome} ({gone.reason}){_outcomes(gone)}"
        if gone
        else f"; parts of the journal cannot be read: {reader.damage}"
        if reader.damage
        else ""
    )
    raise ConfigError(f"no step of {run_dir} trained ticket {ticket}{why}")


def _outcomes(gone: GoneRecord) -> str:
    """Returns what is known of the rollouts of a group that was not trained; the journal keeps no text of them."""
    rewards = [f"rewards {', '.join(map(number, gone.rewards))}"] if gone.rewards else []
    failed = [f"failed: {counted(Counter(gone.failures))}"] if gone.failures else []
    return "".join(f"; {part}" for part in rewards + failed)


# -- the trainer's side -----------------------------------------------------------------------------------------------------


def _trainer_side(
    run_dir: Path, step: JournalStep, ticket: int | None, rescore: bool
) -> tuple[dict[Place, Sequence[float]], str]:
    """The trainer's log-probs by rollout, and a sentence that says where the shown log-probs come from."""
    source = "|Δ| by lag was reported by the trainer at that step; the log-probs of tokens are the sampler's"
    if not rescore and step.report.token_numbers:
        return (
            {},
            "the trainer's log-probs are those that it recorded at that step, for some of its rollouts (--rescore computes the trainer's of all)",
        )
    if not rescore:
        return {}, f"{source} (--rescore computes the trainer's)"
    sampling = settings_by_step(run_dir)(step.step).get("rollout")
    assert isinstance(sampling, dict), "every run has a config"
    rows = [row for group in step.groups for row in group.rows]
    if any((row.temperature or sampling.get("temperature", 1.0)) != 1.0 or row.sampling_mask for row in rows):
        return (
            {},
            f"{source}: they belong to a truncated or tempered distribution, and cannot be compared with the trainer's at temperature 1",
        )
    found = asyncio.run(_rescored(run_dir, step, ticket))
    return (
        found,
        "the trainer's log-probs were computed again, with the weights before the step (from checkpoint and journal)",
    )


async def _rescored(run_dir: Path, step: JournalStep, ticket: int | None) -> dict[Place, Sequence[float]]:
    course = plan_rerun(run_dir, step.step + 1, step.step + 1)
    found: dict[Place, Sequence[float]] = {}
    async with rerun(course) as stages:
        async for stage in stages:
            if stage.journaled.step < step.step:
                await stage.execute()
            else:
                found |= await _rescored_by(stage, ticket)
    return found


async def _rescored_by(stage: ReplayState, ticket: int | None) -> dict[Place, Sequence[float]]:
    found: dict[Place, Sequence[float]] = {}
    for group in stage.journaled.groups:
        for i in range(len(group.scored)):
            row = row_of(group, i)
            if row is None or ticket not in (None, group.ticket):
                continue
            logprobs = await stage.trainer.score((*row.prompt, *row.tokens), stage.adapter)
            found[group.ticket, i] = logprobs[len(logprobs) - len(row.tokens) :]
    return found
