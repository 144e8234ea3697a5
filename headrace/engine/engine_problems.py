"""Settings of the engine that have no meaning for its kind, or that a server lacks. Imports no torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields
from typing import NamedTuple

from headrace.engine.config import OF_FLEETS, OF_SERVERS, OF_STARTED, EngineConfig
from headrace.engine.kinds import SERVERS
from headrace.engine.remote.server_kind import server_kind
from headrace.settings.extras import install

_OF_WORKERS = ("ticket_deaths",)
"""Settings that a server, which is nobody's worker, does not have."""
_OF_BOTH = ("kind", "dtype", "context_length", "max_deaths", "exact", *OF_FLEETS)
ON_GPUS = (
    "engine.replicas of the native engine share the cores of this machine, not its GPUs; have the run start servers of the same engine: "
    'engine.kind = "headrace" with engine.gpus = [0, 1, ...]'
)


def engine_problems(config: EngineConfig, meant: Collection[str] = ()) -> Iterator[str]:
    """Settings that have no meaning for an engine of this kind, and those that a server lacks. `meant`: those that have one where the engines are."""
    usual = EngineConfig()
    changed = [
        field.name
        for field in fields(config)
        if getattr(config, field.name) != getattr(usual, field.name) and field.name not in meant
    ]
    yield from _fleet_problems(config, changed)
    if config.weights != "published":
        yield from _quantised_problems(config)
        changed.remove("weights")
    if not config.is_server:
        for name in changed:
            if name in OF_SERVERS and not (name == "patience" and config.is_fleet):
                yield f'engine.{name} is about servers, and engine.kind = "{config.kind}" is none; set engine.kind = {_named(SERVERS)}, or remove it'
        return
    for name in changed:
        if name in _OF_WORKERS:
            yield f'engine.{name} is about the run\'s own engines, and engine.kind = "{config.kind}" is a server; remove it'
    server = server_kind(config.kind)
    if not server.starts and not config.urls:
        yield (
            f'engine.kind = "{config.kind}" needs engine.urls: a run starts no {server.words} server; start one and name its address (docs/engines.md)'
        )
        return
    yield from _server_problems(config, changed)
    for url in config.urls:
        if not re.fullmatch(r"https?://[^/\s?#@]+/?", url):
            yield f'engine.urls: "{url}" is not the address of a server; write it as http://HOST:PORT'
    if importlib.util.find_spec("aiohttp") is None:
        yield f'engine.kind = "{config.kind}" needs aiohttp, which is not installed: {install("remote")}'


class _Quantised(NamedTuple):
    """A value of `engine.weights`."""

    of: str
    path: str
    device: str
    other: str
    """The value that the other device has."""


_QUANTISED = {
    "int8": _Quantised("the native engine's C++ kernels on a CPU", "kernels", "cpu", "fp8"),
    "fp8": _Quantised("the native engine's decoder in PyTorch on a GPU", "fused", "cuda", "int8"),
}


def _quantised_problems(config: EngineConfig) -> Iterator[str]:
    kind = _QUANTISED[config.weights]
    served, unset = f'engine.weights = "{config.weights}" is of {kind.of}', 'or engine.weights = "published"'
    if config.is_server:
        yield f'{served}, and engine.kind = "{config.kind}" is a server; set engine.kind = "native", {unset}'
    if config.path not in ("auto", kind.path):
        yield f'{served}, and engine.path = "{config.path}" does without; set engine.path = "{kind.path}", {unset}'
    if config.device not in ("auto", kind.device):
        yield (
            f'{served}, and engine.device = "{config.device}"; set engine.device = "{kind.device}", engine.weights = "{kind.other}", {unset}'
        )
    if config.weights == "fp8" and config.dtype == "float32":
        yield f'{served}, whose products in FP8 become bfloat16, and engine.dtype = "float32"; set engine.dtype = "bfloat16", {unset}'


def _named(kinds: Collection[str]) -> str:
    *others, last = (f'"{kind}"' for kind in kinds)
    return f"{', '.join(others)} or {last}"


def _fleet_problems(config: EngineConfig, changed: Sequence[str]) -> Iterator[str]:
    if "member_patience" in changed and not config.is_fleet:
        yield "engine.member_patience is about fleets, and this run has one engine; set engine.replicas, name several engine.urls, or remove it"
    if config.replicas == 1:
        pass
    elif config.urls:
        yield f"engine.replicas = {config.replicas} says how many engines the run starts, and engine.urls names servers that are running; remove one of them"
    elif config.device == "cuda" and not config.is_server:
        yield ON_GPUS
    elif 0 < len(config.cores) < config.replicas:
        yield f"engine.cores names {len(config.cores)}, too few for engine.replicas = {config.replicas}; give each a core, or leave cores empty"
    elif 0 < len(config.gpus) < config.replicas:
        yield f"engine.gpus names {len(config.gpus)}, too few for engine.replicas = {config.replicas}; give each a GPU"
    urls = [url.rstrip("/") for url in config.urls]
    for url in sorted({url for url in urls if urls.count(url) > 1}):
        yield f'engine.urls names "{url}" more than once; name each server once'


def _server_problems(config: EngineConfig, changed: Sequence[str]) -> Iterator[str]:
    """Settings that belong to the other of the two: a server that is joined, or one that is started."""
    server = server_kind(config.kind)
    if quantised := [word for word in config.server_args if word.partition("=")[0] in ("--quantization", "-q")]:
        yield (
            f"engine.server_args has {quantised[0]}: a server with quantised weights would sample from another policy than the one that is trained, which "
            'no run measures on a server; remove it, or set engine.kind = "native" with engine.weights = "fp8" (docs/quantised.md)'
        )
    taken = server.starts.settings if server.starts else None
    for name in changed:
        if name == "swap" and not server.swaps:
            yield f'engine.swap is of headrace\'s own engine; remove it: with engine.kind = "{config.kind}" caches are always recomputed'
        elif config.urls and name in OF_STARTED:
            yield f"engine.{name} is about a server that the run starts, and engine.urls names one that is running; remove one of them"
        elif config.urls and name not in (*OF_SERVERS, *_OF_BOTH):
            yield f"engine.{name} is the server's business: give it to the command that starts it (headrace serve --set engine.{name}=..., or the server's own option)"
        elif not config.urls and name == "token_file":
            yield "engine.token_file is about a server that is running (engine.urls), and a run makes a token for the one that it starts; remove it"
        elif config.starts_server and taken is not None and name not in (*OF_SERVERS, *_OF_BOTH, *taken):
            yield f"engine.{name} is of headrace's own engine, and {server.words} has no setting like it; remove it, and give {server.words}'s own options in engine.server_args"
