"""The command `headrace`. It reads arguments, calls one function of the library and turns errors into one message.

Exit codes: 0 done; 1 the run failed (`status`: it has died; `replay`: a result differs; `diff`: the runs differ); 2 the input cannot
work; 3 the watchdog ended the run (`processes/health/watchdog.py`); 4 the run paused because too many rollouts failed (fix the cause, then
`--resume`); 130 interrupted; 143 ended by SIGTERM (`--resume` goes on).

It uses argparse, because a dozen commands with a few options each need no dependency, and `--help` prints at once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import headrace
from headrace.commands.arguments import (
    INTERRUPTED,
    Commands,
    Parser,
    add_command,
    add_set,
    is_config,
    positive,
    run_directory,
)
from headrace.commands.importing.import_command import add_import
from headrace.commands.installed.installed_commands import add_completion, add_doctor
from headrace.commands.publishing.export_command import add_export
from headrace.commands.replay.replay_command import add_replay
from headrace.commands.running import running_commands
from headrace.commands.running.demo_command import add_demo, add_recipes
from headrace.commands.serving.serving_commands import add_board, add_serve
from headrace.commands.show import show_commands
from headrace.commands.show.show_commands import add_preflight
from headrace.commands.training import train_command
from headrace.commands.training.sweep_command import add_sweep
from headrace.commands.training.train_command import add_init
from headrace.core.errors import ConfigError, HeadraceError, RunPaused
from headrace.core.printing import echo, fitted, guard_streams, say

FAILED, BAD_INPUT, PAUSED = 1, 2, 4


def main(arguments: Sequence[str] | None = None) -> int:
    guard_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    place = given.index("--") if given[:1] == ["gateway"] and "--" in given else len(given)
    parser = front_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks how the line may go on, by the script of `headrace completion`
        import argcomplete

        argcomplete.autocomplete(parser)
    if not given:
        parser.print_help()
        return 0
    parsed, unknown = parser.parse_known_args(given[:place], argparse.Namespace(words=given[place + 1 :]))
    if unknown:
        parsed.parser.refuse(unknown)
    return exit_code(lambda: parsed.command(parsed))


def exit_code(work: Callable[[], int]) -> int:
    """Runs a command. Our own exceptions become one message; any other exception is a bug and keeps its traceback."""
    try:
        return work()
    except ConfigError as error:
        return _complain(error, BAD_INPUT)
    except RunPaused as error:
        return _complain(error, PAUSED)
    except HeadraceError as error:
        return _complain(error, FAILED)
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED


def _complain(error: Exception, code: int) -> int:
    text = "\n".join([str(error) or type(error).__name__, *getattr(error, "__notes__", [])])
    echo("\n".join(line for paragraph in text.splitlines() for line in fitted(f"headrace: {paragraph}")), err=True)
    return code


# --- arguments --------------------------------------------------------------------------------------------------------


GROUPS = {
    "Begin": ("demo", "init", "import", "recipes", "doctor"),
    "Train": ("train", "sweep", "eval", "export", "preflight", "plan"),
    "Look at runs": ("board", "status", "ls", "report", "compare"),
    "Find out why": ("inspect", "replay", "diff"),
    "Serve and join": ("serve", "worker", "rollouts", "gateway", "pool"),
    "Your shell": ("completion",),
}
"""The commands in the order of `headrace --help`."""


class _Front(Parser):
    """The parser of the whole line, whose help shows the commands by what they are for."""

    def format_help(self) -> str:
        (commands,) = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        summaries = {action.dest: action.help or "" for action in commands._choices_actions}
        width = shutil.get_terminal_size().columns
        lines = [
            self.description or "",
            "",
            "usage: headrace COMMAND ...      headrace COMMAND --help shows its options",
        ]
        for title, names in GROUPS.items():
            lines += ["", title]
            for name in names:
                summary = f"  {name:<12}{summaries[name]}"
                lines += textwrap.wrap(summary, width, subsequent_indent=" " * 14, break_on_hyphens=False)
        lines += ["", *EXAMPLES, ""]
        return "\n".join(lines)


EXAMPLES = (
    "First:      headrace demo",
    "Your data:  headrace init mine.toml, then headrace train mine.toml --board",
)


def front_parser() -> Parser:
    """Imports no work: `--help` prints at once."""
    parser = _Front(prog="headrace", description="Asynchronous reinforcement learning for language models.")
    parser.add_argument("--version", action="version", version=f"headrace {headrace.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    add_init(commands)
    add_import(commands)
    train_command.add_train(commands)
    add_sweep(commands)
    add_demo(commands, train_command.train_line)
    add_recipes(commands)
    train_command.add_eval(commands)
    add_preflight(commands)
    show_commands.add_ls(commands)
    show_commands.add_report(commands)
    add_board(commands)
    show_commands.add_status(commands)
    add_replay(commands)
    show_commands.add_inspect(commands)
    show_commands.add_diff(commands)
    show_commands.add_compare(commands)
    add_export(commands)
    _add_plan(commands)
    add_serve(commands)
    running_commands.add_pool(commands)
    running_commands.add_gateway(commands)
    running_commands.add_worker(commands)
    running_commands.add_rollouts(commands)
    add_doctor(commands)
    add_completion(commands)
    return parser


def _add_plan(commands: Commands) -> None:
    parser = add_command(
        commands, "plan", _plan, "predict a run's throughput, idle time, lag and cost, by simulating it"
    )
    parser.add_argument("source", metavar="CONFIG.toml|RUN", help="a config, or a run whose metrics give the rates")
    parser.add_argument("--calibrate", action="store_true", help="measure this machine's rates first (a minute or two)")
    parser.add_argument(
        "--hardware", default="", metavar="NAME", help="h100, h200, a100: computed rates; cpu:FILE: measured ones"
    )
    parser.add_argument("--model", default="", metavar="SIZE", help="for computed rates: 7b, 32b, 30b-a3b, ...")
    parser.add_argument("--gpus", type=positive, default=8, metavar="N", help="of both pools (default: %(default)s)")
    parser.add_argument(
        "--trainer-gpus", type=positive, default=0, metavar="N", help="of the trainer (default: half of --gpus)"
    )
    parser.add_argument(
        "--steps", type=positive, default=20, metavar="N", help="simulated steps (default: %(default)s)"
    )
    parser.add_argument(
        "--lengths", default="", metavar="D", help="completion lengths: 800, lognormal:mean=4000,sigma=0.8, ..."
    )
    parser.add_argument("--prompts", default="", metavar="D", help="prompt lengths")
    parser.add_argument(
        "--reward-seconds", default="", metavar="D", help="seconds that the reward of one rollout takes"
    )
    parser.add_argument(
        "--network", type=float, default=40.0, metavar="GB/S", help="to an engine (default: %(default)g)"
    )
    parser.add_argument("--turns", default="", metavar="D", help="turns of a rollout, where it may have several")
    parser.add_argument("--tool-seconds", default="", metavar="D", help="seconds between two turns")
    parser.add_argument("--result-tokens", default="", metavar="D", help="tokens between two turns")
    parser.add_argument("--price", type=float, default=0.0, metavar="X", help="price of one GPU for one hour")
    parser.add_argument("--sweep", action="store_true", help="try other splits and depths, and recommend")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--picture", type=Path, metavar="FILE.html", help="draw the schedule")
    add_set(parser)


def _plan(arguments: argparse.Namespace) -> int:
    from headrace.commands.plan.answer import PlanRequest, config_for
    from headrace.commands.plan.command import print_plan

    run_dir = None if is_config(arguments.source) else run_directory(arguments.source)
    chip, _, file = arguments.hardware.partition(":")
    if chip == "cpu" and not file:
        raise ConfigError("--hardware cpu:FILE names a file of measured rates; --calibrate writes one")
    request = PlanRequest(
        config=config_for(arguments.source, run_dir, arguments.set),
        run=run_dir if chip != "cpu" else None,
        calibrate=arguments.calibrate,
        rates=Path(file) if file else None,
        hardware="" if file else chip,
        model=arguments.model,
        gpus=arguments.gpus,
        trainer_gpus=arguments.trainer_gpus,
        steps=arguments.steps,
        lengths=arguments.lengths,
        prompts=arguments.prompts,
        latency=arguments.reward_seconds,
        turns=arguments.turns,
        tools=arguments.tool_seconds,
        results=arguments.result_tokens,
        sweep=arguments.sweep,
        network=arguments.network * 1e9,
    )
    return print_plan(request, arguments.price, arguments.json, arguments.picture)
