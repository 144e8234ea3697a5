"""Copies of a checkpoint's tensors in the host's memory, which are written while the trainer goes on.

The memory is kept for the next checkpoint. Fresh pages cost more than the copy itself (2.5 s instead of 0.8 s for 800 MB on two cores of a
Xeon), and the C library of a worker keeps freed memory anyway (`launch/child.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from headrace.native.resources import available, gib

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

    def keep(self, name: str, tensor: Tensor) -> Tensor:
        """Copies a tensor. The copy is good until one of the same name is made."""
        if not self._fits(name, tensor):
            self._kept.pop(name, None)  # its memory first
            self._kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return self._kept[name].copy_(tensor.detach())

    def _fits(self, name: str, tensor: Tensor) -> bool:
        kept = self._kept.get(name)
        return kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype)
