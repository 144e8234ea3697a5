"""The differences between kinds of servers: routes and bodies, nothing else."""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol
from urllib.parse import quote

from headrace.core.errors import ConfigError, IdentityError
from headrace.core.reports import Capabilities, EngineStats, LoadReport
from headrace.core.steps import Finished, PromptScores, TokenDetails
from headrace.core.types import Request, Stop
from headrace.core.weights import WeightUpdate
from headrace.engine.remote.connection import Connection, Unreachable


@dataclass(frozen=True)
class ServerState:
    """The state of a server at one moment."""

    boot: str
    """Different for every process of the server."""
    dtype: str
    """The dtype that it computes in."""
    capabilities: Capabilities
    fingerprints: dict[str, str]
    """Fingerprints of the live weights by adapter; the base has the empty name."""
    stats: EngineStats


@dataclass(frozen=True, kw_only=True)
class TokenSpan:
    """Neighbouring tokens that the same weights sampled."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    version: int
    kv_version: int
    fingerprint: str
    """Empty if the server does not report it."""
    mixed: bool = False


@dataclass(frozen=True, kw_only=True)
class Heard:
    """One event of a stream."""

    runs: Sequence[TokenSpan] = ()
    details: Sequence[TokenDetails] = ()
    scores: PromptScores | None = None
    scored_by: str = ""
    """Fingerprint of the weights that scored the prompt."""
    end: Finished | None = None
    cut_off: bool = False
    """Whether the server ended the request early without our asking."""


class Dialect(Protocol):
    keeps_requests: bool
    """Whether requests go on at the server through an update. Where they do not, their streams are left before it, and they go on
    from their prefixes after it."""
    counts_busy: bool
    """Whether the server reports for how long it has worked."""

    async def look(self, connection: Connection, seconds: float) -> ServerState:
        """Raises Unreachable without an answer, ConfigError for a server of another kind."""

    def ask(self, request: Request, wire_id: str) -> tuple[str, dict[str, Any]]:
        """Route and body of a stream."""

    def ended(self, request: Request) -> Stop | None:
        """How a request ended before it is sent, where all its tokens are in its prefix and the server would sample another one."""

    def hear(self, event: Any, request: Request) -> Heard:
        """Raises Unreachable for an answer that cannot be read."""

    async def load(self, connection: Connection, update: WeightUpdate, seconds: float) -> LoadReport:
        """Returns when it is live. What is live already is not loaded again. Raises IdentityError, ValueError, Unreachable."""

    async def unload(self, connection: Connection, adapter: str, seconds: float) -> None: ...


class SleepingDialect(Dialect, Protocol):
    """A server that can give its device up. Both calls may be repeated, and raise ConfigError for a server that cannot do it."""

    @property
    def serves(self) -> bool:
        """Whether the server is awake, with weights that are known."""

    async def sleep(self, connection: Connection, keeps_base: bool, seconds: float) -> None:
        """`keeps_base`: whether the base model's weights go to the host's memory, and come back. Else they are discarded."""

    async def wake(self, connection: Connection, seconds: float) -> None:
        """Takes the device back. Where the weights were discarded, requests wait at the server until the next `load`."""


# --- The common part of dialects whose servers carry a label for their weights
# The common part of dialects whose servers carry a label for their weights, and report no fingerprint: vLLM and SGLang.
#
# **Versions.** No stream lives through an update: the client leaves all of them, has the server read the new weights under a label of ours,
# and asks for every request again from its prefix. So every token that was heard is of the version that was live then, and its KV too. The
# labels that a server reports are compared with ours: another one means that somebody else changes it.
#
# **Adapters** are loaded under a name of their own for every version; requests name the newest, and the one before is unloaded.


UNLABELLED = "default"
"""The label of a server that nobody has given one, of both kinds (`vllm/v1/engine/core.py`, SGLang's `server_args.py`)."""

_REACH = {
    "path": "both machines must see engine.shared_dir under the same path",
    **dict.fromkeys(("url", "parts", "host"), "the server must reach the trainer at weight_sync.host"),
    "handle": "server and trainer must be on one GPU; if they are not, leave weight_sync.kind out",
}
"""The remedy, by what says in `WeightUpdate.where` how the server gets the weights."""

ENDS: dict[str, Stop] = {"stop": "stop", "length": "length"}


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """The facts that do not change while the process lives."""

    dtype: str
    capabilities: Capabilities
    priorities: bool
    """Whether requests may have a priority."""
    metrics: bool = True
    """Whether it counts its work for `/metrics`."""
    sleeps: bool = False
    """Whether it was started such that it can give its device up."""


@dataclass(frozen=True)
class Live:
    update: WeightUpdate
    name: str
    """The label of the base weights, or the name of an adapter, at the server."""


class LabelledDialect(ABC):
    """Protocol `Dialect`. It holds what it has sent to its one server, so it is not shared between servers."""

    keeps_requests = False
    counts_busy = False
    kind: ClassVar[str]
    """The server's name for people."""
    adapter_routes: ClassVar[str] = ""
    """The path before `/load_lora_adapter`."""

    def __init__(self, ends: Collection[int]) -> None:
        """`ends`: the model's end-of-sequence tokens."""
        self._ends = frozenset(ends)
        self._nonce = secrets.token_hex(4)
        self._boots, self._loads = 0, itertools.count()
        self._known: ServerFacts | None = None
        self._live: dict[str, Live] = {}
        """The live weights by adapter; the base model's go by the empty name."""
        self._state: ServerState | None = None
        self._loading, self._meeting = asyncio.Lock(), asyncio.Lock()

    @property
    def _facts(self) -> ServerFacts:
        assert self._known is not None, "the server is met before it is asked for anything"
        return self._known

    # -- labels -------------------------------------------------------------------------------------------------------------

    @property
    def _prefix(self) -> str:
        return f"headrace-{self._nonce}-"

    def _is_met(self, url: str, label: str) -> bool:
        """Returns whether the process is known. A label that is not ours is that of a process which we have not met, or of somebody else:
        then raises IdentityError."""
        if self._known is not None and label.startswith(self._prefix):
            return True
        if self._known is not None and label != UNLABELLED:
            raise IdentityError(self._shared(url, label))
        return False

    @abstractmethod
    async def _label_of(self, connection: Connection, seconds: float) -> str:
        """Returns the label of the process that answers now."""

    async def _check_met(self, connection: Connection, seconds: float) -> None:
        """Called before a process is given the label of an update. Raises Unreachable if it took the place of another during the update:
        nobody has met it, and nobody would miss what the other one had."""
        if not self._is_met(connection.url, await self._label_of(connection, seconds)):
            raise Unreachable("it was started anew")

    def _met(self, facts: ServerFacts) -> str:
        """Notes a new process of the server. Returns the label to give it."""
        self._known = facts
        self._boots += 1
        self._live.clear()
        return f"{self._prefix}{self._boots}-none"

    def _seen(self, stats: EngineStats) -> ServerState:
        self._state = ServerState(
            boot=f"{self._nonce}.{self._boots}",
            dtype=self._facts.dtype,
            capabilities=self._facts.capabilities,
            fingerprints={name: live.update.fingerprint for name, live in self._live.items()},
            stats=stats,
        )
        return self._state

    def _check_labels(self, labels: Iterable[str]) -> None:
        """Raises IdentityError where tokens are of weights under another label than ours."""
        for label in labels:
            if label != self._live[""].name:
                raise IdentityError(self._shared("this address", label))

    def _shared(self, where: str, label: str) -> str:
        ours = self._live[""].name if "" in self._live else "none"
        return (
            f"the weights of the server at {where} are labelled {label}, and this run labelled them {ours}: somebody else changes them. "
            "Give each run a server of its own"
        )

    # -- requests -----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _stops(self, request: Request) -> set[int]:
        """The tokens that end the request."""

    def ended(self, request: Request) -> Stop | None:
        """The server would otherwise sample behind an end of which only the token was recorded before a run was killed."""
        if request.prefix and request.prefix[-1] in self._stops(request):
            return "stop"
        return "length" if request.prefix and len(request.prefix) >= request.sampling.max_tokens else None

    def _refuse(self, request: Request, own: dict[str, Any]) -> None:
        """Raises ValueError for what `Capabilities` does not hold, whoever asks for it nevertheless. `own`: what this kind of server
        lacks beside the rest, and whether it is asked for."""
        asked = {
            "routing": request.return_routing,
            "the most probable tokens": request.top_logprobs,
            "stop strings": request.sampling.stop,
            "log-probs of a prompt beside sampled tokens": request.prompt_logprobs and request.sampling.max_tokens,
            f"an adapter {request.adapter}, which is not loaded": request.adapter and request.adapter not in self._live,
        }
        for what, wanted in (own | asked).items():
            if wanted:
                raise ValueError(f"{self.kind} is not asked for {what}; leave it out, or use the native engine")

    @abstractmethod
    def _heard(self, event: Any, request: Request) -> Heard: ...

    def hear(self, event: Any, request: Request) -> Heard:
        try:
            return self._heard(event, request)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise Unreachable(f"the server answered with an event that makes no sense: {error!r}") from None

    # -- weights ------------------------------------------------------------------------------------------------------------

    @abstractmethod
    async def _load_base(self, connection: Connection, update: WeightUpdate, label: str, seconds: float) -> None:
        """Leaves the server paused if it breaks off: then it serves nobody."""

    @abstractmethod
    async def _is_refusal(self, connection: Connection, error: ValueError | Unreachable, seconds: float) -> bool:
        """Whether the server lives and could not load the weights."""

    async def load(self, connection: Connection, update: WeightUpdate, seconds: float) -> LoadReport:
        begun = time.perf_counter()
        async with self._loading:
            live = self._live.get(update.adapter.name if update.adapter else "")
            if live and live.update == update:
                return LoadReport(update.version, verify_seconds=0.0, swap_seconds=0.0)
            try:
                if update.adapter:
                    await self._load_adapter(connection, update, update.adapter.name, seconds)
                else:
                    label = f"{self._prefix}{self._boots}-v{update.version}-{quote(update.fingerprint, safe='')}"
                    self._live.pop("", None)  # if this breaks off, nobody knows what the server has
                    await self._load_base(connection, update, label, seconds)
                    self._live[""] = Live(update, label)
            except (ValueError, Unreachable) as error:
                if not await self._is_refusal(connection, error, seconds):
                    raise
                how = next(how for how in _REACH if how in update.where)
                named = {
                    "handle": "the trainer's memory",
                    "host": f"{update.where.get('host')}:{update.where.get('port')}",
                }
                place = named.get(how, update.where[how])
                raise ConfigError(
                    f"{self.kind} at {connection.url} could not load version {update.version} from {place}: {error}. Its log has the reason; "
                    f"{_REACH[how]}"
                ) from None
        return LoadReport(update.version, verify_seconds=0.0, swap_seconds=time.perf_counter() - begun)

    async def _load_adapter(self, connection: Connection, update: WeightUpdate, adapter: str, seconds: float) -> None:
        """Uses a name that nothing has had, not even an attempt without an answer: requests of another version cannot reach it."""
        before = self._live.get(adapter)
        name = f"{self._prefix}{self._boots}-{adapter}-v{update.version}.{next(self._loads)}"
        body = {"lora_name": name, "lora_path": await self._adapter_path(connection, update, name, seconds)}
        await connection.tell(f"{self.adapter_routes}/load_lora_adapter", body, seconds)
        self._live[adapter] = Live(update, name)
        if before:
            await self._unload(connection, before, seconds)

    async def _adapter_path(self, connection: Connection, update: WeightUpdate, name: str, seconds: float) -> str:
        """Returns where the adapter's files are at the server. `name`: the one under which it is going to be loaded."""
        return str(update.where["path"])

    async def unload(self, connection: Connection, adapter: str, seconds: float) -> None:
        await self._unload(connection, self._live.pop(adapter), seconds)

    async def _unload(self, connection: Connection, live: Live, seconds: float) -> None:
        await connection.tell(f"{self.adapter_routes}/unload_lora_adapter", {"lora_name": live.name}, seconds)


def sums_of(text: str, kind: str) -> dict[str, float]:
    """Reads the Prometheus text of `/metrics`: the sums of the samples `kind:NAME` over all engines behind the server. A counter's name is
    without its `_total`."""
    sums: dict[str, float] = {}
    for name, value in re.findall(rf"^{kind}:(\w+?)(?:_total)?(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE):
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums
