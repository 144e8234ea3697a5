"""The two ways by which a worker of vLLM gets what a run has published: over the network, and from the trainer's memory on the same GPU."""

from __future__ import annotations

from headrace.core.errors import IdentityError
from headrace.core.weights import WeightUpdate
from headrace.weight_sync.cuda_ipc import UnpreparedIpcReceiver, memory_of
from headrace.weight_sync.machine_memory import MachineMemory
from headrace.weight_sync.unprepared import UnpreparedReceiver


class Receiving:
    def __init__(self, device: str, number: int | None = None) -> None:
        """`device`: the type of the worker's device, as torch calls it, and its `number`."""
        self._device, self._number = device, number
        self._fetching = UnpreparedReceiver(MachineMemory())
        self._opening: UnpreparedIpcReceiver | None = None

    def of(self, update: WeightUpdate) -> UnpreparedReceiver | UnpreparedIpcReceiver:
        """Raises IdentityError for memory of another kind of device."""
        if "handle" not in update.where:
            return self._fetching
        if (memory := update.where.get("memory")) != self._device:
            raise IdentityError(
                f"version {update.version} is in memory of a device {memory}, and vLLM computes on {self._device}; leave weight_sync.kind out"
            )
        if self._opening is None:
            self._opening = UnpreparedIpcReceiver(memory_of(self._device, self._number))
        return self._opening

    def close(self) -> None:
        self._fetching.close()
