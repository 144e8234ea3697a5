"""The types of weight sync: an update, an adapter, and the layout of the packed buffer."""

from __future__ import annotations

import re
from typing import Any, Literal

from headrace.core.types import Struct

FORM = "tree-"
"""The beginning of a fingerprint of packed weights (`weight_sync/packed.py`)."""


class AdapterSpec(Struct, frozen=True):
    """A LoRA adapter (Hu et al., arXiv:2106.09685) without its tensors, in peft's terms.

    >>> math = AdapterSpec("math", rank=16, alpha=32.0)  # scales by 32 / 16
    """

    name: str
    rank: int
    alpha: float
    rslora: bool = False
    """Whether it scales by alpha / sqrt(rank) (Kalajdzievski, arXiv:2312.03732) instead of alpha / rank."""
    rank_pattern: dict[str, int] = {}
    """Module name (or its end) -> rank, for modules with a rank of their own."""
    alpha_pattern: dict[str, float] = {}
    """Module name (or its end) -> alpha, for modules with an alpha of their own."""
    base: str = ""
    """Fingerprint of the base weights that it was trained on; empty if unknown. Engines refuse to serve it over others."""


class WeightUpdate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """One publish: which weights they are, where their bytes are, and the fingerprint that a loader has to find (C3).

    Records of runs from before 2026-11-23 have a field `slot`, which is ignored.

    >>> update = WeightUpdate(
    ...     version=6, kind="full", fingerprint="fake-6", nbytes=192, seconds=0.11, where={"offset": 0}
    ... )
    """

    version: int
    """The version of the whole model, or of the adapter."""
    kind: Literal["full", "adapter"]
    fingerprint: str
    nbytes: int
    seconds: float
    """Time for which publishing held up the trainer."""
    where: dict[str, Any] = {}
    """The place of the bytes, as numbers and texts that only the transport that wrote them reads."""
    adapter: AdapterSpec | None = None
    """Set if `kind` is `adapter`."""


class TensorSpec(Struct, frozen=True):
    """One parameter in the packed buffer.

    >>> weight = TensorSpec("fc.weight", shape=(8, 8), dtype="bfloat16", offset=0, nbytes=128)
    >>> bias = TensorSpec("fc.bias", shape=(8,), dtype="bfloat16", offset=128, nbytes=16)
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Torch's name of it, such as `bfloat16`."""
    offset: int
    """Position of the first byte in the buffer."""
    nbytes: int


class Manifest(Struct, frozen=True):
    """The layout of the packed buffer that every transport fills: all parameters in canonical order (that of
    `named_parameters()`, tied ones once).

    >>> manifest = Manifest((weight, bias), nbytes=192)
    >>> manifest.payload
    144
    """

    tensors: tuple[TensorSpec, ...]
    nbytes: int
    """Bytes of the whole buffer, including gaps for alignment."""
    tied: dict[str, str] = {}
    """Other names of parameters -> the name under which they are in `tensors`: `lm_head.weight` -> `model.embed_tokens.weight`."""

    @property
    def payload(self) -> int:
        """Bytes of the parameters alone."""
        return sum(spec.nbytes for spec in self.tensors)


def trial_version(version: int) -> int:
    """Returns the number of the weights that are published for a trial before `version` (`trainer/step/trial.py`). It is below -1, which stands
    for none, and odd where the other is even: of two packed buffers, which are used in turns by the version, each has its own.

    >>> trial_version(0), trial_version(7)
    (-3, -2)
    """
    return -2 - (version + 1) % 2


def of_earlier_form(fingerprint: str) -> bool:
    """Returns whether it was recorded before 2026-11-30, when fingerprints of packed weights were one hash over all bytes. It has the same
    form as the mark of a directory (`weight_sync/directory.py`).

    >>> of_earlier_form("0e5c01f2d4a7b3980e5c01f2d4a7b398"), of_earlier_form(FORM + "0e5c01f2d4a7b3980e5c01f2d4a7b398")
    (True, False)
    """
    return re.fullmatch("[0-9a-f]{32}", fingerprint) is not None
