"""The trainer's ends of the way of weights where it has several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.core.protocols import WeightSender
from headrace.core.weights import AdapterSpec, Manifest, WeightUpdate
from headrace.run.worker.worker_messages import TrainerStart
from headrace.weight_sync.ranges import RankParts, ValueRange, follower_update, parts_of

if TYPE_CHECKING:
    import torch


def rank_sender(
    start: TrainerStart,
    values: Callable[[str], Iterator[ValueRange]],
    manifests: Mapping[str, Manifest],
    once: Sequence[str],
) -> WeightSender:
    """Returns this rank's end: for its part of the weights, where engines can put parts together, else for all of them in rank 0.

    `values`: as of `RankParts`. Every rank calls this at the same time."""
    transport = start.transport

    def parts() -> RankParts | None:
        return parts_of(manifests, start.rank, values, lambda value: _exchanged(value, start.ranks))

    if transport.takes_parts and (own := parts()):
        return transport.part_sender(manifests, once, own)
    return FollowingSender() if start.rank else transport.sender(manifests, once)


def _exchanged(value: Any, ranks: int) -> list[Any]:
    import torch.distributed as dist

    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, value)
    return found


class FollowingSender(WeightSender):
    """The sender of a rank that does not lead: it takes part in gathering the weights, and sends nothing."""

    def copy(
        self, version: int, parameters: Iterable[tuple[str, torch.Tensor]], adapter: AdapterSpec | None = None
    ) -> Callable[[], WeightUpdate]:
        for _ in parameters:
            pass
        return lambda: follower_update(version, adapter)
