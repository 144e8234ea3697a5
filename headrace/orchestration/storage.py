"""Where one pipeline writes what it must not lose, and what an earlier process of the same run wrote there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.observe.facts import Warned
from headrace.observe.journal import Journal
from headrace.observe.passes import PassLog
from headrace.observe.recorder import Recorder
from headrace.orchestration.checkpoint import Checkpoints
from headrace.orchestration.recovery import Past


@dataclass(frozen=True)
class Storage:
    recorder: Recorder
    checkpoints: Checkpoints
    journal: Journal
    passes: PassLog
    checkpoint: Path | None = None
    """That the run goes on from."""
    past: Past | None = None
    """None of a fresh run."""

    @property
    def seconds(self) -> float:
        """Age of the run so far."""
        return self.past.seconds if self.past else 0.0

    @property
    def saved_step(self) -> int:
        """Of the checkpoint; -1 where there is none."""
        return self.past.saved_step if self.past and self.checkpoint else -1

    def close(self) -> None:
        self.recorder.close()
        self.journal.close()
        self.passes.close()


def open_storage(
    run_dir: Path,
    recorder: Recorder,
    checkpoints: Checkpoints,
    flush: bool,
    checkpoint: Path | None = None,
    past: Past | None = None,
) -> Storage:
    """Of the process that holds the run's lock. `flush`: put the journal on the disk after every step."""
    seconds = past.seconds if past else 0.0
    step, number = (past.saved_step, past.state.passes if past.state else 0) if past else (0, 0)
    if said := checkpoints.clear():
        recorder.record(Warned(seconds, said))
    passes = PassLog(run_dir, step, lambda said: recorder.record(Warned(seconds, said)), number)
    return Storage(recorder, checkpoints, Journal(run_dir, flush), passes, checkpoint, past)
