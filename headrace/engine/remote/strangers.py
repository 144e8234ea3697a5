"""Whether anybody who reaches a server may change it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from headrace.core.errors import ConfigError
from headrace.engine.remote.connection import Connection
from headrace.engine.remote.errors import Unreachable


@dataclass(frozen=True)
class Control:
    """The routes by which the weights of a server can be replaced."""

    path: str
    """A route that changes nothing, and is guarded as the others are."""
    routes: str
    """The names of some of the others, for people."""
    remedy: str


CONTROLS = {
    "vllm": Control(
        "/weight_info",
        "/pause, /collective_rpc, /update_weight_version",
        "--api-key does not change that: let only this machine reach them, by a firewall, a tunnel or a proxy that asks for a token",
    ),
    "sglang": Control(
        "/get_server_info",
        "/pause_generation, /update_weights_from_disk, /load_lora_adapter",
        "start SGLang with --api-key, and name the file that holds the key in engine.token_file",
    ),
}
"""The control routes by `engine.kind`. headrace's own server answers nobody beyond its machine without a token."""


async def open_control(kind: str, url: str, stranger: Connection, seconds: float) -> str:
    """Returns a warning about a server that other machines reach and may change; an empty string for one that they cannot. `stranger`: a
    connection to it without a token."""
    control = CONTROLS.get(kind)
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
