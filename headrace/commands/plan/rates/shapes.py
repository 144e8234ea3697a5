"""The shapes of known models."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from headrace.commands.plan.rates.rates import BFLOAT16
from headrace.core.errors import ConfigError
from headrace.run.rehearsal.memory_needs import Widths


class Beside(NamedTuple):
    """Memory of a trainer beside that of the policy: of a critic's own model, a teacher, a reference."""

    split: float = 0.0
    """Bytes that are spread over its ranks as the policy's weights are."""
    whole: float = 0.0
    """Bytes that each rank has."""
    critic: Widths | None = None
    """The sizes of a critic's own model, which keeps activations too."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    parameters: float
    active: float
    """Parameters that a token passes: fewer than all in a mixture of experts."""
    layers: int
    heads: int
    kv_heads: int
    head: int
    hidden: int
    inner: int
    """Inner width of the MLP, or of the chosen experts together."""
    outer: float
    """Parameters of embedding and head."""
    experts: float = 0.0
    """Parameters of all experts."""
    width: float = 0.0
    """Elements that a token sends to experts: layers · chosen experts · hidden size."""
    beside: Beside = Beside()

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * BFLOAT16 * self.layers * self.kv_heads * self.head


# From the published config.json of each: SmolLM2 (135m), Qwen2.5 (dense), Qwen3 (8b and mixtures of experts), Llama 3.3 (70b).
SHAPES = {
    "135m": Architecture(
        parameters=0.1345e9,
        active=0.1345e9,
        layers=30,
        heads=9,
        kv_heads=3,
        head=64,
        hidden=576,
        inner=1536,
        outer=0.0283e9,
    ),
    "0.5b": Architecture(
        parameters=0.494e9,
        active=0.494e9,
        layers=24,
        heads=14,
        kv_heads=2,
        head=64,
        hidden=896,
        inner=4864,
        outer=0.136e9,
    ),
    "1.5b": Architecture(
        parameters=1.54e9,
        active=1.54e9,
        layers=28,
        heads=12,
        kv_heads=2,
        head=128,
        hidden=1536,
        inner=8960,
        outer=0.233e9,
    ),
    "3b": Architecture(
        parameters=3.09e9,
        active=3.09e9,
        layers=36,
        heads=16,
        kv_heads=2,
        head=128,
        hidden=2048,
        inner=11008,
        outer=0.311e9,
    ),
    "7b": Architecture(
        parameters=7.62e9,
        active=7.62e9,
        layers=28,
        heads=28,
        kv_heads=4,
        head=128,
        hidden=3584,
        inner=18944,
        outer=1.09e9,
    ),
    "8b": Architecture(
        parameters=8.19e9,
        active=8.19e9,
        layers=36,
        heads=32,
        kv_heads=8,
        head=128,
        hidden=4096,
        inner=12288,
        outer=1.24e9,
    ),
    "14b": Architecture(
        parameters=14.8e9,
        active=14.8e9,
        layers=48,
        heads=40,
        kv_heads=8,
        head=128,
        hidden=5120,
        inner=13824,
        outer=1.56e9,
    ),
    "32b": Architecture(
        parameters=32.8e9,
        active=32.8e9,
        layers=64,
        heads=40,
        kv_heads=8,
        head=128,
        hidden=5120,
        inner=27648,
        outer=1.56e9,
    ),
    "70b": Architecture(
        parameters=70.6e9,
        active=70.6e9,
        layers=80,
        heads=64,
        kv_heads=8,
        head=128,
        hidden=8192,
        inner=28672,
        outer=2.10e9,
    ),
    "72b": Architecture(
        parameters=72.7e9,
        active=72.7e9,
        layers=80,
        heads=64,
        kv_heads=8,
        head=128,
        hidden=8192,
        inner=29568,
        outer=2.49e9,
    ),
    "30b-a3b": Architecture(
        parameters=30.5e9,
        active=3.3e9,
        layers=48,
        heads=32,
        kv_heads=4,
        head=128,
        hidden=2048,
        inner=6144,
        outer=0.622e9,
        experts=29.0e9,
        width=48 * 8 * 2048,
    ),
    "235b-a22b": Architecture(
        parameters=235e9,
        active=22e9,
        layers=94,
        heads=64,
        kv_heads=4,
        head=128,
        hidden=4096,
        inner=12288,
        outer=1.24e9,
        experts=227e9,
        width=94 * 8 * 4096,
    ),
}


def shape_of(name: str) -> Architecture:
    """Returns a known architecture, or an estimate for any other size (`9b`). Raises ConfigError with the accepted forms."""
    key = name.lower()
    if key in SHAPES:
        return SHAPES[key]
    if not (match := re.fullmatch(r"(\d+(?:\.\d+)?)b", key)):
        raise ConfigError(f"--model {name}: write a size such as 9b, or one of {', '.join(SHAPES)}")
    parameters = float(match[1]) * 1e9
    dense = [shape for shape in SHAPES.values() if shape.active == shape.parameters]
    near = min(dense, key=lambda shape: abs(math.log(shape.parameters / parameters))) if parameters else dense[0]
    if not 0.1e9 <= parameters <= 1e12:
        raise ConfigError(f"--model {name}: plans are for models of 0.1b to 1000b")
    return dataclasses.replace(near, parameters=parameters, active=parameters)
