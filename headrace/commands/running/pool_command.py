"""`headrace pool RUN [add URL | remove URL]`: shows the members of a running run's fleet, and changes them."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from headrace.commands.finding import run_directory
from headrace.core.errors import ConfigError, HeadraceError

SECONDS = 120.0
"""Seconds in which a run answers. One that adds a server waits until that answers, or for engine.patience."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="directory of the run, or its name under runs/")
    parser.add_argument("change", nargs="?", default="show", choices=("show", "add", "remove"), help="default: show")
    parser.add_argument(
        "member", nargs="?", default="", metavar="URL", help="address of a server, or the name of a member"
    )


def pool(arguments: argparse.Namespace) -> int:
    return change_pool(run_directory(arguments.run), arguments.change, arguments.member)


def change_pool(run_dir: Path, change: str, member: str) -> int:
    """Raises ConfigError for a wrong question, HeadraceError for what the run has refused."""
    from headrace.run.fleets.pool_door import PoolQuestion, ask
    from headrace.views.screen.console import Console
    from headrace.views.screen.live import table

    if (change == "show") == bool(member):
        raise ConfigError(f"headrace pool RUN {change} takes {'no address' if member else 'the address of a server'}")
    if change == "add" and not re.fullmatch(r"https?://[^/\s?#@]+/?", member):
        raise ConfigError(f"{member} is no address of a server; write it as http://HOST:PORT")
    answer = ask(run_dir, PoolQuestion(change, member), SECONDS)  # type: ignore[arg-type]
    console = Console(soft_wrap=True)
    for line in table(answer.members):
        console.print(line)
    if answer.error:
        raise HeadraceError(answer.error)
    return 0
