"""`headrace replay RUN --step N [--to M]`: repeats steps of a run and compares the results (C8).

On the machine that ran them, every number of the report and the fingerprint of the new weights must be equal bit for bit. On another
machine (see `native/arithmetic.py`) floating-point sums have another order, and so they have on a GPU, whose atomic additions come in
any order. There the means of a step must agree within `TOLERANCE` and counts exactly; fingerprints are not compared, because one differing
bit changes them completely.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from headrace.commands.replay.rerun import ReplayState, RerunPlan, cores_here, machines_of, plan_rerun, rerun
from headrace.core.errors import CheckpointError
from headrace.core.reports import TrainReport, differing
from headrace.core.weights import of_earlier_form
from headrace.durable.journal import LiveRecord, read_only
from headrace.facts.facts import WeightsLive
from headrace.facts.records import read_metrics
from headrace.facts.texts import plural
from headrace.native.arithmetic import machine_mark
from headrace.run.config import config_of_run, read_config
from headrace.trainer.config import TrainConfig
from headrace.views.screen.console import Console
from headrace.views.screen.console import PrintableText as Text
from headrace.views.screen.layout import FittedTable, numbers, texts

TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
"""Allowed relative difference of a step's means on another machine, by training dtype. The absolute difference may be a tenth of it."""
MEANS = ("loss", "grad_norm", "entropy", "ratio_mean", "kl", "reference_kl", "teacher_kl", "divergence")
COUNTS = ("step", "version", "skipped", "lr", "loss_tokens", "forward_tokens", "dropped_tokens", "microbatches")


@dataclass(frozen=True)
class Expected:
    """The recorded results of a run's steps."""

    fingerprints: Mapping[int, str]
    """Fingerprint of the weights of every version that was served."""
    machines: Mapping[int, Mapping[str, str]]
    """The machine of every step; steps are counted from 1."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A step that was repeated. `problem` is empty if its result is as expected."""

    step: int
    report: TrainReport
    before: TrainReport
    fingerprint: str
    recorded: str
    """The recorded fingerprint; empty if none was recorded for that version."""
    inexact: str
    """The reason why the result need not be equal bit for bit; empty if it must."""
    problem: str

    @property
    def exact(self) -> bool:
        """Whether the result must be equal bit for bit."""
        return not self.inexact

    @property
    def verdict(self) -> str:
        if self.problem:
            return f"DIFFERS: {self.problem}"
        if not differing(self.report, self.before) and self.fingerprint == self.recorded:
            return "bit for bit"
        return "report bit for bit, no fingerprint" if self.exact else "within tolerance"


def replay(run_dir: Path, first: int, last: int | None = None, console: Console | None = None) -> int:
    """Repeats steps `first` to `last` (counted from 1) and prints the results. Returns 0 if all are as before, else 1."""
    console = console or Console()
    course = plan_rerun(run_dir, first, last or first)
    return asyncio.run(_replay(course, console))


async def _replay(course: RerunPlan, console: Console) -> int:
    for complaint in course.complaints:
        console.print(f"{complaint}: an older checkpoint is used")
    console.print(_where_from(course))
    expected = read_expected(course.run_dir)
    table, outcomes = _table(), []
    async with aclosing(outcomes_of(course, expected)) as found:
        async for outcome in found:
            outcomes.append(outcome)
            table.add_row(*_cells(outcome, course), style="bold red" if outcome.problem else "")
    console.print(table)
    return _conclude(outcomes, console)


def _where_from(course: RerunPlan) -> str:
    if course.checkpoint:
        ahead = course.first - 1 - course.begins
        return f"from the checkpoint of step {course.begins}" + (
            f", after repeating {plural(ahead, 'step')}" * bool(ahead)
        )
    if course.first == 1:
        return "from the run's beginning"
    return (
        f"from the run's beginning, after repeating {plural(course.first - 1, 'step')}: no checkpoint before step {course.first} "
        "was kept (checkpoint.keep sets how many are)"
    )


def read_expected(run_dir: Path) -> Expected:
    """Reads the recorded results. Parts of journal and metrics that cannot be read are not compared, and neither are fingerprints of an earlier
    form."""
    kind = "adapter" if read_config(config_of_run(run_dir)).lora.served_name else "full"
    live = (fact.update for fact in read_metrics(run_dir) if isinstance(fact, WeightsLive) and fact.update.kind == kind)
    fingerprints = {update.version: update.fingerprint for update in live}
    journaled = {record.version: record.fingerprint for record in read_only(run_dir, LiveRecord)}
    found = {version: mark for version, mark in (fingerprints | journaled).items() if not of_earlier_form(mark)}
    return Expected(found, machines_of(run_dir))


async def outcomes_of(course: RerunPlan, expected: Expected) -> AsyncGenerator[Outcome, None]:
    """The results, up to the first step after which the next one cannot be repeated."""
    checked = False
    async with rerun(course) as stages:
        async for stage in stages:
            if not checked:
                await _check_start(course, stage, expected)
                checked = True
            report = await stage.execute()
            fingerprint = (await stage.trainer.publish(stage.adapter)).fingerprint
            outcome = _judged(stage, report, fingerprint, expected)
            if stage.step >= course.first or outcome.problem:
                yield outcome
            if report.version != stage.journaled.version:
                return


