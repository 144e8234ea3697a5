"""Notices that differences do not pay: by the settings before a run starts, and by the versions while it runs. Imports no torch."""

from __future__ import annotations

from headrace.core.weights import WeightUpdate
from headrace.facts.texts import percent
from headrace.weight_sync.kind import FULL, Encoding

LEAST_VERSIONS = 3
"""Versions that are needed before a share is reported."""
POOR = 0.5
"""Differences that are a larger share of the weights do not pay: the trainer searches for them, and sends nearly everything."""

_REMEDY = {
    "float32": 'in float32 nearly every value changes in every step; set engine.dtype = "bfloat16", or weight_sync.encoding = "full"',
    "bfloat16": 'at this learning rate most values change in a step; set weight_sync.encoding = "full"',
}
"""The remedy for each dtype that weights are published in."""


def poor_settings(encoding: Encoding, dtype: str, adapted: bool) -> list[str]:
    """Returns a sentence if differences are certain not to pay. `dtype`: the one that weights are published in; `adapted`: whether they
    change by a merged adapter, which may leave most of them as they are."""
    if not encoding.delta or dtype != "float32" or adapted:
        return []
    return [
        'weight_sync.encoding = "delta" will send about a third of the weights at every version, or more, and a full copy where it would be more '
        f"than half: {_REMEDY[dtype]}"
    ]


class DeltaWatch:
    """Watches every version, and reports once that differences do not pay.

    It sees what is offered to all engines. A full copy that one of them fetches because it has missed a version says nothing about
    differences."""

    def __init__(self, encoding: Encoding = FULL, dtype: str = "bfloat16") -> None:
        self._encoding, self._dtype = encoding, dtype
        self._shares: list[float] = []
        self._since_anchor = 0
        """Differences since the last full copy, as the trainer counts them (`Offers`)."""
        self._is_first, self._said = True, False

    def check(self, update: WeightUpdate) -> list[str]:
        """`update`: every one of the model behind that with which the process has begun."""
        if not self._encoding.delta or self._said:
            return []
        offered = update.where.get("delta")
        is_anchor = offered is None and self._since_anchor >= self._encoding.anchor_every
        self._since_anchor = 0 if offered is None else self._since_anchor + 1
        is_first, self._is_first = self._is_first, False
        if is_first or is_anchor:  # Adam's first step moves every value, in any dtype
            return []
        self._shares.append(1.0 if offered is None else offered / update.nbytes)  # too large a difference is not sent
        mean = sum(self._shares) / len(self._shares)
        if len(self._shares) < LEAST_VERSIONS or mean <= POOR:
            return []
        self._said = True
        return [
            f'weight_sync.encoding = "delta" sends {percent(mean)} of the weights a version: {_REMEDY[self._dtype]}'
        ]
