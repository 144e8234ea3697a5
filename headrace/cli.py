"""The command `headrace`. It reads arguments, calls one function of the library and turns errors into one message.

Exit codes: 0 done; 1 the run failed (`status`: it has died; `replay`: a result differs; `diff`: the runs differ); 2 the input cannot
work; 3 the watchdog ended the run (`observe/health/watchdog.py`); 4 the run paused because too many rollouts failed (fix the cause, then
`--resume`); 130 interrupted.

It uses argparse, because a dozen commands with a few options each need no dependency, and `--help` prints at once.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import headrace
from headrace.commands import board_command as boarding
from headrace.commands import serve as serving
from headrace.commands.finding import is_config, run_directory
from headrace.commands.running import demo_command as starting
from headrace.commands.running import gateway_command as handing
from headrace.commands.running import pool_command as pooling
from headrace.commands.running import worker_command as working
from headrace.errors import ConfigError, HeadraceError, RunPaused

if TYPE_CHECKING:
    from headrace.config import RunConfig

FAILED, BAD_INPUT, PAUSED, INTERRUPTED = 1, 2, 4, 130


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    place = given.index("--") if given[:1] == ["gateway"] and "--" in given else len(given)
    parsed = _parser().parse_args(given[:place], argparse.Namespace(words=given[place + 1 :]))
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
        print("headrace: interrupted", file=sys.stderr)
        return INTERRUPTED


def _complain(error: Exception, code: int) -> int:
    text = "\n".join([str(error) or type(error).__name__, *getattr(error, "__notes__", [])])
    print("\n".join(line for one in text.splitlines() for line in _fitted(f"headrace: {one}")), file=sys.stderr)
    return code


def _fitted(line: str) -> list[str]:
    """The line, wrapped for a terminal. For a file or a pipe it stays whole, so that it can be searched."""
    if not sys.stderr.isatty():
        return [line]
    width = shutil.get_terminal_size().columns
    indent = " " * len("headrace: ")
    lines = textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return lines or [line]


# --- commands --------------------------------------------------------------------------------------------------------


def train(arguments: argparse.Namespace) -> int:
    run_dir = run_directory(arguments.resume) if arguments.resume else None
    config = _config(arguments.config, run_dir, _sets(arguments))
    if arguments.dry_run:
        return _rehearse(config, run_dir)
    from headrace.orchestration.runs import run

    with boarding.beside((run_dir or config.run_dir).parent, arguments.board):
        result = run.train(config, resume=run_dir)
    return INTERRUPTED if result.reason == "interrupted" else 0


def _rehearse(config: RunConfig, run_dir: Path | None) -> int:
    """Prints every setting as TOML, then the result of the rehearsal, which loads no model."""
    import asyncio

    from headrace.config import dump_config
    from headrace.orchestration.runs.rehearse import rehearse

    done = asyncio.run(rehearse(config, resume=run_dir, thorough=True))
    print(f"{dump_config(done.config)}\n{done.page()}")
    return 0


def evaluate(arguments: argparse.Namespace) -> int:
    from headrace.observe.diagnosis.troubles import measured_on
    from headrace.orchestration.runs import one_shot

    named = is_config(arguments.source)
    run_dir = None if named else run_directory(arguments.source)
    config = _config(arguments.source if named else None, run_dir, arguments.set)
    measured = one_shot.evaluate(config, run_dir, arguments.prompts, arguments.step)
    which = f"step {measured.step} of {run_dir}" if run_dir else "the untrained model"
    print(
        f"{which}: reward {measured.reward_mean:.4f} ± {measured.reward_sem:.4f} over {measured_on(measured)}, all held out; "
        f"mean length {measured.length_mean:.1f} tokens, {measured.seconds:.1f} s"
    )
    return 0


def report(arguments: argparse.Namespace) -> int:
    from headrace.observe.report import write_report
    from headrace.orchestration.runs.pieces import pieces_of

    run_dir = run_directory(arguments.run)
    print(write_report(run_dir, pieces_of(run_dir)))
    return 0


def status(arguments: argparse.Namespace) -> int:
    from headrace.commands import status

    run_dir = run_directory(arguments.run)
    if arguments.stacks:
        return status.ask_for_stacks(run_dir)
    return status.report(run_dir, arguments.watch, arguments.json)


def replay(arguments: argparse.Namespace) -> int:
    from headrace.commands import replay

    return replay.replay(run_directory(arguments.run), arguments.step, arguments.to)


def inspect(arguments: argparse.Namespace) -> int:
    from headrace.commands import inspect

    run, one = run_directory(arguments.run), arguments
    how = {"rescore": one.rescore, "as_json": one.json, "tokens": one.tokens}
    return inspect.inspect(run, one.step, ticket=one.ticket, worst=one.worst, **how)


def diff(arguments: argparse.Namespace) -> int:
    from headrace.commands.diff_view import report

    return report(run_directory(arguments.one), run_directory(arguments.other))


def export(arguments: argparse.Namespace) -> int:
    checkpoint = headrace.export(
        run_directory(arguments.run), arguments.to, arguments.dtype, merge=arguments.merge, step=arguments.step
    )
    adapter = (Path(arguments.to) / "adapter_config.json").exists()
    reader = "peft.AutoPeftModelForCausalLM" if adapter else "transformers.AutoModelForCausalLM"
    print(f"{arguments.to}: {checkpoint.name}, for {reader}.from_pretrained")
    return 0


def plan(arguments: argparse.Namespace) -> int:
    from headrace.plan.answer import PlanRequest, config_for
    from headrace.plan.command import print_plan

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


def doctor(arguments: argparse.Namespace) -> int:
    if arguments.parity:
        from headrace.commands import parity_table

        return parity_table.report(arguments.parity, arguments.dtype or parity_table.DTYPES)
    if arguments.dtype:
        raise ConfigError("--dtype says in what headrace doctor --parity MODEL computes; name the model")
    from headrace.commands.doctor import examine

    return examine(full=arguments.full, pythons=arguments.python)


# --- arguments -------------------------------------------------------------------------------------------------------


def _config(file: str | None, run_dir: Path | None, sets: Sequence[str]) -> RunConfig:
    """The named config, or the config of the run."""
    from headrace.config import adapter_runs, config_of_run, load_config
    from headrace.orchestration.choosing import resumed_settings
    from headrace.orchestration.python_inputs import refuse_python_inputs

    source = file or (run_dir and config_of_run(run_dir))
    if not source:
        raise ConfigError("name a config: headrace train CONFIG.toml (or --resume RUN to resume a run)")
    if file and (Path(file) / "config.toml").is_file():
        raise ConfigError(
            f"{file} is the directory of a run, not a config; resume it with: headrace train --resume {file}"
        )
    config = load_config(resumed_settings(file, run_dir) if file and run_dir else source, sets)
    for run in adapter_runs(config) or (config,):
        refuse_python_inputs(run)
        # A command takes no function, unlike `headrace.train`.
        if not (run.reward.given or run.teachers or run.environment.rewards):
            raise ConfigError(
                'nothing gives rewards: set reward.function = "path/to/file.py:name" (or "reasoning_gym"); functions that were '
                "passed from Python are not in the config"
            )
    return config


def _sets(arguments: argparse.Namespace) -> list[str]:
    return [*arguments.set, *([f'name="{arguments.name}"'] if arguments.name else [])]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headrace", description="Asynchronous reinforcement learning for language models."
    )
    parser.add_argument("--version", action="version", version=f"headrace {headrace.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_train(commands)
    starting.add_demo_arguments(_command(commands, "demo", starting.demo(train), starting.DEMO_IS))
    starting.add_recipes_arguments(_command(commands, "recipes", starting.recipes, starting.RECIPES_ARE))
    _add_eval(commands)
    one = _command(commands, "report", report, "write a run's report.html again, also while it is running")
    one.add_argument("run", metavar="RUN", help="directory of the run, or its name under runs/")
    boarding.add_arguments(_command(commands, "board", boarding.board, "a live page of all runs, in the browser"))
    _add_status(commands)
    _add_replay(commands)
    _add_inspect(commands)
    one = _command(commands, "diff", diff, "the first differences of two runs: step, group and token")
    one.add_argument("one", metavar="RUN_A", help="directory of a run, or its name under runs/")
    one.add_argument("other", metavar="RUN_B", help="the other run")
    one = _command(commands, "export", export, "save a run's model as a directory that transformers loads")
    one.add_argument("run", metavar="RUN", help="directory of the run, or its name under runs/")
    one.add_argument("--to", required=True, metavar="DIR", help="where to save it; must not exist or be empty")
    one.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: %(default)s")
    _add_step(one)
    one.add_argument(
        "--merge", action="store_true", help="of LoRA: a whole model with the adapter in its weights, added in float32"
    )
    _add_plan(commands)
    served = "the native engine behind HTTP, and new weights into it"
    serving.add_arguments(_command(commands, "serve", serving.serve, served))
    pooled = "the engines of a running run: show them, add one, remove one"
    pooling.add_arguments(_command(commands, "pool", pooling.pool, pooled))
    handed = "where a run hands out rollouts to agents, and a command that plays them"
    handing.add_arguments(_command(commands, "gateway", handing.gateway, handed))
    offered = "offer this machine's process to a run, wherever it runs"
    working.add_arguments(_command(commands, "worker", working.worker, offered))
    one = _command(commands, "doctor", doctor, "what is installed, what would run where, and what is missing")
    one.add_argument("--full", action="store_true", help="also read cached models and compare their checksums")
    one.add_argument(
        "--python", action="append", default=[], metavar="PYTHON", help="look for engines and verifiers in it too"
    )
    one.add_argument(
        "--parity", metavar="MODEL", help="instead: do engine and trainer compute the same log-probs of this model?"
    )
    one.add_argument(
        "--dtype", nargs="+", choices=("bfloat16", "float32"), help="the dtypes of --parity (default: both)"
    )
    return parser


def _add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    one = _command(commands, "train", train, "train a model")
    one.add_argument("config", nargs="?", metavar="CONFIG.toml", help="may be left out with --resume")
    _add_set(one)
    one.add_argument("--name", help="the run's directory under out/ (default: the config's, or its file's name)")
    one.add_argument("--resume", metavar="RUN", help="resume this run from its last checkpoint")
    how = one.add_mutually_exclusive_group()
    how.add_argument(
        "--dry-run",
        action="store_true",
        help="a rehearsal: check files, columns, lengths, devices and memory, call the reward once, print all settings; load no model",
    )
    how.add_argument("--board", action="store_true", help="show the run in the browser while it trains")


def _add_eval(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    one = _command(commands, "eval", evaluate, "measure the reward on held-out prompts")
    one.add_argument("source", metavar="CONFIG.toml|RUN", help="a config (its untrained model) or a run (its last one)")
    one.add_argument("--prompts", type=_positive, metavar="N", help="held-out prompts (default: eval.prompts)")
    _add_step(one)
    _add_set(one)


def _add_status(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    one = _command(commands, "status", status, "whether a run is alive, what it does and what it waits for")
    one.add_argument("run", metavar="RUN", help="directory of the run, or its name under runs/")
    how = one.add_mutually_exclusive_group()
    how.add_argument("--watch", action="store_true", help="update every 2 seconds until the run has ended")
    how.add_argument("--json", action="store_true", help="for programs")
    how.add_argument("--stacks", action="store_true", help="print the stacks of all its processes (SIGUSR1)")


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    one = _command(commands, "plan", plan, "predict a run's throughput, idle time, lag and cost, by simulating it")
    one.add_argument("source", metavar="CONFIG.toml|RUN", help="a config, or a run whose metrics give the rates")
    one.add_argument("--calibrate", action="store_true", help="measure this machine's rates first (a minute or two)")
    one.add_argument(
        "--hardware", default="", metavar="NAME", help="h100, h200, a100: computed rates; cpu:FILE: measured ones"
    )
    one.add_argument("--model", default="", metavar="SIZE", help="for computed rates: 7b, 32b, 30b-a3b, ...")
    one.add_argument("--gpus", type=_positive, default=8, metavar="N", help="of both pools (default: %(default)s)")
    one.add_argument(
        "--trainer-gpus", type=_positive, default=0, metavar="N", help="of the trainer (default: half of --gpus)"
    )
    one.add_argument("--steps", type=_positive, default=20, metavar="N", help="simulated steps (default: %(default)s)")
    one.add_argument(
        "--lengths", default="", metavar="D", help="completion lengths: 800, lognormal:mean=4000,sigma=0.8, ..."
    )
    one.add_argument("--prompts", default="", metavar="D", help="prompt lengths")
    one.add_argument("--reward-seconds", default="", metavar="D", help="seconds that the reward of one rollout takes")
    one.add_argument("--network", type=float, default=40.0, metavar="GB/S", help="to an engine (default: %(default)g)")
    one.add_argument("--turns", default="", metavar="D", help="turns of a rollout, where it may have several")
    one.add_argument("--tool-seconds", default="", metavar="D", help="seconds between two turns")
    one.add_argument("--result-tokens", default="", metavar="D", help="tokens between two turns")
    one.add_argument("--price", type=float, default=0.0, metavar="X", help="price of one GPU for one hour")
    one.add_argument("--sweep", action="store_true", help="try other splits and depths, and recommend")
    one.add_argument("--json", action="store_true", help="print everything as JSON")
    one.add_argument("--picture", type=Path, metavar="FILE.html", help="draw the schedule")
    _add_set(one)


def _add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    one = _command(commands, "replay", replay, "do training steps of a run again and compare them, bit for bit")
    one.add_argument("run", metavar="RUN", help="directory of the run, or its name under runs/")
    one.add_argument("--step", type=_positive, metavar="N", required=True, help="the step, counted from 1")
    one.add_argument("--to", type=_positive, metavar="M", help="the last of several (default: the same)")


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    one = _command(
        commands, "inspect", inspect, "rollouts of a step, token by token: versions, rewards, masks, log-probs"
    )
    one.add_argument("run", metavar="RUN", help="directory of the run, or its name under runs/")
    one.add_argument("--step", type=_positive, metavar="N", help="the step, counted from 1 (default: the last)")
    one.add_argument("--ticket", type=int, metavar="T", help="one group, by its ticket")
    one.add_argument("--worst", type=_positive, metavar="K", default=3, help="number of rollouts shown token by token: those "
                     "with the lowest rewards, or the largest differences (default: %(default)s)")  # fmt: skip
    one.add_argument(
        "--rescore", action="store_true", help="compute the log-probs of the trainer at that step (starts it)"
    )
    one.add_argument("--tokens", action="store_true", help="show all numbers of these tokens, one per line")
    one.add_argument("--json", action="store_true", help="for programs: all of it")


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--step", type=_positive, metavar="N", help="take the checkpoint of this step (default: of the last step done)"
    )


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", help="change a setting; may be given several times"
    )


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    function: Callable[[argparse.Namespace], int],
    summary: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    parser.set_defaults(command=function)
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)
