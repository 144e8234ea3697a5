"""Facts that a transport states about itself. Everything that chooses, describes, plans or refuses a transport asks these facts.

A transport is a subclass of `TransportKind` with its two ends, in a file of its own, and a name in `transport.py`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from headrace.core.types import Struct
from headrace.core.weights import Manifest
from headrace.web.tls import TlsIdentity

if TYPE_CHECKING:
    from headrace.core.protocols import WeightReceiver, WeightSender
    from headrace.weight_sync.ranges import RankParts

LOOPBACK = "127.0.0.1"

Reach = Literal["child", "joined", "rollout host", "server", "fetching server", "opening server"]
"""Engines that weights may travel to: processes of the run on this machine, engines elsewhere that are connected to it, those of rollout hosts
on a bus (which come and go), any server behind HTTP, servers that can fetch weights, and those that can open the memory of a GPU."""


class Encoding(Struct, frozen=True):
    """The form in which a model's weights travel, for transports that send bytes."""

    delta: bool = False
    anchor_every: int = 50


FULL = Encoding()


@dataclass(frozen=True, kw_only=True)
class Opening:
    """All that a run knows when it opens a transport. Each takes what it needs."""

    form: Encoding = FULL
    host: str = LOOPBACK
    """The address at which the trainer's process listens for engines."""
    tls: TlsIdentity | None = None
    """The identity of the trainer's server, for transports that encrypt."""
    directory: Path | None = None
    """A directory that both ends see. It is made anew, and goes in the end."""
    repeat_tied: bool = False
    """Whether files hold tied parameters under each of their names, for servers that keep a copy of their own for each."""


PLAIN = Opening()
"""Whole copies, to engines of this machine."""


class TransportKind(Struct, frozen=True):
    """The base of all transports: protocol `Transport`, and the facts by which it is chosen and described."""

    words: ClassVar[str]
    """Its name in sentences."""
    about: ClassVar[str]
    """Half a sentence that says what it does, for the page of settings."""
    reaches: ClassVar[frozenset[Reach]]
    condition: ClassVar[str] = ""
    """A condition that must hold for engines on other machines, in words."""
    untried: ClassVar[str] = ""
    """The part of it that was never tried on the real thing, in words; a run that uses it says so."""
    encrypts: ClassVar[bool] = False
    """Whether it can encrypt what it sends."""
    listens: ClassVar[bool] = False
    """Whether engines connect to the trainer's process, at `Opening.host`."""
    writes_files: ClassVar[bool] = False
    """Whether an update lies in files, so that the bytes are those that were written, whoever reads them."""
    sends_bytes: ClassVar[bool] = True
    """Whether bytes travel. If both ends share memory, differences save nothing, and an engine needs no copy of its own."""
    sends_deltas: ClassVar[bool] = False
    """Whether it can send differences from the version before (`Opening.form`); where not, every update is a whole copy."""
    serves_deltas: ClassVar[bool] = True
    """Whether servers that it reaches can read differences."""
    waits_for_all: ClassVar[bool] = False
    """Whether one engine that is away holds all of them up."""
    keeps_for_sleepers: ClassVar[frozenset[Reach]] = frozenset()
    """The engines that find the newest weights in their place when they wake, however long they slept."""
    keeps: ClassVar[str] = "full"
    """The copies of a whole model that the trainer's end keeps, in words."""
    device_of_buffers: ClassVar[Literal["cpu", "cuda"]] = "cpu"
    """The device in whose memory the packed buffers are."""

    @classmethod
    def open(cls, opening: Opening = PLAIN) -> Self:
        """Raises OSError if this machine does not support it."""
        raise NotImplementedError

    @property
    def inherited(self) -> tuple[int, ...]:
        """File descriptors that both ends inherit under the same numbers."""
        return ()

    @property
    def access(self) -> Mapping[str, str] | None:
        """The fields of `WeightUpdate.where` by which a server that was started before the run fetches, which are in no record. None if
        servers do not fetch by this transport."""
        return None

    def sender(self, manifests: Mapping[str, Manifest], once: Collection[str] = ()) -> WeightSender:
        raise NotImplementedError

    @property
    def takes_parts(self) -> bool:
        """Whether each rank of a trainer sends the part of the weights that it holds (`part_sender`)."""
        return False

    def part_sender(self, manifests: Mapping[str, Manifest], once: Collection[str], ranks: RankParts) -> WeightSender:
        """Makes the end of one rank of several."""
        raise NotImplementedError

    def receiver(self, manifests: Mapping[str, Manifest]) -> WeightReceiver:
        raise NotImplementedError

    def close(self) -> None:
        """Frees what `open` took."""

    @staticmethod
    def copies(engines: int, delta: bool = False) -> int:
        """Returns how many times the seconds of one copy pass until all engines have a version, if every machine has one link. `delta`: of one
        difference."""
        return 1
