"""The page of all messages, made from the sources when the site is built (`site_pages.py`), and the check of those in troubleshooting.md.

A message is a text that the source gives to one of `ERRORS`, or to the log as a warning; its parts that differ are shown as ‹name›.
"""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent.parent / "headrace"
ERRORS = {
    "ConfigError": "refused before anything is written",
    "IdentityError": "the engine does not serve what was published (contract C3)",
    "CheckpointError": "a checkpoint cannot be used",
    "StalledError": "a wait took too long (contract C6)",
    "TrainingError": "a step cannot be trained",
    "RunPaused": "too much failed; the run goes on with --resume",
}
INNER = ("testing", "loop/world", "commands/plan")
"""Parts that simulate the others: nobody meets their messages."""
HOLE = "\0"
"""Stands in a template for a part that differs."""
ANYTHING = "…"
"""The same in troubleshooting.md."""
INTRODUCTION = """\
# All messages

Every sentence with which headrace refuses a run or ends one, from the sources of this version, by the part that says it. The sentence itself names the
remedy; [Troubleshooting](troubleshooting.md) has more about the frequent ones. ‹…› stands for what differs.
"""


class Message(NamedTuple):
    """A text of the source."""

    error: str
    """A key of `ERRORS`."""
    part: str
    """The folder, or file, of the package below which it stands."""
    text: str


def page() -> str:
    """The page of all messages."""
    parts, every = [INTRODUCTION], sorted(set(messages()))
    for error, about in ERRORS.items():
        parts += [f"## {error}", f"*{about}*"]
        own = [one for one in every if one.error == error]
        for part in sorted({one.part for one in own}):
            parts += [f"### {error}: {part}", "\n".join(f"- {_code(one.text)}" for one in own if one.part == part)]
    return "\n\n".join(parts) + "\n"


def messages() -> Iterator[Message]:
    """Yields every text that is given to one of `ERRORS`."""
    for path, node in _nodes():
        if isinstance(node, ast.Call) and not any(path.is_relative_to(PACKAGE / inner) for inner in INNER):
            text = template(node.args[0], shown=True)
            if len(text.strip("‹›… ")) > 12:
                yield Message(_raised(node), _part(path), " ".join(text.split()))


def _part(path: Path) -> str:
    """The room of a file; of `episodes`, which holds tasks, environments and rewards, the folder in it."""
    room, *below = path.relative_to(PACKAGE).parts
    return below[0].removesuffix(".py") if room == "episodes" else room.removesuffix(".py")


def _raised(call: ast.Call) -> str:
    """The error that a call makes; empty for any other call."""
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    return name if name in ERRORS and call.args else ""


def unknown(quoted: Iterable[str]) -> list[str]:
    """Returns those of the messages that no text of the sources can have become. `…` stands for any text."""
    known = _templates()
    return [one for one in quoted if not any(could_be(one, template) for template in known)]


def quoted(page: str) -> list[str]:
    """The messages of troubleshooting.md: its headings of the third level, whose text is code."""
    return re.findall(r"^### ``? ?(.+?) ?``?$", page, flags=re.MULTILINE)


def could_be(message: str, template: str) -> bool:
    """Whether the fixed pieces of the message stand in the template, in their order."""
    at = 0
    for piece in (part.strip() for part in message.split(ANYTHING)):
        found = template.find(piece, at)
        if found < 0:
            return False
        at = found + len(piece)
    return True


@cache
def _templates() -> frozenset[str]:
    """Every text of the sources that is longer than a few words."""
    texts = (template(node) for _, node in _nodes() if not isinstance(node, ast.Call))
    return frozenset(" ".join(text.split()) for text in texts if len(text) > 12)


@cache
def _nodes() -> tuple[tuple[Path, ast.Call | ast.JoinedStr | ast.Constant | ast.BinOp], ...]:
    """The texts of the sources, and the calls that make one of `ERRORS`, each with its file."""
    gc.disable()  # it would look through the growing trees again and again, which takes half of the time
    try:
        return tuple((path, node) for path in sorted(PACKAGE.rglob("*.py")) for node in _told(path))
    finally:
        gc.enable()


def _told(path: Path) -> Iterator[ast.Call | ast.JoinedStr | ast.Constant | ast.BinOp]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) or (isinstance(node, ast.Call) and _raised(node)):
            yield node


def template(node: ast.expr, *, shown: bool = False) -> str:
    """The text of a literal. Parts that differ are HOLE, or with `shown` a name in ‹›."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(template(one, shown=shown) for one in values)
        case ast.FormattedValue(value=value):
            return f"‹{_name(value)}›" if shown else HOLE
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left, shown=shown) + template(right, shown=shown)
        case ast.Name() | ast.Attribute() | ast.Call() | ast.IfExp():
            return f"‹{_name(node)}›" if shown else HOLE
    return ""


def _name(value: ast.expr) -> str:
    match value:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_").lower().replace("_", " ")
        case ast.Call(func=ast.Attribute(attr="join")):
            return ANYTHING
    return ANYTHING


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"
