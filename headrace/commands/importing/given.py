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
from typing import Any, NamedTuple

from headrace.core.errors import ConfigError

UNKNOWN = object()
"""The value of what only the other library could work out, such as an expression over its environment."""
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:(:?)-([^${}]*))?\}|(\w+))")
"""A variable of a shell, and what stands for it where it is not set, or, with a colon, where it is empty."""
_ARITHMETIC = re.compile(r"\$\(\((.{0,1000}?)\)\)", re.DOTALL)
_HIDDEN, _SHOWN = str.maketrans("()#", "\x01\x02\x03"), str.maketrans("\x01\x02\x03", "()#")
_DOLLAR = "\x04"
"""Stands for a dollar sign that names no variable: one in single quotes or behind a backslash, or in the value of a variable."""
_SIGNS = ";&|()\n"
_CONTINUED = re.compile(r"^((?:(?!(?<!\S)#).)*)\\\n", re.MULTILINE)
"""A line that goes on in the next one. A comment does not."""
_OPENS, _CLOSES = ("if", "case", "for", "while", "until", "select"), ("fi", "esac", "done")
"""Words between which a command of a shell may be left out, or repeated."""
_BEFORE = (
    "export",
    "local",
    "readonly",
    "declare",
    "typeset",
    "env",
    "then",
    "do",
    "else",
    "time",
    "nohup",
    "exec",
    "!",
)
"""Words of a shell that may stand before a command, and before what sets a variable."""
CONFIG_NAME, CONFIG_PLACE = "--config-name", "--config-path"
"""Options of Hydra: the file whose settings come before those of the command line, and the directory that it is in."""
_OPTIONS = {
    "--config-name": CONFIG_NAME,
    "-cn": CONFIG_NAME,
    "--config-path": CONFIG_PLACE,
    "-cp": CONFIG_PLACE,
    "--config-dir": CONFIG_PLACE,
    "-cd": CONFIG_PLACE,
}
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_WORD = re.compile(r"\+{0,2}([A-Za-z_]\w*\.[\w.-]+)=(.*)", re.DOTALL)
"""An override of Hydra: `name.with.dots=value`, with plus signs for a new name."""
_OTHER = re.compile(r"(~[A-Za-z_][\w./@-]*|\+{0,2}[A-Za-z_][\w./@-]*(?==))(?:=(.*))?", re.DOTALL)
"""Other words that Hydra takes: `~name` takes a setting away, and `group=choice` has another file's."""
_VARIABLE_ALONE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
_ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
"""All words of an array."""
_KEY = re.compile(r"""("[^"]*"|'[^']*')|([{,]\s*[\w.-]+):(?=\S)""")
"""A key of a mapping as Hydra writes one, without the space that YAML wants behind it; or a text in quotes, which stays what it is."""
_ROOMS = ("trainer", "orchestrator", "inference")
"""Tables of prime-rl that are there whether they are named or not."""
MOST = 100_000
"""Settings of a config; the largest of verl has about a thousand."""
LONGEST = 1_000_000
"""Characters of a shell's variable, which may double with every line that sets it."""
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
        _once(yaml.compose(text, yaml.SafeLoader), path)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} has no settings: a mapping of names to values is expected")
    found: dict[str, Any] = {}
    for name, value in _flat(tree):
        if name in found:
            raise ConfigError(f"{path} gives {name} twice, with a dot and as a mapping; leave one of them")
        if len(found) == MOST:
            raise ConfigError(f"{path} has more than {MOST} settings: its anchors are repeated within each other")
        found[name] = value
    return found


def _once(node: Any, path: Path) -> None:
    """Raises ConfigError for a name that a mapping has twice, of which YAML takes the last; OmegaConf refuses it."""
    import yaml

    waiting, seen = [node], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # an anchor's
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            names: set[str] = set()
            for key, value in node.value:
                if str(key.value) in names and key.value != "<<":
                    raise ConfigError(
                        f"{path} gives {key.value} twice, again in line {key.start_mark.line + 1}; leave one of them"
                    )
                names.add(str(key.value))
                waiting.append(value)


