"""The trainer's tensors in the host's memory: copies of a checkpoint, and what leaves a device while an engine uses it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headrace.core.reports import SleepReport
from headrace.native.memory import held, trim
from headrace.native.resources import available, gib
from headrace.trainer.forward.fused.fused_ops import release

if TYPE_CHECKING:
    from jaxtyping import Shaped


# --- Copies of a checkpoint's tensors in the host's memory
# Copies of a checkpoint's tensors in the host's memory, which are written while the trainer goes on.
#
# The memory is kept for the next checkpoint. Fresh pages cost more than the copy itself (2.5 s instead of 0.8 s for 800 MB on two cores of a
# Xeon), and the C library of a worker keeps freed memory anyway (`launch/local.py`).


RESERVE = 1 << 29
"""Bytes that have to stay free beside a copy: other processes of the run grow too."""


class HostCopy:
    """The memory of one copy."""

    def __init__(self, free: Callable[[], int] = available) -> None:
        """`free`: returns the bytes that this machine has free."""
        self._free = free
        self._kept: dict[str, Tensor] = {}

    def short(self, tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Returns an empty string if there is room for copies of these tensors, else the reason why not."""
        needed = sum(tensor.nbytes for name, tensor in tensors if not self._fits(name, tensor))
        if not needed or needed + RESERVE <= (free := self._free()):
            return ""
        return f"a copy of it takes {gib(needed)} of memory more, and {gib(free)} are free"

    def keep(self, name: str, tensor: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
        """Copies a tensor. The copy is good until one of the same name is made."""
        if not self._fits(name, tensor):
            self._kept.pop(name, None)  # its memory first
            self._kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return self._kept[name].copy_(tensor.detach())

    def _fits(self, name: str, tensor: Shaped[Tensor, "*shape"]) -> bool:
        kept = self._kept.get(name)
        return kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype)


# --- A trainer asleep: its memory is given back while an engine uses the same device.
#
# Weights and optimizer state go to the host's memory, where those of a trainer on a CPU are already. What each step makes anew is freed:
# gradients, packed weights, activations. Parameters stay the same objects, so that optimizer, adapters and hooks know them.


class Resting:
    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Callable[[], Sequence[torch.optim.Optimizer]],
        device: torch.device,
    ) -> None:
        self._models, self._optimizers, self._device = models, optimizers, device
        self._moved: list[tuple[dict[str, Any], str]] = []
        """The optimizer state that came from the device, by the dict that holds it and its key."""
        self.asleep = False

    def begin(self) -> SleepReport:
        """Does nothing while the trainer is asleep."""
        if self.asleep:
            return SleepReport()
        started, before, moved = time.perf_counter(), held(self._device), 0
        self.asleep = True
        for model in self._models:
            release(model)
            moved += sum(tensor.nbytes for tensor in _tensors(model) if tensor.device == self._device)
            model.to("cpu")
        moved = 0 if self._device.type == "cpu" else moved
        moved += self._optimizer_to_host()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        trim()
        return SleepReport(time.perf_counter() - started, max(0, before - held(self._device)), moved)

    def _optimizer_to_host(self) -> int:
        moved = 0
        for optimizer in self._optimizers():
            for state in optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.device.type == "cuda":
                        state[key] = value.cpu()
                        moved += value.nbytes
                        self._moved.append((state, key))
        return moved

    def end(self) -> SleepReport:
        """Does nothing while the trainer is awake."""
        if not self.asleep:
            return SleepReport()
        started, before, moved = time.perf_counter(), held(self._device), 0
        for model in self._models:
            model.to(self._device)
            moved += sum(tensor.nbytes for tensor in _tensors(model))
        moved = 0 if self._device.type == "cpu" else moved
        for state, key in self._moved:
            state[key] = state[key].to(self._device)
            moved += state[key].nbytes
        self._moved.clear()
        self.asleep = False
        return SleepReport(time.perf_counter() - started, max(0, held(self._device) - before), moved)


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
