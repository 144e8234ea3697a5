"""Restores the trainer of a run at any step, from a checkpoint (or the initial model) and the journal after it.

Optimizer steps are counted from 1 here, as in the output: step N makes version N.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

from msgspec.structs import replace

from headrace.algo.training_rows import Algorithm, algorithm_of
from headrace.core.batches import Batch
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.protocols import Trainer
from headrace.core.reports import TrainReport
from headrace.durable.journal import Damage, JournalStep, count_steps, read_steps, refuse_earlier
from headrace.facts.facts import RunStarted
from headrace.facts.kept_settings import configs_until
from headrace.facts.records import StepRow, read_metrics
from headrace.loop.checkpoints import Checkpoints, damage
from headrace.native.resources import available_cores
from headrace.run.build import loaded_model, plan_of
from headrace.run.clients.process_trainer import ProcessTrainer
from headrace.run.config import RunConfig, config_of_run, read_config
from headrace.run.pools import trainer_start
from headrace.run.run_directory import temporary_logs
from headrace.run.worker.build import open_launcher
from headrace.weight_sync.shared_memory import SharedMemory


@dataclass(frozen=True)
class RerunPlan:
    """The steps to repeat, and the state to begin from."""

    run_dir: Path
    checkpoint: Path | None
    """None: the initial model."""
    first: int
    last: int
    complaints: tuple[str, ...] = ()

    @property
    def begins(self) -> int:
        """Number of steps in the checkpoint."""
        return int(self.checkpoint.name.removeprefix("step-")) if self.checkpoint else 0


@dataclass(frozen=True)
class ReplayState:
    """The trainer before one step."""

    trainer: Trainer
    config: RunConfig
    journaled: JournalStep
    batch: Batch

    @property
    def step(self) -> int:
        return self.journaled.step + 1

    @property
    def adapter(self) -> str:
        """The adapter that is trained; empty if the engine served full weights."""
        return self.config.lora.served_name

    async def execute(self) -> TrainReport:
        return await self.trainer.step(self.batch)


def plan_rerun(run_dir: Path, first: int, last: int) -> RerunPlan:
    """Raises ConfigError if the run has no such steps."""
    if not (run_dir / "config.toml").exists() or any(run_dir.glob("*/checkpoints")):
        lanes = [str(path.parent) for path in sorted(run_dir.glob("*/checkpoints"))]
        hint = f"; name the directory of one of its adapters: {' or '.join(lanes)}" if lanes else ""
        raise ConfigError(f"{run_dir} is not the directory of a run with a journal{hint}")
    if not 1 <= first <= last:
        raise ConfigError(
            f"there are no steps {first} to {last}: steps are counted from 1, and --to must not be below --step"
        )
    refuse_earlier(run_dir)
    if (done := count_steps(run_dir)) < last:
        raise ConfigError(f"the journal of {run_dir} has {done} steps, so there is no step {last}")
    checkpoint, complaints = None, []
    for path in reversed(Checkpoints(run_dir / "checkpoints", keep=1).all()):
        if int(path.name.removeprefix("step-")) < first:
            if not (problem := damage(path)):
                checkpoint = path
                break
            complaints.append(problem)
    return RerunPlan(run_dir, checkpoint, first, last, tuple(complaints))


@asynccontextmanager
async def rerun(course: RerunPlan) -> AsyncIterator[AsyncIterator[ReplayState]]:
    """Yields the trainer before each step after the checkpoint, in order. The caller must execute each stage before it takes the next.

    It is a context manager, so that the trainer's process has ended after it, however many stages were taken. Raises HeadraceError if
    records cannot be read, or if the trainer cannot run here.
    """
    async with aclosing(_stages(course)) as stages:
        yield stages


async def _stages(course: RerunPlan) -> AsyncGenerator[ReplayState, None]:
    steps = _without_a_gap(course)
    restore, at = course.checkpoint, course.begins
    with temporary_logs() as scratch:
        for config, end in _by_settings(course):
            async with open_trainer(config, loaded_model(config), restore, scratch) as trainer:
                algorithm = algorithm_of(config.algo, config.longest_rollout, config.reward_weights)
                for journaled in islice(steps, end - at):
                    yield ReplayState(trainer, config, journaled, batch_of(config, journaled, algorithm))
                at, restore = end, scratch / f"after-{end}"
                if end < course.last:  # the trainer with the next settings starts from here
                    await trainer.save(restore, config.lora.served_name)


def batch_of(config: RunConfig, journaled: JournalStep, algorithm: Algorithm) -> Batch:
    """Returns the batch that the step consumed."""
    batch = plan_of(config, config.lora.served_name).batch_again(journaled, algorithm)
    return replace(batch, skippable=journaled.report.skippable, steps=journaled.steps)


def settings_at(run_dir: Path, step: int) -> RunConfig:
    """Returns the settings that did a step, counted from 1: a resumed run may have changed them."""
    *_, (config, _) = _by_settings(RerunPlan(run_dir, None, step, step))
    return config


def _without_a_gap(course: RerunPlan) -> Iterator[JournalStep]:
    """The steps in order. Raises HeadraceError at the first one that cannot be read, because later steps depend on it."""
    following = course.begins
    for step in read_steps(course.run_dir, range(course.begins, course.last)):
        if step.step != following:
            break
        following += 1
        yield step
    if following < course.last:
        damage = Damage()
        list(read_steps(course.run_dir, {following}, damage))
        raise HeadraceError(
            f"step {following + 1} cannot be repeated, because its record cannot be read (its journal: {damage}). Steps after a later "
            "checkpoint can (--step)"
        )


def _by_settings(course: RerunPlan) -> Iterator[tuple[RunConfig, int]]:
    """The settings of each part of the run with the last step of that part: a resumed run may have changed settings, or had other cores."""
    at, machines = course.begins, machines_of(course.run_dir)
    for until, path in [*configs_until(course.run_dir), (course.last, config_of_run(course.run_dir))]:
        end = min(until, course.last)
        if end > at:
            config = read_config(path)
            parts = groupby(range(at + 1, end + 1), lambda step: machines.get(step, {}).get("threads"))
            for steps in [list(part) for _, part in parts]:
                yield with_threads_of(config, machines.get(steps[-1], {})), steps[-1]
            at = end


def machines_of(run_dir: Path) -> dict[int, Mapping[str, str]]:
    """Returns the mark of the machine that did each step (`native/arithmetic.py`); steps are counted from 1."""
    machine: Mapping[str, str] = {}
    machines: dict[int, Mapping[str, str]] = {}
    for fact in read_metrics(run_dir):
        match fact:
            case RunStarted():
                machine = fact.machine
            case StepRow():
                machines[fact.report.step + 1] = machine
    return machines


def with_threads_of(config: RunConfig, machine: Mapping[str, str]) -> RunConfig:
    """Returns the settings with as many threads as the trainer had there, whatever the cores of this process: sums are split over them."""
    threads = int(machine.get("threads") or 0)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, threads=threads)) if threads else config


@asynccontextmanager
async def open_trainer(
    config: RunConfig, model_dir: Path, restore: Path | None, scratch: Path
) -> AsyncIterator[Trainer]:
    """Starts a trainer with the weights and the optimizer of `restore`, or with those of the model. `scratch`: where its log goes."""
    transport = SharedMemory.open()
    log = scratch / "trainer.log"
    adapter = config.lora.served_name
    start = trainer_start(config, model_dir, {adapter: restore} if restore else {}, transport)
    trainer = ProcessTrainer(open_launcher(scratch), start, cores_here(config.train.cores))
    try:
        await trainer.open()
        if adapter:
            await trainer.publish()  # the base weights, which a published adapter refers to
        yield trainer
    except HeadraceError as error:
        if log.exists() and (output := log.read_text(errors="replace").strip()):
            error.add_note(f"the end of the trainer's output: {output[-2000:]}")
        raise
    finally:
        await trainer.close()
        transport.close()


def cores_here(wanted: tuple[int, ...]) -> tuple[int, ...]:
    """The cores that the trainer had; on a machine without them, the same number of others, because sums are split over the threads."""
    have = available_cores()
    return wanted if set(wanted) <= have else tuple(sorted(have)[: len(wanted)])
