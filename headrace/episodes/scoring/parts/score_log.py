"""`scores.jsonl`: the scores of services and judges, as they come, so that a run that is killed does not ask (and pay) for them again.

One JSON line per record, `{"sum": checksum, "record": {...}}`. A line that has changed would give a group another reward, so it is not used.

A group with several scorers may wait for one of them for minutes after the others have answered. Once all have, the group is in the journal
and its records here are of no use: they are removed when the file has grown.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from headrace.core.batches import Failure
from headrace.core.errors import HeadraceError
from headrace.core.types import Struct
from headrace.durable.atomic_files import AppendFile, read_lines, replace_file
from headrace.durable.journal import Damage
from headrace.episodes.scoring.job import ScoringJob, Values

SCORES = "scores.jsonl"
LARGEST = 4 << 20
"""Bytes after which the file is written anew with the newest records."""
NEWEST = 1024
"""Records that it keeps then: more than the scorers of all groups in flight have."""


class ScoreRecord(Struct, frozen=True):
    """The scores that one scorer gave a group."""

    key: str
    """A digest of the scorer and of all that it was asked."""
    values: list[float | tuple[float, ...] | Failure | None]


_HEAD = re.compile(rb'\{"sum":"([0-9a-f]{16})","record":')
_decode = msgspec.json.Decoder(ScoreRecord).decode


def _line(record: ScoreRecord) -> bytes:
    body = msgspec.json.encode(record)
    return b'{"sum":"%s","record":%s}' % (_sum(body), body)


def _read(line: bytes) -> ScoreRecord | None:
    """Returns None if the line is not as it was written."""
    head = _HEAD.match(line)
    if head is None or not line.endswith(b"}"):
        return None
    body = line[head.end() : -1]
    try:
        return _decode(body) if head[1] == _sum(body) else None
    except msgspec.MsgspecError:
        return None


def _sum(body: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(body).encode()


class ScoreLog:
    """Records nothing before `open`, so that a run that is refused until then leaves its directory as it was."""

    def __init__(self, marks: dict[str, Any]) -> None:
        """`marks`: the settings of each scorer, by its name. Scores given under others are not used."""
        self._marks = dict(marks)
        self._records: dict[str, ScoreRecord] = {}
        self._earlier: dict[str, ScoreRecord] = {}
        """Records of an earlier process. Each is used once: what comes again is asked again."""
        self._path: Path | None = None
        self._warn: Callable[[str], None] = lambda said: None
        self._file: AppendFile | None = None
        self._size = 0

    def open(self, run_dir: Path, warn: Callable[[str], None]) -> None:
        """Reads what an earlier process of the run recorded, and warns of damaged lines, which are removed. If the disk cannot be written, it
        warns, and records no more."""
        self._path, self._warn = run_dir / SCORES, warn
        damage = Damage()
        for number, line in enumerate(read_lines(self._path), 1):
            if record := _read(line):
                self._records[record.key] = self._earlier[record.key] = record
            else:
                damage.add(f"line {number}", "is damaged")
        if damage:
            warn(f"{self._path}: {damage}: these scores are not used; their groups are scored again")
        self._guarded(self._write_anew)

    def find(self, scorer: str, job: ScoringJob) -> Values | None:
        """Returns the scores that an earlier process recorded; None if there are none."""
        record = self._earlier.pop(self._key(scorer, job), None)
        return record.values if record else None

    def keep(self, scorer: str, job: ScoringJob, values: Values) -> None:
        """Records scores. If one of them failed, the group is asked about again after a kill."""
        if self._file is None or any(isinstance(value, Failure) for value in values):
            return
        record = ScoreRecord(self._key(scorer, job), values)
        self._records.pop(record.key, None)  # the newest is the last
        self._records[record.key] = record
        line = _line(record)
        self._guarded(lambda: self._append(line))

    def _append(self, line: bytes) -> None:
        assert self._file is not None
        self._file.write(line)
        self._size += len(line) + 1
        if self._size > LARGEST:
            self._write_anew()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except HeadraceError as error:
            self.close()
            self._warn(
                f"{error}: scores of services and judges are not recorded any more, so a run that is killed asks for them again"
            )

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None

    def _write_anew(self) -> None:
        assert self._path is not None
        self.close()
        self._records = dict(list(self._records.items())[-NEWEST:])
        lines = b"".join(_line(record) + b"\n" for record in self._records.values())
        if lines or self._path.exists():
            replace_file(self._path, lines, flush=False)
        self._file, self._size = AppendFile(self._path), len(lines)

    def _key(self, scorer: str, job: ScoringJob) -> str:
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode((scorer, self._marks.get(scorer, ""), job)))
