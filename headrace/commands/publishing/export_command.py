"""`headrace export RUN --to DIR`: saves a run's model as a directory that other libraries load."""

from __future__ import annotations

import argparse
from pathlib import Path

import headrace
from headrace.commands.arguments import Commands, add_command, add_run, add_step
from headrace.commands.finding import run_directory


def add_export(commands: Commands) -> None:
    one = add_command(commands, "export", _export, "save a run's model as a directory that transformers loads")
    add_run(one)
    one.add_argument("--to", required=True, metavar="DIR", help="where to save it; must not exist or be empty")
    one.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: %(default)s")
    add_step(one)
    one.add_argument(
        "--merge", action="store_true", help="of LoRA: a whole model with the adapter in its weights, added in float32"
    )


def _export(arguments: argparse.Namespace) -> int:
    checkpoint = headrace.export(
        run_directory(arguments.run), arguments.to, arguments.dtype, merge=arguments.merge, step=arguments.step
    )
    adapter = (Path(arguments.to) / "adapter_config.json").exists()
    reader = "peft.AutoPeftModelForCausalLM" if adapter else "transformers.AutoModelForCausalLM"
    print(f"{arguments.to}: {checkpoint.name}, for {reader}.from_pretrained")
    return 0
