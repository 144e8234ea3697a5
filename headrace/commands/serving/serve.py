"""`headrace serve MODEL`. Heavy packages are imported only when it is called, because `headrace --help` reads the arguments here."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.commands.arguments import Commands, add_command
from headrace.core.errors import ConfigError
from headrace.core.printing import echo
from headrace.settings.extras import install, is_installed

if TYPE_CHECKING:
    from headrace.serve.config import TrainingConfig

NEEDED = ("starlette", "uvicorn")
SAMPLED_AT_ONCE = 8
"""Adapters that the engine holds at once where clients train them and --adapters says nothing."""


def add_serve(commands: Commands) -> None:
    parser = add_command(commands, "serve", serve, "the native engine behind HTTP, and new weights into it")
    parser.add_argument("model", metavar="MODEL", help="a directory, a known name, or a hub id")
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s, which only this machine reaches")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free (default: %(default)s)")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="holds the token that every request must send")
    parser.add_argument(
        "--adapters", type=int, default=0, metavar="N", help="LoRA adapters that may be loaded at once (default: none)"
    )
    parser.add_argument("--name", default="", help="the model's name in requests (default: MODEL)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="engine.a=b",
        help="change a setting of the engine, or of the trainer",
    )
    parser.add_argument("--train", action="store_true", help="let clients of the Tinker API train adapters")
    parser.add_argument(
        "--checkpoints",
        type=Path,
        metavar="DIR",
        help="weights that these clients save (default: a directory of the cache)",
    )


def serve(arguments: argparse.Namespace) -> int:
    """Serves until it is asked to end (SIGINT, SIGTERM). Raises ConfigError."""
    from headrace.engine.config import EngineConfig
    from headrace.serve.config import ServeConfig
    from headrace.settings.secrets import read_token
    from headrace.settings.toml import build, merge, parse_sets

    if missing := [module for module in NEEDED if not is_installed(module)]:
        raise ConfigError(f"headrace serve needs {' and '.join(missing)}: {install('serve')}")
    tree = parse_sets(arguments.set)
    if strange := sorted(set(tree) - {"engine", *(["train"] if arguments.train else [])}):
        raise ConfigError(
            f"--set {strange[0]}... is not a setting of the server; those of the engine are: --set engine.kv_gib=4"
        )
    adapters = arguments.adapters or (SAMPLED_AT_ONCE if arguments.train else 0)
    engine = build(EngineConfig, merge({"max_adapters": adapters}, tree.get("engine", {})))
    if engine.is_server:
        raise ConfigError(
            f'engine.kind = "{engine.kind}" is a server already, and headrace serve serves an engine of its own; remove it'
        )
    config = ServeConfig(
        model=arguments.model,
        host=arguments.host,
        port=arguments.port,
        token=read_token(arguments.token_file, "--token-file") if arguments.token_file else "",
        name=arguments.name,
        engine=engine,
        training=_training(arguments, tree.get("train", {})),
    )
    from headrace.serve import start

    return start.serve(config, lambda text: echo(f"headrace serve: {text}"))


def _training(arguments: argparse.Namespace, settings: dict[str, Any]) -> TrainingConfig | None:
    from headrace.models.resolve import cache_dir
    from headrace.serve.config import TrainingConfig
    from headrace.settings.toml import build
    from headrace.trainer.shared.calls import SharedConfig

    if not arguments.train:
        if arguments.checkpoints:
            raise ConfigError("--checkpoints is for servers that train; add --train")
        return None
    if missing := [module for module in ("google.protobuf", "peft") if not is_installed(module)]:
        raise ConfigError(f"headrace serve --train needs {' and '.join(missing)}: {install('tinker')}")
    directory = arguments.checkpoints or cache_dir() / "checkpoints"
    return TrainingConfig(directory=directory, train=build(SharedConfig, settings))
