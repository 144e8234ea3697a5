"""One call of `train`: what it was asked for, which holds for all processes of its trainer, however many of them die."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.auto.measurer import Measurer
from headrace.config import RunConfig, config_of_run, read_config
from headrace.errors import WorkerDied
from headrace.orchestration.python_inputs import PythonInputs
from headrace.orchestration.runs.callbacks import Callbacks


@dataclass(kw_only=True)
class Call:
    config: RunConfig
    resume: Path | None
    """The directory of the run to resume. None for a new run, until its trainer dies."""
    inputs: PythonInputs
    callbacks: Callbacks | None
    measurer: Measurer | None
    begun: bool = False
    """Whether `config.toml` in the run's directory holds the settings of this call. Until all is loaded it holds those of an earlier one."""
    deaths: int = 0

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self.resume or self.config.run_dir

    def outlives(self, error: WorkerDied) -> bool:
        """Whether the run goes on by itself after this death. It then does so with the settings of this call."""
        self.deaths += 1
        if error.who != "trainer" or self.deaths > self.config.train.max_deaths or not (self.begun or self.resume):
            return False
        self.resume = self.path
        if self.begun:  # what was chosen at the start, and the steps that fit into `train.minutes`
            self.config = read_config(config_of_run(self.resume))
        return True
