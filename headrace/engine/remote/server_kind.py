"""Facts that a kind of server states about itself. Everything that names, starts, checks, describes or refuses a server asks these facts.

A server is a dialect with its `ServerKind` in one file of `remote/dialects/`, and a line in `kinds.py`. Imports no torch and no client.
"""

from __future__ import annotations

import importlib
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple
from urllib.parse import urlsplit

from headrace.core.errors import ConfigError
from headrace.engine.kinds import SERVERS
from headrace.engine.remote.connection import Connection, Unreachable
from headrace.settings.extras import Found

if TYPE_CHECKING:
    from headrace.engine.config import EngineConfig
    from headrace.engine.remote.dialect import Dialect


HOST = "127.0.0.1"
"""The address of servers that a run starts."""


@dataclass(frozen=True)
class Control:
    """The routes by which the weights of a server can be replaced."""

    path: str
    """A route that changes nothing, and is guarded as the others are."""
    routes: str
    """The names of some of the others, for people."""
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Place:
    """The facts that a server needs beside the settings of the engine."""

    model: Path
    port: int
    token: str
    token_file: Path
    """Holds the token, for servers that take none from a variable."""
    adapters: int
    """Adapters that are served at once."""
    rank: int
    """The largest rank among them."""
    adapted: Sequence[str] = ()
    """Names of the modules that adapters may adapt, without their path."""
    fetches: bool = False
    """Whether it takes new weights by headrace's own part in it instead of reading files."""
    sleeps: bool = False
    """Whether it has to give its device up while the trainer works (`orchestration.placement = "shared"`)."""


class Described(NamedTuple):
    """The facts from which a dialect is made."""

    model_dir: Path
    check_every: int
    """`watch.identity_every`."""
    access: Mapping[str, str] | None = None
    """The fields by which the server fetches weights from the trainer; None where it reads files. They are in no update, because those are
    recorded."""


@dataclass(frozen=True, kw_only=True)
class Startable:
    """How a run starts a server of this kind."""

    modules: Sequence[Sequence[str]]
    """The modules that it needs, each with the distributions that have it."""
    install: str
    """The command that installs it, for people."""
    command: Callable[[EngineConfig, Found, Place], tuple[list[str], dict[str, str]]]
    """Its words, and the variables that it needs."""
    settings: Sequence[str] | None = None
    """Settings of `[engine]` that become its options, beside those of all servers; None: all."""
    needs_headrace: Literal["never", "to fetch", "always"] = "never"
    """Whether headrace, in this version, must be installed beside it."""
    token_file: tuple[str, str] = ("", "{}")
    """The end of the name of `Place.token_file`, and its text, with `{}` for the token."""


@dataclass(frozen=True, kw_only=True)
class ServerKind:
    words: str
    """Its name for people."""
    about: str
    """Half a sentence that says what it is, for the page of settings."""
    dialect: Callable[[Described], Dialect]
    starts: Startable | None = None
    """None: a run joins one that is running (`engine.urls`)."""
    untried: str = ""
    """The part of it that was never tried on the real thing, in words; a run that uses it says so."""
    fetches: bool = False
    """Whether it can fetch weights over the network."""
    swaps: bool = False
    """Whether it can keep the KV cache of running sequences when weights are swapped (`engine.swap`)."""
    copies_tied: bool = False
    """Whether it may multiply by a copy of its own of a tied parameter, which it makes anew only when that is sent under its own name."""
    control: Control | None = None
    """Control routes that it may answer without a token beyond its machine; None if it never does."""
    cannot_reload: Callable[[Found, int], str] = lambda found, experts: ""
    """The reason why it cannot be given new weights of a model with so many experts in a layer, with the remedy; empty if it can."""
    cannot_sleep: Callable[[Found], str] | None = None
    """The reason why a build of it cannot give its device up while the trainer works, with the remedy; empty if it can. None: no build can."""

    cannot_open: Callable[[Found], str] | None = None
    """The reason why a build of it cannot open the trainer's memory on a GPU, with the remedy; empty if it can. None: no build can."""

    def cannot_serve(self, found: Found, experts: int, *, sleeping: bool, opening: bool) -> str:
        """Returns the reason why a build cannot serve a run, with the remedy; empty if it can. `sleeping`: whether it takes turns with the trainer;
        `opening`: whether it opens the trainer's memory."""
        asleep = self.cannot_sleep(found) if sleeping and self.cannot_sleep else ""
        closed = self.cannot_open(found) if opening and self.cannot_open else ""
        return asleep or closed or self.cannot_reload(found, experts)


def server_kind(kind: str) -> ServerKind:
    module, _, name = SERVERS[kind].partition(":")
    found: ServerKind = getattr(importlib.import_module(module), name)
    return found


def startable_servers() -> dict[str, Startable]:
    """Returns the servers that a run starts, by kind."""
    return {kind: starts for kind in SERVERS if (starts := server_kind(kind).starts)}


# --- Whether anybody who reaches a server may change it.


async def open_control(kind: str, url: str, stranger: Connection, seconds: float) -> str:
    """Returns a warning about a server that other machines reach and may change; an empty string for one that they cannot. `stranger`: a
    connection to it without a token."""
    control = server_kind(kind).control
    if control is None or is_here(url):
        return ""
    try:
        await stranger.get(control.path, seconds)
    except (ConfigError, Unreachable):
        return ""
    return (
        f"the server at {url} is reached over a network, and its control routes ({control.routes}) answer without a token: whoever "
        f"reaches them can replace its weights; {control.remedy}"
    )


def is_here(url: str) -> bool:
    """Returns whether a server is reached at an address of this machine alone."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
