"""`headrace eval` and `headrace export`: work on a run that needs no training."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal

from headrace.core.errors import CheckpointError, ConfigError, HeadraceError, nearest
from headrace.core.printing import echo
from headrace.facts.facts import Evaluated, Fact, FirstFailure, Warned, WorkerLost
from headrace.facts.records import steps_done
from headrace.facts.texts import plural
from headrace.loop.assembly import groups_alone
from headrace.loop.checkpoints import Checkpoints, damage, step_of
from headrace.loop.evaluation import Evaluator, HeldOutSet
from headrace.models.chat import ChatEncoder
from headrace.run.auto.measurer import Measurer
from headrace.run.build import load_files, loaded_model, open_players, open_telemetry, plan_of
from headrace.run.choosing import settle_here
from headrace.run.config import RunConfig
from headrace.run.evaluation_sets import open_sets, read_sets
from headrace.run.hosting import complete
from headrace.run.pools import open_pools
from headrace.run.python_inputs import NO_INPUTS, PythonInputs
from headrace.run.run_directory import held, temporary_logs
from headrace.run.teaching import for_reading, open_teaching


class _Stderr:
    """Prints warnings and failures to stderr, keeps measurements, and drops all other facts."""

    def __init__(self) -> None:
        self.measured: list[Evaluated] = []

    def record(self, fact: Fact) -> None:
        if isinstance(fact, Evaluated):
            self.measured.append(fact)
        if isinstance(fact, Warned):
            echo(fact.message, err=True)
        elif isinstance(fact, FirstFailure):
            echo("\n  ".join([f"the first {fact.reason}: {fact.detail}", *fact.traceback.splitlines()]), err=True)
        elif isinstance(fact, WorkerLost):
            echo(f"the {fact.who} process {fact.how}; it is started again", err=True)


def evaluate(
    config: RunConfig,
    run: Path | None = None,
    prompts: int | None = None,
    step: int | None = None,
    inputs: PythonInputs = NO_INPUTS,
    *,
    measurer: Measurer | None = None,
    of: str | None = None,
) -> tuple[Evaluated, ...]:
    """Measures the mean reward on `prompts` held-out prompts: of the config's model, or of the last checkpoint of `run` (or of `step`, see
    `checkpoint_of`); then that of each of `eval.sets`. With `run`, `config` must be that run's config. `inputs`: functions and rows that the
    config names but cannot hold. `measurer`: chooses what a config without a run leaves open, as at the start of a run; a run has chosen already.
    `of`: the one set that is measured; empty: the held-out prompts alone; None: all."""
    if config.adapters:
        names = ", ".join(adapter.name for adapter in config.adapters)
        raise ConfigError(
            f"the config trains several adapters ({names}); evaluate one of them by its directory, such as RUN/{config.adapters[0].name}"
        )
    if not (config.reward.given or config.environment.rewards) and all(
        teacher.mode == "tokens" for teacher in config.teachers
    ):
        raise ConfigError('there is no reward to measure: set reward.function = "path/to/file.py:name"')
    count = config.eval.prompts if prompts is None else prompts
    if not 0 < count <= config.task.held_out:
        raise ConfigError(f"{count} held-out prompts were requested; there are {config.task.held_out} (task.held_out)")
    known = [one.name for one in config.eval.sets]
    if of and of not in known:
        raise ConfigError(
            f"eval.sets has no set called {of}{nearest(of, known)}; there are: {', '.join(known) or 'none'}"
        )
    if step is not None and run is None:
        raise ConfigError("a step belongs to a run: name the directory of a run, not a config")
    if of is not None:
        sets = tuple(one for one in config.eval.sets if one.name == of)
        config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, sets=sets))
    return complete(
        _choose_and_evaluate(config, checkpoint_of(run, step) if run else None, count, inputs, measurer, only=bool(of))
    )


async def _choose_and_evaluate(
    config: RunConfig,
    checkpoint: Path | None,
    prompts: int,
    inputs: PythonInputs,
    measurer: Measurer | None,
    *,
    only: bool,
) -> tuple[Evaluated, ...]:
    if checkpoint is None:
        model_dir = await asyncio.to_thread(loaded_model, config, inputs.rows)
        config = await asyncio.to_thread(settle_here, config, model_dir, measurer)
        for what, why in config.chosen.why.items():
            echo(f"{what}: {why}", err=True)
    return await _evaluate(config, checkpoint, prompts, inputs, only=only)


async def _evaluate(
    config: RunConfig, checkpoint: Path | None, prompts: int, inputs: PythonInputs, *, only: bool
) -> tuple[Evaluated, ...]:
    """`only`: whether the further set that the config has is measured alone."""
    config = dataclasses.replace(config, orchestration=config.orchestration.at_home)
    adapter, reading = config.lora.served_name, for_reading(config)
    restore = {adapter: checkpoint} if checkpoint else {}
    async with AsyncExitStack() as undo:
        logs = undo.enter_context(temporary_logs())
        observer = _Stderr()
        telemetry = open_telemetry(config.watch, observer, time.monotonic)
        async with telemetry.waits.named("start", "the files of models, task and reward", endless=True):
            model_dir = await asyncio.to_thread(loaded_model, config, inputs.rows)
            encoder = await asyncio.to_thread(ChatEncoder, model_dir)
            files = await load_files(reading, encoder, inputs.rows)
        read = await asyncio.to_thread(read_sets, config, files.encoder, files.task, inputs.rows)
        players = await undo.enter_async_context(open_players(config, files.encoder, telemetry, rewards=inputs.rewards))
        sets = await undo.enter_async_context(open_sets(read, files.encoder, telemetry))
        pools = await undo.enter_async_context(open_pools(config, model_dir, logs, telemetry, restore))
        async with telemetry.waits.named("start", "the first weights to be live"):
            if adapter:
                await pools.serve_base(telemetry)
            await pools.engine.load(await pools.trainer.publish(adapter))
        adapted = bool(adapter)
        teaching = await open_teaching(
            reading, files.planned_teachers, pools, files.encoder, telemetry, adapted=adapted
        )
        undo.push_async_callback(teaching.close)
        rewarding = teaching.rewarding(players.scorer)
        groups = groups_alone(
            plan=plan_of(config, adapter),
            engine=pools.engine,
            partial=config.partial,
            environment=players.environment,
            scorer=rewarding,
            evaluated_by=rewarding,
            evaluation=config.eval,
            decode=files.encoder.decode,
            telemetry=telemetry,
        )
        further = [one.with_groups(groups) for one in sets]
        first = HeldOutSet(config.eval.name, groups, files.task.held_out(prompts))
        first, *further = further if only else (first, *further)
        evaluator = Evaluator(first, telemetry, further)
        measured = await evaluator.measure("after", step_of(checkpoint) if checkpoint else 0)
        assert measured is not None
        found = {fact.name: fact for fact in observer.measured if fact.beside}
        return measured, *(found[one.name] for one in further)


def checkpoint_of(run: Path, step: int | None = None) -> Path:
    """The checkpoint of `step`, or that of the last step that the run has done.

    Raises ConfigError if there is none, or if the newest one is of an earlier step (the caller must then name it by `step`), and
    CheckpointError if it is damaged."""
    checkpoints = Checkpoints(run / "checkpoints", keep=1)
    known = {step_of(path): path for path in checkpoints.all()}
    if not known and (parts := sorted(path.parent for path in run.glob("*/checkpoints"))):
        names = " or ".join(map(str, parts))
        raise ConfigError(f"{run} trains several adapters; name the directory of one: {names}")
    if step is not None:
        if step not in known:
            have = " and ".join(map(str, known)) or "none"
            raise ConfigError(f"{run} has no checkpoint of step {step}; it has those of {have}")
        if problem := damage(known[step]):
            raise CheckpointError(problem)
        return known[step]
    newest, complaints = checkpoints.newest_good()
    because = "".join(f"; {text}" for text in complaints)
    if newest is None:
        raise CheckpointError(f"{run} has no whole checkpoint{because}")
    taken = step_of(newest)
    if (done := steps_done(run)) > taken:
        later = "it is still training" if held(run) else f"headrace train --resume {run} trains to its last step"
        raise ConfigError(
            f"the newest whole checkpoint of {run} is of step {taken}, and the run has done {plural(done, 'step')}{because}. --step "
            f"{taken} (step={taken} in Python) uses it all the same; {later}"
        )
    return newest


def export(
    config: RunConfig,
    run: Path,
    to: Path,
    *,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    merge: bool = False,
    step: int | None = None,
) -> Path:
    """Writes the model of the run's last checkpoint (or of `step`, see `checkpoint_of`) as a directory that `transformers` loads. A LoRA
    run gives its adapter, as a directory that peft loads, or with `merge` a whole model that contains it. Returns the checkpoint."""
    if merge and not config.lora.rank:
        raise ConfigError(f"{run} trained all weights and has no adapter to merge: leave --merge out")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"{to} exists already: name a directory that is new or empty")
    checkpoint = checkpoint_of(run, step)
    if config.lora.quantise and not merge:
        message = f"the adapter was trained on base weights in {config.lora.quantise}; with the exact ones the policy differs slightly"
        echo(f"{message}: --merge writes the policy that was trained", err=True)
    # Torch is imported here only: an evaluation's controller does without it.
    from headrace.trainer.step.learner import Assignment
    from headrace.trainer.step.trainer import export_weights

    model_dir = loaded_model(config, for_weights=True)
    trained = Assignment(config.train, config.algorithm, config.lora)
    try:
        export_weights(model_dir, trained, seed=config.seed, checkpoint=checkpoint, to=to, dtype=dtype, merge=merge)
    except OSError as error:
        raise HeadraceError(
            f"could not write {to}: {error}. The directory is incomplete: delete it, and export to a disk with more room"
        ) from error
    return checkpoint
