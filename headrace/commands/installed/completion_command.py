"""`headrace completion SHELL`: prints the script with which a shell completes commands, flags, runs, settings and files."""

from __future__ import annotations

import argparse

from headrace.commands.arguments import Commands, add_command
from headrace.core.printing import echo

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
