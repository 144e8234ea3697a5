"""Makes the columns of a pack from its trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.batches import Row
from headrace.core.sampling_masks import decode_set
from headrace.core.types import SamplingMask, TeacherTrace
from headrace.trainer.packing.pack import ROOT, Kept, Pack, Segment
from headrace.trainer.packing.tree import Path, TreeNode, preorder

T = TypeVar("T")
Ints = NDArray[np.int64]


def pack_trees(roots: Sequence[TreeNode], step: int, routed: tuple[int, int] | None) -> tuple[Pack, int]:
    """Returns the pack and the number of its routing conflicts (`StepPlan.routing_conflicts`)."""
    nodes = list(preorder(roots))
    segments, path_places = _lay_out(nodes)
    paths = [(path, places) for node, places in path_places for path in node.ending]
    routing, conflicts = _routing(nodes, paths, routed)
    lag = [step - np.array(path.row.versions, np.float32)[path.loss] for path, _ in paths]
    teachers = [path.row.teacher for path, _ in paths]
    top_ids, top_logprobs = _top(paths)
    pack = Pack(
        tokens=_joined([node.source.tokens[node.start : node.end] for node in nodes]),
        positions=_joined([np.arange(node.start, node.end) for node in nodes]),
        segments=segments,
        predictor=_joined([places[len(path.row.prompt) - 1 + path.loss] for path, places in paths]),
        target=_joined([_chosen(path, lambda row: row.tokens, np.int64) for path, _ in paths]),
        sampled=_joined([_chosen(path, lambda row: row.logprobs, np.float32) for path, _ in paths]),
        advantage=_joined([_chosen(path, lambda row: row.advantages, np.float32) for path, _ in paths]),
        weight=_joined([np.full(len(path.loss), path.weight, np.float32) for path, _ in paths]),
        sequence=_joined([np.full(len(path.loss), i) for i, (path, _) in enumerate(paths)]),
        row=_joined([np.full(len(path.loss), path.number) for path, _ in paths]),
        lag=_joined(lag),
        swapped=_joined([np.full(len(path.loss), _is_swapped(path.row)) for path, _ in paths]),
        unmixed=_joined([_unmixed(path) for path, _ in paths]),
        kept=_kept(paths),
        routing=routing,
        teacher=_joined([_teacher(path) for path, _ in paths]) if any(teachers) else None,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        temperature=paths[0][0].row.temperature,
    )
    return pack, conflicts


def _joined(parts: Sequence[NDArray[np.generic]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))


def _lay_out(nodes: Sequence[TreeNode]) -> tuple[tuple[Segment, ...], list[tuple[TreeNode, Ints]]]:
    """Returns a segment for every node, and for each node in which paths end, the places of all tokens of the path."""
    segments: list[Segment] = []
    path_places: list[tuple[TreeNode, Ints]] = []
    above: dict[TreeNode, tuple[int, Ints]] = {}  # by node: its parent's number, and the places of the path to it
    start = 0
    for number, node in enumerate(nodes):
        parent, places = above.pop(node, (ROOT, np.empty(0, np.int64)))
        segments.append(Segment(start, node.length, parent))
        places = np.concatenate([places, np.arange(start, start + node.length)])
        above |= dict.fromkeys(node.children, (number, places))
        if node.ending:
            path_places.append((node, places))
        start += node.length
    return tuple(segments), path_places


def _chosen(path: Path, column: Callable[[Row], Sequence[float]], dtype: type) -> NDArray[np.generic]:
    return np.array(column(path.row), dtype)[path.loss]


def _is_swapped(row: Row) -> bool:
    return len({version for version, mask in zip(row.versions, row.mask, strict=True) if mask}) > 1


def _unmixed(path: Path) -> NDArray[np.generic]:
    row = path.row
    if not row.kv_versions:
        return np.ones(len(path.loss), bool)
    return _chosen(path, lambda row: row.versions, np.int64) == _chosen(path, lambda row: row.kv_versions, np.int64)


def _kept(paths: Sequence[tuple[Path, Ints]]) -> Kept | None:
    rows = [_kept_of(path.row.sampling_mask, path.loss) for path, _ in paths]
    number: dict[bytes, int] = {}
    set_of = np.concatenate([_sets_of(path.row.sampling_mask, path.loss, number) for path, _ in paths])
    if not number and not any(len(ids) for ids, _ in rows):
        return None
    counts = np.concatenate([counts for _, counts in rows])
    ids, offsets = _joined([ids for ids, _ in rows]), _joined([np.zeros(1, np.int64), counts.cumsum()])
    if not number:
        return Kept(ids, offsets)
    return Kept(ids, offsets, _table([decode_set(one) for one in number]), torch.from_numpy(set_of))


def _sets_of(mask: SamplingMask | None, loss: Ints, number: dict[bytes, int]) -> Ints:
    """Returns [loss tokens] the number of each one's set, -1 for none. Sets are numbered in the order in which they are met."""
    if mask is None or not mask.sets:
        return np.full(len(loss), -1, np.int64)
    used = np.frombuffer(mask.set_of, np.int32)[loss]
    table = np.full(len(mask.sets) + 1, -1, np.int64)
    for one in sorted(set(used.tolist()) - {-1}):
        table[one] = number.setdefault(mask.sets[one], len(number))
    return table[used]


