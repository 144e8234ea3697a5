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
    """Number of checkpoints that are kept, the newest ones."""
    patience: float = Field(default=300.0, ge=0)
    """Seconds for which a run that has done its steps retries its last checkpoint if the disk does not take it. After
    that it ends with an error, since without weights on the disk it is not finished. 0 tries once."""
    flush_journal: bool = True
    """Flush the journal to the disk after every step, so that a loss of power costs at most one step. A killed process
    loses nothing in either case."""


@dataclass(frozen=True, config=_STRICT)
class EvalConfig:
    prompts: int = Field(default=64, ge=0)
    """Number of held-out prompts; 0 switches evaluation off."""
    samples: int = Field(default=4, gt=0)
    """Completions per prompt."""
    temperature: float = Field(default=1.0, ge=0)
    """1 measures the policy that is trained, 0 its greedy answers."""
    every: int = Field(default=0, ge=0)
    """Optimizer steps between evaluations during training; 0 evaluates before and after training only."""


@dataclass(frozen=True, config=_STRICT)
class ChosenConfig:
    """What headrace chose where the settings leave the choice. A run keeps it in its `config.toml`; it is not to be
    set."""

    wishes: dict[str, str | int] = Field(default_factory=dict)
    """The setting as it was given, by the setting whose value was chosen: `"engine.dtype" = "auto"`."""
    why: dict[str, str] = Field(default_factory=dict)
    """The reasons in words, with the measurements."""
    speeds: dict[str, float] = Field(default_factory=dict)
    """The speeds that `train.minutes` was fitted with, in seconds (`Speeds` of `headrace/auto/fit.py`)."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class WatchConfig:
    """What is watched while a run trains: waits, each with a name, an owner and two deadlines (C6); failures; and the
    identity of weights."""

    warn_after: float = Field(default=120.0, gt=0)
    """Seconds after which the run reports who waits for whom."""
    stop_after: float = Field(default=1800.0, gt=0)
    """Seconds after which the run stops with the same sentence."""
    failed_warn: float = Field(default=0.05, ge=0, le=1)
    """A warning is shown if more than this share of the last 64 rollouts (of at least 8 prompts) failed because of data
    or reward."""
    failed_pause: float = Field(default=0.5, gt=0, le=1)
    """The run pauses if this share of them failed: it writes a checkpoint and says why. `--resume` continues it."""
    outages: int = Field(default=64, gt=0)
    """Number of consecutive groups left without a rollout by the engine or the network, after which the run pauses."""
    identity_every: int = Field(default=10, ge=0)
    """Versions between two policy-identity probes (C3). The fingerprint is checked at every version. 0 switches probes
    off."""

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
