"""Settings of the engine. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class EngineConfig:
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is one."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of the weights that are served and of the KV cache. auto: bfloat16."""
    kv_gib: float = Field(default=2.0, gt=0)
    """GiB of KV cache at most. Its pages are taken from the system when they are first used."""
    max_running: int = Field(default=64, gt=0)
    """Sequences decoding at once; fewer run when `kv_gib` does not hold so many of `context_length`."""
    context_length: int = Field(default=1024, gt=1)
    """Tokens of prompt and completion together, for one request."""
    prefill_chunk: int = Field(default=512, gt=0)
    """Prompt tokens forwarded at once, beside one token of every running sequence."""
    cores: tuple[int, ...] = ()
    """CPU cores of the engine process; empty shares all of them."""
    max_deaths: int = Field(default=3, gt=0)
    """Engine processes that may die before the run stops."""
    path: Literal["auto", "hf"] = "auto"
    """auto: the fused decoder where there is one for the model; hf: Hugging Face's own forward always."""

    @property
    def serving_dtype(self) -> str:
        """Name of the torch dtype that weights are published in."""
        return "bfloat16" if self.dtype == "auto" else self.dtype
