"""`headrace replay RUN --step N --export FILE`: packs one step of a run into a bundle."""

from __future__ import annotations

import asyncio
import json
import tempfile
import tomllib
from collections.abc import Collection
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from msgspec.structs import replace

from headrace.commands.again.bundle import FORMAT, Bundle, places_named, write_bundle
from headrace.commands.again.replay import read_expected, why_inexact
from headrace.commands.again.rerun import RerunPlan, plan_rerun, rerun, settings_at
from headrace.commands.again.updates import Updates, norms_of_updates
from headrace.core.batches import Failure
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.reports import differing
from headrace.durable.journal import JournalStep, read_steps
from headrace.episodes.scoring.config import HANDED, RewardConfig
from headrace.models.lora import LoraConfig
from headrace.run.config import RunConfig, dump_config
from headrace.settings.toml import Tree
from headrace.trainer.config import TrainConfig
from headrace.version import __version__
from headrace.views.screen.console import Console
from headrace.views.screen.console import PrintableText as Text

INCLUDED = ("code", "adapter", "weights")
"""The parts that a bundle holds only if they are asked for: source files that the settings name, and the state of the trainer before the step."""
SECTIONS = ("seed", "rollout", "algo", "train", "lora", "staleness")
"""The sections that the step depends on. They name no place; functions of a file are the exception, see `CodeFiles`."""
PACKAGES = ("torch", "transformers", "peft", "safetensors", "numpy", "reasoning-gym")


@dataclass
class CodeFiles:
    """Collects the source files that settings name. A setting then names the file alone."""

    texts: dict[str, str] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    _names: dict[Path, str] = field(default_factory=dict)

    def short(self, function: str) -> str:
        """`/home/me/rewards.py:exact` -> `rewards.py:exact`; names of functions that are built in stay."""
        file, colon, name = function.rpartition(":")
        if not colon or not file.endswith(".py"):
            return function
        path = Path(file)
        if path not in self._names:
            taken = len([one for one in self._names if one.name == path.name])
            self._names[path] = f"{path.stem}_{taken + 1}.py" if taken else path.name
            try:
                self.texts[self._names[path]] = path.read_text()
            except OSError as error:
                self.unreadable.append(str(error))
        return f"{self._names[path]}:{name}"


def export_bundle(
    run_dir: Path, step: int, file: Path, include: Collection[str] = (), console: Console | None = None
) -> int:
    """Writes a bundle of a step, counted from 1. `include`: some of INCLUDED. Raises ConfigError if the run has no such step, or if the
    state that is asked for is not what the run trained."""
    console = console or Console()
    if file.exists():
        raise ConfigError(f"{file} exists already: name another file, or delete it")
    course = plan_rerun(run_dir, step, step)
    config = settings_at(run_dir, step)
    _refuse_other_state(include, config.lora)
    code = CodeFiles()
    bundle = _facts(run_dir, step, config, code=code)
    if "code" in include and code.unreadable:
        raise ConfigError(f"a file that the settings name cannot be packed: {code.unreadable[0]}")
    with tempfile.TemporaryDirectory(dir=file.absolute().parent, prefix=".bundle-") as scratch:
        state = None
        if {"adapter", "weights"} & set(include):
            console.print(f"doing step {step} again, for the state before it")
            state = Path(scratch) / "before"
            before, updates, said = asyncio.run(_state_before(course, state, Path(scratch) / "after"))
            made_anew = _made_anew(config.train, bundle, before)
            bundle = replace(bundle, before=before, updates=updates, made_anew=made_anew)
            if made_anew:
                console.print(Text(f"the state before the step is not the run's, only near it: {made_anew}", "yellow"))
            if said:
                console.print(
                    Text(
                        f"this machine does not repeat the step: {said}; the bundle has the run's own record", "yellow"
                    )
                )
            without_places(state, bundle.model)
        write_bundle(file, bundle, code.texts if "code" in include else {}, state)
    _conclude(file, bundle, include, code=code, console=console, run_dir=run_dir)
    return 0


def _refuse_other_state(include: Collection[str], lora: LoraConfig) -> None:
    if "adapter" in include and not lora.rank:
        raise ConfigError(
            "--include adapter: the run trained all weights; --include weights packs them with their optimizer"
        )
    if "weights" in include and lora.rank:
        raise ConfigError(
            "--include weights: the run trained an adapter of frozen weights; --include adapter packs all that it trained"
        )


def _facts(run_dir: Path, step: int, config: RunConfig, *, code: CodeFiles) -> Bundle:
    journaled = next(iter(read_steps(run_dir, {step - 1})), None)
    if journaled is None:
        raise HeadraceError(
            f"step {step} cannot be packed, because its record cannot be read; headrace replay says more"
        )
    expected = read_expected(run_dir)
    local = Path(config.model.path).is_dir()
    settings, left_out = portable_settings(config, code)
    return Bundle(
        format=FORMAT,
        headrace=__version__,
        packages=_versions(),
        machine=dict(expected.machines.get(step, {})),
        model=Path(config.model.path).name if local else config.model.path,
        local=local,
        settings=settings,
        longest=config.longest_rollout,
        weights=config.reward_weights,
        journaled=_without_tracebacks(journaled),
        before=expected.fingerprints.get(journaled.step, ""),
        after=expected.fingerprints.get(journaled.version, ""),
        left_out=left_out,
    )


