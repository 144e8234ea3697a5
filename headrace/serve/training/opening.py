"""The start and the end of the trainer beside a server's engine."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

from headrace.core.protocols import Launcher
from headrace.run.clients.process_shared import ProcessSharedTrainer
from headrace.run.worker.worker_messages import SharedStart
from headrace.serve.config import TrainingConfig
from headrace.serve.serving import Serving
from headrace.serve.training.door import Door
from headrace.serve.training.store import Store


@contextlib.asynccontextmanager
async def opened_door(
    config: TrainingConfig,
    serving: Serving,
    *,
    launcher: Launcher,
    directory: Path,
    places: int,
    max_deaths: int,
) -> AsyncIterator[Door]:
    """`directory`: the model's. `places`: adapters that the engine can hold. Raises ConfigError for a model that cannot be trained."""
    door = Door(serving, Store(config.directory), config.limits, directory=directory, places=places)
    door.trainer = ProcessSharedTrainer(launcher, max_deaths, door.lose_all)
    try:
        await door.trainer.launch()
        await door.trainer.open(SharedStart(str(directory), dataclasses.asdict(config.train)))
        yield door
    finally:
        await door.close()
        await door.trainer.close()
