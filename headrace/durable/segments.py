"""Segments: the files of frames of which a journal consists, and the index beside each.

    journal/000000000000.segment   frames; the name is the number of its first record
    journal/000000000000.index     the places of its frames, written when the next segment is begun

Frames are only appended, and only to the last segment. A frame is a head and a body. The head holds the frame's length, number, kind, key
and the checksum of the body, and has a checksum of its own: so a frame that a kill has torn is known from a damaged one, and what follows
damage is found again. An index saves reading the segment; it is only a cache. One that is missing, or does not fit its segment, is not used.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from headrace.durable.atomic_files import replace_file

JOURNAL = "journal"
"""The directory of the segments in that of a run."""
SEGMENT = 16 << 20
"""Bytes from which on a segment is not appended to any more. What a resume reads before its checkpoint is at most a segment."""

MAGIC = b"\xf5HJ1"
_HEAD = struct.Struct("<4sIQBqQ")
"""Magic, bytes of the frame, number, kind, key, xxh3-64 of the body (seeded with the number)."""
_SUM = struct.Struct("<I")
"""xxh32 of the head."""
HEAD = _HEAD.size + _SUM.size
UNWRITTEN = bytes(64)
"""The end of a file whose last blocks a loss of power has kept from the disk. No body ends so: it is compressed."""

PLACE = np.dtype([("number", "<i8"), ("kind", "u1"), ("key", "<i8"), ("offset", "<i8"), ("length", "<i8")])
_INDEX = struct.Struct("<4sQQ")
"""Magic, bytes of the segment, xxh3-64 of the places (seeded with the bytes)."""
INDEX_MAGIC = b"\xf5HI1"


class RecordPlace(NamedTuple):
    """The head of a frame, and where it lies."""

    number: int
    kind: int
    key: int
    """The ticket, step or version that the record is about."""
    offset: int
    length: int
    """Bytes of head and body."""


class RecordFrame(NamedTuple):
    place: RecordPlace
    body: bytes


class Spot(NamedTuple):
    """A place in a segment at which no valid frame lies."""

    offset: int
    number: int | None = None
    """The number of its record, if its head is valid."""

    def told(self, segment: Path) -> tuple[str, str]:
        """Returns the place, and what is wrong with it."""
        if self.number is None:
            return f"byte {self.offset} of {segment.name}", "begins no record"
        return f"record {self.number}", "does not match its checksum"


class SegmentContents(NamedTuple):
    """The frames of a segment, and the places without one, in order."""

    items: list[RecordFrame | Spot]
    whole: int
    """Bytes up to the end, without a frame that a kill has torn."""

    @property
    def frames(self) -> list[RecordFrame]:
        return [item for item in self.items if isinstance(item, RecordFrame)]


# -- frames -----------------------------------------------------------------------------------------------------------------


def framed(place: RecordPlace, body: bytes) -> bytes:
    """Returns the bytes of a frame. The place's own `offset` and `length` are not used."""
    checksum = xxhash.xxh3_64_intdigest(body, seed=place.number)
    head = _HEAD.pack(MAGIC, HEAD + len(body), *place[:3], checksum)
    return head + _SUM.pack(xxhash.xxh32_intdigest(head)) + body


def read_frames(data: bytes, begin: int = 0) -> SegmentContents:
    """Finds the frames in the bytes of a segment. `begin`: where in the segment they begin."""
    items: list[RecordFrame | Spot] = []
    at = 0
    while at < len(data):
        place = _place(data, at, begin)
        if place and (body := _body(data, at, place)) is not None:
            items.append(RecordFrame(place, body))
            at += place.length
            continue
        following = _next_head(data, at + 1)
        if following < 0 and _is_torn(data, at, place):
            break
        items.append(Spot(begin + at, place.number if place else None))
        at = len(data) if following < 0 else following
    return SegmentContents(items, begin + at)


def _place(data: bytes, at: int, begin: int) -> RecordPlace | None:
    """Returns the head of a frame; None where no valid one begins."""
    if len(data) - at < HEAD:
        return None
    magic, length, number, kind, key, _ = _HEAD.unpack_from(data, at)
    (checksum,) = _SUM.unpack_from(data, at + _HEAD.size)
    if magic != MAGIC or checksum != xxhash.xxh32_intdigest(data[at : at + _HEAD.size]):
        return None
    return RecordPlace(number, kind, key, begin + at, length)


