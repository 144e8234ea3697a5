"""Weight sync between processes on one GPU: packed buffers in its memory, which the engines open by CUDA's handles. No byte travels.

    trainer   writes version v into slot v % 2 of its GPU memory, and says which handle the slot has
    engine    opens each handle once, compares the fingerprint, and points its tensors at the slot between two passes

A server that was started before the run (vLLM's workers, `in_vllm/`) finds the layout of the tensors by another handle.

As through shared memory, slot v % 2 may be written again only after v + 1 is live. The fingerprint is that of every transport, so both ends
copy the bytes to the host, in pieces, to compute it. Tests run it over the CPU's stand-in for such memory (`device_memory.py`), and
`make device` checks it on a GPU; docs/gpu.md says what that has shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from headrace.core.errors import ConfigError, IdentityError
from headrace.core.protocols import WeightSender
from headrace.core.weights import AdapterSpec, Manifest, TensorSpec, WeightUpdate
from headrace.weight_sync.kind import PLAIN, Opening, TransportKind
from headrace.weight_sync.slots import PIECE, Manifests

if TYPE_CHECKING:
    import torch

    from headrace.weight_sync.device_memory import DeviceMemory


KEPT = 2
"""Handles that an engine keeps open for each manifest: those of its two slots. Older ones are those of a trainer that has ended."""

NO_GPU = 'weight_sync.kind = "cuda_ipc" needs trainer and engines on one GPU of this machine; use "shared_memory", or leave weight_sync.kind out'


class CudaIpc(TransportKind, frozen=True, tag="cuda_ipc"):
    """Protocol `Transport`. The memory ends with the trainer's process."""

    words: ClassVar = "CUDA IPC"
    about: ClassVar = "they open the trainer's memory on the same GPU"
    reaches: ClassVar = frozenset({"child", "opening server"})
    keeps_for_sleepers: ClassVar = frozenset({"opening server"})
    sends_bytes: ClassVar = False
    untried: ClassVar = "a whole run on a GPU: an engine ended in the only one, and it never met vLLM there"
    keeps: ClassVar = "two packed buffers"
    device_of_buffers: ClassVar[Literal["cpu", "cuda"]] = "cuda"

    device: Literal["cuda", "cpu"] = "cuda"
    """cpu: the stand-in."""

    @classmethod
    def open(cls, opening: Opening = PLAIN) -> CudaIpc:
        return cls()

    @property
    def access(self) -> dict[str, str]:
        return {"memory": self.device}

    def sender(self, manifests: Manifests, once: Collection[str] = ()) -> IpcSender:
        """Raises ConfigError without a GPU."""
        return IpcSender(self._memory(), manifests, once)

    def receiver(self, manifests: Manifests) -> IpcReceiver:
        """Raises ConfigError without a GPU."""
        return IpcReceiver(self._memory(), manifests)

    def _memory(self) -> DeviceMemory:
        import torch

        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(NO_GPU)
        return memory_of(self.device)


def memory_of(kind: str, device: int | None = None) -> DeviceMemory:
    """`kind`: cuda or cpu, the stand-in; `device`: the number of this process's GPU."""
    from headrace.weight_sync.device_memory import CudaMemory, PageMemory

    return CudaMemory(device) if kind == "cuda" else PageMemory()


class DeviceBuffer:
    """A packed buffer in a device's memory."""

    def __init__(self, manifest: Manifest, whole: torch.Tensor) -> None:
        """`whole`: bytes [manifest.nbytes]."""
        from headrace.weight_sync.packed import views_of

        self._manifest, self._whole = manifest, whole
        self.views = views_of(manifest, whole)

    def fingerprint(self) -> str:
        from headrace.weight_sync.packed import fingerprint_of

        return fingerprint_of(self._manifest, self._bytes_of)

    def _bytes_of(self, spec: TensorSpec) -> Iterator[memoryview]:
        for piece in self._whole[spec.offset : spec.offset + spec.nbytes].split(PIECE):
            yield piece.cpu().numpy().data


