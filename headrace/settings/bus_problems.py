"""Settings that do not go with rollout hosts on a bus, each with its remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace.settings.extras import install, is_installed
from headrace.settings.process_config import WILDCARDS

_ALONE = "which a rollout host decides for its own rollouts only: set it to {}, or remove orchestration.bus"


def bus_problems(config: Any) -> Iterator[str]:
    """Yields a sentence for each setting that excludes `orchestration.bus`. `config`: a RunConfig."""
    bus, engine = config.orchestration.bus, config.engine
    if not bus:
        return
    if bus.startswith("redis") and not is_installed("redis"):
        yield f"orchestration.bus = {bus} needs the package redis: {install('redis')}; jsonl:DIRECTORY needs none"
    if config.weight_sync.host in WILDCARDS:
        yield f'weight_sync.host = "{config.weight_sync.host}" stands for every address of this machine; name the one that rollout hosts reach'
    if engine.is_server:
        yield (
            f'orchestration.bus is for headrace\'s own engine, which every rollout host starts, and engine.kind = "{engine.kind}" is a server; '
            "remove one of them"
        )
    if engine.replicas > 1:
        yield f"engine.replicas = {engine.replicas} are engines of this machine; remove it, and start as many rollout hosts as you like"
    if engine.cores:
        yield "engine.cores are cores of this machine; remove it, and give headrace rollouts its own: --set engine.cores=[0,1]"
    yield from _of_the_whole_run(config)


def _of_the_whole_run(config: Any) -> Iterator[str]:
    """Yields the settings that one place must follow for all rollouts."""
    if config.teachers:
        yield "teachers have engines in the run's own processes, which rollout hosts do not reach; remove orchestration.bus, or the teachers"
    if config.algo.reference_in_reward:
        yield (
            "algo.kl.place = reward asks an engine of the run for the reference's log-probs, and rollout hosts have none; use algo.kl.place = loss, or "
            "remove orchestration.bus"
        )
    if config.train.parity != "off":
        yield 'train.parity = "bitwise" is proven for engines on the trainer\'s machine; set it to "off", or remove orchestration.bus'
    if config.partial.mode in ("barrier", "cancel_group"):
        yield f'partial.mode = "{config.partial.mode}" ends or awaits groups of the whole run, ' + _ALONE.format(
            "inflight"
        )
    if config.staleness.overdue == "cancel":
        yield 'staleness.overdue = "cancel" ends groups by the tokens that they have, ' + _ALONE.format("drop")
    if config.environment.kind in ("gateway", "atropos"):
        yield (
            f'environment.kind = "{config.environment.kind}" hands out rollouts at one address, and every rollout host would have another; use another '
            "environment, or remove orchestration.bus"
        )