def _toml(text: str, path: Path) -> dict[str, Any]:
    """A table without a setting switches on what it is named after."""
    try:
        found = dict(_flat(tomllib.loads(text)))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    return {name: True if value == {} and name not in _ROOMS else value for name, value in found.items()}


def _script(text: str, path: Path) -> dict[str, Any]:
    """The overrides on the command line, with the variables that the script sets. The script is not run: what one of its branches sets, or two
    of its commands set differently, is known only where it makes no difference."""
    script = _Script()
    try:
        words = list(_words(text))
        for word, following in zip(words, [*words[1:], ""], strict=True):
            script.read(word, following)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read as a shell script: {error}") from None
    if not script.found.keys() - {CONFIG_NAME, CONFIG_PLACE}:
        raise ConfigError(
            f"{path} has no settings such as data.train_batch_size=64; name the script that starts the run"
        )
    return script.given()


class _ArrayWord(NamedTuple):
    text: str
    """The word with the values of its variables; a backtick stands for what is not known."""
    maybe: bool
    """Whether its line may have been left out."""


class _Script:
    """The variables, arrays and settings of a shell script, as far as its words were read."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self._variables: dict[str, str | None] = {"HOME": os.path.expanduser("~")}
        self._partly: dict[str, str] = {}
        """The texts of variables of which a part is not known, with a backtick in its place."""
        self._arrays: dict[str, list[_ArrayWord]] = {}
        self._used: set[str] = set()
        """The arrays whose words a command has."""
        self._commands: dict[str, int] = {}
        """The number of the command that a setting is from."""
        self._unknown: dict[str, int] = {}
        """Words of which nobody knows here what they are, and the command that they are from."""
        self._command = self._depth = self._brackets = 0
        self._joined, self._begins, self._maybe = False, True, False
        self._array = ""
        """The array whose words are being read, which may name what was in it before."""
        self._fills: list[_ArrayWord] = []

    def given(self) -> dict[str, Any]:
        """Returns the settings, and the words of their commands that may be others."""
        numbers = set(self._commands.values())
        unused = [word for name, words in self._arrays.items() if name not in self._used for word in words]
        names = [override[1] for word in unused if (override := _WORD.fullmatch(word.text))]
        others = [*names, *(word for word, number in self._unknown.items() if number in numbers)]
        return self.found | {name: UNKNOWN for name in others if name not in self.found}

    def read(self, word: str, following: str) -> None:
        self._depth = max(0, self._depth + (word in _OPENS) - (word in _CLOSES))
        if not word.strip(_SIGNS):
            self._brackets = max(0, self._brackets + word.count("(") - word.count(")"))
            if self._array and self._brackets:
                return
            self._close_array()
            self._command += not self._brackets
            self._joined, self._begins = word.strip("\n") in ("&&", "||"), True
        elif self._array:
            self._fills += self._for_array(word)
            if len(self._fills) > MOST:
                raise ValueError(f"its array {self._array} has more than {MOST} words")
        elif override := _WORD.fullmatch(word):
            self._override(override[1], override[2])
        elif (variable := re.fullmatch(r"([A-Za-z_]\w*)(\+?)=(.*)", word, re.DOTALL)) and self._sets_variables:
            if following.startswith("(") and not variable[3]:
                self._array = variable[1]
                self._fills = [*self._arrays.get(self._array, ())] if variable[2] else []
            else:
                self._set(variable[1], variable[3], more=bool(variable[2]))
        else:
            self._argument(word, following)

    def _close_array(self) -> None:
        if self._array:
            self._arrays[self._array] = self._fills
        self._array, self._fills = "", []

    @property
    def _sets_variables(self) -> bool:
        """Whether a word `name=value` sets a variable. Behind the name of a command it is an argument."""
        return self._begins and not self._brackets

    @property
    def _may_be_skipped(self) -> bool:
        return self._depth > 0 or self._joined

    def _override(self, name: str, text: str) -> None:
        value = _read(_expanded(text, self._variables))
        for inner, one in _flat({name: value}):
            other = self._may_be_skipped or self._commands.get(inner, self._command) != self._command
            before = self.found.get(inner, None if self._maybe else one)
            self.found[inner] = UNKNOWN if (other or self._maybe) and before != one else one
            self._commands[inner] = self._command
            if len(self.found) > MOST:
                raise ValueError(f"{name} has more than {MOST} settings: its anchors are repeated within each other")

    def _set(self, name: str, text: str, more: bool) -> None:
        text = f"${{{name}}}{text}" if more else text
        known = _expanded(text, self._variables)
        if self._may_be_skipped and self._variables.get(name) != known:
            known = None
        elif known is None:
            self._partly[name] = _replaced(text, self._part) or "`"
        if known is not None or self._may_be_skipped:
            self._partly.pop(name, None)
        self._variables[name] = known

    def _part(self, found: re.Match[str]) -> str:
        known = _known(found, self._variables)
        if known is None:
            return self._partly.get(found[1] or found[4], "`")
        return known.replace("$", _DOLLAR)

    def _for_array(self, word: str) -> list[_ArrayWord]:
        """Returns the words that a word between the brackets of an array stands for."""
        if whole := _ARRAY.fullmatch(word):
            self._used.add(whole[1])
            return [one._replace(maybe=one.maybe or self._may_be_skipped) for one in self._arrays.get(whole[1], ())]
        if alone := _VARIABLE_ALONE.fullmatch(word):
            words = self._split(alone[1] or alone[2])
            return [one for part in words for one in self._for_array(part)]
        known = _expanded(word, self._variables)
        text = f"{word.partition('=')[0]}=`" if known is None else known.replace("$", _DOLLAR)
        return [_ArrayWord(text, self._may_be_skipped)]

    def _argument(self, word: str, following: str) -> None:
        option, equals, said = word.partition("=")
        if option in _OPTIONS:
            said = said if equals else following
            self.found[_OPTIONS[option]] = _expanded(said, self._variables) or said
        elif whole := _ARRAY.fullmatch(word):
            self._words_of_array(whole[1], word)
        elif not self._sets_variables:
            if alone := _VARIABLE_ALONE.fullmatch(word):
                for one in self._split(alone[1] or alone[2]):
                    self._read_word(one, "", word)
            elif other := _OTHER.fullmatch(word):
                self._unknown[word if other[1].startswith("~") else other[1]] = self._command
        self._begins = self._begins and (word in _BEFORE or word.startswith("-"))

    def _words_of_array(self, name: str, word: str) -> None:
        self._used.add(name)
        if name not in self._arrays:
            self._unknown[word] = self._command
        self._begins = False
        words = self._arrays.get(name, [])
        for place, one in enumerate(words):
            self._maybe = one.maybe
            self._read_word(one.text, words[place + 1].text if place + 1 < len(words) else "", word)
        self._maybe = False

    def _read_word(self, one: str, following: str, of: str) -> None:
        """Reads a word of those that `of` stands for."""
        if one.strip("=") == "`":
            self._unknown[of] = self._command
        else:
            self.read(one, following)

    def _split(self, name: str) -> list[str]:
        """Returns the words of a command that a variable stands for; a backtick for some that are not known."""
        text = self._variables.get(name)
        text = self._partly.get(name, "`") if text is None else text.replace("$", _DOLLAR)
        try:
            return [one for one in shlex.split(text) if not _VARIABLE_ALONE.fullmatch(one)]
        except ValueError:
            return ["`"]


def _words(text: str) -> Iterator[str]:
    """Yields words and the signs between commands. Brackets of arithmetic, and `#` within words, are no signs."""
    text = "".join(_plain_dollars(_CONTINUED.sub(r"\1", text.replace("\r\n", "\n"))))
    text = _ARITHMETIC.sub(lambda found: "".join(found[0].split()).translate(_HIDDEN), text)
    text = re.sub(r"(?<=\S)#", "#".translate(_HIDDEN), text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_SIGNS)
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    for word in lexer:
        yield word.translate(_SHOWN)


def _plain_dollars(text: str) -> Iterator[str]:
    """Yields the text in pieces, with `_DOLLAR` where a dollar sign names no variable."""
    quote, begins, place = "", True, 0
    while place < len(text):
        sign, following = text[place], text[place + 1 : place + 2]
        if sign == "#" and begins and not quote:  # a comment, whose quotes are none
            end = text.find("\n", place)
            place = len(text) if end < 0 else end
            continue
        if sign == "\\" and quote != "'":
            yield _DOLLAR if following == "$" else sign + following
            place, begins = place + 2, False
            continue
        yield _DOLLAR if sign == "$" and quote == "'" else sign
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        place, begins = place + 1, not quote and (sign.isspace() or sign in _SIGNS)


_WHOLE = re.compile(r"[-+]?(?:0|[1-9][\d_]*)")
"""A whole number as Hydra reads one. To YAML `010`, `0x10` and `1:30` are numbers too, and `off` is a truth value."""


def _read(text: str | None) -> Any:
    """Returns the value that Hydra reads from the text of an override."""
    import yaml

    if text is None:
        return UNKNOWN
    try:
        value = _number(yaml.safe_load(_spaced(text) if text.lstrip().startswith("{") else text))
    except (yaml.YAMLError, ValueError):  # one such as 2024-13-01, which looks like a date
        return text
    is_text = (isinstance(value, bool) and text.lower() not in ("true", "false")) or (
        isinstance(value, int) and not isinstance(value, bool) and not _WHOLE.fullmatch(text)
    )
    return text if is_text or (value is None and text == "") else value


def _spaced(text: str) -> str:
    return _KEY.sub(lambda found: found[1] or f"{found[2]}: ", text)


def _expanded(text: str, variables: Mapping[str, str | None]) -> str | None:
    """Returns the text with its variables' values; None where one is not known, or a command is run."""
    text = _ARITHMETIC.sub(lambda found: _computed(found[1], variables) or found[0], text)
    if "$(" in text or "`" in text or text.endswith("$"):  # the bracket of a command is a word of its own
        return None
    missing = False

    def value(found: re.Match[str]) -> str:
        nonlocal missing
        known = _known(found, variables)
        missing = missing or known is None
        return (known or "").replace("$", _DOLLAR)

    for _ in range(DEEPEST):  # a default may name other variables
        replaced = _replaced(text, value)
        if missing or replaced is None:
            return None
        if replaced == text:
            break
        text = replaced
    return text.replace(_DOLLAR, "$")


