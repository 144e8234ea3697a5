"""Rows that begin alike, as trees: a tree holds every token that several rows share once.

They are radix trees (Morrison 1968): a node is a run of tokens that no row leaves half-way, and its children are the continuations. A
group's prompt, the turns that paths of an episode have in common, forks, and completions that happen to begin alike are treated the
same. A tree may be as deep as an episode has turns, so nothing here recurses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.batches import Row
from headrace.core.sampling_masks import decode_set
from headrace.core.types import RoutingTrace, SamplingMask, TeacherTrace
from headrace.trainer.packing.pack import ROOT, Kept, Pack, Segment

T = TypeVar("T")

LEAST_SAVED = 4
"""Tokens that a share of sampled tokens must save to be worth the attention calls of a split (measured on CPU, SmolLM2-135M)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Path:
    """One row of a batch, as a path through a tree."""

    row: Row
    loss: NDArray[np.int64]
    """Places in `row.tokens` that are in the loss; never empty."""
    trajectory: NDArray[np.int64]
    """The trajectory of each of these tokens, as a number within the step."""
    weight: NDArray[np.float32]
    """Their weights in the loss of the step."""
    tokens: NDArray[np.int64]
    """[T] the forwarded tokens. The last loss token and all behind it are left out: they predict no loss token."""
    routes: NDArray[np.int16] | None
    """[T, layers · k] recorded experts, -1 where there are none; None if no row of the step has any."""
    number: int = 0
    """The number of its row in the step."""


@dataclass(eq=False)
class TreeNode:
    """`source.tokens[start:end]`, which all nodes below share. The tokens before `start` belong to its ancestors."""

    source: Path
    start: int
    end: int
    branches: dict[int, list[TreeNode]] = field(default_factory=dict)
    """The children by their first token; several begin with the same one where their recorded experts differ."""
    ending: list[Path] = field(default_factory=list)
    """Paths that end here."""

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def children(self) -> list[TreeNode]:
        return [child for alike in self.branches.values() for child in alike]

    def adopt(self, child: TreeNode) -> None:
        self.branches.setdefault(int(child.source.tokens[child.start]), []).append(child)


def path_of(
    row: Row,
    loss: Sequence[int],
    *,
    trajectory: NDArray[np.int64],
    weight: NDArray[np.float32],
    routed: tuple[int, int] | None,
    number: int,
) -> Path:
    """`routed`: (layers, k) of the recorded experts; None if no row of the step has any. `number`: that of the row in the step."""
    tokens = np.array(row.prompt + row.tokens[: loss[-1]], np.int64)
    routes = None if routed is None else _routes(row.routing, len(tokens), routed)
    return Path(
        row=row,
        loss=np.array(loss, np.int64),
        trajectory=trajectory,
        weight=weight,
        tokens=tokens,
        routes=routes,
        number=number,
    )


def _routes(trace: RoutingTrace | None, length: int, routed: tuple[int, int]) -> NDArray[np.int16]:
    width = routed[0] * routed[1]
    routes = np.full((length, width), -1, np.int16)
    if trace is not None:
        assert (trace.layers, trace.k) == routed, "the rows of a step come from one model"
        experts = np.frombuffer(trace.experts, np.uint8 if trace.width == 1 else np.uint16).reshape(-1, width)
        routes[: len(experts)] = experts[:length]
    return routes


def grow(paths: Iterable[Path]) -> list[TreeNode]:
    """The trees of all paths. Children are ordered by their first path."""
    above = None
    for path in paths:
        above = above or TreeNode(path, 0, 0)
        _insert(above, path)
    return above.children if above else []


def _insert(node: TreeNode, path: Path) -> None:
    while node.end < len(path.tokens):
        alike = node.branches.get(int(path.tokens[node.end]), [])
        shares = [_shared(child, path) for child in alike]
        place = next((i for i, share in enumerate(shares) if share), None)
        if place is None:
            below = TreeNode(path, node.end, len(path.tokens))
            node.adopt(below)
            node = below
        else:
            if shares[place] < alike[place].length:
                alike[place] = _split(alike[place], shares[place])
            node = alike[place]
    node.ending.append(path)


def _shared(node: TreeNode, path: Path) -> int:
    """The number of a node's first tokens that the path shares: the same token with the same recorded experts, or in both prompts."""
    here = slice(node.start, min(node.end, len(path.tokens)))
    same = node.source.tokens[here] == path.tokens[here]
    if node.source.routes is not None and path.routes is not None:
        routed_alike = (node.source.routes[here] == path.routes[here]).all(1)
        prompt = min(len(node.source.row.prompt), len(path.row.prompt))
        routed_alike[: max(prompt - node.start, 0)] = True
        same &= routed_alike
    return len(same) if same.all() else int(same.argmin())


