"""Settings of the engine. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass

from headrace.engine.kinds import ENGINES, SERVERS
from headrace.engine.sizes import ON_CPU, OpenSizes, Sizes
from headrace.settings.strict import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EngineConfig:
    kind: str = "native"
    """The engine that serves the policy. Each server states what it is (`ServerKind.about`), and docs/settings.md lists them."""
    urls: tuple[str, ...] = ()
    """Addresses of running servers, such as ["http://127.0.0.1:8000"]; several are a fleet. Empty: the run starts a
    server here, and ends it."""
    python: str = ""
    """Interpreter that starts the server, such as "~/vllm/bin/python". Empty: the one that runs headrace."""
    server_args: tuple[str, ...] = ()
    """More arguments of the server's command, such as ["--tensor-parallel-size", "2"]."""
    gpus: tuple[int, ...] = ()
    """GPUs of the servers that the run starts, counted among CUDA_VISIBLE_DEVICES. Empty: one server sees all."""
    token_file: str = ""
    """File with the token of a running server."""
    patience: float = Field(default=60.0, gt=0)
    """Seconds that a server (of a fleet: every member) may be unreachable before the run stops, or replaces one that
    it started."""
    shared_dir: str = ""
    """Directory, seen by trainer and server, through which weights travel. Empty: one below the run's."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is a GPU, else cpu."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of the served weights and the KV cache. auto: the one measured to be faster here (`headrace doctor` prints
    it)."""
    weights: Literal["published", "int8", "fp8"] = "published"
    """published: in `dtype`. int8, fp8: linear layers in eight bits, within `watch.mismatch` (docs/quantised.md);
    fp8 has never run on a GPU."""
    kv_gib: Literal["auto"] | Annotated[float, Field(gt=0)] = "auto"
    """The KV cache's largest size in GiB. auto: 2 on a CPU; on a GPU what is free (docs/auto.md)."""
    max_running: Literal["auto"] | Annotated[int, Field(gt=0)] = "auto"
    """The most sequences that decode at once. auto: 64 on a CPU; on a GPU as many as the cache holds of usual length, at most 1,024."""
    context_length: int = Field(default=1024, gt=1)
    """The most tokens of prompt and completion together, per request."""
    prefill_chunk: Literal["auto"] | Annotated[int, Field(gt=0)] = "auto"
    """Prompt tokens forwarded per pass. auto: 512 on a CPU, up to 8192 on a GPU."""
    swap: Literal["keep", "recompute"] = "keep"
    """The KV cache of running sequences at new weights: kept (version spans record it), or recomputed, which vLLM and
    SGLang always do."""
    exact: bool = False
    """A request's tokens and log-probs do not depend on the rest of the batch, nor on interruptions, to the bit. Slower, except in the kernels,
    which always are."""
    max_adapters: int = Field(default=0, ge=0)
    """LoRA adapters that can be loaded at once."""
    routing: bool = False
    """Record the experts of every position, for requests that ask; costs memory beside the KV cache."""
    check: bool = False
    """Check the KV cache's bookkeeping after every forward pass. For debugging."""
    cores: tuple[int, ...] = ()
    """CPU cores of the engine process; empty: all, shared."""
    threads: int = Field(default=0, ge=0)
    """Threads. 0: as many as `cores`, or as measured to be fastest."""
    replicas: int = Field(default=1, gt=0)
    """Engines that serve as one (docs/engines.md). They share `cores`, `threads` and `gpus`; each has a KV cache of `kv_gib`."""
    member_patience: float = Field(default=30.0, gt=0)
    """Seconds that a fleet's member may be silent, or late with new weights; then it leaves until it has caught up."""
    max_deaths: int = Field(default=3, gt=0)
    """Processes of an engine that may die in a row, within an hour's work, before the run stops or its fleet gives it
    up."""
    ticket_deaths: int = Field(default=3, gt=0)
    """Engine processes, or rollout hosts, that may die at one ticket before its rollouts fail (docs/cluster.md)."""
    path: Literal["auto", "kernels", "fused", "hf", "cache"] = "auto"
    """The way in which a model is computed (docs/models.md). auto: the first of these that supports it here, unless another was measured to be
    faster."""

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
    def open_sizes(self) -> OpenSizes:
        """The sizes that are set; the others are None."""
        asked = (self.kv_gib, self.max_running, self.prefill_chunk)
        return OpenSizes(*(None if size == "auto" else size for size in asked))  # type: ignore[arg-type]

    @property
    def sizes(self) -> Sizes:
        """All sizes, as numbers. Those that nobody has chosen yet are a CPU's."""
        return self.open_sizes.on_cpu()

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
        """Settings of an engine in a process of this machine, for a teacher or a reference beside a policy. Its weights are not quantised, and
        its KV cache is small where nobody said otherwise: it scores texts, and a GPU's memory is the policy's."""
        if not self.is_server:
            usual = {name: getattr(EngineConfig, name) for name in ("member_patience", "patience", "weights")}
            own = replace(self, replicas=1, **usual)
        else:
            kept = {name: getattr(self, name) for name in ("dtype", "context_length", "max_deaths", "exact")}
            own = EngineConfig(**kept)
        return replace(own, kv_gib=ON_CPU.kv_gib) if own.kv_gib == "auto" else own


OF_JOINED = ("urls", "token_file")
OF_STARTED = ("python", "server_args", "gpus")
OF_SERVERS = (*OF_JOINED, *OF_STARTED, "patience", "shared_dir")
"""Settings that the native engine does not have."""
OF_FLEETS = ("replicas", "member_patience")
