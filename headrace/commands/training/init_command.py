"""`headrace init [CONFIG.toml]`: writes a first config, from three answers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from headrace.commands.arguments import Commands, add_command
from headrace.core.errors import ConfigError
from headrace.core.printing import echo

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
