"""A training row as columns of numbers: what is forwarded of it, and what its loss tokens need. Tokens that predict no loss token are left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.core.batches import Batch, Row
from headrace.core.types import RoutingTrace, SamplingMask, Struct, TeacherTrace

T = TypeVar("T", bound=np.generic)

Ints = NDArray[np.int64]

SWAPPED, AGAIN = 1, 2
"""Rows whose tokens are in no lag of the statistics by lag (`Path.apart`)."""

Routed = tuple[int, int] | None
"""(layers, k) of the experts that the rows of a step recorded; None if no row has any."""


@dataclass(frozen=True, eq=False, kw_only=True)
class KeptIds:
    """The ids that the sampler could choose from at each of M places (`SamplingMask`)."""

    ids: NDArray[np.int32]
    """[nnz]"""
    counts: NDArray[np.int32]
    """[M] how many of them belong to each place"""
    sets: tuple[bytes, ...]
    """Encoded sets (`sampling_masks.encode_set`)."""
    set_of: NDArray[np.int32]
    """[M] the set of each place, -1 for none; empty if there are no sets."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TeacherNumbers:
    """A teacher's numbers of M loss tokens."""

    logprobs: NDArray[np.float32]
    """[M] NaN for tokens that it did not score"""
    k: int
    top_ids: NDArray[np.int32]
    """[M, k]"""
    top_logprobs: NDArray[np.float32]
    """[M, k]"""


@dataclass(frozen=True, eq=False, kw_only=True)
class Path:
    """One row of a batch, as a path through a tree. It has M loss tokens; none where it only lends its tokens to rows of the same share."""

    number: int
    """The number of its row in the step."""
    prompt: int
    """Tokens of its prompt."""
    tokens: NDArray[np.int32]
    """[T] the forwarded tokens. The last loss token and all behind it are left out: they predict no loss token."""
    loss: NDArray[np.int32]
    """[M] places behind the prompt of the tokens in the loss"""
    target: NDArray[np.int32]
    """[M] these tokens"""
    sampled: NDArray[np.float32]
    """[M] the sampler's log-probs"""
    advantage: NDArray[np.float32]
    """[M]"""
    version: NDArray[np.int32]
    """[M]"""
    trajectory: NDArray[np.int32]
    """[M] trajectories, as numbers within the step"""
    turn: NDArray[np.int32]
    """[M] the order of a trajectory's turns; 0 where it does not matter"""
    unmixed: NDArray[np.bool_]
    """[M] sampled over cache entries of the token's own version alone"""
    apart: int
    """0 if its tokens count with those of their lag in the statistics by lag, `SWAPPED` if more than one version sampled them, `AGAIN` for a good rollout
    of an earlier group."""
    temperature: float
    routing: RoutingTrace | None = None
    kept: KeptIds | None = None
    teacher: TeacherNumbers | None = None

    def routes(self, start: int, end: int, routed: tuple[int, int]) -> NDArray[np.int16]:
        """[end - start, layers · k] the recorded experts of these forwarded tokens, -1 where there are none."""
        width, trace = routed[0] * routed[1], self.routing
        found = np.full((end - start, width), -1, np.int16)
        if trace is not None:
            assert (trace.layers, trace.k) == routed, "the rows of a step come from one model"
            experts = np.frombuffer(trace.experts, np.uint8 if trace.width == 1 else np.uint16).reshape(-1, width)
            there = experts[start:end]
            found[: len(there)] = there
        return found


def path_of(row: Row, number: int, trajectories: Sequence[int]) -> Path | None:
    """The row as columns; None if it has no loss token. `trajectories`: those of its tokens, within the step: one for all, or [T]."""
    assert row.prompt, "the first token of a completion is predicted from the prompt"
    logprobs, mask = np.array(row.logprobs, np.float64), _mask_of(row)
    loss = _losses(mask, logprobs)
    if not len(loss):
        return None
    count = int(loss[-1]) + 1
    tokens = np.array(row.prompt + row.tokens[:count], np.int32)
    version = _at(loss, row.versions, np.int32)
    kv_version = _at(loss, row.kv_versions, np.int32) if row.kv_versions else version
    of_tokens = np.array(trajectories, np.int32)
    return Path(
        number=number,
        prompt=len(row.prompt),
        tokens=tokens[:-1],
        loss=loss.astype(np.int32),
        target=_targets(tokens[len(row.prompt) :], loss),
        sampled=logprobs[loss].astype(np.float32),
        advantage=_at(loss, row.advantages, np.float32),
        version=version,
        trajectory=_of_losses(of_tokens, loss),
        turn=_of_losses(np.array(row.turns or (0,), np.int32), loss),
        unmixed=_thin(version == kv_version),
        apart=AGAIN if row.again else SWAPPED if _is_swapped(row, mask) else 0,
        temperature=row.temperature,
        routing=row.routing,
        kept=None if row.sampling_mask is None else _kept_of(row.sampling_mask, loss),
        teacher=None if row.teacher is None else _teacher_of(row.teacher, loss),
    )


def _of_losses(numbers: NDArray[T], loss: Ints) -> NDArray[T]:
    """[M] a column of a row at its loss tokens, from one number for all tokens, or [T]."""
    return _thin(numbers[loss]) if len(numbers) > 1 else np.broadcast_to(numbers, len(loss))


def _targets(tokens: NDArray[np.int32], loss: Ints) -> NDArray[np.int32]:
    """[M] the loss tokens, without a copy of them where they follow each other."""
    first, last = int(loss[0]), int(loss[-1])
    return tokens[first : last + 1] if last - first + 1 == len(loss) else tokens[loss]


