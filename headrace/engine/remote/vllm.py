"""The dialect of vLLM 0.32: token-in/token-out streams, weights by files, adapters by path.

Routes and fields are those of vLLM's own source: `entrypoints/scale_out/token_in_token_out` (generation, behind `--enable-scale-out`),
`entrypoints/rl/online` and `entrypoints/serve/dev` (pause, weights, their label; with `VLLM_SERVER_DEV_MODE=1`), `entrypoints/serve/lora`
(with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`).

**Versions.** vLLM reports the label of the weights in the last event of a stream only. So no stream lives through an update: the client
leaves all of them, pauses the server (which aborts what is left and clears the prefix cache), has it read the new weights, labels them,
resumes it, and asks for every request again from its prefix. Each token that was heard is of the version that was live then, and its KV
too. The labels of the last event are compared with ours: another one means that somebody else changes this server.

**Adapters** are loaded under a name of their own for every version; requests name the newest, and the one before is unloaded.

**Prefix cache.** Every request is salted with the label, so that no KV of older weights is served to it.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from headrace.engine.remote.connection import Connection
from headrace.engine.remote.dialect import Heard, Run, ServerState
from headrace.engine.remote.errors import Unreachable
from headrace.engine.remote.vllm_facts import Facts, meet, statistics
from headrace.errors import ConfigError, IdentityError
from headrace.reports import LoadReport
from headrace.steps import Finished, PromptScores
from headrace.types import Request, Stop
from headrace.weights import WeightUpdate

UNLABELLED = "default"
"""The label of a server that nobody has given one (`vllm/v1/engine/core.py`)."""

_ENDS: dict[str, Stop] = {"stop": "stop", "length": "length"}

NO_LOGPROB = -9999.0
"""vLLM's stand-in for a log-prob that is missing or not finite."""


@dataclass(frozen=True)
class _Live:
    update: WeightUpdate
    name: str
    """The label of the base weights, or the name of an adapter, at the server."""


