"""The words and variables that start a server, from the settings of the run's engine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.engine.remote.server_kind import Place, server_kind
from headrace.settings.interpreters import Found, foreign_variables

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Command:
    words: Sequence[str]
    variables: Mapping[str, str]
    """The whole environment."""


def command(config: EngineConfig, found: Found, place: Place) -> Command:
    starts = server_kind(config.kind).starts
    assert starts, f"a run starts no server of {config.kind}"
    words, variables = starts.command(config, found, place)
    return Command([*words, *config.server_args], foreign_variables(found.python) | variables | visible(config.gpus))


def visible(gpus: Sequence[int]) -> dict[str, str]:
    """Returns the variable that leaves only these GPUs. Raises ConfigError if they are not among those that this process may use."""
    there = [one.strip() for one in os.environ.get(VISIBLE, "").split(",") if one.strip()]
    if there and gpus and max(gpus) >= len(there):
        raise ConfigError(
            f"engine.gpus names GPU {max(gpus)}, and {VISIBLE}={os.environ[VISIBLE]} leaves {len(there)}, which count from 0"
        )
    return {VISIBLE: ",".join(there[one] if there else str(one) for one in gpus)} if gpus else {}
