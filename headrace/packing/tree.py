"""Rows with a common beginning, as trees: every token that several rows share is in them once.

A radix tree (Morrison 1968): a node is a run of tokens that every path through it contains whole, and its children are
the continuations. A group's prompt, the turns that paths of an episode share, forks, and completions that happen to
begin alike are all treated in the same way. Trees may be as deep as an episode has turns, so nothing here recurses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.types import RoutingTrace, Row

T = TypeVar("T")

LEAST_SAVED = 4
"""Number of tokens that sharing sampled tokens must save to be worth the attention calls of a split (measured on CPU,
SmolLM2-135M)."""


@dataclass(frozen=True, eq=False)
class Path:
    """The columns of one row."""

    row: Row
    loss: NDArray[np.int64]
    """Places in `row.tokens` that are in the loss; never empty."""
    weight: float
    """The weight of each of them."""
    tokens: NDArray[np.int64]
    """[T] the forwarded tokens: the last loss token, and all tokens after it, predict nothing that counts."""
    routes: NDArray[np.int16] | None
    """[T, layers · k] recorded experts, -1 if there are none; None if no row of the step has any."""


@dataclass(eq=False)
class Node:
    """`source.tokens[start:end]`, which all descendants share; the tokens before `start` are its ancestors."""

    source: Path
    start: int
    end: int
    branches: dict[int, list[Node]] = field(default_factory=dict)
    """First token -> the children that begin with it: several if recorded experts differ."""
    ending: list[Path] = field(default_factory=list)
    """Paths that end here."""

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def children(self) -> list[Node]:
        return [child for alike in self.branches.values() for child in alike]

    def adopt(self, child: Node) -> None:
        self.branches.setdefault(int(child.source.tokens[child.start]), []).append(child)


def path_of(row: Row, loss: Sequence[int], weight: float, routed: tuple[int, int] | None) -> Path:
    """Makes the columns of a row. `routed`: (layers, k) of the step's rows that have recorded experts."""
    tokens = np.array(row.prompt + row.tokens[: loss[-1]], np.int64)
    routes = None if routed is None else _routes(row.routing, len(tokens), routed)
    return Path(row, np.array(loss, np.int64), weight, tokens, routes)


def _routes(trace: RoutingTrace | None, length: int, routed: tuple[int, int]) -> NDArray[np.int16]:
    width = routed[0] * routed[1]
    routes = np.full((length, width), -1, np.int16)
    if trace is not None:
        assert (trace.layers, trace.k) == routed, "the rows of a step come from one model"
        experts = np.frombuffer(trace.experts, np.uint8 if trace.width == 1 else np.uint16).reshape(-1, width)
        routes[: len(experts)] = experts[:length]
    return routes


def grow(paths: Iterable[Path]) -> list[Node]:
    """Returns the trees of all paths, with children in the order of their first path."""
    above = None
    for path in paths:
        above = above or Node(path, 0, 0)
        _insert(above, path)
    return above.children if above else []


def _insert(node: Node, path: Path) -> None:
    while node.end < len(path.tokens):
        alike = node.branches.get(int(path.tokens[node.end]), [])
        shares = [_shared(child, path) for child in alike]
        place = next((i for i, share in enumerate(shares) if share), None)
        if place is None:
            below = Node(path, node.end, len(path.tokens))
            node.adopt(below)
            node = below
        else:
            if shares[place] < alike[place].length:
                alike[place] = _split(alike[place], shares[place])
            node = alike[place]
    node.ending.append(path)


def _shared(node: Node, path: Path) -> int:
    """Returns the number of a node's tokens that the path shares. Recorded experts must be equal, or both in a prompt."""
    here = slice(node.start, min(node.end, len(path.tokens)))
    same = node.source.tokens[here] == path.tokens[here]
    if node.source.routes is not None and path.routes is not None:
        routed_alike = (node.source.routes[here] == path.routes[here]).all(1)
        prompt = min(len(node.source.row.prompt), len(path.row.prompt))
        routed_alike[: max(prompt - node.start, 0)] = True
        same &= routed_alike
    return len(same) if same.all() else int(same.argmin())


def _split(node: Node, length: int) -> Node:
    upper = Node(node.source, node.start, node.start + length)
    node.start += length
    upper.adopt(node)
    return upper


def preorder(roots: Iterable[Node]) -> Iterator[Node]:
    stack = list(roots)[::-1]
    while stack:
        node = stack.pop()
        yield node
        stack += node.children[::-1]


def prune(roots: Sequence[Node], least: int) -> None:
    """Undoes shares of sampled tokens that save less than `least` tokens: each row gets its own copy again."""
    for node in reversed(list(preorder(roots))):  # children before their parents
        children = node.children
        node.branches = {}
        for child in children:
            for kept in [child] if _is_worth_it(child, least) else _dissolved(child):
                node.adopt(kept)


def _is_worth_it(node: Node, least: int) -> bool:
    copies = len(node.children) + bool(node.ending)
    return copies < 2 or node.start < len(node.source.row.prompt) or (copies - 1) * node.length >= least


def _dissolved(node: Node) -> Iterator[Node]:
    for child in node.children:
        child.start = node.start
        yield child
    if node.ending:
        yield Node(node.source, node.start, node.end, ending=node.ending)


def size_of(root: Node) -> int:
    """Counts the tokens of a tree."""
    return sum(node.length for node in preorder([root]))


def cut(root: Node, budget: int) -> list[Node]:
    """Returns the tree, or several that each have at most `budget` tokens (or a single leaf) and repeat their shared
    tokens.

    No two of them would fit together, so that no microbatch repeats tokens because of a cut.
    """
    sizes: dict[Node, int] = {}
    pieces: dict[Node, list[Node]] = {}
    for node in reversed(list(preorder([root]))):
        children = node.children
        sizes[node] = node.length + sum(sizes[child] for child in children)
        pieces[node] = [node]
        if children and sizes[node] > budget - node.start:
            parts = [part for child in children for part in pieces[child]]
            pieces[node] = _cut_below(node, first_fit(parts, sizes.__getitem__, budget - node.end))
            sizes |= {piece: size_of(piece) for piece in pieces[node]}
    return pieces[root]


def _cut_below(node: Node, bins: Sequence[Sequence[Node]]) -> list[Node]:
    pieces = []
    for i, parts in enumerate(bins):
        ending = [] if i else node.ending
        if len(parts) == 1 and not ending:  # one way to go on: one run of tokens
            (piece,) = parts
            piece.start = node.start
        else:
            piece = Node(node.source, node.start, node.end, ending=ending)
            for part in parts:
                piece.adopt(part)
        pieces.append(piece)
    return pieces


def first_fit(items: Sequence[T], size: Callable[[T], int], room: int) -> list[list[T]]:
    """Packs by first fit, largest first: within 11/9 of the fewest bins (Johnson 1973). An item larger than `room` is
    alone."""
    bins: list[tuple[int, list[T]]] = []
    for length, item in sorted(((size(item), item) for item in items), key=lambda sized: -sized[0]):
        fits = next((i for i, (used, _) in enumerate(bins) if used + length <= room), None)
        if fits is None:
            bins.append((length, [item]))
        else:
            used, members = bins[fits]
            bins[fits] = (used + length, [*members, item])
    return [members for _, members in bins]
