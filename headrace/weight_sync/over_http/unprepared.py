"""The end of a server that was started before the run: fetches the layout of an update beside its bytes, from the trainer that it names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.core.weights import Manifest, WeightUpdate
from headrace.web.tls import pinned_context
from headrace.weight_sync.over_http.http_ranges import HttpReceiver, HttpSource

if TYPE_CHECKING:
    import torch


class UnpreparedReceiver:
    """Protocol `WeightReceiver`, for updates with a `url`, a `token` and perhaps a `certificate` in `where`."""

    def __init__(self) -> None:
        self._receivers: dict[str, tuple[str, HttpReceiver]] = {}
        """The trainer that the newest weights of each adapter were fetched from (the model has the empty name), and its receiver."""

    @property
    def received(self) -> int:
        return sum(receiver.received for _, receiver in self._receivers.values())

    def receive(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        """Raises IdentityError if the bytes cannot be had, or are not those that were published."""
        url, token = str(update.where["url"]), str(update.where.get("token", ""))
        name = update.adapter.name if update.adapter else ""
        if self._receivers.get(name, ("",))[0] != url:
            certificate = str(update.where.get("certificate", ""))
            tls = pinned_context(certificate) if certificate else None
            self._receivers[name] = url, HttpReceiver({name: HttpSource(token, tls).manifest(update)}, token, tls)
        return self._receivers[name][1].receive(update)

    def manifest(self, name: str) -> Manifest:
        """Returns the layout of what was received under this name."""
        return self._receivers[name][1].manifests[name]
