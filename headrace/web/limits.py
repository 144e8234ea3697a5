"""The limits of a server: who can reach it, and how many connections it holds. Imports no starlette."""

from __future__ import annotations

import ipaddress
import resource
from collections.abc import Callable
from dataclasses import dataclass, field

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


# --- The limits on the connections of a server
# How many it holds, and which one makes room for another. Imports no server.
#
# Whoever connects and then says nothing takes a place and an open file. Such connections have a deadline, and from a certain number on the
# oldest of them makes room for each new one. A client that says at once what it wants is never among the oldest, however many others
# there are.


SILENT = 1024
"""Connections that may wait for their first request, or for their next one."""
HEAD_SECONDS = 10.0
"""Seconds within which the head of a request has to arrive."""
STALLED_SECONDS = 60.0
"""Seconds that a client may read nothing while an answer waits for it. Its completions would count among those under way for ever."""
READ_BYTES = 1 << 15
"""Bytes of a connection that are read at once. Chunks of one byte take 1.4 µs a byte to parse, and others wait meanwhile."""
TURN_SECONDS = 0.01
"""CPU time of one read after which a connection is read less at once. A stranger's chunks of one byte cost a thousand times as much as a long one, and
whoever comes meanwhile needs several turns of the loop."""
LEAST_BYTES = 512
"""The least that is read at once."""
BACKLOG = 2048
"""Connections that may wait to be accepted."""
ACCEPTED = 64
"""Connections that are accepted in one turn of the event loop, before anybody can count them."""
OPEN_FILES = 1 << 16
"""Open files that a server asks for at most: more would make room for an attack on its memory."""
KEPT_FREE = 1024
"""Open files that connections leave to the rest of the process, or a quarter of all where that is less."""


def raise_open_files() -> int:
    """Raises the soft limit of open files as far as the hard limit allows, up to `OPEN_FILES`. Returns the limit. Many systems have a soft
    limit of 1024, for programs that use `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft == resource.RLIM_INFINITY:
        return OPEN_FILES
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


def room_for_connections() -> int:
    """Returns the number of connections that a server of this process may hold; raises the limit of open files before."""
    limit = raise_open_files()
    return limit - min(KEPT_FREE, limit // 4)


@dataclass(eq=False)
class Guest:
    """A connection. `leave`: ends it when it has to make room."""

    leave: Callable[[], None]
    here: bool = field(default=True, init=False)


class Crowd:
    """The connections of a server.

    >>> crowd, gone = Crowd(silent=2, most=9), []
    >>> first, second, third = (crowd.came(lambda n=n: gone.append(n)) for n in (1, 2, 3))
    >>> gone
    [1]
    """

    def __init__(self, silent: int, most: int) -> None:
        """`silent`: those that may wait for a request at once. `most`: of all."""
        self._silent, self._most = min(silent, most), most
        self._waiting: dict[Guest, None] = {}
        """Guests without a request, in the order in which they began to wait."""
        self._count = 0

    @property
    def count(self) -> int:
        return self._count

    def came(self, leave: Callable[[], None]) -> Guest:
        """Takes a new connection in. Another one may have to leave for it, or, if all others have requests, itself."""
        guest = Guest(leave)
        self._count += 1
        self._waiting[guest] = None
        self._make_room()
        return guest

    def asked(self, guest: Guest) -> None:
        """The guest has sent its request: it may stay until it is answered."""
        self._waiting.pop(guest, None)

    def waits(self, guest: Guest) -> None:
        """The guest may send another request."""
        if guest.here and guest not in self._waiting:
            self._waiting[guest] = None
            self._make_room()

    def left(self, guest: Guest) -> None:
        if guest.here:
            guest.here = False
            self._count -= 1
            self._waiting.pop(guest, None)

    def _make_room(self) -> None:
        while self._waiting and (len(self._waiting) > self._silent or self._count > self._most):
            oldest = next(iter(self._waiting))
            self.left(oldest)
            oldest.leave()
