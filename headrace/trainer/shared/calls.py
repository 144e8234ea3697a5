"""Settings of a trainer that several clients share, and their messages to it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.core.errors import ConfigError
from headrace.core.types import Struct

# --- Settings of a trainer that several clients share
# What one optimizer step does is in each client's request.


@dataclass(frozen=True, kw_only=True)
class SharedConfig:
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of the computation. The adapters and their optimizers are float32."""
    threads: int = 0
    """CPU threads; 0: torch's choice."""
    microbatch_tokens: int = 8192
    """Tokens that are forwarded at once."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""

    def __post_init__(self) -> None:
        if self.microbatch_tokens < 1 or self.threads < 0:
            raise ConfigError("train.microbatch_tokens must be at least 1, and train.threads at least 0")


# --- The messages of clients to the trainer that they share
# Imports no torch. Shapes: N tokens of an example, K targets a position.


class SharedLora(Struct, frozen=True, kw_only=True):
    """The adapter of one client."""

    rank: int
    seed: int
    """Seed of the first matrix of each pair; the second begins at zero."""
    attention: bool = True
    mlp: bool = True
    alpha: float = 32.0
    """The API has no setting for it, and 32 is its value."""


class Example(Struct, frozen=True, kw_only=True):
    """One sequence. Position i predicts its targets from tokens[: i + 1]."""

    tokens: bytes
    """[N] int32"""
    targets: bytes
    """[N, K] int32"""
    width: int = 1
    """K"""
    inputs: dict[str, bytes] = {}
    """[N, K] float32 each, by the names of the loss's inputs (`algo/tinker.py`)"""


class TrainingPass(Struct, frozen=True, kw_only=True):
    """A forward pass over examples, and a backward pass which adds to the adapter's gradient."""

    model: str
    examples: list[Example]
    loss: str
    constants: dict[str, float]
    backward: bool


class PassReport(Struct, frozen=True, kw_only=True):
    logprobs: list[bytes]
    """[N, K] float32 of each example."""
    loss: float
    """The sum over all positions."""
    tokens: int


class AdamStep(Struct, frozen=True, kw_only=True):
    """AdamW with decoupled weight decay, as torch has it. The defaults are the API's."""

    model: str
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Largest norm of the gradient; 0: no limit."""


class StepDone(Struct, frozen=True, kw_only=True):
    version: int
    """Optimizer steps of the adapter so far."""
    grad_norm: float
    """The norm before clipping."""


class Checkpoint(Struct, frozen=True, kw_only=True):
    """A directory that an adapter is saved to or restored from."""

    model: str
    directory: str
    optimizer: bool = True
    """Whether the optimizer's state is restored too; it is always saved."""


class Publish(Struct, frozen=True, kw_only=True):
    """An adapter's weights for engines, written into a directory with their fingerprint."""

    model: str
    directory: str
    served_as: str
    """The adapter's name in the engine."""
    dtype: str
    base: str
    """Fingerprint of the base weights in the engine that will serve it."""
