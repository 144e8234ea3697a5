"""Numbers on their way between the host and a device. Nothing here waits but `Copied.array`.

Pinned memory is torch's own, which keeps a block until the copy from or to it is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def uploaded(array: np.ndarray, device: torch.device, dtype: type = np.int64) -> torch.Tensor:
    """The array on the device, in `dtype`. Returns before a GPU has done what was asked of it earlier: the values are copied out of pageable
    memory first, so that the array may change."""
    return torch.from_numpy(np.ascontiguousarray(array, dtype=dtype)).to(device, non_blocking=True)


def uploaded_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays on the device, in their dtypes, through one copy: each has a price of its own on a GPU, whatever its size. Returns at once, as
    `uploaded` does."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    starts = np.cumsum([0, *(-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays)])
    pinned = torch.empty(int(starts[-1]), dtype=torch.uint8, pin_memory=True)  # kept by torch until it has been copied
    packed = pinned.numpy()
    for start, array in zip(starts[:-1].tolist(), arrays, strict=True):
        packed[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = pinned.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for start, array in zip(starts[:-1].tolist(), arrays, strict=True)
    ]


ALIGNED = 16
"""Bytes to a multiple of which the arrays of one upload begin: their numbers must lie at multiples of their own sizes."""


def sent(array: np.ndarray, target: torch.Tensor) -> None:
    """Copies bytes [n] into those of a tensor on a device. Returns at once; the array may change."""
    if target.device.type == "cpu":
        target.copy_(torch.from_numpy(array))
        return
    pinned = torch.empty(len(array), dtype=torch.uint8, pin_memory=True)
    pinned.numpy()[:] = array
    target.copy_(pinned, non_blocking=True)


class Copied:
    """A tensor on its way to the host. It is waited for where it is read, and not before."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._here, self._done = tensor, None
        if tensor.device.type != "cpu":
            self._here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._here.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def array(self) -> np.ndarray:
        if self._done is not None:
            self._done.synchronize()
        return self._here.numpy()
