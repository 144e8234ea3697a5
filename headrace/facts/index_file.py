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
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import xxhash
from msgspec.structs import replace

from headrace.core.errors import HeadraceError
from headrace.durable.atomic_files import AppendFile, replace_file
from headrace.facts.facts import GroupEnded
from headrace.facts.number_tables import ROW, Numbers
from headrace.facts.records import METRICS, MetricsFact, StepRow
from headrace.facts.run_state import RunState, stride_of
from headrace.facts.run_totals import RunSums, as_counter
from headrace.version import __version__

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


# --- `state.digest`
# The sums of a run up to a place of its metrics, so that they are known without reading all facts before it. A run writes one beside its
# metrics, for the board, and one into each checkpoint, from which a resume goes on.
#
# Curves are drawn from `numbers.index`; everything else that the board shows comes from a `RunState`. Its sums are kept whole. Of its lists a
# digest has a part: one step in `stride_of` for curves, the last few for rates, and what is rare. Like the index, a digest counts only while
# the metrics before its place are those that it saw.


DIGEST = "state.digest"
DIGEST_MAGIC = b"hrdigst2"
LAST = 32
"""Steps, swaps and probes at the end that are kept."""
SPANS = 128
"""Samples of the engine at the end that are kept."""


class Digest(msgspec.Struct, forbid_unknown_fields=True):
    size: int
    """Bytes of the metrics that it counts."""
    mark: str
    """The checksum of the last of them, as in the index."""
    version: str
    """The version of headrace that wrote it; another one may count otherwise."""
    fields: int
    """The checksum of the names of all numbers (`fields_of`): one that a digest lacks would begin at its default."""
    lines: int
    """Lines of these bytes."""
    block: tuple[int, int]
    """Start and end, in the index of the run, of the block that counts up to the same place; zeros if there is none."""
    groups: int
    """Rows of the groups' numbers."""
    reasons: list[str]
    """The reasons in these rows (`GroupTable.reasons`)."""
    state: RunState
    """Thinned (`thinned`)."""


def digest_of(
    run_dir: Path, state: RunState, numbers: Numbers, *, lines: int, block: tuple[int, int] = (0, 0)
) -> bytes:
    """Returns the bytes of a digest. `state` and `numbers` count the metrics up to `numbers.size`, which are so many `lines`. `block`: see
    `Digest`."""
    groups, size = numbers.groups, numbers.size
    digest = Digest(
        size=size,
        mark=mark_of(run_dir / METRICS, size),
        version=__version__,
        fields=fields_of(RunState),
        lines=lines,
        block=block,
        groups=len(groups.rows),
        reasons=list(groups.reasons),
        state=thinned(state),
    )
    return DIGEST_MAGIC + framed_bytes(msgspec.msgpack.encode(digest))


def write_digest(path: Path, data: bytes) -> None:
    """Replaces the file. A disk that is full costs only the board's speed. Its directory is not made: a run that the user deleted must not
    reappear."""
    with suppress(OSError, HeadraceError):
        replace_file(path, data, flush=False)


def read_digest(path: Path, run_dir: Path) -> Digest | None:
    """Returns None for a file that is absent, torn, of another version or other numbers, or of other metrics."""
    try:
        data = path.read_bytes()
        body = unframed(data, len(DIGEST_MAGIC)) if data.startswith(DIGEST_MAGIC) else None
        digest = msgspec.msgpack.decode(body, type=Digest, dec_hook=as_counter) if body is not None else None
        if digest is None or (digest.version, digest.fields) != (__version__, fields_of(RunState)):
            return None
        if not digest.mark or digest.mark != mark_of(run_dir / METRICS, digest.size):
            return None
    except (OSError, msgspec.MsgspecError):
        return None
    return digest


@cache
def fields_of(kind: type[RunSums]) -> int:
    """Returns a checksum of the names of all fields of a class of sums, and of those that its fields have."""
    names: list[str] = []
    todo, known = [kind], set[Any]()
    while todo:
        sums = todo.pop()
        if not (isinstance(sums, type) and issubclass(sums, RunSums)):
            todo += get_args(sums)
        elif sums not in known:
            known.add(sums)
            fields = msgspec.structs.fields(sums)
            names += [f"{sums.__name__}.{field.name}" for field in fields]
            todo += [field.type for field in fields]
    return zlib.crc32("\n".join(sorted(names)).encode())


