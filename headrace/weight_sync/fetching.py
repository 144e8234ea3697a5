"""Both ends of transports that fetch: the trainer's offers of its two newest versions, and the engine's slot that they are read into."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

from headrace.core.errors import IdentityError
from headrace.core.printing import echo
from headrace.core.protocols import WeightSender
from headrace.core.weights import AdapterSpec, Manifest, WeightUpdate
from headrace.web.tls import TlsIdentity
from headrace.weight_sync.kind import FULL, PLAIN, Encoding, Opening, TransportKind
from headrace.weight_sync.slots import Manifests, Part, Slots, anonymous_memory

if TYPE_CHECKING:
    import torch


# --- The trainer's end of transports that engines fetch from
# The two newest versions of everything that is published, and for each the difference from the version before, if differences are sent.


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
            self._offers[name] = [other for other in self._offers[name] if other.number != number]
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
            offer = next((offer for offer in reversed(offers) if offer.fingerprint == fingerprint), None)
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


# --- The engine's end of transports that fetch
# Fills a slot of its own with the bytes of an update, whole or by the difference from the version that it has.


class NetworkTransport(TransportKind, frozen=True):
    """The base of transports whose engines fetch over the network, from a server in the trainer's process."""

    listens: ClassVar = True
    sends_deltas: ClassVar = True

    token: str
    host: str = "127.0.0.1"
    """The address that the trainer listens at."""
    encoding: Encoding = FULL

    @classmethod
    def open(cls, opening: Opening = PLAIN) -> Self:
        """The server ends with the trainer's process."""
        assert opening.tls is None, f"weights cannot be encrypted over {cls.words}"
        return cls(secrets.token_hex(16), opening.host, opening.form)


class SecuredTransport(NetworkTransport, frozen=True):
    """The base of those that can encrypt."""

    encrypts: ClassVar = True

    tls: TlsIdentity | None = None
    """None: nothing is encrypted."""

    @property
    def access(self) -> dict[str, str]:
        return {"token": self.token} | ({"certificate": self.tls.certificate} if self.tls else {})

    @classmethod
    def open(cls, opening: Opening = PLAIN) -> Self:
        return cls(secrets.token_hex(16), opening.host, opening.form, opening.tls)


class Source(Protocol):
    """The place that the bytes come from. Its methods raise IdentityError with the reason if they cannot be had."""

    def full(self, update: WeightUpdate, manifest: Manifest, into: memoryview) -> int:
        """Fills `into` [manifest.nbytes]. Returns the number of bytes that travelled."""

    def delta(self, update: WeightUpdate, limit: int) -> bytes:
        """Returns the difference from the version before (`where["base"]`), which has at most `limit` bytes."""


class RelayedSource(Source, Protocol):
    """A place whose bytes other engines may send."""

    others: int
    """Number of answers that came from other engines."""
    direct: bool
    """Whether to fetch from the trainer alone."""


@dataclass
class HeldVersions:
    """The contents of two slots."""

    marks: list[str] = field(default_factory=lambda: ["", ""])
    """Their fingerprints; empty where a slot holds nothing whole."""
    newest: int = 0
    delta: bytes = b""
    """The difference that made the newest of the other one; empty where it arrived whole."""

    @property
    def free(self) -> int:
        """The slot that no engine serves."""
        return 1 - self.newest if self.marks[self.newest] else self.newest


