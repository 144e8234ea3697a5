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
class WatchConfig:
    """C6: every wait has a name, an owner and two deadlines."""

    warn_after: float = Field(default=120.0, gt=0)
    """Seconds after which the run says who waits for whom."""
    stop_after: float = Field(default=1800.0, gt=0)
    """Seconds after which the run stops with that sentence."""
    identity_every: int = Field(default=10, ge=0)
    """Versions between two policy-identity probes (C3); the fingerprint is checked at every version. 0 switches probes off."""

    @model_validator(mode="after")
    def _warn_before_stop(self) -> WatchConfig:
        if self.warn_after >= self.stop_after:
            raise ValueError(f"watch.warn_after ({self.warn_after}) must be below watch.stop_after ({self.stop_after})")
        return self
