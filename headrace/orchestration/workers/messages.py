"""What a worker is told at its start, and what it answers."""

from __future__ import annotations

from typing import Any, Literal

from headrace.types import Struct
from headrace.weight_sync.transport import AnyTransport
from headrace.weights import Manifest


class AdapterStart(Struct, frozen=True):
    """With what one adapter is trained: TrainConfig, AlgoConfig and LoraConfig as plain values."""

    train: dict[str, Any]
    algo: dict[str, Any]
    lora: dict[str, Any]


class TrainerStart(Struct, frozen=True, kw_only=True):
    model_dir: str
    train: dict[str, Any]
    """TrainConfig as plain values."""
    algo: dict[str, Any]
    seed: int
    serving_dtype: str
    """What weights are converted to when they are published."""
    keep_routing: bool
    """Force the experts that the sampler chose."""
    transport: AnyTransport
    """How weights leave."""
    restore: dict[str, str] = {}
    """Checkpoint directories to go on from, by adapter; what has none starts from the model's own weights."""
    shadow: ShadowStart | None = None
    """Set where the student is a teacher."""
    adapters: dict[str, AdapterStart] = {}
    """What is trained in place of all weights; one by the empty name is published merged into them."""


class ShadowStart(Struct, frozen=True):
    """The student's older self, which a teacher's engine serves (`trainer/step/shadow.py`)."""

    kind: Literal["snapshot", "average"]
    every: int
    decay: float
    dtype: str
    """In which it is served."""
    transport: AnyTransport
    """One of its own: its versions come and go at another pace than the run's."""


class TrainerReady(Struct, frozen=True):
    manifests: dict[str, Manifest]
    """The layout of all that will be published: the model's by the empty name, those of adapters by theirs."""
    version: int
    dtype: str = "bfloat16"
    """Of the computation: `auto` is a dtype now."""
    shadow: Manifest | None = None
    """The layout of the student's older self."""
    arithmetic: str = ""
    """The name of its forward pass (`headrace/native/arithmetic.py`); empty if it has none."""


class EngineStart(Struct, frozen=True):
    model_dir: str
    engine: dict[str, Any]
    """EngineConfig as plain values."""
    manifests: dict[str, Manifest]
    """As the trainer reported them."""
    transport: AnyTransport | None = None
    """How weights arrive. None: they are those in `model_dir`, which never change."""
