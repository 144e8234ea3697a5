"""The trainer's end of transports that engines fetch from: the two newest versions of everything that is published, and for each the
difference from the version before, if differences are sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.core.protocols import WeightSender
from headrace.core.weights import AdapterSpec, WeightUpdate
from headrace.weight_sync.kind import Encoding
from headrace.weight_sync.slots import Manifests, Part, Slots, anonymous_memory

if TYPE_CHECKING:
    import torch

WORTH = 2
"""A difference travels if it is this many times smaller than the whole."""


class OfferedVersion(NamedTuple):
    """One version that can be fetched."""

    fingerprint: str
    number: int
    """The number of its slot."""
    base: str = ""
    """The fingerprint of the version from which `delta` leads to this one; empty for a full copy (an anchor)."""
    delta: bytes = b""


class Offers:
    """Thread-safe: servers look up what the trainer's thread publishes."""

    def __init__(self, manifests: Manifests, once: Collection[str], encoding: Encoding) -> None:
        self.slots = Slots(anonymous_memory(), manifests, once)
        self.manifests, self._encoding = manifests, encoding
        self._offers: dict[str, list[OfferedVersion]] = {name: [] for name in manifests}
        """The newest last."""
        self._since_anchor = 0
        self._lock = threading.Lock()

    def copy(self, name: str, parameters: Iterable[tuple[str, torch.Tensor]]) -> Callable[[], OfferedVersion]:
        """Copies new weights into the slot that was filled longest ago, whose version can be fetched no more. Returns what offers them."""
        before = self._offers[name][-1] if self._offers[name] else None
        number = (before.number + 1) % self.slots.count(name) if before else 0
        with self._lock:
            self._offers[name] = [one for one in self._offers[name] if one.number != number]
        packed = self.slots.packed(name, number)
        packed.fill(parameters)

        def offer() -> OfferedVersion:
            mark = packed.fingerprint()
            delta = self._delta(before, number) if before and not name else None
            new = (
                OfferedVersion(mark, number, before.fingerprint, delta)
                if before and delta
                else OfferedVersion(mark, number)
            )
            with self._lock:
                self._offers[name].append(new)
            return new

        return offer

    def _delta(self, before: OfferedVersion, number: int) -> bytes | None:
        """Returns None where a full copy is to be sent."""
        if not self._encoding.delta or before.number == number or self._since_anchor >= self._encoding.anchor_every:
            self._since_anchor = 0
            return None
        from headrace.weight_sync.delta.codec import encode, width_of

        manifest, slots = self.manifests[""], self.slots
        limit = manifest.payload // WORTH
        delta = encode(slots.buffer("", before.number), slots.buffer("", number), width_of(manifest), limit)
        self._since_anchor = 0 if delta is None else self._since_anchor + 1
        return delta

    def find(self, name: str, fingerprint: str, part: Part) -> memoryview | None:
        """Returns the bytes of a version, or those of its difference; None if it has none (any more)."""
        with self._lock:
            offers = self._offers.get(name, ())
            offer = next((one for one in reversed(offers) if one.fingerprint == fingerprint), None)
        if offer is None or (part == "delta" and not offer.delta):
            return None
        return memoryview(offer.delta) if part == "delta" else self.slots.buffer(name, offer.number)


class OfferingSender(WeightSender):
    """Protocol `WeightSender`."""

    def __init__(self, offers: Offers, where: Callable[[str, OfferedVersion], dict[str, Any]]) -> None:
        """`where`: returns the place of an offer's bytes."""
        self.offers, self._where = offers, where

    def copy(
        self, version: int, parameters: Iterable[tuple[str, torch.Tensor]], adapter: AdapterSpec | None = None
    ) -> Callable[[], WeightUpdate]:
        started = time.perf_counter()
        name = adapter.name if adapter else ""
        offered = self.offers.copy(name, parameters)
        seconds = time.perf_counter() - started

        def announced() -> WeightUpdate:
            offer = offered()
            where = self._where(name, offer)
            if offer.base:
                where |= {"base": offer.base, "delta": len(offer.delta)}
            return WeightUpdate(
                version=version,
                kind="adapter" if adapter else "full",
                fingerprint=offer.fingerprint,
                nbytes=self.offers.manifests[name].payload,
                seconds=seconds,
                where=where,
                adapter=adapter,
            )

        return announced
