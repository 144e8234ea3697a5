"""Pairs of settings that cannot work together, of the places where a run's parts are: rollout hosts, workers for users' code, one device for engine and trainer."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.engine.config import EngineConfig
from headrace.engine.kinds import ENGINES, SERVERS
from headrace.engine.remote.server_kind import is_here, server_kind
from headrace.episodes.environments.config import EnvironmentConfig
from headrace.episodes.environments.kinds import LIBRARIES
from headrace.episodes.scoring.config import RewardConfig
from headrace.loop.partial import PartialConfig
from headrace.loop.staleness import StalenessConfig
from headrace.processes.orchestration_config import OrchestrationConfig
from headrace.settings.extras import install, is_installed
from headrace.settings.process_config import WILDCARDS
from headrace.trainer.config import TrainConfig
from headrace.weight_sync.config import Way
from headrace.weight_sync.kind import Reach

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
    if engine.urls:
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


# --- Engine and trainer on one device: in turns, or on loan -----------------------------------------------------------


_PLACED = 'orchestration.placement = "shared"'
_LENT = "orchestration.lend = true"


def sharing_problems(
    place: OrchestrationConfig,
    engine: EngineConfig,
    train: TrainConfig,
    way: Way,
    *,
    kinds: frozenset[Reach],
    beside: str,
) -> Iterator[str]:
    """Yields a sentence for each setting that excludes `orchestration.placement = "shared"`. `way`: how weights travel, to engines of which
    `kinds`; `beside`: who has further engines, in words, or empty."""
    if place.placement != "shared":
        if place.kv != "host":
            yield f'orchestration.kv = "{place.kv}" is about an engine that sleeps; set {_PLACED} too, or remove it'
        return
    if place.elsewhere or place.bus:
        what = "orchestration.bus" if place.bus else f'orchestration.kind = "{place.kind}"'
        yield f"{_PLACED} is for one machine, and {what} brings engines of others; remove one of the two"
    elif engine.is_server and server_kind(engine.kind).cannot_sleep is None:
        yield (
            f'{_PLACED} puts the engine to sleep, and engine.kind = "{engine.kind}" is a server that cannot; use '
            f"{' or '.join(_sleepers())}, or remove orchestration.placement"
        )
    elif not kinds & way.transport.keeps_for_sleepers:
        yield (
            f'{_PLACED} has the engine find the newest weights when it wakes, and weight_sync.kind = "{way.kind}" does not keep them for it; '
            "leave it out"
        )
    if elsewhere := [url for url in engine.urls if not is_here(url)]:
        yield f"{_PLACED} is for one machine, and {elsewhere[0]} is another one (engine.urls); remove one of the two"
    if engine.gpus and 0 not in engine.gpus:
        yield f"{_PLACED} is for one device, and the trainer's, GPU 0, is not among engine.gpus = {list(engine.gpus)}; leave that out"
    if engine.is_fleet:
        yield f"{_PLACED} is for one engine; remove engine.replicas, or placement"
    if train.parallel.ranks > 1:
        yield f"{_PLACED} is for a trainer in one process, and train.parallel makes {train.parallel.ranks}; remove one of the two"
    if beside:
        yield f"{_PLACED} does not put the engines to sleep that {beside}; remove them, or placement"
    for name, own in (("engine", engine), ("train", train)):
        if own.cores:
            yield f"{name}.cores divides what {_PLACED} gives to engine and trainer in turns; remove one of the two"
    if "auto" not in (engine.device, train.device) and engine.device != train.device:
        yield f'{_PLACED} is for one device, and engine.device = "{engine.device}" is not train.device = "{train.device}"; leave them out'


def opening_problems(engine: EngineConfig, way: Way) -> Iterator[str]:
    """Yields a sentence for each setting that excludes a server that opens the trainer's memory. (`weight_sync_problems` refuses one that cannot.)"""
    if not engine.is_server or way.transport.device_of_buffers != "cuda":
        return
    asked = f'weight_sync.kind = "{way.kind}"'
    if elsewhere := [url for url in engine.urls if not is_here(url)]:
        yield f"{asked} opens memory of this machine's GPU, and {elsewhere[0]} is another machine (engine.urls); leave weight_sync.kind out"
    elif engine.is_fleet:
        yield f"{asked} is for one server, on the trainer's GPU; leave it out, or remove engine.replicas"
    if engine.gpus and 0 not in engine.gpus:
        yield f"{asked} is for the trainer's GPU, which is 0, and engine.gpus = {list(engine.gpus)}; leave one of the two out"


def _sleepers() -> Iterator[str]:
    """Yields the engines that can sleep, as settings."""
    for kind in (*ENGINES, *SERVERS):
        if kind in ENGINES or server_kind(kind).cannot_sleep:
            yield f'engine.kind = "{kind}"'


def lending_problems(
    place: OrchestrationConfig, engine: EngineConfig, train: TrainConfig, way: Way, taught: bool
) -> Iterator[str]:
    """Yields a sentence for each setting that excludes `orchestration.lend`. `way`: how weights travel; `taught`: whether there are teachers."""
    ranks = train.parallel.ranks
    if not place.lend:
        if place.give_way != type(place).give_way:
            yield f"orchestration.give_way is about an engine on devices that the trainer lends; set {_LENT} too, or remove it"
        return
    if place.placement == "shared":
        yield f"{_PLACED} gives the engine the trainer's devices whenever that waits, and so does {_LENT}; remove one of the two"
    if place.bus:
        yield f"{_LENT} adds an engine to the run's own, and with orchestration.bus it has none; remove one of the two"
    elif engine.is_server:
        yield (
            f'{_LENT} adds an engine of headrace\'s own, and engine.kind = "{engine.kind}" is a server, which computes otherwise; use '
            'engine.kind = "native", or remove it'
        )
    elif way.transport.waits_for_all:
        yield f'{_LENT} has an engine that comes and goes, and weight_sync.kind = "{way.kind}" waits for all; leave it out, or take "tcp"'
    if not place.trains_here:
        yield f'{_LENT} is for a trainer of this machine, and orchestration.trainer = "elsewhere"; remove one of the two'
    elif ranks > 1:
        yield f"{_LENT} is for a trainer in one process, and train.parallel makes {ranks}; remove one of the two"
    if taught:
        yield f"{_LENT} lets the trainer sleep while it waits, and teachers may need its older weights then; remove them, or lend"
