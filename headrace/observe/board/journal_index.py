"""The places of groups, prompts and steps in `journal.jsonl`, so that one rollout of many millions is read by itself."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import BinaryIO

import numpy as np

from headrace.batches import Group
from headrace.durable.journal import JOURNAL, DrawnRecord, ReadyRecord, SteppedRecord, read_record
from headrace.observe.index.group_table import FARTHEST
from headrace.observe.index.growing import Growing
from headrace.reports import TrainReport
from headrace.types import Prompt

PLACE = np.dtype([("offset", "i8"), ("length", "i8")])
_HEAD = re.compile(
    rb'\{"n":\d+,"sum":"[0-9a-f]{16}","record":\{"kind":"(Ready|Drawn|Stepped)","t":[^,]+,(?:"(?:group|report)":\{)?"(?:ticket|step)":(\d+)'
)
_LONGEST_HEAD = 200
_LINES = 4096
"""Lines between two looks at the clock."""
TAIL = 32 << 20
"""Bytes at the end of a longer journal that are read first, so that the newest rollouts are there at once."""
_LEAST = 64
"""Fewest bytes of a record, by which a file bounds the tickets that it can have."""


class JournalIndex:
    """Places of records by ticket, or by the number of their step. `catch_up` reads what was added; only the head of a line is looked at."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / JOURNAL
        self._restart(0)

    def _restart(self, inode: int) -> None:
        self._inode, self._offset = inode, 0
        self._places = {kind: Growing(PLACE) for kind in (b"Ready", b"Drawn", b"Stepped")}

    def catch_up(self, seconds: float) -> bool:
        """Reads for about `seconds`. Returns whether there is more."""
        end = time.monotonic() + seconds
        try:
            file = self._path.open("rb")
        except OSError:
            return False
        with file:
            found = os.fstat(file.fileno())
            if found.st_size < self._offset or found.st_ino != self._inode:
                self._restart(found.st_ino)
                if found.st_size > 2 * TAIL:
                    self._read_tail(file, found.st_size)
            file.seek(self._offset)
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                self._add(line, self._offset, FARTHEST)
                self._offset += len(line)
                if number % _LINES == 0 and time.monotonic() > end:
                    return True
        return False

    def _read_tail(self, file: BinaryIO, size: int) -> None:
        file.seek(size - TAIL)
        place = size - TAIL + len(file.readline())
        for line in file:
            if line.endswith(b"\n"):
                self._add(line, place, size // _LEAST)
            place += len(line)

    def _add(self, line: bytes, offset: int, farthest: int) -> None:
        """`farthest`: places behind the last known one at which a number is damage."""
        if head := _HEAD.match(line[:_LONGEST_HEAD]):
            places, number = self._places[head[1]], int(head[2])
            if number < len(places) + farthest:
                places.put(number, (offset, len(line)))

    def group(self, ticket: int) -> Group | None:
        """Returns a group; None if it never was ready, or if its line is damaged."""
        record = self._record(b"Ready", ticket)
        return record.group if isinstance(record, ReadyRecord) else None

    def size_of(self, ticket: int) -> int:
        """Returns the bytes of a group's record; 0 if its place is not known."""
        places = self._places[b"Ready"].view
        return int(places[ticket]["length"]) if ticket < len(places) else 0

    def prompt(self, ticket: int) -> Prompt | None:
        record = self._record(b"Drawn", ticket)
        return record.prompt if isinstance(record, DrawnRecord) else None

    def report(self, step: int) -> TrainReport | None:
        """Returns the report of a step, counted from 0. A step that was skipped and done again counts with its last record."""
        record = self._record(b"Stepped", step)
        return record.report if isinstance(record, SteppedRecord) else None

    def _record(self, kind: bytes, number: int) -> object:
        places = self._places[kind].view
        if not 0 <= number < len(places) or not places[number]["length"]:
            return None
        place = places[number]
        try:
            with self._path.open("rb") as file:
                file.seek(int(place["offset"]))
                return read_record(file.read(int(place["length"]) - 1))
        except OSError:
            return None
