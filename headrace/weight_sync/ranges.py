"""The packed buffer in parts: each rank of a trainer fills the ranges whose values it holds, and none needs the whole model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.core.weights import AdapterSpec, Manifest, WeightUpdate

if TYPE_CHECKING:
    import torch


class ValueRange(NamedTuple):
    """Values of one parameter that follow each other."""

    name: str
    first: int
    """The number of its first value, in row-major order."""
    values: torch.Tensor
    """[n]"""


class ByteRange(NamedTuple):
    offset: int
    """The first byte in the packed buffer."""
    nbytes: int


class RankParts(NamedTuple):
    """The share of one rank, and its way to the other ranks."""

    rank: int
    ranges: Sequence[Mapping[str, list[ByteRange]]]
    """Ranges of every rank, by what is published. Together they make up each packed buffer."""
    values: Callable[[str], Iterator[ValueRange]]
    """The values of this rank, of the model (empty name) or of an adapter, in canonical order. Every rank calls it at the same time."""
    exchange: Callable[[Any], Sequence[Any]]
    """Gives every rank the values of all ranks, in their order. Every rank calls it at the same time."""


def ranges_of(manifest: Manifest, values: Iterable[ValueRange]) -> list[ByteRange]:
    """Returns where the values lie in the packed buffer."""
    specs = {spec.name: spec for spec in manifest.tensors}
    found = []
    for part in values:
        spec, count = specs[part.name], part.values.numel()
        if count:
            each = spec.nbytes // math.prod(spec.shape)
            found.append(ByteRange(spec.offset + part.first * each, count * each))
    return found


def make_up(manifest: Manifest, parts: Sequence[Sequence[ByteRange]]) -> bool:
    """Returns whether every byte of every parameter lies in one of the ranges of one of the parts, and in no other."""
    left = iter(sorted(itertools.chain(*parts)))
    for spec in manifest.tensors:
        at = spec.offset
        while at < spec.offset + spec.nbytes:
            part = next(left, None)
            if part is None or part.offset != at:
                return False
            at += part.nbytes
        if at != spec.offset + spec.nbytes:
            return False
    return next(left, None) is None


def parts_of(
    manifests: Mapping[str, Manifest],
    rank: int,
    values: Callable[[str], Iterator[ValueRange]],
    exchange: Callable[[Any], Sequence[Any]],
) -> RankParts | None:
    """Returns the share of a rank (`RankParts` describes the arguments); None if the values of all ranks do not make up the whole."""
    own = {name: ranges_of(manifest, values(name)) for name, manifest in manifests.items()}
    everyone = exchange(own)
    whole = all(make_up(manifest, [held[name] for held in everyone]) for name, manifest in manifests.items())
    return RankParts(rank, everyone, values, exchange) if whole else None


def follower_update(version: int, adapter: AdapterSpec | None) -> WeightUpdate:
    """The update that a rank returns which does not lead: nobody reads it."""
    return WeightUpdate(
        version=version,
        kind="adapter" if adapter else "full",
        fingerprint="of rank 0",
        nbytes=0,
        seconds=0.0,
        adapter=adapter,
    )
