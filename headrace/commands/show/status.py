"""`headrace status RUN`: whether a run is alive, what it does and what it waits for. Works from another terminal and after its death."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group

from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.printing import echo
from headrace.facts.health import Standing, health
from headrace.facts.kept_settings import CONFIG
from headrace.facts.run_state import RunState
from headrace.processes.health import live_status, stacks
from headrace.run.run_directory import LOCK, held
from headrace.views.board.followed_run import FollowedRun
from headrace.views.screen import status_view
from headrace.views.screen.console import Console, LiveView

DEAD = 1
EVERY = 2.0
ALL = 1e9
"""Seconds that reading may take."""
PATIENCE = 60.0
"""Seconds in which a run should write the stacks of its processes. On an idle machine it takes about one."""


def report(run: Path, watch: bool = False, as_json: bool = False) -> int:
    """Prints the status once, or repeatedly until the run has ended. Returns 0 if the run is alive or ended normally, else 1.

    Raises ConfigError if there is no run."""
    if not (run / CONFIG).exists() and not held(run):
        never = (
            " (a run was started there, but ended before it began)"
            if (run / LOCK).exists() or (run / "logs").exists()
            else ""
        )
        raise ConfigError(f"{run} holds no run: it has no {CONFIG}{never}")
    followers = [FollowedRun(path) for path in live_status.parts_of(run)]
    console = Console()
    if as_json:
        looked = _look(followers)
        echo(json.dumps(_tree(followers, looked), indent=2))
    elif watch and console.is_terminal:
        looked = _watch(console, followers)
    else:
        looked = _look(followers)
        _print(console, followers, looked)
        while watch and any(status.life in live_status.LIVING for status in looked):
            time.sleep(EVERY)
            looked = _look(followers)
            _print(console, followers, looked)
    return 0 if all(status.ok for status in looked) else DEAD


def status_of(run_dir: Path) -> live_status.Status:
    """Returns the status of one run, without adapters."""
    return live_status.Follower(run_dir).look(held(run_dir), time.time())


def _look(followers: Sequence[FollowedRun]) -> list[live_status.Status]:
    return [_status(follower) for follower in followers]


def _status(run: FollowedRun) -> live_status.Status:
    """Reads on. What a long run's own index and digest say is not read from its metrics."""
    live, alive, now = live_status.read_live(run.run_dir), held(run.run_dir), time.time()
    run.catch_up(ALL)
    return live_status.judge(run.state, live, alive, now)


def _tree(followers: Sequence[FollowedRun], looked: Sequence[live_status.Status]) -> object:
    trees = {
        follower.run_dir.name: {**live_status.as_dict(each, follower.state), "health": _health(each, follower.state)}
        for follower, each in zip(followers, looked, strict=True)
    }
    return trees if len(trees) > 1 else next(iter(trees.values()))


def _health(status: live_status.Status, state: RunState) -> dict[str, object]:
    found = health(state, standing=Standing(status.words, status.mark))
    rows = {row.key: {"mark": row.mark, "remedy": row.remedy} for row in found.rows}
    return {"verdict": found.kind, "mark": found.mark, "sentence": found.sentence, "remedy": found.remedy, "rows": rows}


def _print(console: Console, followers: Sequence[FollowedRun], looked: Sequence[live_status.Status]) -> None:
    for follower, each in zip(followers, looked, strict=True):
        status_view.show(console, str(follower.run_dir), each, follower.state, follower.numbers.columns)


def _watch(console: Console, followers: Sequence[FollowedRun]) -> list[live_status.Status]:
    """Redraws one view until the run has ended. Ctrl-C ends the view, not the run."""

    def panels() -> Group:
        pairs = zip(followers, looked, strict=True)
        return Group(
            *(status_view.panel(str(one.run_dir), each, one.state, one.numbers.columns) for one, each in pairs)
        )

    looked = _look(followers)
    try:
        with LiveView(panels(), console=console, auto_refresh=False) as redrawn:
            while any(status.life in live_status.LIVING for status in looked):
                time.sleep(EVERY)
                looked = _look(followers)
                redrawn.update(panels(), refresh=True)
    except KeyboardInterrupt:
        pass
    return looked


def ask_for_stacks(run: Path) -> int:
    """Makes a live run write the stacks of its processes, as `kill -USR1` does, and prints them. Raises HeadraceError if it
    cannot."""
    place = live_status.parts_of(run)[0]
    live = live_status.read_live(place)
    if live is None or not held(place):
        raise ConfigError(f"{run} is not running; headrace status {run} shows how it ended")
    if stacks.listens(live.pid) is False:
        raise HeadraceError(f"the process {live.pid} cannot answer: it is {stacks.process_state(live.pid)}")
    before = set((run / "logs").glob("stacks-*.txt"))
    os.kill(live.pid, signal.SIGUSR1)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if new := set((run / "logs").glob("stacks-*.txt")) - before:
            time.sleep(0.1)
            echo(max(new).read_text(encoding="utf-8").rstrip("\n"))
            return 0
        time.sleep(0.1)
    raise HeadraceError(
        f"the process {live.pid} did not answer within {PATIENCE:.0f} s: it is {stacks.process_state(live.pid)}; the stacks of "
        f"its threads may be in {run / 'logs' / 'controller.stacks'}"
    )
