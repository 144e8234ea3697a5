"""`headrace demo` and `headrace recipes`: the recipes that ship with the package, for people who have no checkout."""

from __future__ import annotations

import argparse
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import headrace
from headrace.commands.arguments import Commands, add_command
from headrace.core.errors import ConfigError
from headrace.core.printing import echo
from headrace.settings.extras import install, is_installed

DEMO = "demo"
README = "README.md"


def recipes_directory() -> Path:
    """The folder of recipes, each a folder with NAME.toml in it: inside the installed package, or beside it in a checkout."""
    package = Path(headrace.__file__).parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def documentation() -> Path:
    """The folder of the documentation's pages: inside the installed package, or beside it in a checkout."""
    return recipes_directory().parent / "docs"


def add_demo(commands: Commands, train: Callable[[Sequence[str]], int]) -> None:
    """`train` takes the words that follow `headrace train`."""
    parser = add_command(commands, DEMO, demo(train), "a first run: a small model learns to add, in about six minutes")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="change a setting; may be repeated")
    parser.add_argument("--name", help="the run's directory under runs/ (default: demo- and the time)")
    parser.add_argument("--board", action="store_true", help="show the run in the browser while it trains")


def demo(train: Callable[[Sequence[str]], int]) -> Callable[[argparse.Namespace], int]:
    """Returns the command, which is `train` with the demo's recipe and a directory of its own for every run.

    `train` takes the words that follow `headrace train`.
    """

    def run(arguments: argparse.Namespace) -> int:
        if not is_installed("reasoning_gym"):
            raise ConfigError(f"headrace demo takes its problems from reasoning-gym: {install('tasks')}")
        name = arguments.name or time.strftime("demo-%Y%m%d-%H%M%S")
        sets = [f"--set={text}" for text in arguments.set]
        return train([str(recipe(DEMO)), f"--name={name}", *sets, *(["--board"] if arguments.board else [])])

    return run


def add_recipes(commands: Commands) -> None:
    parser = add_command(commands, "recipes", recipes, "runs to start from: list, or copy one")
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="copy this one; if left out: list them")
    parser.add_argument("--to", type=Path, metavar="DIR", help="a new directory for it (default: its name, here)")


def recipes(arguments: argparse.Namespace) -> int:
    """Lists the recipes, or copies the folder of one. Raises ConfigError if the target is there already."""
    if not arguments.recipe:
        width = max(len(path.stem) for path in _all())
        for path in _all():
            echo(f"{path.stem:<{width}}  {_first_words(path)}")
        return 0
    chosen = recipe(arguments.recipe)
    target = arguments.to or Path(chosen.stem)
    if target.exists():
        raise ConfigError(f"{target} exists already; name another directory by --to")
    target.mkdir(parents=True)
    files = sorted(path for path in chosen.parent.iterdir() if path.is_file())
    for file in files:
        shutil.copyfile(file, target / file.name)
    _link_documentation(target / README)
    echo(f"{target} holds {', '.join(file.name for file in files)}; now: headrace train {target / chosen.name}")
    return 0


def _link_documentation(readme: Path) -> None:
    """Makes the links of a copied README lead to the pages where they are."""
    if readme.is_file():
        text = readme.read_text(encoding="utf-8").replace("](../../docs/", f"]({documentation().resolve().as_uri()}/")
        readme.write_text(text, encoding="utf-8")


def recipe(name: str) -> Path:
    """The config of a recipe. Raises ConfigError, with the names that there are."""
    known = {path.stem: path for path in _all()}
    if name.removesuffix(".toml") not in known:
        raise ConfigError(f"there is no recipe {name}; there are: {', '.join(known)}")
    return known[name.removesuffix(".toml")]


def _all() -> list[Path]:
    folders = sorted(path for path in recipes_directory().iterdir() if path.is_dir())
    return [file for folder in folders if (file := folder / f"{folder.name}.toml").is_file()]


def _first_words(path: Path) -> str:
    """The first sentence of the comment at the top."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# "):
            break
        lines.append(line[2:].strip())
    return re.split(r"(?<=[.:]) ", " ".join(lines), maxsplit=1)[0]
