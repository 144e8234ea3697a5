"""`numbers.index`: the numbers of a run in blocks, each with what was added since the one before.

    header   8 bytes that name the format, 8 random ones: a file that was begun anew is another file
    block    length and checksum of the body (8 bytes each), then the body: an `IndexBlock` in MessagePack

It is never trusted beyond what `metrics.jsonl` says: a block names the bytes of that file up to which it counts, and counts only while the
bytes before that place are those that it saw. What is torn, damaged or missing costs time: the board reads the metrics instead.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from headrace.facts.index.group_table import ROW
from headrace.facts.index.numbers import Numbers
from headrace.facts.records import METRICS

INDEX = "numbers.index"
MAGIC = b"hrindex1"
HEADER, FRAME = len(MAGIC) + 8, struct.Struct("<QQ")
SEEN = 4096
"""Bytes before the place up to which a block counts, by which it recognises the file."""


class IndexBlock(msgspec.Struct):
    """Arrays are their bytes, little-endian: steps int32, values float64, tickets int64, rows as `ROW`."""

    size: int
    """Bytes of the metrics that all blocks so far count."""
    mark: str
    """The checksum of the last SEEN of them."""
    steps: list[bytes]
    """Each is given once, because most numbers are known at the same steps."""
    series: dict[str, tuple[int, bytes]]
    """A place in `steps`, and values, by name."""
    tickets: bytes
    rows: bytes
    """The groups that ended or were trained, as they are now."""
    reasons: list[str]
    """All reasons so far (`GroupTable.reasons`)."""


def block_of(
    run_dir: Path, numbers: Numbers, written: Mapping[str, int] | None = None, tickets: Iterable[int] | None = None
) -> IndexBlock:
    """Makes the block of what is new. `written`: values of each series that earlier blocks have. `tickets`: of the groups that have changed;
    by default all. Raises OSError if the metrics cannot be read."""
    places: dict[bytes, int] = {}
    series = {}
    for name, (steps, values) in numbers.columns.items():
        start = (written or {}).get(name, 0)
        if start < len(values):
            place = places.setdefault(steps[start:].astype("<i4").tobytes(), len(places))
            series[name] = (place, values[start:].astype("<f8").tobytes())
    rows = numbers.groups.rows.view
    changed = np.arange(len(rows)) if tickets is None else np.fromiter(tickets, np.int64)
    changed = changed[(changed >= 0) & (changed < len(rows))]
    return IndexBlock(
        size=numbers.size,
        mark=mark_of(run_dir / METRICS, numbers.size),
        steps=list(places),
        series=series,
        tickets=changed.astype("<i8").tobytes(),
        rows=rows[changed].tobytes(),
        reasons=list(numbers.groups.reasons),
    )


def header() -> bytes:
    return MAGIC + os.urandom(8)


def framed(block: IndexBlock) -> bytes:
    return framed_bytes(msgspec.msgpack.encode(block))


def framed_bytes(body: bytes) -> bytes:
    return FRAME.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body


def unframed(data: bytes, place: int) -> memoryview | None:
    """Returns the body that begins at `place`; None if it is torn or damaged."""
    if place + FRAME.size > len(data):
        return None
    length, checksum = FRAME.unpack_from(data, place)
    body = memoryview(data)[place + FRAME.size : place + FRAME.size + length]
    return body if len(body) == length and xxhash.xxh3_64_intdigest(body) == checksum else None


def save(path: Path, run_dir: Path, numbers: Numbers) -> None:
    """Writes a file of one block. A disk that is full or cannot be written costs only the speed of the next start."""
    part = path.with_suffix(".part")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(header() + framed(block_of(run_dir, numbers)))
        part.replace(path)


def saved_at(directory: Path, run_dir: Path) -> Path:
    """Returns the path of the index of a run that has none of its own, below the directory that is kept for such files."""
    return directory / f"{xxhash.xxh3_64_hexdigest(str(run_dir.resolve()).encode())}.index"


def has_block(path: Path, place: tuple[int, int], size: int, mark: str) -> bool:
    """Returns whether the file has a block at `place` (start, end) that ends with metrics of this `size` and `mark`."""
    start, end = place
    try:
        with path.open("rb") as file:
            header = file.read(HEADER)
            file.seek(start)
            body = unframed(file.read(end - start), 0)
        block = msgspec.msgpack.decode(body, type=IndexBlock) if body is not None else None
    except (OSError, msgspec.MsgspecError):
        return False
    return header.startswith(MAGIC) and block is not None and (block.size, block.mark) == (size, mark)


def become_another(path: Path) -> None:
    """Gives the file another header: readers begin anew. Raises OSError."""
    with path.open("r+b", buffering=0) as file:
        file.write(header())


class IndexReader:
    """Reads an index, and later what was added to it. `numbers` are those of all blocks that fit the metrics."""

    def __init__(self, path: Path, run_dir: Path) -> None:
        self._path, self._metrics = path, run_dir / METRICS
        self.restart()

    def restart(self) -> None:
        self.numbers = Numbers()
        self._header, self._offset = b"", 0

    def catch_up(self, until: float = math.inf) -> None:
        """`until`: bytes of the metrics; blocks that count more are left for later."""
        try:
            file = self._path.open("rb")
        except OSError:
            return
        with file:
            header = file.read(HEADER)
            if header != self._header:
                self.restart()
                self._header, self._offset = header, HEADER
            if not header.startswith(MAGIC):
                return
            file.seek(self._offset)
            for block, length in _blocks(file.read()):
                if block.size > until or block.mark != mark_of(self._metrics, block.size):
                    return
                if not _add(self.numbers, block):
                    return
                self._offset += length


def _blocks(data: bytes) -> Iterator[tuple[IndexBlock, int]]:
    """Yields blocks and their bytes, up to the first that is torn or damaged."""
    place = 0
    while (body := unframed(data, place)) is not None:
        try:
            yield msgspec.msgpack.decode(body, type=IndexBlock), FRAME.size + len(body)
        except msgspec.MsgspecError:  # by another version of headrace
            return
        place += FRAME.size + len(body)


def _add(numbers: Numbers, block: IndexBlock) -> bool:
    """Returns whether the block could be added: its arrays have to fit each other."""
    series = {
        name: (np.frombuffer(block.steps[i], "<i4"), np.frombuffer(v, "<f8")) for name, (i, v) in block.series.items()
    }
    tickets, rows = np.frombuffer(block.tickets, "<i8"), np.frombuffer(block.rows, ROW)
    if len(tickets) != len(rows) or any(len(steps) != len(values) for steps, values in series.values()):
        return False
    for name, (steps, values) in series.items():
        numbers.columns.extend(name, steps, values)
    numbers.groups.rows.put_all(tickets, rows)
    numbers.groups.reasons = list(block.reasons)
    numbers.size = block.size
    return True


def mark_of(path: Path, size: int) -> str:
    """Returns a checksum of the bytes before `size`; empty if the file is shorter."""
    start = max(0, size - SEEN)
    try:
        with path.open("rb") as file:
            file.seek(start)
            seen = file.read(size - start)
    except OSError:
        return ""
    return xxhash.xxh3_64_hexdigest(seen) if size and len(seen) == size - start else ""
