"""The kinds of environments, a line each: the values of `environment.kind`, and the code behind each."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from headrace.core.protocols import EnvironmentKind


@dataclass(frozen=True)
class OwnKind:
    """Facts about an environment of headrace's own, which is played in the controller's process."""

    opens: str
    """Place of a `protocols.EnvironmentKind`. By name, because only a run that uses one imports its module, with the packages that it needs."""
    about: str
    """Half a sentence that says what it is, for the page of settings."""
    rewards: bool = False
    """Whether it gives rewards of its own, so that no reward function is needed."""


ENVIRONMENTS = {
    "single_turn": OwnKind("headrace.episodes.environments.single_turn:SINGLE_TURN", "one completion of the prompt"),
}
"""Environments of headrace's own."""


@dataclass(frozen=True)
class LibraryKind:
    """Facts about environments of another library."""

    opens: str
    """Place of a function that opens one. It is called in the processes of environments only (`workers/player.py`), because what it imports
    may crash or hang."""
    about: str
    """Half a sentence that says what they are, for the page of settings."""
    name: str = ""
    """The meaning of `environment.name`, for the page of settings; empty if it has none."""
    options: str = ""
    """The meaning of `environment.options`, likewise."""


LIBRARIES = {
    "reasoning_gym": LibraryKind(
        "headrace.episodes.environments.libraries.attempts:open_reasoning_gym",
        "the problems of that task, with further attempts after a wrong answer",
        options="`discount`, `feedback`",
    ),
    "gym": LibraryKind(
        "headrace.episodes.environments.libraries.gym:open_gym",
        "an environment with the methods that skyrl-gym's have",
        name="an id of skyrl-gym, `path/to/file.py:Class` or `package.module:Class`",
        options="`env_config`",
    ),
    "openenv": LibraryKind(
        "headrace.episodes.environments.libraries.openenv:open_openenv",
        "an environment behind a server",
        name="the server's URL",
        options="`action`, `observation`",
    ),
    "textarena": LibraryKind(
        "headrace.episodes.environments.libraries.games:open_textarena",
        "a game for one player or two",
        name="the game's id",
        options="`unfinished`, and arguments of the game",
    ),
}
"""Environments of other libraries."""

ADDRESS_FILE = "gateway.url"
"""The file among a run's logs that has the address where agents elsewhere take rollouts. Only the user who started the run can read it."""


@dataclass(frozen=True, kw_only=True)
class GatewayKind:
    """Facts about a kind whose player asks for its turns over HTTP."""

    about: str
    """Half a sentence that says who plays, for the page of settings."""
    opens: str
    """Place of a function from `OpenedWith` to an `EnvironmentKind`, by name: what it imports may be missing."""
    own: tuple[str, ...]
    """Settings of `[environment]` that functions and libraries do not have."""
    shared: tuple[str, ...] = ()
    """Settings that it shares with functions and libraries."""
    needs: tuple[str, str] | None = None
    """A setting that must be given, and what it is, in words."""
    name: str = ""
    options: str = ""
    """The meanings of these two settings, for the page of settings, if it has them."""
    is_handed_out: bool = False
    """Whether agents elsewhere play the rollouts, so that a run must be there to hand them out."""
    draws_problems: bool = False
    """Whether the players draw problems of their own, so that a task would not be used."""


GATEWAY_KINDS = {
    "process": GatewayKind(
        about="a process of `command`, which asks for its turns at OPENAI_BASE_URL (docs/agents.md)",
        opens="headrace.episodes.environments.agents.agent_environment:open_agents",
        own=("command", "directory", "processes"),
        shared=("memory_gib",),
        needs=("command", 'environment.command = ["python", "agent.py"], the command that plays a rollout'),
    ),
    "gateway": GatewayKind(
        about="agents elsewhere take the rollouts (headrace gateway)",
        opens="headrace.episodes.environments.agents.handing_out:open_handing_out",
        own=("host", "port"),
        is_handed_out=True,
    ),
    "atropos": GatewayKind(
        about="environments of Atropos play them, and draw their own problems (docs/atropos.md)",
        opens="headrace.episodes.environments.atropos.atropos_environment:open_atropos",
        own=("host", "port"),
        is_handed_out=True,
        draws_problems=True,
    ),
    "verifiers": GatewayKind(
        about="a taskset of verifiers, in an interpreter of its own (docs/libraries.md)",
        opens="headrace.episodes.environments.verifiers.taskset_environment:open_taskset",
        own=("python", "processes"),
        shared=("name", "options", "workers", "memory_gib"),
        name="the name of an installed taskset, or `path/to/file.py`",
        options="the environment's config, `select` and `renderer`",
        needs=("name", "environment.name, the taskset: the name of an installed one, or path/to/file.py"),
    ),
}
"""The kinds whose players ask the gateway for their turns."""


def named(place: str) -> Any:
    """Returns what a place `module:name` names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def environment_kind(name: str) -> EnvironmentKind:
    found: EnvironmentKind = named(ENVIRONMENTS[name].opens)
    return found
