"""A bundle: one step of a run in one file, to be attached to an issue and done again elsewhere.

    bundle.json      the step's record (prompts, tokens, log-probs, rewards, advantages, report), settings, versions, fingerprints
    code/<file>.py   the functions that the settings name, if they were asked for
    state/<file>     weights and optimizer before the step, as in a checkpoint, if they were asked for: no pickles

It is a zip file. Nothing in it names a place of the machine: settings are chosen by name (`bundle.py`), and `write_bundle` refuses
the values of environment variables that are secrets.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import tempfile
import tomllib
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
from msgspec.structs import replace

from headrace.commands.replay.replay import read_expected, why_inexact
from headrace.commands.replay.rerun import RerunPlan, plan_rerun, rerun, settings_at
from headrace.core.batches import Failure
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.reports import differing
from headrace.core.types import Struct
from headrace.core.weights import of_earlier_form
from headrace.durable.journal import JournalStep, read_steps
from headrace.durable.spelling import encode
from headrace.episodes.scoring.config import HANDED, RewardConfig
from headrace.models.lora import LoraConfig
from headrace.models.resolve import hub_model
from headrace.run.config import RunConfig, dump_config
from headrace.settings.toml import Tree
from headrace.trainer.config import TrainConfig
from headrace.version import __version__
from headrace.views.screen.console import Console
from headrace.views.screen.console import PrintableText as Text

FORMAT = 1
FACTS, CODE, STATE = "bundle.json", "code", "state"
LARGEST = 64 << 30
"""Bytes that a bundle may hold when it is unpacked. Weights and optimizer of 4 billion parameters have 48 GB."""
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|_KEY$|^KEY$|APIKEY")
_SHORT = 8
"""Characters below which the value of a variable is no secret that could be recognised."""


class Bundle(Struct, frozen=True, kw_only=True):
    """The facts of a bundle."""

    format: int
    headrace: str
    packages: dict[str, str]
    """Versions by the name of the package."""
    machine: dict[str, str]
    """The mark of the machine that did the step (`native/arithmetic.py`); empty if it was not recorded."""
    model: str
    """A known name, or a hub id with its commit; for a model that was a directory, the directory's own name."""
    local: bool
    """Whether the model was a directory of that machine."""
    settings: dict[str, Any]
    """The settings that the step depends on, as in a config. Paths are names of members under code/."""
    longest: int
    """The most tokens that could be sampled for a rollout."""
    weights: dict[str, float]
    """The weight of every named reward."""
    journaled: JournalStep
    before: str = ""
    """Fingerprint of the weights that the step began with; empty if it was not recorded. If the state before the step is here, it has these."""
    after: str = ""
    made_anew: str = ""
    """The reason why the state before the step is only near the run's, where the exporting machine does not compute what the run's did; empty
    if it is the run's."""
    updates: dict[str, tuple[float, float]] = {}
    """The norms of the change of each trained tensor and of the tensor after it, if the bundle has the state before the step."""
    left_out: tuple[str, ...] = ()
    """Sentences about parts of the step that the bundle does not have."""

    @property
    def step(self) -> int:
        """The number of the step, counted from 1."""
        return self.journaled.step + 1


_decoder: msgspec.json.Decoder[Bundle] = msgspec.json.Decoder(Bundle, strict=False)


def write_bundle(file: Path, bundle: Bundle, code: Mapping[str, str], state: Path | None) -> None:
    """Writes the file. `code`: texts by the name of their file; `state`: the directory of a checkpoint.

    Raises HeadraceError, and writes nothing, if a text holds the value of a secret of the environment."""
    facts = encode(bundle)
    texts = {FACTS: facts, **{f"{CODE}/{name}": text.encode() for name, text in code.items()}}
    if found := next(_secrets_in(texts, os.environ), ""):
        raise HeadraceError(
            f"{found}; nothing was written. Remove it there (--include without code leaves out your files)"
        )
    temporary = file.with_name(f".writing-{file.name}")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in texts.items():
                archive.writestr(name, content)
            for path in sorted(state.iterdir()) if state else ():
                archive.write(path, f"{STATE}/{path.name}", zipfile.ZIP_STORED)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def _secrets_in(texts: Mapping[str, bytes], environment: Mapping[str, str]) -> Iterator[str]:
    for variable, value in environment.items():
        if _SECRET.search(variable.upper()) and len(value) >= _SHORT:
            for member, text in texts.items():
                if value.encode() in text:
                    yield f"{member} would hold the value of the environment variable {variable}"


def places_named(bundle: Bundle, places: Iterable[Path]) -> list[str]:
    """Returns the directories of this machine that the texts of prompts, columns or completions name: data that cannot be changed."""
    text = encode(bundle.journaled).decode()
    return [str(place) for place in dict.fromkeys(places) if len(place.parts) > 1 and str(place) in text]


