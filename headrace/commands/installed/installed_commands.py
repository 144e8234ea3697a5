"""The arguments of `headrace doctor`, and `headrace completion SHELL`: the script with which a shell completes commands, flags, runs, settings and files."""

from __future__ import annotations

import argparse

from headrace.commands.arguments import Commands, add_command, add_set
from headrace.core.errors import ConfigError
from headrace.core.printing import echo


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


HOW = {
    "bash": '  echo "source <(headrace completion bash)" >> ~/.bashrc',
    "zsh": '  echo "source <(headrace completion zsh)" >> ~/.zshrc      (below the line with compinit)',
    "fish": "  headrace completion fish > ~/.config/fish/completions/headrace.fish",
}


def add_completion(commands: Commands) -> None:
    parser = add_command(commands, "completion", _completion, "a script that lets bash, zsh or fish complete a line")
    parser.add_argument("shell", choices=tuple(HOW), metavar="SHELL", help=" or ".join(HOW))
    parser.epilog = "\n".join(["to have it in every new shell:", *HOW.values()])
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def _completion(arguments: argparse.Namespace) -> int:
    import argcomplete

    echo(argcomplete.shellcode(["headrace"], shell=arguments.shell))
    return 0