def thinned(state: RunState) -> RunState:
    """Returns a state with the same sums and shorter lists. The given one is not changed."""
    stride, tickets = stride_of(state.totals.steps), state.tickets
    return replace(
        state,
        whole=False,
        samples=(),
        rows=[row for row in state.rows[:-LAST] if row.report.step % stride == 0] + state.rows[-LAST:],
        swaps=[swap for swap in state.swaps[:-LAST] if swap.update.version % stride == 0] + state.swaps[-LAST:],
        checks=state.checks[-LAST:],
        checkpoints=[checkpoint for checkpoint in state.checkpoints[:-LAST] if checkpoint.error]
        + state.checkpoints[-LAST:],
        engine=replace(state.engine, spans=state.engine.spans[-SPANS:]),
        tickets=replace(tickets, flying=sorted(tickets.flying), ready=sorted(tickets.ready)),  # equal sets, equal bytes
        naps=replace(state.naps, over=state.naps.over[-LAST:]),
    )


# --- How a run writes its index and its digest
# A block whenever its metrics have grown by a MiB, and one at its end.


EVERY = 1 << 20
"""Bytes of metrics for a block. Of a long run the board lacks at most these until it has read the metrics itself."""


SHARE = 8
"""Bytes of metrics for each byte of a digest, at least; it is written anew each time."""


class NumbersIndex:
    """A sink. A process of a run goes on behind the block up to which it knows the numbers of the one before, or begins the file anew: a resume may
    have cut the metrics."""

    def __init__(self, run_dir: Path, every: int = EVERY) -> None:
        self._run_dir, self._every = run_dir, every
        self._numbers = Numbers()
        self._written: dict[str, int] = {}
        self._changed: set[int] = set()
        self._file: AppendFile | None = None
        self._failed = self._stepped = False
        self._state: RunState | None = None
        self._lines = self._digested = self._digest_bytes = 0
        self._block = (0, 0)
        """Start and end of the last block."""

    def go_on(self, digest: Digest) -> bool:
        """Goes on from the numbers that an earlier process wrote. Returns whether they are there."""
        if not has_block(self._run_dir / INDEX, digest.block, digest.size, digest.mark):
            return False
        self._block, self._lines, self._state = digest.block, digest.lines, digest.state
        self._numbers.begin_at(digest.size, digest.state, digest.groups, digest.reasons)
        return True

    def recall(self, fact: MetricsFact, state: RunState) -> None:
        """Takes a fact of an earlier process of the run."""
        self._numbers.take(fact, state)
        self._state, self._lines = state, self._lines + 1
        if isinstance(fact, GroupEnded):
            self._changed.add(fact.ticket)
        elif isinstance(fact, StepRow):
            self._changed.update(fact.tickets)

    def record(self, fact: MetricsFact, state: RunState) -> None:
        self.recall(fact, state)
        if isinstance(fact, StepRow):
            self._stepped = True
            if self._size() - self._numbers.size >= self._every:
                self._write()

    def digest(self) -> bytes:
        """Writes a block of what is new, and returns a digest of all facts so far; empty if the disk cannot be written."""
        self._write()
        return b"" if self._failed or self._numbers.size != self._size() else self._sums()

    def close(self) -> None:
        if self._stepped:  # a resume that was refused leaves every file as it was
            self._write(last=True)
        if self._file:
            self._file.close()

    def _size(self) -> int:
        try:
            return (self._run_dir / METRICS).stat().st_size
        except OSError:
            return 0

    def _write(self, last: bool = False) -> None:
        """Appends a block. A disk that is full costs the speed of the board and of the next resume, never the run: the file ends with its last whole
        block."""
        size = self._size()
        if self._failed or size <= self._numbers.size:
            return
        self._failed = True
        with suppress(OSError, HeadraceError):
            self._file = self._file or self._opened(self._run_dir / INDEX)
            self._numbers.size, start = size, self._file.size
            self._file.append(framed(block_of(self._run_dir, self._numbers, self._written, self._changed)))
            self._block = start, self._file.size
            self._written = {name: len(values) for name, (_, values) in self._numbers.columns.items()}
            self._changed.clear()
            self._failed = False
            self._digest(size, last)

    def _opened(self, path: Path) -> AppendFile:
        _, end = self._block
        if not end:
            path.unlink(missing_ok=True)
        elif path.stat().st_size > end:
            become_another(path)  # it loses blocks
        file = AppendFile(path, whole=lambda path: end)
        if not end:
            file.append(header())
        return file

    def _digest(self, size: int, last: bool) -> None:
        """Writes the digest after its block, so that the index always has the block up to which a digest counts."""
        if last or size - self._digested >= SHARE * self._digest_bytes:
            data = self._sums()
            write_digest(self._run_dir / DIGEST, data)
            self._digested, self._digest_bytes = size, len(data)

    def _sums(self) -> bytes:
        assert self._state is not None
        return digest_of(self._run_dir, self._state, self._numbers, lines=self._lines, block=self._block)
