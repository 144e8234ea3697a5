"""Settings of the engine. Imports no torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Literal

from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass

from headrace.engine.kinds import ENGINES, SERVERS
from headrace.settings.extras import install
from headrace.settings.strict import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EngineConfig:
    kind: str = "native"
    """The engine that serves the policy. native: headrace's own, in a process on this machine; headrace: the same engine behind
    HTTP (`headrace serve`); vllm: a vLLM server. The run starts the server, unless `urls` names one. sglang: an SGLang server that is
    running."""
    urls: tuple[str, ...] = ()
    """Address of a server that is running, such as ["http://127.0.0.1:8000"], for kinds that are one; several are a fleet. Empty: the
    run starts a server on this machine and ends it."""
    python: str = ""
    """Python interpreter that starts the server, such as "~/vllm/bin/python". Empty: the one that runs headrace."""
    server_args: tuple[str, ...] = ()
    """More arguments for the command that starts the server, such as ["--tensor-parallel-size", "2"]."""
    gpus: tuple[int, ...] = ()
    """Numbers of the GPUs for the servers that the run starts, counted from 0 among those that CUDA_VISIBLE_DEVICES leaves; `replicas` share
    them. Empty: one server sees all of them."""
    token_file: str = ""
    """File that holds the token of a server that is running."""
    patience: float = Field(default=60.0, gt=0)
    """Seconds that a server may be unreachable before the run stops, or, if the run started it, before it is replaced. When it is back,
    requests continue from their prefixes. With a fleet: seconds without any member that serves."""
    shared_dir: str = ""
    """Directory that the trainer and the server both see, through which weights travel. Empty: one below the run's own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is a GPU, else cpu."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of the served weights and of the KV cache. auto: the one measured to be faster on this machine (`headrace
    doctor` prints it)."""
    kv_gib: float = Field(default=2.0, gt=0)
    """The largest size of the KV cache, in GiB. Its pages are taken from the system when they are first used."""
    max_running: int = Field(default=64, gt=0)
    """The most sequences that decode at once. Fewer run if `kv_gib` cannot hold the tokens that so many are expected to
    have."""
    context_length: int = Field(default=1024, gt=1)
    """The most tokens of prompt and completion together, per request."""
    prefill_chunk: int = Field(default=512, gt=0)
    """Prompt tokens forwarded per pass, beside one token of every running sequence."""
    swap: Literal["keep", "recompute"] = "keep"
    """Handling of the KV cache of running sequences when weights are swapped: keep it (the version spans record this),
    or recompute it under the new weights before the sequences continue. With vLLM and SGLang it is always recomputed."""
    exact: bool = False
    """Tokens and log-probs of a request do not depend on the rest of the batch, or on where it was interrupted: a
    request that is continued from a prefix under the same weights gets the same bits as without the interruption.
    Slower, except through the kernels, which are always exact."""
    max_adapters: int = Field(default=0, ge=0)
    """Number of LoRA adapters that can be loaded at once."""
    routing: bool = False
    """Record which experts every position was routed to, so that requests may ask for it. Costs memory beside the KV
    cache."""
    check: bool = False
    """Check after every forward pass that the KV cache's bookkeeping is consistent. For debugging."""
    cores: tuple[int, ...] = ()
    """CPU cores of the engine process; if empty, all cores are shared."""
    threads: int = Field(default=0, ge=0)
    """Number of threads. 0: as many as `cores`, or as were measured to be fastest."""
    replicas: int = Field(default=1, gt=0)
    """Number of engines that serve as one (docs/engines.md, fleets): processes of the native engine, or servers that the run starts. Each
    has its share of `cores`, `threads` and `gpus`, and a KV cache of `kv_gib`."""
    member_patience: float = Field(default=30.0, gt=0)
    """Seconds that a member of a fleet (`replicas`, or several `urls`) may leave a question unanswered, or be later than the first one with
    new weights. Then it leaves the fleet until it has caught up, and its requests go on elsewhere."""
    max_deaths: int = Field(default=3, gt=0)
    """Number of processes of an engine that may die in a row before the run stops, or its fleet gives it up. Those before an hour of work do
    not count."""
    ticket_deaths: int = Field(default=3, gt=0)
    """Number of engine processes, or of rollout hosts on a bus, that may die while they work on one ticket. Then the ticket is given up: its
    rollouts fail with the reason `engine_died`, and these deaths do not count for `max_deaths` (docs/cluster.md). 1 gives up all that an
    engine was working on when it died."""
    path: Literal["auto", "kernels", "fused", "hf"] = "auto"
    """kernels: headrace's C++ kernels; fused: a decoder in plain PyTorch; hf: Hugging Face's own forward; auto: the
    first of these that supports the model on this machine, unless another was measured to be faster."""

    @field_validator("kind")
    @classmethod
    def _is_there(cls, kind: str) -> str:
        if kind not in (*ENGINES, *SERVERS):
            there = ", ".join([*ENGINES, *SERVERS])
            raise ValueError(f'engine.kind = "{kind}" is not one of the engines there are: {there}')
        return kind

    @property
    def serving_dtype(self) -> str:
        """Name of the torch dtype that weights are published in. `auto` where nothing was measured is bfloat16."""
        return "bfloat16" if self.dtype == "auto" else self.dtype

    @property
    def is_server(self) -> bool:
        return self.kind in SERVERS

    @property
    def is_fleet(self) -> bool:
        return self.replicas > 1 or len(self.urls) > 1

    @property
    def starts_server(self) -> bool:
        return self.is_server and not self.urls

    @property
    def for_worker(self) -> EngineConfig:
        """Settings of an engine in a process of this machine, for a teacher or a reference beside a policy that a server serves."""
        if not self.is_server:
            return replace(
                self, replicas=1, member_patience=EngineConfig.member_patience, patience=EngineConfig.patience
            )
        kept = {name: getattr(self, name) for name in ("dtype", "context_length", "max_deaths", "exact")}
        return EngineConfig(**kept)


_OF_JOINED = ("urls", "token_file")
_OF_STARTED = ("python", "server_args", "gpus")
OF_SERVERS = (*_OF_JOINED, *_OF_STARTED, "patience", "shared_dir")
"""Settings that the native engine does not have."""
OF_FLEETS = ("replicas", "member_patience")
_OF_WORKERS = ("ticket_deaths",)
"""Settings that a server, which is nobody's worker, does not have."""
_OF_BOTH = ("kind", "dtype", "context_length", "max_deaths", "exact", *OF_FLEETS)
ON_GPUS = (
    "engine.replicas of the native engine share the cores of this machine, not its GPUs; have the run start servers of the same engine: "
    'engine.kind = "headrace" with engine.gpus = [0, 1, ...]'
)
_SET_FOR_VLLM = ("kv_gib", "max_running", "max_adapters", "cores")
"""Settings that become options of a vLLM server when a run starts it."""


def engine_problems(config: EngineConfig) -> Iterator[str]:
    """Settings that have no meaning for an engine of this kind, and those that a server lacks."""
    usual = EngineConfig()
    changed = [field.name for field in fields(config) if getattr(config, field.name) != getattr(usual, field.name)]
    yield from _fleet_problems(config, changed)
    if not config.is_server:
        for name in changed:
            if name in OF_SERVERS and not (name == "patience" and config.is_fleet):
                yield f'engine.{name} is about servers, and engine.kind = "{config.kind}" is none; set engine.kind = "headrace", "vllm" or "sglang", or remove it'
        return
    for name in changed:
        if name in _OF_WORKERS:
            yield f'engine.{name} is about the run\'s own engines, and engine.kind = "{config.kind}" is a server; remove it'
    if config.kind == "sglang" and not config.urls:
        yield 'engine.kind = "sglang" needs engine.urls: a run starts no SGLang server; start one and name its address (docs/engines.md)'
        return
    yield from _server_problems(config, changed)
    for url in config.urls:
        if not re.fullmatch(r"https?://[^/\s?#@]+/?", url):
            yield f'engine.urls: "{url}" is no address of a server; write it as http://HOST:PORT'
    if importlib.util.find_spec("aiohttp") is None:
        yield f'engine.kind = "{config.kind}" needs aiohttp, which is not installed: {install("remote")}'


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
    for name in changed:
        if name == "swap" and config.kind != "headrace":
            yield f'engine.swap is of headrace\'s own engine; remove it: with engine.kind = "{config.kind}" caches are always recomputed'
        elif config.urls and name in _OF_STARTED:
            yield f"engine.{name} is about a server that the run starts, and engine.urls names one that is running; remove one of them"
        elif config.urls and name not in (*OF_SERVERS, *_OF_BOTH):
            yield f"engine.{name} is the server's business: give it to the command that starts it (headrace serve --set engine.{name}=..., or the server's own option)"
        elif not config.urls and name == "token_file":
            yield "engine.token_file is about a server that is running (engine.urls), and a run makes a token for the one that it starts; remove it"
        elif config.starts_server and config.kind == "vllm" and name not in (*OF_SERVERS, *_OF_BOTH, *_SET_FOR_VLLM):
            yield f"engine.{name} is of headrace's own engine, and vLLM has no setting like it; remove it, and give vLLM's own options in engine.server_args"
