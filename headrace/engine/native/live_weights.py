"""The live weights: the base model's, and those of LoRA adapters by name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.core.weights import AdapterSpec, WeightUpdate
from headrace.engine.native.kv_cache import Root


@dataclass(frozen=True)
class AdapterSlot:
    slot: int
    version: int
    base: str
    """Fingerprint of the base weights it belongs to; empty when unknown."""


class Served:
    def __init__(self, max_adapters: int) -> None:
        self.base = -1
        """Version of the base weights; -1 before there are any."""
        self.there = False
        """Whether the base weights can be used: there were some, and they were not given back since."""
        self.fingerprint = ""
        self.mixed = False
        """Whether some parameters are newer than `base`, because an update is being streamed in."""
        self.adapters: dict[str, AdapterSlot] = {}
        self._versions = np.full(max_adapters + 1, -1, dtype=np.int64)
        """The version in each adapter slot; the last entry is the base model's."""

    def version(self, adapter: str) -> int:
        return self.adapters[adapter].version if adapter else self.base

    def slot(self, adapter: str) -> int:
        return self.adapters[adapter].slot if adapter else -1

    def root(self, adapter: str) -> Root:
        return self.base, adapter, self.version(adapter) if adapter else 0

    def versions(self, slots: np.ndarray) -> np.ndarray:
        """Returns the versions of rows, given the slots of their adapters."""
        return self._versions[slots]

    def require(self, adapter: str) -> None:
        """Raises ValueError if there is no such adapter."""
        if adapter and adapter not in self.adapters:
            there = ", ".join(sorted(self.adapters)) or "none"
            raise ValueError(
                f"no adapter {adapter} is loaded (there are: {there}); load it before naming it in a request"
            )

    # -- changes ------------------------------------------------------------------------------------------------------------

    def check_base(self, update: WeightUpdate) -> None:
        """Raises ValueError when an adapter that is loaded would be served over weights that it was not made for."""
        for name, loaded in self.adapters.items():
            if loaded.base and loaded.base != update.fingerprint:
                raise ValueError(
                    f"the adapter {name} belongs to base weights {loaded.base}, version {update.version} has fingerprint "
                    f"{update.fingerprint}; unload the adapter before new base weights are loaded"
                )

    def check_adapter(self, spec: AdapterSpec) -> None:
        """Raises ValueError when it cannot be served here and now."""
        if spec.base and self.fingerprint and spec.base != self.fingerprint:
            raise ValueError(
                f"the adapter {spec.name} was made for base weights with fingerprint {spec.base}, the engine serves "
                f"{self.fingerprint}; load the base weights it was trained on"
            )
        slots = len(self._versions) - 1
        if spec.name not in self.adapters and len(self.adapters) >= slots:
            raise ValueError(
                f"there is no room for the adapter {spec.name}: {len(self.adapters)} are loaded; unload one or raise "
                f"engine.max_adapters (now {slots})"
            )

    def set_base(self, update: WeightUpdate) -> None:
        again = update.version == self.base and update.fingerprint == self.fingerprint
        first = not self.fingerprint  # may be those of a trial, whose version is below all others
        assert update.version > self.base or again or first, "versions never go back"
        self.base, self.fingerprint, self.mixed, self.there = update.version, update.fingerprint, False, True
        self._versions[-1] = update.version

    def set_adapter(self, spec: AdapterSpec, version: int) -> int:
        """The slot that it has. The same version may come again: from a wake that was cut off while it was loaded."""
        before = self.adapters.get(spec.name)
        assert before is None or version >= before.version, "versions never go back"
        taken = {loaded.slot for loaded in self.adapters.values()}
        slot = before.slot if before else next(slot for slot in range(len(self._versions)) if slot not in taken)
        self.adapters[spec.name] = AdapterSlot(slot, version, spec.base)
        self._versions[slot] = version
        return slot

    def drop_adapter(self, name: str) -> int:
        """The slot that it had."""
        self.require(name)
        return self.adapters.pop(name).slot
