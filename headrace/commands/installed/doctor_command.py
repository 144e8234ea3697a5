"""The arguments of `headrace doctor`."""

from __future__ import annotations

import argparse

from headrace.commands.arguments import Commands, add_command, add_set
from headrace.core.errors import ConfigError


def add_doctor(commands: Commands) -> None:
    parser = add_command(commands, "doctor", _doctor, "what is installed, what would run where, and what is missing")
    parser.add_argument("--full", action="store_true", help="also read cached models and compare their checksums")
    parser.add_argument(
        "--python", action="append", default=[], metavar="PYTHON", help="look for engines and verifiers in it too"
    )
    parser.add_argument(
        "--cluster", metavar="CONFIG", help="instead: can every machine of this run's cluster serve it?"
    )
    add_set(parser)
    parser.add_argument(
        "--parity", metavar="MODEL", help="instead: do engine and trainer compute the same log-probs of this model?"
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        action="extend",
        choices=("bfloat16", "float32"),
        help="the dtypes of --parity (default: both)",
    )


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.parity:
        from headrace.commands.installed import parity

        return parity.report(arguments.parity, arguments.dtype or parity.DTYPES)
    if arguments.dtype:
        raise ConfigError("--dtype says in what headrace doctor --parity MODEL computes; name the model")
    if arguments.cluster:
        from headrace.commands.installed.cluster_check import examine_cluster
        from headrace.run.config import load_config

        return examine_cluster(load_config(arguments.cluster, arguments.set))
    if arguments.set:
        raise ConfigError("--set changes the config of headrace doctor --cluster CONFIG; name it")
    from headrace.commands.installed.doctor import examine

    return examine(full=arguments.full, pythons=arguments.python)
