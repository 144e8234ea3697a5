"""The dialect of SGLang 0.5: token-in/token-out streams of `/generate`, weights by files, adapters by path.

Routes and fields are those of SGLang's own documentation (docs.sglang.io, "SGLang for RL Systems", "Sampling Parameters", "LoRA Serving")
and source (`entrypoints/http_server.py`, `managers/io_struct.py`, `managers/tokenizer_manager.py`, `utils/weight_versions.py`). It has
been run against the fake server only (`serve/fakes/fake_sglang.py`), never against SGLang itself.

**Versions.** SGLang clears its cache of prefixes only while it has no request, and a clearing that fails ends its scheduler
(`managers/scheduler_components`, "Cache flush failed"). So no stream lives through an update: the client leaves all of them, pauses the
server in the mode `abort`, has it read the new weights under their label, continues it, and asks for every request again from its prefix.
Every event of a stream names the labels of its tokens; another one than ours means that somebody else changes this server.

**Adapters** are loaded under a name of their own for every version; requests name the newest, and the one before is unloaded.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from headrace.engine.remote.connection import Connection
from headrace.engine.remote.dialect import Heard, Run, ServerState
from headrace.engine.remote.errors import Unreachable
from headrace.engine.remote.sglang_facts import SglangFacts, meet, statistics
from headrace.errors import ConfigError, IdentityError
from headrace.reports import LoadReport
from headrace.steps import Finished, PromptScores, TokenDetails
from headrace.types import Request, Stop
from headrace.weights import WeightUpdate

UNLABELLED = "default"
"""The label of a server that nobody has given one (`server_args.py`)."""

_ENDS: dict[str, Stop] = {"stop": "stop", "length": "length"}


@dataclass(frozen=True)
class _Live:
    update: WeightUpdate
    name: str
    """The label of the base weights, or the name of an adapter, at the server."""


class SglangDialect:
    """Protocol `Dialect`. It holds what it has sent to its one server, so it is not shared between servers."""

    keeps_requests = False

    def __init__(self, ends: Collection[int]) -> None:
        """`ends`: the model's end-of-sequence tokens."""
        self._ends = frozenset(ends)
        self._nonce = secrets.token_hex(4)
        self._boots, self._loads = 0, itertools.count()
        self._facts: SglangFacts | None = None
        self._live: dict[str, _Live] = {}
        """The live weights by adapter; the base model's go by the empty name."""
        self._state: ServerState | None = None
        self._loading = asyncio.Lock()

    # -- the server ---------------------------------------------------------------------------------------------------------

    async def look(self, connection: Connection, seconds: float) -> ServerState:
        """Raises IdentityError where somebody else has labelled the weights meanwhile."""
        label = str((await connection.get("/model_info", seconds)).get("weight_version"))
        if self._loading.locked() and self._state:  # its scheduler answers nobody while it reads weights
            return self._state
        info = await connection.get("/get_server_info", seconds)  # answered by the scheduler: it lives
        if self._facts is None or not label.startswith(self._prefix):
            await self._claim(connection, label, info, seconds)
        assert self._facts is not None
        metrics = await connection.text("/metrics", seconds) if self._facts.metrics else ""
        self._state = ServerState(
            boot=f"{self._nonce}.{self._boots}",
            dtype=self._facts.dtype,
            capabilities=self._facts.capabilities,
            fingerprints={name: live.update.fingerprint for name, live in self._live.items()},
            stats=statistics(metrics),
        )
        return self._state

    @property
    def _prefix(self) -> str:
        return f"headrace-{self._nonce}-"

    async def _claim(self, connection: Connection, label: str, info: Any, seconds: float) -> None:
        """A label that is not ours is that of a process which we have not met, or of somebody else."""
        if self._facts is not None and label != UNLABELLED:
            raise IdentityError(self._shared(connection.url, label))
        self._facts = meet(connection.url, info)
        self._boots += 1
        self._live.clear()
        relabel = {"new_version": f"{self._prefix}{self._boots}-none", "abort_all_requests": False}
        await connection.tell("/update_weight_version", relabel, seconds)

    def _shared(self, where: str, label: str) -> str:
        ours = self._live[""].name if "" in self._live else "none"
        return (
            f"the weights of the server at {where} are labelled {label}, and this run labelled them {ours}: somebody else changes them. "
            "Give each run a server of its own"
        )

    # -- requests -----------------------------------------------------------------------------------------------------------

    def ask(self, request: Request, wire_id: str) -> tuple[str, dict[str, Any]]:
        """`Sampling.seed` is not sent: a request that goes on from its prefix under the same seed would be drawn with the numbers that
        drew its first tokens."""
        self._refuse(request)
        assert self._facts is not None
        sampling, scores = request.sampling, request.prompt_logprobs
        drawn: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens - len(request.prefix),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "stop_token_ids": sorted(self._stops(request)),
            "ignore_eos": sampling.ignore_eos,
        }
        body: dict[str, Any] = {
            "rid": f"{wire_id}/",  # a request that is left takes all with it whose ids begin with its own
            "input_ids": [*request.prompt, *request.prefix],
            "sampling_params": drawn,
            "return_logprob": True,
            "logprob_start_len": 0 if scores else -1,
            "stream": not scores,
        }
        if _truncates(request):
            body["return_sampling_mask"] = True
        if self._facts.priorities:
            body["priority"] = request.priority
        if request.adapter:
            body["lora_path"] = self._live[request.adapter].name
        return "/generate", body

    def ended(self, request: Request) -> Stop | None:
        """SGLang would otherwise sample behind an end of which only the token was recorded before a run was killed."""
        if request.prefix and request.prefix[-1] in self._stops(request):
            return "stop"
        return "length" if request.prefix and len(request.prefix) >= request.sampling.max_tokens else None

    def _stops(self, request: Request) -> set[int]:
        sampling = request.sampling
        return set() if sampling.ignore_eos else set(sampling.stop_token_ids) | self._ends

    def _refuse(self, request: Request) -> None:
        """Raises ValueError for what `Capabilities` does not hold, whoever asks for it nevertheless."""
        asked = {
            "routing": request.return_routing,
            "the most probable tokens": request.top_logprobs,
            "stop strings": request.sampling.stop,
            "stop tokens beside ignore_eos, with which it goes by none": request.sampling.ignore_eos
            and request.sampling.stop_token_ids,
            "log-probs of a prompt beside sampled tokens": request.prompt_logprobs and request.sampling.max_tokens,
            f"an adapter {request.adapter}, which is not loaded": request.adapter and request.adapter not in self._live,
        }
        for what, wanted in asked.items():
            if wanted:
                raise ValueError(f"SGLang is not asked for {what}; leave it out, or use the native engine")

    def hear(self, event: Any, request: Request) -> Heard:
        try:
            return self._heard(event, request)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise Unreachable(f"the server answered with an event that makes no sense: {error!r}") from None

    def _heard(self, event: Any, request: Request) -> Heard:
        if "error" in event:
            raise _refusal(event["error"])
        meta, live = event["meta_info"], self._live[request.adapter]
        self._check_labels(meta)
        if request.prompt_logprobs:
            logprobs = _prompt_logprobs(meta["input_token_logprobs"], request.prompt)
            return Heard(
                scores=PromptScores(request.id, live.update.version, logprobs), end=Finished(request.id, "length")
            )
        tokens, reason = event["output_ids"], (meta["finish_reason"] or {}).get("type")
        run = Run(
            tokens=tokens,
            logprobs=_logprobs(meta, tokens, _truncates(request)),
            version=live.update.version,
            kv_version=live.update.version,
            fingerprint="",
        )
        return Heard(
            runs=[run] if tokens else [],
            details=_details(meta, request, len(tokens)),
            end=Finished(request.id, _ENDS[reason]) if reason in _ENDS else None,
            cut_off=reason is not None and reason not in _ENDS,
        )

    def _check_labels(self, meta: Any) -> None:
        """Raises IdentityError where tokens are of weights under another label than ours. Servers before 0.5.19 name only the label of
        the moment."""
        labels = {span["version"] for span in meta.get("weight_versions") or ()} | {meta["weight_version"]}
        for label in sorted(labels - {self._live[""].name}):
            raise IdentityError(self._shared("this address", str(label)))

    # -- weights ------------------------------------------------------------------------------------------------------------

    async def load(self, connection: Connection, update: WeightUpdate, seconds: float) -> LoadReport:
        begun = time.perf_counter()
        async with self._loading:
            try:
                await (self._load_adapter if update.adapter else self._load_base)(connection, update, seconds)
            except ValueError as error:
                raise ConfigError(
                    f"SGLang at {connection.url} could not load version {update.version} from {update.where.get('path')}: {error}. "
                    "Its log has the reason; both machines must see engine.shared_dir under the same path"
                ) from None
        return LoadReport(update.version, verify_seconds=0.0, swap_seconds=time.perf_counter() - begun)

    async def _load_base(self, connection: Connection, update: WeightUpdate, seconds: float) -> None:
        """Leaves the server paused if it breaks off: then it serves nobody."""
        label = f"{self._prefix}{self._boots}-v{update.version}-{quote(update.fingerprint, safe='')}"
        weights = {
            "model_path": str(update.where["path"]),
            "load_format": "safetensors",  # else that of its start, which may be `dummy`
            "weight_version": label,
            "flush_cache": True,
        }
        await connection.tell("/pause_generation", {"mode": "abort"}, seconds)
        await connection.tell("/update_weights_from_disk", weights, seconds)
        await connection.tell("/continue_generation", {}, seconds)
        self._live[""] = _Live(update, label)

    async def _load_adapter(self, connection: Connection, update: WeightUpdate, seconds: float) -> None:
        """Uses a name that nothing has had, not even an attempt without an answer: requests of another version cannot reach it."""
        assert update.adapter is not None
        adapter, before = update.adapter.name, self._live.get(update.adapter.name)
        name = f"{self._prefix}{self._boots}-{adapter}-v{update.version}.{next(self._loads)}"
        await connection.tell(
            "/load_lora_adapter", {"lora_name": name, "lora_path": str(update.where["path"])}, seconds
        )
        self._live[adapter] = _Live(update, name)
        if before:
            await connection.tell("/unload_lora_adapter", {"lora_name": before.name}, seconds)

    async def unload(self, connection: Connection, adapter: str, seconds: float) -> None:
        await connection.tell("/unload_lora_adapter", {"lora_name": self._live.pop(adapter).name}, seconds)


