"""The further evaluation sets of a run (`eval.sets`): their prompts, and the environment and the scorer that a set has of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.core.types import Prompt
from headrace.episodes.tasks.prompts import RemarkedTask
from headrace.episodes.tasks.read import Row
from headrace.episodes.tasks.rows import trained_too
from headrace.facts.telemetry import Telemetry
from headrace.facts.texts import plural
from headrace.loop.assembly import MeasuredSet
from headrace.loop.evaluation import measure_of
from headrace.models.chat import ChatEncoder
from headrace.run.build import build_environment, build_scorer, build_task
from headrace.run.config import RunConfig, set_runs
from headrace.run.resume_rules import contents_of, meaning
from headrace.run.seats import ONLY_HERE, UserSites
from headrace.settings.process_config import EvalSetConfig


@dataclass(frozen=True, kw_only=True)
class ReadSet:
    """An evaluation set whose prompts are read. No process is up for it."""

    config: EvalSetConfig
    run: RunConfig
    """The set as a run whose held-out prompts it is."""
    prompts: Sequence[Prompt]
    remarks: Sequence[str]

    @property
    def measure(self) -> str:
        """The mark of what it measures, which a resume may have changed: its own reward, environment or rows."""
        return measure_of(meaning(self.run, contents_of(self.run)), self.run.eval.temperature)

    @property
    def words(self) -> str:
        looks = self.run.eval
        return f"{plural(len(self.prompts), 'prompt')}, {plural(looks.samples, 'completion')} each, temperature {looks.temperature:g}"

    @property
    def has_own_environment(self) -> bool:
        """Whether the run's environment would play it otherwise: it is told the system message and the template's arguments."""
        task = self.config.task
        return bool(self.config.environment) or "system" in task or "template" in task or "kind" in task


def read_sets(
    config: RunConfig, encoder: ChatEncoder, task: RemarkedTask | None = None, rows: Sequence[Row] | None = None
) -> list[ReadSet]:
    """`encoder`: of the model; `task`: the run's own, None in a rollout host, which is given prompts one by one; `rows`: those that were passed from Python. Raises ConfigError for a set that cannot be used."""
    runs = set_runs(config)
    if task is None:
        return [ReadSet(config=one, run=runs[one.name], prompts=(), remarks=()) for one in config.eval.sets]
    return [_read(one, runs[one.name], encoder, task, rows) for one in config.eval.sets]


def _read(
    config: EvalSetConfig, run: RunConfig, encoder: ChatEncoder, task: RemarkedTask, rows: Sequence[Row] | None
) -> ReadSet:
    if not config.task:
        return ReadSet(config=config, run=run, prompts=task.held_out(run.eval.prompts), remarks=())
    own = build_task(run.task, encoder, run.seed, rows, measured=config.has_own_rows)
    remarks, prompts = list(own.remarks()), own.held_out(run.eval.prompts)
    if known := trained_too(task, own, len(prompts)):
        remarks += [
            f"{known} of {plural(len(prompts), 'prompt')} are trained on, too: their reward does not say what the policy does with prompts that it has not seen"
        ]
    named = [f"the evaluation set {config.name}: {remark}" for remark in remarks]
    return ReadSet(config=config, run=run, prompts=prompts, remarks=named)


@asynccontextmanager
async def open_sets(
    sets: Sequence[ReadSet],
    encoder: ChatEncoder,
    telemetry: Telemetry,
    *,
    logs: Path | None = None,
    sites: UserSites = ONLY_HERE,
) -> AsyncIterator[list[MeasuredSet]]:
    """Starts what sets have of their own. `logs`: the directory for what that prints."""
    async with AsyncExitStack() as undo:
        found = []
        for one in sets:
            scorer = environment = None
            if one.config.reward:
                log = logs and logs / f"scorer.{one.config.name}.log"
                make = partial(build_scorer, one.run, (), log, sites=sites.scorers)
                scorer = await asyncio.to_thread(make, decode=encoder.decode, telemetry=telemetry)
                undo.push_async_callback(scorer.close)
            if one.has_own_environment:
                log = logs and logs / f"environment.{one.config.name}.log"
                environment = await asyncio.to_thread(build_environment, one.run, encoder, log, sites.environments)
                undo.push_async_callback(environment.close)
            found.append(
                MeasuredSet(
                    name=one.config.name,
                    prompts=one.prompts,
                    evaluation=one.run.eval,
                    environment=environment,
                    scorer=scorer,
                    measure=one.measure,
                    every=one.config.every,
                )
            )
        yield found
