"""Sampling masks that are joined and cut off, and sets of tokens as bytes, against lists of sets."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.sampling_masks import decode_set, encode_set, joined_masks, shortened_mask
from headrace.core.types import SamplingMask

VOCABULARY = 77
Left = frozenset[int] | None
"""What was left at a position; None: everything."""


def bits_of(tokens: frozenset[int]) -> np.ndarray:
    flags = np.zeros(-(-VOCABULARY // 8) * 8, np.uint8)
    flags[list(tokens)] = 1
    return np.packbits(flags, bitorder="little")


def mask_of(positions: list[tuple[Left, bool]]) -> SamplingMask:
    """(what was left, whether as a set of its own)"""
    sets: dict[bytes, int] = {}
    ids, counts, set_of = b"", [], []
    for left, shared in positions:
        row = sorted(left) if left and not shared else []
        ids += np.array(row, np.int32).tobytes()
        counts.append(len(row))
        set_of.append(sets.setdefault(encode_set(bits_of(left)), len(sets)) if left and shared else -1)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64).tobytes()
    return SamplingMask(ids, offsets, tuple(sets), np.array(set_of, np.int32).tobytes() if sets else b"")


def read(mask: SamplingMask) -> list[Left]:
    offsets, ids = np.frombuffer(mask.offsets, np.int64), np.frombuffer(mask.token_ids, np.int32)
    set_of = np.frombuffer(mask.set_of, np.int32) if mask.sets else np.full(len(offsets) - 1, -1)
    found: list[Left] = []
    for place, number in enumerate(set_of):
        row = ids[offsets[place] : offsets[place + 1]].tolist()
        if number >= 0:
            row = np.flatnonzero(np.unpackbits(decode_set(mask.sets[number]), bitorder="little")).tolist()
        found.append(frozenset(row) if row else None)
    return found


LEFT = st.none() | st.frozensets(st.integers(0, VOCABULARY - 1), min_size=1)
PART = st.lists(st.tuples(LEFT, st.booleans()), max_size=8)


@given(st.lists(st.tuples(PART, st.booleans()), max_size=4), st.integers(0, 40))
def test_joined_and_cut_off_masks_say_the_same_of_every_token(parts: list[tuple[list, bool]], count: int) -> None:
    """A part without a mask is one of tokens from which nothing was cut."""
    whole = joined_masks([(mask_of(part) if masked else None, len(part)) for part, masked in parts])
    expected = [left if masked else None for part, masked in parts for left, _ in part]
    if not any(masked for _, masked in parts):
        assert whole is None
        return
    assert whole is not None and read(whole) == expected
    assert len(set(whole.sets)) == len(whole.sets), "each set is written once"
    short = shortened_mask(whole, min(count, len(expected)))
    assert read(short) == expected[:count]
    assert len(short.sets) == len(set(read(short)) & {frozenset(s) for s in _sets(short)})


def _sets(mask: SamplingMask) -> list[list[int]]:
    return [np.flatnonzero(np.unpackbits(decode_set(one), bitorder="little")).tolist() for one in mask.sets]


@given(st.frozensets(st.integers(0, VOCABULARY - 1), min_size=1))
def test_a_set_is_read_as_it_was_written(tokens: frozenset[int]) -> None:
    found = np.flatnonzero(np.unpackbits(decode_set(encode_set(bits_of(tokens))), bitorder="little"))
    assert frozenset(found.tolist()) == tokens
