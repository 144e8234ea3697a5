"""A measurer of machines that returns given figures, for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.run.auto.candidates import Figures
from headrace.run.auto.gpu_rates import GpuRates, GpuRequest


@dataclass
class FakeMeasurer:
    figures: Figures
    rates: GpuRates = GpuRates(problem="nothing is measured in this test")
    asked_gpu: list[tuple[GpuRequest, str]] = field(default_factory=list)
    asked: list[tuple[Mapping[str, Any], tuple[int, ...]]] = field(default_factory=list)

    def measure(self, config: Mapping[str, Any], threads: Sequence[int]) -> Figures:
        self.asked.append((config, tuple(threads)))
        return self.figures

    def measure_gpu(self, request: GpuRequest, card: str) -> GpuRates:
        self.asked_gpu.append((request, card))
        return self.rates
