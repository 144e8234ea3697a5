"""Whether anybody who reaches a server may change it."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from headrace.core.errors import ConfigError
from headrace.engine.remote.connection import Connection
from headrace.engine.remote.errors import Unreachable
from headrace.engine.remote.server_kind import server_kind


async def open_control(kind: str, url: str, stranger: Connection, seconds: float) -> str:
    """Returns a warning about a server that other machines reach and may change; an empty string for one that they cannot. `stranger`: a
    connection to it without a token."""
    control = server_kind(kind).control
    if control is None or _is_here(urlsplit(url).hostname or ""):
        return ""
    try:
        await stranger.get(control.path, seconds)
    except (ConfigError, Unreachable):
        return ""
    return (
        f"the server at {url} is reached over a network, and its control routes ({control.routes}) answer without a token: whoever "
        f"reaches them can replace its weights; {control.remedy}"
    )


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
