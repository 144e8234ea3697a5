"""`headrace replay FILE`: does the step of a bundle again, stage by stage, and names the first one whose result differs."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.algo.config import AlgoConfig
from headrace.algo.training_rows import Algorithm, algorithm_of
from headrace.commands.replay.bundle import CODE, STATE, Bundle, apart, norms_of_updates, read_bundle
from headrace.commands.replay.replay import beyond, is_exact, tolerance_of, worded
from headrace.commands.replay.rerun import batch_of, open_trainer, with_threads_of
from headrace.core.batches import Failure, Group
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.reports import TrainReport, differing
from headrace.core.types import Scored
from headrace.episodes.scoring.config import BUILTIN, HANDED, RewardSpec, distinct
from headrace.facts.texts import plural
from headrace.models.images import ALWAYS_APART, SERVED, type_of
from headrace.models.lora import LoraConfig
from headrace.models.resolve import resolve_model
from headrace.run.build import build_scorer
from headrace.run.config import RunConfig
from headrace.settings.paths import resolve_paths
from headrace.settings.toml import build
from headrace.trainer.config import TrainConfig
from headrace.version import __version__
from headrace.views.screen.console import Console
from headrace.views.screen.console import PrintableText as Text
from headrace.views.screen.layout import FittedTable, texts

# --- The stages of a step that are done again from a bundle
# The stages of a step that are done again from a bundle, each from the recorded input of its own: reward, advantage, loss, backward,
# optimizer. So a difference shows in the stage that makes it.


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
    named = list(zip(distinct([spec.name for spec in config.reward.specs]), config.reward.specs, strict=True))
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
            if any(rollout.branches for rollout in group.scored):
                return not_done("reward", "rollouts with forks are not scored again")
            found = await scorer.score(group.prompt, [rollout.episode for rollout in group.scored])
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
        algorithm = algorithm_of(algo, bundle.longest, bundle.weights, bundle.journaled.demonstrations)
    except ConfigError as error:
        return not_done("advantage", f"{error}; --include code packs it"), None
    rows = 0
    for group in bundle.journaled.groups:
        made = algorithm.filled(group)
        rows += len(made.all_rows)
        if problem := _rows_apart(made, group, _near(train, bundle)):
            return StageResult("advantage", "", f"ticket {group.ticket}: {problem}"), algorithm
    return StageResult("advantage", plural(rows, "row")), algorithm


def _rows_apart(made: Group, group: Group, near: float) -> str:
    if len(made.all_rows) != len(group.all_rows):
        return f"{plural(len(made.all_rows), 'row')} instead of {len(group.all_rows)}"
    for index, (now, then) in enumerate(zip(made.all_rows, group.all_rows, strict=True)):
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


# --- bundle replay ------------------------------------------------------------


TRAINED: tuple[StageName, ...] = ("loss", "backward", "optimizer")


def replay_bundle(file: Path, model: str = "", trust: bool = False, console: Console | None = None) -> int:
    """Returns 0 if no stage that could be done differs, else 1. `model`: the base model here, if the bundle's was a directory. `trust`:
    whether code in the bundle may run. Raises ConfigError if the file is no bundle, or holds code that nobody trusts."""
    console = console or Console()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "bundle"
        bundle = read_bundle(file, folder)
        code = sorted(path.name for path in folder.glob(f"{CODE}/*"))
        if code and not trust:
            raise ConfigError(
                f"{file} holds code that a replay runs ({', '.join(code)}): read it (unzip -p {file} '{CODE}/*'), then add --trust"
            )
        console.print(_headline(bundle))
        results = asyncio.run(_stages(bundle, folder, model=model, scratch=Path(scratch)))
    console.print(_table(results))
    for sentence in bundle.left_out:
        console.print(Text(f"not in the bundle: {sentence}", "dim"))
    if bundle.made_anew:
        console.print(Text(f"its state before the step is not the run's, only near it: {bundle.made_anew}", "dim"))
    return _conclude(results, console)


def _headline(bundle: Bundle) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in bundle.packages.items())
    where = f"on {bundle.machine.get('cpu', 'an unknown machine')}"
    here = "" if bundle.headrace == __version__ else f" (here {__version__})"
    return f"step {bundle.step}, done with headrace {bundle.headrace}{here} and {versions}, {where}"


async def _stages(bundle: Bundle, folder: Path, *, model: str, scratch: Path) -> list[StageResult]:
    code = folder / CODE
    config = with_threads_of(build(RunConfig, resolve_paths(_tree(bundle), code)), bundle.machine)
    made, algorithm = advantage_stage(bundle, config.algo, config.train)
    results = [await reward_stage(bundle, config, code), made]
    problem = _cannot_train(bundle, folder, config.algo, config.lora, model)
    if problem or algorithm is None:
        why = problem or "the advantages cannot be made"
        return [*results, *(not_done(name, why) for name in TRAINED)]
    model_dir = resolve_model(model or bundle.model)
    where = {"folder": folder, "model_dir": model_dir, "scratch": scratch}
    return [*results, *await trained_stages(bundle, config, algorithm, **where)]


def _tree(bundle: Bundle) -> dict[str, object]:
    """The settings of a config, which needs a model and a task; neither is used."""
    return {**bundle.settings, "model": {"path": bundle.model}, "task": {"kind": "python", "rows": "a bundle"}}


def _cannot_train(bundle: Bundle, folder: Path, algo: AlgoConfig, lora: LoraConfig, model: str) -> str:
    """Returns why the trainer cannot do the step, or an empty string."""
    if bundle.step > 1 and not (folder / STATE).is_dir():
        kind = "adapter" if lora.rank else "weights"
        return f"the bundle has no state before the step (--include {kind} packs it)"
    if bundle.local and not model:
        return f"the model was a directory called {bundle.model}: --model DIR names it here"
    if missing := [
        function
        for function in (algo.loss,)
        if function and ".py:" in function and not Path(function.rpartition(":")[0]).is_file()
    ]:
        return f"the bundle has no code of {Path(missing[0]).name} (--include code packs it)"
    shown = any(group.prompt.images for group in bundle.journaled.groups)
    if type_of(resolve_model(model or bundle.model)) in (SERVED if shown else ALWAYS_APART):
        return "the model sees, and a bundle holds no images: headrace replay RUN does the step where the run is"
    return ""


def _table(results: list[StageResult]) -> FittedTable:
    drawn = FittedTable(texts("stage", "done again", ""))
    for result in results:
        verdict = f"DIFFERS: {result.problem}" if result.problem else "the same" if result.done else "not done"
        drawn.add_row(
            result.name, result.did, verdict, style="bold red" if result.problem else "" if result.done else "dim"
        )
    return drawn


def _conclude(results: list[StageResult], console: Console) -> int:
    first = next((result for result in results if result.problem), None)
    if first:
        console.print(Text(f"{first.name} is the first stage that differs", "bold red"))
        return 1
    done = [result.name for result in results if result.done]
    console.print(
        Text(f"the same result in {', '.join(done)}", "green")
        if done
        else Text("no stage could be done again", "yellow")
    )
    return 0
