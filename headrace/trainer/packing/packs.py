"""Makes the columns of a microbatch from its trees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.sampling_masks import decode_set
from headrace.trainer.dealing.row_paths import Ints, KeptIds, Path
from headrace.trainer.dealing.trees import TreeNode, preorder
from headrace.trainer.packing.pack import ROOT, Kept, Pack, Segment


def pack_trees(
    roots: Sequence[TreeNode], step: int, routed: tuple[int, int] | None, weights: NDArray[np.float32]
) -> tuple[Pack, int]:
    """Returns the pack and the number of its routing conflicts (`StepPlan.routing_conflicts`). `weights`: that of each token of every
    trajectory of the step."""
    nodes = list(preorder(roots))
    segments, path_places = _lay_out(nodes)
    paths = [(path, places) for node, places in path_places for path in node.ending]
    rows = [path for path, _ in paths]
    routing, conflicts = _routing(nodes, paths, routed)
    top_ids, top_logprobs = _top(paths)
    trajectory = _joined([path.trajectory.astype(np.int64) for path in rows])
    pack = Pack(
        tokens=_joined([node.source.tokens[node.start : node.end].astype(np.int64) for node in nodes]),
        positions=_joined([np.arange(node.start, node.end) for node in nodes]),
        segments=segments,
        predictor=_joined([places[path.prompt - 1 + path.loss] for path, places in paths]),
        target=_joined([path.target.astype(np.int64) for path in rows]),
        sampled=_joined([path.sampled for path in rows]),
        advantage=_joined([path.advantage for path in rows]),
        weight=_joined([weights[path.trajectory] for path in rows]),
        sequence=_numbered(trajectory),
        trajectory=trajectory,
        turn=_joined([path.turn.astype(np.int64) for path in rows]),
        row=_joined([np.full(len(path.loss), path.number) for path in rows]),
        lag=_joined([step - path.version.astype(np.float32) for path in rows]),
        apart=_joined([np.full(len(path.loss), path.apart, np.int8) for path in rows]),
        unmixed=_joined([path.unmixed for path in rows]),
        kept=_kept(rows),
        routing=routing,
        teacher=_joined([_teacher(path) for path in rows]) if any(path.teacher for path in rows) else None,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        temperature=rows[0].temperature,
    )
    return pack, conflicts


def _joined(parts: Sequence[NDArray[np.generic]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))


def _numbered(trajectory: Tensor) -> Tensor:
    """Returns numbers from 0 on in their place, in the order in which they are met."""
    _, first, which = np.unique(trajectory.numpy(), return_index=True, return_inverse=True)
    return torch.from_numpy(first.argsort().argsort()[which])


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


def _kept(paths: Sequence[Path]) -> Kept | None:
    number: dict[bytes, int] = {}
    set_of = np.concatenate([_sets_of(path.kept, len(path.loss), number) for path in paths])
    if not number and not any(path.kept is not None and len(path.kept.ids) for path in paths):
        return None
    counts = np.concatenate(
        [np.zeros(len(path.loss), np.int32) if path.kept is None else path.kept.counts for path in paths]
    )
    ids = _joined([np.zeros(0, np.int64), *(path.kept.ids.astype(np.int64) for path in paths if path.kept)])
    offsets = _joined([np.zeros(1, np.int64), counts.cumsum(dtype=np.int64)])
    if not number:
        return Kept(ids, offsets)
    return Kept(ids, offsets, _table([decode_set(coded) for coded in number]), torch.from_numpy(set_of))


def _sets_of(kept: KeptIds | None, count: int, number: dict[bytes, int]) -> Ints:
    """Returns [loss tokens] the number of each one's set, -1 for none. Sets are numbered in the order in which they are met."""
    if kept is None or not kept.sets:
        return np.full(count, -1, np.int64)
    table = np.full(len(kept.sets) + 1, -1, np.int64)
    for place in sorted(set(kept.set_of.tolist()) - {-1}):
        table[place] = number.setdefault(kept.sets[place], len(number))
    return table[kept.set_of]


def _table(sets: Sequence[NDArray[np.uint8]]) -> Tensor:
    table = np.zeros((len(sets), max(map(len, sets))), np.uint8)
    for row, bits in zip(table, sets, strict=True):
        row[: len(bits)] = bits
    return torch.from_numpy(table)


def _routing(
    nodes: Sequence[TreeNode], paths: Sequence[tuple[Path, Ints]], routed: tuple[int, int] | None
) -> tuple[Tensor | None, int]:
    """Returns the experts recorded by the first row that recorded any at a place, and the number of conflicts."""
    if routed is None:
        return None, 0
    routes = np.concatenate([node.source.routes(node.start, node.end, routed) for node in nodes])
    conflicts = 0
    for path, places in paths:
        own, used = path.routes(0, len(path.tokens), routed), routes[places]
        conflicts += int(((own != used) & (own >= 0) & (used >= 0)).any(1).sum())
        routes[places] = np.where(used < 0, own, used)
    return torch.from_numpy(routes.reshape(len(routes), *routed)), conflicts


def _teacher(path: Path) -> NDArray[np.float32]:
    return np.full(len(path.loss), np.nan, np.float32) if path.teacher is None else path.teacher.logprobs


def _top(paths: Sequence[tuple[Path, Ints]]) -> tuple[Tensor | None, Tensor | None]:
    width = max((path.teacher.k for path, _ in paths if path.teacher), default=0)
    if not width:
        return None, None
    ids = [np.zeros((len(path.loss), width), np.int64) for path, _ in paths]
    logprobs = [np.full((len(path.loss), width), -np.inf, np.float32) for path, _ in paths]
    for i, (path, _) in enumerate(paths):
        if (teacher := path.teacher) is not None and teacher.k:
            ids[i][:, : teacher.k] = teacher.top_ids
            logprobs[i][:, : teacher.k] = teacher.top_logprobs
    # a token without probability is padding, whatever its id
    for id_row, logprob_row in zip(ids, logprobs, strict=True):
        id_row[~(logprob_row > -np.inf)] = 0
        logprob_row[np.isnan(logprob_row)] = -np.inf
    return _joined(ids), _joined(logprobs)
