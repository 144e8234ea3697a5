"""`headrace sweep CONFIG`: a run for each combination of settings and each seed, one after the other, and a table of what they reached."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headrace.commands.arguments import INTERRUPTED, Commands, add_command, add_set, positive
from headrace.core.errors import ConfigError
from headrace.core.printing import echo

if TYPE_CHECKING:
    from headrace.facts.run_state import RunState
    from headrace.run.config import RunConfig


class SweepRun(NamedTuple):
    """One run of a sweep."""

    values: tuple[str, ...]
    """Its `setting=value`, in the order of the command line."""
    sets: tuple[str, ...]
    """All that `--set` gives it."""
    directory: Path

    def command(self, config: str) -> list[str]:
        """Returns the words that start it, or resume it where it has begun."""
        words = ["headrace", "train", config, *(word for one in self.sets for word in ("--set", one))]
        return [*words, "--resume", str(self.directory)] if (self.directory / "config.toml").exists() else words


def add_sweep(commands: Commands) -> None:
    parser = add_command(
        commands, "sweep", _sweep, "train once for each combination of settings and each seed, and compare"
    )
    parser.add_argument("config", metavar="CONFIG.toml")
    parser.add_argument(
        "--over",
        action="append",
        default=[],
        metavar="a.b=c,d",
        help="a setting and its values; may be given several times",
    )
    parser.add_argument(
        "--seeds", type=positive, default=1, metavar="N", help="runs of each combination (default: %(default)s)"
    )
    parser.add_argument(
        "--name", default="", help="the folder of its runs under out/ (default: the config's name and -sweep)"
    )
    parser.add_argument(
        "--print", action="store_true", help="print a command for each run that is not finished, and start none"
    )
    add_set(parser)


def _sweep(arguments: argparse.Namespace) -> int:
    runs = runs_of(arguments.config, arguments.over, arguments.seeds, name=arguments.name, sets=arguments.set)
    folder = runs[0].directory.parent
    waiting = [run for run in runs if not finished(run.directory)]
    if arguments.print:
        for one in waiting:
            echo(shlex.join(one.command(arguments.config)))
        return 0
    echo(f"{len(runs)} runs in {folder}, {len(runs) - len(waiting)} finished; all at once: headrace board {folder}")
    failed = 0
    for number, one in enumerate(waiting, len(runs) - len(waiting) + 1):
        echo(f"\nrun {number} of {len(runs)}: {one.directory.name}")
        code = subprocess.call([sys.executable, "-m", *one.command(arguments.config)])
        if code == INTERRUPTED:
            echo("interrupted; the same command goes on where it stopped")
            return INTERRUPTED
        failed += code != 0
    _tell(runs)
    if failed:
        echo(f"{failed} of {len(runs)} runs did not finish; the same command resumes them")
    return 1 if failed else 0


def runs_of(config: str, over: Sequence[str], seeds: int, *, name: str, sets: Sequence[str]) -> list[SweepRun]:
    """Returns all runs. Raises ConfigError before one is started if a setting or a combination is refused."""
    from headrace.run.config import load_config

    base = load_config(config, sets)
    for one in over:
        if one.partition("=")[0] in ("name", "out", "seed"):
            raise ConfigError(
                f"--over {one}: a sweep names its runs itself; use --name, --set out=..., and --seeds for seeds"
            )
    folder = Path(base.out) / (name or f"{base.name}-sweep")
    found = []
    for values in itertools.product(*map(_values, over)):
        for seed in range(base.seed, base.seed + seeds):
            called = "_".join([*map(_short, values), f"seed-{seed}"])
            mine = (*sets, *values, f"out={json.dumps(str(folder))}", f'name="{called}"', f"seed={seed}")
            try:
                wanted = load_config(config, mine)
            except ConfigError as error:
                raise ConfigError(f"{' '.join(values) or config}: {error}") from None
            _check_same(wanted, folder / called)
            found.append(SweepRun(values, mine, folder / called))
    if twice := [one.directory.name for one in found if [other.directory for other in found].count(one.directory) > 1]:
        raise ConfigError(f"two runs would be called {twice[0]}; give each value of --over once")
    return found


def _check_same(wanted: RunConfig, directory: Path) -> None:
    """Raises ConfigError if a run has begun there that learns or is measured otherwise, by its settings or by the files that they name: a table of both
    would compare what is not named in it."""
    from headrace.facts.kept_settings import contents_in
    from headrace.run.choosing import resumed_settings
    from headrace.run.config import config_of_run, read_config
    from headrace.run.resume_rules import contents_of, rule_of, settings_of
    from headrace.run.warm_start import begins_with

    if not (directory / "config.toml").exists():
        return
    begun = read_config(config_of_run(directory))
    wanted = begins_with(wanted.with_commits(begun.chosen.models), directory)
    before = dict(settings_of(begun))
    now = dict(settings_of(read_config(resumed_settings(wanted, directory))))
    for name, value in now.items():
        counts = name in ("train.steps", "train.minutes") or name.startswith("eval.") or not rule_of(name).is_free
        if counts and before[name] != value:
            raise ConfigError(
                f"{directory} has begun with {name} = {before[name]}, and this sweep has {value}: give it another --name, or delete the folder of that run"
            )
    had = contents_in(config_of_run(directory))
    for name, digest in contents_of(wanted, had).items():
        if had.get(name, digest) != digest:
            raise ConfigError(
                f"{directory} has begun with another content of {name}: give this sweep another --name, or delete the folder of that run"
            )


def _values(over: str) -> list[str]:
    """`a.b=1,[2,3]` -> `["a.b=1", "a.b=[2,3]"]`."""
    setting, sign, values = over.partition("=")
    if not sign or not values:
        raise ConfigError(
            f"--over {over}: write it as section.setting=value,value, for example --over train.learning_rate=1e-6,1e-5"
        )
    return [f"{setting}={value}" for value in _apart(values)]


def _apart(values: str) -> list[str]:
    """Splits at the commas that stand in no text, array or table of TOML."""
    found, begun = list[str](), ""
    for piece in values.split(","):
        begun = f"{begun},{piece}" if begun else piece
        if _is_whole(begun):
            found.append(begun.strip())
            begun = ""
    return [*found, *([begun.strip()] if begun else [])]


def _is_whole(value: str) -> bool:
    """Whether the text is a value of TOML, or a bare word, rather than the beginning of a text, an array or a table."""
    try:
        tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return value.lstrip()[:1] not in ("[", "{", '"', "'")
    except ValueError:  # a number with too many digits, which is refused when the setting is read
        return True
    return True


def _short(value: str) -> str:
    """`train.learning_rate=1e-6` -> `learning_rate-1e-6`."""
    setting, _, given = value.partition("=")
    return f"{setting.rpartition('.')[2]}-" + re.sub(r"[^\w.-]+", "-", given.strip('[]{}" ')).strip(".")


def finished(directory: Path) -> dict[str, RunState]:
    """Returns what the facts of a run say, by its adapters, if it has finished: all of them. A run of one policy has one without a name."""
    from headrace.processes.health.live_status import Follower, parts_of

    found = {}
    for part in parts_of(directory):
        follower = Follower(part)
        follower.read()
        if not follower.state.ended or follower.state.ended.reason != "finished":
            return {}
        found["" if part == directory else part.name] = follower.state
    return found


def different_commits(directories: Iterable[Path]) -> Iterator[str]:
    """Yields a sentence for each model of the hub that became another one between the starts of these runs."""
    from headrace.facts.kept_settings import settings_of

    found: dict[str, dict[str, list[str]]] = {}
    for directory in directories:
        for name, commit in settings_of(directory).get("chosen", {}).get("models", {}).items():
            found.setdefault(name, {}).setdefault(commit, []).append(directory.name)
    for name, commits in found.items():
        if len(commits) > 1:
            which = "; ".join(f"{commit} in {', '.join(runs)}" for commit, runs in commits.items())
            yield f"{name} was {which}. Name one commit in the config, and give the sweep another --name"


class Reached(NamedTuple):
    """The rewards of one combination, or of an adapter of it, a number for each of its finished seeds."""

    values: tuple[str, ...]
    adapter: str
    held_out: list[float]
    drawn: list[float]


def reached(runs: Sequence[SweepRun]) -> list[Reached]:
    """Returns the finished runs' last held-out rewards and drawn rewards by combination, the best first."""
    from statistics import fmean

    from headrace.facts.run_state import recent_reward

    found: dict[tuple[tuple[str, ...], str], Reached] = {}
    states = {run.directory: finished(run.directory) for run in runs}
    adapters = sorted({name for of_run in states.values() for name in of_run}) or [""]
    for one, adapter in itertools.product(runs, adapters):
        row = found.setdefault((one.values, adapter), Reached(one.values, adapter, [], []))
        if state := states[one.directory].get(adapter):
            row.held_out.extend(held.reward_mean for held in state.evals[-1:] if math.isfinite(held.reward_mean))
            row.drawn.extend(reward for reward in [recent_reward(state)] if reward is not None)
    return sorted(found.values(), key=lambda row: (row.adapter, -fmean(row.held_out or row.drawn or [-math.inf])))


