"""How much work at once is worth it on a GPU, by measured rates: more sequences, longer chunks and larger microbatches take memory, and at some size
bring no more tokens a second. Read by `choosing.py` and, in the process that measures, by `gpu_probe.py`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.core.types import Struct
from headrace.engine.sizes import CHUNKS, MOST_RUNNING, ON_CPU
from headrace.trainer import config as train

NEAR = 0.95
"""The smallest size that reaches this share of the fastest one's rate is enough."""
ROWS = (64, 128, 256, 512, MOST_RUNNING)
PASSES = (ON_CPU.prefill_chunk, *sorted(CHUNKS))
MICROBATCHES = (train.ON_CPU, 4096, 8192, 16384, 32768)
NOT_TRIED = (
    "orchestration.placement and engine.kv_gib are not tried: what they bring depends on how long rollouts take, which `headrace plan` computes; "
    "passes are captured as CUDA graphs wherever they can be"
)


class GpuRequest(Struct, frozen=True, kw_only=True):
    """The measurements that a probe has to make of the model with this `config.json`."""

    config: dict[str, Any]
    dtype: str = "bfloat16"
    path: str = "auto"
    rows: tuple[int, ...] = ROWS
    """Sequences that decode at once; empty for an engine that is not on the GPU."""
    passes: tuple[int, ...] = PASSES
    microbatches: tuple[int, ...] = MICROBATCHES
    """Empty for a trainer that is not on the GPU."""
    compile: bool = True
    """Whether layers are compiled too, with the microbatch that is enough for eager ones."""


class GpuRates(Struct, frozen=True, kw_only=True):
    """Tokens a second of the whole model, by the clock."""

    rows: dict[int, float] = {}
    """Sampled, by the sequences that decode at once; their draws are not in it."""
    passes: dict[int, float] = {}
    """Prompt tokens, by the tokens of a pass."""
    microbatches: dict[int, float] = {}
    """Trained, by the tokens of a microbatch, with eager layers."""
    compiled: dict[int, float] = {}
    """Trained with compiled layers, by the tokens of a microbatch."""
    notes: tuple[str, ...] = ()
    """Sentences about parts that could not be measured."""
    seconds: float = 0.0
    problem: str = ""
    """The reason why nothing could be measured; empty if all went well."""

    @property
    def words(self) -> str:
        """The figures, for the settings that they decide."""
        said = [
            f"{what}: {', '.join(f'{size:,} {rate:,.3g}' for size, rate in rates.items())}"
            for what, rates in (
                ("sampled, by sequences", self.rows),
                ("prompts, by tokens of a pass", self.passes),
                ("trained, by tokens of a microbatch", self.microbatches),
                ("trained with compiled layers", self.compiled),
            )
            if rates
        ]
        return "; ".join([f"tokens a second ({'; '.join(said)})", *self.notes, NOT_TRIED] if said else self.notes)


def enough(rates: Mapping[int, float]) -> int:
    """Returns the smallest size that is about as fast as the fastest."""
    return min(size for size, rate in rates.items() if rate >= NEAR * max(rates.values()))


def worthwhile(rates: GpuRates) -> dict[str, int]:
    """Returns the largest values of settings, by their dotted names, that bring anything. A setting of which the largest size that was tried is the best has none."""
    measured = {
        "engine.max_running": rates.rows,
        "engine.prefill_chunk": rates.passes,
        "train.microbatch_tokens": rates.microbatches,
    }
    return {name: enough(found) for name, found in measured.items() if found and enough(found) < max(found)}


def slower_compiled(rates: GpuRates) -> bool:
    """Whether compiled layers were measured, and are slower than eager ones."""
    return any(rate < rates.microbatches.get(size, 0.0) for size, rate in rates.compiled.items())