class FetchingReceiver:
    """Protocol `WeightReceiver`."""

    def __init__(self, manifests: Manifests, source: Source) -> None:
        self.manifests, self._source = manifests, source
        self._slots = Slots(anonymous_memory(), manifests)
        self._held = {name: HeldVersions() for name in manifests}
        self._lock = threading.Lock()
        self.received = 0

    def receive(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        """Raises IdentityError if the bytes cannot be had, or are not those that were published."""
        from headrace.weight_sync.packed import manifest_for

        manifest, name = manifest_for(self.manifests, update), update.adapter.name if update.adapter else ""
        with self._lock:
            held = self._held[name]
            has = update.fingerprint in held.marks
            number = held.marks.index(update.fingerprint) if has else held.free
            was, held.marks[number] = held.marks[number], ""
            if has:  # an update that is loaded again travels once
                tensors = self._slots.packed(name, number).verified(update)
            else:
                tensors = self._fetched(name, manifest, update, was)
            held.marks[number], held.newest = update.fingerprint, number
            return tensors

    @property
    def memory(self) -> int:
        """The file descriptor of its slots."""
        return self._slots.fd

    @property
    def held(self) -> HeldVersions:
        """The contents of the first of its names."""
        return next(iter(self._held.values()))

    def go_on(self, memory: int, marks: Sequence[str], newest: int) -> None:
        """Goes on with that memory, which is now its own. `marks`, `newest`: as of `HeldVersions`, of the first of its names."""
        with self._lock:
            held = self.held
            if (memory, list(marks), newest) == (self._slots.fd, held.marks, held.newest):
                return
            if memory != self._slots.fd:  # mapped by those who still read it
                os.close(self._slots.fd)
                self._slots = Slots(memory, self.manifests)
            held.marks, held.newest, held.delta = list(marks), newest, b""

    def find(self, name: str, fingerprint: str, part: Part) -> memoryview | None:
        """Returns the bytes of a version that this engine has whole, for another engine that fetches it here."""
        marks = self._held[name].marks if name in self._held else []
        has = part == "full" and fingerprint in marks
        return self._slots.buffer(name, marks.index(fingerprint)) if has else None

    def _fetched(self, name: str, manifest: Manifest, update: WeightUpdate, was: str) -> Mapping[str, torch.Tensor]:
        """`was`: the fingerprint of what the free slot holds."""
        held = self._held[name]
        number, base = held.free, update.where.get("base")
        packed, buffer = self._slots.packed(name, number), self._slots.buffer(name, number)
        if base and held.marks[held.newest] == base:
            try:
                self._apply_delta(name, manifest, update, bool(was))
                return packed.verified(update)
            except (IdentityError, ValueError) as error:  # the full copy is the remedy, and the fingerprint the proof
                echo(f"version {update.version} is fetched whole: {error}", err=True)
        held.delta = b""
        self.received += self._source.full(update, manifest, buffer)
        return packed.verified(update)

    def _apply_delta(self, name: str, manifest: Manifest, update: WeightUpdate, follows: bool) -> None:
        """The free slot is two versions behind: two differences bring it forward, which costs less than a copy. `follows`: whether it holds
        the version before the newest."""
        from headrace.weight_sync.delta.codec import apply

        held = self._held[name]
        buffer = self._slots.buffer(name, held.free)
        delta = self._source.delta(update, manifest.payload)
        self.received += len(delta)
        earlier, held.delta = held.delta, b""
        if earlier and follows:
            apply(buffer, earlier, delta)
        else:
            buffer[:] = self._slots.buffer(name, held.newest)
            apply(buffer, delta)
        held.delta = delta


class RelayingReceiver(FetchingReceiver):
    """Fetches from the trainer alone if what other engines have sent is not what was published: one may have had a newer version by the end."""

    def __init__(self, manifests: Manifests, source: RelayedSource) -> None:
        super().__init__(manifests, source)
        self._relayed = source

    @property
    def from_others(self) -> int:
        """Number of answers that other engines have sent it."""
        return self._relayed.others

    def close(self) -> None:
        """Serves other engines no longer, so that nothing keeps this receiver's memory: a server outlives the run that it fetches from."""

    def receive(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        others = self._relayed.others
        try:
            return super().receive(update)
        except IdentityError:
            if self._relayed.others == others:
                raise
        self._relayed.direct = True
        try:
            return super().receive(update)
        finally:
            self._relayed.direct = False
