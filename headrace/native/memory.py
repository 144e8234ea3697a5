"""Memory for C++ code, and the reuse of freed memory. Fresh pages are expensive: in a virtual machine the allocation of a
gigabyte takes half a second, as long as many a training step."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable, Mapping
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


def own_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Copies those of the tensors that lie in a file of weights into memory: they would change with the file, and end the process where it gets
    shorter. So lie tensors of safetensors files that are loaded in the file's dtype. Others stay as they are."""
    files = _mapped_files()
    for tensor in tensors:
        if tensor.device.type == "cpu" and any(tensor.data_ptr() in file for file in files):
            tensor.data = tensor.data.clone()


def _mapped_files() -> list[range]:
    """The addresses of this process that are those of files of weights, and not of memory that processes share, which has names too. Empty where the
    system does not say."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:  # proc(5): 7f0000000000-7f0000001000 r--p 00000000 08:01 1234 /a/file
        addresses, *_, path = line.split(None, 5) if line.count("/") else (line, "")
        if path.endswith((".safetensors", ".bin")):
            start, end = addresses.split("-")
            found.append(range(int(start, 16), int(end, 16)))
    return found


def keep_freed_memory() -> None:
    """Makes this process keep freed memory for later allocations, instead of returning it to the system. Has no effect unless the
    C library is glibc."""
    # 1 << 30: the largest block that is kept. -1: never trim. One arena: a thread's own would return its memory all the same.
    _set_malloc({_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: -1, _ARENAS: 1})


def return_freed_memory() -> None:
    """Makes this process return freed blocks of a megabyte or more to the system, which its environment tells it to keep (`launch/local.py`). A rank
    gathers and splits tensors of ever other sizes, and what keeps them is soon full of holes: a rank of two of a 105M model grew to 1.97 GB in six
    steps, and to 1.32 with this, for a second or two of CPU time in each step (blocks of 16 MB and more: 1.97; of 4 MB: 1.45)."""
    _set_malloc({_MMAP_THRESHOLD: 1 << 20, _TRIM_THRESHOLD: 128 << 20})


_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENAS = -1, -3, -8  # malloc.h


def _set_malloc(options: Mapping[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option, value in options.items():
            mallopt(option, value)


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


def contiguous(array: np.ndarray, dtype: type) -> np.ndarray:
    """An array of this dtype whose `address` C++ can read: the same one if it is so already."""
    return np.ascontiguousarray(array, dtype=dtype)
