"""Commands, configs and programs of the tutorials and of the recipes' READMEs are ones that this version takes."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from headrace import cli
from headrace.run.config import load_config, read_config

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs" / "tutorials").glob("*.md")), *sorted((ROOT / "recipes").glob("*/README.md"))]
COMMAND = re.compile(r"^(?:\$ )?(headrace .+)$", flags=re.MULTILINE)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]


def commands(page: Path) -> list[list[str]]:
    lines = COMMAND.findall("\n".join(blocks(page, "")))
    return [shlex.split(line, comments=True)[1:] for line in lines]


def wrong(words: list[str]) -> str:
    """The reason for which the command line is refused; empty if it is not."""
    try:
        given = cli.front_parser().parse_args(words)
    except SystemExit:
        return "no such command or flag"
    config = getattr(given, "config", None)
    source = ROOT / "recipes" / (config or "")
    if config and source.is_file():
        try:
            read_config(source, given.set)
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_every_command_config_and_program_is_taken(page: Path):
    assert [(words, reason) for words in commands(page) if (reason := wrong(words))] == []
    for text in blocks(page, "python"):
        compile(text, str(page), "exec")
    for text in blocks(page, "toml"):
        tree = tomllib.loads(text)
        if "model" in tree:
            load_config(tree)


def test_every_tutorial_shows_commands_and_a_wrong_one_is_found():
    assert all(commands(page) for page in PAGES)
    assert wrong(["train", "demo/demo.toml", "--set", "train.step=3"]).startswith("train.step is not a setting")
    assert wrong(["inspect", "runs/first", "--setp", "1"]) == "no such command or flag"
