"""Memory for C++ code, and the reuse of freed memory. Fresh pages are expensive: in a virtual machine the allocation of a
gigabyte takes half a second, as long as many a training step."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import numpy as np
import torch


def zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
    """[count] on pages of 2 MiB where the system has them: a pass walks over all weights, and small pages cost it 10 %."""
    # Private: shared mappings, Python's default, get no large pages.
    pages = mmap.mmap(-1, max(count * dtype.itemsize, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=count)


def keep_freed_memory() -> None:
    """Makes this process keep freed memory for later allocations, instead of returning it to the system. Has no effect unless the
    C library is glibc."""
    trim_threshold, mmap_threshold, arenas = -1, -3, -8  # malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(mmap_threshold, 1 << 30)
        mallopt(trim_threshold, -1)  # never
        mallopt(arenas, 1)  # a thread's own arena would return its memory all the same


def trim() -> None:
    """Returns freed memory to the system, in spite of `keep_freed_memory`."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if give_back is not None:
        give_back(0)


def held(device: torch.device) -> int:
    """Bytes that this process has of a GPU, or else of the machine's memory, without pages that it shares with other processes."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    try:
        resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def touch(tensor: torch.Tensor) -> torch.Tensor:
    """Makes the system allocate a tensor's pages now rather than at the first write. The tensor holds zeros."""
    ctypes.memset(tensor.data_ptr(), 0, tensor.nbytes)  # one thread: several only wait for each other in the kernel
    return tensor


def address(array: torch.Tensor | np.ndarray | None) -> int | None:
    if array is None:
        return None
    assert array.is_contiguous() if isinstance(array, torch.Tensor) else array.flags.c_contiguous
    return array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data
