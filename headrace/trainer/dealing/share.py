"""The share of a rank in an optimizer step, as it is sent: numbers of the step, the trees of its microbatches, and blocks of rows.

    sender      deal(rows) -> DealtStep of each minibatch -> `packed` -> ShareHead, and `blocks`, one after the other
    receiver    ShareHead, RowBlocks -> `received` -> StepShare

Columns are raw: 4 bytes for a token and for its log-prob, a bit for whether it is in the loss, and runs of equal values for what is mostly
the same for many tokens. Nothing is decoded number by number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.algo.training_rows import firsts_of, trajectories_of
from headrace.core.batches import Batch
from headrace.core.types import RoutingTrace, Struct
from headrace.trainer.dealing.deal import (
    Dealing,
    DealtStep,
    Microbatch,
    deal,
    minibatch_of,
    minibatches_of,
    step_paths,
)
from headrace.trainer.dealing.row_paths import KeptIds, Path, PickedRow, TeacherNumbers, picked_rows
from headrace.trainer.dealing.trees import TreeNode, preorder

BLOCK_TOKENS = 1 << 17
"""Tokens after which a block of rows ends: about 1 MB. A row is never cut."""

TOKEN_BYTES = 14
"""Most bytes of a token in a block, without recorded experts and sampling masks."""

MOST_TRAJECTORIES = 1 << 24
"""Most trajectories of a step: their numbers travel as float32 among ranks (`step/whole_step.py`)."""


class StepHead(Struct, frozen=True, kw_only=True):
    """The part of a `Batch` that every rank knows, beside its rows."""

    step: int
    temperature: float
    adapter: str
    skippable: bool
    steps: int
    pairs: list[bytes]
    """[K, 2] int64 of each minibatch: chosen and rejected trajectories of the step"""
    picked: list[PickedRow]
    firsts: tuple[int, ...] = ()
    """The first trajectory of each group."""


class Column(Struct, frozen=True):
    """Numbers of one dtype. Those between two starts are equal; without starts each is given."""

    values: bytes
    starts: bytes = b""
    """int32"""


class KeptBlock(Struct, frozen=True):
    """`row_paths.KeptIds`"""

    ids: bytes
    counts: bytes
    sets: tuple[bytes, ...]
    set_of: bytes


class TeacherBlock(Struct, frozen=True):
    """`row_paths.TeacherNumbers`"""

    logprobs: bytes
    k: int
    top_ids: bytes
    top_logprobs: bytes


class RowBlock(Struct, frozen=True, kw_only=True):
    """R rows, each a `row_paths.Path`, with their columns joined."""

    numbers: bytes
    """[R] int32"""
    prompts: bytes
    """[R] int32"""
    lengths: bytes
    """[R] int32: forwarded tokens"""
    losses: bytes
    """[R] int32: loss tokens"""
    last: bytes
    """[R] int32: the last loss token, which is not forwarded; 0 for a row without any"""
    apart: bytes
    """[R] int8"""
    temperatures: bytes
    """[R] float64"""
    tokens: bytes
    """int32"""
    in_loss: bytes
    """bits: for each token behind the prompt, the last loss token included"""
    sampled: bytes
    """float32"""
    advantage: Column
    """float32"""
    version: Column
    """int32"""
    trajectory: Column
    """int32"""
    turn: Column
    """int32"""
    unmixed: bytes
    """bits; empty if all are"""
    routing: list[RoutingTrace | None] = []
    kept: list[KeptBlock | None] = []
    teacher: list[TeacherBlock | None] = []
    """Empty where no row has any."""


class MinibatchHead(Struct, frozen=True, kw_only=True):
    """A minibatch of a share without its rows."""

    nodes: bytes
    """[n, 4] int32: of each node in preorder the row that has its tokens, their start and end, and its parent's number in its microbatch"""
    endings: bytes
    """[e, 2] int32: node and row, for each row that ends there"""
    counts: bytes
    """[microbatches, 2] int32: nodes and endings of each"""
    filling: int
    levels: list[int]
    trajectories: bytes
    """int32: loss tokens of each trajectory of the step"""
    routed: tuple[int, int] | None
    dropped_tokens: int
    split: bool


class ShareHead(Struct, frozen=True, kw_only=True):
    """A share without its rows."""

    step: StepHead
    rows: int
    """Rows in all blocks."""
    minibatches: list[MinibatchHead]
    demonstrations: list[MinibatchHead] = []


@dataclass(frozen=True)
class StepShare:
    """All that a rank is given for an optimizer step."""

    head: StepHead
    minibatches: Sequence[DealtStep]
    demonstrations: Sequence[DealtStep] = ()
    """Demonstrations beside each minibatch; empty without any."""


