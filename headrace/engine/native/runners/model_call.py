"""One call of a transformers model, as `generate` would make it: over the state of one sequence, or over the rows of a cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from headrace.engine.native.runners.cache_rows import objection
from headrace.engine.native.runners.skeleton import Skeleton
from headrace.engine.native.runners.states import Rows, State, is_plain
from headrace.models.image_axes import has_axes, moved_up
from headrace.models.image_blocks import ahead_in, ahead_of
from headrace.native.uploads import uploaded

TOKEN = 0xFFFFFFFF
"""The part of a mark that is the token."""
SHORT_PROMPT, SHORT_TEXT = 16, 256
"""Prompts, and sequences that go on, may share a call up to this length whatever theirs are; above, the longest is less than twice the shortest."""
_POSITIONS_OF_THE_MASK = ("bloom", "mpt")
"""Types that take no positions, and count them in the attention mask."""
_UNPADDED = ("git",)
"""Types that take positions and masks, and do not heed them."""


class ModelCall:
    def __init__(self, model: Skeleton, device: torch.device) -> None:
        self._model, self._text, self._device = model.model, model.config, device
        self._on_axes, self._ahead_in = has_axes(model.model), ahead_in(model.model)
        self._takes = set(inspect.signature(model.model.forward).parameters)
        self.keeps = bool(self._takes & {"cache", "state"})
        """Whether the model keeps anything from pass to pass; the first GPT does not, and computes every sequence from its beginning each time."""
        self._given = self.keeps and bool(model.model._supports_default_dynamic_cache())
        """Whether the cache is made outside of the model."""
        layers: list[Any] = DynamicCache(config=self._text).layers if self._given else [None]
        self.extends = not model.model._is_stateful and all(is_plain(layer) for layer in layers)
        """Whether several tokens may follow a state in one call."""
        self.can_be_cut = self.extends and not any(layer.is_sliding for layer in layers)
        """Whether every state holds those of all its beginnings."""
        self.short_prompt, self.short_text = SHORT_PROMPT, SHORT_TEXT
        self.alone = self._alone()
        """The reason why sequences run one after the other, half a sentence; empty if they run together."""
        self._by_position = any(hasattr(layer, "keys") for layer in layers)
        self._padded = self._most_padded(model.model_type)

    def _alone(self) -> str:
        if not self.keeps:
            return "it keeps nothing from token to token"
        if not self._given:
            return "it keeps its state in a form of its own"
        return objection(DynamicCache(config=self._text))

    def _most_padded(self, model_type: str) -> float:
        """The most tokens of a sequence that may be longer than others in its call."""
        counts = "position_ids" in self._takes or model_type in _POSITIONS_OF_THE_MASK or not self._by_position
        if not counts or "attention_mask" not in self._takes or model_type in _UNPADDED:
            return 0
        return getattr(self._text, "keep_window_size", None) or float(
            "inf"
        )  # of tokens that are seen, padding among them

    def company(self, done: int, tokens: int) -> int:
        """Sequences with the same number may share a call that takes them from `done` tokens to `tokens`."""
        if done and not self._by_position:
            return 0  # states have one size
        short = self.short_text if done else self.short_prompt
        doubled = (tokens // short).bit_length()
        return doubled if short << doubled <= self._padded else -tokens

    # -- calls --------------------------------------------------------------------------------------------------------------

    def __call__(self, state: State, marks: np.ndarray, rows: np.ndarray) -> torch.Tensor:
        """Forwards the tokens of `marks` that `state` does not have, and puts them into it. Returns logits [R, V] of the tokens `rows`,
        counted from the first one that is forwarded."""
        state.part()
        done, tokens, wanted = len(state.marks), marks & TOKEN, uploaded(rows, self._device)
        options = self._options(np.arange(len(marks)) - self._moved(marks), None, wanted if len(rows) else 1)
        logits, state.kept = self._forward(tokens[None], len(marks) - done, state.kept if done else None, options)
        state.marks = marks
        if not len(rows):
            return logits[0, :0]
        return logits[0] if logits.shape[1] == len(rows) and "logits_to_keep" in self._takes else logits[0, wanted]

    def step(self, rows: Rows, marks: Sequence[np.ndarray]) -> torch.Tensor:
        """Forwards one token of every row. `marks`: all of each row, in order. Returns logits [len(rows), V]."""
        tokens = np.array([one[-1] for one in marks]) & TOKEN
        moved = np.array([self._moved(one)[-1:] for one in marks])
        options = self._options(rows.lengths[:, None] - moved, _seen(rows.lengths, 1), 1)
        logits, kept = self._forward(tokens[:, None], 1, rows.kept, options)
        rows.advance(kept, marks)
        return logits[:, -1]

    def begin(self, states: Sequence[State], marks: Sequence[np.ndarray]) -> torch.Tensor:
        """Forwards the tokens of new sequences, whose states become rows. Returns logits [len(states), V] of their last tokens."""
        lengths = np.array([len(one) for one in marks])
        columns = int(lengths.max())
        tokens = np.zeros((len(marks), columns), dtype=np.int64)
        for row, one in enumerate(marks):
            tokens[row, columns - len(one) :] = one & TOKEN
        positions = (np.arange(columns) - (columns - lengths)[:, None]).clip(0) - self._moved(tokens)
        logits, kept = self._forward(tokens, columns, None, self._options(positions, _seen(lengths, 0), 1))
        for state, one in zip(states, marks, strict=True):
            state.marks = one
        Rows(states, kept)
        return logits[:, -1]

    def _moved(self, marks: np.ndarray) -> np.ndarray:
        """[..., T] by how much each token of sequences has moved up, by the images before it."""
        if not self._on_axes:
            return np.zeros_like(marks)
        moved = moved_up(self._model, torch.from_numpy(marks & TOKEN)).numpy()
        return moved.cumsum(-1) - moved

    def sees_ahead(self, marks: np.ndarray) -> bool:
        """Whether one of these tokens sees later ones, from which no call may part it."""
        return bool(self._ahead_in) and bool(ahead_of(self._model, torch.from_numpy(marks & TOKEN)).any())

    def _options(self, positions: np.ndarray, seen: np.ndarray | None, keep: torch.Tensor | int) -> dict[str, Any]:
        """`positions` [n, fresh] or [T]; `seen`: the attention mask; `keep`: the tokens whose logits are wanted, or how many."""
        options: dict[str, Any] = {"use_cache": True}
        options["attention_mask"] = None if seen is None else uploaded(seen.astype(np.int64), self._device)
        if "position_ids" in self._takes:
            options["position_ids"] = uploaded(np.atleast_2d(positions), self._device)
        if "logits_to_keep" in self._takes:
            options["logits_to_keep"] = keep
        return options

    def _forward(
        self, tokens: np.ndarray, fresh: int, kept: dict[str, Any] | None, options: dict[str, Any]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Forwards the last `fresh` columns of tokens [n, T]. `kept`: None at the beginning. Returns logits, those that are wanted alone where the
        model can choose, and what it keeps."""
        first = kept is None
        if kept is None:
            kept = {"cache": DynamicCache(config=self._text)} if self._given else {}
        inputs = self._model.prepare_inputs_for_generation(
            uploaded(tokens, self._device), next_sequence_length=fresh, is_first_iteration=first, **kept, **options
        )
        out = self._model(**inputs, return_dict=True)
        return out.logits, self._model._update_model_kwargs_for_generation(out, dict(kept), num_new_tokens=fresh)


def _seen(lengths: np.ndarray, fresh: int) -> np.ndarray | None:
    """[n, longest + fresh]: False where padding is before a shorter sequence. None without padding."""
    longest = int(lengths.max())
    if longest == int(lengths.min()):
        return None
    return np.arange(longest + fresh) >= (longest - lengths)[:, None]
