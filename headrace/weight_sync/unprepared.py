"""The end of a server that was started before the run: it fetches the layout of an update beside its bytes, from the trainer that the update
names, over HTTP or TCP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.core.weights import Manifest, WeightUpdate
from headrace.web.tls import pinned_context
from headrace.weight_sync.fetching import RelayingReceiver
from headrace.weight_sync.http_ranges import HttpReceiver, HttpSource
from headrace.weight_sync.machine_memory import MachineMemory, SharingReceiver
from headrace.weight_sync.tcp_engine import TcpReceiver, TcpSource

if TYPE_CHECKING:
    import torch

_PLACES = ("url", "parts", "port")
"""The fields of `WeightUpdate.where` that name the trainer: a server over HTTP, the ranks over TCP, and a trainer of one process over TCP."""


def place_of(update: WeightUpdate) -> str:
    """Returns the trainer from which the update is to be fetched; empty if it is not fetched."""
    found = [f"{name} {update.where[name]}" for name in _PLACES if update.where.get(name)]
    return found[0] + str(update.where.get("host", "")) if found else ""


class UnpreparedReceiver:
    """Protocol `WeightReceiver`, for updates with a place, a `token` and perhaps a `certificate` in `where`."""

    def __init__(self, shared: MachineMemory | None = None) -> None:
        """`shared`: where it shares its memory with others of this machine."""
        self._shared = shared
        self._receivers: dict[str, tuple[str, RelayingReceiver | SharingReceiver]] = {}
        """The trainer that the newest weights of each adapter were fetched from (the model has the empty name), and its receiver."""

    @property
    def received(self) -> int:
        return sum(receiver.received for _, receiver in self._receivers.values())

    def receive(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        """Raises IdentityError if the bytes cannot be had, or are not those that were published."""
        place, name = place_of(update), update.adapter.name if update.adapter else ""
        if self._receivers.get(name, ("",))[0] != place:
            self._close(name)
            receiver = _receiver_for(update, name)
            what = f"{place} {update.where.get('token')} {name}"
            self._receivers[name] = place, self._shared.shared(receiver, what) if self._shared else receiver
        return self._receivers[name][1].receive(update)

    def manifest(self, name: str) -> Manifest:
        """Returns the layout of what was received under this name."""
        return self._receivers[name][1].manifests[name]

    def close(self) -> None:
        for name in list(self._receivers):
            self._close(name)

    def _close(self, name: str) -> None:
        _, receiver = self._receivers.pop(name, ("", None))
        if receiver:
            receiver.close()


def _receiver_for(update: WeightUpdate, name: str) -> RelayingReceiver:
    token, certificate = str(update.where.get("token", "")), str(update.where.get("certificate", ""))
    tls = pinned_context(certificate) if certificate else None
    if "url" in update.where:
        return HttpReceiver({name: HttpSource(token, tls).manifest(update)}, token, tls)
    source = TcpSource(token, tls)
    return TcpReceiver({name: source.manifest(update)}, source)
