"""The arguments of `headrace replay`."""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path

from headrace.commands.arguments import Commands, add_command, add_run, positive, run_directory
from headrace.core.errors import ConfigError


def add_replay(commands: Commands) -> None:
    summary = "do training steps of a run, or the step of a bundle, again and compare them"
    parser = add_command(commands, "replay", _replay, summary)
    add_run(parser, metavar="RUN|FILE")
    parser.add_argument("--step", type=positive, metavar="N", help="the step, counted from 1; a bundle has one")
    parser.add_argument("--to", type=positive, metavar="M", help="the last of several (default: the same)")
    parser.add_argument(
        "--export", type=Path, metavar="FILE", help="pack the step into a bundle, to be done again elsewhere"
    )
    parser.add_argument(
        "--include",
        nargs="+",
        action="extend",
        default=[],
        choices=("code", "adapter", "weights"),
        help="pack with it: your functions' source, or the state that the trainer had before the step",
    )
    parser.add_argument("--model", default="", metavar="MODEL", help="of a bundle: the base model on this machine")
    parser.add_argument("--trust", action="store_true", help="of a bundle: run the code in it, which you have read")


def _replay(arguments: argparse.Namespace) -> int:
    options = arguments
    if Path(options.run).is_file() and (zipfile.is_zipfile(options.run) or not options.step):
        if options.step or options.to or options.export or options.include:
            raise ConfigError(f"{options.run} is a bundle of one step: leave out --step, --to, --export and --include")
        from headrace.commands.replay.bundle_replay import replay_bundle

        return replay_bundle(Path(options.run), options.model, options.trust)
    if options.model or options.trust:
        raise ConfigError(
            f"{options.run} is not a bundle: --model and --trust belong to a file of headrace replay RUN --export FILE"
        )
    run_dir = run_directory(options.run)
    if not options.step:
        raise ConfigError("--step N says which step of the run is done again")
    if options.export:
        if options.to:
            raise ConfigError("a bundle holds one step: leave out --to")
        from headrace.commands.replay.bundle import export_bundle

        return export_bundle(run_dir, options.step, options.export, options.include)
    if options.include:
        raise ConfigError("--include says what a bundle holds: name its file with --export FILE")
    from headrace.commands.replay.replay import replay

    return replay(run_dir, options.step, options.to)
