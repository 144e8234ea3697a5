"""The values that a rank publishes without gathering them: the rows of split parameters that it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def runs_of(
    parameters: Iterable[tuple[str, Tensor]], rank: int, ranks: int, whole: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, int, Tensor]]:
    """Yields name, number of the first value in row-major order, and values [n], of all that this rank publishes.

    `whole`: gathers what is split otherwise than by rows, or lies on another stage (`Placement.whole`), one tensor at a time; such tensors, and those that every rank
    holds, lie with one rank after another. Every rank calls this at the same time.
    """
    given = list(parameters)
    staged = any(parameter.is_meta for _, parameter in given)  # ranks of other stages wait for each tensor
    for number, (name, parameter) in enumerate(given):
        if isinstance(parameter, DTensor) and _by_rows(parameter) and not staged:
            first, values = _own_rows(parameter)
            if values.numel():
                yield name, first, values
            continue
        tensor = whole(parameter)
        if number % ranks == rank:
            yield name, 0, tensor.flatten()


def _by_rows(tensor: DTensor) -> bool:
    """Whether it is split by its first dimension, among the ranks of one dimension of its mesh, and otherwise copied."""
    split = [one for one in tensor.placements if not one.is_replicate()]
    return len(split) == 1 and type(split[0]) is Shard and split[0].dim == 0


def _own_rows(tensor: DTensor) -> tuple[int, Tensor]:
    """Returns the number of the first value, and the values; none on ranks that hold copies of another's."""
    place = tensor.device_mesh.get_coordinate()
    local = tensor.to_local().detach().flatten()
    copied = [at for at, one in zip(place or (), tensor.placements, strict=True) if one.is_replicate()]
    if any(copied):
        return 0, local[:0]
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0] * (tensor.numel() // tensor.shape[0]), local
