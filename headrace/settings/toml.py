"""Converts TOML and `--set a.b=c` to any tree of pydantic dataclasses and back, with a sentence for each mistake.

Knows no setting of headrace by name: `config.py` lists the settings.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import sys
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from headrace.core.errors import ConfigError

T = TypeVar("T")
Tree = dict[str, Any]

_LARGEST_FLOAT = 3.4e38
_KINDS = ("str", "int", "float", "bool")
_PART = re.compile(r"[A-Za-z0-9_-]+")


def read_toml(path: Path) -> Tree:
    """Reads a file. Raises ConfigError if it is missing, a directory or not TOML."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        return tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}{_similar_file(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory; name a TOML file in it") from None
    except PermissionError:
        raise ConfigError(f"{path} cannot be read; change its permissions") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}; save it as UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_other_language(path, text) or f"{path} is not valid TOML: {error}") from None
    except ValueError:
        raise ConfigError(f"{path} {_TOO_MANY_DIGITS}") from None


def _other_language(path: Path, text: str) -> str:
    """Returns a sentence about JSON or YAML, or an empty string."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    first = lines[0].strip() if lines else ""
    json_like, yaml_like = first == "{" or first.startswith('{"'), re.match(r"---|[\w.-]+:(\s|$)|- ", first)
    language = "JSON" if json_like else "YAML" if yaml_like else ""
    return language and (
        f"{path} is {language}, and a config is TOML: write a section as [train] and a setting below it as steps = 200 (headrace "
        "init mine.toml writes a complete one). From Python, pass a dict of the same shape: headrace.train({...})"
    )


_TOO_MANY_DIGITS = f"holds an integer of more than {sys.get_int_max_str_digits()} digits; TOML's integers have 64 bits"
"""Python's own limit, a ValueError."""


def parse_sets(sets: Sequence[str]) -> Tree:
    """`["a.b=1", "a.c=fast"]` -> `{"a": {"b": 1, "c": "fast"}}`: a value is TOML, or a string if it is not valid TOML."""
    tree: Tree = {}
    for text in sets:
        key, sign, value = text.partition("=")
        parts = key.strip().split(".")
        if not sign or not all(_PART.fullmatch(part) for part in parts):
            raise ConfigError(f"--set {text}: write it as section.setting=value, for example --set train.steps=100")
        tree = merge(tree, _nest(parts, _toml_value(value.strip(), f"--set {text}")))
    return tree


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tree:
    """Merges tables key by key, and a table into a list of tables by their names; any other value in `above` replaces that in `below`.
    Raises ConfigError for a name that no table of such a list has."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(value, Mapping) and isinstance(old, dict):
            merged[key] = merge(old, value)
        elif isinstance(value, Mapping) and (names := names_in(old)):
            merged[key] = _merge_named(key, old or (), value, names=names)
        else:
            merged[key] = value
    return merged


def names_in(value: Any) -> list[str]:
    """Returns the names of the tables in a list, which are those of `[[adapters]]` or `[[teachers]]`; empty for anything else."""
    tables = value if isinstance(value, (list, tuple)) else ()
    return [table["name"] for table in tables if isinstance(table, Mapping) and isinstance(table.get("name"), str)]


def _merge_named(key: str, old: Sequence[Any], above: Mapping[str, Any], *, names: Sequence[str]) -> list[Any]:
    if strange := next((name for name in above if name not in names), ""):
        raise ConfigError(f"{key}.{strange}: none of {key} is called {strange}; there are {', '.join(names)}")
    return [merge(entry, above.get(entry["name"], {})) if names_in([entry]) else entry for entry in old]


def build(kind: type[T], tree: Mapping[str, Any], elsewhere: Callable[[str], str] = lambda name: "") -> T:
    """Builds and validates a config, strictly: a number in quotes is not a number. Raises ConfigError with all mistakes, one per line;
    where a number is immense, with all that are.

    `elsewhere` returns a sentence for a name that is not a setting but is known from elsewhere, or an empty string."""
    if immense := list(_immense(tree)):
        raise ConfigError("\n".join(immense))
    try:
        # JSON mode: in pydantic's strict mode it is the one that accepts an array for a tuple and 1 for 1.0, as TOML needs.
        built = TypeAdapter(kind).validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        complaints = _complaints(error.errors(include_url=False), kind, elsewhere)
        raise ConfigError("\n".join(dict.fromkeys(complaints))) from None
    if immense := list(_beyond_float32(built)):
        raise ConfigError("\n".join(immense))
    return built


def dump(settings: Any) -> str:
    """Returns the TOML of a dataclass tree with every setting. Settings that are None are left out: TOML has no null."""
    lines: list[str] = []
    _write_table(_plain(settings), (), lines)
    return "\n".join(lines).strip() + "\n"


def dump_changed(settings: Any) -> str:
    """Returns the TOML of the settings of a dataclass tree that differ from their defaults, or have none."""
    lines: list[str] = []
    _write_table(_changed(settings), (), lines)
    return "\n".join(lines).strip() + "\n"


def setting_names(kind: type, prefix: str = "") -> Iterator[str]:
    """Yields the dotted names of all settings and sections; the elements of a list of tables go by the name of the list."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name = f"{prefix}{field.name}"
        yield name
        for nested in _dataclasses_in(hints[field.name]):
            yield from setting_names(nested, f"{name}.")


