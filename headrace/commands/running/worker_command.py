"""`headrace worker --connect HOST:PORT --token-file FILE --offers engine|trainer|scorer|environment`: offers this machine to a run (docs/cluster.md)."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.settings.secrets import read_token

OFFERS = ("engine", "trainer", "scorer", "environment")


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    from headrace.processes.health import orphans
    from headrace.processes.joining.greeting import ADDRESS, AGAIN, CA, MODEL, PATIENCE, TOKEN, USER_CODE
    from headrace.processes.launch.local import PROGRAM, environment

    if arguments.address and arguments.offers != "trainer":
        raise ConfigError("--address is where a rank of the trainer is reached, and nobody else is; leave it out")
    if arguments.model and arguments.offers in USER_CODE:
        raise ConfigError(f"--model: a worker that offers {arguments.offers} needs no model; leave it out")
    if not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^\s:/]+):[0-9]{1,5}", arguments.connect):
        raise ConfigError(f"--connect {arguments.connect} is not HOST:PORT, such as 10.0.0.5:7400")
    given = {
        TOKEN: read_token(arguments.token_file, "--token-file"),
        CA: arguments.ca,
        MODEL: arguments.model,
        PATIENCE: str(arguments.patience),
        ADDRESS: arguments.address,
        **({AGAIN: "1"} if arguments.again else {}),
    }
    words = [sys.executable, "-m", PROGRAM, arguments.offers, "--join", arguments.connect]
    if not arguments.again:
        os.execve(sys.executable, words, environment(()) | given)
    return _again_and_again(words, environment(()) | orphans.of_this_process() | given)


def _again_and_again(words: list[str], variables: dict[str, str]) -> int:
    """Starts the worker whenever it has ended, so that what libraries hold of a run (process groups, devices) ends with it."""
    from headrace.processes.joining.dial import NOBODY, REFUSED

    while True:
        code = subprocess.call(words, env=variables)
        if code == NOBODY:
            return 0
        if code == REFUSED:
            return code
