"""The block mask of a tree: what it says of blocks is what each row's own path says of tokens."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from headrace.trainer.forward.flex import BLOCK, flex_kernel, is_right
from headrace.trainer.forward.tree_attention import tree_of
from headrace.trainer.packing import ROOT, Segment

CPU = torch.device("cpu")


def random_tree(seed: int, longest: int) -> tuple[Segment, ...]:
    """Segments in preorder: each follows its parent's other descendants."""
    rng, segments, open_ones = random.Random(seed), list[Segment](), list[int]()
    for number in range(rng.randint(1, 9)):
        depth = rng.randint(0, len(open_ones))
        parent = open_ones[depth - 1] if depth else ROOT
        start = segments[-1].end if segments else 0
        segments.append(Segment(start, rng.randint(1, longest), parent))
        open_ones = [*open_ones[:depth], number]
    return tuple(segments)


def along_the_path(segments: tuple[Segment, ...], window: int) -> Tensor:
    """[N, N] bool, by walking from each segment to its root."""
    seen = torch.zeros(segments[-1].end, segments[-1].end, dtype=torch.bool)
    for segment in segments:
        path, at = list(range(segment.start, segment.end)), segment.parent
        while at != ROOT:
            path = [*range(segments[at].start, segments[at].end), *path]
            at = segments[at].parent
        for place in range(len(path) - segment.length, len(path)):
            seen[path[place], path[max(0, place + 1 - window) if window else 0 : place + 1]] = True
    return seen


def listed(counts: Tensor, indices: Tensor) -> set[tuple[int, int]]:
    return {(q, int(k)) for q, count in enumerate(counts[0, 0]) for k in indices[0, 0, q, : int(count)]}


@given(st.integers(0, 10**6), st.sampled_from([5, 90, 300]), st.sampled_from([0, 0, 1, 30, 200]))
@settings(max_examples=40)
def test_blocks_are_those_of_the_paths(seed: int, longest: int, window: int):
    segments = random_tree(seed, longest)
    expected, count = along_the_path(segments, window), segments[-1].end
    mask = tree_of(segments, CPU, flex=True).mask(window, CPU)
    assert torch.equal(create_mask(mask.mask_mod, 1, 1, count, count, device="cpu")[0, 0], expected)
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    partly = listed(mask.kv_num_blocks, mask.kv_indices)
    wholly = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not partly & wholly
    for q in range(-(-count // BLOCK)):
        for k in range(-(-count // BLOCK)):
            part = expected[q * BLOCK : (q + 1) * BLOCK, k * BLOCK : (k + 1) * BLOCK]
            if (q, k) in wholly:
                assert part.all() and part.numel() == BLOCK * BLOCK
            elif (q, k) not in partly:
                assert not part.any()


def by_mask(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    """What the kernel has to compute."""
    count = query.shape[2]
    dense = create_mask(mask.mask_mod, 1, 1, count, count, device="cpu")
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=dense, scale=scale, enable_gqa=True
    )


def blind(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    """A kernel that leaves the mask out within blocks that are seen in part."""
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=True
    )


def test_the_kernel_is_tried_before_it_is_trusted():
    assert is_right(by_mask, CPU, torch.float32) and is_right(by_mask, CPU, torch.bfloat16)
    assert not is_right(blind, CPU, torch.float32)
    assert not is_right(lambda q, k, *rest: by_mask(q, k.detach() + 0 * k, *rest), CPU, torch.float32)
    assert flex_kernel(CPU, torch.bfloat16, 64) is None


@pytest.mark.slow
def test_flex_attention_itself_takes_the_mask():
    """Its forward pass on a CPU, eagerly: the lists of blocks are not read there, the lengths and the mask are."""
    from headrace.trainer.forward.flex import flex_calls

    segments = random_tree(3, 90)
    mask = tree_of(segments, CPU, flex=True).mask(None, CPU)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, segments[-1].end, 8, generator=generator) for heads in (4, 2, 2))
    torch.testing.assert_close(flex_calls(q, k, v, mask, 0.3), by_mask(q, k, v, mask, 0.3))
