"""A config of another library as names with dots and their values, from YAML, TOML, or the command line in a shell script."""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError

UNKNOWN = object()
"""The value of what only the other library could work out, such as an expression over its environment."""
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^${}]*))?\}|(\w+))")
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)", re.DOTALL)
_HIDDEN, _SHOWN = str.maketrans("()#", "\x01\x02\x03"), str.maketrans("\x01\x02\x03", "()#")
_SIGNS = ";&|()\n"
_CONTINUED = re.compile(r"^((?:(?!(?<!\S)#).)*)\\\n", re.MULTILINE)
"""A line that goes on in the next one. A comment does not."""
_OPENS, _CLOSES = ("if", "case", "for", "while", "until", "select"), ("fi", "esac", "done")
"""Words between which a command of a shell may be left out, or repeated."""
CONFIG_NAME = "--config-name"
"""The name of an option: the file whose settings come before those of the command line."""
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_WORD = re.compile(r"\+{0,2}([A-Za-z_][\w.]*\.[\w.]+)=(.*)", re.DOTALL)
"""An override of Hydra: `name.with.dots=value`, with plus signs for a new name."""
DEEPEST = 20
"""References that lead to others are followed so far: there may be a circle."""


def read_given(path: Path) -> dict[str, Any]:
    """Returns the values by name. Raises ConfigError for a file that cannot be read, and for one of another kind."""
    readers = {".yaml": _yaml, ".yml": _yaml, ".toml": _toml, ".sh": _script}
    if path.suffix not in readers:
        raise ConfigError(
            f"{path}: name a .yaml or .toml config, or the .sh script that starts the run with its settings"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    try:
        return _resolved(readers[path.suffix](text, path))
    except RecursionError:
        raise ConfigError(f"{path} is not a config: its values lie in one another without end") from None


def _yaml(text: str, path: Path) -> dict[str, Any]:
    import yaml

    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} has no settings: a mapping of names to values is expected")
    return dict(_flat(tree))


def _toml(text: str, path: Path) -> dict[str, Any]:
    try:
        return dict(_flat(tomllib.loads(text)))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def _script(text: str, path: Path) -> dict[str, Any]:
    """The overrides on the command line, with the variables that the script sets. The script is not run: what one of its branches sets, or two
    of its commands set differently, is known only where it makes no difference."""
    try:
        words = list(_words(text))
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read as a shell script: {error}") from None
    variables: dict[str, str | None] = {"HOME": os.path.expanduser("~")}
    found: dict[str, Any] = {}
    commands: dict[str, int] = {}
    """The number of the command, or of the array of words for one, that a setting is from."""
    command = depth = brackets = 0
    joined = False
    for place, word in enumerate(words):
        depth = max(0, depth + (word in _OPENS) - (word in _CLOSES))
        may_be_skipped = depth > 0 or joined
        if not word.strip(_SIGNS):
            brackets = max(0, brackets + word.count("(") - word.count(")"))
            command += not brackets
            joined = word.strip("\n") in ("&&", "||")
        elif override := _WORD.fullmatch(word):
            name, value = override[1], _read(_expanded(override[2], variables))
            other = may_be_skipped or (not brackets and commands.get(name, command) != command)
            found[name] = UNKNOWN if other and found.get(name, value) != value else value
            commands[name] = command
        elif variable := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word, re.DOTALL):
            known = _expanded(variable[2], variables)
            if may_be_skipped and variables.get(variable[1]) != known:
                known = None
            variables[variable[1]] = known
        elif option := re.fullmatch(r"--config-name(?:=(.*))?", word, re.DOTALL):
            said = option[1] if option[1] is not None else next(iter(words[place + 1 :]), "")
            found[CONFIG_NAME] = _expanded(said, variables) or said
    if not found.keys() - {CONFIG_NAME}:
        raise ConfigError(
            f"{path} has no settings such as data.train_batch_size=64; name the script that starts the run"
        )
    return found


def _words(text: str) -> Iterator[str]:
    """Yields words and the signs between commands. Brackets of arithmetic, and `#` within words, are no signs."""
    text = _CONTINUED.sub(r"\1", text.replace("\r\n", "\n"))
    text = _ARITHMETIC.sub(lambda found: "".join(found[0].split()).translate(_HIDDEN), text)
    text = re.sub(r"(?<=\S)#", "#".translate(_HIDDEN), text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_SIGNS)
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    for word in lexer:
        yield word.translate(_SHOWN)


def _read(text: str | None) -> Any:
    """Returns the value that OmegaConf reads from the text of an override."""
    import yaml

    try:
        return UNKNOWN if text is None else _number(yaml.safe_load(text))
    except yaml.YAMLError:
        return text


def _expanded(text: str, variables: Mapping[str, str | None]) -> str | None:
    """Returns the text with its variables' values; None where one is not known, or a command is run."""
    text = _ARITHMETIC.sub(lambda found: _computed(found[1], variables) or found[0], text)
    if "$(" in text or "`" in text or text.endswith("$"):  # the bracket of a command is a word of its own
        return None
    missing = False

    def value(found: re.Match[str]) -> str:
        nonlocal missing
        known, default = variables.get(found[1] or found[3]), found[2]
        missing = missing or (known is None and default is None)
        return known if known is not None else default or ""

    for _ in range(DEEPEST):  # a default may name other variables
        text, before = _VARIABLE.sub(value, text), text
        if missing or text == before:
            break
    return None if missing else text


def _computed(text: str, variables: Mapping[str, str | None]) -> str:
    """Returns the value of a shell's arithmetic, such as `1024*2` or `length+512`; empty if it is not known."""
    plain = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", lambda found: f"({variables.get(found[1]) or '?'})", text)
    try:
        return str(_number_of(ast.parse(plain, mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return ""


def _number_of(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_number_of(node.left), _number_of(node.right))
    raise ValueError("it is not a sum of whole numbers")


def _flat(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", _number(value)


def _number(value: Any) -> Any:
    """YAML reads 1e-6 as a text, because it has no point."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value


def _resolved(given: Mapping[str, Any]) -> dict[str, Any]:
    """Follows the references of OmegaConf: `${a.b}`, `${.beside}`, and `${oc.select:a.b,default}`."""
    import yaml

    def follow(name: str, value: Any, depth: int) -> Any:
        if not isinstance(value, str) or "${" not in value:
            return value
        if depth > DEEPEST:
            return UNKNOWN
        whole = _REFERENCE.fullmatch(value)
        if whole:
            return target(name, whole[1], depth)
        texts = [target(name, found[1], depth) for found in _REFERENCE.finditer(value)]
        if any(text is UNKNOWN for text in texts):
            return UNKNOWN
        return _REFERENCE.sub(lambda found: str(texts.pop(0)), value)

    def target(name: str, said: str, depth: int) -> Any:
        kind, colon, rest = said.partition(":")
        if colon and kind != "oc.select":
            return UNKNOWN
        where, comma, default = (rest if colon else said).partition(",")
        where = where.strip()
        if where.startswith("."):
            where = f"{name.rpartition('.')[0]}{where}"
        if where in given:
            return follow(where, given[where], depth + 1)
        return _number(yaml.safe_load(default)) if comma else UNKNOWN

    return {name: follow(name, value, 0) for name, value in given.items()}
