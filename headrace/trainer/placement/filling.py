"""Parts of tensors that are split over ranks: read from files, and written into them.

Weights are read by ranks that hold parts of them: a model is split before it has values, and each rank then reads its own part.

torch's and transformers' ways to split a model copy each rank's part out of the whole. The whole here is memory that was never written, of which the system
has no pages (`outline.hollow`). So a rank's memory is its part, and one tensor at a time where a family's tensors have to be converted as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from headrace.trainer.model.outline import Region, Runs, WeightFiles, named_tensors
from headrace.trainer.placement.port import TensorPiece


@torch.no_grad()
def fill(model: Any, device: torch.device) -> None:
    """Reads the values of an outline that was `hollow` and has been split, each rank those that it holds: into the memory of what is split, and into memory of
    its own for what is whole. What other stages of a pipeline hold lies on the meta device, and is not read. Files are read in their own order, one tensor after another.

    Raises ConfigError where a file cannot be read."""
    files: WeightFiles = model.files
    held = {
        name: tensor for name, tensor in named_tensors(model).items() if name in model.unread and not tensor.is_meta
    }
    regions = {name: region_of(tensor) for name, tensor in held.items() if isinstance(tensor, DTensor)}
    filled: set[int] = set()
    for first in files:
        together = [name for name in held if files.first(name) == first]
        if all(not all(regions.get(name, [True])) for name in together):  # this rank holds nothing of them
            filled |= {id(held[name]) for name in together}
            continue
        for name, value in files.read(first, model, regions.get):
            if name not in held:
                continue
            tensor = held[name]
            if isinstance(tensor, DTensor):
                tensor.to_local().copy_(value)
            else:
                tensor.data = value.to(device, tensor.dtype, copy=True)
            filled.add(id(tensor))
    missing = [name for name, tensor in held.items() if id(tensor) not in filled]
    assert not missing, f"{missing[0]} was not read"
    model.unread = set()


def piece_of(tensor: DTensor) -> TensorPiece | None:
    """Returns what this rank writes of a tensor that is split; None if another rank has the same, or there is nothing here."""
    place = tensor.device_mesh.get_coordinate() or ()
    copied = any(at for at, placement in zip(place, tensor.placements, strict=True) if placement.is_replicate())
    values = tensor.to_local().detach()
    if copied or not values.numel():
        return None
    return TensorPiece(values, region_of(tensor), tensor.shape)


def part_of(read: Callable[[Region | None], Tensor], like: DTensor) -> DTensor:
    """This rank's part of a tensor that is split as another."""
    values = read(region_of(like)).to(like.to_local().device)
    return DTensor.from_local(
        values, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def region_of(tensor: DTensor) -> Region:
    """The part of a tensor that this rank holds, by dimensions. It is where torch puts the numbers of a dimension's places when it splits them alike."""
    return _region(tensor.shape, tensor.device_mesh, tuple(tensor.placements))


@lru_cache(1 << 12)
def _region(shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Any]) -> Region:
    return [_runs(shape, dim, mesh, placements) for dim in range(len(shape))]


def _runs(shape: torch.Size, dim: int, mesh: DeviceMesh, placements: Sequence[Any]) -> Runs:
    of_this = (dim, dim - len(shape))
    split = [_of_first(placed) if getattr(placed, "dim", None) in of_this else Replicate() for placed in placements]
    if all(placement.is_replicate() for placement in split):
        return [(0, shape[dim])]
    places = torch.arange(shape[dim], device=mesh.device_type)
    mine = distribute_tensor(places, mesh, split, src_data_rank=None).to_local()
    return list(_stretches(mine.cpu()))


def _of_first(placement: Any) -> Any:
    """A placement that splits the first dimension as this one splits another."""
    factor = getattr(placement, "split_factor", None)
    return type(placement)(0) if factor is None else type(placement)(0, split_factor=factor)


def _stretches(places: Tensor) -> Iterator[tuple[int, int]]:
    """Yields start and end of each stretch of consecutive numbers."""
    if not len(places):
        return
    breaks = (places.diff() != 1).nonzero().flatten().tolist()
    starts = [0, *(at + 1 for at in breaks)]
    ends = [*(at + 1 for at in breaks), len(places)]
    for start, end in zip(starts, ends, strict=True):
        yield int(places[start]), int(places[end - 1]) + 1
