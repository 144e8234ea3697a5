"""The settings of the members of a fleet: a server each, or a share of this machine each."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from headrace.engine.config import EngineConfig
from headrace.native.cores import usable_cores


def members_of(config: EngineConfig) -> dict[str, EngineConfig]:
    """The settings of every member, by its name; one without a name if the run has one engine."""
    if len(config.urls) > 1:
        return {url: dataclasses.replace(config, urls=(url,)) for url in config.urls}
    if config.replicas == 1:
        return {"": config}
    shares = split(config.cores, config.replicas)
    threads = max(1, (config.threads or usable_cores()) // config.replicas)
    return {
        str(number): dataclasses.replace(config, replicas=1, cores=cores, threads=len(cores) or threads)
        for number, cores in enumerate(shares, 1)
    }


def split(cores: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Neighbouring cores for each of `count` members; the first ones have one more where they cannot be shared evenly."""
    least, more = divmod(len(cores), count)
    ends = [0]
    for number in range(count):
        ends.append(ends[-1] + least + (number < more))
    return [tuple(cores[begin:end]) for begin, end in itertools.pairwise(ends)]


def in_words(members: dict[str, EngineConfig]) -> str:
    """The choice for the members on this machine."""
    parts = []
    for name, one in members.items():
        cores = f"cores {', '.join(map(str, one.cores))}" if one.cores else "no cores of its own"
        parts.append(f"engine {name}: {cores}, {one.threads} thread{'s' if one.threads > 1 else ''}")
    return "; ".join(parts)
