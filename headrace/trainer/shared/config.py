"""Settings of a trainer that several clients share. What one optimizer step does is in each client's request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.core.errors import ConfigError


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