def _immense(value: Any, name: str = "") -> Iterator[str]:
    """Yields a sentence for each integer that the machine does not hold."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _immense(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            yield from _immense(inner, f"{name}[{place}]")
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        bits = value.bit_length()
        yield f"{name} = an integer of {bits} bits does not fit: expected one of 64 bits, which is at most {(1 << 63) - 1}"


def _beyond_float32(value: Any, name: str = "") -> Iterator[str]:
    """Yields a sentence for each float that is infinite to tensors. Tables of other names than ours (options of an environment) may hold any."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _beyond_float32(getattr(value, field.name), f"{name}.{field.name}" if name else field.name)
    elif isinstance(value, tuple):
        for place, inner in enumerate(value):
            yield from _beyond_float32(inner, f"{name}[{place}]")
    elif isinstance(value, float) and abs(value) > _LARGEST_FLOAT:
        yield f"{name} = {value:g} does not fit: expected a number of at most {_LARGEST_FLOAT:g} in size, the largest float of 32 bits"


# --- sentences -------------------------------------------------------------------------------------------------------


def _complaints(details: Sequence[Any], kind: type, elsewhere: Callable[[str], str]) -> Iterator[str]:
    """Yields one complaint per setting. Pydantic reports one for every member of a union; they are joined."""
    by_value: dict[tuple[str, str], list[Any]] = {}
    for detail in details:
        by_value.setdefault((_dotted(detail["loc"]), repr(detail["input"])), []).append(detail)
    for of_one in by_value.values():
        first = _sentence(kind, of_one[0], elsewhere)
        others = dict.fromkeys(map(_expected, of_one[1:])) if "does not fit: " in first else {}
        yield " or ".join([first, *(other.removeprefix("expected ") for other in others if not first.endswith(other))])


def _sentence(kind: type, detail: Any, elsewhere: Callable[[str], str]) -> str:
    name = _dotted(detail["loc"])
    given, problem = detail["input"], detail["type"]
    if problem == "unexpected_keyword_argument":
        if known := [sentence for leaf in _leaves(name, given) if (sentence := elsewhere(leaf))]:
            return "\n".join(known)
        near = _nearest(name, list(setting_names(kind)))
        if near:
            return f"{name} is not a setting; did you mean {near}?"
        section = re.sub(r"\[\d+\]", "", name).rpartition(".")[0]
        there = (
            [n.removeprefix(f"{section}.") for n in setting_names(kind) if n.startswith(f"{section}.")]
            if section
            else []
        )
        return f"{name} is not a setting" + (f"; {section} has {', '.join(there)}" if there else "")
    if problem == "missing":
        return f"{name} is missing: " + (
            "add it" if "." in name else f"add a [{name}] table or {name} = ... to the config"
        )
    if problem == "value_error":  # raised by a validator of the config class, whose message names the remedy
        message = str(detail["ctx"]["error"])
        return message if name.split(".")[0] in message else f"{name}: {message}"
    return f"{name} = {_short(given)} does not fit: {_expected(detail)}"


def _leaves(name: str, value: Any) -> list[str]:
    """Returns the dotted names of the settings in a table; for any other value, its own name."""
    if not isinstance(value, dict):
        return [name]
    return [leaf for key, inner in value.items() for leaf in _leaves(f"{name}.{key}", inner)]


