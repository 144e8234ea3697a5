"""Settings of the engine. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, field_validator
from pydantic.dataclasses import dataclass

from headrace.engine.kinds import ENGINES


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class EngineConfig:
    kind: str = "native"
    """The engine that serves the policy. native: headrace's own, in a process on this machine."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is a GPU, else cpu."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of the served weights and of the KV cache. auto: the one measured to be faster on this machine (`headrace
    doctor` prints it)."""
    kv_gib: float = Field(default=2.0, gt=0)
    """The largest size of the KV cache, in GiB. Its pages are taken from the system when they are first used."""
    max_running: int = Field(default=64, gt=0)
    """The most sequences that decode at once. Fewer run if `kv_gib` cannot hold the tokens that so many are expected to
    have."""
    context_length: int = Field(default=1024, gt=1)
    """The most tokens of prompt and completion together, per request."""
    prefill_chunk: int = Field(default=512, gt=0)
    """Prompt tokens forwarded per pass, beside one token of every running sequence."""
    swap: Literal["keep", "recompute"] = "keep"
    """Handling of the KV cache of running sequences when weights are swapped: keep it (the version spans record this),
    or recompute it under the new weights before the sequences continue."""
    exact: bool = False
    """Tokens and log-probs of a request do not depend on the rest of the batch, or on where it was interrupted: a
    request that is continued from a prefix under the same weights gets the same bits as without the interruption.
    Slower, except through the kernels, which are always exact."""
    max_adapters: int = Field(default=0, ge=0)
    """Number of LoRA adapters that can be loaded at once."""
    routing: bool = False
    """Record which experts every position was routed to, so that requests may ask for it. Costs memory beside the KV
    cache."""
    check: bool = False
    """Check after every forward pass that the KV cache's bookkeeping is consistent. For debugging."""
    cores: tuple[int, ...] = ()
    """CPU cores of the engine process; if empty, all cores are shared."""
    threads: int = Field(default=0, ge=0)
    """Number of threads. 0: as many as `cores`, or as were measured to be fastest."""
    max_deaths: int = Field(default=3, gt=0)
    """Number of engine processes that may die before the run stops."""
    path: Literal["auto", "kernels", "fused", "hf"] = "auto"
    """kernels: headrace's C++ kernels; fused: a decoder in plain PyTorch; hf: Hugging Face's own forward; auto: the
    first of these that supports the model on this machine, unless another was measured to be faster."""

    @field_validator("kind")
    @classmethod
    def _is_there(cls, kind: str) -> str:
        if kind not in ENGINES:
            raise ValueError(f'engine.kind = "{kind}" is not one of the engines there are: {", ".join(ENGINES)}')
        return kind

    @property
    def serving_dtype(self) -> str:
        """Name of the torch dtype that weights are published in. `auto` where nothing was measured is bfloat16."""
        return "bfloat16" if self.dtype == "auto" else self.dtype