def _tell(runs: Sequence[SweepRun]) -> None:
    from headrace.views.screen.console import Console
    from headrace.views.screen.layout import FittedTable, TableColumn

    rows, settings = reached(runs), [value.partition("=")[0] for value in runs[0].values]
    several = any(row.adapter for row in rows)
    table = FittedTable([
        *(TableColumn(title=setting.rpartition(".")[2]) for setting in settings), *([TableColumn(title="adapter")] * several),
        TableColumn(title="finished", number=True), TableColumn(title="held out", number=True), TableColumn(title="reward", number=True),
    ])  # fmt: skip
    each = len(runs) // len({row.values for row in rows})
    for row in rows:
        given = (value.partition("=")[2] for value in row.values)
        table.add_row(*given, *([row.adapter] * several), f"{len(row.drawn)} of {each}", *_cells(row))
    Console().print(table)
    for sentence in different_commits([run.directory for run in runs]):
        echo(f"the runs are not comparable: {sentence}")
    echo("held out: the last evaluation; reward: of the last steps; ±: the standard error over seeds")


def _cells(row: Reached) -> Iterator[str]:
    from statistics import fmean, stdev

    from headrace.facts.texts import with_error

    for values in (row.held_out, row.drawn):
        error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
        yield with_error(fmean(values), error) if values else "–"
