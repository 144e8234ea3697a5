"""Settings of the run as a whole: checkpoints, evaluation, and how long a wait may last."""

from __future__ import annotations

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_STRICT)
class CheckpointConfig:
    every: int = Field(default=50, ge=0)
    """Optimizer steps between checkpoints; 0 writes one at the end only."""
    keep: int = Field(default=2, gt=0)
    """How many of the newest are kept."""
    patience: float = Field(default=300.0, ge=0)
    """Seconds for which a run that has done its steps tries its last checkpoint again where the disk does not take it. After that
    it ends with an error: without its weights on the disk it is not finished. 0 tries once."""
    flush_journal: bool = True
    """Put the journal on the disk after every step: a loss of power then costs at most one. A killed process loses nothing
    either way."""


@dataclass(frozen=True, config=_STRICT)
class EvalConfig:
    prompts: int = Field(default=64, ge=0)
    """Held-out prompts; 0 measures nothing."""
    samples: int = Field(default=4, gt=0)
    """Completions of each."""
    temperature: float = Field(default=1.0, ge=0)
    """1 measures the policy that is trained, 0 its greedy answers."""
    every: int = Field(default=0, ge=0)
    """Optimizer steps between evaluations while training goes on; 0 evaluates before and after only."""


@dataclass(frozen=True, config=_STRICT)
class ChosenConfig:
    """What a run was given where its settings leave the choice, in the `config.toml` that it keeps. Not to be set."""

    wishes: dict[str, str | int] = Field(default_factory=dict)
    """What was asked for, by the setting that holds what was chosen: `"engine.dtype" = "auto"`."""
    why: dict[str, str] = Field(default_factory=dict)
    """In words, with what was measured."""
    speeds: dict[str, float] = Field(default_factory=dict)
    """Seconds that `train.minutes` was fitted with (`headrace/auto/fit.py`)."""


@dataclass(frozen=True, config=_STRICT)
class WatchConfig:
    """What a run looks at while it trains: waits, each with a name, an owner and two deadlines (C6), what fails, and the weights."""

    warn_after: float = Field(default=120.0, gt=0)
    """Seconds after which the run says who waits for whom."""
    stop_after: float = Field(default=1800.0, gt=0)
    """Seconds after which the run stops with that sentence."""
    failed_warn: float = Field(default=0.05, ge=0, le=1)
    """Share of the last 64 rollouts (of at least 8 prompts) that failed through data or reward, above which a warning is shown."""
    failed_pause: float = Field(default=0.5, gt=0, le=1)
    """Share of them from which on the run pauses: it writes a checkpoint and says why; `--resume` goes on."""
    outages: int = Field(default=64, gt=0)
    """Groups in a row that the engine or the network left without a rollout, before the run pauses."""
    identity_every: int = Field(default=10, ge=0)
    """Versions between two policy-identity probes (C3); the fingerprint is checked at every version. 0 switches probes off."""

    @model_validator(mode="after")
    def _warn_before_stop(self) -> WatchConfig:
        if self.warn_after >= self.stop_after:
            raise ValueError(f"watch.warn_after ({self.warn_after}) must be below watch.stop_after ({self.stop_after})")
        if self.failed_warn > self.failed_pause:
            raise ValueError(
                f"watch.failed_warn ({self.failed_warn}) is above watch.failed_pause ({self.failed_pause}), so that the run would pause "
                "without a warning; lower the first or raise the second"
            )
        return self
