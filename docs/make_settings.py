"""Writes docs/settings.md, the reference of all settings: `make docs`.

Names, types and defaults are read from the config dataclasses, the purpose of a setting from the docstring beneath its field.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from headrace.algo.config import AlgoConfig
from headrace.algo.recipe_parts import CorrectionConfig
from headrace.algo.recipes import LOSSES
from headrace.algo.rules import RULES
from headrace.engine.config import EngineConfig
from headrace.engine.kinds import ENGINES, SERVERS
from headrace.engine.remote.server_kind import server_kind
from headrace.episodes.environments.config import EnvironmentConfig
from headrace.episodes.environments.kinds import ENVIRONMENTS, GATEWAY_KINDS, LIBRARIES
from headrace.episodes.tasks.config import TaskConfig
from headrace.episodes.tasks.task_kinds import TASK_KINDS
from headrace.processes.orchestration_config import OrchestrationConfig
from headrace.processes.places import PLACES
from headrace.run.config import RunConfig
from headrace.weight_sync.config import AUTO, WeightSyncConfig
from headrace.weight_sync.transport import TRANSPORTS

KINDS_OF_CODE = """\
The others are environments of other libraries, with rewards of their own (docs/libraries.md)."""

KINDS_OF_TASKS = """\
The source of prompts: a generator of problems, or rows of a file: JSON (an object a line, or one array), CSV with a header, Parquet, or a
directory saved by `datasets`. python: rows passed to `headrace.train` (`dataset=`)."""

TARGET = Path(__file__).with_name("settings.md")

INTRODUCTION = """\
# Settings

Every setting, from the docstrings in the source. In brackets: its values, or its bounds and, where the default does not show it, its type;
the default in bold.

