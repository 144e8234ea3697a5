"""The files of one pipeline, opened together, and what an earlier process of the same run wrote to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.durable.atomic_files import remove_parts, write_error
from headrace.durable.journal import Journal
from headrace.durable.pass_log import PassLog
from headrace.durable.segments import SEGMENT
from headrace.facts.facts import Warned
from headrace.facts.recorder import Recorder
from headrace.loop.checkpoints import Checkpoints
from headrace.loop.recovery import SavedRun, discard_superseded, open_journal

_OUTLIVED = (
    "the end of the journal is lost, as after a loss of power, while the log of sampled tokens is not: rollouts that were not in the "
    "checkpoint start again"
)


class Storage:
    """Changes nothing on the disk before `begin`, so that a run that is refused until then stays as it was."""

    def __init__(
        self,
        *,
        run_dir: Path,
        recorder: Recorder,
        checkpoints: Checkpoints,
        flush: bool,
        checkpoint: Path | None = None,
        saved: SavedRun | None = None,
        made_by: Mapping[str, Any] | None = None,
        keep_settings: Callable[[], None] = lambda: None,
        keep_steps: Callable[[int, int], None] = lambda steps, step: None,
        segment: int = SEGMENT,
    ) -> None:
        """`flush`: flush the journal to the disk after every step. `checkpoint`: the one from which the run is resumed. `saved`: None for
        a new run. `made_by`: what the settings of this process mean (`resume_rules.meaning`). `keep_settings` writes the settings of this
        process into the directory; `keep_steps` writes them with another number of steps, from a given step on. `segment`: bytes of a
        segment of the journal."""
        self.run_dir, self._flush, self._keep_settings = run_dir, flush, keep_settings
        self._segment = segment
        self.recorder, self.checkpoints = recorder, checkpoints
        self.checkpoint, self.saved = checkpoint, saved
        self.keep_steps, self.made_by = keep_steps, made_by or {}
        self._open: tuple[Journal, PassLog] | None = None

    def begin(self, outlived: bool = False) -> None:
        """Brings the directory in line with `saved`, and opens it for writing. The order matters: first passes and journal are set aside,
        then the metrics that go with them, and the settings come last. So a run that is killed in between is resumed with its old
        settings, from what was done under them. `outlived`: see `recovery.recover`.

        Raises `HeadraceError` if the disk cannot be written."""
        saved, seconds = self.saved, self.seconds
        step, number = (saved.saved_step, saved.state.passes if saved.state else 0) if saved else (0, 0)
        try:
            if saved:
                remove_parts(self.run_dir)
                discard_superseded(saved, outlived)
            self.recorder.begin()
            self.checkpoints.root.mkdir(exist_ok=True)
            if outlived:
                self.recorder.record(Warned(seconds, _OUTLIVED))
            if said := self.checkpoints.clear():
                self.recorder.record(Warned(seconds, said))
            journal = open_journal(self.run_dir, self._flush, saved, self._segment)
            passes = PassLog(self.run_dir, step, lambda said: self.recorder.record(Warned(seconds, said)), number)
            self._open = journal, passes
            self._keep_settings()
        except OSError as error:
            raise write_error(Path(error.filename or self.run_dir), error) from error

    @property
    def begun(self) -> bool:
        return self._open is not None

    @property
    def journal(self) -> Journal:
        assert self._open, "begin first"
        return self._open[0]

    @property
    def passes(self) -> PassLog:
        assert self._open, "begin first"
        return self._open[1]

    @property
    def seconds(self) -> float:
        """Age of the run when this process started, in seconds."""
        return self.saved.seconds if self.saved else 0.0

    @property
    def saved_step(self) -> int:
        """The step of the checkpoint; -1 if there is none."""
        return self.saved.saved_step if self.saved and self.checkpoint else -1

    def close(self) -> None:
        self.recorder.close()
        if self._open:
            self.journal.close()
            self.passes.close()
