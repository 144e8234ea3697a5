"""Any other causal LM: transformers' own forward pass with transformers' own cache, one sequence after the other.

For models whose attention cannot be had over our blocks, and for those whose layers keep something else than keys and values: convolutions,
state spaces, delta rules, latent or compressed keys. A sequence is given the arguments that `generate` would give it, and what the model
hands back is kept until the next pass (`states.py`). Slow, and right.

A recurrent layer takes several tokens at once only from the beginning of a sequence. So a prompt's tokens are *owed* until logits are
wanted, and forwarded in one call then. Where a state cannot be cut, a prompt's last token follows alone, and the state before it is kept for
siblings, who begin there.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from headrace.core.errors import ConfigError
from headrace.engine.native.forward_pass import BLOCK, ForwardInput, ForwardOutput, PassCounts
from headrace.engine.native.runners.module_weights import LayerWatch, ModuleRunner, decoder_layers
from headrace.engine.native.runners.recorded import TRIED, ExpertRecorder, PassRoutes, RoutedTokens
from headrace.engine.native.runners.skeleton import Skeleton, without_values
from headrace.engine.native.runners.states import MarkedBlocks, State, States, is_plain
from headrace.native.uploads import uploaded

STEPS_FOR_A_PASS = 16
"""Tokens forwarded together that take about as long as one token alone."""
SMALLEST_BLOCK = 4096
"""Bytes that a block counts at least, so that a state of fixed size does not make millions of them."""


class OwnCacheRunner(ModuleRunner):
    """Raises ConfigError for adapters and for exactness, which it does not support."""

    arithmetic = ""
    exact, keeps = False, True
    feeds = False

    def __init__(
        self,
        model: Skeleton,
        context_length: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        exact: bool = False,
        max_adapters: int = 0,
    ) -> None:
        super().__init__(f"own cache {model.model_type}", model.model, max_adapters)
        if exact:
            raise ConfigError(
                f"engine.exact = true, but {self.path} forwards prompts in parts, whose sums depend on how they are cut; set it to false"
            )
        if model.paged is not None:  # our attention is inside, which wants our blocks
            model.model.set_attn_implementation("sdpa" if model.model._supports_sdpa else "eager")
        self.passes = PassCounts()
        self.device = device
        self._skeleton, self._call = model, ModelCall(model, device)
        self._layers = decoder_layers(model.model, getattr(model.config, "num_hidden_layers", 0))
        self.block_nbytes = _block_nbytes(model, context_length, dtype)
        if any(isinstance(value, torch.Tensor) for module in model.model.modules() for value in vars(module).values()):
            raise ConfigError(
                f"{self.path} keeps the state of a sequence in its modules, where all sequences would share it; choose another model"
            )
        self._live = 0
        """The number of times that weights were put into service."""
        self._blocks, self._states = MarkedBlocks(0), States(0)

    @cached_property
    def experts(self) -> tuple[int, int]:
        """Found before the first weights. Raises ConfigError for a mixture whose choice cannot be recorded."""
        return self._recorder.experts

    @cached_property
    def _recorder(self) -> ExpertRecorder:
        return ExpertRecorder(self.path, self._skeleton.model, lambda: _forwarded_nowhere(self._skeleton, TRIED))

    # -- memory -------------------------------------------------------------------------------------------------------------

    def allocate(self, blocks: int) -> None:
        self._blocks, self._states = MarkedBlocks(blocks), States(blocks * self.block_nbytes)

    def free(self) -> None:
        """States are not taken along to the host: they are computed again."""
        self._blocks, self._states = MarkedBlocks(0), States(0)
        self._weights.clear()

    def take_out(self, blocks: np.ndarray) -> torch.Tensor:
        """[n, BLOCK]: the marks."""
        return torch.from_numpy(self._blocks.marks[blocks])

    def put_back(self, blocks: np.ndarray, content: torch.Tensor) -> None:
        self._blocks.marks[blocks] = content.numpy()

    def copy_blocks(self, source: np.ndarray, target: np.ndarray) -> None:
        self._blocks.copy(source, target)

    def clear_blocks(self, blocks: np.ndarray) -> None:
        self._blocks.clear(blocks)

    # -- weights ------------------------------------------------------------------------------------------------------------

    def use(self, weights: Any) -> None:
        super().use(weights)
        self._live += 1

    # -- the pass -----------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, batch: ForwardInput) -> ForwardOutput:
        assert self._weights.loaded, "forward before the first weights"
        logits: list[torch.Tensor] = []
        routes = PassRoutes(self._recorder if batch.routing else None)
        again = np.full(len(batch.context), -1)
        for index, segment in enumerate(self._segments(batch)):
            waits = not len(segment.rows) and not self._call.extends
            self._blocks.write(segment.table, segment.context, segment.marks[segment.context :], owed=waits)
            if waits:
                continue
            parts, again[index] = self._advance(segment, routes)
            logits += parts
        self._states.shrink(len(batch.context))
        routing, routed = routes.output()
        return ForwardOutput(torch.cat(logits) if logits else torch.zeros(0, 1), routing, again=again, routed=routed)

    def _segments(self, batch: ForwardInput) -> Iterator[CachedSegment]:
        for index, context in enumerate(batch.context.tolist()):
            start, stop = batch.starts[index : index + 2].tolist()
            table = batch.tables[index]
            fresh = batch.tokens[start:stop] | (self._live << 32)
            rows = batch.rows[(batch.rows >= start) & (batch.rows < stop)] - start + context
            yield CachedSegment(table, context, np.concatenate([self._blocks.read(table, context), fresh]), rows)

    def _advance(self, segment: CachedSegment, routes: PassRoutes) -> tuple[list[torch.Tensor], int]:
        """Forwards a segment. Returns the logits that are wanted, and what `ForwardOutput.again` says of it."""
        state, live = None, False
        if not (routes.recorder and self._blocks.owes(segment.table, segment.context)):  # those have no record yet
            state, live = self._begin(segment)
        again = 0 if live else -1
        if segment.context and state is None:
            again = self._blocks.forwarded(segment.table, segment.context)
        if state is None:
            whole = segment.marks & TOKEN | (self._live << 32)
            state = State({}, whole[:0])
        else:
            whole = np.concatenate([state.marks, segment.marks[segment.context :]])
        logits = []
        calls = self._calls(len(state.marks), len(whole), samples=len(whole) - 1 in segment.rows)
        for start, stop in calls:
            if len(calls) > 1 and stop == len(whole):  # siblings continue from here
                self._states.keep(_key(segment.table, start), state.copied(start))
            rows = segment.rows[(segment.rows >= start) & (segment.rows < stop)] - start
            with routes.recorded([RoutedTokens(segment.table, np.arange(len(state.marks), stop))]):
                logits.append(self._call(state, whole[:stop], rows))
        if self._call.keeps and all(bool(part.isfinite().all()) for part in logits):
            self._states.keep(_key(segment.table, len(whole)), state)
        return logits, again

    def _begin(self, segment: CachedSegment) -> tuple[State | None, bool]:
        """The state of the segment's context, if it can be gone on from; and whether all of it is of the live weights."""
        context, fresh = segment.context, len(segment.marks) - segment.context
        if not context or not self._call.keeps:
            return None, False
        if not self._call.extends and fresh > 1 and fresh * STEPS_FOR_A_PASS > context + fresh:
            return None, False  # all in one call is quicker than token by token
        # A block that is full may be the last one of several sequences.
        moves = self._call.can_be_cut or context % BLOCK > 0
        found = self._states.take(_key(segment.table, context), segment.marks[:context], self._live, moves)
        return (found.state, found.live) if found else (None, False)

    def _calls(self, done: int, tokens: int, samples: bool) -> list[tuple[int, int]]:
        """The stretches of tokens that are forwarded together, one after the other. `samples`: the last token's logits are wanted."""
        if not self._call.keeps or (self._call.extends and (self._call.can_be_cut or not samples)):
            return [(done, tokens)]
        together = tokens - 1 if self._call.extends or not done else done
        alone = [(at, at + 1) for at in range(together, tokens)]
        return [(done, together), *alone] if together > done else alone

    @torch.inference_mode()
    def blame(self, batch: ForwardInput) -> np.ndarray:
        """Forwards every sequence from its beginning, under the live weights."""
        found = []
        for segment in self._segments(batch):
            with LayerWatch(self._layers, len(segment.marks), self.device) as watch:
                logits = self._call(State({}, segment.marks[:0]), segment.marks, segment.rows)
            blamed, rows = watch.blamed.cpu().numpy(), segment.rows
            broken = ~logits.isfinite().all(-1).cpu().numpy()
            blamed[rows] = np.where((blamed[rows] < 0) & broken, len(self._layers), blamed[rows])
            found.append(blamed[segment.context :])
        return np.concatenate(found)


