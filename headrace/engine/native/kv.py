"""The KV cache: one tensor, one row per sequence.

[L, 2, rows, Tmax, Hkv, D]: a row's tokens lie together, so that copying a prompt to a sibling or moving a sequence is one
call for all layers. Rows [0, slots) belong to running sequences, compacted so that decoding reads one slice; the rows
behind them hold prompts while they are computed and for a while after.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Geometry:
    """What attention needs to know of a model."""

    layers: int
    kv_heads: int
    head_dim: int

    def row_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        return self.layers * 2 * tokens * self.kv_heads * self.head_dim * dtype.itemsize


@dataclass(frozen=True)
class Budget:
    """How the rows that fit are shared out."""

    slots: int
    """Rows of running sequences."""
    prompts: int
    """Rows in which prompts are computed and kept."""

    @property
    def rows(self) -> int:
        return self.slots + self.prompts


def budget(geometry: Geometry, tokens: int, dtype: torch.dtype, kv_gib: float, max_running: int) -> Budget:
    """Raises ConfigError when not even one sequence and its prompt fit."""
    row = geometry.row_bytes(tokens, dtype)
    fit = int(kv_gib * GIB // row)
    if fit < 2:
        raise ConfigError(
            f"engine.kv_gib = {kv_gib} does not hold one sequence of engine.context_length = {tokens} and its prompt, which "
            f"take {2 * row / GIB:.3g} GiB for this model; raise engine.kv_gib or lower engine.context_length"
        )
    prompts = max(1, min(8, fit // 8, max_running))
    return Budget(min(max_running, fit - prompts), prompts)


class KVCache:
    def __init__(self, geometry: Geometry, rows: int, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self.geometry, self.rows, self.tokens = geometry, rows, tokens
        shape = (geometry.layers, 2, rows, tokens, geometry.kv_heads, geometry.head_dim)
        # Zeros and not empty: what lies behind a sequence's end is masked, but 0 * NaN would still be NaN. The system hands
        # out zeroed pages at first touch, so this costs nothing on a CPU.
        self._data = torch.zeros(shape, dtype=dtype, device=device)
        flat = self._data.view(geometry.layers, 2, rows * tokens, geometry.kv_heads * geometry.head_dim)
        self._layers = [(self._data[i, 0], self._data[i, 1]) for i in range(geometry.layers)]
        self._flat = [(flat[i, 0], flat[i, 1]) for i in range(geometry.layers)]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [rows, Tmax, Hkv, D] each."""
        return self._layers[index]

    def write(self, index: int, where: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """`where` [N]: row * Tmax + position of each token; keys and values [N, Hkv, D]."""
        flat_keys, flat_values = self._flat[index]
        flat_keys.index_copy_(0, where, keys.reshape(len(where), -1))
        flat_values.index_copy_(0, where, values.reshape(len(where), -1))

    def copy(self, source: int, target: int, length: int) -> None:
        self._data[:, :, target, :length].copy_(self._data[:, :, source, :length])

    def clear(self, row: int, length: int) -> None:
        """After a sequence that may have left NaN behind: nobody may inherit it."""
        self._data[:, :, row, :length].zero_()
