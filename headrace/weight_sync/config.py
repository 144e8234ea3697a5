"""Settings of the way of weights to engines. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from headrace.core.types import Struct
from headrace.settings.strict import STRICT

Kind = Literal["shared_memory", "tcp", "http", "files", "broadcast", "cuda_ipc"]
LOOPBACK = "127.0.0.1"
FETCH = ("headrace", "vllm")
"""Kinds of servers that can fetch weights over HTTP: vLLM does it where headrace is installed beside it."""

NO_GPU = 'weight_sync.kind = "cuda_ipc" needs trainer and engines on one GPU of this machine; use "shared_memory", or leave weight_sync.kind out'


class Encoding(Struct, frozen=True):
    """The form in which a model's weights travel, for transports that send bytes."""

    delta: bool = False
    anchor_every: int = 50


FULL = Encoding()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class WeightSyncConfig:
    """The way of new weights from the trainer to the engines (docs/weight_sync.md)."""

    kind: Literal["auto", "shared_memory", "tcp", "http", "files", "broadcast", "cuda_ipc"] = "auto"
    """shared_memory: engines map the trainer's pages; tcp: they fetch from the trainer's process; http: they fetch from it and from each
    other; files: a directory that both see; broadcast: the trainer's process sends to all of them at once (gloo, or NCCL); cuda_ipc:
    they open the trainer's memory on the same GPU. auto: chosen by where the engines are, and `--dry-run` says why."""
    encoding: Literal["full", "delta"] = "full"
    """full: all bytes of every version; delta: only what differs from the version before, bit for bit."""
    anchor_every: int = Field(default=50, gt=0)
    """Differences between two full copies with `encoding = "delta"`, if no engine needs a full copy earlier."""
    host: str = LOOPBACK
    """Address of this machine at which engines on other machines fetch weights: servers (`engine.urls`) over http, engines elsewhere over
    tcp or by broadcast (default: the host of `orchestration.listen`), and rollout hosts (`orchestration.bus`). Whoever fetches knows a token, but without
    `cert` nothing is encrypted: use a private network."""
    cert: str = ""
    """File with the certificate (PEM) of the trainer's server, which switches TLS on: for servers that fetch over http, and rollout hosts
    over http or tcp. They are sent it with each update, and trust no other. (For engines that join: `orchestration.cert`.)"""
    key: str = ""
    """File with the private key of `cert` (PEM)."""

    @property
    def form(self) -> Encoding:
        return Encoding(self.encoding == "delta", self.anchor_every)


class WeightEnds(NamedTuple):
    """The facts about a run that decide how weights can travel."""

    server: str = ""
    """`engine.kind` of engines behind HTTP; empty for processes of the run."""
    adapters: bool = False
    """Whether adapters are published beside a base that never changes."""
    joined: str = ""
    """The host at which the run listens for engines elsewhere; empty for engines that are its children."""
    encrypted: bool = False
    """Whether engines that join talk to the run over TLS."""
    bus: bool = False
    """Whether the engines are those of rollout hosts."""


class Way(NamedTuple):
    kind: Kind
    why: str
    """The reason, for people."""


def reached_at(settings: WeightSyncConfig, ends: WeightEnds) -> str:
    """Returns the address at which engines fetch weights from the trainer's process."""
    return settings.host if settings.host != LOOPBACK or not ends.joined else ends.joined


def way_of(settings: WeightSyncConfig, ends: WeightEnds) -> Way:
    """Chooses the transport."""
    if settings.kind != "auto":
        return Way(settings.kind, f'weight_sync.kind = "{settings.kind}"')
    if ends.server in FETCH and settings.host != LOOPBACK:
        return Way("http", f"the servers fetch from {settings.host} (weight_sync.host)")
    if ends.joined:
        return Way("tcp", 'engines elsewhere share no memory with the trainer (orchestration.kind = "join" or "ray")')
    if ends.bus:
        return Way("tcp", "rollout hosts share no memory with the trainer (orchestration.bus)")
    if ends.server:
        return Way("files", "an engine behind HTTP reads what the trainer writes")
    return Way("shared_memory", "trainer and engine are processes of this machine")


def weight_sync_problems(settings: WeightSyncConfig, ends: WeightEnds) -> Iterator[str]:
    """Yields a sentence with the remedy for each setting that cannot work with these ends."""
    way = way_of(settings, ends)
    fit: tuple[str, ...] = ("http", "files") if ends.server in FETCH else ("files",)
    fit = fit if ends.server else ("shared_memory", "tcp", "http", "files", "broadcast", "cuda_ipc")
    if ends.joined and not ends.server and way.kind not in ("tcp", "broadcast"):
        yield (
            f'weight_sync.kind = "{way.kind}" does not reach engines elsewhere (orchestration.kind = "join" or "ray"); use weight_sync.kind = "tcp", '
            "or leave it out"
        )
    if ends.bus and way.kind not in ("tcp", "http", "files"):
        yield (
            f'weight_sync.kind = "{way.kind}" does not reach rollout hosts, which come and go (orchestration.bus); use weight_sync.kind = "tcp", '
            '"http" or (where all see one directory: engine.shared_dir) "files", or leave it out'
        )
    if ends.encrypted and way.kind == "broadcast":
        yield (
            'weight_sync.kind = "broadcast" cannot be encrypted, and engines join over TLS (orchestration.cert); use weight_sync.kind = "tcp", '
            "or remove orchestration.cert and key where the network is private"
        )
    if way.kind not in fit:
        yield (
            f'weight_sync.kind = "{way.kind}" does not reach engine.kind = "{ends.server}", which is a server; use weight_sync.kind = '
            f'"{fit[-1]}", or leave it out'
        )
    reached = ends.joined or (ends.bus and way.kind != "files") or (ends.server and way.kind == "http")
    if settings.host != LOOPBACK and not reached:
        yield (
            'weight_sync.host is where servers on other machines fetch weights (engine.kind = "headrace" or "vllm" with engine.urls, weight_sync.kind '
            '= "http"), and this run has none; remove it'
        )
    if bool(settings.cert) != bool(settings.key):
        yield "weight_sync.cert and weight_sync.key belong together; set both, or none"
    elif settings.cert and (ends.joined or not reached or way.kind not in ("http", "tcp")):
        remedy = (
            "set orchestration.cert and key instead" if ends.joined else 'set weight_sync.kind = "http", or remove it'
        )
        yield f"weight_sync.cert is for servers that fetch over http, and for rollout hosts; {remedy}"
    if settings.encoding == "full":
        if settings.anchor_every != WeightSyncConfig().anchor_every:
            yield 'weight_sync.anchor_every is about weight_sync.encoding = "delta"; set that too, or remove it'
        return
    if ends.adapters:
        yield (
            'weight_sync.encoding = "delta" is for whole models, and this run publishes adapters, which change in every value; remove it, or '
            'set lora.publish = "merged"'
        )
    elif ends.server and way.kind == "files":
        remedy = 'set weight_sync.kind = "http", or ' if ends.server in FETCH else ""
        yield (
            f'weight_sync.encoding = "delta" in files is not read by a server (engine.kind = "{ends.server}"); {remedy}remove it'
        )
    elif way.kind in ("shared_memory", "cuda_ipc"):
        yield (
            'weight_sync.encoding = "delta" saves bytes that travel, and through memory that both ends share none do; remove it, or set weight_sync.kind = '
            '"tcp"'
        )
