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
    weights: Literal["published", "int8", "fp8"] = "published"
    """published: linear layers are served as they are published, in `dtype`. int8: the C++ kernels make codes of eight bits of them, with a
    scale for each output, when a version is loaded; decoding a few sequences is then nearly twice as fast, and samples from another policy,
    which the run measures at every version (`watch.mismatch`; docs/quantised.md). fp8: the same on a GPU from compute capability 8.9 on,
    where activations have codes too; never run on a GPU."""
    kv_gib: Literal["auto"] | Annotated[float, Field(gt=0)] = "auto"
    """The largest size of the KV cache, in GiB. On a CPU its pages are taken from the system when they are first used. auto: 2 on a CPU;
    on a GPU what is free beside the weights, and beside the trainer where it is on the same one (docs/auto.md)."""
    max_running: Literal["auto"] | Annotated[int, Field(gt=0)] = "auto"
    """The most sequences that decode at once. Fewer run if `kv_gib` cannot hold the tokens that so many are expected to
    have. auto: 64 on a CPU; on a GPU as many as the KV cache holds of usual length, at most 1,024."""
    context_length: int = Field(default=1024, gt=1)
    """The most tokens of prompt and completion together, per request."""
    prefill_chunk: Literal["auto"] | Annotated[int, Field(gt=0)] = "auto"
    """Prompt tokens forwarded per pass, beside one token of every running sequence. auto: 512 on a CPU, 8192 on a GPU that has room for
    them."""
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
    path: Literal["auto", "kernels", "fused", "hf", "cache"] = "auto"
    """kernels: headrace's C++ kernels; fused: a decoder in plain PyTorch; hf: Hugging Face's own forward over our blocks of keys and values;
    cache: Hugging Face's own forward with its own cache (docs/models.md says how quick); auto: the
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
