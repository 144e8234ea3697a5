"""Ranks that hash their own parts make the fingerprint of the whole, however the parts are cut, and read little of each other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from random import Random
from typing import Any

import msgspec
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import IdentityError, RankUnreachable
from headrace.core.weights import FORM, Manifest, WeightUpdate
from headrace.weight_sync import rank_digests
from headrace.weight_sync.packed import BLOCK, PackedBuffer, fingerprint, lay_out
from headrace.weight_sync.ranges import ByteRange, RankParts
from headrace.weight_sync.rank_digests import AskRank, RankAnswer, RankDigests, blocks_of
from headrace.weight_sync.sockets import reach, read_message, send_message
from support.meeting import Meeting

UNIT = BLOCK // 4
"""Bytes of a row of the tensors here."""

Cuts = Sequence[Sequence[int]]
"""Of each tensor: the ranks that hold its pieces, of as many rows as the rank is named in a row."""


def laid_out(rows: Sequence[int], odd: int = 0) -> Manifest:
    """Tensors of so many rows, each with some more bytes than whole rows."""
    tensors = [(f"t{number}", torch.empty(count * UNIT + odd, dtype=torch.uint8)) for number, count in enumerate(rows)]
    return lay_out(tensors, torch.bfloat16)


def ranges_by(manifest: Manifest, holders: Cuts, ranks: int) -> list[list[ByteRange]]:
    """Row after row goes to the rank that is named; the bytes behind the last row too."""
    found: list[list[ByteRange]] = [[] for _ in range(ranks)]
    for spec, named in zip(manifest.tensors, holders, strict=True):
        for row, rank in enumerate(named):
            last = row + 1 == len(named)
            found[rank].append(ByteRange(spec.offset + row * UNIT, spec.nbytes - row * UNIT if last else UNIT))
    return found


def together(
    manifest: Manifest, ranges: list[list[ByteRange]], buffers: Sequence[memoryview], shared: bool = False
) -> str:
    """The fingerprint by ranks that are threads, each with memory of its own. A rank has lost its copy where its buffer is empty."""
    meeting = Meeting(len(ranges))

    def begin(rank: int) -> RankDigests:
        def read(name: str, label: str, wanted: ByteRange) -> memoryview:
            held = any(p.offset <= wanted.offset and sum(wanted) <= sum(p) for p in ranges[rank])
            if not buffers[rank] or not (shared or held):
                raise ValueError(f"rank {rank} has no {wanted}")
            return buffers[rank][wanted.offset : sum(wanted)]

        everyone = [{"": own} for own in ranges]
        parts = RankParts(rank, everyone, lambda name: iter(()), lambda value: meeting.exchange(rank, value))
        return RankDigests("127.0.0.1", {"": manifest}, parts, read, shared=shared)

    with ThreadPoolExecutor(len(ranges)) as pool:
        first, *_ = pool.map(begin, range(len(ranges)))
    return first.fingerprint("", "copy 1")


def only(manifest: Manifest, whole: bytes, ranges: Sequence[ByteRange]) -> memoryview:
    """Memory that has these bytes of the whole, and noughts elsewhere."""
    held = bytearray(manifest.nbytes)
    for part in ranges:
        held[part.offset : sum(part)] = whole[part.offset : sum(part)]
    return memoryview(held)


CUTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=4)


@settings(max_examples=12, deadline=None)
@given(holders=CUTS, odd=st.sampled_from([0, 1, 6000]), shared=st.booleans())
def test_ranks_make_the_fingerprint_of_the_whole_however_it_is_cut(holders: Cuts, odd: int, shared: bool) -> None:
    manifest = laid_out([len(named) for named in holders], odd)
    whole = Random(odd).randbytes(manifest.nbytes)
    ranges = ranges_by(manifest, holders, 4)
    held = [memoryview(whole) if shared else only(manifest, whole, own) for own in ranges]
    assert together(manifest, ranges, held, shared) == fingerprint(manifest, memoryview(whole))


@settings(max_examples=100, deadline=None)
@given(holders=CUTS, odd=st.integers(0, UNIT - 1))
def test_every_block_begins_in_one_range(holders: Cuts, odd: int) -> None:
    manifest = laid_out([len(named) for named in holders], odd)
    every = [part for own in ranges_by(manifest, holders, 4) for part in own]
    found = sorted((at, one.end) for one in blocks_of(manifest, every) for at in range(one.start, one.end, BLOCK))
    wanted = [(s.offset + at, s.offset + s.nbytes) for s in manifest.tensors for at in range(0, s.nbytes, BLOCK)]
    assert [at for at, _ in found] == [at for at, _ in wanted]
    for (at, end), (_, last) in zip(found, wanted, strict=True):
        assert end == last or (end - at) % BLOCK == 0, "only the end of a parameter ends a block early"


def test_a_fingerprint_is_that_of_names_and_of_hashes_of_blocks() -> None:
    manifest = laid_out([9, 1], odd=5)
    whole = Random(1).randbytes(manifest.nbytes)
    text = b""
    for spec in manifest.tensors:
        text += f"{spec.name}|{spec.shape}|{spec.dtype}|".encode()
        own = whole[spec.offset : spec.offset + spec.nbytes]
        text += b"".join(xxhash.xxh3_128(own[at : at + (1 << 18)]).digest() for at in range(0, len(own), 1 << 18))
    assert fingerprint(manifest, memoryview(whole)) == FORM + xxhash.xxh3_128(text).hexdigest()


def test_one_bit_in_any_part_is_another_fingerprint() -> None:
    holders = [[0, 0, 0, 1, 1, 1, 2, 2], [2]]
    manifest = laid_out([8, 1])
    whole = Random(2).randbytes(manifest.nbytes)
    ranges = ranges_by(manifest, holders, 3)
    found = {fingerprint(manifest, memoryview(whole))}
    for place in (0, 3 * UNIT - 1, 3 * UNIT, 6 * UNIT, manifest.tensors[1].offset + 7):
        torn = bytearray(whole)
        torn[place] ^= 1
        found.add(together(manifest, ranges, [only(manifest, bytes(torn), own) for own in ranges]))
    assert len(found) == 6


def test_little_travels_between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 bytes for a block, and less than a block for a range that ends within one."""
    ranks, rows = 3, 300
    manifest = laid_out([rows])
    whole = Random(3).randbytes(manifest.nbytes)
    cut = [0, 101, 202, rows]
    ranges = [[ByteRange(a * UNIT, (b - a) * UNIT)] for a, b in itertools.pairwise(cut)]
    travelled, answer = [0], rank_digests._answer

    def counted(connection: Any) -> bytearray:
        found = answer(connection)
        travelled[0] += len(found)
        return found

    monkeypatch.setattr(rank_digests, "_answer", counted)
    held = [only(manifest, whole, own) for own in ranges]
    assert together(manifest, ranges, held) == fingerprint(manifest, memoryview(whole))
    blocks = [-(-a // 4) for a in cut]
    assert travelled[0] == 16 * (blocks[3] - blocks[1]) + 3 * UNIT + 2 * UNIT < manifest.nbytes / 50
    assert ranks * UNIT < BLOCK


def test_a_rank_that_has_lost_its_copy_makes_no_fingerprint() -> None:
    manifest = laid_out([8])
    whole = memoryview(Random(4).randbytes(manifest.nbytes))
    for holders in ([[0] * 4 + [1] * 4], [[0] * 3 + [1] * 5]):  # its hashes are asked for; its bytes are
        with pytest.raises(RankUnreachable, match="too early|ended"):
            together(manifest, ranges_by(manifest, holders, 2), [whole, memoryview(b"")])


def test_weights_that_were_saved_with_an_earlier_fingerprint_are_verified() -> None:
    manifest = laid_out([5, 2], odd=3)
    memory = bytearray(Random(5).randbytes(manifest.nbytes))
    old = xxhash.xxh3_128()
    for spec in manifest.tensors:
        old.update(f"{spec.name}|{spec.shape}|{spec.dtype}|".encode())
        old.update(bytes(memory[spec.offset : spec.offset + spec.nbytes]))
    update = WeightUpdate(version=1, kind="full", fingerprint=old.hexdigest(), nbytes=0, seconds=0.0)
    packed = PackedBuffer(manifest, memoryview(memory))
    assert set(packed.verified(update)) == {"t0", "t1"}
    now = packed.fingerprint()
    memory[BLOCK + 1] ^= 1
    for one in (update, msgspec.structs.replace(update, fingerprint=now)):
        with pytest.raises(IdentityError, match="the engine loaded"):
            packed.verified(one)


def test_a_question_that_comes_before_this_rank_knows_the_token_is_answered() -> None:
    """Another rank may be through the exchange of tokens first."""
    manifest = laid_out([1], odd=0)
    whole = memoryview(Random(2).randbytes(manifest.nbytes))
    (own,) = ranges_by(manifest, [[0]], 1)
    with ExitStack() as stack:
        asked = []

        def exchange(value: Any) -> list[Any]:
            connection = stack.enter_context(reach(value[0], 9.0, None))
            send_message(connection, AskRank(value[1], "", "copy"))
            connection.settimeout(0.1)
            with suppress(TimeoutError):
                assert connection.recv(1), "it was not answered"
            asked.append(connection)
            return [value]

        parts = RankParts(0, [{"": own}], lambda name: iter(()), exchange)
        made = RankDigests("127.0.0.1", {"": manifest}, parts, lambda *of: whole[of[2].offset : sum(of[2])])
        asked[0].settimeout(60.0)
        reply = msgspec.msgpack.decode(read_message(asked[0]), type=RankAnswer)
        assert reply.nbytes == 16, "the hash of its only block"
        assert made.fingerprint("", "copy") == fingerprint(manifest, whole)