def _split(node: TreeNode, length: int) -> TreeNode:
    upper = TreeNode(node.source, node.start, node.start + length)
    node.start += length
    upper.adopt(node)
    return upper


def preorder(roots: Iterable[TreeNode]) -> Iterator[TreeNode]:
    stack = list(roots)[::-1]
    while stack:
        node = stack.pop()
        yield node
        stack += node.children[::-1]


def prune(roots: Sequence[TreeNode], least: int) -> None:
    """Undoes shares of sampled tokens that save less than `least` tokens: each row has its own copy again."""
    for node in reversed(list(preorder(roots))):  # children before their parents
        children = node.children
        node.branches = {}
        for child in children:
            for kept in [child] if _is_worth_it(child, least) else _dissolved(child):
                node.adopt(kept)


def _is_worth_it(node: TreeNode, least: int) -> bool:
    copies = len(node.children) + bool(node.ending)
    return copies < 2 or node.start < len(node.source.row.prompt) or (copies - 1) * node.length >= least


def _dissolved(node: TreeNode) -> Iterator[TreeNode]:
    for child in node.children:
        child.start = node.start
        yield child
    if node.ending:
        yield TreeNode(node.source, node.start, node.end, ending=node.ending)


def size_of(root: TreeNode) -> int:
    """The number of tokens of a tree."""
    return sum(node.length for node in preorder([root]))


def cut(root: TreeNode, budget: int) -> list[TreeNode]:
    """Cuts a tree into trees of at most `budget` tokens (or of a single leaf), which repeat what they share.

    No two of them fit into the budget together, so no microbatch holds a repeated token twice.
    """
    sizes: dict[TreeNode, int] = {}
    pieces: dict[TreeNode, list[TreeNode]] = {}
    for node in reversed(list(preorder([root]))):
        children = node.children
        sizes[node] = node.length + sum(sizes[child] for child in children)
        pieces[node] = [node]
        if children and sizes[node] > budget - node.start:
            parts = [part for child in children for part in pieces[child]]
            pieces[node] = _cut_below(node, first_fit(parts, sizes.__getitem__, budget - node.end))
            sizes |= {piece: size_of(piece) for piece in pieces[node]}
    return pieces[root]


def _cut_below(node: TreeNode, bins: Sequence[Sequence[TreeNode]]) -> list[TreeNode]:
    pieces = []
    for i, parts in enumerate(bins):
        ending = [] if i else node.ending
        if len(parts) == 1 and not ending:  # a single continuation: one run of tokens
            (piece,) = parts
            piece.start = node.start
        else:
            piece = TreeNode(node.source, node.start, node.end, ending=ending)
            for part in parts:
                piece.adopt(part)
        pieces.append(piece)
    return pieces


def first_fit(items: Sequence[T], size: Callable[[T], int], room: int) -> list[list[T]]:
    """First fit, largest first: within 11/9 of the fewest bins (Johnson 1973). An item larger than `room` has a bin of its own."""
    bins: list[tuple[int, list[T]]] = []
    for length, item in sorted(((size(item), item) for item in items), key=lambda sized: -sized[0]):
        fits = next((i for i, (used, _) in enumerate(bins) if used + length <= room), None)
        if fits is None:
            bins.append((length, [item]))
        else:
            used, members = bins[fits]
            bins[fits] = (used + length, [*members, item])
    return [members for _, members in bins]


# --- Makes the columns of a pack from its trees.


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
    trajectory = _joined([path.trajectory for path, _ in paths])
    pack = Pack(
        tokens=_joined([node.source.tokens[node.start : node.end] for node in nodes]),
        positions=_joined([np.arange(node.start, node.end) for node in nodes]),
        segments=segments,
        predictor=_joined([places[len(path.row.prompt) - 1 + path.loss] for path, places in paths]),
        target=_joined([_chosen(path, lambda row: row.tokens, np.int64) for path, _ in paths]),
        sampled=_joined([_chosen(path, lambda row: row.logprobs, np.float32) for path, _ in paths]),
        advantage=_joined([_chosen(path, lambda row: row.advantages, np.float32) for path, _ in paths]),
        weight=_joined([path.weight for path, _ in paths]),
        sequence=_numbered(trajectory),
        trajectory=trajectory,
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
    return Kept(ids, offsets, _table([decode_set(coded) for coded in number]), torch.from_numpy(set_of))


def _sets_of(mask: SamplingMask | None, loss: Ints, number: dict[bytes, int]) -> Ints:
    """Returns [loss tokens] the number of each one's set, -1 for none. Sets are numbered in the order in which they are met."""
    if mask is None or not mask.sets:
        return np.full(len(loss), -1, np.int64)
    used = np.frombuffer(mask.set_of, np.int32)[loss]
    table = np.full(len(mask.sets) + 1, -1, np.int64)
    for place in sorted(set(used.tolist()) - {-1}):
        table[place] = number.setdefault(mask.sets[place], len(number))
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
