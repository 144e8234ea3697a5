"""The rehearsal of a run: finds every error that can be found before a model is loaded and before anything is written.

`headrace train` begins with it, `headrace train --dry-run` prints its result, and a resumed run does it before it changes its directory.
Complaints are collected, so that one start shows all of them.
"""

from __future__ import annotations

import asyncio
import subprocess
from contextlib import nullcontext
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.durable.journal import count_steps
from headrace.engine.native.served_how import served_how
from headrace.facts.kept_settings import CONFIG
from headrace.models.resolve import commits_of, without_commit
from headrace.run.auto.measurer import Measurer, ProbeMeasurer
from headrace.run.build import loaded_model
from headrace.run.choosing import settle_adapter
from headrace.run.config import RunConfig, read_config
from headrace.run.machine_trial import choose, machine_and_memory
from headrace.run.python_inputs import NO_INPUTS, PythonInputs
from headrace.run.rehearsal import machine as machines
from headrace.run.rehearsal.machine import place_problem
from headrace.run.rehearsal.words import Lines
from headrace.run.rehearsed import Rehearsal
from headrace.run.row_trial import task_and_reward
from headrace.run.run_directory import refuse_used
from headrace.run.seats import check_seats
from headrace.run.wording import headline
from headrace.trainer.config import TrainConfig, change_of_rate, drawn


async def rehearse(
    config: RunConfig,
    inputs: PythonInputs = NO_INPUTS,
    resume: Path | None = None,
    thorough: bool = False,
    measurer: Measurer | None = None,
) -> Rehearsal:
    """Raises ConfigError with all complaints, one per line.

    `inputs`: as for `run.train`. `resume`: the directory of the run to resume. Uncertain problems (memory, prompts that are too long) are
    then only noted, because the run has worked before, and no settings are chosen, because they were chosen then. `thorough`: also ask
    torch for facts that are only printed. `measurer`: measures this machine; by default with a short probe.
    """
    found = Rehearsal(config=config, resumes=bool(resume))
    async with found.steps.shown() if config.observe.terminal != "off" else nullcontext():
        await _rehearse(found, inputs, resume, thorough, measurer or ProbeMeasurer())
    if found.problems:
        raise ConfigError("\n".join(dict.fromkeys(found.problems)))
    found.sections["Run"] = _run(found.config)
    for run in found.config.runs if thorough else ():
        found.sections["Run"] = [*found.sections["Run"], *_rate(found, run.name, run.train, resume)]
    return found


async def _rehearse(
    found: Rehearsal, inputs: PythonInputs, resume: Path | None, thorough: bool, measurer: Measurer
) -> None:
    config = found.config
    with found.part():
        _place(config, resume)
    probe = machines.ask_torch() if thorough or machines.may_have_gpu() else None
    model_dir: Path | None = None
    try:
        with found.part(), found.steps.doing(f"finding the model {config.model.path}"):
            if not resume:
                config = found.config = config.with_commits(await asyncio.to_thread(commits_of, config.model_paths))
            model_dir = await asyncio.to_thread(loaded_model, config, inputs.rows)
            if not resume:
                config = found.config = settle_adapter(config, model_dir)
            else:
                found.notes += without_commit(config.model_paths)
        for run in config.runs:
            await task_and_reward(found, run, model_dir, inputs)
        with found.part():
            machine = await asyncio.to_thread(machines.inspect_machine, probe)
            if model_dir and not resume:
                with found.steps.doing("measuring this machine"):
                    await asyncio.to_thread(choose, found, machine, model_dir, measurer)
                with found.part(), found.steps.doing("asking how the engine serves this model"):
                    found.served = await asyncio.to_thread(served_how, model_dir, found.config.engine)
            if model_dir:
                machine_and_memory(found, machine, model_dir)
    finally:
        _end(probe)


async def try_files(config: RunConfig, inputs: PythonInputs = NO_INPUTS) -> Rehearsal:
    """Returns the part of a rehearsal that concerns the files of the model, the rows and the reward. Its `problems` are not raised."""
    found = Rehearsal(config=config)
    with found.part():
        model_dir = await asyncio.to_thread(loaded_model, config, inputs.rows)
        config = found.config = settle_adapter(config, model_dir)
        await task_and_reward(found, config, model_dir, inputs, needs_reward=False)
    return found


def _end(probe: subprocess.Popen[str] | None) -> None:
    if probe and probe.poll() is None:
        probe.kill()
        probe.communicate()


# --- the directory -----------------------------------------------------------------------------------------------------


def _place(config: RunConfig, resume: Path | None) -> None:
    if problem := place_problem(resume or config.run_dir, config.out):
        raise ConfigError(problem)
    if not resume:
        refuse_used(config.run_dir)
    check_seats(config.orchestration)


def _run(config: RunConfig) -> Lines:
    staleness, rollout = config.staleness, config.rollout
    return [
        ("", headline(config)),
        ("steps", f"{config.train.steps}, each of {staleness.groups_per_step} groups x {rollout.group_size} rollouts"),
        (
            "lag",
            f"{staleness.slots} tickets: no token is older than {staleness.lag_bound} optimizer step(s) when it is trained",
        ),
        ("directory", str(config.run_dir)),
        *(("of the hub", f"{commit}, which a resume takes too") for commit in config.chosen.models.values()),
    ]


def _rate(found: Rehearsal, name: str, train: TrainConfig, resume: Path | None) -> Lines:
    """The learning rate over the steps, and a note if it goes on otherwise than a run that is resumed would have."""
    before, done, several = None, 0, bool(found.config.adapters)
    own = resume / name if resume and several else resume
    if own and (own / CONFIG).exists():  # an adapter's is missing if the run was killed at its start
        before, done = read_config(own / CONFIG).train, count_steps(own)
        if message := change_of_rate(before, train, done):
            found.notes.append(f"{name}: {message}" if several else message)
    curve = drawn(train, before, done).splitlines()
    lines = [f"{name}: {curve[0]}" if several else curve[0], *curve[1:]]
    return [("" if number else "rate", line) for number, line in enumerate(lines)]
