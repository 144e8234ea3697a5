"""Memory that C++ walks over."""

from __future__ import annotations

import mmap

import numpy as np
import torch


def zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
    """[count] on pages of 2 MiB where the system has them: a pass walks over all weights, and small pages cost it 10 %."""
    # Private: shared mappings, Python's default, get no large pages.
    pages = mmap.mmap(-1, max(count * dtype.itemsize, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=count)


def address(array: torch.Tensor | np.ndarray | None) -> int | None:
    if array is None:
        return None
    assert array.is_contiguous() if isinstance(array, torch.Tensor) else array.flags.c_contiguous
    return array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data
