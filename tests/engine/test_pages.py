"""Attention that reads pages where they lie: the tiles of a pass, the kernel in Triton's interpreter, and its trial.

The interpreter computes on a CPU what the kernel says, without a GPU; its products know no bfloat16, so half precision is float16 here. That
the kernels compile for GPUs is tried by the slow test.
"""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from headrace.engine.native.forward_pass import BLOCK
from headrace.engine.native.runners.page_trial import deviation, page_kernel
from headrace.engine.native.runners.pages import PLAIN, Pages, Softmax, Tiles, places, splits, tile_queries
from support.triton_marks import needs_interpreter, needs_triton

CPU = torch.device("cpu")


@pytest.fixture
def kernel(monkeypatch):
    """The kernel in the interpreter, which Triton chooses when it reads a kernel's source."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, KERNELS, raising=False)
    yield importlib.import_module(KERNELS).read_pages
    sys.modules.pop(KERNELS, None)


KERNELS = "headrace.engine.native.runners.page_kernels"


def plain(q, keys, values, pages, *, scale, window, softmax=PLAIN):
    """[N, Hq, D] float64, by masked softmax, segment after segment."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for segment, (start, stop) in enumerate(itertools.pairwise(pages.starts.tolist())):
        length = int(pages.lengths[segment])
        numbers = pages.tables[segment].long()
        k, v = (
            x[numbers].double().flatten(0, 1)[:length].repeat_interleave(q.shape[1] // x.shape[2], 1)
            for x in (keys, values)
        )
        for place in range(start, stop):
            last = length - (stop - place)
            low = 0 if window is None else max(0, last - window + 1)
            scores = torch.einsum("hd,thd->ht", q[place].double(), k[low : last + 1]) * scale
            if softmax.cap is not None:
                scores = softmax.cap * torch.tanh(scores / softmax.cap)
            weights, total = scores.exp(), scores.exp().sum(-1)
            if softmax.sinks is not None:
                total = total + softmax.sinks.double().exp()
            out[place] = torch.einsum("ht,thd->hd", weights, v[low : last + 1]) / total[:, None]
    return out


def segments(draw_from: np.random.Generator, sizes, context, *, heads, kv_heads, dim, dtype, split):
    """(q, keys, values, pages) whose pages lie anywhere, with NaN in all that no query may see."""
    sizes, context = np.array(sizes), np.array(context)
    lengths, queries = sizes + context, tile_queries(heads // kv_heads)
    width = int(-(-lengths.max() // BLOCK))
    tables = draw_from.permutation(len(sizes) * width).reshape(len(sizes), width)
    keys, values = (
        torch.from_numpy(draw_from.standard_normal((len(sizes) * width, BLOCK, kv_heads, dim))).to(dtype)
        for _ in range(2)
    )
    for row, length in zip(tables, lengths.tolist(), strict=True):
        for number, block in enumerate(row.tolist()):
            for part in (keys, values):
                part[block, max(0, length - number * BLOCK) :] = torch.nan
    single, chunks = (torch.from_numpy(part) for part in places(sizes, queries))
    idle = torch.full((1, 2), -1, dtype=torch.int32)  # as in a captured pass with fewer rows than places
    pages = Pages(
        torch.from_numpy(np.concatenate([[0], sizes.cumsum()]).astype(np.int32)),
        torch.from_numpy(lengths.astype(np.int32)),
        torch.from_numpy(np.ascontiguousarray(tables.T.astype(np.int32))).T,
        (Tiles(torch.cat([single, idle]), 1, split), Tiles(torch.cat([idle, chunks]), queries)),
    )
    q = torch.from_numpy(draw_from.standard_normal((int(sizes.sum()), heads, dim))).to(dtype)
    return q, keys, values, pages


@needs_interpreter
@settings(max_examples=6, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(
    st.lists(
        st.tuples(st.sampled_from([1, 1, 2, 9, 35]), st.sampled_from([0, 1, 31, 32, 33, 100])),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([(1, 1), (4, 4), (6, 2), (9, 3), (8, 1)]),
    st.sampled_from([16, 24]),
    st.sampled_from([None, 1, 5, 32, 100]),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([torch.float32, torch.float16]),
    st.sampled_from([None, 0.7]),
    st.booleans(),
)
@example([(1, 100), (35, 33)], (6, 2), 16, 32, 5, torch.float32, 0.7, True)
@example([(1, 100), (9, 0), (1, 0)], (8, 1), 24, None, 2, torch.float16, None, True)
def test_the_kernel_computes_attention_over_pages_that_lie_anywhere(
    kernel_once, stretches, heads, dim, window, split, dtype, cap, sunk
):
    sizes, context = zip(*stretches, strict=True)
    given_ = segments(
        np.random.default_rng(0), sizes, context, heads=heads[0], kv_heads=heads[1], dim=dim, dtype=dtype, split=split
    )
    sinks = torch.linspace(-2, 3, heads[0]).to(dtype) if sunk else None
    softmax = Softmax(cap, sinks)
    found = kernel_once(*given_, scale=0.3, window=window, softmax=softmax)
    expected = plain(*given_, scale=0.3, window=window, softmax=softmax)
    assert (found.double() - expected).abs().max() < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.fixture(scope="module")
def kernel_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.delitem(sys.modules, KERNELS, raising=False)
        yield importlib.import_module(KERNELS).read_pages
    sys.modules.pop(KERNELS, None)


@needs_interpreter
def test_tokens_in_no_tile_are_zeros(kernel):
    q, keys, values, pages = segments(
        np.random.default_rng(1), (1, 20), (3, 5), heads=4, kv_heads=2, dim=16, dtype=torch.float32, split=1
    )
    alone = Pages(pages.starts, pages.lengths, pages.tables, pages.tiles[:1])
    found = kernel(q, keys, values, alone, scale=1.0, window=None)
    assert bool((found[0] != 0).any()) and not found[1:].any()


def test_every_query_is_in_one_tile():
    single, chunks = places(np.array([1, 40, 0, 1, 2, 16, 17]), 16)
    assert single.tolist() == [[0, 0], [3, 0]]
    assert chunks.tolist() == [[1, 0], [1, 16], [1, 32], [4, 0], [5, 0], [6, 0], [6, 16]]
    assert places(np.array([1, 1]), 16)[1].shape == (0, 2)


def test_keys_are_split_until_every_processor_has_work():
    assert splits(1, 3, 132) == 32 and splits(64, 3, 132) == 2 and splits(256, 3, 132) == 1 and splits(0, 8, 132) > 1
    assert tile_queries(1) == 64 and tile_queries(3) == 21 and tile_queries(128) == 1


# --- the trial ---------------------------------------------------------------------------------------------------------


def right(q, keys, values, pages, /, *, scale, window, softmax):
    return plain(q, keys, values, pages, scale=scale, window=window, softmax=softmax).to(q.dtype)


def test_a_kernel_with_wrong_numbers_is_found_out():
    def late(q, keys, values, pages, /, *, scale, window, softmax):
        return right(q, keys, values, pages, scale=scale, window=window and window + 1, softmax=softmax)

    def deaf(q, keys, values, pages, /, *, scale, window, softmax):
        return right(q, keys, values, pages, scale=scale, window=window, softmax=softmax._replace(sinks=None))

    def lost(q, keys, values, pages, /, *, scale, window, softmax):
        out = right(q, keys, values, pages, scale=scale, window=window, softmax=softmax)
        return out.index_fill(0, torch.tensor([20]), torch.nan)

    assert max(deviation(right, CPU, torch.float32, 16, among) for among in (True, False)) < 1e-4
    assert deviation(deaf, CPU, torch.float32, 16) < 1e-4 and deviation(deaf, CPU, torch.float32, 16, False) > 0.05
    assert deviation(late, CPU, torch.float32, 16) > 0.05
    assert deviation(lost, CPU, torch.float32, 16) == float("inf")


def test_a_device_that_does_not_run_the_kernel_gathers_and_says_so(monkeypatch, logged):
    """Without Triton, or on a GPU that it does not know: there is none here."""
    page_kernel.cache_clear()
    monkeypatch.setitem(sys.modules, KERNELS, None)
    assert page_kernel(torch.device("cuda", 0), torch.bfloat16, 64) is None
    page_kernel.cache_clear()
    assert "ModuleNotFoundError" in logged.text and "padded to the longest one" in logged.text
    assert page_kernel(CPU, torch.bfloat16, 64) is None


# --- compiled ----------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize(
    ("rows", "queries", "split", "dim"), [(16, 1, 8, 64), (16, 1, 1, 128), (64, 21, 1, 64), (64, 16, 1, 256)]
)
def test_the_kernels_compile_for_gpus(capability, capped, rows, queries, split, dim, tmp_path):
    """In a process of its own: the interpreter, which other tests here use, stays in Triton's language."""
    numbers = [str(int(value)) for value in (capability, capped, rows, queries, split, dim)]
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    env.pop("TRITON_INTERPRET", None)
    subprocess.run([sys.executable, "-m", "support.compile_page_kernels", *numbers], check=True, env=env)
