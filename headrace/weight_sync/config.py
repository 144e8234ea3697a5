"""Settings of the way of weights to engines. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from headrace.processes.places import kinds_elsewhere
from headrace.settings.strict import STRICT
from headrace.weight_sync.kind import LOOPBACK, Encoding, Reach, TransportKind
from headrace.weight_sync.transport import TRANSPORTS

if TYPE_CHECKING:
    Kind = str
else:
    Kind = Literal[("auto", *TRANSPORTS)]

AUTO = "chosen by where the engines are, and `--dry-run` says why"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class WeightSyncConfig:
    """The way of new weights from the trainer to the engines (docs/weight_sync.md)."""

    kind: Kind = "auto"
    """The transport. Each states what it does (`TransportKind.about`), and docs/settings.md lists them."""
    encoding: Literal["full", "delta"] = "full"
    """full: all bytes of every version; delta: only what differs from the version before, bit for bit."""
    anchor_every: int = Field(default=50, gt=0)
    """Differences between two full copies with `encoding = "delta"`, if no engine needs one earlier."""
    host: str = LOOPBACK
    """Address of this machine at which others fetch weights: servers, engines elsewhere (default: the host of `orchestration.listen`), rollout
    hosts. Without `cert` nothing is encrypted: use a private network."""
    cert: str = ""
    """Certificate file (PEM) of the trainer's server, for TLS with servers and rollout hosts (tcp, http). For engines
    that join: `orchestration.cert`."""
    key: str = ""
    """File with the private key of `cert` (PEM)."""

    @property
    def form(self) -> Encoding:
        return Encoding(self.encoding == "delta", self.anchor_every)


class WeightEnds(NamedTuple):
    """The facts about a run that decide how weights can travel."""

    server: str = ""
    """`engine.kind` of engines behind HTTP; empty for processes of the run."""
    fetches: bool = False
    """Whether that server can fetch weights over the network."""
    opens: bool = False
    """Whether that server can open the memory of a GPU that it shares with the trainer."""
    adapters: bool = False
    """Whether adapters are published beside a base that never changes."""
    joined: str = ""
    """The host at which the run listens for engines elsewhere; empty for engines that are its children."""
    encrypted: bool = False
    """Whether engines that join talk to the run over TLS."""
    bus: bool = False
    """Whether the engines are those of rollout hosts."""

    @property
    def carried(self) -> bool:
        """Whether the machines that start the servers fetch weights for them (`CarriedWeights`): others than the run start them, and they fetch none."""
        return bool(self.server) and not self.fetches and bool(self.joined or self.bus)

    @property
    def reach(self) -> Reach:
        """The kind of engines that weights must reach."""
        if self.server and not self.carried:
            return "fetching server" if self.fetches else "server"
        return "joined" if self.joined else "rollout host" if self.bus else "child"

    @property
    def kinds(self) -> frozenset[Reach]:
        """All kinds that the engines are of."""
        more: dict[Reach, bool] = {
            "opening server": self.opens and not (self.joined or self.bus),
            "server": self.carried,
        }
        return frozenset({self.reach, *(kind for kind, there in more.items() if there)})


class Way(NamedTuple):
    kind: str
    why: str
    """The reason, for people."""

    @property
    def transport(self) -> type[TransportKind]:
        return TRANSPORTS[self.kind]


def reached_at(settings: WeightSyncConfig, ends: WeightEnds) -> str:
    """Returns the address at which engines fetch weights from the trainer's process."""
    return settings.host if settings.host != LOOPBACK or not ends.joined else ends.joined


def way_of(settings: WeightSyncConfig, ends: WeightEnds) -> Way:
    """Chooses the transport."""
    if settings.kind != "auto":
        return Way(settings.kind, f'weight_sync.kind = "{settings.kind}"')
    if ends.reach == "fetching server" and settings.host != LOOPBACK:
        return Way("tcp", f"the servers fetch from {settings.host} (weight_sync.host)")
    if ends.joined:
        return Way("tcp", f"engines elsewhere share no memory with the trainer ({kinds_elsewhere()})")
    if ends.bus:
        return Way("tcp", "rollout hosts share no memory with the trainer (orchestration.bus)")
    if ends.server:
        return Way("files", "an engine behind HTTP reads what the trainer writes")
    return Way("shared_memory", "trainer and engine are processes of this machine")


