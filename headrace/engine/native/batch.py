"""What one forward pass is: a flat list of tokens in segments, each a stretch of one sequence over its blocks of KV cache.

    tokens = [ s0 | s1 | s2 2 2 2 2 2 | s3 | ... ]      a decoding sequence is a segment of one token, a chunk of a prompt a longer one

Decoding and prefill are the same thing here: a segment of n tokens at positions [context, context + n), which attend to the
context that the cache holds and to themselves, causally. Plain numpy: runners move to their device what they need.

Legend: N tokens of the pass, S segments, R rows whose logits are wanted, W width of the block tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from headrace.weights import AdapterSpec

BLOCK = 32
"""Tokens of one block of KV cache: what the cache is shared, copied and accounted in."""


@dataclass(frozen=True)
class Batch:
    tokens: np.ndarray
    """[N] int64"""
    starts: np.ndarray
    """[S + 1] int32: segment s holds tokens[starts[s]:starts[s + 1]]. No segment is empty."""
    context: np.ndarray
    """[S] int32: tokens of the sequence that the cache holds already: the position of the segment's first token."""
    tables: np.ndarray
    """[S, W] int32: the blocks of each sequence in order, those the new tokens are written to included. Behind them: 0.
    No block that a segment writes to is in another segment's table."""
    rows: np.ndarray
    """[R] int64: flat positions whose logits are wanted, ascending."""
    adapters: np.ndarray
    """[S] int32: slot of each sequence's adapter; -1 is the base model alone."""
    routing: bool = False
    """Whether the experts chosen at every position are to be told."""

    def segments(self) -> np.ndarray:
        """[N] the segment of each token."""
        return np.repeat(np.arange(len(self.context)), np.diff(self.starts))

    def positions(self) -> np.ndarray:
        """[N] int64: place of each token in its sequence."""
        segments = self.segments()
        return np.arange(len(self.tokens)) - self.starts[segments] + self.context[segments]


Draw = Callable[[np.ndarray, np.ndarray, np.ndarray | None], tuple[np.ndarray, np.ndarray]]
"""(temperature [n], uniform number [n], rows [n] of the logits or None for all) -> tokens [n], log-probs [n]."""


@dataclass(frozen=True)
class Forward:
    logits: torch.Tensor
    """[R, V] float32 or the serving dtype. Good until the next pass: a runner may use the memory again."""
    routing: np.ndarray | None = None
    """[N, layers with experts, K] uint8 (uint16 above 256 experts): the experts chosen, best first. None unless asked for."""
    draw: Draw | None = None
    """Draws from the whole distributions as `sampler.sample` does for rows without filters, where the runner has a faster way
    to. Temperature 0 is greedy; a log-prob that is no number stands for logits that are not finite."""


class Runner(Protocol):
    """A model's forward pass over a batch, and the KV cache that it keeps in a layout of its own."""

    path: str
    """A word for people: `kernels llama`, `fused qwen3`, `hugging face gpt_neox`."""
    block_nbytes: int
    """Bytes of one block of KV cache, all layers."""
    exact: bool
    """Logits of a token depend on its sequence alone, bit for bit: not on the batch, nor on how it was cut into chunks."""
    arithmetic: str
    """The name of its forward pass among those that a trainer has too (`headrace/native/arithmetic.py`); empty if it has none."""
    experts: tuple[int, int]
    """(layers with experts, experts chosen in each); (0, 0) for dense models."""

    def allocate(self, blocks: int) -> None:
        """Makes room for that many blocks. Called once, before anything else."""

    def copy_blocks(self, source: np.ndarray, target: np.ndarray) -> None:
        """Block source[i] to block target[i], all layers."""

    def clear_blocks(self, blocks: np.ndarray) -> None:
        """After a sequence that may have left NaN behind: nobody may inherit it."""

    def prepare(self, tensors: Any) -> Any:
        """Whatever must be done to new weights before they can serve. Runs in a side thread, beside `forward`."""

    def use(self, weights: Any) -> None:
        """Between two passes: what `prepare` made serves from now on. Re-points, never copies."""

    def prepare_adapter(self, spec: AdapterSpec, tensors: Any) -> Any:
        """As `prepare`, for a LoRA adapter. Raises ValueError naming the first tensor that does not fit the base model."""

    def use_adapter(self, slot: int, adapter: Any) -> None:
        """As `use`; None empties the slot."""

    def forward(self, batch: Batch) -> Forward: ...

    def blame(self, batch: Batch) -> np.ndarray:
        """[N] the first layer after which a token's hidden state is not finite; the number of layers where only the logits
        are not, -1 where all is well. Runs the pass again with a look after every layer: for the error message only."""
