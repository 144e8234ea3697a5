"""Settings that do not go with hosts elsewhere, each with its remedy: rollout hosts on a bus, and workers that run reward functions or
environments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace.settings.bus_problems import bus_problems


def host_problems(config: Any) -> Iterator[str]:
    """Yields a sentence for each setting that excludes hosts. `config`: a RunConfig."""
    yield from bus_problems(config)
    yield from _of_user_code(config)


def _of_user_code(config: Any) -> Iterator[str]:
    """Yields a sentence for each setting that excludes `orchestration.scorers` or `orchestration.environments`."""
    place, reward, environment = config.orchestration, config.reward, config.environment
    if place.scorers:
        if passed := [spec.name for spec in reward.from_python]:
            yield (
                f"orchestration.scorers run functions in files, and {', '.join(passed)} was passed from Python; put it into a file, and name that in "
                "reward.function, or remove orchestration.scorers"
            )
        elif not reward.specs and not any(one.reward for one in config.adapters):
            yield (
                "orchestration.scorers run reward functions, and the settings name none (services and judges are asked over HTTP, environments give "
                "their own rewards); set reward.function, or remove orchestration.scorers"
            )
    if place.environments and (environment.asks_gateway or not environment.in_processes):
        yield (
            "orchestration.environments play environment.function, or the environments of reasoning_gym, gym, textarena and openenv, and this run has "
            f"{environment.setting}; remove orchestration.environments"
        )