def _truncates(request: Request) -> bool:
    """Whether a request is drawn from a part of the vocabulary. SGLang's usual log-probs are those of the whole, at the temperature."""
    sampling = request.sampling
    return request.return_mask or sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0


def _refusal(error: Any) -> Exception:
    """SGLang begins a stream before it has checked the request, so its refusals are events."""
    message, code = str(error["message"]), error.get("code", 400)
    return ValueError(message) if code == 400 else Unreachable(message)


def _logprobs(meta: Any, tokens: Sequence[int], truncated: bool) -> list[float]:
    rows = meta["output_token_logprobs"]
    if [row[1] for row in rows] != list(tokens):
        raise Unreachable(f"the server sent {len(tokens)} tokens and {len(rows)} log-probs of others")
    if not truncated:
        return [_number(row[0]) for row in rows]
    _check_masks(meta, len(tokens))
    return [_number(value) for value in meta["output_token_sampling_logprobs"]] if tokens else []


def _check_masks(meta: Any, count: int) -> None:
    """Raises ConfigError for a server that leaves out the field for masks as one that it does not know."""
    for name in ("output_token_sampling_mask", "output_token_sampling_logprobs"):
        if len(meta.get(name) or ()) != count:
            raise ConfigError(
                f"the server returned no {name} for each of {count} tokens: it knows no return_sampling_mask, or ignores it. Remove "
                "rollout.top_p, rollout.top_k and rollout.min_p, or start a version of SGLang that does"
            )


def _details(meta: Any, request: Request, count: int) -> list[TokenDetails]:
    if not request.return_mask:
        return []
    _check_masks(meta, count)
    masks = meta["output_token_sampling_mask"] if count else []
    return [TokenDetails(request.id, b"", b"", array("i", mask).tobytes()) for mask in masks]


def _prompt_logprobs(rows: Any, prompt: tuple[int, ...]) -> tuple[float, ...]:
    """`rows`: (log-prob, token, text) of every token; the first has no log-prob."""
    if [row[1] for row in rows] != list(prompt):
        raise Unreachable(f"the server scored {len(rows)} tokens that are not the {len(prompt)} of the prompt")
    return tuple(_number(row[0]) for row in rows[1:])


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
