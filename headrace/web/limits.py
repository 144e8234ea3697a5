"""The limits of a server, and who can reach it. Imports no starlette."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from headrace.core.errors import ConfigError

SHORTEST_TOKEN = 16
"""Smallest number of characters of a token."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    body_bytes: int = 16 << 20
    """Largest body of one request; a larger one is answered with 413."""
    body_seconds: float = 30.0
    """Seconds within which a request's body has to arrive; a slower one is answered with 408."""
    requests: int = 1024
    """Completions that may be in progress at once; further requests are answered with 503."""
    completions: int = 128
    """Largest number of completions of one request (`n` times its prompts)."""
    top_logprobs: int = 1024
    """Most probable tokens that a request may ask for at one position."""
    logprobs: int = 1 << 23
    """Log-probs that the answer to one request may hold: positions times most probable tokens."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost may resolve to any address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_address(host: str, port: int, token: str, danger: str) -> None:
    """Raises ConfigError for a port that is none, for a token that can be guessed, and for an address that other machines can reach if
    there is no token. `danger`: what whoever reaches the server can do."""
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"--port {port} is none; choose 1 to 65535, or 0 for any that is free")
    if not token and not is_loopback(host):
        raise ConfigError(
            f"--host {host} can be reached from other machines, and whoever reaches this server can {danger}; give it --token-file FILE, "
            "or leave --host at 127.0.0.1"
        )
    if token and len(token) < SHORTEST_TOKEN:
        raise ConfigError(
            f"the token has {len(token)} characters; use at least {SHORTEST_TOKEN} (openssl rand -hex 32)"
        )
