"""The controller's part of a checkpoint, and how it is saved together with the trainer's files."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace.core.errors import CheckpointError
from headrace.core.protocols import Trainer
from headrace.core.types import Completion, RolloutKey, Struct
from headrace.durable.journal import Journal
from headrace.durable.pass_log import PassLog
from headrace.episodes.notebook import Notebook
from headrace.facts.facts import CheckpointSaved
from headrace.facts.index_file import DIGEST
from headrace.facts.telemetry import Telemetry
from headrace.loop.buffer import Buffer, BufferState
from headrace.loop.checkpoints import Checkpoints
from headrace.loop.curriculum.source import Curriculum, CurriculumState
from headrace.loop.partial import Interrupts

CONTROLLER = "controller.msgpack"


class ControllerState(Struct, frozen=True):
    """The controller's state that no other process could give back (C7)."""

    step: int
    seconds: float
    """Age of the run, in seconds."""
    task: dict[str, Any]
    """The cursor of the task."""
    buffer: BufferState
    begun: dict[str, Completion]
    """The sampled part of each request of a group in flight, with versions, log-probs, masks and routes."""
    journal: int
    """Number of records in the journal at that moment."""
    passes: int = 0
    """Number of the first frame of the pass log that is not in `begun` and `notes`."""
    notes: dict[str, tuple[bytes, ...]] = {}
    """The notes of environments about rollouts in flight (`episodes/notebook.py`)."""
    curriculum: CurriculumState | None = None
    """None if prompts are drawn in the order of the task."""
    made_by: dict[str, Any] = {}
    """The settings that groups and rollouts were made under (`resume_rules.meaning`); empty in checkpoints of earlier versions."""


class _Parts(Protocol):
    @property
    def curriculum(self) -> Curriculum: ...
    @property
    def buffer(self) -> Buffer: ...
    @property
    def trainer(self) -> Trainer: ...
    @property
    def interrupts(self) -> Interrupts: ...
    @property
    def notebook(self) -> Notebook: ...
    @property
    def journal(self) -> Journal: ...


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The state of one moment between two steps, of which the trainer has its part."""

    step: int
    seconds: float
    """Age of the run at that moment."""
    stopped: float
    """Seconds for which the trainer stood still."""
    state: bytes
    """The controller's, encoded: its parts change from now on."""
    digest: bytes
    """The sums of all facts so far; empty if there can be none."""
    short: str
    """The reason why the trainer has to stand still until it is written; empty if it has a copy."""
    save: Callable[[Path], Awaitable[None]]
    """Writes the trainer's files."""


class Snapshots:
    """Saves controller and trainer together, as they are between two optimizer steps."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        passes: PassLog,
        telemetry: Telemetry,
        *,
        adapter: str = "",
        saved_step: int = -1,
        made_by: Mapping[str, Any] | None = None,
        digest: Callable[[], bytes] = bytes,
    ) -> None:
        """`adapter`: the one that the trainer saves; empty for the whole model. `saved_step`: the step of the checkpoint from which the
        run is resumed. It is not written again: it holds the same weights, and everything later is in journal and passes.
        `made_by`: see `ControllerState`. `digest`: returns the sums of all facts so far (`Recorder.digest`), from which a resume goes on."""
        self._checkpoints, self._passes = checkpoints, passes
        self._telemetry, self._adapter = telemetry, adapter
        self._made_by, self._digest = dict(made_by or {}), digest
        self.saved_step = saved_step
        """The step of the newest checkpoint."""

    async def capture(self, step: int, parts: _Parts) -> Moment:
        """Takes the state of this moment. The trainer may do nothing else meanwhile."""
        started, adapter = self._telemetry.clock(), self._adapter
        # The state is taken before the first await, because generation continues while the trainer copies.
        state, digest = msgspec.msgpack.encode(self._state(step, started, parts)), self._digest()
        parts.journal.flush()
        self._passes.begin(step)
        captured = await parts.trainer.capture(adapter)
        return Moment(
            step=step,
            seconds=started,
            stopped=self._telemetry.clock() - started,
            state=state,
            digest=digest,
            short=captured.short,
            save=lambda directory: parts.trainer.save(directory, adapter),
        )

    async def write(self, moment: Moment) -> str:
        """Writes what was captured, one at a time. Returns an empty string, or the error: it is recorded and warned of, but not raised,
        because a full disk must not end a run."""
        step, started = moment.step, moment.seconds

        async def write(directory: Path) -> None:
            (directory / CONTROLLER).write_bytes(moment.state)
            (directory / DIGEST).write_bytes(moment.digest)
            async with self._telemetry.waits.named("checkpoint", "the trainer (its files)"):
                await moment.save(directory)

        path, failure = "", ""
        if said := self._checkpoints.clear():
            self._telemetry.warn(said)
        try:
            path = str(await self._checkpoints.save(step, write))
            self.saved_step = step
            self._passes.prune(self._checkpoints.oldest_step)
        except CheckpointError as error:
            failure = str(error)
            self._telemetry.warn(failure)
        now = self._telemetry.clock()
        stopped = now - started if moment.short else moment.stopped
        self._telemetry.record(CheckpointSaved(now, step, path, now - started, failure, stopped=stopped))
        return failure

    def _state(self, step: int, seconds: float, parts: _Parts) -> ControllerState:
        buffer = parts.buffer.state()
        so_far = parts.interrupts.tokens.so_far()
        begun = {name: one for name, one in so_far.items() if self._in_flight(name, buffer)}
        task, position = dict(parts.curriculum.task.state()), parts.journal.position
        return ControllerState(
            step=step,
            seconds=seconds,
            task=task,
            buffer=buffer,
            begun=begun,
            journal=position,
            passes=self._passes.number,
            notes=parts.notebook.state(buffer.in_flight),
            curriculum=parts.curriculum.state(),
            made_by=self._made_by,
        )

    def _in_flight(self, name: str, buffer: BufferState) -> bool:
        key = RolloutKey.read(name)
        return key is not None and key.adapter == self._adapter and key.ticket in buffer.in_flight


def load_controller(checkpoint: Path) -> ControllerState:
    try:
        return msgspec.msgpack.decode((checkpoint / CONTROLLER).read_bytes(), type=ControllerState)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"checkpoint {checkpoint.name}: {CONTROLLER} cannot be read ({error})") from error