def weight_sync_problems(settings: WeightSyncConfig, ends: WeightEnds) -> Iterator[str]:
    """Yields a sentence with the remedy for each setting that cannot work with these ends."""
    way = way_of(settings, ends)
    reaches = bool(ends.kinds & way.transport.reaches)
    if (
        not reaches and settings.kind != "auto"
    ):  # chosen here, it fits no other place of these ends, which is refused by itself
        yield from _out_of_reach(way, ends)
    if ends.encrypted and reaches and not way.transport.encrypts:
        yield (
            f'weight_sync.kind = "{way.kind}" cannot be encrypted, and engines join over TLS (orchestration.cert); use weight_sync.kind = '
            f'"{_fitting(ends, encrypts=True)[0]}", or remove orchestration.cert and key where the network is private'
        )
    yield from _address_problems(settings, ends, way)
    if settings.encoding == "delta":
        yield from _delta_problems(way, ends)
    elif settings.anchor_every != WeightSyncConfig().anchor_every:
        yield 'weight_sync.anchor_every is about weight_sync.encoding = "delta"; set that too, or remove it'


def _fitting(ends: WeightEnds, encrypts: bool = False) -> list[str]:
    """Names of the transports that reach the engines. Any server of this machine will do where it is a server."""
    reach = "server" if ends.server and not (ends.joined or ends.bus) else ends.reach
    return [
        name for name, transport in TRANSPORTS.items() if reach in transport.reaches and transport.encrypts >= encrypts
    ]


def _out_of_reach(way: Way, ends: WeightEnds) -> Iterator[str]:
    fitting = _fitting(ends)
    if ends.server:
        yield (
            f'weight_sync.kind = "{way.kind}" does not reach engine.kind = "{ends.server}", which is a server; use weight_sync.kind = '
            f'"{fitting[0]}", or leave it out'
        )
    elif ends.joined:
        yield (
            f'weight_sync.kind = "{way.kind}" does not reach engines elsewhere ({kinds_elsewhere()}); use weight_sync.kind = '
            f'"{fitting[0]}", or leave it out'
        )
    elif ends.bus:
        named = [
            f'({TRANSPORTS[name].condition}) "{name}"' if TRANSPORTS[name].condition else f'"{name}"'
            for name in fitting
        ]
        yield (
            f'weight_sync.kind = "{way.kind}" does not reach rollout hosts, which come and go (orchestration.bus); use weight_sync.kind = '
            f"{', '.join(named[:-1])} or {named[-1]}, or leave it out"
        )


def _address_problems(settings: WeightSyncConfig, ends: WeightEnds, way: Way) -> Iterator[str]:
    fetched = way.transport.listens and (
        ends.bus or (ends.reach == "fetching server" and ends.reach in way.transport.reaches)
    )
    reached = ends.joined or fetched
    if settings.host != LOOPBACK and not reached:
        yield (
            'weight_sync.host is where servers on other machines fetch weights (engine.kind = "headrace" or "vllm" with engine.urls, weight_sync.kind '
            '= "tcp"), and this run has none; remove it'
        )
    if bool(settings.cert) != bool(settings.key):
        yield "weight_sync.cert and weight_sync.key belong together; set both, or none"
    elif settings.cert and (ends.joined or not reached or not way.transport.encrypts):
        remedy = (
            "set orchestration.cert and key instead" if ends.joined else 'set weight_sync.kind = "tcp", or remove it'
        )
        yield f"weight_sync.cert is for servers that fetch weights, and for rollout hosts; {remedy}"


def _delta_problems(way: Way, ends: WeightEnds) -> Iterator[str]:
    if ends.adapters:
        yield (
            'weight_sync.encoding = "delta" is for whole models, and this run publishes adapters, which change in every value; remove it, or '
            'set lora.publish = "merged"'
        )
    elif ends.server and not way.transport.serves_deltas:
        remedy = 'set weight_sync.kind = "tcp", or ' if ends.fetches else ""
        yield (
            f'weight_sync.encoding = "delta" in files is not read by a server (engine.kind = "{ends.server}"); {remedy}remove it'
        )
    elif not way.transport.sends_bytes:
        yield (
            'weight_sync.encoding = "delta" saves bytes that travel, and through memory that both ends share none do; remove it, or set weight_sync.kind = '
            '"tcp"'
        )
    elif not way.transport.sends_deltas:
        remedy = "" if ends.server else ', or set weight_sync.kind = "tcp"'
        yield f'weight_sync.encoding = "delta" is not for weight_sync.kind = "{way.kind}", which sends whole copies alone; remove it{remedy}'
