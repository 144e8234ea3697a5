"""Settings of the run as a whole: checkpoints, evaluation, deadlines of waits."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from headrace.settings.strict import STRICT


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    every: int = Field(default=50, ge=0)
    """Optimizer steps between checkpoints; 0 writes only one at the end."""
    keep: int = Field(default=2, gt=0)
    """Newest checkpoints that are kept."""
    patience: float = Field(default=300.0, ge=0)
    """Seconds for which the last checkpoint is retried if writing fails, before the run ends with an error. 0: one
    attempt."""
    flush_journal: bool = True
    """Flush the journal to the disk after every step: a loss of power costs at most one step."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvalSetConfig:
    name: str
    """Its name in metrics (`held_out/NAME/reward`), board and reports: letters, digits, "_", "-" and "."."""
    prompts: int = Field(default=0, ge=0)
    """The most prompts of this set; 0: `eval.prompts`."""
    samples: int = Field(default=0, ge=0)
    """Completions per prompt; 0: `eval.samples`."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature; `eval.temperature` if not given."""
    every: int = Field(default=0, ge=0)
    """Optimizer steps between measurements during training, a multiple of `eval.every`; 0: whenever the held-out prompts are measured."""
    task: dict[str, Any] = Field(default_factory=dict)
    """Settings of [task] for this set, on top of the run's, or, with another `kind`, instead of them."""
    environment: dict[str, Any] = Field(default_factory=dict)
    """Replaces the run's [environment]."""
    reward: dict[str, Any] = Field(default_factory=dict)
    """Replaces the run's [reward]."""

    @model_validator(mode="after")
    def _has_a_name(self) -> EvalSetConfig:
        if not SET_NAME.fullmatch(self.name):
            raise ValueError(
                f'eval.sets: name = "{self.name}" is part of the names of metrics; use at most 40 letters, digits, "_", "-" and "." in it'
            )
        return self

    @property
    def has_own_rows(self) -> bool:
        """Whether the set measures the rows of a file of its own."""
        return bool(self.task.get("path"))


SET_NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvalConfig:
    prompts: int = Field(default=64, ge=0)
    """Held-out prompts; 0 switches evaluation off."""
    samples: int = Field(default=4, gt=0)
    """Completions per prompt."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature: 1 measures the trained policy, 0 its greedy answers."""
    every: int = Field(default=0, ge=0)
    """Optimizer steps between evaluations during training; 0: only before and after. Training goes on meanwhile, so
    long answers may be finished by later weights; a warning says where most tokens are theirs."""
    name: str = ""
    """The held-out prompts' name beside other sets; empty: "held out"."""
    sets: tuple[EvalSetConfig, ...] = ()
    """Further sets of prompts that are measured whenever the held-out prompts are. The verdict is of the held-out prompts alone."""

    @property
    def beside(self) -> int:
        """Completions of the further sets in one evaluation, at most."""
        return sum(one.prompts * one.samples for one in map(self.of, self.sets))

    def of(self, one: EvalSetConfig) -> EvalConfig:
        """Returns the settings with which a set is measured."""
        return EvalConfig(
            name=one.name,
            prompts=one.prompts or self.prompts,
            samples=one.samples or self.samples,
            temperature=self.temperature if one.temperature is None else one.temperature,
            every=self.every,
        )

    @model_validator(mode="after")
    def _has_fitting_sets(self) -> EvalConfig:
        names = [self.name, *(one.name for one in self.sets)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"eval.sets: two sets are called {twice[0]}; give each a name of its own")
        if self.name and not SET_NAME.fullmatch(self.name):
            raise ValueError(
                f'eval.name = "{self.name}" is part of the names of metrics; use at most 40 letters, digits, "_", "-" and "." in it'
            )
        if self.sets and not self.prompts:
            raise ValueError(
                "eval.sets are measured beside the held-out prompts, and eval.prompts = 0 switches evaluation off; set it, or remove the sets"
            )
        for one in self.sets:
            if one.every and not self.every:
                raise ValueError(
                    f"eval.sets: {one.name} has every = {one.every}, and with eval.every = 0 nothing is measured during training; set eval.every = {one.every}"
                )
            if one.every and one.every % self.every:
                more = -(-one.every // self.every) * self.every
                raise ValueError(
                    f"eval.sets: {one.name} has every = {one.every}, and sets are measured beside the held-out prompts, each eval.every = {self.every} steps; "
                    f"use a multiple of that, such as {more}"
                )
        return self


@dataclass(frozen=True, config=STRICT)
class ChosenConfig:
    """The values that headrace chose for this run, written to the run's own `config.toml`. Not to be set by hand."""

    wishes: dict[str, str | int] = Field(default_factory=dict)
    """The original value of every setting that was chosen: `"engine.dtype" = "auto"`."""
    why: dict[str, str] = Field(default_factory=dict)
    """The reason for each choice, with the measured figures."""
    models: dict[str, str] = Field(default_factory=dict)
    """The commit of each model of the hub, by the name that the settings gave it: `"org/name" = "org/name@commit"`."""
    speeds: dict[str, float] = Field(default_factory=dict)
    """Measured seconds that `train.minutes` was fitted with."""


@dataclass(frozen=True, config=STRICT, kw_only=True)
class WatchConfig:
    """The checks of a run while it trains: waits, each with a name, an owner and two deadlines (C6); failed rollouts; and the weights."""

    warn_after: float = Field(default=120.0, gt=0)
    """Seconds of a wait after which the run reports what waits for what."""
    stop_after: float = Field(default=1800.0, gt=0)
    """Seconds of a wait after which the run stops with that report; a trainer this late counts as dead
    (train.max_deaths)."""
    failed_warn: float = Field(default=0.05, ge=0, le=1)
    """Warn if more than this share of the last 64 rollouts (of at least 8 prompts) failed because of data or reward."""
    failed_pause: float = Field(default=0.5, gt=0, le=1)
    """Pause if at least this share failed: the run writes a checkpoint and says why; `--resume` continues it."""
    outages: int = Field(default=64, gt=0)
    """Pause after this many groups in a row without a rollout because of engine or network."""
    identity_every: int = Field(default=10, ge=0)
    """Versions between two policy-identity probes (C3); 0: none."""
    mismatch: float = Field(default=0.05, gt=0)
    """engine.weights = "int8" or "fp8": the largest mean |difference| in nats between the log-probs of the served and the trained policy; above it
    the run ends."""
    trial: bool = True
    """Publish changed weights once before the first version, which finds an engine that keeps old values (docs/weight_sync.md). Needs
    `identity_every` above 0."""

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


WILDCARDS = ("0.0.0.0", "::", "")
"""Hosts that stand for every address of a machine. Nobody can connect to them."""


LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")
"""Hosts that only this machine reaches."""