def _body(data: bytes, at: int, place: RecordPlace) -> bytes | None:
    """Returns the body of a frame; None if it is not all there, or does not match its checksum."""
    body = data[at + HEAD : at + place.length]
    if len(body) != place.length - HEAD:
        return None
    expected = _HEAD.unpack_from(data, at)[-1]
    return body if xxhash.xxh3_64_intdigest(body, seed=place.number) == expected else None


def _next_head(data: bytes, at: int) -> int:
    """Returns where the next valid head begins; -1 if there is none."""
    while (at := data.find(MAGIC, at)) >= 0:
        if _place(data, at, 0):
            return at
        at += 1
    return -1


def _is_torn(data: bytes, at: int, place: RecordPlace | None) -> bool:
    """Whether the rest, in which no frame begins, is one whose end was never written, rather than a damaged one."""
    rest = len(data) - at
    if data.endswith(UNWRITTEN[: min(rest, len(UNWRITTEN))]):
        return True
    return place.length > rest if place else rest < HEAD and data[at : at + 4] == MAGIC[: min(rest, 4)]


# -- files ------------------------------------------------------------------------------------------------------------------


def segments_of(run_dir: Path) -> list[Path]:
    """Returns the segments of a run's journal in order."""
    return sorted((run_dir / JOURNAL).glob("*.segment"), key=first_of)


def segment_path(run_dir: Path, first: int) -> Path:
    return run_dir / JOURNAL / f"{first:012d}.segment"


def first_of(segment: Path) -> int:
    """Returns the number that the first record of a segment has, or had."""
    return int(segment.stem)


def from_record(segments: Sequence[Path], number: int) -> list[Path]:
    """Returns the segment in which the record of this number lies, or would, and all later ones."""
    earlier = sum(first_of(segment) <= number for segment in segments)
    return list(segments[max(0, earlier - 1) :])


def read_segment(segment: Path, begin: int = 0) -> SegmentContents:
    """Reads a segment from byte `begin` on, at which a frame begins."""
    with segment.open("rb") as file:
        file.seek(begin)
        return read_frames(file.read(), begin)


def read_frame(segment: Path, place: RecordPlace) -> bytes | None:
    """Returns the body of the frame at a place; None if another frame, or none that is valid, lies there."""
    try:
        with segment.open("rb") as file:
            file.seek(place.offset)
            data = file.read(place.length)
    except OSError:
        return None
    return _body(data, 0, place) if _place(data, 0, place.offset) == place else None


# -- indices ----------------------------------------------------------------------------------------------------------------


def index_of(segment: Path) -> Path:
    return segment.with_suffix(".index")


def table_of(places: Sequence[RecordPlace]) -> np.ndarray:
    return np.array(places, PLACE) if places else np.empty(0, PLACE)


def write_index(segment: Path, places: Sequence[RecordPlace], size: int) -> None:
    """Writes the index of a segment of `size` bytes. Raises `HeadraceError`, which names the file, if the disk cannot be written."""
    table = table_of(places).tobytes()
    head = _INDEX.pack(INDEX_MAGIC, size, xxhash.xxh3_64_intdigest(table, seed=size))
    replace_file(index_of(segment), head + table, flush=False)


def read_index(segment: Path) -> tuple[np.ndarray, int] | None:
    """Returns the places in a segment and the bytes that it had when the index was written; None if there is no valid index."""
    try:
        data = index_of(segment).read_bytes()
        magic, size, checksum = _INDEX.unpack_from(data)
    except (OSError, struct.error):
        return None
    table = data[_INDEX.size :]
    if magic != INDEX_MAGIC or checksum != xxhash.xxh3_64_intdigest(table, seed=size):
        return None
    return np.frombuffer(table, PLACE), size


def index_that_fits(segment: Path) -> np.ndarray | None:
    """Returns the places in a segment according to its index; None if there is none that fits the segment as it is now."""
    table, size = read_index(segment) or (table_of([]), -1)
    if not len(table) or segment.stat().st_size != size:
        return None
    last = RecordPlace(*table[-1].tolist())
    with segment.open("rb") as file:
        file.seek(last.offset)
        return table if _place(file.read(HEAD), 0, last.offset) == last else None
