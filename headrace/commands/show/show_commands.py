"""The arguments of `headrace ls`, `report`, `status`, `inspect`, `diff` and `compare`; and `headrace preflight MODEL`: do the files of a model agree,
and what do the model and the reward see of a row?
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from headrace.commands.arguments import Commands, add_command, add_run, positive, run_directory
from headrace.core.printing import echo, say


def add_ls(commands: Commands) -> None:
    parser = add_command(commands, "ls", _ls, "the runs of a directory: state, verdict, step, last reward, cost")
    parser.add_argument(
        "directory", nargs="?", type=Path, default=Path("runs"), metavar="RUNS_DIR", help="default: %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def _ls(arguments: argparse.Namespace) -> int:
    from headrace.commands.show.compare import list_runs

    return list_runs(arguments.directory, arguments.json)


def add_compare(commands: Commands) -> None:
    summary = "runs side by side: the settings that differ, the last numbers, the curves"
    parser = add_command(commands, "compare", _compare, summary)
    add_run(parser, "runs", nargs="+")
    parser.add_argument("--html", type=Path, metavar="FILE.html", help="write a page with charts instead")


def _compare(arguments: argparse.Namespace) -> int:
    from headrace.commands.show.compare import compare

    return compare([run_directory(run) for run in arguments.runs], arguments.html)


def add_report(commands: Commands) -> None:
    add_run(add_command(commands, "report", _report, "write a run's report.html again, also while it is running"))


def _report(arguments: argparse.Namespace) -> int:
    from headrace.commands.show.status import status_of
    from headrace.run.pieces import pieces_of
    from headrace.views.report import write_report

    run_dir = run_directory(arguments.run)
    echo(write_report(run_dir, pieces_of(run_dir), status_of(run_dir)))
    return 0


def add_status(commands: Commands) -> None:
    parser = add_command(commands, "status", _status, "whether a run is alive, what it does and what it waits for")
    add_run(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--watch", action="store_true", help="update every 2 seconds until the run has ended")
    how.add_argument("--json", action="store_true", help="for programs")
    how.add_argument("--stacks", action="store_true", help="print the stacks of all its processes (SIGUSR1)")


def _status(arguments: argparse.Namespace) -> int:
    from headrace.commands.show import status

    run_dir = run_directory(arguments.run)
    if arguments.stacks:
        return status.ask_for_stacks(run_dir)
    return status.report(run_dir, arguments.watch, arguments.json)


def add_inspect(commands: Commands) -> None:
    summary = "rollouts of a step, token by token: versions, rewards, masks, log-probs"
    parser = add_command(commands, "inspect", _inspect, summary)
    add_run(parser)
    parser.add_argument("--step", type=positive, metavar="N", help="the step, counted from 1 (default: the last)")
    parser.add_argument("--ticket", type=int, metavar="T", help="one group, by its ticket")
    parser.add_argument("--worst", type=positive, metavar="K", default=3, help="number of rollouts shown token by token: those "
                     "with the lowest rewards, or the largest differences (default: %(default)s)")  # fmt: skip
    parser.add_argument(
        "--rescore", action="store_true", help="compute the log-probs of the trainer at that step (starts it)"
    )
    parser.add_argument("--tokens", action="store_true", help="show all numbers of these tokens, one per line")
    parser.add_argument("--json", action="store_true", help="for programs: all of it")
    parser.add_argument("--records", action="store_true", help="the records of the journal as they are, one line of JSON each: "
                     "all, or those of --step and --ticket")  # fmt: skip


def _inspect(arguments: argparse.Namespace) -> int:
    from headrace.commands.show.inspect import inspect, print_records

    run, options = run_directory(arguments.run), arguments
    if options.records:
        return print_records(run, options.step, options.ticket)
    how = {"rescore": options.rescore, "as_json": options.json, "tokens": options.tokens}
    return inspect(run, options.step, ticket=options.ticket, worst=options.worst, **how)


def add_diff(commands: Commands) -> None:
    parser = add_command(commands, "diff", _diff, "the first differences of two runs: step, group and token")
    add_run(parser, "one", metavar="RUN_A")
    add_run(parser, "other", metavar="RUN_B")


def _diff(arguments: argparse.Namespace) -> int:
    from headrace.commands.show.diff import report

    return report(run_directory(arguments.one), run_directory(arguments.other))


REFUSED = 2


def add_preflight(commands: Commands) -> None:
    summary = "prove that a model's files agree, and show what the model and the reward see of a row"
    parser = add_command(commands, "preflight", _preflight, summary)
    parser.add_argument(
        "model", metavar="MODEL", help="a directory, a known model, or a repository of the Hugging Face hub"
    )
    parser.add_argument("--rows", metavar="FILE", default="", help="rows of a task; the first one is shown")
    parser.add_argument(
        "--reward", metavar="F", default="", help="a reward function: path/to/file.py:name, or a built-in one"
    )
    parser.add_argument("--lora", action="store_true", help="also check that adapters reach the model, and are served")


def _preflight(arguments: argparse.Namespace) -> int:
    import asyncio

    from headrace.episodes.tasks.read import kind_of
    from headrace.models.tokenizer import ANSWER, QUESTION
    from headrace.run.python_inputs import with_python_inputs
    from headrace.run.rehearse import try_files
    from headrace.views.screen.console import Console
    from headrace.views.screen.preflight_view import show_preflight

    settings: dict[str, Any] = {"name": "preflight", "model": {"path": arguments.model}, "eval": {"prompts": 0}}
    settings |= {"reward": {"function": arguments.reward}} if arguments.reward else {}
    settings |= {"lora": {"rank": 16}} if arguments.lora else {}
    rows = None if arguments.rows else [{"prompt": QUESTION, "answer": ANSWER}]
    settings["task"] = {"held_out": 0}
    if arguments.rows:
        settings["task"] |= {"kind": kind_of(arguments.rows), "path": arguments.rows}
    found = asyncio.run(try_files(*with_python_inputs(settings, dataset=rows)))
    texts = {finding.text for finding in found.findings}
    for problem in found.problems:
        if not any(problem.endswith(text) for text in texts):
            say(problem)
    if found.findings:
        show_preflight(Console(), found.findings, found.sight)
    return REFUSED if found.problems else 0
