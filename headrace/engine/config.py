"""Settings of the engine. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, field_validator
from pydantic.dataclasses import dataclass

from headrace.engine.kinds import ENGINES


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class EngineConfig:
    kind: str = "native"
    """Which engine serves the policy. native: headrace's own, in a process of this machine."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is one."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of the weights that are served and of the KV cache. auto: what was measured to be faster here (`headrace doctor` says it)."""
    kv_gib: float = Field(default=2.0, gt=0)
    """GiB of KV cache at most. Its pages are taken from the system when they are first used."""
    max_running: int = Field(default=64, gt=0)
    """Sequences decoding at once; fewer run when `kv_gib` does not hold the tokens that so many are expected to have."""
    context_length: int = Field(default=1024, gt=1)
    """Tokens of prompt and completion together, for one request."""
    prefill_chunk: int = Field(default=512, gt=0)
    """Prompt tokens forwarded at once, beside one token of every running sequence."""
    swap: Literal["keep", "recompute"] = "keep"
    """What becomes of the KV cache of running sequences when weights are swapped: keep it (their spans say so), or compute
    it again under the new weights before they go on."""
    exact: bool = False
    """Tokens and log-probs of a request do not depend on what else is in the batch, nor on where it was interrupted: what goes on
    from a prefix under the same weights gets the very bits that it would have had. Slower, but not through the kernels, whose
    forward pass is always like that."""
    max_adapters: int = Field(default=0, ge=0)
    """LoRA adapters that can be loaded at once."""
    routing: bool = False
    """Keep which experts every position went to, so that requests may ask for it. Costs memory beside the KV cache."""
    check: bool = False
    """Assert after every forward pass that the books of the KV cache add up. For debugging."""
    cores: tuple[int, ...] = ()
    """CPU cores of the engine process; empty shares all of them."""
    threads: int = Field(default=0, ge=0)
    """0: as many as `cores`, or what was measured to be fastest."""
    max_deaths: int = Field(default=3, gt=0)
    """Engine processes that may die before the run stops."""
    path: Literal["auto", "kernels", "fused", "hf"] = "auto"
    """kernels: our own C++; fused: the decoder in plain PyTorch; hf: Hugging Face's own forward; auto: the first of these
    that serves the model on this machine, unless another one was measured to be faster."""

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
