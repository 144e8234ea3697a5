"""`headrace export RUN [--to DIR] [--format gguf] [--push ORG/NAME]`: saves a run's model as a directory that other libraries load or as a file
for llama.cpp, and uploads it."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

import headrace
from headrace.commands.arguments import Commands, add_command, add_run, add_step
from headrace.commands.finding import run_directory
from headrace.core.errors import ConfigError
from headrace.core.printing import echo


def add_export(commands: Commands) -> None:
    parser = add_command(commands, "export", _export, "save a run's model as a directory that transformers loads")
    add_run(parser)
    parser.add_argument(
        "--to", metavar="DIR", help="where to save it; must not exist or be empty; may be left out with --push"
    )
    parser.add_argument(
        "--format",
        choices=("transformers", "gguf"),
        default="transformers",
        help="gguf: one file for llama.cpp, --to FILE.gguf (llama, qwen2 and qwen3 models); default: %(default)s",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: %(default)s")
    add_step(parser)
    parser.add_argument(
        "--merge", action="store_true", help="of LoRA: a whole model with the adapter in its weights, added in float32"
    )
    parser.add_argument(
        "--push", metavar="ORG/NAME", help="upload it to the Hugging Face hub, with a card made from the run"
    )
    parser.add_argument("--private", action="store_true", help="make the repository of --push a private one")


def _export(arguments: argparse.Namespace) -> int:
    options = arguments
    run_dir = run_directory(options.run)
    if not options.to and not options.push:
        raise ConfigError("--to DIR says where to save the model, or --push ORG/NAME where to upload it")
    if options.private and not options.push:
        raise ConfigError("--private belongs to --push ORG/NAME")
    if options.format == "gguf":
        return _export_gguf(options, run_dir)
    if options.push:
        from headrace.commands.publishing.hub import check_name

        check_name(options.push)
    with ExitStack() as stack:
        to = Path(options.to or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-"))) / "model")
        checkpoint = headrace.export(run_dir, to, options.dtype, merge=options.merge, step=options.step)
        if options.to:
            from headrace.commands.publishing.model_card import reader_of

            echo(f"{options.to}: {checkpoint.name}, for {reader_of(to)}.from_pretrained")
        if options.push:
            echo(push_run(run_dir, to, checkpoint, name=options.push, private=options.private))
    return 0


def _export_gguf(arguments: argparse.Namespace, run_dir: Path) -> int:
    from headrace.commands.publishing.gguf_file import write_gguf

    if arguments.push or not arguments.to.endswith(".gguf"):
        raise ConfigError("--format gguf writes a file: --to FILE.gguf, without --push")
    to = Path(arguments.to)
    if to.exists():
        raise ConfigError(f"--to {to} exists; name another file, or remove it")
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".headrace-", dir=to.parent) as scratch:
        folder = Path(scratch) / "model"
        checkpoint = headrace.export(run_dir, folder, arguments.dtype, merge=arguments.merge, step=arguments.step)
        write_gguf(folder, to, name=run_dir.resolve().name, dtype=arguments.dtype)
    echo(f"{to}: {checkpoint.name}, for llama.cpp ({arguments.dtype})")
    return 0


def push_run(
    run_dir: Path,
    folder: Path,
    checkpoint: Path,
    *,
    name: str,
    private: bool,
    message: str = "",
    token: str | None = None,
) -> str:
    """Uploads the model that was exported from a checkpoint to `folder`, with a card made from the run. Returns the address of the commit.

    `message`: of the commit; empty: names the step. `token`: of the hub; None: that of HF_TOKEN or `hf auth login`. Raises HeadraceError."""
    from headrace.commands.publishing.hub import push
    from headrace.commands.publishing.model_card import write_card
    from headrace.commands.replay.bundle import without_places
    from headrace.loop.checkpoints import step_of
    from headrace.run.config import config_of_run, read_config

    step = step_of(checkpoint)
    message = message or f"Step {step} of a run with headrace {headrace.__version__}"
    with tempfile.TemporaryDirectory(prefix="headrace-") as scratch:
        if (folder / "adapter_config.json").exists():  # whose copy here names the base model by its directory
            folder = Path(shutil.copytree(folder, Path(scratch) / "model"))
            path = Path(read_config(config_of_run(run_dir)).model.path)
            without_places(folder, path.name if path.is_dir() else str(path))
        write_card(run_dir, folder, step, name.rpartition("/")[2])
        return push(folder, name, private=private, message=message, token=token)
