"""The nouns of weight sync: what is published, and where it lies."""

from __future__ import annotations

from typing import Literal

from headrace.types import Struct


class AdapterSpec(Struct, frozen=True):
    """A LoRA adapter (Hu et al., arXiv:2106.09685) without its tensors, in peft's terms."""

    name: str
    rank: int
    alpha: float
    rslora: bool = False
    """Scale by alpha / sqrt(rank) (Kalajdzievski, arXiv:2312.03732) and not by alpha / rank."""
    rank_pattern: dict[str, int] = {}
    """Module name (or its end) -> rank, where it differs."""
    alpha_pattern: dict[str, float] = {}
    base: str = ""
    """Fingerprint of the base weights it was trained on; empty when unknown. Served over others, it is refused."""


class WeightUpdate(Struct, frozen=True):
    """One publish: which weights, where they lie, and the fingerprint that whoever loads them must find (C3)."""

    version: int
    """Of the whole model, or of the adapter."""
    kind: Literal["full", "adapter"]
    fingerprint: str
    slot: int
    """Which of its packed buffers holds it."""
    nbytes: int
    seconds: float
    """What the publish took on the trainer's side."""
    adapter: AdapterSpec | None = None
    """Set where kind is `adapter`."""


class TensorSpec(Struct, frozen=True):
    """Where one parameter lies in the packed buffer. `dtype` is a torch name such as `bfloat16`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


class Manifest(Struct, frozen=True):
    """All parameters in their canonical order (that of `named_parameters()`, tied ones once)."""

    tensors: tuple[TensorSpec, ...]
    slot_nbytes: int
    """Bytes of one packed buffer."""
    slots: int = 2
    """How many lie behind each other: two for what is published again and again, one for what never changes."""
    offset: int = 0
    """Where the first begins."""

    @property
    def end(self) -> int:
        return self.offset + self.slots * self.slot_nbytes
