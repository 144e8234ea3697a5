"""Sampling masks: sets of tokens as bytes, and masks that are joined or cut off."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import zstandard
from numpy.typing import NDArray

from headrace.core.types import SamplingMask

Bits = NDArray[np.uint8]
"""[vocabulary / 8] the tokens of a set, the lowest bit of a byte first."""

_IDS, _BITS = b"i", b"b"
_FEW = 16
"""Tokens that are written as numbers. More of them take fewer bytes as compressed bits."""


def encode_set(bits: Bits) -> bytes:
    """Encodes a set of tokens: 5 bytes for one token; 1 to 3 kB, of 6 kB of bits, for what may follow within a JSON string (vocabulary 49,152)."""
    ids = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    if len(ids) <= _FEW:
        return _IDS + ids.astype(np.int32).tobytes()
    return _BITS + zstandard.ZstdCompressor(level=9).compress(bits.tobytes())


def decode_set(encoded: bytes) -> Bits:
    """Returns the set. Bytes behind the last of its tokens may be missing."""
    if encoded[:1] == _BITS:
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(encoded[1:]), np.uint8)
    ids = np.frombuffer(encoded[1:], np.int32)
    flags = np.zeros(-(-(int(ids.max()) + 1) // 8) * 8, np.uint8)
    flags[ids] = 1
    return np.packbits(flags, bitorder="little")


def joined_masks(parts: Sequence[tuple[SamplingMask | None, int]]) -> SamplingMask | None:
    """Joins the masks of (mask, number of tokens). Nothing was cut from tokens without a mask. None if no part has one."""
    if not any(mask for mask, _ in parts):
        return None
    place: dict[bytes, int] = {}
    ids, counts, set_of = [], [], []
    for mask, count in parts:
        ids.append(mask.token_ids if mask else b"")
        counts.append(np.diff(np.frombuffer(mask.offsets, np.int64)) if mask else np.zeros(count, np.int64))
        table = [place.setdefault(token_set, len(place)) for token_set in mask.sets] if mask else []
        own = np.frombuffer(mask.set_of, np.int32) if mask and table else np.full(count, -1, np.int32)
        set_of.append(np.array([*table, -1], np.int32)[own])
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64)
    sets = np.concatenate(set_of).tobytes() if place else b""
    return SamplingMask(b"".join(ids), offsets.tobytes(), tuple(place), sets)


def shortened_mask(mask: SamplingMask, count: int) -> SamplingMask:
    """Returns the mask of the first `count` tokens."""
    offsets = np.frombuffer(mask.offsets, np.int64)[: count + 1]
    ids = mask.token_ids[: 4 * int(offsets[-1])]
    if not mask.sets:
        return SamplingMask(ids, offsets.tobytes())
    own = np.frombuffer(mask.set_of, np.int32)[:count]
    used = sorted(set(own.tolist()) - {-1})
    table = np.full(len(mask.sets) + 1, -1, np.int32)
    table[used] = np.arange(len(used))
    sets = tuple(mask.sets[place] for place in used)
    return SamplingMask(ids, offsets.tobytes(), sets, table[own].tobytes() if used else b"")