class VllmDialect:
    """Protocol `Dialect`. It holds what it has sent to its one server, so it is not shared between servers."""

    keeps_requests = False

    def __init__(self, ends: Collection[int]) -> None:
        """`ends`: the model's end-of-sequence tokens."""
        self._ends = frozenset(ends)
        self._nonce = secrets.token_hex(4)
        self._boots, self._loads = 0, itertools.count()
        self._facts: Facts | None = None
        self._live: dict[str, _Live] = {}
        """The live weights by adapter; the base model's go by the empty name."""
        self._state: ServerState | None = None
        self._loading = asyncio.Lock()

    # -- the server ---------------------------------------------------------------------------------------------------------

    async def look(self, connection: Connection, seconds: float) -> ServerState:
        """Raises IdentityError where somebody else has labelled the weights meanwhile."""
        if self._loading.locked() and self._state:  # its engine answers nobody while it reads weights
            await connection.text("/health", seconds)
            return self._state
        try:
            label = str((await connection.get("/weight_info", seconds))["weight_version"])
        except Unreachable as error:
            if error.status == 404:
                raise ConfigError(
                    f"{connection.url} has no /weight_info; start vLLM 0.32 or later with VLLM_SERVER_DEV_MODE=1"
                ) from None
            raise
        if self._facts is None or not label.startswith(self._prefix):
            await self._claim(connection, label, seconds)
        assert self._facts is not None
        stats = statistics(await connection.text("/metrics", seconds))
        self._state = ServerState(
            boot=f"{self._nonce}.{self._boots}",
            dtype=self._facts.dtype,
            capabilities=self._facts.capabilities,
            fingerprints={name: live.update.fingerprint for name, live in self._live.items()},
            stats=stats,
        )
        return self._state

    @property
    def _prefix(self) -> str:
        return f"headrace-{self._nonce}-"

    async def _claim(self, connection: Connection, label: str, seconds: float) -> None:
        """A label that is not ours is that of a process which we have not met, or of somebody else."""
        if self._facts is not None and label != UNLABELLED:
            raise IdentityError(self._shared(connection.url, label))
        self._facts = await meet(connection, seconds)
        self._boots += 1
        self._live.clear()
        await self._label(connection, f"{self._prefix}{self._boots}-none", seconds)

    async def _label(self, connection: Connection, label: str, seconds: float) -> None:
        await connection.tell("/update_weight_version", {"new_version": label}, seconds)

    def _shared(self, where: str, label: str) -> str:
        ours = self._live[""].name if "" in self._live else "none"
        return (
            f"the weights of the server at {where} are labelled {label}, and this run labelled them {ours}: somebody else changes them. "
            "Give each run a server of its own"
        )

    # -- requests -----------------------------------------------------------------------------------------------------------

    def ask(self, request: Request, wire_id: str) -> tuple[str, dict[str, Any]]:
        """vLLM draws with random numbers of its own: `Sampling.seed` is not sent, because a request that goes on from its prefix under
        the same seed would be drawn with the numbers that drew its first tokens. The tokens that end a request are all named, because
        vLLM goes by its tokenizer's for others than `ended` does."""
        self._refuse(request)
        assert self._facts is not None
        sampling, scores = request.sampling, request.prompt_logprobs
        drawn: dict[str, Any] = {
            "max_tokens": max(
                1, sampling.max_tokens - len(request.prefix)
            ),  # vLLM samples at least one, behind scores too
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop_token_ids": sorted(self._stops(request)),
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
        }
        base = self._live[""].name if "" in self._live else self._prefix
        body: dict[str, Any] = {
            "request_id": wire_id,
            "token_ids": [*request.prompt, *request.prefix],
            "sampling_params": drawn | ({"prompt_logprobs": 0} if scores else {}),
            "cache_salt": base,
            "stream": not scores,  # a stream has no field for the log-probs of a prompt
        }
        if self._facts.priorities:
            body["priority"] = request.priority
        return "/inference/v1/generate", body | ({"model": self._live[request.adapter].name} if request.adapter else {})

    def ended(self, request: Request) -> Stop | None:
        """vLLM would sample behind an end of which only the token was recorded before a run was killed."""
        if request.prefix and request.prefix[-1] in self._stops(request):
            return "stop"
        return "length" if request.prefix and len(request.prefix) >= request.sampling.max_tokens else None

    def _stops(self, request: Request) -> set[int]:
        sampling = request.sampling
        return set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self._ends)

    def _refuse(self, request: Request) -> None:
        """Raises ValueError for what `Capabilities` does not hold, whoever asks for it nevertheless."""
        asked = {
            "sampling masks": request.return_mask,
            "routing": request.return_routing,
            "the most probable tokens": request.top_logprobs,
            "stop strings": request.sampling.stop,
            "log-probs of a prompt beside sampled tokens": request.prompt_logprobs and request.sampling.max_tokens,
            f"an adapter {request.adapter}, which is not loaded": request.adapter and request.adapter not in self._live,
        }
        for what, wanted in asked.items():
            if wanted:
                raise ValueError(f"vLLM is not asked for {what}; leave it out, or use the native engine")

    def hear(self, event: Any, request: Request) -> Heard:
        try:
            return self._heard(event, request)
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            raise Unreachable(f"the server answered with an event that makes no sense: {error!r}") from None

    def _heard(self, event: Any, request: Request) -> Heard:
        if "error" in event:
            raise Unreachable(str(event["error"]["message"]))
        (choice,) = event["choices"]
        live = self._live[request.adapter]
        self._check_labels(choice)
        if request.prompt_logprobs:
            logprobs = _prompt_logprobs(event["prompt_logprobs"], request.prompt)
            scores = PromptScores(request.id, live.update.version, logprobs)
            return Heard(scores=scores, end=Finished(request.id, "length"))
        tokens, reason = choice["token_ids"] or [], choice["finish_reason"]
        content = choice["logprobs"]["content"] if tokens else []
        if [one["token_id"] for one in content] != list(tokens):
            raise ValueError(f"{len(tokens)} tokens and {len(content)} log-probs of others")
        run = Run(
            tokens=tokens,
            logprobs=[_number(one["logprob"]) for one in content],
            version=live.update.version,
            kv_version=live.update.version,
            fingerprint="",
        )
        return Heard(
            runs=[run] if tokens else [],
            end=Finished(request.id, _ENDS[reason]) if reason in _ENDS else None,
            cut_off=reason is not None and reason not in _ENDS,
        )

    def _check_labels(self, choice: Any) -> None:
        """Raises IdentityError where tokens of a stream are of weights under another label than ours."""
        for span in choice.get("weight_versions") or []:
            if span["version"] != self._live[""].name:
                raise IdentityError(self._shared("this address", span["version"]))

    # -- weights ------------------------------------------------------------------------------------------------------------

    async def load(self, connection: Connection, update: WeightUpdate, seconds: float) -> LoadReport:
        begun = time.perf_counter()
        async with self._loading:
            try:
                await (self._load_adapter if update.adapter else self._load_base)(connection, update, seconds)
            except Unreachable as error:
                if error.status < 500:
                    raise
                await connection.text("/health", seconds)  # raises where the engine has died of it
                raise ConfigError(
                    f"vLLM at {connection.url} could not load version {update.version} from {update.where.get('path')}: {error}. "
                    "Its log has the reason; both machines must see engine.shared_dir under the same path"
                ) from None
        return LoadReport(update.version, verify_seconds=0.0, swap_seconds=time.perf_counter() - begun)

    async def _load_base(self, connection: Connection, update: WeightUpdate, seconds: float) -> None:
        """Leaves the server paused under its old label if it breaks off: then it serves nobody."""
        label = f"{self._prefix}{self._boots}-v{update.version}-{quote(update.fingerprint, safe='')}"
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(update.where["path"])}}
        await connection.tell("/pause?mode=abort&clear_cache=true", None, seconds)
        await connection.tell("/collective_rpc", reload, seconds)
        await self._label(connection, label, seconds)
        await connection.tell("/resume", None, seconds)
        self._live[""] = _Live(update, label)

    async def _load_adapter(self, connection: Connection, update: WeightUpdate, seconds: float) -> None:
        """Uses a name that nothing has had, not even an attempt without an answer: requests of another version cannot reach it."""
        assert update.adapter is not None
        adapter, before = update.adapter.name, self._live.get(update.adapter.name)
        name = f"{self._prefix}{self._boots}-{adapter}-v{update.version}.{next(self._loads)}"
        body = {"lora_name": name, "lora_path": str(update.where["path"])}
        await connection.tell("/v1/load_lora_adapter", body, seconds)
        self._live[adapter] = _Live(update, name)
        if before:
            await connection.tell("/v1/unload_lora_adapter", {"lora_name": before.name}, seconds)

    async def unload(self, connection: Connection, adapter: str, seconds: float) -> None:
        await connection.tell("/v1/unload_lora_adapter", {"lora_name": self._live.pop(adapter).name}, seconds)


def _prompt_logprobs(rows: Any, prompt: tuple[int, ...]) -> tuple[float, ...]:
    if len(rows) != len(prompt):
        raise ValueError(f"{len(rows)} rows for a prompt of {len(prompt)} tokens")
    return tuple(_number(row[str(token)]["logprob"]) for row, token in zip(rows[1:], prompt[1:], strict=True))


def _number(value: float) -> float:
    return math.nan if value <= NO_LOGPROB else value
