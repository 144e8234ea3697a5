"""Rows that begin alike, as trees: a tree holds every token that several rows share once.

They are radix trees (Morrison 1968): a node is a run of tokens that no row leaves half-way, and its children are the continuations. A
group's prompt, the turns that paths of an episode have in common, forks, and completions that happen to begin alike are treated the
same. A tree may be as deep as an episode has turns, so nothing here recurses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from headrace.trainer.dealing.row_paths import Path

T = TypeVar("T")

LEAST_SAVED = 4
"""Tokens that a share of sampled tokens must save to be worth the attention calls of a split (measured on CPU, SmolLM2-135M)."""


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
    if trace := node.source.routing or path.routing:
        routed, source = (trace.layers, trace.k), node.source
        routed_alike = (source.routes(here.start, here.stop, routed) == path.routes(here.start, here.stop, routed)).all(
            1
        )
        prompt = min(source.prompt, path.prompt)
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
    return copies < 2 or node.start < node.source.prompt or (copies - 1) * node.length >= least


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
    sized = sorted(((size(item), item) for item in items), key=lambda sized: -sized[0])
    bins: list[list[T]] = []
    leaves = 1 << max(len(sized) - 1, 0).bit_length()
    left = [room] * (
        2 * leaves
    )  # a heap-ordered tree: the room in bin i is left[leaves + i], in the roomiest below a node that of the node
    for length, item in sized:
        node = 1
        if length > left[1]:  # too large for any: the first empty bin
            node = leaves + len(bins)
        while node < leaves:
            node = 2 * node if left[2 * node] >= length else 2 * node + 1
        if (place := node - leaves) == len(bins):
            bins.append([])
        bins[place].append(item)
        left[node] -= length
        while node := node // 2:
            left[node] = max(left[2 * node], left[2 * node + 1])
    return bins
