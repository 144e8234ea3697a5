"""`headrace import FILE`: writes a config from that of another library, and says what has no counterpart."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.commands.arguments import Commands, add_command
from headrace.core.errors import ConfigError
from headrace.core.printing import echo

if TYPE_CHECKING:
    from headrace.commands.importing.translation import Library, Translation

SHOWN = 8
"""Names without a counterpart that are printed for each reason."""


def add_import(commands: Commands) -> None:
    summary = "write a config from one of verl (.yaml, .sh) or prime-rl (.toml)"
    parser = add_command(commands, "import", _import, summary)
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="the config, or the script that starts the run with its settings"
    )
    parser.add_argument(
        "--to",
        type=Path,
        default=Path("mine.toml"),
        metavar="CONFIG.toml",
        help="where to write it (default: %(default)s)",
    )
    parser.add_argument("--all", action="store_true", help="print every name that has no counterpart")


def _import(arguments: argparse.Namespace) -> int:
    library, found = translated(arguments.file)
    written = {arguments.to: config_text(found, library.name, arguments.file, arguments.to.name)}
    written |= {arguments.to.parent / name: text for name, text in found.files.items()}
    for path in written:
        if path.exists():
            raise ConfigError(
                f"{path} exists already: name another file with --to, in another folder if it is {arguments.to.name}, or delete it"
            )
    arguments.to.parent.mkdir(parents=True, exist_ok=True)
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")
        echo(path)
    for line in report(found, library.name, most=0 if arguments.all else SHOWN):
        echo(line)
    first = "fill in what is to do, then: " if found.to_do or found.also or found.unknown else "next: "
    echo(f"{first}headrace train {arguments.to} --dry-run")
    return 0


def libraries() -> tuple[Library, ...]:
    """Returns the libraries whose configs are read. Imported here, so that no other command waits for them."""
    from headrace.commands.importing.prime_rl import PRIME_RL
    from headrace.commands.importing.verl import VERL

    return VERL, PRIME_RL


def translated(path: Path) -> tuple[Library, Translation]:
    """Returns the library whose config this is, and the translation. Raises ConfigError for a config of none that is known."""
    from headrace.commands.importing.given import read_given
    from headrace.commands.importing.translation import Translation

    given = read_given(path)
    for library in libraries():
        if library.is_of(given):
            found = Translation(given=given)
            library.translate(found)
            return library, found
    raise ConfigError(
        f"{path} looks like a config of neither {' nor '.join(library.name for library in libraries())}; a script for TRL runs with one import changed "
        "(docs/from_trl.md), and docs/coming_from.md has the names of other libraries"
    )


WORKED_OUT = "values that are worked out where it runs, so that what follows from them is a default or missing here"


def report(found: Translation, library: str, most: int) -> Iterator[str]:
    """Yields what a person should know: `most` names for each reason, or all if it is 0."""
    yield f"{len(found.settings)} settings from {len(found.given)} of {library}"
    for setting, what in found.to_do.items():
        yield from _wrapped(f"to do: {setting}: {what}")
    for sentence in found.also:
        yield from _wrapped(f"to do: {sentence}")
    if found.unknown:
        yield from _wrapped(f"to do: {WORKED_OUT}: {', '.join(found.unknown)}")
    for reason, names in found.left_out.items():
        if names:
            shown = names[:most] if most else names
            more = f" and {len(names) - len(shown)} more (--all)" if len(names) > len(shown) else ""
            yield from _wrapped(f"left out: {reason}: {', '.join(shown)}{more}")
    if found.unread:
        yield from _wrapped(f"not known to this translation, so look whether they matter: {', '.join(found.unread)}")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def config_text(found: Translation, library: str, source: Path, name: str) -> str:
    """Returns the config as TOML, with a comment for each note, and a line for each setting that is to be filled in."""
    lines = [
        f"# {name}: from {source.name} of {library}, by `headrace import`. Every other setting has a default: docs/settings.md lists them."
    ]
    for sentence in found.also:
        lines += _comment(f"TO DO: {sentence}")
    if found.unknown:
        lines += _comment(f"TO DO: {WORKED_OUT}: {', '.join(found.unknown)}")
    tables: dict[str, list[str]] = {}
    for setting in dict.fromkeys([*found.settings, *found.to_do]):
        table, _, leaf = setting.rpartition(".")
        rows = tables.setdefault(table, [])
        if setting in found.to_do:
            rows += _comment(f"TO DO {leaf}: {found.to_do[setting]}")
        if setting in found.settings:
            note = _printable(found.notes.get(setting, ""))
            rows.append(f"{leaf} = {_value(found.settings[setting])}" + (f"  # {note}" if note else ""))
    for table in sorted(tables, key=lambda table: (table != "", _order(table))):
        lines += ["", *([f"[{table}]"] if table else []), *tables[table]]
    if found.unread:
        lines += ["", *_comment(f"Not translated: {', '.join(found.unread)}")]
    return "\n".join(lines) + "\n"


def _printable(text: str) -> str:
    """Comments hold no control characters, which the names and values of a config may."""
    return "".join(character if character.isprintable() else " " for character in text)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(_printable(text), 130, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False)


_FIRST = ("model", "task", "reward", "environment", "rollout", "algo", "train", "lora", "staleness", "engine", "eval")


def _order(table: str) -> tuple[int, str]:
    room = table.partition(".")[0]
    return (_FIRST.index(room) if room in _FIRST else len(_FIRST), table)


def _value(value: Any) -> str:
    """A value of TOML. JSON's texts, numbers and booleans are TOML's too."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_value(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() else json.dumps(key)
