"""Scalars for Weights & Biases: to its server if this machine is logged in, else to files that `wandb sync` uploads."""

from __future__ import annotations

import netrc
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headrace.facts.facts import RunStarted
from headrace.facts.recorder import Sink
from headrace.views.sinks.queued import QueuedSink, described, hushed, id_on_dashboards


def open_sink(run_dir: Path, resume_at_step: int | None, say: Callable[[str], None]) -> Sink:
    return QueuedSink("wandb", WandbRun(run_dir), say)


class WandbRun:
    """A run of the project `WANDB_PROJECT`, by default `headrace`. A resumed run continues it; steps that are done again are points of their
    own there, because W&B takes nothing back."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._run: Any = None

    def start(self, fact: RunStarted) -> None:
        import wandb

        if self._run is not None:
            return
        with hushed():
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "headrace"),
                name=fact.name,
                id=id_on_dashboards(self._run_dir),
                resume="allow",
                dir=str(self._run_dir),
                mode=chosen_mode(os.environ),  # type: ignore[arg-type]
                config=described(fact),
                settings=wandb.Settings(
                    # Otherwise `init` gives back a run that is open in this process: of another adapter, or of the user's own code.
                    reinit="create_new",
                    console="off",
                    silent=True,
                    disable_git=True,
                    save_code=False,
                    x_disable_stats=True,
                    x_disable_meta=True,
                ),
            )
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        if self._run is not None:  # W&B's own step may not go back, so ours is a number like the others
            self._run.log({**values, "step": step})

    def close(self) -> None:
        if self._run is not None:
            with hushed():
                self._run.finish()
            self._run = None


def chosen_mode(environment: Mapping[str, str]) -> str:
    """`WANDB_MODE`; else online if there is a key, in `WANDB_API_KEY` or from `wandb login`: without one W&B would ask for it."""
    if mode := environment.get("WANDB_MODE"):
        return mode
    host = urlsplit(environment.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    known = None
    with suppress(OSError, netrc.NetrcParseError):
        known = netrc.netrc(environment.get("NETRC")).authenticators(host)
    return "online" if environment.get("WANDB_API_KEY") or known else "offline"
