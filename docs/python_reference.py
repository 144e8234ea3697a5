"""The pages of the Python interface, made from the docstrings when the site is built (`site_pages.py`).

Sources are parsed and never imported. What is public: the names of `headrace.__all__`, what an environment's function is given, the nouns,
and the ports. Names that begin with an underscore are left out, and so are methods without a docstring.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class ReferencePage(NamedTuple):
    """A page: its title, an introduction, and the names of each module; None stands for all that are public."""

    title: str
    about: str
    modules: tuple[tuple[str, tuple[str, ...] | None], ...]


PAGES = {
    "api/environment.md": ReferencePage(
        "What an environment is given",
        "The agent that the function of `environment.function` is called with ([how to write one](../environments.md)). A function that is not "
        "`async` gets the same methods, which return when they are done.",
        (("headrace.episodes.environments.workers.talk", ("AsyncAgent", "AgentReply", "CalledTool")),),
    ),
    "api/algorithm.md": ReferencePage(
        "What a loss or an advantage is given",
        'The arguments of functions that `algo.loss = "mine.py:loss"` and `algo.advantage = "mine.py:advantage"` name '
        "([your own algorithm](../algorithms.md#your-own-algorithm)).",
        (
            ("headrace.algo.policy.tokens", None),
            ("headrace.algo.advantages", None),
        ),
    ),
    "api/types.md": ReferencePage(
        "Nouns",
        "The values that travel between processes, into the journal and into checkpoints. The examples form one case, from the first to the "
        "last, and a test evaluates them.",
        (
            ("headrace.core.types", None),
            ("headrace.core.batches", None),
            ("headrace.core.weights", None),
            ("headrace.core.reports", None),
        ),
    ),
    "api/ports.md": ReferencePage(
        "Ports",
        "What an engine, a trainer, a task, an environment, a scorer and a transport are to the pipeline. Each has a fake that ships.",
        (("headrace.core.protocols", None),),
    ),
}
START = "api/headrace.md"


def pages() -> dict[str, str]:
    """All pages, by their place on the site."""
    made = {place: _page(one) for place, one in PAGES.items()}
    return {START: _start()} | made


def undocumented() -> list[str]:
    """Public names without a docstring."""
    named = [
        *_public_homes(),
        *((m, n) for one in PAGES.values() for m, names in one.modules for n in names or _public(m)),
    ]
    return [f"{module}.{name}" for module, name in named if not ast.get_docstring(_definition(module, name))]


def _start() -> str:
    about = "The names of `import headrace`. [Train from Python](../python.md) shows them at work; importing the package takes milliseconds and loads no torch."
    parts = ["# headrace", about, *(_shown(module, name) for module, name in _public_homes())]
    parts += [
        "## headrace.compat.trl",
        "See [Come from TRL](../from_trl.md).",
        _shown("headrace.compat.trl.grpo_trainer", "GRPOTrainer"),
    ]
    return "\n\n".join(parts) + "\n"


def _page(one: ReferencePage) -> str:
    parts = [f"# {one.title}", one.about]
    for module, names in one.modules:
        parts += [_shown(module, name) for name in (_public(module) if names is None else names)]
    return "\n\n".join(parts) + "\n"


def _public_homes() -> list[tuple[str, str]]:
    """The module of each name in `headrace.__all__`, and of `open`, functions first."""
    tree = _tree("headrace")
    values = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    homes, names = ast.literal_eval(values["_HOMES"]), [*ast.literal_eval(values["__all__"]), "open"]
    found = [(homes.get(name, "headrace"), name) for name in names if name != "__version__"]
    return sorted(found, key=lambda one: (one[0] != "headrace", one[1][0].isupper(), one[1]))


@cache
def _tree(module: str) -> ast.Module:
    path = ROOT / Path(*module.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8"))


def _public(module: str) -> list[str]:
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [node.name for node in _tree(module).body if isinstance(node, kinds) and not node.name.startswith("_")]


def _definition(module: str, name: str) -> ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef:
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node
    raise ValueError(f"{module} defines no {name}")


def _shown(module: str, name: str) -> str:
    node = _definition(module, name)
    parts = [f"## {name}", f"*{'class' if isinstance(node, ast.ClassDef) else 'function'} of `{module}`*"]
    if not isinstance(node, ast.ClassDef):
        return "\n\n".join([*parts, _signature(node), prose(ast.get_docstring(node) or "")])
    parts += [prose(ast.get_docstring(node) or "")]
    if rows := list(_fields(node)):
        parts += ["\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *rows])]
    for method in node.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and _is_shown(method):
            parts += [f"### {name}.{method.name}", _signature(method), prose(ast.get_docstring(method) or "")]
    return "\n\n".join(parts)


def _is_shown(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return not method.name.startswith("_") and ast.get_docstring(method) is not None


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The signature, one argument a line if it is long."""
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    decorated = "".join(f"@{ast.unparse(one)}\n" for one in node.decorator_list)
    plain = f"{decorated}{word} {node.name}({ast.unparse(node.args)}){returns}"
    if len(plain.splitlines()[-1]) <= 100:
        return f"```python\n{plain}\n```"
    arguments = "".join(f"    {one},\n" for one in _arguments(node.args))
    return f"```python\n{decorated}{word} {node.name}(\n{arguments}){returns}\n```"


def _arguments(given: ast.arguments) -> Iterator[str]:
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    for argument, default in zip(positional, defaults, strict=True):
        yield _argument(argument, default)
    if given.vararg:
        yield f"*{ast.unparse(given.vararg)}"
    elif given.kwonlyargs:
        yield "*"
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield _argument(argument, default)
    if given.kwarg:
        yield f"**{ast.unparse(given.kwarg)}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    equals = " = " if argument.annotation else "="
    return ast.unparse(argument) + (f"{equals}{ast.unparse(default)}" if default else "")


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """A row of the table for each annotated field; the docstring beneath a field is its meaning."""
    for field, below in zip(node.body, [*node.body[1:], None], strict=True):
        if (
            not isinstance(field, ast.AnnAssign)
            or not isinstance(field.target, ast.Name)
            or field.target.id.startswith("_")
        ):
            continue
        said = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
        default = f"`{ast.unparse(field.value)}`" if field.value else ""
        cells = (
            f"`{field.target.id}`",
            f"`{ast.unparse(field.annotation)}`",
            default,
            " ".join(inspect.cleandoc(str(said)).split()),
        )
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def prose(docstring: str) -> str:
    """A docstring as Markdown: examples and indented lines are code, what stands between backquotes is code already."""
    parts = []
    for paragraph in re.split(r"\n\s*\n", docstring):
        lines = paragraph.splitlines()
        if lines and lines[0].startswith(">>>"):
            parts.append("```pycon\n" + "\n".join(lines) + "\n```")
        elif lines and all(line.startswith("    ") for line in lines):
            parts.append("```text\n" + "\n".join(line[4:] for line in lines) + "\n```")
        else:
            parts.append(paragraph.replace("<", "&lt;") if "`" not in paragraph else _outside_code(paragraph))
    return "\n\n".join(parts)


def _outside_code(text: str) -> str:
    """Escapes < outside of backquotes."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)
