"""The limits of a server, and the addresses that only this machine can reach. Imports no starlette."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass


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


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost may resolve to any address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
