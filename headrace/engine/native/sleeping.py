"""An engine asleep: its weights and its KV cache are given back while a trainer uses the same device, and taken again.

    awake ──sleep: blocks that sequences hold are copied to the host, or dropped──▶ asleep ──wake──▶ awake, without weights ──swap──▶

Sequences stay where they are: those that run keep their rows and tokens, and with their blocks the versions that computed them. Dropped
blocks are computed again under the weights that come next, as after a preemption.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from headrace.core.reports import SleepReport
from headrace.engine.native.forward_pass import Runner
from headrace.engine.native.schedule.scheduler import Scheduler
from headrace.native.memory import held, trim


class Sleeping:
    """The memory of an engine on a device, which it has only while it is awake."""

    def __init__(self, runner: Runner, schedule: Scheduler, device: torch.device, asleep: bool) -> None:
        """`asleep`: whether it begins without any."""
        self._runner, self._schedule, self._device = runner, schedule, device
        self._kept: tuple[np.ndarray, torch.Tensor] | None = None
        """Numbers and content of the blocks that are on the host."""
        self.asleep = asleep
        if not asleep:
            runner.allocate(schedule.blocks.count)

    @torch.no_grad()
    def begin(self, keep: bool) -> SleepReport:
        """Frees weights and cache. `keep`: blocks that sequences hold go to the host. Nothing happens while it is asleep."""
        if self.asleep:
            return SleepReport()
        started, before = time.perf_counter(), held(self._device)
        self._schedule.fall_asleep(keep)
        blocks, moved = self._schedule.blocks.in_use(), 0
        if len(blocks):
            content = self._runner.take_out(blocks)
            self._kept, moved = (blocks, content), content.nbytes
        self._runner.free()
        self.asleep = True
        _give_back(self._device)
        return SleepReport(time.perf_counter() - started, max(0, before - held(self._device)), moved)

    @torch.no_grad()
    def end(self) -> SleepReport:
        """Takes memory for the cache again, and puts the kept blocks back. Nothing happens while it is awake."""
        if not self.asleep:
            return SleepReport()
        started, before, moved = time.perf_counter(), held(self._device), 0
        self._runner.allocate(self._schedule.blocks.count)
        if self._kept:
            self._runner.put_back(*self._kept)
            moved, self._kept = self._kept[1].nbytes, None
        self.asleep = False
        return SleepReport(time.perf_counter() - started, max(0, held(self._device) - before), moved)


def _give_back(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim()
