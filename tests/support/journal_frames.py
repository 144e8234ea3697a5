"""The journal of a run as frames, for tests that damage it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from headrace.durable.segments import JOURNAL, RecordPlace, read_segment, segment_path, segments_of


def places_of(run_dir: Path) -> list[tuple[Path, RecordPlace]]:
    """Every whole frame, and the segment in which it lies."""
    return [(path, frame.place) for path in segments_of(run_dir) for frame in read_segment(path).frames]


def frames_of(run_dir: Path) -> list[bytes]:
    """The bytes of every whole frame."""
    return [path.read_bytes()[one.offset : one.offset + one.length] for path, one in places_of(run_dir)]


def put_frames(run_dir: Path, frames: Iterable[bytes]) -> Path:
    """A journal of one segment, which holds these bytes."""
    shutil.rmtree(run_dir / JOURNAL, ignore_errors=True)
    (run_dir / JOURNAL).mkdir()
    segment_path(run_dir, 0).write_bytes(b"".join(frames))
    return run_dir


def spoil(run_dir: Path, number: int, in_head: bool = False) -> None:
    """Another bit in the body of a record, or in its head."""
    path, place = next(place for place in places_of(run_dir) if place[1].number == number)
    data = bytearray(path.read_bytes())
    data[place.offset + (9 if in_head else place.length - 1)] ^= 4
    path.write_bytes(data)
