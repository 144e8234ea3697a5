"""All that a run tells an environment whose player asks the gateway for its turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from headrace.episodes.environments.config import EnvironmentConfig
from headrace.episodes.environments.conversation import TurnEncoder
from headrace.episodes.environments.gateway.text_tree import TextEncoder
from headrace.episodes.environments.gateway.turn_request import AnswerEncoder


class GatewayEncoder(TurnEncoder, TextEncoder, AnswerEncoder, Protocol):
    """The part of `models.chat.ChatEncoder` that the gateway uses."""

    directory: Path


@dataclass(frozen=True, kw_only=True)
class OpenedWith:
    config: EnvironmentConfig
    encoder: GatewayEncoder
    system: str = ""
    """The system message of conversations that have none."""
    sampling: Mapping[str, object] = field(default_factory=dict)
    """The run's temperature, top_p, top_k and min_p."""
    stop: Sequence[str] = ()
    """Its stop strings."""
    alone: bool = True
    """Whether nothing else gives rewards."""
    log: Path | None = None
    """Receives what players print, or lines on what they post. The file with the address of the run is written beside it."""
    seeds: bool = False
    """Whether the prompts are seeds, from which players make their problems."""
    held_out: int = 0
    """Prompts that are kept for evaluation."""
    name: str = ""
    """The run's."""
    steps: int = 0
    group_size: int = 1
    groups_per_step: int = 1
    longest: int = 0
    """The most tokens of a rollout."""
