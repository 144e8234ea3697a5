"""The lossless difference of two packed buffers: exact for any bits, by C++ and by numpy alike."""

from __future__ import annotations

import contextlib
import itertools
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.weight_sync.delta.codec import PIECE, NumpySearch, Search, apply, built, encode, search, width_of
from headrace.weight_sync.packed import lay_out

SEARCHES: list[Search] = [NumpySearch(), search()]
SPECIAL = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x3F80]
"""bfloat16: both zeros, both infinities, NaNs of several payloads, the smallest number, one."""


def image(values: list[int], width: int) -> bytes:
    return b"".join(value.to_bytes(width, "little") for value in values)


@st.composite
def images(draw: st.DrawFn) -> tuple[int, bytes, bytes]:
    """Two images: nothing changed, everything, or values here and there with long stretches between them."""
    width = draw(st.sampled_from([2, 4]))
    bits = st.one_of(st.sampled_from(SPECIAL), st.integers(0, (1 << 8 * width) - 1))
    before = draw(st.lists(bits, min_size=1, max_size=80)) * draw(st.sampled_from([1, 1, 13, 40]))
    now = list(before)
    for place in draw(st.one_of(st.just(range(len(before))), st.lists(st.integers(0, len(before) - 1), max_size=20))):
        now[place] = draw(bits) if len(before) <= 80 else (now[place] ^ (place + 1)) & 0xFFFF
    return width, image(before, width), image(now, width)


@given(images())
def test_any_bits_come_back_and_both_searches_give_the_same_bytes(case: tuple[int, bytes, bytes]) -> None:
    width, before, now = case
    streams = [encode(memoryview(before), memoryview(now), width, 1 << 30, by) for by in SEARCHES]
    assert streams[0] == streams[1] and streams[0] is not None
    for by in SEARCHES:
        made = bytearray(before)
        apply(memoryview(made), streams[0], by=by)
        assert bytes(made) == now
        apply(memoryview(made), streams[0], by=by)
        assert bytes(made) == before, "the same stream leads back"


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no compiler")
def test_the_search_is_compiled_where_there_is_a_compiler() -> None:
    assert built().library is not None and not isinstance(search(), NumpySearch)


@pytest.mark.parametrize("by", SEARCHES)
def test_a_buffer_of_several_pieces_and_changes_at_their_edges(by: Search) -> None:
    before = np.zeros(PIECE + 4096, np.uint8)
    now = before.copy()
    for place in (0, 509, 510, 511, 512, 1024, PIECE - 1, PIECE, len(now) - 1):  # 255 values are 510 bytes
        now[place] = 7
    delta = encode(before.data, now.data, 2, 1 << 20, by)
    assert delta is not None and len(delta) < 200
    apply(before.data, delta, by=by)
    assert np.array_equal(before, now)


def test_two_differences_in_one_pass_are_the_one_after_the_other() -> None:
    rng = np.random.default_rng(0)
    steps = [rng.integers(0, 256, 4096, dtype=np.uint8)]
    for _ in range(2):
        steps.append(np.where(rng.random(4096) < 0.05, rng.integers(0, 256, 4096, dtype=np.uint8), steps[-1]))
    deltas = [encode(a.data, b.data, 2, 1 << 20) for a, b in itertools.pairwise(steps)]
    made = steps[0].copy()
    apply(made.data, *(delta for delta in deltas if delta))
    assert np.array_equal(made, steps[2])


def test_a_difference_that_is_too_long_is_none() -> None:
    before, now = bytes(4096), np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8).tobytes()
    assert encode(memoryview(before), memoryview(now), 2, 2048) is None
    assert encode(memoryview(before), memoryview(before), 2, 2048) is not None


@settings(max_examples=50)
@given(st.data())
def test_bytes_that_are_no_difference_of_this_image_are_refused_or_change_it_alone(data: st.DataObject) -> None:
    """A spoilt stream raises ValueError or gives other bytes, which the fingerprint finds; it never writes elsewhere."""
    rng = np.random.default_rng(data.draw(st.integers(0, 5)))
    before = rng.integers(0, 256, 2048, dtype=np.uint8)
    now = np.where(rng.random(2048) < 0.1, 0, before).astype(np.uint8)
    delta = bytearray(encode(before.data, now.data, 2, 1 << 20) or b"")
    cut = data.draw(st.booleans())
    place = data.draw(st.integers(0, len(delta) - 1))
    delta = delta[:place] if cut else delta
    if not cut:
        delta[place] ^= data.draw(st.integers(1, 255))
    around = np.zeros(2048 + 128, np.uint8)
    inside = around[64:-64]
    inside[:] = before
    for by in SEARCHES:
        with contextlib.suppress(ValueError):
            apply(inside.data, bytes(delta), by=by)
        assert not around[:64].any() and not around[-64:].any()
    if cut:
        with pytest.raises(ValueError):
            apply(memoryview(bytearray(before)), bytes(delta))


def test_a_stream_for_another_buffer_is_refused() -> None:
    delta = encode(memoryview(bytes(4096)), memoryview(b"\1" * 4096), 2, 1 << 20)
    assert delta
    for wrong in (delta[:-1], delta + b"\0\0\0\0", b"xxxx" + delta[4:], b""):
        with pytest.raises(ValueError):
            apply(memoryview(bytearray(4096)), wrong)
    with pytest.raises(ValueError, match="no changes of a buffer of 8192 bytes"):
        apply(memoryview(bytearray(8192)), delta)


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 2), (torch.float16, 2), (torch.float32, 4)])
def test_values_are_compared_in_the_width_of_most_of_them(dtype: torch.dtype, width: int) -> None:
    assert width_of(lay_out([("a", torch.zeros(9)), ("n", torch.zeros(1, dtype=torch.int64))], dtype)) == width
