"""Arguments that several commands have, and how a command is added to the parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended, as shells have it."""


def add_command(
    commands: Commands, name: str, function: Callable[[argparse.Namespace], int], summary: str
) -> argparse.ArgumentParser:
    """`summary`: a line of `headrace --help`, and with a capital letter the first of the command's own."""
    parser = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    parser.set_defaults(command=function)
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