async def _check_start(course: RerunPlan, stage: ReplayState, expected: Expected) -> None:
    """Compares the initial weights. Nothing was computed from them yet, so they are equal on every machine."""
    update = await stage.trainer.publish(stage.adapter)
    recorded = expected.fingerprints.get(update.version, "")
    if recorded and update.fingerprint != recorded:
        holder = course.checkpoint or f"the model {stage.config.model.path}"
        raise CheckpointError(
            f"{holder} holds other weights ({update.fingerprint}) than the run served as version {update.version} "
            f"({recorded}): it was changed after the run"
        )


def _judged(stage: ReplayState, report: TrainReport, fingerprint: str, expected: Expected) -> Outcome:
    journaled, config = stage.journaled, stage.config
    return outcome_of(
        report,
        journaled.report,
        fingerprint=fingerprint,
        recorded=expected.fingerprints.get(journaled.version, ""),
        inexact=why_inexact(config.train, expected.machines.get(stage.step)),
        tolerance=tolerance_of(config.train),
    )


def is_exact(train: TrainConfig, machine: Mapping[str, str] | None) -> bool:
    """Whether a step that `machine` did is expected here bit for bit."""
    return not why_inexact(train, machine)


def why_inexact(train: TrainConfig, machine: Mapping[str, str] | None) -> str:
    """Returns why a step that `machine` did may have other bits here, as a sentence without a full stop; empty if it may not."""
    here = machine_mark(cores_here(train.cores), train.threads)
    if not machine:
        return "the run has not recorded its machine"
    changed = [
        f"{name} was {machine.get(name, 'none')}, here {here.get(name, 'none')}"
        for name in dict.fromkeys((*machine, *here))
        if machine.get(name) != here.get(name)
        and (name in machine or name != "kernels")  # which versions before 2026-11-30 did not record
    ]
    if changed:
        return f"the run had another machine ({'; '.join(changed)})"
    return "a GPU adds in any order" if "gpu" in here and train.device != "cpu" else ""


def tolerance_of(train: TrainConfig) -> float:
    return TOLERANCE["float32" if train.dtype == "float32" else "bfloat16"]


def outcome_of(
    report: TrainReport,
    before: TrainReport,
    *,
    fingerprint: str,
    recorded: str,
    inexact: str,
    tolerance: float,
) -> Outcome:
    """`recorded`: the fingerprint that the run recorded, or an empty string. `inexact`: why means are compared within `tolerance`; empty to
    compare bit for bit."""
    if not inexact:
        problem = worded(report, before, differing(report, before))
        if not problem and recorded and fingerprint != recorded:
            problem = f"the weights are {fingerprint} instead of {recorded}"
    else:
        problem = worded(report, before, beyond(report, before, tolerance))
    return Outcome(
        step=before.step + 1,
        report=report,
        before=before,
        fingerprint=fingerprint,
        recorded=recorded,
        inexact=inexact,
        problem=problem,
    )


def beyond(report: TrainReport, before: TrainReport, tolerance: float) -> list[str]:
    """Fields that differ by more than another order of summation explains."""
    names = [name for name in COUNTS if getattr(report, name) != getattr(before, name)]
    return names + [name for name in MEANS if not _near(getattr(report, name), getattr(before, name), tolerance)]


def _near(a: float, b: float, tolerance: float) -> bool:
    return repr(a) == repr(b) or math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance / 10)


def worded(report: TrainReport, before: TrainReport, names: list[str]) -> str:
    """Returns the first differences in words; an empty string if `names` is empty."""
    shown = [f"{name} {_short(getattr(report, name))} instead of {_short(getattr(before, name))}" for name in names[:3]]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _short(value: object) -> str:
    return "other" if isinstance(value, tuple) else f"{value!r}"


# -- what people see --------------------------------------------------------------------------------------------------------


def _table() -> FittedTable:
    counted = numbers("step", "loss", "grad norm", "tokens")
    return FittedTable([*counted, *texts("weights"), *numbers("seconds"), *texts("")])


def _cells(outcome: Outcome, course: RerunPlan) -> tuple[str, ...]:
    report = outcome.report
    name = f"{outcome.step}" if outcome.step >= course.first else f"{outcome.step} (before)"
    seconds = f"{report.seconds:.2f} ({outcome.before.seconds:.2f})"
    numbers = (name, f"{report.loss:.6g}", f"{report.grad_norm:.6g}", f"{report.loss_tokens:,}")
    return (*numbers, outcome.fingerprint[:12], seconds, outcome.verdict)


def _conclude(outcomes: list[Outcome], console: Console) -> int:
    apart = next((outcome for outcome in outcomes if outcome.problem), None)
    if apart:
        console.print(Text(f"step {apart.step} is the first whose result differs", "bold red"))
    else:
        console.print(Text(f"{plural(len(outcomes), 'step')} gave the same result", "green"))
    for why in dict.fromkeys(outcome.inexact for outcome in outcomes if outcome.inexact):
        console.print(f"{why}: means are compared within a tolerance")
    return 1 if apart else 0
