"""Any other causal LM: transformers' own forward pass with transformers' own cache.

For models whose attention cannot be had over our blocks, and for those whose layers keep something else than keys and values: convolutions,
state spaces, delta rules, latent or compressed keys. Sequences are given the arguments that `generate` would give them, and what the model
hands back is kept until the next pass (`states.py`). Those that go on by one token do it in one pass, as the rows of one cache, and new prompts
of about one length begin together (`model_call.py` says which may); everything else runs one after the other.

A recurrent layer takes several tokens at once only from the beginning of a sequence. So a prompt's tokens are *owed* until logits are
wanted, and forwarded in one call then. Where a state cannot be cut, a prompt's last token follows alone, and the state before it is kept for
siblings, who begin there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from headrace.core.errors import ConfigError
from headrace.engine.native.forward_pass import BLOCK, ForwardInput, ForwardOutput, PassCounts, WithoutStates
from headrace.engine.native.runners.model_call import TOKEN, ModelCall
from headrace.engine.native.runners.module_adapters import NONE, blamed_in_slots, in_slots
from headrace.engine.native.runners.module_weights import LayerWatch, ModuleRunner, decoder_layers
from headrace.engine.native.runners.recorded import TRIED, ExpertRecorder, PassRoutes, RoutedTokens
from headrace.engine.native.runners.skeleton import Architecture, Skeleton, architecture_of, without_values
from headrace.engine.native.runners.states import FoundState, MarkedBlocks, Rows, State, States

STEPS_FOR_A_PASS = 16
"""Tokens forwarded together that take about as long as one token alone."""
TOGETHER = 2048
"""Tokens of new prompts in one call; longer prompts gain nothing from company, and attention that is written out needs memory."""
SMALLEST_BLOCK = 4096
"""Bytes that a block counts at least, so that a state of fixed size does not make millions of them."""


class OwnCacheRunner(WithoutStates, ModuleRunner):
    """Raises ConfigError for exactness, which it does not support."""

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
        self._skeleton, self._call = model, ModelCall(model, device)
        alone = " alone" if self._call.alone else ""
        super().__init__(f"own cache{alone} {model.model_type}", model.model, max_adapters, dtype=dtype, device=device)
        if exact:
            raise ConfigError(
                f"engine.exact = true, but {self.path} forwards prompts in parts, whose sums depend on how they are cut; set it to false"
            )
        if model.paged is not None:  # our attention is inside, which wants our blocks
            model.model.set_attn_implementation("sdpa" if model.model._supports_sdpa else "eager")
        self.passes = PassCounts()
        self.device = device
        self._layers = decoder_layers(model.model, getattr(model.config, "num_hidden_layers", 0))
        self.block_nbytes = _block_nbytes(model, context_length, dtype)
        if any(isinstance(value, torch.Tensor) for module in model.model.modules() for value in vars(module).values()):
            raise ConfigError(
                f"{self.path} keeps the state of a sequence in its modules, where all sequences would share it; choose another model"
            )
        self._live = 0
        """The number of the weights that calls are made with, an adapter's beside the base's among them."""
        self._numbers = dict.fromkeys(range(NONE, max_adapters), 0)
        """The numbers of the weights in the slots. No number comes twice: what one has left is nothing for another."""
        self._blocks, self._states = MarkedBlocks(0), States(0)

    @cached_property
    def experts(self) -> tuple[int, int]:
        """Found before the first weights. Raises ConfigError for a mixture whose choice cannot be recorded."""
        return self._recorder.experts

    @cached_property
    def _recorder(self) -> ExpertRecorder:
        return ExpertRecorder(self.path, self._skeleton.model, lambda: _forwarded_nowhere(self._skeleton, TRIED))

    # -- memory -------------------------------------------------------------------------------------------------------------

    def allocate(self, blocks: int, states: int = 0) -> None:
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
        for slot in self._numbers:
            self._renew(slot)

    def use_adapter(self, slot: int, adapter: Any) -> None:
        super().use_adapter(slot, adapter)
        self._renew(slot)

    def _renew(self, slot: int) -> None:
        self._numbers[slot] = 1 + max(self._numbers.values())

    @contextmanager
    def _served(self, slot: int) -> Iterator[None]:
        self._live = self._numbers[slot]
        with self._adapters.used(slot):
            yield

    # -- the pass -----------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, batch: ForwardInput) -> ForwardOutput:
        assert self._weights.loaded, "forward before the first weights"
        return in_slots(batch, self._forward)

    def _forward(self, slot: int, batch: ForwardInput) -> ForwardOutput:
        with self._served(slot):
            return self._pass(batch)

    def _pass(self, batch: ForwardInput) -> ForwardOutput:
        routes = PassRoutes(self._recorder if batch.routing else None)
        again = np.full(len(batch.context), -1)
        going = []
        for index, segment in enumerate(self._segments(batch)):
            waits = not len(segment.rows) and not self._call.extends
            self._blocks.write(segment.table, segment.context, segment.marks[segment.context :], owed=waits)
            if not waits:
                one, again[index] = self._begin(segment, records=batch.routing)
                going.append(one)
        self._states.hand_over()
        most = max((len(one.calls) for one in going), default=0)
        for left in range(most, 0, -1):  # so that all last calls go together
            self._advance([one for one in going if len(one.calls) == left], routes)
        for one in going:
            if self._call.keeps and one.finite:
                self._states.keep(_key(one.segment.table, len(one.whole)), one.state)
        self._states.shrink(len(batch.context))
        logits = [part for one in going for part in one.logits]
        routing, routed = routes.output()
        return ForwardOutput(torch.cat(logits) if logits else torch.zeros(0, 1), routing, again=again, routed=routed)

    def _segments(self, batch: ForwardInput) -> Iterator[CachedSegment]:
        for index, context in enumerate(batch.context.tolist()):
            start, stop = batch.starts[index : index + 2].tolist()
            table = batch.tables[index]
            fresh = batch.tokens[start:stop] | (self._live << 32)
            first, last = np.searchsorted(batch.rows, (start, stop)).tolist()
            rows = batch.rows[first:last] - start + context
            yield CachedSegment(table, context, np.concatenate([self._blocks.read(table, context), fresh]), rows)

    def _begin(self, segment: CachedSegment, records: bool) -> tuple[Course, int]:
        """Finds what a segment goes on from. Returns what `ForwardOutput.again` says of it too. `records`: the experts of all tokens are wanted."""
        no_record_yet = records and self._blocks.owes(segment.table, segment.context)
        found = None if no_record_yet else self._found(segment)
        if found is not None:
            state, again = found.state, 0 if found.live else -1
            whole = np.concatenate([state.marks, segment.marks[segment.context :]])
        else:
            again = self._blocks.forwarded(segment.table, segment.context) if segment.context else -1
            whole = segment.marks & TOKEN | (self._live << 32)
            state = State({}, whole[:0])
        samples = bool(len(segment.rows)) and segment.rows[-1] == len(whole) - 1
        in_image = self._call.sees_ahead(whole[-2:-1])  # the last token, which no call may part from it
        calls = [(len(state.marks), len(whole))] if in_image else self._calls(len(state.marks), len(whole), samples)
        return Course(segment=segment, state=state, whole=whole, calls=calls, splits=len(calls) > 1), again

    def _found(self, segment: CachedSegment) -> FoundState | None:
        """The state of the segment's context, if it can be gone on from."""
        context, fresh = segment.context, len(segment.marks) - segment.context
        if not context or not self._call.keeps:
            return None
        if not self._call.extends and fresh > 1 and fresh * STEPS_FOR_A_PASS > context + fresh:
            return None  # all in one call is quicker than token by token
        if not self._call.extends and self._call.sees_ahead(segment.marks[context:]):
            return None  # an image is forwarded in one call
        # A block that is full may be the last one of several sequences.
        moves = self._call.can_be_cut or context % BLOCK > 0
        return self._states.take(_key(segment.table, context), segment.marks[:context], self._live, moves)

    def _calls(self, done: int, tokens: int, samples: bool) -> list[tuple[int, int]]:
        """The stretches of tokens that are forwarded together, one after the other. `samples`: the last token's logits are wanted."""
        if not self._call.keeps or (self._call.extends and (self._call.can_be_cut or not samples)):
            return [(done, tokens)]
        together = tokens - 1 if self._call.extends or not done else done
        alone = [(at, at + 1) for at in range(together, tokens)]
        return [(done, together), *alone] if together > done else alone

    def _advance(self, going: Sequence[Course], routes: PassRoutes) -> None:
        """Makes the next call of each of these."""
        for one in going:
            if one.splits and len(one.calls) == 1:  # siblings continue from here
                start = one.calls[0][0]
                self._states.keep(_key(one.segment.table, start), one.state.copied(start))
        shared = {one.state.rows for one in going if one.state.rows}
        alone, begin, steps = self._companies(going)
        together = [Rows.of([one.state for one in group]) for group in steps]
        for left in shared.difference(together):
            left.part()
        for rows, group in zip(together, steps, strict=True):
            in_order = sorted(group, key=lambda one: one.state.row)
            with routes.recorded(_routed(in_order)):
                logits = self._call.step(rows, [one.text() for one in in_order])
            self._take(in_order, logits)
        for group in begin:
            with routes.recorded(_routed(group)):
                logits = self._call.begin([one.state for one in group], [one.text() for one in group])
            self._take(group, logits)
        for one in alone:
            with routes.recorded(_routed([one])):
                logits = self._call(one.state, one.text(), one.wanted() - one.calls[0][0])
            one.take(logits, bool(logits.isfinite().all()))

    def _companies(self, going: Sequence[Course]) -> tuple[list[Course], list[list[Course]], list[list[Course]]]:
        """Returns those whose next call is made alone, groups that begin together, and groups that go on by a token together."""
        groups: dict[tuple[bool, int], list[Course]] = {}
        alone = []
        for one in going:
            start, stop = one.calls[0]
            last_alone = all(one.wanted() == stop - 1)
            if self._call.alone or not last_alone or (start and stop > start + 1):
                alone.append(one)
            else:
                groups.setdefault((start > 0, self._call.company(start, stop)), []).append(one)
        begin: list[list[Course]] = []
        steps: list[list[Course]] = []
        for (goes_on, _), group in groups.items():
            most = len(group) if goes_on else max(1, TOGETHER // max(one.calls[0][1] for one in group))
            for some in (group[at : at + most] for at in range(0, len(group), most)):
                if len(some) == 1:
                    alone += some
                else:
                    (steps if goes_on else begin).append(some)
        return alone, begin, steps

    def _take(self, going: Sequence[Course], logits: torch.Tensor) -> None:
        """`logits` [n, V] of the last tokens."""
        finite = logits.sum(-1, dtype=torch.float32).isfinite().tolist()
        for one, row, sound in zip(going, logits.split(1), finite, strict=True):
            one.take(row[: len(one.wanted())], sound or not len(one.wanted()))

    @torch.inference_mode()
    def blame(self, batch: ForwardInput) -> np.ndarray:
        """Forwards every sequence from its beginning, under the live weights."""
        return blamed_in_slots(batch, self._blame)

    def _blame(self, slot: int, batch: ForwardInput) -> np.ndarray:
        with self._served(slot):
            return self._blamed(batch)

    def _blamed(self, batch: ForwardInput) -> np.ndarray:
        found = []
        for segment in self._segments(batch):
            with LayerWatch(self._layers, len(segment.marks), self.device) as watch:
                logits = self._call(State({}, segment.marks[:0]), segment.marks, segment.rows)
            blamed, rows = watch.blamed.cpu().numpy(), segment.rows
            broken = ~logits.isfinite().all(-1).cpu().numpy()
            blamed[rows] = np.where((blamed[rows] < 0) & broken, len(self._layers), blamed[rows])
            found.append(blamed[segment.context :])
        return np.concatenate(found)


@dataclass(frozen=True)
class CachedSegment:
    """One sequence in a pass."""

    table: np.ndarray
    context: int
    marks: np.ndarray
    """[context + n]: those of its context, then those of the tokens to forward."""
    rows: np.ndarray
    """Positions whose logits are wanted, ascending."""


@dataclass(eq=False, kw_only=True)
class Course:
    """A segment on its way through a pass."""

    segment: CachedSegment
    state: State
    whole: np.ndarray
    """[T]: marks of all its tokens, as its state will have them."""
    calls: list[tuple[int, int]]
    """Stretches of tokens that are still to be forwarded."""
    splits: bool
    """Whether its last call is not its only one."""
    logits: list[torch.Tensor] = field(default_factory=list)
    finite: bool = True

    def text(self) -> np.ndarray:
        """Marks of its tokens up to the end of the next call."""
        return self.whole[: self.calls[0][1]]

    def wanted(self) -> np.ndarray:
        """Positions in the next call whose logits are wanted."""
        (start, stop), rows = self.calls[0], self.segment.rows
        return rows[(rows >= start) & (rows < stop)]

    def take(self, logits: torch.Tensor, finite: bool) -> None:
        """The next call was made, with these logits."""
        self.logits.append(logits)
        self.finite &= finite
        self.calls = self.calls[1:]


def _routed(together: Sequence[Course]) -> list[RoutedTokens]:
    """The tokens of a call that these share, without its padding."""
    stretches = [np.arange(*one.calls[0]) for one in together]
    columns = max(map(len, stretches))
    return [
        RoutedTokens(one.segment.table, positions, first=(row + 1) * columns - len(positions))
        for row, (one, positions) in enumerate(zip(together, stretches, strict=True))
    ]


def _key(table: np.ndarray, tokens: int) -> tuple[int, int]:
    return int(table[(tokens - 1) // BLOCK]), tokens


# --- Memory


def _block_nbytes(model: Skeleton, context_length: int, dtype: torch.dtype) -> int:
    """Bytes of BLOCK tokens: their part of what grows with a sequence, and of a state of fixed size if the sequence is as long as it may be."""
    architecture = architecture_of(model.model, model.config), dtype
    if architecture not in _found and (measured := _measured(model)):
        _found[architecture] = measured
    fixed, each = _found.get(architecture) or _estimated(model, dtype)
    return max(SMALLEST_BLOCK, each * BLOCK + fixed * BLOCK // context_length)


_found: dict[tuple[Architecture, torch.dtype], tuple[int, int]] = {}
"""Results of `_measured` by model: a process that compares engines reads one model several times."""


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
