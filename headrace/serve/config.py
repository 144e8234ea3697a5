"""Settings of the server. Imports neither starlette nor torch."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from headrace.engine.config import EngineConfig
from headrace.errors import ConfigError

SHORTEST_TOKEN = 16
"""Smallest number of characters of a token."""


@dataclass(frozen=True)
class ServerLimits:
    body_bytes: int = 16 << 20
    """Largest body of one request; a larger one is answered with 413."""
    body_seconds: float = 30.0
    """Seconds within which a request's body has to arrive; a slower one is answered with 408."""
    requests: int = 1024
    """Completions that may be in progress at once; further requests are answered with 503."""
    completions: int = 128
    """Largest number of completions of one request (`n` times its prompts)."""


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

    def __post_init__(self) -> None:
        """Raises ConfigError for an address that other machines can reach, if there is no token."""
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"--port {self.port} is none; choose 1 to 65535, or 0 for any that is free")
        if not self.token and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} can be reached from other machines, and whoever reaches this server can replace its weights and "
                "have it read files; give it --token-file FILE, or leave --host at 127.0.0.1"
            )
        if self.token and len(self.token) < SHORTEST_TOKEN:
            raise ConfigError(
                f"the token has {len(self.token)} characters; use at least {SHORTEST_TOKEN} (openssl rand -hex 32)"
            )

    @property
    def served_name(self) -> str:
        return self.name or self.model


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost may resolve to any address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
