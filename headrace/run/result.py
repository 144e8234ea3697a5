"""The result of `headrace.train`, and of `headrace.open`: the same object for a run that is on the disk."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any, Literal

from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.printing import say
from headrace.facts import progress
from headrace.facts.facts import Evaluated
from headrace.facts.kept_settings import CONFIG
from headrace.facts.records import METRICS, REPORT, StepRow, read_metrics
from headrace.facts.run_state import RunState
from headrace.facts.texts import with_error
from headrace.facts.verdicts import at_the_end, ends_of
from headrace.loop.checkpoints import Checkpoints
from headrace.processes.health.live_status import LIVING, Follower, Status, parts_of
from headrace.run import one_shot
from headrace.run.config import config_of_run, read_config
from headrace.run.lane import Lane
from headrace.run.pieces import pieces_of
from headrace.run.run_directory import held
from headrace.version import __version__
from headrace.views.report import page_of
from headrace.views.report.data import sampled

HEIGHT = 640
"""Height of the report in a notebook, in pixels."""


@dataclass(frozen=True, repr=False, kw_only=True)
class RunResult:
    """The result of a run. A notebook shows its report. Tables are dicts of lists, which `pandas.DataFrame` accepts."""

    directory: Path
    reason: str
    """`finished`, or `interrupted` (by Ctrl-C, or by a callback that raised `StopTraining`). Of a run that was opened it may also be the error
    that ended it, how it died, or `still going on: training`."""
    step: int
    """Number of optimizer steps done."""
    before: Evaluated | None
    after: Evaluated | None
    """The held-out reward before and after training; None if it was not measured."""
    report: Path
    """An HTML file; it is not there while a run goes on, unless `headrace report` has written it."""
    state: RunState = field(compare=False)
    """All counts of the metrics, and their rows; only some of them after a resume. `history` has all."""
    adapters: dict[str, RunResult] = field(default_factory=dict)
    """The results of all adapters, if several were trained. The other fields are then those of the first one."""

    @property
    def history(self) -> dict[str, list[Any]]:
        """A row for each optimizer step, including those before a resume. The columns are the fields of `headrace.Step`.

        Raises HeadraceError if the run was resumed and its `metrics.jsonl` is gone: a resume has not read the steps before its checkpoint."""
        if self.state.whole:
            return progress.history(self.state.rows)
        path = self._first_directory / METRICS
        if not path.is_file():
            raise HeadraceError(f"{path} is gone, and with it the steps before the resume")
        return progress.history(fact for fact in read_metrics(path.parent) if isinstance(fact, StepRow))

    @property
    def held_out(self) -> dict[str, list[Any]]:
        """A row for each evaluation of the held-out prompts. The columns are the fields of `headrace.Evaluation`."""
        return progress.held_out(self.state.evals)

    @property
    def sets(self) -> dict[str, dict[str, list[Any]]]:
        """A table like `held_out` for each of `eval.sets`, by its name."""
        return {name: progress.held_out(evals) for name, evals in self.state.sets.items()}

    @property
    def samples(self) -> dict[str, list[Any]]:
        """The best and the worst rollout of one group, for some steps spread over the run, as in the report."""
        looks = sampled(self._first_directory)
        return {
            "step": [view.step for view in looks],
            "prompt": [view.prompt for view in looks],
            "completion": [view.text for view in looks],
            "answer": [view.answer for view in looks],
            "extracted": [view.extracted for view in looks],
            "reward": [view.reward for view in looks],
            "rewards": [view.rewards for view in looks],
            "length": [len(view.tokens) for view in looks],
            "stop": [view.stop for view in looks],
            "lag": [max(view.lags, default=0) for view in looks],
        }

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints that are kept, oldest first."""
        return Checkpoints(self._first_directory / "checkpoints", keep=1).all()

    def export(
        self, to: str | Path, dtype: Literal["bfloat16", "float32"] = "bfloat16", *, merge: bool = False
    ) -> Path:
        """Writes the newest checkpoint to `to`, for `transformers` (an adapter: for peft) to load, and returns the checkpoint."""
        path = self._first_directory
        return one_shot.export(read_config(config_of_run(path)), path, Path(to), dtype=dtype, merge=merge)

    @property
    def _first_directory(self) -> Path:
        return self.report.parent

    def __repr__(self) -> str:
        started, words = self.state.started, []
        words.append(f"{self.reason} at step {self.step}" + (f" of {started.steps}" if started else ""))
        if self.before and self.after:
            words.append(f"held-out reward {self.before.reward_mean:.3f} → {_mean(self.after)}")
        elif evaluation := self.after or self.before:
            words.append(f"held-out reward {_mean(evaluation)}")
        if self.adapters:
            words.append(f"adapters {', '.join(self.adapters)}")
        return f"<headrace run {self.directory}: {', '.join(words)}>"

    def _repr_html_(self) -> str:
        """The report in its own frame, so that it cannot change the notebook, and the notebook's style cannot change it."""
        title = f"<div>{escape(repr(self)[1:-1])}</div>"
        try:
            page = self._page()
        except OSError:
            return f"{title}<div>There is no report in {escape(str(self.report))}.</div>"
        frame = f'<iframe sandbox="allow-scripts" style="width:100%;height:{HEIGHT}px;border:1px solid #8884;border-radius:6px" '
        return f'{title}{frame}srcdoc="{escape(page)}"></iframe>'

    def _page(self) -> str:
        """Returns the report, made anew if facts were recorded since it was written. Raises OSError if run and report are gone."""
        metrics = self._first_directory / METRICS
        if not metrics.is_file() or (self.report.is_file() and self.report.stat().st_mtime >= metrics.stat().st_mtime):
            return self.report.read_text(encoding="utf-8")
        run_dir = metrics.parent
        return page_of(run_dir, pieces_of(run_dir), Follower(run_dir).look(held(run_dir), time.time()))


