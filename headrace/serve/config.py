"""Settings of the server. Imports neither starlette nor torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.trainer.shared.calls import SharedConfig
from headrace.web.limits import ServerLimits, check_address


@dataclass(frozen=True, kw_only=True)
class TrainLimits:
    models: int = 16
    """Adapters that may be trained at once; a further one is refused."""
    pending: int = 4096
    """Requests whose results are not there yet; a further one is answered with 429, and the client tries again."""
    kept_bytes: int = 256 << 20
    """Results that are kept for clients that have not fetched them, or may ask again after a lost connection."""
    kept_seconds: float = 600.0
    """Time for which a result is kept."""
    poll_seconds: float = 20.0
    """Time for which a request for a result waits before the client is told to ask again. The client gives up after 45 s."""
    session_seconds: float = 600.0
    """Time without a heartbeat (the client sends one every 10 s) after which a session ends and its adapters are freed."""
    gap_seconds: float = 330.0
    """Time for which requests wait for an earlier one that has not arrived. The client tries for 300 s."""
    rank: int = 256


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    directory: Path
    """The checkpoints of all clients."""
    train: SharedConfig = field(default_factory=SharedConfig)
    limits: TrainLimits = TrainLimits()


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    model: str
    """A directory, a known name, or a hub id."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    token: str = ""
    """If set, every route requires it."""
    name: str = ""
    """The name of the model in requests; empty: `model` as it is given."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    limits: ServerLimits = ServerLimits()
    training: TrainingConfig | None = None
    """Set where clients train adapters here (the Tinker API)."""

    def __post_init__(self) -> None:
        """Raises ConfigError for an address that other machines can reach, if there is no token."""
        if self.engine.replicas > 1:
            raise ConfigError(
                f"engine.replicas = {self.engine.replicas}: a server serves one engine; start a server for each and name them all in the run's "
                "engine.urls, or have the run start them"
            )
        if self.engine.weights != "published":
            raise ConfigError(
                f'engine.weights = "{self.engine.weights}": a server does not measure how far its weights are from those that are trained, as a run '
                'does; set engine.weights = "published"'
            )
        if self.training and not self.engine.max_adapters:
            raise ConfigError(
                "--train trains adapters, and --adapters 0 leaves the engine no room for one; give it 4, say"
            )
        check_address(self.host, self.port, self.token, "replace its weights and have it read files")

    @property
    def served_name(self) -> str:
        return self.name or self.model