def _mask_of(row: Row) -> NDArray[np.bool_]:
    return np.frombuffer(bytes(row.mask), bool)


def _at(loss: Ints, values: Sequence[float], dtype: type) -> NDArray[Any]:
    """[M] a column of a row at its loss tokens. A step has 100 million tokens, so one of equal values is not converted one by one: they are
    counted in a tenth of the time. Zero is, since it equals -0.0."""
    if values[0] and values.count(values[0]) == len(values):
        return np.broadcast_to(np.array(values[:1], dtype), len(loss))
    return _thin(np.array(values, dtype)[loss])


def _is_swapped(row: Row, mask: NDArray[np.bool_]) -> bool:
    if row.versions.count(row.versions[0]) == len(row.versions):
        return False
    sampled = np.array(row.versions, np.int64)[mask]
    return bool((sampled != sampled[0]).any())


def _thin(column: NDArray[T]) -> NDArray[T]:
    """A column of one value without the memory of its others. The controller has a whole step of them."""
    bits = column.view(f"u{column.itemsize}")  # 0.0 is not -0.0
    return np.broadcast_to(column[:1].copy(), len(column)) if len(column) and (bits == bits[0]).all() else column


def _losses(mask: NDArray[np.bool_], logprobs: NDArray[np.float64]) -> Ints:
    """[M] indices of a row's tokens in the loss: not masked, with a finite log-prob of the sampler to compare with."""
    assert len(mask) == len(logprobs), "a row has one log-prob for each token"
    return np.flatnonzero(mask & np.isfinite(logprobs))


def dropped(rows: Sequence[Row], losses: int) -> int:
    """The number of tokens that would be in the loss but have no finite log-prob of the sampler. `losses`: those in the loss."""
    return sum(row.mask.count(True) for row in rows) - losses


def routed_of(rows: Sequence[Row]) -> Routed:
    """(layers, k) of the recorded experts; None if no row has any."""
    return next(((row.routing.layers, row.routing.k) for row in rows if row.routing is not None), None)


def _kept_of(mask: SamplingMask, loss: Ints) -> KeptIds:
    offsets = np.frombuffer(mask.offsets, np.int64)
    counts = offsets[loss + 1] - offsets[loss]
    ends = counts.cumsum()
    source = np.repeat(offsets[loss] - (ends - counts), counts) + np.arange(counts.sum())
    return KeptIds(
        ids=np.frombuffer(mask.token_ids, np.int32)[source],
        counts=counts.astype(np.int32),
        sets=mask.sets,
        set_of=np.frombuffer(mask.set_of, np.int32)[loss] if mask.sets else np.empty(0, np.int32),
    )


def _teacher_of(trace: TeacherTrace, loss: Ints) -> TeacherNumbers:
    k = trace.top.k if trace.top is not None else 0
    top = trace.top if k else None
    return TeacherNumbers(
        logprobs=np.array(trace.logprobs, np.float32)[loss],
        k=k,
        top_ids=_top(top.tokens if top else b"", np.int32, k, loss),
        top_logprobs=_top(top.logprobs if top else b"", np.float32, k, loss),
    )


def _top(column: bytes, dtype: type, k: int, loss: Ints) -> NDArray[Any]:
    return np.frombuffer(column, dtype).reshape(-1, k)[loss] if k else np.empty((len(loss), 0), dtype)


# --- The rows of a step whose numbers are recorded token by token


MOST_TOKENS = 1 << 15
"""Tokens of a step whose numbers are recorded: 8 bytes each, a third more in the journal, which has about 80 bytes of every token."""


class PickedRow(Struct, frozen=True):
    """A row whose numbers are recorded. Every rank knows all of them."""

    row: int
    """The row's number in the step."""
    ticket: int
    number: int
    """The row's place in its group."""
    start: int
    """The place of its first token among the tokens of all picked rows."""
    tokens: int
    in_loss: bytes
    """[tokens] bits"""

    @property
    def losses(self) -> Ints:
        """[M] places of its loss tokens among the tokens of all picked rows."""
        bits = np.unpackbits(np.frombuffer(self.in_loss, np.uint8), count=self.tokens)
        return np.flatnonzero(bits) + self.start


def picked_rows(batch: Batch, most: int = MOST_TOKENS) -> list[PickedRow]:
    """Rows up to so many tokens, but the first one whatever its length. They begin with the group `step` modulo the number of groups, so that
    neither good nor bad, short nor long ones are favoured."""
    found: list[PickedRow] = []
    start = 0
    for number, ticket, place, row in _rotated(batch):
        if start and start + len(row.tokens) > most:
            break
        in_loss = np.zeros(len(row.tokens), bool)
        in_loss[_losses(_mask_of(row), np.array(row.logprobs, np.float64))] = True
        bits = np.packbits(in_loss).tobytes()
        found.append(PickedRow(number, ticket, place, start=start, tokens=len(row.tokens), in_loss=bits))
        start += len(row.tokens)
    return found


def _rotated(batch: Batch) -> Iterator[tuple[int, int, int, Row]]:
    """Yields the rows of the step from one of its groups on: number in the step, ticket, number in the group, row."""
    numbered, number = [], 0
    for group in batch.groups:
        numbered.append([(number + place, group.ticket, place, row) for place, row in enumerate(group.rows)])
        number += len(group.all_rows)
    first = batch.step % max(1, len(numbered))
    for rows in (*numbered[first:], *numbered[:first]):
        yield from rows
