"""Facts that a place where workers run states about itself. Everything that chooses, describes, plans or refuses a place asks these facts.

A place is a subclass of `WorkerPlace`, in a file of its own or beside its launcher, and a line in `places.py`. One that is elsewhere also opens the seats
of a run (`joining/joined.py`); one that has a cluster says how it is reached, and the rest is there (`placed/placed.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Protocol


class PlaceSettings(Protocol):
    """The settings of `[orchestration]` that places read."""

    @property
    def listen(self) -> str: ...

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...

    @property
    def token_file(self) -> str: ...

    @property
    def cert(self) -> str: ...

    @property
    def key(self) -> str: ...

    @property
    def reconnect(self) -> float: ...

    @property
    def address(self) -> str: ...

    @property
    def gpus(self) -> int: ...

    @property
    def rank_gpus(self) -> int: ...

    @property
    def resources(self) -> Mapping[str, float]: ...

    @property
    def rank_resources(self) -> Mapping[str, float]: ...

    @property
    def grows(self) -> bool: ...


class WorkerPlace:
    """The base of all places."""

    name: ClassVar[str]
    """The value of `orchestration.kind`."""
    about: ClassVar[str]
    """A sentence without its full stop that says who starts the workers, for the page of settings."""
    own: ClassVar[tuple[str, ...]] = ()
    """Settings of `[orchestration]` that not all places have."""
    elsewhere: ClassVar[bool] = False
    """Whether the engines are no children of the run's process."""
    joins: ClassVar[bool] = False
    """Whether workers are started by hand: each knows a token, and connects."""
    refuses_hosts: ClassVar[str] = ""
    """The reason why workers that run the user's code cannot join as well, in words that follow its name; empty if they can."""
    reserves_cores: ClassVar[bool] = False
    """Whether each worker is given as many CPUs as it has threads."""
    instead_of_cores: ClassVar[str] = ""
    """The way in which its engines get cores, in words that follow a refusal of `engine.cores`."""
    instead_of_gpus: ClassVar[str] = ""
    """The way in which they get GPUs, in words that follow a refusal of `engine.gpus`."""
    given_address: ClassVar[str] = ""
    """The workers that are given the run's address to connect to, in words; empty if nobody gives it to them."""
    untried: ClassVar[str] = ""
    """The part of it that was never tried on the real thing, in words; a run that uses it says so."""

    def problems(self, settings: PlaceSettings) -> Iterator[str]:
        """Yields a sentence with the remedy for each of its settings that cannot work."""
        yield from ()

    def words(self, settings: PlaceSettings, gpus: int) -> str:
        """Describes where its workers are. `gpus`: those that each of them is given."""
        raise NotImplementedError
