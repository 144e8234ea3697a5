"""The formulas of the predictions: what headrace's own run on an H100 took beside the hardware's own time, added to the latter elsewhere.

Figures of a run are written out here as they were when the predictions were made; later results do not change them.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.commands.plan.rates.hardware import GPUS, Gpu
from headrace.commands.plan.rates.rates import interpolate
from headrace.commands.plan.rates.shapes import SHAPES, Architecture

PASSES = ((1.0, 1 / 380), (64.0, 64 / 18_117), (256.0, 256 / 54_258), (1024.0, 1024 / 105_600))
"""Sequences, seconds of a decoding pass with CUDA graphs (135m on an H100, 27 November 2026, c07e1b4b: results/2026-11-27-h100-decode.json)."""
UNGRAPHED = 64 / 4_030
"""Seconds of a pass of 64 sequences without graphs, in the same run."""
CONTEXT = 96
"""Tokens in each cache in the middle of that load: prompts of 32 and half of 128."""
STEP_TOKENS, STEP_SECONDS = 66_304, 1.26
"""A step of the same run: 256 rows of 64 + 256 tokens."""
READS, PRODUCTS = 0.8, 0.55
"""Shares of the data sheet's bandwidth and operations that plain copies and large products reach: assumptions."""
ONCE_MEASURED = SHAPES["135m"]

Prediction = Callable[[Gpu], float]
"""A card -> the figure."""


def pass_floor(chip: Gpu, model: Architecture, sequences: int, context: float) -> float:
    """The roofline of a pass, in seconds: weights and caches read once in bfloat16, or the products, whichever is longer."""
    read = 2 * min(model.parameters, model.active * sequences) + sequences * context * model.cache_bytes
    computed = sequences * (2 * model.active + 4 * model.layers * model.heads * model.head * context)
    return max(read / chip.bandwidth, computed / chip.compute)


def overhead(sequences: int, layers: int) -> float:
    """Seconds of a pass that were not the roofline's in the run above, by layers."""
    seconds = interpolate(PASSES, sequences) - pass_floor(GPUS["h100"], ONCE_MEASURED, sequences, CONTEXT)
    return seconds * layers / ONCE_MEASURED.layers


OVERHEAD = "seconds of a pass beyond the roofline on the H100 of November, by layers"


def decoding(name: str, sequences: int, *, context: float = CONTEXT, more: float = 0.0) -> Prediction:
    """A prediction of tokens/s: n / (overhead + more + bytes or operations / (READS of the data sheet))."""
    model = SHAPES[name]

    def predicted(chip: Gpu) -> float:
        floor = pass_floor(chip, model, sequences, context) / READS
        return sequences / (overhead(sequences, model.layers) + more + floor)

    return predicted


EAGER = (STEP_SECONDS / STEP_TOKENS - 6 * ONCE_MEASURED.active / (PRODUCTS * GPUS["h100"].compute)) / (
    ONCE_MEASURED.layers * ONCE_MEASURED.hidden
)
"""Seconds that a trained token took beside its products, per layer and column: small kernels, casts, the head. Not scaled by the bandwidth: part of it
is launches."""


def trained(name: str, row: int, passes: float = 3) -> Prediction:
    """A prediction of tokens/s in training: 1 / (EAGER · layers · hidden + operations / (PRODUCTS of the data sheet)). `passes`: forward passes that
    forward and backward pass cost together."""
    model = SHAPES[name]

    def predicted(chip: Gpu) -> float:
        operations = 2 * passes * (model.active + model.layers * model.heads * model.head * row)
        return 1 / (EAGER * model.layers * model.hidden * passes / 3 + operations / (PRODUCTS * chip.compute))

    return predicted


TRAINED = "1 / (seconds beside the products in November, by layers × width + operations / 55 % of the data sheet)"


def always(value: float) -> Prediction:
    return lambda chip: value
