"""`headrace train CONFIG`, `headrace eval CONFIG|RUN`, and `headrace init [CONFIG.toml]`, which writes a first config from three answers."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.commands.arguments import (
    INTERRUPTED,
    Commands,
    add_command,
    add_set,
    add_step,
    is_config,
    positive,
    run_directory,
)
from headrace.commands.serving import serving_commands as boarding
from headrace.core.errors import ConfigError
from headrace.core.printing import echo

if TYPE_CHECKING:
    from headrace.run.config import RunConfig


def add_train(commands: Commands) -> None:
    _add_arguments(add_command(commands, "train", train, "train a model"))


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="may be left out with --resume")
    add_set(parser)
    parser.add_argument("--name", help="the run's directory under out/ (default: the config's, or its file's name)")
    parser.add_argument("--resume", metavar="RUN", help="resume this run from its last checkpoint")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--dry-run",
        action="store_true",
        help="a rehearsal: check files, columns, lengths, devices and memory, call the reward once; load no model",
    )
    how.add_argument("--board", action="store_true", help="show the run in the browser while it trains")
    parser.add_argument(
        "--settings", action="store_true", help="with --dry-run: print every setting, not the changed ones"
    )


def train_line(words: Sequence[str]) -> int:
    """Does what `headrace train` and these words do, for a command that is a short name of such a line."""
    parser = argparse.ArgumentParser(prog="headrace train")
    _add_arguments(parser)
    return train(parser.parse_args(words))


def train(arguments: argparse.Namespace) -> int:
    run_dir = run_directory(arguments.resume) if arguments.resume else None
    sets = [*arguments.set, *([f'name="{arguments.name}"'] if arguments.name else [])]
    config = _config(arguments.config, run_dir, sets)
    if arguments.dry_run:
        return _rehearse(config, run_dir, _line(arguments), arguments.settings)
    if arguments.settings:
        raise ConfigError("--settings goes with --dry-run: headrace train CONFIG.toml --dry-run --settings")
    from headrace.run import run

    with boarding.beside((run_dir or config.run_dir).parent, arguments.board):
        result = run.train(config, resume=run_dir)
    return INTERRUPTED if result.reason == "interrupted" else 0


def _line(arguments: argparse.Namespace) -> str:
    """Returns the line that starts what was rehearsed."""
    sets = [word for text in arguments.set for word in ("--set", text)]
    name = ["--name", arguments.name] if arguments.name else []
    resume = ["--resume", arguments.resume] if arguments.resume else []
    return shlex.join(["headrace", "train", *([arguments.config] if arguments.config else []), *sets, *name, *resume])


def _rehearse(config: RunConfig, run_dir: Path | None, line: str, every_setting: bool) -> int:
    """Prints the verdict, the remarks and the settings, then what the rehearsal found. It loads no model."""
    import asyncio

    from headrace.run.config import dump_config
    from headrace.run.rehearse import rehearse
    from headrace.settings.toml import dump_changed
    from headrace.views.screen.console import Console
    from headrace.views.screen.preflight_view import show_preflight

    done = asyncio.run(rehearse(config, resume=run_dir, thorough=True))
    settings = dump_config(done.config) if every_setting else dump_changed(done.config)
    others = "" if every_setting else "  (all others have their defaults: --settings shows them)"
    echo(f"Ready: start it with\n  {line}\n\n{done.page()}\n\nSettings{others}\n\n{settings}\nFiles")
    show_preflight(Console(), done.findings, done.sight)
    return 0


def add_eval(commands: Commands) -> None:
    parser = add_command(commands, "eval", _evaluate, "measure the reward on held-out prompts")
    parser.add_argument(
        "source", metavar="CONFIG.toml|RUN", help="a config (its untrained model) or a run (its last one)"
    )
    parser.add_argument("--prompts", type=positive, metavar="N", help="held-out prompts (default: eval.prompts)")
    add_step(parser)
    add_set(parser)


def _evaluate(arguments: argparse.Namespace) -> int:
    from headrace.facts.verdicts import measured_on
    from headrace.run import one_shot

    named = is_config(arguments.source)
    run_dir = None if named else run_directory(arguments.source)
    config = _config(arguments.source if named else None, run_dir, arguments.set)
    for measured in one_shot.evaluate(config, run_dir, arguments.prompts, arguments.step):
        which = f"step {measured.step} of {run_dir}" if run_dir else "the untrained model"
        which += f", {measured.name}" if measured.name else ""
        echo(
            f"{which}: reward {measured.reward_mean:.4f} ± {measured.reward_sem:.4f} over {measured_on(measured)}, all held out; "
            f"mean length {measured.length_mean:.1f} tokens, {measured.seconds:.1f} s"
        )
    return 0


def _config(file: str | None, run_dir: Path | None, sets: Sequence[str]) -> RunConfig:
    """The named config, or the config of the run."""
    from headrace.run.choosing import resumed_settings
    from headrace.run.config import config_of_run, load_config
    from headrace.run.python_inputs import refuse_python_inputs

    source = file or (run_dir and config_of_run(run_dir))
    if not source:
        raise ConfigError("name a config: headrace train CONFIG.toml (or --resume RUN to resume a run)")
    if file and (Path(file) / "config.toml").is_file():
        raise ConfigError(
            f"{file} is the directory of a run, not a config; resume it with: headrace train --resume {file}"
        )
    config = load_config(resumed_settings(file, run_dir, sets) if file and run_dir else source, sets)
    for run in config.runs:
        refuse_python_inputs(run.reward, run.task)
        # A command takes no function, unlike `headrace.train`.
        if not (run.reward.given or run.taught or run.environment.rewards):
            raise ConfigError(
                'nothing gives rewards: set reward.function = "path/to/file.py:name" (or "reasoning_gym"); functions that were '
                "passed from Python are not in the config"
            )
    return config


QUESTIONS = {
    "model": (
        "Which model? A directory that transformers loads, a hub id such as org/name, or a known name",
        "smollm2-135m-instruct",
    ),
    "data": (
        "Which prompts? A file of JSON lines or CSV, a Parquet file, a directory saved by datasets, or a family of reasoning-gym",
        "chain_sum",
    ),
    "reward": (
        "What gives the reward? reasoning_gym, unit_tests, or FILE.py:FUNCTION, which is written for you if it does not exist",
        "",
    ),
}


def add_init(commands: Commands) -> None:
    parser = add_command(commands, "init", _init, "write a first config, with comments, from three answers")
    parser.add_argument("config", nargs="?", type=Path, default=Path("mine.toml"), metavar="CONFIG.toml",
                     help="where to write it (default: %(default)s)")  # fmt: skip
    parser.add_argument(
        "--model", metavar="MODEL", help="a directory, a hub id, or a known name (headrace doctor lists them)"
    )
    parser.add_argument(
        "--data",
        metavar="DATA",
        help="FILE.jsonl, FILE.csv, FILE.parquet, a directory saved by datasets, or a family of reasoning-gym",
    )
    parser.add_argument(
        "--reward", metavar="REWARD", help="reasoning_gym, unit_tests, unit_tests_all, or FILE.py:FUNCTION"
    )


def _init(arguments: argparse.Namespace) -> int:
    from headrace.commands.training.starter import default_reward, write_starter

    if arguments.config.exists():
        raise ConfigError(f"{arguments.config} exists already: name another file, or delete it")
    model = _answer("model", arguments.model)
    data = _answer("data", arguments.data)
    reward = _answer("reward", arguments.reward, default_reward(data))
    for path in write_starter(arguments.config, model=model, data=data, reward=reward):
        echo(path)
    echo(f"next: headrace train {arguments.config} --dry-run      then the same without --dry-run")
    return 0


def _answer(name: str, given: str | None, default: str = "") -> str:
    """Returns what was given, or asks. Raises ConfigError if there is nobody to ask."""
    if given:
        return given
    question, usual = QUESTIONS[name]
    usual = default or usual
    if not sys.stdin.isatty():
        raise ConfigError(f"there is no terminal to ask in: give --{name} ({question})")
    return input(f"{question} [{usual}]: ").strip() or usual
