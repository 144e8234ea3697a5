"""What a checkpoint holds of the controller, and how it is put beside the trainer's files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace.buffer import Buffer, BufferState
from headrace.errors import CheckpointError
from headrace.observe.facts import CheckpointSaved, Warned
from headrace.orchestration.checkpoint import Checkpoints
from headrace.protocols import Observer, Task, Trainer
from headrace.types import Struct

CONTROLLER = "controller.msgpack"


class ControllerState(Struct, frozen=True):
    """C7, as far as it goes today: in-flight prompts are drawn again (and counted as such), not continued."""

    step: int
    seconds: float
    """Age of the run."""
    task: dict[str, Any]
    buffer: BufferState


class _Parts(Protocol):
    @property
    def task(self) -> Task: ...
    @property
    def buffer(self) -> Buffer: ...
    @property
    def trainer(self) -> Trainer: ...


class Snapshots:
    """Saves controller and trainer at one instant: between two optimizer steps."""

    def __init__(
        self, checkpoints: Checkpoints, observer: Observer, clock: Callable[[], float], adapter: str = ""
    ) -> None:
        """`adapter`: what the trainer is to save, where it is not the whole model."""
        self._checkpoints, self._observer, self._clock, self._adapter = checkpoints, observer, clock, adapter
        self.saved_step = -1
        """The step of the newest checkpoint that this process wrote."""

    async def save(self, step: int, parts: _Parts) -> None:
        """A failure is recorded and warned of, not raised: the compute done so far must not die with a full disk."""
        if step == self.saved_step:
            return
        started = self._clock()
        # Taken before the first await: generation goes on while the trainer writes.
        state = ControllerState(step, started, dict(parts.task.state()), parts.buffer.state())

        async def write(directory: Path) -> None:
            (directory / CONTROLLER).write_bytes(msgspec.msgpack.encode(state))
            await parts.trainer.save(directory, self._adapter)

        path, failure = "", ""
        try:
            path = str(await self._checkpoints.save(step, write))
            self.saved_step = step
        except CheckpointError as error:
            failure = str(error)
            self._observer.record(Warned(self._clock(), failure))
        self._observer.record(CheckpointSaved(self._clock(), step, path, self._clock() - started, failure))


def load_controller(checkpoint: Path) -> ControllerState:
    try:
        return msgspec.msgpack.decode((checkpoint / CONTROLLER).read_bytes(), type=ControllerState)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"checkpoint {checkpoint.name}: {CONTROLLER} cannot be read ({error})") from error
