"""LoRA adapters beside a transformers model: what each adds to the results of the model's linear layers.

A call of the model is of one adapter, or of none, so that it does not matter in which shape or order a layer is given its tokens. A pass over
sequences with several adapters becomes one pass for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from headrace.core.weights import AdapterSpec
from headrace.engine.native.forward_pass import ForwardInput, ForwardOutput
from headrace.engine.native.runners.adapter_tensors import matrices_of
from headrace.engine.native.runners.layers import Pair

NONE = -1
"""The slot of sequences without an adapter."""

ModuleAdapter = Mapping[str, Pair]
"""The matrices of an adapter, by the names of modules."""


class ModuleAdapters:
    def __init__(self, model: torch.nn.Module, count: int) -> None:
        """`count`: the number of slots; without one, the model is left as it is."""
        self._slots: list[ModuleAdapter | None] = [None] * count
        self._used: ModuleAdapter = {}
        linears = ((name, module, shape_of(module)) for name, module in model.named_modules() if count)
        self._shapes = dict[str, tuple[int, int, int]]()
        for name, module, shape in linears:
            if shape is not None:
                self._shapes[name] = (1, *shape)
                module.register_forward_hook(partial(self._add, name))

    def _add(self, name: str, module: Any, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
        pair = self._used.get(name)
        return None if pair is None else output + linear(linear(args[0], pair.a), pair.b)

    def read(
        self, spec: AdapterSpec, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device
    ) -> ModuleAdapter:
        """Raises ValueError naming the first tensor that the model has no place for."""
        found = matrices_of(
            spec, tensors, self._shapes, "linear layers can be adapted; experts beside families of our own alone"
        )
        return {name: Pair(*(part[0].to(device, dtype) for part in (one.a, one.b))) for name, one in found.items()}

    def put(self, slot: int, adapter: ModuleAdapter | None) -> None:
        self._slots[slot] = adapter

    @contextmanager
    def used(self, slot: int) -> Iterator[None]:
        """Calls of the model are of this slot while it is open."""
        adapter = {} if slot == NONE else self._slots[slot]
        assert adapter is not None, f"a request uses the empty adapter slot {slot}"
        self._used = adapter
        try:
            yield
        finally:
            self._used = {}


def shape_of(module: torch.nn.Module) -> tuple[int, int] | None:
    """(out, in) of a linear layer, as peft counts them; None for other modules."""
    if isinstance(module, Conv1D):
        into, out = module.weight.shape
        return out, into
    return (module.out_features, module.in_features) if isinstance(module, torch.nn.Linear) else None


# --- A pass for each adapter


@dataclass(frozen=True)
class SlotPart:
    """The segments of a batch that have one adapter."""

    slot: int
    segments: np.ndarray
    """[s] which segments of the batch, ascending."""
    tokens: np.ndarray
    """[n] which tokens."""
    rows: np.ndarray
    """[r] which of the wanted rows."""
    batch: ForwardInput


def by_slot(batch: ForwardInput) -> list[SlotPart]:
    """The parts of a batch, by their adapters."""
    segment_of, found = batch.segments(), []
    for slot in np.unique(batch.adapters).tolist():
        segments = np.flatnonzero(batch.adapters == slot)
        tokens = np.flatnonzero(np.isin(segment_of, segments))
        rows = np.flatnonzero(np.isin(batch.rows, tokens))
        part = replace(
            batch,
            tokens=batch.tokens[tokens],
            starts=np.concatenate([[0], np.diff(batch.starts)[segments].cumsum()]).astype(batch.starts.dtype),
            context=batch.context[segments],
            tables=batch.tables[segments],
            rows=np.searchsorted(tokens, batch.rows[rows]),
            adapters=batch.adapters[segments],
            moved=None if batch.moved is None else batch.moved[tokens],
            ahead=None if batch.ahead is None else batch.ahead[tokens],
        )
        found.append(SlotPart(slot, segments, tokens, rows, part))
    return found


def in_slots(batch: ForwardInput, forward: Callable[[int, ForwardInput], ForwardOutput]) -> ForwardOutput:
    """Calls `forward(slot, part)` for the segments of each adapter. Returns their results as one, in the order of the batch."""
    parts = by_slot(batch)
    if len(parts) == 1:
        return forward(parts[0].slot, batch)
    outputs = [forward(part.slot, part.batch) for part in parts]
    logits = torch.zeros(0, 1)
    if asked := [(part, output) for part, output in zip(parts, outputs, strict=True) if len(part.rows)]:
        order = torch.from_numpy(np.concatenate([part.rows for part, _ in asked])).to(asked[0][1].logits.device)
        logits = torch.cat([output.logits for _, output in asked])
        logits = torch.empty_like(logits).index_copy_(0, order, logits)
    return ForwardOutput(
        logits,
        routing=_placed([output.routing for output in outputs], [part.tokens for part in parts])
        if outputs[0].routed is None
        else _joined([output.routing for output in outputs]),
        again=_placed([output.again for output in outputs], [part.segments for part in parts]),
        routed=_joined([output.routed for output in outputs]),
    )


def _placed(values: list[np.ndarray | None], places: list[np.ndarray]) -> np.ndarray | None:
    """Values of each part, at their places in the whole."""
    joined = _joined(values)
    if joined is None:
        return None
    found = np.empty_like(joined)
    found[np.concatenate(places)] = joined
    return found


def _joined(values: list[np.ndarray | None]) -> np.ndarray | None:
    there = [value for value in values if value is not None]
    return np.concatenate(there) if there else None


def blamed_in_slots(batch: ForwardInput, blame: Callable[[int, ForwardInput], np.ndarray]) -> np.ndarray:
    """Returns [N] of `Runner.blame`, from `blame(slot, part)` for the segments of each adapter."""
    parts = by_slot(batch)
    found = _placed([blame(part.slot, part.batch) for part in parts], [part.tokens for part in parts])
    assert found is not None
    return found
