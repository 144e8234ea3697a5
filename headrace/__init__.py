"""headrace: asynchronous reinforcement learning for language models.

    import headrace

    headrace.train("recipes/demo.toml")
    headrace.train("mine.toml", reward=lambda prompts, completions, **columns: [float(len(c)) for c in completions])

Everything is loaded when first used (PEP 562): `import headrace` costs milliseconds and loads no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from headrace.config import RunConfig, load_config
    from headrace.observe.facts import Evaluated
    from headrace.orchestration.run import RunResult

__version__ = "0.1.0"

__all__ = ["RunConfig", "__version__", "evaluate", "export", "load_config", "train"]

_HOMES = {
    "RunConfig": "headrace.config",
    "load_config": "headrace.config",
}


def train(
    config: RunConfig | Mapping[str, Any] | str | Path,
    reward: Callable[..., Any] | None = None,
    *,
    sets: Sequence[str] = (),
    resume: str | Path | None = None,
) -> RunResult:
    """Trains until the run's last step; what the command `headrace train` does.

    `config` is a TOML file, a dict of the same shape or a `RunConfig`; `sets` are texts such as "train.steps=100".
    `reward(prompts=, completions=, **columns)` returns one number per completion and replaces the config's functions.
    `resume` is the directory of an earlier run to go on from. Raises `errors.HeadraceError`.
    """
    from headrace.config import load_config

    resolved = load_config(config, sets)  # before anything that takes longer to import
    from headrace.orchestration import run

    return run.train(resolved, reward=reward, resume=Path(resume) if resume is not None else None)


def evaluate(
    config: RunConfig | Mapping[str, Any] | str | Path,
    run: str | Path | None = None,
    prompts: int | None = None,
    *,
    sets: Sequence[str] = (),
    step: int | None = None,
) -> Evaluated:
    """Mean reward on `prompts` held-out prompts: of the config's model, or of the last checkpoint of the directory `run`.

    The result's `step` says which. Where the newest checkpoint is older than the steps that the run has done, it is refused
    unless `step` names it.
    """
    from headrace.config import load_config
    from headrace.orchestration import one_shot

    return one_shot.evaluate(load_config(config, sets), Path(run) if run is not None else None, prompts, step)


def export(
    run: str | Path,
    to: str | Path,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    *,
    merge: bool = False,
    step: int | None = None,
) -> Path:
    """Writes the model of a run's last checkpoint to `to`, for `transformers` to load. Returns the checkpoint.

    Of LoRA it is the adapter, for peft to load; with `merge` a whole model with the adapter in its weights. Where the newest
    checkpoint is older than the steps that the run has done, it is refused unless `step` names it.
    """
    from headrace.config import config_of_run, read_config
    from headrace.orchestration import one_shot

    return one_shot.export(read_config(config_of_run(Path(run))), Path(run), Path(to), dtype, merge, step)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