def portable_settings(config: RunConfig, code: CodeFiles) -> tuple[Tree, tuple[str, ...]]:
    """Returns the settings that the step depends on, without places of this machine, and sentences about rewards that cannot be packed."""
    whole: Tree = tomllib.loads(dump_config(config))
    kept: Tree = {name: whole[name] for name in SECTIONS if name in whole}
    kept["algo"] = {
        **kept["algo"],
        **{k: code.short(kept["algo"][k]) for k in ("advantage", "loss") if k in kept["algo"]},
    }
    kept["engine"] = {k: whole["engine"][k] for k in ("dtype", "context_length") if k in whole["engine"]}
    kept["reward"] = {k: whole["reward"][k] for k in ("extract_truncated", "timeout") if k in whole["reward"]}
    functions = [dict(one) for one in tomllib.loads(_specs(config.reward)).get("functions", ())]
    kept["reward"]["functions"] = [{**one, "function": code.short(one["function"])} for one in functions]
    outside = [one.name for one in config.reward.endpoints]
    left_out = [f"{name} is a service, which is not asked again" for name in outside]
    left_out += [
        f"{one['function'].removeprefix(HANDED)} was passed from Python"
        for one in functions
        if one["function"].startswith(HANDED)
    ]
    left_out += ["the environment gave rewards, which are not given again"] * bool(config.environment.rewards)
    return kept, tuple(left_out)


def _specs(reward: RewardConfig) -> str:
    """The reward functions as TOML: `reward.function` is short for a list of one."""
    from headrace.settings.toml import dump

    return dump(RewardConfig(functions=reward.specs))


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _without_tracebacks(step: JournalStep) -> JournalStep:
    """Details of failed rollouts name files of the machine, and no stage reads them."""
    groups = tuple(
        replace(group, failures=tuple(Failure(one.reason) for one in group.failures)) for group in step.groups
    )
    return replace(step, groups=groups)


def _made_anew(train: TrainConfig, bundle: Bundle, before: str) -> str:
    """Returns why the state before the step is not the run's; empty if it is. `before`: the fingerprint of its weights."""
    if bundle.before in ("", before):
        return ""
    return (
        why_inexact(train, bundle.machine)
        or "the same machine gave other bits (headrace replay finds the first such step)"
    )


async def _state_before(course: RerunPlan, before: Path, after: Path) -> tuple[str, Updates, str]:
    """Saves the state before the last step of the course. Returns the fingerprint of its weights, the norms of the step's updates, and a
    sentence if its result differs from the run's."""
    async with rerun(course) as stages:
        async for stage in stages:
            last = stage.step == course.last
            if last:
                await stage.trainer.save(before, stage.adapter)
                begun = (await stage.trainer.publish(stage.adapter)).fingerprint
            report = await stage.execute()
            if last:
                await stage.trainer.save(after, stage.adapter)
                apart = differing(report, stage.journaled.report)
                return begun, norms_of_updates(before, after), ", ".join(apart)
    raise AssertionError("the course has its last step")


def without_places(state: Path, model: str) -> None:
    """Writes the name of the base model where peft's settings name its directory."""
    settings = state / "adapter_config.json"
    if settings.exists():
        said = json.loads(settings.read_text())
        settings.write_text(json.dumps({**said, "base_model_name_or_path": model}))


def _conclude(
    file: Path, bundle: Bundle, include: Collection[str], *, code: CodeFiles, console: Console, run_dir: Path
) -> None:
    size = file.stat().st_size
    held = ", ".join(["prompts, completions, rewards and numbers", *(one for one in INCLUDED if one in include)])
    console.print(f"{file}: step {bundle.step} of {run_dir.name}, {size / 1e6:.1f} MB, with {held}")
    for sentence in bundle.left_out:
        console.print(Text(f"not packed: {sentence}", "yellow"))
    if code.texts and "code" not in include:
        console.print(f"without {', '.join(code.texts)}; --include code packs the source, for those who do it again")
    if bundle.step > 1 and not {"adapter", "weights"} & set(include):
        kind = "adapter" if bundle.settings["lora"].get("rank") else "weights"
        console.print(
            f"without the state before the step: only reward and advantage can be done again (--include {kind} packs it)"
        )
    for place in places_named(bundle, (Path.home(), Path.cwd(), run_dir.absolute())):
        console.print(Text(f"the data itself names {place}: read the prompts before you attach the file", "yellow"))
    console.print(f"elsewhere: headrace replay {file.name}" + (" --model DIR" if bundle.local else ""))
