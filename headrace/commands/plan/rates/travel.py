"""New weights on their way from the trainer to an engine: bytes and seconds, whole and as the difference from the version before.

    whole        bytes of the weights / network
    difference   comparing (trainer) + its bytes / network + applying (engine)

A value that changed takes a gap and the bits of its change. The gaps of a random share p of values have H(p) / p bits of entropy each, H being
that of one value; the changes took CHANGE bytes. Both agree with the measurements in docs/benchmarks.md within 15 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.commands.plan.rates.rates import interpolate
from headrace.weight_sync.config import WeightSyncConfig
from headrace.weight_sync.transport import TRANSPORTS

BFLOAT16 = 2
CHANGE = 0.6
"""Bytes of the difference between two values, compressed."""
INDEX_AND_VALUE = 6
"""Bytes of a change as other libraries send it: four of its place, two of its value."""
COMPARES, APPLIES = 1.6e9, 7e9
"""Bytes of weights a second that one core compares and compresses, and that it brings forward (AMD EPYC Zen 5, docs/benchmarks.md)."""
CHANGED = ((1e-6, 0.0064), (1e-5, 0.0208), (1e-4, 0.123))
"""Share of bfloat16 values that a step of AdamW changes, by learning rate: measured on SmolLM2-135M. Mixtures of experts change fewer: 0.02 to
0.05 % in early steps of Qwen3-235B-A22B (verl, pull request 7085)."""


def changed_share(learning_rate: float) -> float:
    """Returns the share of values that a step changes, by the table on logarithmic scales."""
    points = tuple((math.log(rate), math.log(share)) for rate, share in CHANGED)
    beyond = (points[1][1] - points[0][1]) / (points[1][0] - points[0][0]) * (math.log(learning_rate) - points[0][0])
    found = points[0][1] + beyond if learning_rate < CHANGED[0][0] else interpolate(points, math.log(learning_rate))
    return min(0.5, math.exp(found))


def bytes_per_change(share: float) -> float:
    """Returns the bytes that one changed value takes in headrace's encoding."""
    entropy = -(share * math.log2(share) + (1 - share) * math.log2(1 - share))
    return entropy / share / 8 + CHANGE


@dataclass(frozen=True)
class Travel:
    bytes: float
    compare: float = 0.0
    """Seconds in the trainer's process."""
    fetch: float = 0.0
    """Seconds on the network."""
    apply: float = 0.0
    """Seconds in the engine's process."""

    @property
    def seconds(self) -> float:
        return self.compare + self.fetch + self.apply


def whole(parameters: float, network: float) -> Travel:
    """`network`: bytes per second between trainer and engine."""
    size = BFLOAT16 * parameters
    return Travel(size, fetch=size / network)


def difference(parameters: float, network: float, share: float, each: float | None = None) -> Travel:
    """`share`: of the values that change. `each`: bytes of a change; headrace's own by default."""
    size, full = parameters * share * (each or bytes_per_change(share)), BFLOAT16 * parameters
    return Travel(size, compare=full / COMPARES, fetch=size / network, apply=full / APPLIES)


def travel_of(
    settings: WeightSyncConfig, learning_rate: float, parameters: float, network: float, engines: int = 1
) -> Travel:
    """Returns the way that a run with these settings takes, once the first version has arrived."""
    network /= TRANSPORTS[settings.kind].copies(engines) if settings.kind in TRANSPORTS else 1
    if settings.encoding == "delta":
        return difference(parameters, network, changed_share(learning_rate))
    return whole(parameters, network)


def pays_below(parameters: float, share: float) -> float:
    """Returns the bytes per second of a network on which both take the same time: on faster ones the whole arrives earlier."""
    less = difference(parameters, 1.0, share)
    return (BFLOAT16 * parameters - less.bytes) / (less.compare + less.apply)