@dataclass(frozen=True)
class PackedShare:
    """A share that is ready to be sent."""

    head: ShareHead
    paths: Sequence[Path]

    def blocks(self, tokens: int = BLOCK_TOKENS) -> Iterator[RowBlock]:
        """Yields the rows in blocks, each of about so many tokens. Makes one when it is asked for."""
        rows: list[Path] = []
        count = 0
        for path in self.paths:
            rows.append(path)
            count += len(path.tokens)
            if count >= tokens:
                yield _block(rows)
                rows, count = [], 0
        if rows:
            yield _block(rows)


def head_of(batch: Batch, minibatches: int = 1) -> StepHead:
    """`minibatches`: those of the step. Numbers of single tokens are those before the first update, so only rows of the first are picked."""
    groups, firsts = batch.groups, firsts_of(batch.groups)
    pairs: list[list[tuple[int, int]]] = [[] for _ in range(minibatches)]
    places = [minibatch_of(number, len(groups), minibatches) for number in range(len(groups))]
    for place, group, first in zip(places, groups, firsts, strict=True):
        pairs[place] += [(first + chosen, first + rejected) for chosen, rejected in group.pairs]
    return StepHead(
        step=batch.step,
        temperature=batch.temperature,
        adapter=batch.adapter,
        skippable=batch.skippable,
        steps=batch.steps,
        pairs=[np.array(own, np.int64).tobytes() for own in pairs],
        firsts=tuple(firsts),
        picked=picked_rows(msgspec.structs.replace(batch, groups=groups[: places.count(0)])),
    )


def dealt_of(batch: Batch, dealing: Dealing) -> list[StepShare]:
    """The share of every rank in a step."""
    head = head_of(batch, dealing.minibatches)
    step = step_paths(batch.rows, trajectories_of(batch.groups))
    minibatches = minibatches_of(step, [len(group.all_rows) for group in batch.groups], dealing.minibatches)
    dealt = list(zip(*(deal(minibatch, dealing) for minibatch in minibatches), strict=True))
    if not batch.demonstrations:
        return [StepShare(head, mine) for mine in dealt]
    given = step_paths([one.row(batch.step) for one in batch.demonstrations])
    beside = minibatches_of(given, [1] * len(batch.demonstrations), dealing.minibatches)
    answers = zip(*(deal(minibatch, dealing) for minibatch in beside), strict=True)
    return [StepShare(head, mine, own) for mine, own in zip(dealt, answers, strict=True)]


def shares_of(batch: Batch, dealing: Dealing) -> list[PackedShare]:
    """The share of every rank in a step, ready to be sent."""
    return [packed(share) for share in dealt_of(batch, dealing)]


def packed(share: StepShare) -> PackedShare:
    """The rows are those that end in the share's trees, and the beginnings of others whose tokens the trees take from them."""
    trees = [roots for dealt in (*share.minibatches, *share.demonstrations) for roots in dealt.microbatches]
    ends = [path for roots in trees for node in preorder(roots) for path in node.ending]
    place = {path: number for number, path in enumerate(ends)}
    whole = len(place)
    lent: dict[Path, int] = {}
    heads = [_minibatch_head(dealt, place, whole, lent) for dealt in share.minibatches]
    given = [_minibatch_head(dealt, place, whole, lent) for dealt in share.demonstrations]
    paths = [_beginning(path, lent[path]) if path in lent else path for path in place]
    head = ShareHead(step=share.head, rows=len(paths), minibatches=heads, demonstrations=given)
    return PackedShare(head, paths)


def _minibatch_head(dealt: DealtStep, place: dict[Path, int], whole: int, lent: dict[Path, int]) -> MinibatchHead:
    """`place`: the number of each row in the share; from `whole` on, rows of which only the tokens up to `lent` are sent. Adds rows to both."""
    nodes: list[tuple[int, int, int, int]] = []
    endings: list[tuple[int, int]] = []
    counts: list[tuple[int, int]] = []
    for roots in dealt.microbatches:
        before = len(nodes), len(endings)
        numbers: dict[TreeNode, int] = {}
        parents = {child: node for node in preorder(roots) for child in node.children}
        for node in preorder(roots):
            numbers[node] = len(numbers)
            parent = numbers[parents[node]] if node in parents else -1
            source = place.setdefault(node.source, len(place))
            if source >= whole:
                lent[node.source] = max(lent.get(node.source, 0), node.end)
            nodes.append((source, node.start, node.end, parent))
            endings += [(numbers[node], place[path]) for path in node.ending]
        counts.append((len(nodes) - before[0], len(endings) - before[1]))
    return MinibatchHead(
        nodes=_int32(nodes),
        endings=_int32(endings),
        counts=_int32(counts),
        filling=dealt.filling,
        levels=list(dealt.levels),
        trajectories=_int32(dealt.counts),
        routed=dealt.routed,
        dropped_tokens=dealt.dropped_tokens,
        split=dealt.split,
    )


