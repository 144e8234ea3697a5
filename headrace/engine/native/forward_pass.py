"""The input and output of one forward pass over a flat list of tokens in segments.

    tokens = [ s0 | s1 | s2 2 2 2 2 2 | s3 | ... ]      a decoding sequence is a segment of one token, a chunk of a prompt a longer one

Each segment is a stretch of one sequence over that sequence's blocks of KV cache. Decoding and prefill are the same: n tokens
at positions [context, context + n) attend, causally, to the context in the cache and to themselves. The input is plain
numpy: runners move the arrays that they need to their device.

Layers that follow a recurrence (a delta rule, a state space) keep a state of each sequence, which every token changes. States lie in slots beside the blocks: a segment
goes on from the one in its sequence's slot, which then has seen the segment's tokens too.

Legend: N tokens of the pass, S segments, R rows whose logits are needed, W width of the block tables.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from headrace.core.weights import AdapterSpec
from headrace.engine.native.draws import DrawDetails, Drawn, RowScores, Settings

log = logging.getLogger(__name__)

BLOCK = 32
"""Tokens per block of KV cache. The cache is shared, copied and accounted for in whole blocks."""


@dataclass(frozen=True, kw_only=True)
class ForwardInput:
    """The tokens of one forward pass, and where their KV entries are."""

    tokens: np.ndarray
    """[N] int64"""
    starts: np.ndarray
    """[S + 1] int32: segment s holds tokens[starts[s]:starts[s + 1]]. No segment is empty."""
    context: np.ndarray
    """[S] int32: tokens of the sequence that are in the cache, which is the position of the segment's first token."""
    tables: np.ndarray
    """[S, W] int32: the blocks of each sequence in order, including those that the new tokens are written to, then zeros.
    No block that a segment writes to is in another segment's table."""
    rows: np.ndarray
    """[R] int64: flat positions whose logits are needed, ascending."""
    adapters: np.ndarray
    """[S] int32: slot of each sequence's adapter; -1 for the base model alone."""
    routing: bool = False
    """Whether the experts chosen at every position are returned."""
    moved: np.ndarray | None = None
    """[N] int64: by how many places each token has moved up, by images before it (`models/image_axes.py`); None where places are positions."""
    ahead: np.ndarray | None = None
    """[N] int64: how many of the tokens behind it in its segment each token sees, those of its image (`models/image_blocks.py`); None where all are 0."""
    states: np.ndarray | None = None
    """[S] int32: the slot of each sequence's state; what is in the slot of a sequence without context does not count. None for runners without states."""
    kept: np.ndarray | None = None
    """[K, 3] int32: states that others may want, each a segment, a number of its sequence's first tokens, and the slot that their state is copied to
    on the way. None: there are none."""
    fed: torch.Tensor | None = None
    """[N] int64 on the runner's device: the tokens, where the host does not know them yet. For runners with `feeds`."""

    def segments(self) -> np.ndarray:
        """Returns [N], the segment of each token."""
        return np.repeat(np.arange(len(self.context)), np.diff(self.starts))

    def positions(self) -> np.ndarray:
        """Returns [N] int64, the position of each token in its sequence."""
        segments = self.segments()
        return np.arange(len(self.tokens)) - self.starts[segments] + self.context[segments]

    def places(self) -> np.ndarray:
        """Returns [N, 2]: the block of each token, and its place in it."""
        positions = self.positions()
        return np.stack([self.tables[self.segments(), positions // BLOCK], positions % BLOCK], 1)


Draw = Callable[[Settings, np.ndarray | None, DrawDetails], Drawn]
"""(settings, rows of the logits or None for all, what else is wanted) -> what was drawn, as `sampler.sample` draws it."""

Score = Callable[[np.ndarray, np.ndarray, int], RowScores]
"""(rows [n] of the logits, tokens [n], top) -> their log-probs at temperature 1, and the `top` most probable tokens."""


@dataclass(frozen=True)
class ForwardOutput:
    """The results of one forward pass."""

    logits: torch.Tensor
    """[R, V] float32 or the serving dtype. Valid until the next pass, which may reuse the memory."""
    routing: np.ndarray | None = None
    """[N, layers with experts, K] uint8 (uint16 above 256 experts): the experts chosen, in the order of their layer. None unless asked for."""
    draw: Draw | None = None
    """Draws from these logits. Its log-probs are those that a trainer computes which shares the runner's arithmetic. None if the runner has
    no faster way than the sampler's."""
    score: Score | None = None
    """Scores given tokens with the same arithmetic. None together with `draw`."""
    again: np.ndarray | None = None
    """[S] int64: for a segment whose context is of the live weights now, whatever its entries said, the number of its tokens that were
    forwarded a second time because their state was lost; -1 for the others. None if there are no such segments."""
    routed: np.ndarray | None = field(default=None, kw_only=True)
    """[M, 2]: the block, and the place in it, of each token in `routing` [M, ...], where these are other tokens than the N of the pass: some
    wait for a later one, and a later one has more. None: they are those of the pass."""


@dataclass
class PassCounts:
    """Passes of a runner: replayed, and not, by reason. The first of a reason is told to the log."""

    graphed: int = 0
    eager: Counter[str] = field(default_factory=Counter)

    def count(self, reason: str) -> None:
        """`reason`: empty for a pass that is replayed."""
        if not reason:
            self.graphed += 1
            return
        if not self.eager[reason]:
            log.warning(
                "a pass is not replayed as a CUDA graph (%s): each of its operations is launched by Python, by which decoding of small "
                "models took up to 4.5 times as long",
                reason,
            )
        self.eager[reason] += 1


class WithoutStates:
    """The part of a runner whose sequences leave nothing but entries in blocks."""

    state_nbytes = 0

    def copy_state(self, source: int, target: int) -> None:
        raise AssertionError("there are no states to copy")


class Runner(Protocol):
    """A model's forward pass over a batch, and the KV cache that it keeps in a layout of its own."""

    path: str
    """The path in words, for people: `kernels llama`, `fused qwen3`, `hugging face gpt_neox`."""
    block_nbytes: int
    """Bytes of one block of KV cache, all layers."""
    state_nbytes: int
    """Bytes of one state of a sequence, all layers; 0 for runners without states."""
    exact: bool
    """Whether the logits of a token depend, bit for bit, on its sequence alone: not on the batch, or on how it was cut into chunks."""
    arithmetic: str
    """The name of its forward pass among those that a trainer has too (`headrace/native/arithmetic.py`); empty if it has none."""
    keeps: bool
    """Whether prepared weights are, on a CPU, the tensors that were given, and not copies of them."""
    experts: tuple[int, int]
    """(layers with experts, experts chosen in each); (0, 0) for dense models."""
    passes: PassCounts
    """Empty on a CPU, which has no graphs."""
    feeds: bool
    """Whether a pass may be asked for before the tokens of the one before are known (`ForwardInput.fed`), and forgotten afterwards: nothing of it
    stays but cache entries behind what is known. Its logits are not written over by the next pass."""

    def allocate(self, blocks: int, states: int = 0) -> None:
        """Allocates this many blocks, which hold zeros, and this many slots of states, 0 for a runner without. Called before anything else, and again
        after `free`."""

    def free(self) -> None:
        """Gives the weights and the cache back. `allocate` and `use` come before the next pass; adapters stay."""

    def take_out(self, blocks: np.ndarray) -> torch.Tensor:
        """Returns a copy of these blocks, all layers, in the host's memory."""

    def put_back(self, blocks: np.ndarray, content: torch.Tensor) -> None:
        """Writes what `take_out` returned for these blocks."""

    def copy_blocks(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copies block source[i] to block target[i], all layers."""

    def copy_state(self, source: int, target: int) -> None:
        """Copies the state in one slot to another. For runners with states."""

    def clear_blocks(self, blocks: np.ndarray) -> None:
        """Zeroes blocks of a sequence that may have left NaN in them, so that no later sequence reads it."""

    def prepare(self, tensors: Any) -> Any:
        """Prepares new weights and returns the argument of `use`. Runs in a side thread, concurrently with `forward`."""

    def use(self, weights: Any) -> Any:
        """Puts prepared weights into service, between two passes. Changes pointers, never copies. Returns what it replaced, if that has
        memory of its own."""

    def prepare_adapter(self, spec: AdapterSpec, tensors: Any) -> Any:
        """Does what `prepare` does, for a LoRA adapter. Raises ValueError naming the first tensor that does not fit the base model."""

    def use_adapter(self, slot: int, adapter: Any) -> None:
        """Puts a prepared adapter into service in a slot; None empties the slot."""

    def forward(self, batch: ForwardInput) -> ForwardOutput: ...

    def blame(self, batch: ForwardInput) -> np.ndarray:
        """Returns [N], the first layer after which a token's hidden state is not finite: the number of layers if only its logits
        are not, -1 if all are finite. Runs the pass again and checks every layer, for the error message only."""
