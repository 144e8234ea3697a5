"""headrace: asynchronous reinforcement learning for language models.

    import headrace

    headrace.train("recipes/demo/demo.toml")
    headrace.train("mine.toml", reward=lambda prompts, completions, **columns: [float(len(c)) for c in completions])

Everything is loaded on first use (PEP 562): `import headrace` takes milliseconds and does not load torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headrace.version import __version__

if TYPE_CHECKING:
    from headrace.core.errors import StopTraining
    from headrace.episodes.sandbox.tool import run_python
    from headrace.episodes.scoring.functions import Rewards
    from headrace.episodes.scoring.job import trl_reward
    from headrace.facts.facts import Evaluated
    from headrace.facts.progress import Evaluation, Step
    from headrace.run.config import RunConfig, load_config
    from headrace.run.result import RunResult

# Without `open`: `from headrace import *` must not hide Python's own.
__all__ = [
    "Evaluation",
    "RunConfig",
    "RunResult",
    "Step",
    "StopTraining",
    "__version__",
    "evaluate",
    "export",
    "load_config",
    "run_python",
    "train",
    "trl_reward",
]

_HOMES = {
    "Evaluation": "headrace.facts.progress",
    "RunConfig": "headrace.run.config",
    "RunResult": "headrace.run.result",
    "Step": "headrace.facts.progress",
    "StopTraining": "headrace.core.errors",
    "load_config": "headrace.run.config",
    "run_python": "headrace.episodes.sandbox.tool",
    "trl_reward": "headrace.episodes.scoring.job",
}


def train(
    config: RunConfig | Mapping[str, Any] | str | Path | None = None,
    reward: Rewards | None = None,
    *,
    dataset: Any = None,
    on_step: Callable[[Step], object] | None = None,
    on_evaluation: Callable[[Evaluation], object] | None = None,
    sets: Sequence[str] = (),
    resume: str | Path | None = None,
) -> RunResult:
    """Trains until the run's last step, as the command `headrace train` does. Works in a notebook, with a live view.

    `config` is a TOML file, a dict of the same shape or a `RunConfig`; `sets` are strings such as "train.steps=100".
    `reward(prompts=, completions=, **columns)` returns one number per completion and replaces the config's functions. Pass several as a
    list or as a dict of name -> function; instead of a function, a pair (function, weight) may stand. `trl_reward` marks a function that
    was written for TRL.
    `dataset` replaces the config's task: a list of dicts, a `datasets.Dataset`, a pandas frame, or any iterable of dicts.
    `on_step` and `on_evaluation` are called in this thread, while the run continues, with a `Step` and an `Evaluation`. If one raises
    `StopTraining`, the run ends after the current step; any other exception ends it too, and is then raised here.
    `resume` is the directory of a run to resume, with its own settings if `config` is left out. Functions and rows must be passed again.
    Raises `errors.HeadraceError`.
    """
    from headrace.run.python_inputs import settings_of, with_python_inputs

    goes_on = resume if config is not None else None  # the run's own settings have its choices
    resolved, inputs = with_python_inputs(settings_of(config, resume), sets, reward, dataset, goes_on)
    from headrace.run import run
    from headrace.run.run import Callbacks

    callbacks = Callbacks(on_step, on_evaluation) if on_step or on_evaluation else None
    return run.train(resolved, Path(resume) if resume is not None else None, inputs, callbacks)


def evaluate(
    config: RunConfig | Mapping[str, Any] | str | Path | None = None,
    run: str | Path | None = None,
    prompts: int | None = None,
    *,
    reward: Rewards | None = None,
    dataset: Any = None,
    sets: Sequence[str] = (),
    step: int | None = None,
    of: str = "",
) -> Evaluated:
    """Measures the mean reward on `prompts` held-out prompts, of the config's model or of the last checkpoint of the directory `run`. `of`: the
    name of one of `eval.sets`, which is measured instead, on all of its prompts.

    The result's `step` is the step of that checkpoint. If the newest checkpoint is older than the last step of the run, it is refused
    unless `step` names it. With `run`, the settings are those of the run, changed by `sets`; a `config` is then ignored, and its
    differences are printed to stderr. `reward` and `dataset`: as for `train`.
    """
    from headrace.run.python_inputs import report_differences, settings_of, with_python_inputs

    resolved, inputs = with_python_inputs(settings_of(None if run else config, run), sets, reward, dataset)
    if run and config is not None:
        report_differences(config, resolved, Path(run))
    from headrace.run import one_shot

    directory = Path(run) if run is not None else None
    return one_shot.evaluate(resolved, directory, prompts, step, inputs, of=of)[0]


def export(
    run: str | Path,
    to: str | Path,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    *,
    merge: bool = False,
    step: int | None = None,
) -> Path:
    """Writes the model of a run's last checkpoint to `to`, for `transformers` to load. Returns the checkpoint.

    A LoRA run gives its adapter, for peft to load, or with `merge` a whole model that contains the adapter. If the newest checkpoint is
    older than the last step of the run, it is refused unless `step` names it.
    """
    from headrace.run import one_shot
    from headrace.run.config import config_of_run, read_config

    return one_shot.export(
        read_config(config_of_run(Path(run))), Path(run), to=Path(to), dtype=dtype, merge=merge, step=step
    )


def open(run: str | Path) -> RunResult:
    """Opens a run that is on the disk, in this process or another one's, as the object that `train` returns: `history`, `held_out`, `samples`,
    `export`, and its report in a notebook.

    `run` is its directory. A run that still goes on is read as far as it is: `reason` says so, and opening it again reads what was added.
    Raises `errors.HeadraceError` for a directory that holds no run, or one that this version cannot read.
    """
    from headrace.run.result import open_run

    return open_run(Path(run))


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "open"])
