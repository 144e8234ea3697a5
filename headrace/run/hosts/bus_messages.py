"""The messages between a run and its rollout hosts.

    queue or notice     who writes     content
    ---------------     ----------     -------
    tickets             run            `ErrandLetter`: a group to sample, a held-out prompt, a single request
    answers             host           `ErrandReply`
    board: run          run            `RunNotice`: all that a host needs to open its engine
    board: weights      run            `WeightsNotice`: the newest weights, and how many hosts share the work
    board: suspects     run                `SuspectsNotice`: errands that hosts died of
    board: alive        run            `AliveNotice`, renewed as long as the run lives, also while it waits for its own workers
    list                host           `HostEntry`, renewed every `beat_of` seconds

Bodies are msgpack. Weights travel by their own transport, and tokens in flight not at all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import xxhash

from headrace.core.reports import Capabilities, EngineStats
from headrace.core.types import Completion, Prompt, Request, Struct
from headrace.core.weights import Manifest, WeightUpdate
from headrace.loop.own_groups import PlayedGroup
from headrace.weight_sync.transport import AnyTransport

TICKETS, ANSWERS = "tickets", "answers"
RUN, WEIGHTS, ALIVE, SUSPECTS = "run", "weights", "alive", "suspects"

BEAT = 1.0
"""Seconds between two entries of a host."""

SILENT = 10.0
"""Seconds without a new entry after which a host counts as lost."""

ENTRIES = 400
"""Entries that all hosts together write in a second, if they are so many. Each takes the run about 0.03 ms."""


def beat_of(hosts: int) -> float:
    """Returns the seconds between two entries of a host, which is one of so many.

    >>> beat_of(3), beat_of(600), beat_of(100_000)
    (1.0, 1.5, 2.5)
    """
    return min(SILENT / 4, max(BEAT, hosts / ENTRIES))


class GroupErrand(Struct, frozen=True, tag="group"):
    """A group of training rollouts."""

    ticket: int
    prompt: Prompt
    at_least: int
    """The version that was live when the ticket was drawn. No token may be older, whoever samples it and whenever (C1)."""


class HeldOutErrand(Struct, frozen=True, tag="held out"):
    number: int
    index: int
    prompt: Prompt
    at_least: int
    of: str = ""
    """The evaluation set (`eval.sets`); empty for the held-out prompts."""


class RequestErrand(Struct, frozen=True, tag="request"):
    request: Request
    at_least: int


Errand = GroupErrand | HeldOutErrand | RequestErrand


class ErrandLetter(Struct, frozen=True):
    """An errand as it is posted. A run that goes on from its checkpoint draws its tickets anew: the same number may mean another prompt."""

    session: str
    """The process of the run that posts it (`RunNotice.session`). Hosts of another one leave it alone."""
    asked: str
    """The digest of what is asked, which the reply repeats."""
    errand: Errand


def letter_of(session: str, errand: Errand) -> ErrandLetter:
    """The version is no part of the digest: a process that asks again asks for newer tokens."""
    asked = msgspec.msgpack.encode(msgspec.structs.replace(errand, at_least=0))
    return ErrandLetter(session, xxhash.xxh3_64_hexdigest(asked), errand)


class GroupSizes(NamedTuple):
    """The rollouts of each errand."""

    trained: int
    held_out: int


class ErrandReply(Struct, frozen=True):
    """The result of an errand."""

    who: str
    group: PlayedGroup | None = None
    completion: Completion | None = None
    refused: str = ""
    """The reason for which the engine does not take a request."""
    mark: str = ""
    """The mark of the run whose settings the host had (`RunNotice.mark`)."""
    session: str = ""
    """The process of the run whose weights the host had."""
    asked: str = ""
    """The digest of what was asked (`ErrandLetter.asked`)."""


class RunNotice(Struct, frozen=True):
    session: str
    """One process of the run. Another one has another address for weights."""
    version: str
    """The version of headrace."""
    earlier: tuple[str, ...] = ()
    """The sessions before it. A board that has one of them again has lost its newest notices."""
    over: bool = False
    begun: bool = True
    """Whether a run that is over had begun. One that was refused at its start may be started again, with these hosts."""
    died: bool = False
    """Whether a run that is over has lost its trainer. It goes on by itself, or is resumed, with these hosts."""
    config: dict[str, Any] = {}
    """`RunConfig` as plain values."""
    model: str = ""
    files: dict[str, str] = {}
    """The digest of every file of the model that both sides must have (`joining/same_model.py`)."""
    manifests: dict[str, Manifest] = {}
    transport: AnyTransport | None = None
    adapters: int = 0
    adapter: str = ""
    mark: str = ""
    """The mark of the settings that decide what tokens and rewards mean (`resume_rules.mark_of`)."""
    contents: dict[str, str] = {}
    """The digests of the files that settings name (`run/resume_rules.py`)."""


class WeightsNotice(Struct, frozen=True):
    session: str
    updates: dict[str, WeightUpdate] = {}
    """The newest weights by adapter; those of the model have the empty name."""
    hosts: int = 1
    """Hosts among which the work is shared."""


class AliveNotice(Struct, frozen=True):
    session: str
    """The process of the run that lives. Hosts may not have heard of it yet."""
    beat: int


class SuspectsNotice(Struct, frozen=True):
    """The errands that hosts died with (`own_groups.py`), by key."""

    session: str
    suspects: tuple[str, ...] = ()
    """A host works on one of them at a time."""
    given_up: tuple[str, ...] = ()
    """Nobody works on them."""


class HostEntry(Struct, frozen=True):
    session: str
    host: str
    pid: int
    beat: int
    """A number that grows: an entry that does not change is of a host that is silent."""
    version: int = -1
    """The version of the policy that it serves."""
    groups: int = 0
    """Errands that it has in hand."""
    begun: tuple[str, ...] = ()
    """The keys of those that it works on. If it dies, one of them may be the cause."""
    capabilities: Capabilities | None = None
    stats: EngineStats = EngineStats()
    trouble: str = ""
    """The reason for which it leaves, if it was not asked to."""
    leaving: bool = False
