"""One call of `train`: what it was asked for, which holds for all processes of its trainer, however many of them die."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from headrace.core.errors import WorkerDied
from headrace.core.printing import say
from headrace.processes.process_end import Deaths
from headrace.run.auto.measurer import Measurer
from headrace.run.callbacks import Callbacks
from headrace.run.config import RunConfig, config_of_run, read_config
from headrace.run.hosting import Main, host
from headrace.run.lane import Lane
from headrace.run.python_inputs import PythonInputs


@dataclass(kw_only=True)
class TrainCall:
    config: RunConfig
    resume: Path | None
    """The directory of the run to resume. None for a new run, until its trainer dies."""
    inputs: PythonInputs
    callbacks: Callbacks | None
    measurer: Measurer | None
    begun: bool = False
    """Whether `config.toml` in the run's directory holds the settings of this call. Until all is loaded it holds those of an earlier one."""
    deaths: Deaths = field(init=False)
    """The deaths of the trainer."""
    worked: float = 0.0
    """Seconds from the beginning of training to the last step that was done, in the present process of the trainer."""

    def __post_init__(self) -> None:
        self.deaths = Deaths(self.config.train.max_deaths)

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self.resume or self.config.run_dir

    def outlives(self, error: WorkerDied) -> bool:
        """Whether the run goes on by itself after this death. It then does so with the settings of this call."""
        if error.who != "trainer" or not (self.begun or self.resume):
            return False
        self.deaths.after(self.worked)
        self.deaths.add()
        self.worked = 0.0
        if self.deaths.too_many:
            if self.deaths.most:
                error.add_note(self.deaths.said("train.max_deaths"))
            return False
        self.resume = self.path
        if self.begun:  # what was chosen at the start, and the steps that fit into `train.minutes`
            self.config = read_config(config_of_run(self.resume))
        return True

    def host(self, main: Main, lanes: Collection[Lane]) -> None:
        """Runs the event loop of these lanes to its end. Then it raises what a callback raised.

        If the trainer dies after somebody has asked the run to end (a signal, a callback), the run ends: to start the trainer again would
        train on against that wish."""
        died = ""
        try:
            host(main, self.callbacks.errands if self.callbacks else None)
        except WorkerDied as error:
            if error.who != "trainer" or not self._asked(lanes):
                raise
            died = f" ({error})"
            for lane in lanes:
                lane.session.leave()
        finally:
            self.worked = max((lane.session.worked for lane in lanes), default=0.0)
        if self._asked(lanes) and any(lane.storage.begun and not lane.session.kept for lane in lanes):
            say(
                f"the run has ended without a checkpoint of its last step{died}: headrace train --resume {self.path} "
                "repeats the steps that are in no checkpoint from the journal, and goes on"
            )
        if self.callbacks:
            self.callbacks.raise_error(f"resume it with headrace.train(resume={str(self.path)!r})")

    def _asked(self, lanes: Collection[Lane]) -> bool:
        """Whether somebody has asked the run to end."""
        return any(lane.session.asked for lane in lanes) or (self.callbacks is not None and self.callbacks.stopped)