def _expected(detail: Any) -> str:
    message, problem, given = str(detail["msg"]), detail["type"], detail["input"]
    if problem in ("dataclass_type", "dict_type"):
        return "expected a table"
    if problem == "bool_type":
        return "expected a boolean: true or false, in small letters and without quotes"
    if problem in ("tuple_type", "list_type"):
        item = given if isinstance(given, str) else _toml(given)
        example = item if item.replace(",", "").replace(" ", "").isdigit() else ", ".join(map(_string, item.split(",")))
        return f"expected a list: write it as [{example}]"
    message = message.replace("String should have", "expected a text with")
    message = message.replace("Input should be a valid ", "expected a ").replace("Input should be ", "expected ")
    return message.replace("expected a integer", "expected an integer")


def _dotted(loc: Sequence[Any]) -> str:
    text = ""
    for part in loc:
        if isinstance(part, str) and ("[" in part or part in _KINDS):  # which member of a union pydantic tried
            break
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")


def _nearest(name: str, known: list[str]) -> str | None:
    """Returns the most similar setting: among those of the same section, then anywhere by the last part of the name, then by the whole
    name."""
    plain = re.sub(r"\[\d+\]", "", name)
    section, _, leaf = plain.rpartition(".")
    siblings = [n for n in known if n.rpartition(".")[0] == section]
    for candidates in (siblings, known):
        # Of equal last parts the first one is meant, and one of a section before one of a list of tables within it.
        leaves: dict[str, str] = {}
        for known_name in sorted(candidates, key=lambda n: n.count(".")):
            leaves.setdefault(known_name.rpartition(".")[2], known_name)
        match = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.7)
        if match:
            return leaves[match[0]]
    if section:  # all names of a section are similar as wholes
        return None
    match = difflib.get_close_matches(plain, known, n=1, cutoff=0.6)
    return match[0] if match else None


def _similar_file(path: Path) -> str:
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], n=1)
    return f"; did you mean {path.with_name(near[0])}?" if near else ""


def _short(value: Any) -> str:
    text = _toml(value) if not isinstance(value, dict) else "{...}"
    return text if len(text) <= 60 else text[:57] + "..."


def _dataclasses_in(hint: Any) -> list[type]:
    if dataclasses.is_dataclass(hint):
        return [typing.cast(type, hint)]
    return [kind for argument in typing.get_args(hint) for kind in _dataclasses_in(argument)]


# --- TOML ------------------------------------------------------------------------------------------------------------


def _toml_value(text: str, where: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
        return parsed["value"] if list(parsed) == ["value"] else text
    except tomllib.TOMLDecodeError:
        if text[:1] in ("[", "{", '"', "'"):  # it was meant to be TOML
            raise ConfigError(
                f"{where}: {text} cannot be read. Write a list as [0, 1] or ['a', 'b'], a table as {{ a = 1 }}, a text as "
                "'a', and put the whole --set into quotes of the other kind, so that the shell does not remove them"
            ) from None
        return text  # a bare word: `--set algo.name=rloo` needs no quotes
    except ValueError:
        raise ConfigError(f"{where}: it {_TOO_MANY_DIGITS}") from None


def _nest(parts: Sequence[str], value: Any) -> Tree:
    return {parts[0]: _nest(parts[1:], value) if parts[1:] else value}


def _plain(value: Any) -> Any:
    """Converts dataclasses to dicts without the settings that are None, tuples to lists, paths to strings."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value) if _is_set(value, f.name)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _is_set(settings: Any, name: str) -> bool:
    return getattr(settings, name) is not None


def _changed(value: Any) -> Any:
    """Converts as `_plain` does, without the settings that have their defaults."""
    if isinstance(value, tuple):
        return [_changed(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return _plain(value)
    fields: Mapping[str, Any] = getattr(type(value), "__pydantic_fields__")  # noqa: B009  # mypy knows no pydantic's dataclass here
    given = {name: getattr(value, name) for name in fields if _is_set(value, name)}
    changed = {
        name: _changed(setting)
        for name, setting in given.items()
        if setting != fields[name].get_default(call_default_factory=True)
    }
    return {name: setting for name, setting in changed.items() if setting != {}}


def _write_table(table: Tree, path: tuple[str, ...], lines: list[str]) -> None:
    lines += [f"{_key(key)} = {_toml(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for key, value in table.items():
        if isinstance(value, dict):
            here = (*path, _key(key))
            lines += ["", f"[{'.'.join(here)}]"]
            _write_table(value, here, lines)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    return str(value) if isinstance(value, int) else _string(str(value))


def _string(text: str) -> str:
    # JSON's escapes are those of TOML, except that TOML also requires DEL to be escaped and has no surrogate pairs.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    return key if _PART.fullmatch(key) else _string(key)
