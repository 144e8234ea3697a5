"""What a worker is told at its start, and what it answers."""

from __future__ import annotations

from typing import Any

from headrace.types import Struct
from headrace.weights import Manifest


class TrainerStart(Struct, frozen=True):
    model_dir: str
    train: dict[str, Any]
    """TrainConfig as plain values."""
    algo: dict[str, Any]
    seed: int
    serving_dtype: str
    """What weights are converted to when they are published."""
    keep_routing: bool
    """Force the experts that the sampler chose."""
    restore: str = ""
    """A checkpoint directory to go on from; empty starts from the model's own weights."""


class TrainerReady(Struct, frozen=True):
    manifests: dict[str, Manifest]
    """Of all that will be published: the model's by the empty name, those of adapters by theirs."""
    version: int


class EngineStart(Struct, frozen=True):
    model_dir: str
    engine: dict[str, Any]
    """EngineConfig as plain values."""
    manifests: dict[str, Manifest]
    """As the trainer told them."""
