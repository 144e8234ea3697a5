"""The stages of a step that are done again from a bundle, each from the recorded input of its own: reward, advantage, loss, backward,
optimizer. So a difference shows in the stage that makes it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from headrace.algo.config import AlgoConfig
from headrace.algo.training_rows import Algorithm, algorithm_of
from headrace.commands.again.bundle import STATE, Bundle
from headrace.commands.again.replay import beyond, is_exact, tolerance_of, worded
from headrace.commands.again.rerun import batch_of, open_trainer
from headrace.commands.again.updates import apart, norms_of_updates
from headrace.core.batches import Failure, Group
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.reports import TrainReport, differing
from headrace.core.types import Scored
from headrace.episodes.scoring.config import BUILTIN, HANDED, RewardSpec, distinct
from headrace.facts.texts import plural
from headrace.run.build import build_scorer
from headrace.run.config import RunConfig
from headrace.trainer.config import TrainConfig

StageName = Literal["reward", "advantage", "loss", "backward", "optimizer"]
BACKWARD = ("grad_norm", "skipped")
OPTIMIZER = ("lr", "version")
"""The fields of a report that these stages make; the others are those of the forward pass and its loss."""
NEAR = 1e-6
"""Relative difference of rewards and advantages on another machine: these are sums in Python's own floats."""


@dataclass(frozen=True)
class StageResult:
    """The result of a stage. `problem` is empty if it is the recorded one."""

    name: StageName
    did: str
    """The work that was done again, or the reason why none was."""
    problem: str = ""
    done: bool = True


def not_done(name: StageName, why: str) -> StageResult:
    return StageResult(name, why, done=False)


# -- reward -----------------------------------------------------------------------------------------------------------------


async def reward_stage(bundle: Bundle, config: RunConfig, code: Path) -> StageResult:
    """Calls the reward functions again. `code`: the folder with the functions' files."""
    named = list(zip(distinct([one.name for one in config.reward.specs]), config.reward.specs, strict=True))
    chosen = [(name, spec) for name, spec in named if _can_be_called(spec, code)]
    if not chosen:
        why = (
            f"the bundle has no code of {', '.join(name for name, _ in named)}" if named else "no function gave rewards"
        )
        return not_done("reward", f"{why} (--include code packs it)" if named else why)
    own = distinct([spec.name for _, spec in chosen])
    scorer = build_scorer(_with_functions(config, [spec for _, spec in chosen]))
    count = 0
    try:
        for group in bundle.journaled.groups:
            if any(one.branches for one in group.scored):
                return not_done("reward", "rollouts with forks are not scored again")
            found = await scorer.score(group.prompt, [one.episode for one in group.scored])
            for index, (now, then) in enumerate(zip(found, group.scored, strict=True)):
                for mine, (name, _) in zip(own, chosen, strict=True):
                    count += 1
                    if problem := _reward_apart(now, then, mine=mine, name=name, near=_near(config.train, bundle)):
                        return StageResult("reward", "", f"ticket {group.ticket}, rollout {index}: {problem}")
    finally:
        await scorer.close()
    return StageResult("reward", f"{plural(count, 'reward')} of {', '.join(name for name, _ in chosen)}")


def _can_be_called(spec: RewardSpec, code: Path) -> bool:
    if spec.segments or spec.function.startswith(HANDED):
        return False
    file = Path(spec.function.rpartition(":")[0])
    return spec.function in BUILTIN or (file.is_relative_to(code) and file.exists())


def _with_functions(config: RunConfig, specs: Sequence[RewardSpec]) -> RunConfig:
    reward = dataclasses.replace(config.reward, function="", extract="", functions=tuple(specs))
    return dataclasses.replace(config, reward=reward)


def _reward_apart(now: Scored | Failure, then: Scored, *, mine: str, name: str, near: float) -> str:
    if isinstance(now, Failure):
        return f"the function fails here ({now.reason}: {now.detail[:200]})"
    a, b = now.rewards.get(mine), then.rewards.get(name)
    if a is None or b is None:
        return "" if a is b else f"{name} is {a} instead of {b}"
    return "" if _same(a, b, near) else f"{name} is {a!r} instead of {b!r}"


def _same(a: float, b: float, near: float) -> bool:
    return repr(a) == repr(b) or (near > 0 and math.isclose(a, b, rel_tol=near, abs_tol=near))