def _mean(evaluation: Evaluated) -> str:
    return with_error(evaluation.reward_mean, evaluation.reward_sem)


def result_of(directory: Path, lanes: Mapping[str, Lane]) -> RunResult:
    """The result of one lane, or of several lanes by the names of their adapters."""
    results = {name: _one(lane.directory.path, lane) for name, lane in lanes.items()}
    if list(results) == [""]:
        return results[""]
    return _one(directory, next(iter(lanes.values())), results)


def _one(directory: Path, lane: Lane, adapters: dict[str, RunResult] | None = None) -> RunResult:
    session = lane.session
    return RunResult(
        directory=directory,
        reason=session.reason,
        step=session.step,
        before=session.before,
        after=session.after,
        report=lane.report,
        state=lane.storage.recorder.state,
        adapters=adapters or {},
    )


# --- A run that is on the disk


def open_run(directory: Path) -> RunResult:
    """Reads a run that has ended, or as far as it is. Raises ConfigError if there is none, and HeadraceError if it cannot be read."""
    if not directory.is_dir():
        raise ConfigError(_nothing_at(directory))
    parts = [directory] if (directory / METRICS).is_file() else parts_of(directory)
    places = [place for place in parts if (place / METRICS).is_file()]
    if not places or (places != [directory] and not (directory / CONFIG).is_file()):  # then the runs in it are others
        inside = sorted(path.parent.name for path in directory.glob(f"*/{METRICS}"))
        runs = f"; the directory of a run is meant, such as {directory / inside[0]}" if inside else ""
        raise ConfigError(f"{directory} holds no run: it has no {METRICS}{runs}")
    opened = [_opened(place) for place in places]
    if places == [directory]:
        return opened[0]
    results = {place.name: result for place, result in zip(places, opened, strict=True)}
    return replace(opened[0], directory=directory, adapters=results)


def _nothing_at(path: Path) -> str:
    if path.is_file():
        return f"{path} is a file, but a run is a directory: {path.parent} may be the one"
    below = Path("runs") / path
    return f"there is no run {path}" + (f"; there is one at {below}" if below.is_dir() else "")


def _opened(directory: Path) -> RunResult:
    follower = Follower(directory)
    status, state = follower.look(held(directory), time.time()), follower.state
    if state.started is None and status.life not in LIVING:
        raise HeadraceError(
            f"the facts of {directory} do not say that a run began: it ended before, or another version of headrace than {__version__} wrote "
            f"them; open it with that one"
        )
    for warning in state.warnings:
        if METRICS in warning.message:  # lines that another version may have written
            say(f"{directory}: {warning.message}")
    before, _ = ends_of(state.evals)
    return RunResult(
        directory=directory,
        reason=_reason(status),
        step=state.step,
        before=before,
        after=at_the_end(state),
        report=directory / REPORT,
        state=state,
    )


def _reason(status: Status) -> str:
    return f"still going on: {status.words}" if status.life in LIVING else status.words
