"""`headrace rollouts --bus URL`: samples and scores rollouts for a run, wherever it runs (docs/bus.md)."""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace.settings.secrets import read_token


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