A run is one TOML file, whose tables are the sections below; `[[...]]` may be given several times. Only `model.path`, the task and a
source of rewards (or a teacher) must be set. `--set train.steps=200` replaces one setting; `--dry-run` prints the value of every one.
Relative paths are relative to the file's folder. Unknown names, values that do not fit and settings that cannot work together are
refused at the start, with the remedy. A resumed run may change [some of them](journal.md#resuming-a-run).

Environment variables: `HEADRACE_CACHE`, the folder of fetched models, compiled kernels and measured rates (`~/.cache/headrace`), and
`CXX`, the C++ compiler. C1 to C9 are [the contracts](design-notes.md#the-contracts).
"""


class Setting(NamedTuple):
    name: str
    values: str
    """Its type or its values, and the default."""
    purpose: str


class Section(NamedTuple):
    title: str
    about: str
    settings: list[Setting]


def sections(
    kind: type, path: str = "", title: str = "The run, above all tables", about: str = ""
) -> Iterator[Section]:
    """Yields the sections of a settings dataclass: its own settings, then those of its tables and of its lists of tables."""
    hints, told = typing.get_type_hints(kind), inherited(kind) | computed(kind)
    own, tables, lists = [], [], []
    for name, field in kind.__pydantic_fields__.items():  # type: ignore[attr-defined]
        here, hint = f"{path}{name}", hints[name]
        nested = next(
            (one for one in (hint, *typing.get_args(hint)) if isinstance(one, type) and dataclasses.is_dataclass(one)),
            None,
        )
        if nested is None:
            own.append(Setting(name, values_of(hint, field), told.get(name, "")))
        elif typing.get_origin(hint) is tuple:
            lists.append((nested, f"{here}.", f"[[{here}]]", told.get(name, "")))
        else:
            tables.append((nested, f"{here}.", f"[{here}]", told.get(name, "")))
    yield Section(title, about or (told[""].split("\n\n")[0] if path else ""), own)
    for below in (*tables, *lists):
        yield from sections(*below)


def docstrings(kind: type) -> dict[str, str]:
    """Returns the docstring beneath each field, by its name, and the class's under the empty name."""
    return _docstrings_in(inspect.getfile(kind))[kind.__name__]


@cache
def _docstrings_in(file: str) -> dict[str, dict[str, str]]:
    """Those of all classes of a file."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    return {node.name: _docstrings_of(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _docstrings_of(node: ast.ClassDef) -> dict[str, str]:
    found = {"": ast.get_docstring(node) or ""}
    for field, below in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            found[field.target.id] = inspect.cleandoc(str(ast.literal_eval(below.value)))
    return found


def inherited(kind: type) -> dict[str, str]:
    """Returns the docstrings of a settings class and of those that it is derived from; its own win."""
    own = [docstrings(one) for one in reversed(kind.__mro__) if dataclasses.is_dataclass(one)]
    return {name: text for found in own for name, text in found.items()}


def computed(kind: type) -> dict[str, str]:
    """Returns the purposes of settings that are made from the tables of losses, rules and kinds."""
    if kind is CorrectionConfig:
        return {name: (inspect.getdoc(rule) or "").split("\n\n")[0] for name, rule in RULES.items()}
    if kind is WeightSyncConfig:
        about = "; ".join(f"{name}: {one.about}" for name, one in TRANSPORTS.items())
        return {"kind": f"{about}. auto: {AUTO}."}
    if kind is TaskConfig:
        own = (f"{name}: {one.about}." for name, one in TASK_KINDS.items() if one.about)
        return {"kind": " ".join((KINDS_OF_TASKS, *own))}
    if kind is OrchestrationConfig:
        return {"kind": " ".join(f"{one.name}: {one.about}." for one in PLACES.values())}
    if kind is EngineConfig:
        every = [(name, one.about) for name, one in ENGINES.items()] + [
            (name, server_kind(name).about) for name in SERVERS
        ]
        return {"kind": f"The engine that serves the policy. {'; '.join(f'{name}: {about}' for name, about in every)}."}
    if kind is EnvironmentConfig:
        ours, others = (
            " ".join(f"{name}: {one.about}." for name, one in kinds.items())
            for kinds in (ENVIRONMENTS, LIBRARIES | GATEWAY_KINDS)
        )
        played = (LIBRARIES | GATEWAY_KINDS).items()
        return {
            "kind": f"The environment that is made for each rollout, unless `function` is set. {ours} {KINDS_OF_CODE} {others}",
            "name": " ".join(f"{kind}: {one.name}." for kind, one in played if one.name),
            "options": " ".join(f"{kind}: {one.options}." for kind, one in played if one.options),
        }
    return constants() if kind is AlgoConfig else {}


def constants() -> dict[str, str]:
    """Returns, for each constant of the losses, its docstring in each of them."""
    said: dict[str, dict[str, list[str]]] = {}
    for loss in LOSSES.values():
        told = inherited(loss)
        for name in loss.reads():
            said.setdefault(name, {}).setdefault(told.get(name, ""), []).append(loss.name)
    return {name: _of_losses(texts) if all(texts) else "" for name, texts in said.items()}


def _of_losses(texts: dict[str, list[str]]) -> str:
    """`texts`: what a constant is, and for which losses. Of more than two, the first is told, and the formulas tell the others."""
    if len(texts) <= 2:
        return " ".join(f"{', '.join(names)}: {text}" for text, names in texts.items())
    (text, names), *others = texts.items()
    further = ", ".join(name for _, more in others for name in more)
    return f"{', '.join(names)}: {text} {further}: by [their formulas](algorithms.md#losses)."


def type_of(hint: Any, metadata: list[Any]) -> str:
    """Names a type in TOML's words. `metadata`: bounds, as pydantic keeps them."""
    origin, inner = typing.get_origin(hint), [one for one in typing.get_args(hint) if one is not type(None)]
    if origin is Literal:
        return ", ".join(f"`{json.dumps(one)}`" for one in inner)
    if origin is tuple:
        return f"list of {type_of(inner[0], [])}s" if isinstance(inner[0], type) else "list"
    if origin is dict:
        return "table"
    if inner:
        return " or ".join(type_of(one, metadata) for one in inner)
    words = {int: "integer", float: "number", bool: "boolean", str: "string"}
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    bounds = [
        f"{sign} {getattr(one, name):g}" for one in metadata for name, sign in signs.items() if hasattr(one, name)
    ]
    return " ".join([words[hint], ", ".join(bounds)]).strip()


def values_of(hint: Any, field: Any) -> str:
    """Returns type and default. A default that is one of the values is bold among them, and replaces a type that it shows; None is left out,
    for the purpose says it."""
    values = type_of(hint, field.metadata)
    if field.is_required():
        return f"{values}, must be given"
    default = field.get_default(call_default_factory=True)
    if default is None:
        return values
    shown = f"`{json.dumps(default)}`"
    values = re.sub(r"^(integer|number|boolean|string|table)( (?=[<>≤≥])|$)", "", values)
    return (
        f"**{shown}**"
        if not values
        else re.sub(re.escape(shown), rf"**{shown}**", values, count=1)
        if shown in values
        else f"{values}, **{shown}**"
    )


def linked(text: str) -> str:
    """Returns a text on one line, with the pages that it names as links."""
    return re.sub(r"\bdocs/(\w+)\.md", r"[\1](\1.md)", " ".join(text.split()))


def line(setting: Setting) -> str:
    """Returns a setting on one line, with Markdown's characters escaped outside of code."""
    parts = re.split(r"(`[^`]*`)", linked(setting.purpose))
    plain = "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)
    return f"- `{setting.name}` ({setting.values}){': ' if plain else ''}{plain}"


def lines(settings: list[Setting], before: list[Section]) -> Iterator[str]:
    """Yields the lines of a section. Three and more settings that an earlier section has in the same words are only named."""
    shared = max(before, key=lambda one: len({*one.settings} & {*settings}), default=Section("", "", []))
    names = [one.name for one in settings if one in shared.settings and one.purpose]
    if len(names) < 3:
        names = []
    yield from (line(one) for one in settings if one.name not in names)
    if names:
        home = shared.title.strip("[]")
        yield f"- {', '.join(f'`{name}`' for name in names)}: as in [{home}](#{home.replace('.', '')})."


def reference() -> str:
    text, before = [INTRODUCTION], list[Section]()
    for section in sections(RunConfig):
        text.append(f"## {section.title}\n")
        if section.about:
            text.append(f"{linked(section.about)}\n")
        if section.settings:
            text.append("\n".join([*lines(section.settings, before), ""]))
        before.append(section)
    return "\n".join(text)


def undescribed() -> list[str]:
    """Settings without a docstring, by their dotted names."""
    return [
        f"{section.title.strip('[]')}.{name}"
        for section in sections(RunConfig)
        for name, _, what in section.settings
        if not what
    ]


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