def received(head: ShareHead, blocks: Sequence[RowBlock]) -> StepShare:
    """Raises ValueError if rows are missing."""
    paths = [path for block in blocks for path in _rows(block)]
    if len(paths) != head.rows:
        raise ValueError(f"the share of step {head.step.step} has {head.rows} rows, and {len(paths)} were received")
    made, given = ([_dealt(one, paths) for one in heads] for heads in (head.minibatches, head.demonstrations))
    return StepShare(head.step, made, given)


def _dealt(head: MinibatchHead, paths: Sequence[Path]) -> DealtStep:
    nodes, endings = _numbers(head.nodes, 4), _numbers(head.endings, 2)
    microbatches: list[Microbatch] = []
    for node_count, ending_count in _numbers(head.counts, 2):
        here, nodes = nodes[:node_count], nodes[node_count:]
        ending, endings = endings[:ending_count], endings[ending_count:]
        microbatches.append(_trees(here, ending, paths))
    return DealtStep(
        microbatches=microbatches,
        filling=head.filling,
        levels=head.levels,
        counts=np.frombuffer(head.trajectories, np.int32).astype(np.int64),
        routed=head.routed,
        dropped_tokens=head.dropped_tokens,
        split=head.split,
    )


def _trees(nodes: Sequence[Sequence[int]], endings: Sequence[Sequence[int]], paths: Sequence[Path]) -> list[TreeNode]:
    made = [TreeNode(paths[source], start, end) for source, start, end, _ in nodes]
    roots = []
    for node, (*_, parent) in zip(made, nodes, strict=True):
        if parent < 0:
            roots.append(node)
        else:
            made[parent].adopt(node)
    for number, row in endings:
        made[number].ending.append(paths[row])
    return roots


def _beginning(path: Path, end: int) -> Path:
    """A row that lends its first tokens to others and is trained elsewhere."""
    none: dict[str, Any] = {
        name: getattr(path, name)[:0]
        for name in ("loss", "target", "sampled", "advantage", "version", "trajectory", "turn", "unmixed")
    }
    return replace(path, tokens=path.tokens[:end], kept=None, teacher=None, **none)


# --- Rows in blocks


def _block(rows: Sequence[Path]) -> RowBlock:
    in_loss = [np.zeros(int(row.loss[-1]) + 1 if len(row.loss) else 0, bool) for row in rows]
    for bits, row in zip(in_loss, rows, strict=True):
        bits[row.loss] = True
    unmixed = np.concatenate([row.unmixed for row in rows])
    return RowBlock(
        numbers=_int32([row.number for row in rows]),
        prompts=_int32([row.prompt for row in rows]),
        lengths=_int32([len(row.tokens) for row in rows]),
        losses=_int32([len(row.loss) for row in rows]),
        last=_int32([row.target[-1] if len(row.target) else 0 for row in rows]),
        apart=bytes(row.apart for row in rows),
        temperatures=np.array([row.temperature for row in rows], np.float64).tobytes(),
        tokens=_joined(rows, lambda row: row.tokens),
        in_loss=_bits(np.concatenate(in_loss)),
        sampled=_joined(rows, lambda row: row.sampled),
        advantage=_column(rows, lambda row: row.advantage),
        version=_column(rows, lambda row: row.version),
        trajectory=_column(rows, lambda row: row.trajectory),
        turn=_column(rows, lambda row: row.turn),
        unmixed=b"" if unmixed.all() else _bits(unmixed),
        routing=_some([_recorded(row) for row in rows]),
        kept=_some([_kept_block(row.kept) for row in rows]),
        teacher=_some([_teacher_block(row.teacher) for row in rows]),
    )


