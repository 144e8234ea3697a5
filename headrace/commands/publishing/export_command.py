"""`headrace export RUN [--to DIR] [--format gguf] [--push ORG/NAME] [--follow]`: saves a run's model as a directory that other libraries load or as a file
for llama.cpp, and uploads it."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import headrace
from headrace.commands.arguments import Commands, add_command, add_run, add_step, run_directory
from headrace.core.errors import ConfigError, HeadraceError
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
    parser.add_argument(
        "--follow",
        action="store_true",
        help="export each checkpoint as it is written, to DIR/step-N or as a commit, until the run has ended",
    )


def _export(arguments: argparse.Namespace) -> int:
    options = arguments
    run_dir = run_directory(options.run)
    if not options.to and not options.push:
        raise ConfigError("--to DIR says where to save the model, or --push ORG/NAME where to upload it")
    if options.private and not options.push:
        raise ConfigError("--private belongs to --push ORG/NAME")
    if options.follow and (options.step or options.format == "gguf"):
        raise ConfigError("--follow exports every checkpoint, as a directory: leave --step and --format gguf out")
    if options.format == "gguf":
        return _export_gguf(options, run_dir)
    if options.push:
        check_name(options.push)
    if options.follow:
        return _follow(options, run_dir)
    with ExitStack() as stack:
        to = Path(options.to or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-"))) / "model")
        checkpoint = headrace.export(run_dir, to, options.dtype, merge=options.merge, step=options.step)
        if options.to:
            from headrace.commands.publishing.model_card import reader_of

            echo(f"{options.to}: {checkpoint.name}, for {reader_of(to)}.from_pretrained")
        if options.push:
            echo(push_run(run_dir, to, checkpoint, name=options.push, private=options.private))
    return 0


EVERY = 2.0
"""Seconds between two looks for new checkpoints."""


def _follow(arguments: argparse.Namespace, run_dir: Path) -> int:
    """Exports checkpoints, oldest first, until no process trains the run and none is left. What failed is tried again while the run goes on.
    Returns 1 if one is missing in the end."""
    from headrace.loop.checkpoints import Checkpoints, step_of
    from headrace.processes.health.live_status import Follower
    from headrace.run.run_directory import held

    checkpoints, facts = Checkpoints(run_dir / "checkpoints", keep=1), Follower(run_dir)
    done, missing, told = set[int](), set[int](), set[str]()
    before: set[int] | None = None
    while True:
        living = held(run_dir)
        facts.read()
        saved = {fact.step for fact in facts.state.checkpoints if not fact.error}
        there = [step_of(path) for path in checkpoints.all()]
        before = saved.difference(there) if before is None else before
        for step in sorted(saved - before - missing - done - set(there)):
            missing.add(step)
            echo(f"step {step} was removed before it was exported: a larger checkpoint.keep leaves more time", err=True)
        for step in [step for step in there if step not in done]:
            try:
                _export_step(arguments, run_dir, step)
                done.add(step)
            except (HeadraceError, OSError) as error:  # a full disk, a directory that cannot be made
                if str(error) not in told:
                    told.add(str(error))
                    echo(str(error), err=True)
        if not living:
            return int(bool(missing) or not done.issuperset(there))
        time.sleep(EVERY)


def _export_step(arguments: argparse.Namespace, run_dir: Path, step: int) -> None:
    """Exports one checkpoint, unless DIR has it. A directory of its name is whole."""
    final = Path(arguments.to) / f"step-{step:06d}" if arguments.to else None
    if final and final.exists():
        return
    if final:
        final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".headrace-", dir=final and final.parent) as scratch:
        folder = Path(scratch) / "model"
        checkpoint = headrace.export(run_dir, folder, arguments.dtype, merge=arguments.merge, step=step)
        if arguments.push:
            echo(push_run(run_dir, folder, checkpoint, name=arguments.push, private=arguments.private))
        if final:
            folder.rename(final)
            echo(str(final))


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


# --- Uploads an exported model to the Hugging Face hub, by its own client ---------------------------------------------


NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_name(name: str) -> None:
    """Raises ConfigError for a name that no model can have."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"--push {name}: write the model's name as ORG/NAME, with your user name or an organisation of yours"
        )


def full_name(name: str, token: str | None = None) -> str:
    """Returns ORG/NAME: a name alone is that of a model of the token's user. Raises HeadraceError where the hub does not know the token."""
    from huggingface_hub import HfApi

    if "/" in name:
        return name
    try:
        return f"{HfApi(os.environ.get('HF_ENDPOINT')).whoami(token)['name']}/{name}"
    except Exception as error:  # the client raises errors of several libraries
        raise HeadraceError(
            f"the hub does not say whose {name} is to be ({type(error).__name__}): name it ORG/NAME, or hf auth login (or HF_TOKEN)"
        ) from error


def push(folder: Path, name: str, *, private: bool, message: str, token: str | None = None) -> str:
    """Makes the repository if there is none, and uploads the folder. Returns the address of the (last) commit.

    `token`: None: the client takes that of `hf auth login` or HF_TOKEN; and the address of the hub from HF_ENDPOINT. Raises HeadraceError."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    hub = HfApi(os.environ.get("HF_ENDPOINT"), token=token, library_name="headrace")
    try:
        hub.create_repo(name, private=private or None, exist_ok=True)
        return str(hub.upload_folder(repo_id=name, folder_path=folder, commit_message=message).commit_url)
    except Exception as error:  # the client raises errors of several libraries
        code = getattr(getattr(error, "response", None), "status_code", 0)
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        remedy = (
            "hf auth login (or HF_TOKEN) with a token that may write there"
            if code in (401, 403)
            else "try again: nothing is lost"
        )
        raise HeadraceError(f"{name} was not uploaded ({reason}): {remedy}") from error
