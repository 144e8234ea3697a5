"""The messages of a worker that connects, and the limits on them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import msgspec

from headrace.core.errors import HeadraceError
from headrace.core.types import Struct
from headrace.processes.frames import framed
from headrace.processes.wire import Writer

SILENCE = 5.0
"""Seconds of silence after which a worker counts as lost."""

DESERTED = 60.0
"""Seconds of silence after which a worker ends itself, because the controller's machine must be gone."""

HELLO_BYTES, HELLO_SECONDS, STRANGERS = 4096, 10.0, 2048
"""Limits of a first frame: its size in bytes, its deadline in seconds, and how many are awaited at the same time. The workers of a large fleet all
dial in at once."""

WELCOME_BYTES = 1 << 20
"""Limit of the controller's answers, which name files."""

SAID_BYTES = 1 << 17
"""Limit of a message with words of a worker."""

ARRIVAL = 300.0
"""Seconds in which a started process must connect."""

AGREEING = 1800.0
"""Seconds in which a worker that offers itself must have found the model: it may fetch it."""

SPARES = 64
"""Workers that may wait for a seat."""

TOKEN, SEAT = "HEADRACE_TOKEN", "HEADRACE_SEAT"
"""Environment variables of a worker. The token is no argument, because every user of the machine can read those."""

CA, MODEL, PATIENCE, AGAIN, ADDRESS = (f"HEADRACE_{name}" for name in ("CA", "MODEL", "PATIENCE", "AGAIN", "ADDRESS"))
"""Environment variables of a worker that offers itself: the options of `headrace worker`."""
ENGINE_PYTHON = "HEADRACE_ENGINE_PYTHON"
"""The variable of the interpreter that has an engine's server on a worker's machine, in place of `engine.python`. A cluster's nodes may have it too."""

LEAVE = "leave"
"""The method of the last push to a worker that offered itself: the run needs it no more."""

LEAVING = "leaving"
"""The method of the push of a worker that is asked to end where it runs (SIGTERM)."""

Kind = Literal["engine", "trainer", "scorer", "environment"]

USER_CODE: tuple[Kind, ...] = ("scorer", "environment")
"""Kinds of workers that run the user's code."""


class Hello(Struct, frozen=True, tag="headrace"):
    version: str
    token: str
    kind: Kind
    seat: str = ""
    """The place of the worker. Empty for one that offers itself: it takes any free place."""
    host: str = ""
    """The name of its machine."""
    pid: int = 0
    door: str = ""
    """HOST:PORT at which a trainer's worker listens for the other ranks."""
    local_rank: int = 0
    """The number that `torchrun`, `srun` or the like gave it on its machine."""
    packages: dict[str, str] = {}
    """The versions of those that decide what it computes (`same_model.py`)."""
    session: str = ""
    """The session of a worker that comes back (`sessions/`)."""
    received: int = 0
    """The bytes that it has received in it."""


class WitnessHello(Struct, frozen=True, tag="headrace witness"):
    """The first message of a worker's witness (`dial.py`)."""

    version: str
    token: str
    session: str
    """The worker's."""


class WordsSaid(Struct, frozen=True):
    """Words of a worker."""

    at: int
    """The bytes that it has said before."""
    data: bytes
    over: bool = False
    """Whether its process has ended."""


class Terms(Struct, frozen=True):
    """The model of a run, or the user's files, which a worker elsewhere must have too."""

    model: str
    """`model.path` of the run; empty for one that runs the user's code, which needs no model."""
    files: dict[str, str]
    """The digest of every file that both must have, by name or path (both in `same_model.py`)."""
    packages: dict[str, str] = {}
    """The version of every installed package that the user's files import."""


class DoctorQuestion(Struct, frozen=True):
    """A question of `headrace doctor --cluster` to a worker that offers itself (`placed/examined.py`)."""

    method: str
    values: msgspec.Raw


class DoctorAnswer(Struct, frozen=True):
    value: msgspec.Raw


class Welcome(Struct, frozen=True):
    refused: str = ""
    over: bool = False
    """Whether it is refused because the run has ended."""
    terms: Terms | None = None
    question: DoctorQuestion | None = None
    waiting: bool = False
    session: str = ""
    """The worker's session, a secret. In all later messages it is empty."""
    reconnect: float = 0.0
    """Seconds in which it may come back if its connection breaks; 0: its bytes travel without segments."""
    received: int = 0
    """The bytes that the controller has received in the session of a worker that has come back."""


class Agreed(Struct, frozen=True):
    """A worker's answer to `Terms`."""

    model_dir: str = ""
    unable: str = ""


class WorkerWords(Protocol):
    """The words of a worker that has a witness."""

    ended: asyncio.Event

    def begin(self, file: Path, title: str) -> None:
        """Writes them behind those in the file."""

    def lives(self) -> None:
        """Notes a sign of life."""

    @property
    def last_lines(self) -> str: ...


class Arrived(NamedTuple):
    """A worker that has taken its place."""

    reader: asyncio.StreamReader
    writer: Writer
    hello: Hello
    address: str
    """The address from which it connected."""
    model_dir: str
    """The model's directory on its machine, if it has agreed to terms."""
    words: WorkerWords | None = None


Arrival = asyncio.Future[Arrived]


class TurnedAway(HeadraceError):
    """`reason` is counted. The message is sent to the worker; it is empty for a connection that is not one."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message)
        self.reason = reason


def packed(what: Struct) -> bytes:
    return framed(msgspec.msgpack.encode(what))
