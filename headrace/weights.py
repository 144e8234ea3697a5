"""The nouns of weight sync: what is published, and how it is packed."""

from __future__ import annotations

from typing import Any, Literal

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


class WeightUpdate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """One publish: which weights they are, where their bytes are, and the fingerprint that whoever loads them must find (C3).

    Records of runs from before 2026-11-23 have a field `slot` here, which is passed over."""

    version: int
    """Of the whole model, or of the adapter."""
    kind: Literal["full", "adapter"]
    fingerprint: str
    nbytes: int
    seconds: float
    """The time that the publish took on the trainer's side."""
    where: dict[str, Any] = {}
    """Finds the bytes. Only the transport that wrote it reads it; its values are numbers and texts."""
    adapter: AdapterSpec | None = None
    """Set where kind is `adapter`."""


class TensorSpec(Struct, frozen=True):
    """One parameter in the packed buffer. `dtype` is a torch name such as `bfloat16`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    """First byte, counted from the beginning of the buffer."""
    nbytes: int


class Manifest(Struct, frozen=True):
    """The packed buffer that every transport fills: all parameters in their canonical order (that of `named_parameters()`, tied
    ones once)."""

    tensors: tuple[TensorSpec, ...]
    nbytes: int
    """Bytes of the whole buffer, gaps for alignment included."""

    @property
    def payload(self) -> int:
        """Bytes of the parameters alone."""
        return sum(spec.nbytes for spec in self.tensors)