def _rows(block: RowBlock) -> Iterator[Path]:
    numbers, prompts, lengths, losses, last = (
        np.frombuffer(column, np.int32)
        for column in (block.numbers, block.prompts, block.lengths, block.losses, block.last)
    )
    total = int(losses.sum())
    temperatures = np.frombuffer(block.temperatures, np.float64)
    places = np.where(losses > 0, lengths - prompts + 1, 0)
    in_loss = _unpacked_bits(block.in_loss, int(places.sum()))
    tokens, sampled = np.frombuffer(block.tokens, np.int32), np.frombuffer(block.sampled, np.float32)
    advantage, version = _unpacked(block.advantage, np.float32, total), _unpacked(block.version, np.int32, total)
    trajectory, turn = (_unpacked(column, np.int32, total) for column in (block.trajectory, block.turn))
    unmixed = _unpacked_bits(block.unmixed, total) if block.unmixed else np.broadcast_to(np.ones(1, bool), total)
    starts = zip(*(np.cumsum([0, *column])[:-1].tolist() for column in (lengths, losses, places)), strict=True)
    for row, (start, first, place) in enumerate(starts):
        own = tokens[start : start + lengths[row]]
        mine = slice(first, first + losses[row])
        loss = np.flatnonzero(in_loss[place : place + places[row]]).astype(np.int32)
        target = np.append(own, last[row])[prompts[row] + loss]
        yield Path(
            number=int(numbers[row]),
            prompt=int(prompts[row]),
            tokens=own,
            loss=loss,
            target=target,
            sampled=sampled[mine],
            advantage=advantage[mine],
            version=version[mine],
            trajectory=trajectory[mine],
            turn=turn[mine],
            unmixed=unmixed[mine],
            apart=block.apart[row],
            temperature=float(temperatures[row]),
            routing=block.routing[row] if block.routing else None,
            kept=_kept_ids(block.kept[row]) if block.kept else None,
            teacher=_teacher_numbers(block.teacher[row]) if block.teacher else None,
        )


def _recorded(row: Path) -> RoutingTrace | None:
    """The experts of the forwarded tokens."""
    trace = row.routing
    if trace is None:
        return None
    return RoutingTrace(
        trace.layers, trace.k, trace.width, trace.experts[: len(row.tokens) * trace.layers * trace.k * trace.width]
    )


def _kept_block(kept: KeptIds | None) -> KeptBlock | None:
    if kept is None:
        return None
    return KeptBlock(kept.ids.tobytes(), kept.counts.tobytes(), kept.sets, kept.set_of.tobytes())


def _kept_ids(block: KeptBlock | None) -> KeptIds | None:
    if block is None:
        return None
    ids, counts, set_of = (np.frombuffer(column, np.int32) for column in (block.ids, block.counts, block.set_of))
    return KeptIds(ids=ids, counts=counts, sets=block.sets, set_of=set_of)


def _teacher_block(teacher: TeacherNumbers | None) -> TeacherBlock | None:
    if teacher is None:
        return None
    top = teacher.top_ids.tobytes(), teacher.top_logprobs.tobytes()
    return TeacherBlock(teacher.logprobs.tobytes(), teacher.k, *top)


def _teacher_numbers(block: TeacherBlock | None) -> TeacherNumbers | None:
    if block is None:
        return None
    logprobs = np.frombuffer(block.logprobs, np.float32)
    shape = len(logprobs), block.k
    return TeacherNumbers(
        logprobs=logprobs,
        k=block.k,
        top_ids=np.frombuffer(block.top_ids, np.int32).reshape(shape),
        top_logprobs=np.frombuffer(block.top_logprobs, np.float32).reshape(shape),
    )


def _some(values: list[Any]) -> list[Any]:
    return values if any(value is not None for value in values) else []


def _int32(values: Any) -> bytes:
    return np.array(values, np.int32).tobytes()


def _numbers(column: bytes, width: int) -> list[list[int]]:
    found: list[list[int]] = np.frombuffer(column, np.int32).reshape(-1, width).tolist()
    return found


def _joined(rows: Sequence[Path], column: Callable[[Path], NDArray[Any]]) -> bytes:
    return np.concatenate([column(row) for row in rows]).tobytes()


def _bits(values: NDArray[np.bool_]) -> bytes:
    return np.packbits(values).tobytes()


def _unpacked_bits(column: bytes, count: int) -> NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(column, np.uint8), count=count).astype(bool)


def _column(rows: Sequence[Path], column: Callable[[Path], NDArray[Any]]) -> Column:
    values: NDArray[Any] = np.concatenate([column(row) for row in rows])
    bits = values.view(np.int32)  # NaN is not NaN, and 0.0 is not -0.0
    starts = np.flatnonzero(np.concatenate([np.ones(min(len(bits), 1), bool), bits[1:] != bits[:-1]]))
    if 2 * len(starts) >= len(values):
        return Column(values.tobytes())
    return Column(values[starts].tobytes(), _int32(starts))


def _unpacked(column: Column, dtype: type, count: int) -> NDArray[Any]:
    values: NDArray[Any] = np.frombuffer(column.values, dtype)
    if not column.starts:
        return values
    starts = np.frombuffer(column.starts, np.int32)
    return np.repeat(values, np.diff(starts, append=count))