def _replaced(text: str, value: Callable[[re.Match[str]], str]) -> str | None:
    """Returns the text with `value` of each variable in the variable's place; None if that is too long."""
    pieces, end, size = list[str](), 0, 0
    for found in _VARIABLE.finditer(text):
        pieces += text[end : found.start()], value(found)
        end, size = found.end(), size + len(pieces[-1])
        if size > LONGEST:
            return None
    return "".join([*pieces, text[end:]])


def _known(found: re.Match[str], variables: Mapping[str, str | None]) -> str | None:
    """Returns the value of a variable that is named, or what stands for it; None where it is not known."""
    name, default = found[1] or found[4], found[3]
    if name not in variables:
        return default
    return default if variables[name] == "" and found[2] else variables[name]


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
        if isinstance(value, list):
            found = [follow(name, one, depth) if isinstance(one, str) else one for one in value]
            return UNKNOWN if any(one is UNKNOWN for one in found) else found
        if not isinstance(value, str) or "${" not in value:
            return value
        if depth > DEEPEST:
            return UNKNOWN
        whole = _REFERENCE.fullmatch(value)
        if whole:
            return target(name, whole[1], depth)
        texts = [target(name, found[1], depth) for found in _REFERENCE.finditer(value)]
        if not texts or any(text is UNKNOWN for text in texts):
            return UNKNOWN
        # What was the default of another reference may make that one readable now.
        return follow(name, _REFERENCE.sub(lambda found: str(texts.pop(0)), value), depth + 1)

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
