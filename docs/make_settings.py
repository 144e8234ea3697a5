"""Writes docs/settings.md, the reference of all settings: `make docs`.

Names, types and defaults are read from the config dataclasses, the purpose of a setting from the docstring beneath its field.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import textwrap
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from headrace.algo.config import AlgoConfig
from headrace.algo.recipes import LOSSES, CorrectionConfig
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
The source of prompts: endless procedural problems, or rows of a file: JSON (an object a line, or one array of objects), CSV (with the
names of columns in its first line), Parquet, or a directory saved by `datasets`. `headrace.train` writes `python` for rows that it was
passed (`dataset=`)."""

TARGET = Path(__file__).with_name("settings.md")

INTRODUCTION = """\
# Settings

Every setting with its type, default and purpose. `make docs` writes this page from the docstrings in the source.

A run is one TOML file, whose tables are the sections below; `[[...]]` is a table that may be given several times. Only `model.path`,
the task and a source of rewards (or a teacher) must be set. `--set train.steps=200` on the command line replaces one setting;
`--dry-run` prints the resulting value of every one. Relative paths in a file are relative to the file's folder. Unknown names, values
that do not fit and settings that cannot work together are refused at the start, with the remedy. [journal.md](journal.md#resuming-a-run)
lists what a resumed run may change.

There are two environment variables: `HEADRACE_CACHE` is the folder of fetched models, compiled kernels and measured rates
(`~/.cache/headrace` by default), and `CXX` is the C++ compiler. C1 to C9 are [the contracts](design-notes.md#the-contracts).
"""


class Section(NamedTuple):
    title: str
    about: str
    settings: list[tuple[str, str, str, str]]
    """Name, type, default, purpose."""


def sections(
    kind: type, path: str = "", title: str = "The run, above all tables", about: str = ""
) -> Iterator[Section]:
    """Yields the sections of a settings dataclass: its own settings, then those of its tables and of its lists of tables."""
    hints, told = typing.get_type_hints(kind), inherited(kind) | computed(kind)
    own, tables, lists = [], [], []
    for name, field in kind.__pydantic_fields__.items():  # type: ignore[attr-defined]
        here, hint = f"{path}{name}", hints[name]
        nested = next((one for one in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(one)), None)
        if nested is None:
            own.append((name, type_of(hint, field.metadata), default_of(field, path), told.get(name, "")))
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
        return {
            "kind": f"The environment that is made for each rollout, unless `function` is set. {ours} {KINDS_OF_CODE} {others}"
        }
    return constants() if kind is AlgoConfig else {}


def constants() -> dict[str, str]:
    """Returns, for each constant of the losses, its docstring in each of them."""
    said: dict[str, dict[str, list[str]]] = {}
    for loss in LOSSES.values():
        told = inherited(loss)
        for name in loss.reads():
            said.setdefault(name, {}).setdefault(told.get(name, ""), []).append(loss.name)
    return {
        name: " ".join(f"{', '.join(names)}: {text}" for text, names in texts.items()) if all(texts) else ""
        for name, texts in said.items()
    }


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


def default_of(field: Any, path: str) -> str:
    """`path`: of the section, with a dot at its end."""
    if field.is_required():
        return "must be given"
    default = field.get_default(call_default_factory=True)
    if default is None:
        return "the recipe's" if path.startswith("algo.") else "not set"
    return f"`{json.dumps(default)}`"


def cell(text: str) -> str:
    """Puts a text on one line and escapes Markdown's characters outside of code."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    plain = [part if part.startswith("`") else part.replace("<", "&lt;") for part in parts]
    return "".join(plain).replace("|", "\\|")


def reference() -> str:
    text = [INTRODUCTION]
    for title, about, settings in sections(RunConfig):
        text.append(f"## {title}\n")
        if about:
            text.append(f"{textwrap.fill(' '.join(about.split()), 130)}\n")
        if settings:
            rows = (f"| `{name}` | {kind} | {default} | {cell(what)} |" for name, kind, default, what in settings)
            text.append("\n".join(["| setting | type | default | purpose |", "|---|---|---|---|", *rows, ""]))
    return "\n".join(text)


def undescribed() -> list[str]:
    """Settings without a docstring, by their dotted names."""
    return [
        f"{section.title.strip('[]')}.{name}"
        for section in sections(RunConfig)
        for name, _, _, what in section.settings
        if not what
    ]


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
