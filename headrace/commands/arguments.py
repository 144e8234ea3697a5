"""Arguments that several commands have, the run that a person names, and how a command is added to the parser."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn, TypeAlias

from headrace.core.errors import ConfigError
from headrace.core.printing import fitted

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended, as shells have it."""


class Parser(argparse.ArgumentParser):
    """A parser that names the command or the option that a mistyped one is nearest to, in lines that fit the terminal."""

    def error(self, message: str) -> NoReturn:
        if unknown := re.search(r"invalid choice: '([^']*)'", message):
            known = [name for action in self._actions for name in map(str, action.choices or ())]
            nearest = _nearest(unknown[1], known)
            message = f"there is no {unknown[1]}{nearest or ': it is one of ' + ', '.join(known)}"
        self.print_usage(sys.stderr)
        self.exit(2, "\n".join(fitted(f"{self.prog}: error: {message}")) + "\n")

    def refuse(self, unknown: list[str]) -> NoReturn:
        """Ends the program for words of a line that no option and no place of the command takes."""
        options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        if not options:
            self.error(f"{' '.join(unknown)} is too much: see {self.prog} --help")
        nearest = _nearest(options[0], [name for action in self._actions for name in action.option_strings])
        self.error(f"there is no {options[0]}{nearest or f': see {self.prog} --help'}")


def _nearest(word: str, known: Iterable[str]) -> str:
    """Returns the question that names the nearest of the known words; empty where none is near."""
    plain = {name.strip("-").replace("-", ""): name for name in known}
    found = difflib.get_close_matches(word.strip("-").replace("-", "").replace("_", ""), plain, n=1, cutoff=0.6)
    return f"; did you mean {plain[found[0]]}?" if found else ""


def add_command(
    commands: Commands, name: str, function: Callable[[argparse.Namespace], int], summary: str
) -> argparse.ArgumentParser:
    """`summary`: a line of `headrace --help`, and with a capital letter the first of the command's own."""
    parser = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    parser.set_defaults(command=function, parser=parser)
    return parser


def add_run(parser: argparse.ArgumentParser, name: str = "run", metavar: str = "RUN", nargs: str | None = None) -> None:
    added = parser.add_argument(
        name, metavar=metavar, nargs=nargs, help="directory of the run, or its name under runs/"
    )
    added.completer = _known_runs  # type: ignore[attr-defined]  # argcomplete looks for it there


def _known_runs(**of_the_line: object) -> list[str]:
    """Returns the names of the runs under `runs/`, for the completion of a line in a shell."""
    return sorted(path.name for path in Path("runs").glob("*") if (path / "config.toml").is_file())


def _known_settings(**of_the_line: object) -> list[str]:
    from headrace.run.config import RunConfig
    from headrace.settings.toml import setting_names

    return [f"{name}=" for name in setting_names(RunConfig) if "." in name]


def add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--step", type=positive, metavar="N", help="take the checkpoint of this step (default: of the last step done)"
    )


def add_set(parser: argparse.ArgumentParser) -> None:
    added = parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", help="change a setting; may be given several times"
    )
    added.completer = _known_settings  # type: ignore[attr-defined]


def positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def run_directory(run: str) -> Path:
    """Finds a run by its directory, or by its name under `runs/`."""
    for candidate in (Path(run), Path("runs") / run):
        if candidate.is_dir():
            return candidate
    if is_config(run):
        own = Path("runs") / Path(run).stem
        place = str(own) if own.is_dir() else "runs/NAME"
        raise ConfigError(
            f"{run} is a config, but the directory of a run is needed here, such as {place} (headrace train {run} starts a new run)"
        )
    if Path(run).is_file():
        raise ConfigError(f"{run} is a file, but a run is a directory: give its path, or its name under runs/")
    known = [path.name for path in Path("runs").glob("*") if path.is_dir()]
    near = difflib.get_close_matches(Path(run).name, known, n=1)
    hint = f"; did you mean runs/{near[0]}?" if near else ""
    raise ConfigError(f"there is no run {run}: neither that directory nor runs/{run} exists{hint}")


def is_config(source: str) -> bool:
    """Whether the source looks like a config rather than a run. JSON and YAML count too; they are refused when they are read."""
    return source.endswith((".toml", ".json", ".yaml", ".yml"))