def read_bundle(file: Path, folder: Path) -> Bundle:
    """Unpacks a bundle into `folder` and returns its facts, without fingerprints of an earlier form. Raises ConfigError if the file is none, or was written by a later version."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = _members(file, archive)
            for member in members:
                archive.extract(member, folder)
            facts = archive.read(FACTS)
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        KeyError,
        OSError,
        RuntimeError,
    ) as error:  # RuntimeError: encrypted
        raise ConfigError(f"{file} is not a bundle of headrace replay --export: {error}") from None
    try:
        bundle = _decoder.decode(facts)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{file} was written by another version of headrace, and cannot be read: {error}") from None
    if bundle.format != FORMAT:
        raise ConfigError(
            f"{file} has format {bundle.format}, and this headrace reads {FORMAT}; use headrace {bundle.headrace}"
        )
    before, after = ("" if of_earlier_form(mark) else mark for mark in (bundle.before, bundle.after))
    return replace(bundle, before=before, after=after)


def _members(file: Path, archive: zipfile.ZipFile) -> Sequence[zipfile.ZipInfo]:
    """Returns the members that a bundle may have: no other folders, no absolute paths, not too large."""
    members = archive.infolist()
    for member in members:
        parts = PurePosixPath(member.filename).parts
        if member.filename != FACTS and not (
            len(parts) == 2 and parts[0] in (CODE, STATE) and parts[1] not in ("..", ".")
        ):
            raise ConfigError(f"{file} is not a bundle of headrace replay --export: it holds {member.filename}")
    if sum(member.file_size for member in members) > LARGEST:
        raise ConfigError(f"{file} would unpack to more than {LARGEST >> 30} GiB, which is refused")
    return members


# --- How far a step moved each trained tensor
# Numbers that machines with other orders of summation can compare.


Updates = dict[str, tuple[float, float]]
"""The norm of a tensor's change, and that of the tensor after it, by its name."""


def norms_of_updates(before: Path, after: Path) -> Updates:
    """`before`, `after`: directories of checkpoints, with weights as the trainer keeps them."""
    from headrace.trainer.step.checkpoint import saved_weights

    found: Updates = {}
    old, new = saved_weights(before), saved_weights(after)
    for key in sorted(old):
        a, b = old.read(key).double(), new.read(key).double()
        found[key] = float((b - a).norm()), float(b.norm())
    return found


def apart(
    found: Mapping[str, tuple[float, float]], recorded: Mapping[str, tuple[float, float]], tolerance: float
) -> str:
    """Returns the first tensor that moved otherwise, in words; empty if there is none. `tolerance`: 0 compares bit for bit."""
    for name, (moved, norm) in recorded.items():
        here = found.get(name)
        if here is None:
            return f"{name} is missing"
        for what, now, then in (("moved by", here[0], moved), ("has the norm", here[1], norm)):
            if not (now == then if not tolerance else math.isclose(now, then, rel_tol=tolerance, abs_tol=1e-12)):
                return f"{name} {what} {now:.8g} instead of {then:.8g}"
    return ""


# --- `headrace replay RUN --step N --export FILE`: packs one step of a run into a bundle.


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
            taken = len([other for other in self._names if other.name == path.name])
            self._names[path] = f"{path.stem}_{taken + 1}.py" if taken else path.name
            try:
                self.texts[self._names[path]] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                self.unreadable.append(f"{path}: {error}" if isinstance(error, UnicodeDecodeError) else str(error))
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
            before, updates, message = asyncio.run(_state_before(course, state, Path(scratch) / "after"))
            made_anew = _made_anew(config.train, bundle, before)
            bundle = replace(bundle, before=before, updates=updates, made_anew=made_anew)
            if made_anew:
                console.print(Text(f"the state before the step is not the run's, only near it: {made_anew}", "yellow"))
            if message:
                console.print(
                    Text(
                        f"this machine does not repeat the step: {message}; the bundle has the run's own record",
                        "yellow",
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
    functions = [dict(function) for function in tomllib.loads(_specs(config.reward)).get("functions", ())]
    kept["reward"]["functions"] = [{**function, "function": code.short(function["function"])} for function in functions]
    outside = [endpoint.name for endpoint in config.reward.endpoints]
    left_out = [f"{name} is a service, which is not asked again" for name in outside]
    left_out += [
        f"{function['function'].removeprefix(HANDED)} was passed from Python"
        for function in functions
        if function["function"].startswith(HANDED)
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
        replace(group, failures=tuple(Failure(failure.reason) for failure in group.failures)) for group in step.groups
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
    """Writes the name of the base model where peft's settings name its directory, and its revision into the field that peft has for it."""
    settings, hub = state / "adapter_config.json", hub_model(model)
    if settings.exists():
        config = json.loads(settings.read_text(encoding="utf-8"))
        base = {"base_model_name_or_path": hub.repo, "revision": hub.revision or None} if hub else {}
        settings.write_text(json.dumps({**config, "base_model_name_or_path": model, **base}))


def _conclude(
    file: Path, bundle: Bundle, include: Collection[str], *, code: CodeFiles, console: Console, run_dir: Path
) -> None:
    size = file.stat().st_size
    held = ", ".join(
        ["prompts, completions, rewards and numbers", *(content for content in INCLUDED if content in include)]
    )
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
