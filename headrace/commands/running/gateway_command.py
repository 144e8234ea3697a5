"""`headrace gateway [RUN] [-- COMMAND]`: shows where a run hands out its rollouts, and plays them with a command.

The address holds a secret, so it is never an argument: every user of the machine can read those."""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from headrace.commands.finding import run_directory
from headrace.core.errors import ConfigError
from headrace.core.printing import echo
from headrace.settings.secrets import GATEWAY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "headrace gateway [-h] [--at-once N] [RUN] [-- COMMAND ...]"
    parser.epilog = (
        "COMMAND plays rollouts until the run is over. On another machine, without RUN: the environment variable "
        f"{GATEWAY} has the address that this command shows."
    )
    parser.add_argument("run", nargs="?", default="", metavar="RUN", help="a run on this machine")
    parser.add_argument(
        "--at-once", type=int, default=8, metavar="N", help="processes of COMMAND at once (default: %(default)s)"
    )


def gateway(arguments: argparse.Namespace) -> int:
    return use_gateway(arguments.run, arguments.words, arguments.at_once)


def use_gateway(run: str, command: Sequence[str], at_once: int) -> int:
    """Prints the address, or plays rollouts with the command. `run`: empty for the one whose address is in the environment. Raises
    ConfigError for a run that hands out none."""
    if re.match("https?://", run):
        raise ConfigError(
            f"the address holds a secret, and every user of this machine can read arguments: put it into the environment variable {GATEWAY}, "
            "and leave it out here"
        )
    address = address_of(run_directory(run)) if run else os.environ.get(GATEWAY, "")
    if not re.match("https?://", address):
        raise ConfigError(
            f"name a run of this machine, or put the address that headrace gateway shows on the run's machine into the environment variable {GATEWAY}"
        )
    if not command:
        echo(address)
        return 0
    if at_once < 1:
        raise ConfigError(f"--at-once {at_once} plays nothing; choose 1 or more")
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]} is no program that can be run here; install it, or write its whole path")
    import asyncio

    from headrace.episodes.environments.agents.outside_agents import OutsideAgents

    agents = OutsideAgents(address, command, at_once, echo)
    count = asyncio.run(agents.play())
    echo(f"the run is over, or out of reach ({agents.why}); rollouts played here: {count}")
    return 0


def address_of(run_dir: Path) -> str:
    from headrace.episodes.environments.kinds import ADDRESS_FILE

    try:
        return (run_dir / "logs" / ADDRESS_FILE).read_text().strip()
    except FileNotFoundError:
        raise ConfigError(
            f'{run_dir} hands out no rollouts: it does not run, has no environment.kind = "gateway" or "atropos", or has not come to its first rollout; '
            f"headrace status {run_dir} shows what it does"
        ) from None
