"""Memory that another process opens by a handle: a GPU's, and a stand-in on the CPU with which the same transport is tested."""

from __future__ import annotations

import base64
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from headrace.weight_sync.slots import anonymous_memory


class DeviceMemory(Protocol):
    def allocate(self, nbytes: int) -> tuple[torch.Tensor, list[Any]]:
        """Returns bytes [nbytes], which stay for as long as this process lives, and their handle: numbers and texts."""

    def opened(self, handle: Sequence[Any]) -> torch.Tensor:
        """Returns the bytes of a handle of another process. Raises OSError or RuntimeError if they are gone, or out of reach."""

    def settle(self) -> None:
        """Returns when all that was written before can be read by other processes."""


def gpu_name(device: int) -> str:
    """Returns the name of a GPU that every process has for it, whichever numbers it gives to those that it sees."""
    return str(torch.cuda.get_device_properties(device).uuid)


class CudaMemory:
    """Protocol `DeviceMemory`, by CUDA's own handles (cudaIpcGetMemHandle), as torch passes them between its processes. A handle begins with the name
    of its GPU."""

    def __init__(self, device: int | None = None, name_of: Callable[[int], str] = gpu_name) -> None:
        """`device`: the number of this process's GPU; its current one by default."""
        self._device, self._name_of = device, name_of

    def allocate(self, nbytes: int) -> tuple[torch.Tensor, list[Any]]:
        memory = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        device, *handle = memory.untyped_storage()._share_cuda_()
        return memory, [self._name_of(device), *map(_as_text, handle)]

    def opened(self, handle: Sequence[Any]) -> torch.Tensor:
        if self._device is None:
            torch.cuda._lazy_init()
            self._device = torch.cuda.current_device()
        name, *rest = handle
        if (own := self._name_of(self._device)) != name:
            raise RuntimeError(f"it is on the GPU {name}, and this process computes on {own}")
        storage: Any = torch.UntypedStorage
        shared = storage._new_shared_cuda(self._device, *map(_as_bytes, rest))
        return torch.empty(0, dtype=torch.uint8, device=shared.device).set_(shared)

    def settle(self) -> None:
        torch.cuda.synchronize()


def _as_text(value: Any) -> Any:
    return {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _as_bytes(value: Any) -> Any:
    return base64.b64decode(value["bytes"]) if isinstance(value, dict) else value


class PageMemory:
    """Protocol `DeviceMemory`, the stand-in: anonymous pages, whose handle is their place below /proc."""

    def allocate(self, nbytes: int) -> tuple[torch.Tensor, list[Any]]:
        fd = anonymous_memory()
        os.ftruncate(fd, nbytes)
        return _mapped(fd), [f"/proc/{os.getpid()}/fd/{fd}"]

    def opened(self, handle: Sequence[Any]) -> torch.Tensor:
        fd = os.open(str(handle[0]), os.O_RDWR)
        try:
            return _mapped(fd)
        finally:
            os.close(fd)

    def settle(self) -> None:
        """Does nothing: a CPU's pages are the same for all."""


def _mapped(fd: int) -> torch.Tensor:
    return torch.frombuffer(memoryview(mmap.mmap(fd, 0)), dtype=torch.uint8)
