"""The result of `headrace.train`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal

from headrace.core.errors import HeadraceError
from headrace.facts import progress
from headrace.facts.facts import Evaluated
from headrace.facts.records import METRICS, StepRow, read_metrics
from headrace.facts.run_state import RunState
from headrace.facts.texts import with_error
from headrace.loop.checkpoints import Checkpoints
from headrace.run import one_shot
from headrace.run.config import config_of_run, read_config
from headrace.run.lane import Lane
from headrace.views.report.data import sampled

HEIGHT = 640
"""Height of the report in a notebook, in pixels."""


@dataclass(frozen=True, repr=False, kw_only=True)
class RunResult:
    """The result of a run. A notebook shows its report. Tables are dicts of lists, which `pandas.DataFrame` accepts."""

    directory: Path
    reason: str
    """`finished`, or `interrupted` (by Ctrl-C, or by a callback that raised `StopTraining`)."""
    step: int
    """Number of optimizer steps done."""
    before: Evaluated | None
    after: Evaluated | None
    """The held-out reward before and after training; None if it was not measured."""
    report: Path
    """An HTML file."""
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
        """A row for each evaluation. The columns are the fields of `headrace.Evaluation`."""
        return progress.held_out(self.state.evals)

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
            page = self.report.read_text(encoding="utf-8")
        except OSError:
            return f"{title}<div>There is no report in {escape(str(self.report))}.</div>"
        frame = f'<iframe sandbox="allow-scripts" style="width:100%;height:{HEIGHT}px;border:1px solid #8884;border-radius:6px" '
        return f'{title}{frame}srcdoc="{escape(page)}"></iframe>'


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