def _table(sets: Sequence[NDArray[np.uint8]]) -> Tensor:
    table = np.zeros((len(sets), max(map(len, sets))), np.uint8)
    for row, bits in zip(table, sets, strict=True):
        row[: len(bits)] = bits
    return torch.from_numpy(table)


def _kept_of(mask: SamplingMask | None, loss: Ints) -> tuple[Ints, Ints]:
    """Returns the ids, and their number at each place."""
    if mask is None:
        return np.empty(0, np.int64), np.zeros(len(loss), np.int64)
    offsets = np.frombuffer(mask.offsets, np.int64)
    counts = offsets[loss + 1] - offsets[loss]
    ends = counts.cumsum()
    source = np.repeat(offsets[loss] - (ends - counts), counts) + np.arange(counts.sum())
    return np.frombuffer(mask.token_ids, np.int32)[source].astype(np.int64), counts


def _routing(
    nodes: Sequence[TreeNode], paths: Sequence[tuple[Path, Ints]], routed: tuple[int, int] | None
) -> tuple[Tensor | None, int]:
    """Returns the experts recorded by the first row that recorded any at a place, and the number of conflicts."""
    if routed is None:
        return None, 0
    routes = np.concatenate([_routes_of(node.source)[node.start : node.end] for node in nodes])
    conflicts = 0
    for path, places in paths:
        own, used = _routes_of(path), routes[places]
        conflicts += int(((own != used) & (own >= 0) & (used >= 0)).any(1).sum())
        routes[places] = np.where(used < 0, own, used)
    return torch.from_numpy(routes.reshape(len(routes), *routed)), conflicts


def _routes_of(path: Path) -> NDArray[np.int16]:
    assert path.routes is not None
    return path.routes


def _teacher(path: Path) -> NDArray[np.float32]:
    teacher = path.row.teacher
    if teacher is None:
        return np.full(len(path.loss), np.nan, np.float32)
    return np.array(teacher.logprobs, np.float32)[path.loss]


def _top(paths: Sequence[tuple[Path, Ints]]) -> tuple[Tensor | None, Tensor | None]:
    width = max((_width(path.row.teacher) for path, _ in paths), default=0)
    if not width:
        return None, None
    ids = [np.zeros((len(path.loss), width), np.int64) for path, _ in paths]
    logprobs = [np.full((len(path.loss), width), -np.inf, np.float32) for path, _ in paths]
    for i, (path, _) in enumerate(paths):
        teacher = path.row.teacher
        if teacher is not None and teacher.top is not None and teacher.top.k:
            k = teacher.top.k
            ids[i][:, :k] = np.frombuffer(teacher.top.tokens, np.int32).reshape(-1, k)[path.loss]
            logprobs[i][:, :k] = np.frombuffer(teacher.top.logprobs, np.float32).reshape(-1, k)[path.loss]
    # a token without probability is padding, whatever its id
    for one, other in zip(ids, logprobs, strict=True):
        one[~(other > -np.inf)] = 0
        other[np.isnan(other)] = -np.inf
    return _joined(ids), _joined(logprobs)


def _width(teacher: TeacherTrace | None) -> int:
    return teacher.top.k if teacher is not None and teacher.top is not None else 0