def _near(train: TrainConfig, bundle: Bundle) -> float:
    return 0.0 if is_exact(train, bundle.machine) else NEAR


# -- advantage --------------------------------------------------------------------------------------------------------------


def advantage_stage(bundle: Bundle, algo: AlgoConfig, train: TrainConfig) -> tuple[StageResult, Algorithm | None]:
    """Makes the training rows again from the recorded rewards."""
    try:
        algorithm = algorithm_of(algo, bundle.longest, bundle.weights)
    except ConfigError as error:
        return not_done("advantage", f"{error}; --include code packs it"), None
    rows = 0
    for group in bundle.journaled.groups:
        made = algorithm.rows(group.prompt, group.scored)
        rows += len(made)
        if problem := _rows_apart(replace(group, rows=made), group, _near(train, bundle)):
            return StageResult("advantage", "", f"ticket {group.ticket}: {problem}"), algorithm
    return StageResult("advantage", plural(rows, "row")), algorithm


def _rows_apart(made: Group, group: Group, near: float) -> str:
    if len(made.rows) != len(group.rows):
        return f"{plural(len(made.rows), 'row')} instead of {len(group.rows)}"
    for index, (now, then) in enumerate(zip(made.rows, group.rows, strict=True)):
        for field in ("tokens", "mask"):
            if getattr(now, field) != getattr(then, field):
                return f"row {index} has other values of {field}"
        for token, (a, b) in enumerate(zip(now.advantages, then.advantages, strict=True)):
            if not _same(a, b, near):
                return f"row {index}, token {token}: the advantage is {a!r} instead of {b!r}"
    return ""


# -- loss, backward, optimizer ----------------------------------------------------------------------------------------------


async def trained_stages(
    bundle: Bundle, config: RunConfig, algorithm: Algorithm, *, folder: Path, model_dir: Path, scratch: Path
) -> list[StageResult]:
    """Does the optimizer step again, from the recorded rows. Raises CheckpointError if the weights are not those of the run."""
    state = folder / STATE if (folder / STATE).is_dir() else None
    adapter = config.lora.served_name
    async with open_trainer(config, model_dir, state, scratch) as trainer:
        begun = (await trainer.publish(adapter)).fingerprint
        if bundle.before and begun != bundle.before:
            holder = "the bundle" if state else f"the model {bundle.model} here"
            raise CheckpointError(f"{holder} holds other weights ({begun}) than the step began with ({bundle.before})")
        if bundle.updates:
            await trainer.save(scratch / "before", adapter)
        report = await trainer.step(batch_of(config, bundle.journaled, algorithm))
        ended = (await trainer.publish(adapter)).fingerprint
        moved = {}
        if bundle.updates:
            await trainer.save(scratch / "after", adapter)
            moved = norms_of_updates(scratch / "before", scratch / "after")
    exact = is_exact(config.train, bundle.machine) and not bundle.made_anew
    tolerance = 0.0 if exact else tolerance_of(config.train)
    results = judged_stages(report, bundle.journaled.report, tolerance)
    weights = apart(moved, bundle.updates, tolerance)
    if exact and bundle.after and ended != bundle.after:
        weights = weights or f"the weights are {ended} instead of {bundle.after}"
    if weights and not results[-1].problem:
        results[-1] = StageResult("optimizer", results[-1].did, weights)
    return results


def judged_stages(report: TrainReport, before: TrainReport, tolerance: float) -> list[StageResult]:
    """Compares the numbers of a step by the stage that makes them. `tolerance`: relative; 0 compares bit for bit."""
    names = beyond(report, before, tolerance) if tolerance else differing(report, before)
    forward = [name for name in names if name not in (*BACKWARD, *OPTIMIZER)]
    return [
        StageResult(
            "loss", f"loss {report.loss:.6g} over {report.loss_tokens:,} tokens", worded(report, before, forward)
        ),
        StageResult("backward", f"gradient norm {report.grad_norm:.6g}", _of(BACKWARD, report, before, names=names)),
        StageResult("optimizer", f"learning rate {report.lr:.6g}", _of(OPTIMIZER, report, before, names=names)),
    ]


def _of(fields: Sequence[str], report: TrainReport, before: TrainReport, *, names: Sequence[str]) -> str:
    return worded(report, before, [name for name in names if name in fields])
