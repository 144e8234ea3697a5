"""The board: the list of runs, and the runs that somebody looks at."""

from __future__ import annotations

import csv
import io
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from headrace.facts.health import Standing
from headrace.facts.number_tables import MINUTES, STEP, TOKENS, title_of
from headrace.facts.records import METRICS
from headrace.facts.rollout_view import Pieces
from headrace.facts.run_state import open_warnings
from headrace.facts.verdicts import advices
from headrace.views.board.board_parts import Steps, part
from headrace.views.board.browsing import Browser, RolloutPage, RolloutQuery
from headrace.views.board.followed_run import FollowedRun, RunLine, RunList
from headrace.views.board.swimlanes import LaneQuery, swimlanes
from headrace.views.report.side_by_side import differences
from headrace.web.errors import Refused

PATIENCE = 0.7
"""Seconds for which a request reads a run before it answers with what there is."""
QUICK = 4 << 20
"""Bytes that a request reads at once. More are left to `look`, unless nothing is known yet."""
FRESH = 0.5
"""Seconds for which the list of runs is not read again."""


class RunsBoard:
    """Answers about the runs of one directory. Its methods may be called by several threads."""

    def __init__(
        self,
        directory: Path,
        *,
        held: Callable[[Path], bool],
        make_pieces: Callable[[Path], Pieces | None],
        saves: Path | None = None,
    ) -> None:
        """`held`: whether a process trains in a directory. `make_pieces`: returns what splits the tokens of a run into text. `saves`: where
        numbers of long runs are kept."""
        self.directory, self._make_pieces, self._saves = directory, make_pieces, saves
        self._list = RunList(directory, held)
        self._lock = threading.RLock()
        self._opened: dict[str, FollowedRun] = {}
        self._browsers: dict[str, Browser] = {}
        self._lines: list[RunLine] = []
        self._looked = 0.0
        self.closed = False
        """Set when the server ends; answers that never end watch it."""

    def lines(self) -> list[RunLine]:
        with self._lock:
            if time.monotonic() - self._looked > FRESH:
                self._lines, self._looked = self._list.lines(), time.monotonic()
            return self._lines

    def look(self, names: Sequence[str]) -> tuple[dict[str, Any], bool]:
        """Reads the named runs for a moment. Returns the list, what is known of these runs, and whether there is more to read."""
        known, more = {}, False
        for name in names:
            if run := self._find(name):
                more |= run.catch_up(PATIENCE / 2)
                known[name] = self._progress(run)
        return {"runs": msgspec.to_builtins(self.lines()), "opened": known}, more

    @staticmethod
    def _progress(run: FollowedRun) -> dict[str, Any]:
        state, true = run.state, open_warnings(run.state)
        return {
            "version": run.version,
            "read": round(run.read_share, 3),
            "warnings": {warning.key or warning.message: warning.message for warning in true[-5:]},
            "warned": len(true) + len(state.deaths),
            "deaths": len(state.deaths),
            "advice": {advice.name: advice.sentence for advice in advices(state)},
        }

    def run(self, name: str) -> FollowedRun:
        """Returns a run with the newest numbers that can be had at once. Raises Refused (404) for a name that is not in the list."""
        run = self._find(name)
        if run is None:
            raise Refused(404, f"there is no run {name} here", "no_run")
        if not run.version or run.unread < QUICK:
            run.catch_up(PATIENCE)
        return run

    def _find(self, name: str) -> FollowedRun | None:
        with self._lock:
            opened = self._opened.get(name)
            if opened and not (opened.run_dir / METRICS).is_file():  # it was deleted: its last numbers are nobody's
                del self._opened[name]
                self._browsers.pop(name, None)
            if name not in self._opened:
                path = self._list.places().get(name)
                if path is None:
                    return None
                self._opened[name] = FollowedRun(path, self._saves)
            return self._opened[name]

    def part(self, name: str, which: str, steps: Steps = None) -> str:
        run = self.run(name)
        unread = run.read_share < 1.0
        note = (
            f'<p class="banner">{100 * run.read_share:.0f} % of the facts have been read so far.</p>' if unread else ""
        )
        standing = next((Standing(line.words, line.mark) for line in self.lines() if line.name == name), None)
        return note + part(which, run.run_dir, run.state, run.numbers, asked=steps, standing=standing)

    def metrics(self, names: Sequence[str]) -> dict[str, dict[str, float | None]]:
        """Returns every number by its name, with the last value of each run that has it."""
        found: dict[str, dict[str, float | None]] = {}
        for name in names:
            columns = self.run(name).numbers.columns
            for column in columns.names:
                found.setdefault(column, {})[name] = columns.last(column)
        return dict(sorted(found.items()))

    def curves(
        self,
        names: Sequence[str],
        metrics: Sequence[str],
        over: str,
        *,
        window: int,
        within: tuple[float, float],
        points: int,
    ) -> dict[str, Any]:
        """Returns `{metric: {run: {x, y, low, high}}}`, the metrics' titles, and how many steps a point stands for."""
        drawn: dict[str, dict[str, Any]] = {metric: {} for metric in metrics}
        merged = 1
        for name in names:
            columns = self.run(name).numbers.columns
            for metric in metrics:
                curve = columns.drawn(metric, over, window=window, within=within, points=points)
                if not len(curve.x):
                    continue
                merged = max(merged, curve.merged)
                drawn[metric][name] = {"x": curve.x.tolist(), "y": curve.y.tolist()}
                if curve.merged > 1:
                    drawn[metric][name] |= {"low": curve.low.tolist(), "high": curve.high.tolist()}
        return {"curves": drawn, "titles": {metric: title_of(metric) for metric in metrics}, "merged": merged}

    def differences(self, names: Sequence[str]) -> str:
        return differences({name: self.run(name).run_dir for name in names})

    def rollouts(self, name: str, question: RolloutQuery) -> RolloutPage:
        run = self.run(name)
        return self._browser(name, run).ask(question, run.numbers.groups, run.state.step)

    def compared(self, name: str, places: tuple[tuple[int, int], tuple[int, int]]) -> str:
        """Returns two rollouts of a run as `Browser.compare` does."""
        return self._browser(name, self.run(name)).compare(places)

    def lanes(self, name: str, query: LaneQuery) -> str:
        run = self.run(name)
        return swimlanes(run.run_dir, run.state, run.numbers.columns, query, self._browser(name, run).groups)

    def _browser(self, name: str, run: FollowedRun) -> Browser:
        with self._lock:
            if name not in self._browsers:
                self._browsers[name] = Browser(run.run_dir, self._make_pieces)
            return self._browsers[name]

    def csv(self, names: Sequence[str], metrics: Sequence[str]) -> Iterator[str]:
        """Returns the lines of a table: one row for each run and step, one column for each number. Raises Refused (404) for a run that is not here, and for a
        number that none of them has."""
        runs = {name: self.run(name) for name in names}
        for run in runs.values():  # a table is whole, however long a run is; pages say how much of it they have read
            while not self.closed and run.catch_up(PATIENCE):
                pass
        known = {metric for run in runs.values() for metric in run.numbers.columns.names}
        unknown = [metric for metric in metrics if metric not in known]
        if known and unknown:  # runs without a step have none yet
            close = get_close_matches(unknown[0], known, n=3)
            raise Refused(
                404, f"no run has a number {unknown[0]}" + (f"; close are {', '.join(close)}" if close else "")
            )
        return _table(runs, metrics)


def _table(runs: Mapping[str, FollowedRun], metrics: Sequence[str]) -> Iterator[str]:
    yield _line(["run", STEP, MINUTES, TOKENS, *metrics])
    for name, run in runs.items():
        columns = run.numbers.columns
        wanted = [dict(zip(*map(list, columns.series(column)), strict=True)) for column in (MINUTES, TOKENS, *metrics)]
        for step in sorted(set().union(*wanted)):
            yield _line([name, step, *(series.get(step, "") for series in wanted)])


def _line(cells: Sequence[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()
