"""Weights in the layout of `native/src/product.h`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from headrace.engine.native.kernels import binding
from headrace.native.memory import address, zeros

SIDE = 32
"""Rows and columns of a block; outputs of a panel."""


ARENA = 32 * 2**20
"""Numbers taken from the system at once."""


def padded(count: int) -> int:
    return -(-count // SIDE) * SIDE


def gate_up_order(inner: int) -> np.ndarray:
    """Rows of [gate; up] so that sixteen gates and their sixteen ups lie in one panel."""
    return np.arange(2 * inner, dtype=np.int32).reshape(2, inner // 16, 16).swapaxes(0, 1).ravel()


class Packer:
    """Packs matrices and keeps alive all that the C++ side is pointed to."""

    def __init__(self, library: Any, dtype: torch.dtype = torch.bfloat16) -> None:
        """`dtype`: the dtype in which the library stores weights."""
        self._library = library
        self._kept: list[Any] = []
        self._arena = torch.zeros(0, dtype=dtype)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self._kept.append(tensor)
        return tensor

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies a tensor to large pages, because rows of an embedding are read in random order."""
        return self._room(tensor.numel()).view(tensor.shape).copy_(tensor)

    def linear(
        self, weights: tuple[torch.Tensor, torch.Tensor | None], order: np.ndarray | None = None
    ) -> binding.Linear:
        """`order`: which row of the weight becomes which output; -1 leaves an output zero."""
        weight, bias = weights
        packed = self.experts(weight[None], order)
        if bias is not None:
            ordered = bias.float() if order is None else bias.float()[torch.from_numpy(order).long()]
            packed.bias = address(self.keep(pad(ordered, (0, padded(len(bias)) - len(bias))).contiguous()))
        return packed

    def experts(self, stack: torch.Tensor, order: np.ndarray | None = None) -> binding.Linear:
        """Packs matrices [E, out, in] consecutively."""
        stack, (count, outputs, inputs) = stack.contiguous(), stack.shape
        rows = np.arange(outputs, dtype=np.int32) if order is None else order
        packed = self._room(count * padded(outputs) * padded(inputs)).view(count, -1)
        for matrix, room in zip(stack, packed, strict=True):
            self._library.headrace_pack(address(matrix), inputs, address(rows), outputs, address(room))
        return binding.Linear(address(packed), None, outputs, inputs)

    def _room(self, count: int) -> torch.Tensor:
        """Allocates `count` elements from a large arena, so that consecutive matrices are adjacent in memory."""
        if count > len(self._arena):
            self._arena = self.keep(zeros(max(count, ARENA), self._arena.dtype))
        room, self._arena = self._arena[:count], self._arena[count:]
        return room

    def wide(self, weight: torch.Tensor | None) -> int | None:
        """[..., n] in float32, each row padded with zeros."""
        if weight is None:
            return None
        return address(self.keep(pad(weight.float(), (0, padded(weight.shape[-1]) - weight.shape[-1])).contiguous()))