class IpcSender(WeightSender):
    """The trainer's end."""

    def __init__(self, memory: DeviceMemory, manifests: Manifests, once: Collection[str]) -> None:
        self._memory, self._manifests = memory, manifests
        self._layouts = {name: _placed(memory, msgspec.json.encode(manifest)) for name, manifest in manifests.items()}
        self._slots: dict[str, list[tuple[DeviceBuffer, list[Any]]]] = {}
        for name, manifest in manifests.items():
            made = [memory.allocate(manifest.nbytes) for _ in range(1 if name in once else 2)]
            self._slots[name] = [(DeviceBuffer(manifest, whole), handle) for whole, handle in made]

    def copy(
        self, version: int, parameters: Iterable[tuple[str, torch.Tensor]], adapter: AdapterSpec | None = None
    ) -> Callable[[], WeightUpdate]:
        started = time.perf_counter()
        name = adapter.name if adapter else ""
        slots = self._slots[name]
        buffer, handle = slots[version % len(slots)]
        for key, tensor in parameters:
            buffer.views[key].copy_(tensor.detach())
        self._memory.settle()
        seconds = time.perf_counter() - started
        return lambda: WeightUpdate(
            version=version,
            kind="adapter" if adapter else "full",
            fingerprint=buffer.fingerprint(),
            nbytes=self._manifests[name].payload,
            seconds=seconds,
            where={"handle": handle, "layout": self._layouts[name][1]},
            adapter=adapter,
        )


def _placed(memory: DeviceMemory, data: bytes) -> tuple[torch.Tensor, list[Any]]:
    import torch

    whole, handle = memory.allocate(len(data))
    whole.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return whole, handle


class IpcReceiver:
    """The engine's end."""

    def __init__(self, memory: DeviceMemory, manifests: Manifests) -> None:
        self._memory, self._manifests = memory, manifests
        self._opened: dict[tuple[str, str], DeviceBuffer] = {}
        """Buffers by name and handle; the last used one last."""
        self.received = 0

    def receive(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        """Returns views of the update after comparing fingerprints. Raises `IdentityError` if the bytes are not those published."""
        from headrace.weight_sync.packed import check_fingerprint, manifest_for

        manifest, handle = manifest_for(self._manifests, update), update.where["handle"]
        key = update.adapter.name if update.adapter else "", repr(handle)
        buffer = self._opened.pop(key, None) or self._open(manifest, handle, update)
        self._opened[key] = buffer
        for old in list(self._opened)[: -KEPT * len(self._manifests)]:
            del self._opened[old]
        check_fingerprint(update, buffer.fingerprint())
        return buffer.views

    def _open(self, manifest: Manifest, handle: list[Any], update: WeightUpdate) -> DeviceBuffer:
        whole = _opened(self._memory, handle, update)
        if len(whole) < manifest.nbytes:
            raise IdentityError(
                f"the memory of version {update.version} has {len(whole)} bytes, and this engine's weights {manifest.nbytes}"
            )
        return DeviceBuffer(manifest, whole[: manifest.nbytes])


def _opened(memory: DeviceMemory, handle: list[Any], update: WeightUpdate) -> torch.Tensor:
    try:
        return memory.opened(handle)
    except (OSError, RuntimeError) as error:
        raise IdentityError(
            f"the memory of version {update.version} cannot be opened ({error}): the trainer has ended, or uses another GPU; if it is "
            "another, leave weight_sync.kind out"
        ) from error


class UnpreparedIpcReceiver:
    """Protocol `WeightReceiver`, for updates whose layout is in the trainer's memory too."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._receivers: dict[str, tuple[list[Any], IpcReceiver, Manifest]] = {}
        """The handle of the layout, the receiver and the layout, by adapter; the model's go by the empty name."""
        self.received = 0

    def receive(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        """Raises IdentityError if the bytes cannot be opened, or are not those that were published."""
        name, handle = update.adapter.name if update.adapter else "", update.where["layout"]
        if self._receivers.get(name, ([],))[0] != handle:
            manifest = self._layout(update, handle)
            self._receivers[name] = handle, IpcReceiver(self._memory, {name: manifest}), manifest
        return self._receivers[name][1].receive(update)

    def manifest(self, name: str) -> Manifest:
        """Returns the layout of what was received under this name."""
        return self._receivers[name][2]

    def _layout(self, update: WeightUpdate, handle: list[Any]) -> Manifest:
        data = _opened(self._memory, handle, update).cpu().numpy().tobytes()
        try:
            return msgspec.json.decode(data, type=Manifest)
        except msgspec.DecodeError as error:
            raise IdentityError(f"the layout of version {update.version} cannot be read: {error}") from error