TOKEN = 0xFFFFFFFF
"""The part of a mark that is the token."""


@dataclass(frozen=True)
class CachedSegment:
    """One sequence in a pass."""

    table: np.ndarray
    context: int
    marks: np.ndarray
    """[context + n]: those of its context, then those of the tokens to forward."""
    rows: np.ndarray
    """Positions whose logits are wanted, ascending."""


def _key(table: np.ndarray, tokens: int) -> tuple[int, int]:
    return int(table[(tokens - 1) // BLOCK]), tokens


# --- One call of the model


class ModelCall:
    """Calls a model as `generate` does, over the state of one sequence."""

    def __init__(self, model: Skeleton, device: torch.device) -> None:
        self._model, self._text, self._device = model.model, model.config, device
        self._takes = set(inspect.signature(model.model.forward).parameters)
        self._given = bool(model.model._supports_default_dynamic_cache())
        """Whether the cache is made outside of the model."""
        self.keeps = bool(self._takes & {"cache", "state"})
        """Whether it keeps anything from pass to pass; the first GPT does not, and computes every sequence from its beginning each time."""
        self._given &= self.keeps
        layers: list[Any] = DynamicCache(config=self._text).layers if self._given else [None]
        self.extends = not model.model._is_stateful and all(is_plain(layer) for layer in layers)
        """Whether several tokens may follow a state in one call."""
        self.can_be_cut = self.extends and not any(layer.is_sliding for layer in layers)
        """Whether every state holds those of all its beginnings."""

    def __call__(self, state: State, marks: np.ndarray, rows: np.ndarray) -> torch.Tensor:
        """Forwards the tokens of `marks` that `state` does not have, and puts them into it. Returns logits [R, V] of the tokens `rows`,
        counted from the first one that is forwarded."""
        done, tokens = len(state.marks), uploaded(marks & TOKEN, self._device)[None]
        fresh, kept = len(marks) - done, state.kept
        if not done and self._given:
            kept = {"cache": DynamicCache(config=self._text)}
        options: dict[str, Any] = {"use_cache": True, "attention_mask": None}
        if "position_ids" in self._takes:
            options["position_ids"] = torch.arange(len(marks), device=self._device)[None]
        inputs = self._model.prepare_inputs_for_generation(
            tokens, next_sequence_length=fresh, is_first_iteration=not done, **kept, **options
        )
        wanted = uploaded(rows, self._device)
        if "logits_to_keep" in self._takes:
            inputs["logits_to_keep"] = wanted if len(rows) else 1
        out = self._model(**inputs, return_dict=True)
        state.kept = self._model._update_model_kwargs_for_generation(out, dict(kept), num_new_tokens=fresh)
        state.marks = marks
        logits = out.logits[0]
        if not len(rows):
            return logits[:0]
        return logits if len(logits) == len(rows) and "logits_to_keep" in self._takes else logits[wanted]


# --- Memory


def _block_nbytes(model: Skeleton, context_length: int, dtype: torch.dtype) -> int:
    """Bytes of BLOCK tokens: their part of what grows with a sequence, and of a state of fixed size if the sequence is as long as it may be."""
    fixed, each = _measured(model) or _estimated(model, dtype)
    return max(SMALLEST_BLOCK, each * BLOCK + fixed * BLOCK // context_length)


def _measured(model: Skeleton) -> tuple[int, int] | None:
    """(bytes of a state whatever its length, bytes of each token): from two passes on the meta device. None for a model that reads numbers
    on its way, which are not there."""
    try:
        with without_values(model.model):
            sizes = [_forwarded_nowhere(model, tokens).nbytes for tokens in (BLOCK, 2 * BLOCK)]
    except Exception:
        return None
    each = (sizes[1] - sizes[0]) // BLOCK
    return sizes[0] - BLOCK * each, each


def _forwarded_nowhere(model: Skeleton, tokens: int) -> State:
    """The state after a pass over so many tokens on the meta device."""
    state = State({}, np.zeros(0, dtype=np.int64))
    call = ModelCall(model, torch.device("meta"))
    call(state, np.zeros(tokens, dtype=np.int64), np.zeros(0, dtype=np.int64))
    return state


def _estimated(model: Skeleton, dtype: torch.dtype) -> tuple[int, int]:
    """Counts every layer as attention with a key and a value of the model's width."""
    layers, width = getattr(model.config, "num_hidden_layers", 32), getattr(model.config, "hidden_size", 4096)
    return 0, 2 * layers * width * dtype.itemsize
