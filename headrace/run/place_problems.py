"""Pairs of settings that cannot work together, of the places where a run's parts are: rollout hosts, workers for users' code, one device for all."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.engine.config import EngineConfig
from headrace.engine.remote.server_kind import server_kind
from headrace.episodes.environments.config import EnvironmentConfig
from headrace.episodes.environments.kinds import LIBRARIES
from headrace.episodes.scoring.config import RewardConfig
from headrace.loop.partial import PartialConfig
from headrace.loop.staleness import StalenessConfig
from headrace.processes.orchestration_config import OrchestrationConfig
from headrace.settings.extras import install, is_installed
from headrace.settings.process_config import WILDCARDS

_ALONE = "which a rollout host decides for its own rollouts only: set it to {}, or remove orchestration.bus"


def user_code_problems(
    place: OrchestrationConfig, reward: RewardConfig, environment: EnvironmentConfig, *, adapters_score: bool
) -> Iterator[str]:
    """Yields a sentence for each setting that excludes `orchestration.scorers` or `orchestration.environments`. `adapters_score`: whether an adapter
    has a reward of its own."""
    if place.scorers:
        if passed := [spec.name for spec in reward.from_python]:
            yield (
                f"orchestration.scorers run functions in files, and {', '.join(passed)} was passed from Python; put it into a file, and name that in "
                "reward.function, or remove orchestration.scorers"
            )
        elif not reward.specs and not adapters_score:
            yield (
                "orchestration.scorers run reward functions, and the settings name none (services and judges are asked over HTTP, environments give "
                "their own rewards); set reward.function, or remove orchestration.scorers"
            )
    if place.environments and (environment.asks_gateway or not environment.in_processes):
        *others, last = LIBRARIES
        yield (
            f"orchestration.environments play environment.function, or the environments of {', '.join(others)} and {last}, and this run has "
            f"{environment.setting}; remove orchestration.environments"
        )


def bus_problems(bus: str, engine: EngineConfig, weights_host: str) -> Iterator[str]:
    """Yields a sentence for each setting of this machine's that excludes `orchestration.bus`. `weights_host`: `weight_sync.host`."""
    if bus.startswith("redis") and not is_installed("redis"):
        yield f"orchestration.bus = {bus} needs the package redis: {install('redis')}; jsonl:DIRECTORY needs none"
    if weights_host in WILDCARDS:
        yield f'weight_sync.host = "{weights_host}" stands for every address of this machine; name the one that rollout hosts reach'
    if engine.is_server and server_kind(engine.kind).starts is None:
        yield (
            f'orchestration.bus is for engines that every rollout host starts, and engine.kind = "{engine.kind}" is a server that is running; '
            "remove one of them"
        )
    elif engine.urls:
        yield (
            f'engine.urls name a server for the whole run, and with orchestration.bus every rollout host starts an engine.kind = "{engine.kind}" of its '
            "own; remove it (a server that runs beside a host: headrace rollouts --set engine.urls=[...])"
        )
    if engine.replicas > 1:
        yield f"engine.replicas = {engine.replicas} are engines of this machine; remove it, and start as many rollout hosts as you like"
    if engine.cores:
        yield "engine.cores are cores of this machine; remove it, and give headrace rollouts its own: --set engine.cores=[0,1]"


def one_place_problems(
    partial: PartialConfig,
    staleness: StalenessConfig,
    environment: EnvironmentConfig,
    *,
    taught: bool,
    reference_in_reward: bool,
    parity: bool,
) -> Iterator[str]:
    """Yields the settings that one place must follow for all rollouts, which excludes `orchestration.bus`. `taught`: whether there are teachers."""
    if taught:
        yield "teachers have engines in the run's own processes, which rollout hosts do not reach; remove orchestration.bus, or the teachers"
    if reference_in_reward:
        yield (
            "algo.kl.place = reward asks an engine of the run for the reference's log-probs, and rollout hosts have none; use algo.kl.place = loss, or "
            "remove orchestration.bus"
        )
    if parity:
        yield 'train.parity = "bitwise" is proven for engines on the trainer\'s machine; set it to "off", or remove orchestration.bus'
    if partial.mode in ("barrier", "cancel_group"):
        yield f'partial.mode = "{partial.mode}" ends or awaits groups of the whole run, ' + _ALONE.format("inflight")
    if staleness.overdue == "cancel":
        yield 'staleness.overdue = "cancel" ends groups by the tokens that they have, ' + _ALONE.format("drop")
    if environment.is_handed_out:
        yield (
            f'environment.kind = "{environment.kind}" hands out rollouts at one address, and every rollout host would have another; use another '
            "environment, or remove orchestration.bus"
        )
