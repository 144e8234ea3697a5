"""Relative paths in settings become absolute when they are read, so that a run does not depend on the working directory."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.settings.toml import Tree


def resolve_paths(tree: Tree, base: Path) -> Tree:
    """Makes the relative paths in a tree of settings absolute, relative to `base`. Values of a wrong type are left
    alone."""
    model, reward, algo = (tree.get(section) for section in ("model", "reward", "algo"))
    changed: Tree = {}
    if isinstance(model, dict) and isinstance(model.get("path"), str):
        changed["model"] = {**model, "path": _model_path(model["path"], base)}
    for section in ("task", "warm_start", "demonstrations"):
        if isinstance(rows := tree.get(section), dict):
            paths = {k: _absolute(rows[k], base) for k in ("path", "held_out_path") if _names_file(rows.get(k))}
            changed[section] = {**rows, **paths}
    if isinstance(reward, dict):
        changed["reward"] = _reward_paths(reward, base)
    if isinstance(engine := tree.get("engine"), dict):
        named = {k: _absolute(engine[k], base) for k in ("token_file", "shared_dir") if _names_file(engine.get(k))}
        changed["engine"] = {**engine, **named, **_python_path(engine, base)}
    if isinstance(place := tree.get("orchestration"), dict):
        files = {k: _absolute(place[k], base) for k in ("token_file", "cert", "key") if _names_file(place.get(k))}
        changed["orchestration"] = {**place, **files}
    if isinstance(way := tree.get("weight_sync"), dict):
        files = {k: _absolute(way[k], base) for k in ("cert", "key") if _names_file(way.get(k))}
        changed["weight_sync"] = {**way, **files}
    if (teachers := tree.get("teachers")) is not None:
        changed["teachers"] = _each(teachers, lambda teacher: _teacher_paths(teacher, base))
    if isinstance(algo, dict):
        functions = {k: algo[k] for k in ("advantage", "loss") if isinstance(algo.get(k), str)}
        changed["algo"] = {**algo, **{k: _function_path(function, base) for k, function in functions.items()}}
        for part in ("critic", "distill"):
            if isinstance(own := algo.get(part), dict) and _names_file(own.get("model")):
                changed["algo"][part] = {**own, "model": _model_path(own["model"], base)}
    if isinstance(place := tree.get("environment"), dict):
        changed["environment"] = _environment_paths(place, base)
    if (adapters := tree.get("adapters")) is not None:
        changed["adapters"] = _each(
            adapters, lambda adapter: resolve_paths(adapter, base) if isinstance(adapter, dict) else adapter
        )
    if isinstance(looks := tree.get("eval"), dict) and (sets := looks.get("sets")) is not None:
        changed["eval"] = {
            **looks,
            "sets": _each(sets, lambda one: resolve_paths(one, base) if isinstance(one, dict) else one),
        }
    return {**tree, **changed}


def _each(tables: Any, resolve: Callable[[Any], Any]) -> Any:
    """Resolves each table of a list, or of a table of such by their names (`--set adapters.NAME.task.path=...`)."""
    if isinstance(tables, dict):
        return {name: resolve(table) for name, table in tables.items()}
    return [resolve(table) for table in tables] if isinstance(tables, list) else tables


def _reward_paths(reward: Tree, base: Path) -> Tree:
    """Resolves `function = "file.py:name"`, alone or in a list of tables."""
    resolved = dict(reward)
    if isinstance(reward.get("function"), str):
        resolved["function"] = _function_path(reward["function"], base)
    if isinstance(reward.get("functions"), list):
        resolved["functions"] = [_reward_paths(f, base) if isinstance(f, dict) else f for f in reward["functions"]]
    scorers = {name: value for name, value in reward.items() if name not in ("function", "functions")}
    return resolved | {name: _each(value, lambda scorer: _token_path(scorer, base)) for name, value in scorers.items()}


def _token_path(scorer: Any, base: Path) -> Any:
    if isinstance(scorer, dict) and _names_file(scorer.get("token_file")):
        return {**scorer, "token_file": _absolute(scorer["token_file"], base)}
    return scorer


def _environment_paths(place: Tree, base: Path) -> Tree:
    """Resolves the function, the class or file (`name`), the interpreter, the directory, and the words of a command that name a file."""
    resolved = {**place, **_python_path(place, base)}
    resolved |= {k: _function_path(place[k], base) for k in ("function", "name") if isinstance(place.get(k), str)}
    if isinstance(name := place.get("name"), str) and name.endswith(".py"):
        resolved["name"] = _absolute(name, base)
    if _names_file(place.get("directory")):
        resolved["directory"] = _absolute(place["directory"], base)
    command = place.get("command")
    if isinstance(command, str):
        with contextlib.suppress(ValueError):  # an open quotation mark, which the config refuses
            command = shlex.split(command)
    if isinstance(command, list | tuple):
        resolved["command"] = command_paths(command, base)
    return resolved


def _python_path(place: Tree, base: Path) -> Tree:
    """Resolves the path of an interpreter. A word alone is searched for, as in a shell."""
    python = place.get("python")
    return {"python": _absolute(python, base)} if isinstance(python, str) and "/" in python else {}


def command_paths(command: Sequence[Any], base: Path) -> list[Any]:
    """Makes the words of a command absolute that name a file below `base`, because the command may run in another directory."""
    return [_word(word, base, first=not place) for place, word in enumerate(command)]


def _word(word: Any, base: Path, first: bool) -> Any:
    """Resolves a word that names a file beside the config. A program is searched for, as in a shell, unless it has a slash."""
    if not isinstance(word, str) or (first and "/" not in word):
        return word
    return _absolute(word, base) if word and not word.startswith("-") and (base / word).is_file() else word


def _teacher_paths(teacher: Any, base: Path) -> Any:
    if isinstance(teacher, dict) and _names_file(teacher.get("path")):
        return {**teacher, "path": _model_path(teacher["path"], base)}
    return teacher


def _function_path(function: str, base: Path) -> str:
    path, colon, name = function.rpartition(":")
    return f"{_absolute(path, base)}:{name}" if colon and path.endswith(".py") else function


def _model_path(path: str, base: Path) -> str:
    """Resolves a model's path. A known name or a hub id stays as it is, unless `base` has a directory of that name."""
    looks_local = path.startswith((".", "/", "~")) or (base / path).is_dir()
    return _absolute(path, base) if looks_local else path


def _names_file(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _absolute(path: str, base: Path) -> str:
    return os.path.normpath(base / Path(path).expanduser())
