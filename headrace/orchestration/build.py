"""The one place where concrete classes are named: a config becomes parts, and the parts a pipeline.

The controller's half imports no torch; the workers' half (`build_trainer_core`, `build_engine_core`) runs in their processes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.algo.groups import advantages_of, rows_of
from headrace.buffer import Buffer
from headrace.chat import ChatEncoder
from headrace.config import RunConfig
from headrace.models import check_model_dir, resolve_model
from headrace.observe.facts import RunStarted, WeightsLive
from headrace.observe.waits import Waits
from headrace.orchestration.checkpoint import Checkpoints
from headrace.orchestration.clients import ProcessEngine, ProcessTrainer
from headrace.orchestration.evaluation import Evaluator
from headrace.orchestration.identity import TOLERANCE, IdentityProbe
from headrace.orchestration.messages import EngineStart, TrainerStart
from headrace.orchestration.pipeline import Parts, Pipeline, Plan
from headrace.orchestration.rundir import RunDirectory
from headrace.orchestration.snapshots import ControllerState, Snapshots
from headrace.orchestration.utilisation import Utilisation
from headrace.protocols import EngineCore, Observer, Scorer, Task, TrainerCore, WeightReceiver, WeightSender
from headrace.types import Manifest
from headrace.weight_sync.memory import anonymous_memory

if TYPE_CHECKING:
    from headrace.rollout import Decode

Clock = Callable[[], float]
