"""The inputs of a run that Python passes beside the settings, because no file can hold them: reward functions and rows.

The settings describe them: `reward.functions` has the functions' names (`python:exact`) and weights, `task.rows` a fingerprint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError
from headrace.core.printing import say
from headrace.episodes.scoring.config import RewardConfig
from headrace.episodes.scoring.functions import RewardFunction, Rewards, rewards_of
from headrace.episodes.tasks.config import TaskConfig
from headrace.episodes.tasks.read import Row
from headrace.episodes.tasks.rows import fingerprint, rows_of
from headrace.run.choosing import resumed_settings
from headrace.run.config import RunConfig, checked, config_of_run, read_tree
from headrace.settings.other_names import meaning
from headrace.settings.toml import Tree, build

Source = RunConfig | Mapping[str, Any] | str | Path

_REPLACED = {"task": ("kind", "name", "options", "path", "rows"), "reward": ("function", "extract", "functions")}
"""The settings that are replaced by an object passed from Python."""


@dataclass(frozen=True)
class PythonInputs:
    """Reward functions and rows that were passed from Python."""

    rewards: tuple[RewardFunction, ...] = ()
    """Reward functions in the order of `reward.functions`."""
    rows: Sequence[Row] | None = None


NO_INPUTS = PythonInputs()


def with_python_inputs(
    source: Source,
    sets: Sequence[str] = (),
    reward: Rewards | None = None,
    dataset: Any = None,
    resume: str | Path | None = None,
) -> tuple[RunConfig, PythonInputs]:
    """The settings and the objects that replace parts of them. `resume`: the run that goes on, whose choices are kept where the settings leave
    something open. Raises ConfigError as `load_config` does."""
    rewards = rewards_of(reward) if reward is not None else []
    tree = read_tree(source, sets)
    rows = rows_of(dataset, _images(tree)) if dataset is not None else None
    if rewards:
        table = _with_extracts([{"function": spec.function, "weight": spec.weight} for spec, _ in rewards], tree)
        tree = _without_own_rewards(_replaced(tree, "reward", {"functions": table}))
    if rows is not None:
        _refuse_own_tasks(tree)
        tree = _replaced(tree, "task", {"kind": "python", "rows": fingerprint(rows)})
    if resume is not None:
        tree = resumed_settings(tree, Path(resume))
    return checked(build(RunConfig, tree, meaning)), PythonInputs(tuple(function for _, function in rewards), rows)


def settings_of(config: Source | None, run: str | Path | None) -> Source:
    """The config; without one, that in the run's directory."""
    if config is not None:
        return config
    if run is None:
        raise ConfigError("pass a config (a TOML file, or a dict of the same shape), or the directory of a run")
    return config_of_run(Path(run))


def report_differences(config: Source, used: RunConfig, run: Path) -> None:
    """Prints the settings in which the passed config differs from that of the run, which is used."""
    theirs = dict(_leaves(dataclasses.asdict(used)))
    others = [
        f"{name} = {theirs[name]!r} (the config passed says {value!r})"
        for name, value in _leaves(read_tree(config))
        if name not in ("name", "out") and name in theirs and theirs[name] != value
    ]
    if others:
        say(f"the settings are those of {run}: {'; '.join(others)}")


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", list(value) if isinstance(value, tuple) else value


def _replaced(tree: Tree, section: str, table: Tree) -> Tree:
    old = tree.get(section, {})
    if not isinstance(old, dict):  # the validation reports it
        return tree
    kept = {name: value for name, value in old.items() if name not in _REPLACED[section]}
    return {**tree, section: {**kept, **table}}


def _with_extracts(table: list[Tree], tree: Tree) -> list[Tree]:
    """Gives the function that takes the place of `reward.function` what `reward.extract` leaves of a completion, and on a resume each
    function what it was given before. Raises ConfigError for several functions in the place of one with an extract."""
    old = tree.get("reward")
    if not isinstance(old, dict):  # the validation reports it
        return table
    if extract := old.get("extract"):
        if len(table) > 1:
            raise ConfigError(
                f"reward.extract = {extract!r} is for one function, and reward= passes {len(table)}: leave it out of the settings, "
                "and let each function find its part of the completion"
            )
        return [{**table[0], "extract": extract}]
    entries = [entry for entry in old.get("functions") or () if isinstance(entry, dict)]
    before = {entry.get("function"): entry["extract"] for entry in entries if entry.get("extract")}
    return [{**row, "extract": before[name]} if (name := row["function"]) in before else row for row in table]


def _images(tree: Tree) -> list[str]:
    """The columns with images, as far as settings that are not validated tell."""
    task = tree.get("task")
    named = task.get("images") if isinstance(task, dict) else None
    return [str(name) for name in named] if isinstance(named, (list, tuple)) else []


def _adapters(tree: Tree) -> list[Any]:
    return list(tree.get("adapters") or ())


def _without_own_rewards(tree: Tree) -> Tree:
    adapters = [{**adapter, "reward": {}} if isinstance(adapter, dict) else adapter for adapter in _adapters(tree)]
    return {**tree, "adapters": adapters} if adapters else tree


def _refuse_own_tasks(tree: Tree) -> None:
    if own := [adapter["name"] for adapter in _adapters(tree) if isinstance(adapter, dict) and adapter.get("task")]:
        raise ConfigError(
            f"dataset= gives the same rows to all adapters, but {', '.join(map(str, own))} has its own task; remove one of "
            "the two"
        )


def refuse_python_inputs(reward: RewardConfig, task: TaskConfig) -> None:
    """Raises ConfigError for a run that needs objects which only Python can pass. Called by the command line."""
    passed = [f"the reward {spec.name}" for spec in reward.from_python]
    if task.facts.passed:
        passed.append("its rows")
    if passed:
        raise ConfigError(
            f"this run uses objects that were passed from Python ({', '.join(passed)}), which the command line cannot pass: continue "
            "in Python with headrace.train(resume=...) or headrace.evaluate(run=...), or name files instead (task.kind and "
            "task.path, reward.function)"
        )
