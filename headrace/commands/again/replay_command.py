"""The arguments of `headrace replay`."""

from __future__ import annotations

import argparse

from headrace.commands.finding import run_directory
from headrace.commands.options import Commands, add_command, add_run, positive


def add_replay(commands: Commands) -> None:
    one = add_command(commands, "replay", _replay, "do training steps of a run again and compare them, bit for bit")
    add_run(one)
    one.add_argument("--step", type=positive, metavar="N", required=True, help="the step, counted from 1")
    one.add_argument("--to", type=positive, metavar="M", help="the last of several (default: the same)")


def _replay(arguments: argparse.Namespace) -> int:
    from headrace.commands.again.replay import replay

    return replay(run_directory(arguments.run), arguments.step, arguments.to)
