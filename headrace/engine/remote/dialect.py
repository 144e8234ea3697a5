"""The differences between kinds of servers: routes and bodies, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.core.reports import Capabilities, EngineStats, LoadReport
from headrace.core.steps import Finished, PromptScores, TokenDetails
from headrace.core.types import Request, Stop
from headrace.core.weights import WeightUpdate
from headrace.engine.remote.connection import Connection


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
class Run:
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

    runs: Sequence[Run] = ()
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
