"""Settings of the views and sinks of a run. The journal, the metrics and the report are always written."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable
from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from headrace.core.errors import ConfigError
from headrace.facts.run_totals import ENGINE, TRAINER
from headrace.settings.extras import EXTRAS, install
from headrace.settings.strict import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ObserveConfig:
    terminal: Literal["auto", "live", "plain", "off"] = "auto"
    """live: one view, redrawn; plain: a line per step; auto: live on a terminal and in a notebook, plain in a log."""
    tensorboard: bool = False
    """Write scalars for TensorBoard to `runs/<name>/tensorboard`."""
    trackio: bool = False
    """Write scalars for a local trackio dashboard; nothing leaves the machine."""
    wandb: bool = False
    """Write scalars for Weights & Biases: to its server if logged in, else to `runs/<name>/wandb` for `wandb sync`."""
    mlflow: bool = False
    """Write scalars for MLflow, to `MLFLOW_TRACKING_URI`, or else to `runs/<name>/mlruns`."""
    webhook: bool = False
    """Post start, end, a verdict that turns, and warnings to the address in `HEADRACE_WEBHOOK` (docs/board.md)."""
    engine_price: float = Field(default=0.0, ge=0)
    """Dollars an hour of an engine (each member of a fleet). With either price the run shows its cost."""
    trainer_price: float = Field(default=0.0, ge=0)
    """Dollars an hour of all the trainer's devices. A machine that does everything has its price here."""

    @property
    def sinks(self) -> list[str]:
        """The sinks that are switched on: settings that are true or false, each with a file of its name in `views/sinks/`."""
        return [field.name for field in dataclasses.fields(self) if getattr(self, field.name) is True]

    @property
    def prices(self) -> dict[str, float]:
        """Dollars an hour by pool; empty if none is set."""
        known = {ENGINE: self.engine_price, TRAINER: self.trainer_price}
        return {pool: price for pool, price in known.items() if price}

    def shared_by(self, runs: int) -> ObserveConfig:
        """Returns the settings of one of several runs that share engine and trainer: each bears its part of the prices."""
        return dataclasses.replace(self, engine_price=self.engine_price / runs, trainer_price=self.trainer_price / runs)


def check_installed(config: ObserveConfig, find: Callable[[str], object] = importlib.util.find_spec) -> None:
    """Raises `ConfigError` with the pip command if `find` does not find the package of a requested sink, or if a sink has no address."""
    if config.webhook:
        from headrace.views.sinks.webhook import address_of

        address_of(os.environ)
    for name in config.sinks:
        if name in EXTRAS and find(EXTRAS[name].module) is None:
            raise ConfigError(
                f"observe.{name} = true needs the package {name}, which is not installed: "
                f"{install(name)}, or set observe.{name} = false"
            )
