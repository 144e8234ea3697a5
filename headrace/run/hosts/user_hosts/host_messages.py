"""The messages between the controller and a user host."""

from __future__ import annotations

from headrace.core.types import Struct
from headrace.episodes.environments.workers.process import FunctionSettings

PULSE = 1.0
"""Seconds between two pulses of a host."""


class RewardsLoaded(Struct, frozen=True):
    """Reward functions that a host must be able to load."""

    specs: tuple[str, ...]
    sandbox: str
    """The settings of programs that they run."""


class UserHostStart(Struct, frozen=True, kw_only=True):
    """The first call. A host that cannot load all of it is none for this run."""

    files: dict[str, str]
    """The digests of the user's files, by path (`same_model.py`)."""
    rewards: tuple[RewardsLoaded, ...] = ()
    environments: tuple[FunctionSettings, ...] = ()


# -- pushes of the controller; `shut` (close its input) and `kill` have the number of a process alone ---------------------------------


class SpawnAsked(Struct, frozen=True):
    number: int
    who: str
    """The process's name in messages."""
    words: list[str]
    """The module that it runs, and its arguments."""


class ProcessBytes(Struct, frozen=True):
    """Bytes for the input of a process (`tell`) or from its output (`said`). Empty: its output has ended."""

    number: int
    data: bytes


# -- pushes of the host; a `pulse` has the seconds for which each process had to wait for a core, by number ---------------------------


class ProcessGone(Struct, frozen=True):
    number: int
    how: str
    """How it ended: `ended with exit code 1`."""
