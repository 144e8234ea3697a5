"""`headrace board [RUNS_DIR]` and `headrace serve MODEL`. A server, and all that is heavy, is imported only when it is called, because `headrace --help`
reads the arguments here.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.commands.arguments import Commands, add_command
from headrace.core.errors import ConfigError
from headrace.core.printing import echo
from headrace.settings.extras import install, is_installed

if TYPE_CHECKING:
    from headrace.serve.config import TrainingConfig


NEEDED = ("starlette", "uvicorn")
PORT = 8420
ENDING = 5.0
"""Seconds that the board of a run gets to end."""


def add_board(commands: Commands) -> None:
    parser = add_command(commands, "board", board, "a live page of all runs, in the browser")
    parser.add_argument(
        "directory", nargs="?", type=Path, default=Path("runs"), metavar="RUNS_DIR", help="default: %(default)s"
    )
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s, which only this machine reaches")
    parser.add_argument("--port", type=int, default=PORT, help="0: any that is free (default: %(default)s)")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="holds the token that the page asks for")


def board(arguments: argparse.Namespace) -> int:
    """Serves until it is asked to end (SIGINT, SIGTERM). Raises ConfigError."""
    from headrace.processes.health.family import PARENT, signal_me_when_orphaned
    from headrace.settings.secrets import read_token
    from headrace.web.limits import check_address

    _refuse_without_server("headrace board")
    directory: Path = arguments.directory
    if not directory.is_dir():
        raise ConfigError(
            f"{directory} is not a directory: name the one that holds your runs, such as runs/ (headrace train makes it)"
        )
    token = read_token(arguments.token_file, "--token-file") if arguments.token_file else ""
    check_address(arguments.host, arguments.port, token, "read the prompts and completions of all runs")
    if PARENT in os.environ:
        signal_me_when_orphaned(signal.SIGTERM)
    _serve(directory, arguments.host, arguments.port, token)
    return 0


def _serve(directory: Path, host: str, port: int, token: str) -> None:
    from headrace.models.resolve import cache_dir
    from headrace.run.pieces import pieces_of
    from headrace.run.run_directory import held
    from headrace.views.board.board_routes import make_board_app
    from headrace.views.board.runs_board import RunsBoard
    from headrace.web.server import address_of, bind, make_server, serve_until_asked

    def leave() -> None:
        shown.closed = True

    shown = RunsBoard(directory, held=held, make_pieces=pieces_of, saves=cache_dir() / "board")
    sock = bind(host, port)
    try:
        count = len(shown.lines())
        runs = f"{count} run{'' if count == 1 else 's'}" if count else "no run yet"
        place = f"{address_of(sock)}{'/?token=TOKEN (the one of --token-file)' if token else ''}"
        echo(f"headrace board: {runs} of {directory} at {place}")
        asyncio.run(serve_until_asked(make_server(make_board_app(shown, token)), sock, leave))
    finally:
        sock.close()


@contextmanager
def beside(directory: Path, wanted: bool) -> Iterator[None]:
    """Shows a directory of runs, by a process of its own, while the block trains: `headrace train --board`. The process ends with this
    one. Does nothing unless `wanted`. Raises ConfigError if the server is not installed."""
    if not wanted:
        yield
        return
    from headrace.processes.health.family import parent_variables
    from headrace.processes.process_end import ended_within

    _refuse_without_server("headrace train --board")
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "headrace", "board", str(directory), "--port", "0"]
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | parent_variables(),
        start_new_session=True,  # Ctrl-C is for the run, which may need a minute to end
    )
    try:
        assert child.stdout is not None
        echo(child.stdout.readline().strip() or "headrace board: it did not start")
        yield
        echo(f"headrace board: ended with the run; headrace board {directory} shows it again")
    finally:
        child.terminate()
        ended_within(child, ENDING)
        for path in made:  # a run that was refused leaves nothing behind
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def _refuse_without_server(command: str) -> None:
    if missing := [module for module in NEEDED if not is_installed(module)]:
        raise ConfigError(f"{command} needs {' and '.join(missing)}: {install('serve')}")


# --- headrace serve MODEL ---------------------------------------------------------------------------------------------


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
