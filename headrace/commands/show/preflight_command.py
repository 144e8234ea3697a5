"""`headrace preflight MODEL`: do the files of a model agree, and what do the model and the reward see of a row?"""

from __future__ import annotations

import argparse
from typing import Any

from headrace.commands.arguments import Commands, add_command
from headrace.core.printing import say

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
