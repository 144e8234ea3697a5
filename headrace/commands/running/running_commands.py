"""Questions to a run that is under way, and processes that join it: `headrace pool` (the members of its fleet), `gateway` (the rollouts that it hands
out), `worker` (a process that joins it, docs/cluster.md) and `rollouts` (a rollout host, docs/bus.md).

The address of a gateway holds a secret, so it is never an argument: every user of the machine can read those.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.commands.arguments import Commands, add_command, run_directory
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.printing import echo
from headrace.settings.secrets import GATEWAY, read_token


def add_gateway(commands: Commands) -> None:
    parser = add_command(
        commands, "gateway", gateway, "where a run hands out rollouts to agents, and a command that plays them"
    )
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
        raise ConfigError(f"{command[0]} is not a program that can be run here; install it, or write its whole path")
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


ANSWERS = 120.0
"""Seconds in which a run answers. One that adds a server waits until that answers, or for engine.patience."""


def add_pool(commands: Commands) -> None:
    parser = add_command(commands, "pool", pool, "the engines of a running run: show them, add one, remove one")
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
        raise ConfigError(f"{member} is not the address of a server; write it as http://HOST:PORT")
    answer = ask(run_dir, PoolQuestion(change, member), ANSWERS)  # type: ignore[arg-type]
    console = Console(soft_wrap=True)
    for line in table(answer.members):
        console.print(line)
    if answer.error:
        raise HeadraceError(answer.error)
    return 0


OFFERS = ("engine", "trainer", "scorer", "environment")


def add_worker(commands: Commands) -> None:
    parser = add_command(commands, "worker", worker, "offer this machine's process to a run, wherever it runs")
    parser.add_argument(
        "--connect", required=True, metavar="HOST:PORT", help="where the run listens (orchestration.listen)"
    )
    parser.add_argument("--token-file", required=True, type=Path, metavar="FILE", help="holds the run's token")
    parser.add_argument(
        "--offers",
        required=True,
        choices=OFFERS,
        help="what this process would be: an engine, a rank of the trainer, or the machine of reward functions or of environments",
    )
    parser.add_argument(
        "--model", default="", metavar="DIR", help="the run's model on this machine; weights need not be there"
    )
    parser.add_argument(
        "--engine-python",
        default="",
        metavar="FILE",
        help="the interpreter on this machine that has the engine's server (default: engine.python of the run)",
    )
    parser.add_argument(
        "--ca", default="", metavar="FILE", help="the certificate that the run's is checked with: use TLS"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to try to reach the run (default: %(default)g)",
    )
    parser.add_argument(
        "--again", action="store_true", help="when a run ends, offer itself to the next one, for --patience seconds"
    )
    parser.add_argument(
        "--address",
        default="",
        metavar="ADDRESS",
        help="of this machine, at which other ranks and engines reach this one (default: that of its connection to the run)",
    )


def worker(arguments: argparse.Namespace) -> int:
    """Becomes the worker: the process keeps its id, unless it is to offer itself again. Raises ConfigError."""
    from headrace.processes.health import family
    from headrace.processes.joining.greeting import (
        ADDRESS,
        AGAIN,
        CA,
        ENGINE_PYTHON,
        MODEL,
        PATIENCE,
        TOKEN,
        USER_CODE,
    )
    from headrace.processes.launch.local import PROGRAM, environment

    if arguments.address and arguments.offers != "trainer":
        raise ConfigError("--address is where a rank of the trainer is reached, and nobody else is; leave it out")
    if arguments.model and arguments.offers in USER_CODE:
        raise ConfigError(f"--model: a worker that offers {arguments.offers} needs no model; leave it out")
    if arguments.engine_python and arguments.offers != "engine":
        raise ConfigError("--engine-python is where an engine's server is installed; leave it out")
    port = re.fullmatch(r"(?:\[[0-9a-fA-F:]+\]|[^\s:/]+):([0-9]{1,5})", arguments.connect)
    if not port or int(port[1]) > 65535:
        raise ConfigError(f"--connect {arguments.connect} is not HOST:PORT, such as 10.0.0.5:7400")
    given = {
        TOKEN: read_token(arguments.token_file, "--token-file"),
        CA: arguments.ca,
        MODEL: arguments.model,
        PATIENCE: str(arguments.patience),
        ADDRESS: arguments.address,
        **({AGAIN: "1"} if arguments.again else {}),
        **({ENGINE_PYTHON: arguments.engine_python} if arguments.engine_python else {}),
    }
    words = [sys.executable, "-m", PROGRAM, arguments.offers, "--join", arguments.connect]
    if not arguments.again:
        os.execve(sys.executable, words, environment(()) | given)
    return _again_and_again(words, environment(()) | family.parent_variables() | given)


def _again_and_again(words: list[str], variables: dict[str, str]) -> int:
    """Starts the worker whenever it has ended, so that what libraries hold of a run (process groups, devices) ends with it."""
    from headrace.processes.joining.dial import NOBODY, REFUSED

    while True:
        code = subprocess.call(words, env=variables)
        if code == NOBODY:
            return 0
        if code == REFUSED:
            return code


def add_rollouts(commands: Commands) -> None:
    parser = add_command(commands, "rollouts", rollouts, "a rollout host: sample and score for a run, over a bus")
    parser.add_argument(
        "--bus", required=True, metavar="URL", help="redis://HOST:PORT or jsonl:DIRECTORY, as the run has it"
    )
    parser.add_argument("--run", default="", metavar="NAME", help="which run, if the bus has several")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="holds the password of the Redis server")
    parser.add_argument(
        "--model", default="", metavar="DIR", help="the run's model on this machine; weights need not be there"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SETTING=VALUE",
        help="a setting of this host on top of the run's, such as engine.threads=4 (may be repeated)",
    )
    parser.add_argument(
        "--groups", type=int, default=0, metavar="N", help="groups in hand at most (default: a share of the run's)"
    )
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep what worker processes print in there")
    parser.add_argument(
        "--patience",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds without a sign of the run, until this host leaves (default: %(default)g)",
    )
    parser.add_argument(
        "--drain",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds after SIGTERM for groups in hand; others are given back (default: %(default)g)",
    )


def rollouts(arguments: argparse.Namespace) -> int:
    """Raises HeadraceError with what ends it, unless the run is over or SIGTERM was sent."""
    from headrace.run.hosts.rollout_host import HostPatience
    from headrace.run.rollout_hosting import Hosting, serve_rollouts

    serve_rollouts(
        Hosting(
            bus=arguments.bus,
            run=arguments.run,
            password=read_token(arguments.token_file, "--token-file") if arguments.token_file else "",
            model=arguments.model,
            sets=arguments.set,
            most=max(0, arguments.groups),
            logs=arguments.logs,
            patience=HostPatience(run=arguments.patience, drain=arguments.drain),
        )
    )
    return 0
