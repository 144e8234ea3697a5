"""The journal: the complete history of every ticket. With the checkpoint before it, a run can be resumed from any byte.

Records lie in the frames of segments (`segments.py`): MessagePack, compressed one by one. A record is written *before* the buffer changes
accordingly. The operating system has it when `write` returns, so a kill of this process loses none. `flush` (after every step, see
`checkpoint.flush_journal`) writes everything to the disk; a loss of power costs the records after the last flush. An incomplete last
record is cut off. Damage is found by number and checksum, and reported. A record is identified by its number: numbers lost with the power
are not used again, so that the position in a checkpoint stays valid. That position leads to its segment, by the segment's name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import numpy as np
import zstandard

from headrace.core.batches import Demonstration, Group
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.reports import TrainReport
from headrace.core.types import Prompt, Struct
from headrace.durable.atomic_files import AppendFile, remove_parts, sync_to_disk, write_error
from headrace.durable.segments import (
    HEAD,
    JOURNAL,
    SEGMENT,
    RecordPlace,
    Spot,
    first_of,
    framed,
    from_record,
    index_of,
    index_that_fits,
    read_frame,
    read_index,
    read_segment,
    segment_path,
    segments_of,
    table_of,
    write_index,
)

EARLIER = "journal.jsonl"
"""The journal of runs from before 2026-11-28."""


class Record(Struct, frozen=True, tag_field="kind", tag=lambda name: name.removesuffix("Record")):
    """One entry of the journal. Its `kind` there is the name of its class without `Record`: `DrawnRecord` is `Drawn`."""

    t: float
    """Seconds since the start of the run."""


class DrawnRecord(Record, frozen=True):
    """A ticket was drawn, and the task gave this prompt for it."""

    ticket: int
    prompt: Prompt


class ReadyRecord(Record, frozen=True):
    """A group is sampled and scored. The record holds it as the buffer does."""

    group: Group


class GoneRecord(Record, frozen=True):
    """A group will not be trained."""

    ticket: int
    outcome: Literal["dropped", "failed"]
    reason: str
    failures: tuple[str, ...] = ()
    """The reasons of its failed rollouts, if the group itself is dropped for another reason."""
    rewards: tuple[float, ...] = ()
    """The rewards of its scored rollouts. A curriculum chooses prompts by them."""


class SteppedRecord(Record, frozen=True):
    """An optimizer step: the tickets that it took, in order, and its report. A skipped step drops its groups."""

    report: TrainReport
    tickets: tuple[int, ...]
    steps: int = 0
    """The number of steps planned at that time; 0 in journals that did not record it."""
    demonstrations: tuple[Demonstration, ...] = ()
    """The given answers that it trained beside its groups."""


class LiveRecord(Record, frozen=True):
    """The engine serves a version. The fingerprint is that of the weights as they are served (C3)."""

    version: int
    fingerprint: str


R = TypeVar("R", bound=Record)
AnyRecord = DrawnRecord | ReadyRecord | GoneRecord | SteppedRecord | LiveRecord


_DRAWN, _READY, _GONE, _STEPPED, _LIVE, _SKIPPED = range(6)
"""The kinds of frames. Skipped steps have one of their own, so that steps are found and counted without decoding any."""
KINDS: dict[type[Record], tuple[int, ...]] = {
    DrawnRecord: (_DRAWN,),
    ReadyRecord: (_READY,),
    GoneRecord: (_GONE,),
    SteppedRecord: (_STEPPED, _SKIPPED),
    LiveRecord: (_LIVE,),
}


def _kind_and_key(record: AnyRecord) -> tuple[int, int]:
    match record:
        case DrawnRecord():
            return _DRAWN, record.ticket
        case ReadyRecord():
            return _READY, record.group.ticket
        case GoneRecord():
            return _GONE, record.ticket
        case SteppedRecord(report=report):
            return _SKIPPED if report.skipped else _STEPPED, report.step
        case LiveRecord():
            return _LIVE, record.version


_WINDOW = 27
"""log2 of the bytes over which repetitions are found: a training row repeats its episode, which is megabytes before it in long groups."""
_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(
    3, window_log=_WINDOW, enable_ldm=True, write_checksum=False
)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)
_STRANGE = "was not written by this version of headrace"


def _unpack(body: bytes) -> AnyRecord:
    """Raises `msgspec.MsgspecError` for a record of another version of headrace."""
    return _decoder.decode(zstandard.ZstdDecompressor().decompress(body))


class JournalDamaged(HeadraceError):
    """`good`: number of records before the damage."""

    def __init__(self, path: Path, offset: int, good: int, problem: str) -> None:
        super().__init__(f"{path}, byte {offset}: {problem}")
        self.good = good


class Damage:
    """Collects the places of a journal that a reader had to leave out, in words."""

    SHOWN = 3

    def __init__(self) -> None:
        self.places: list[str] = []

    def add(self, place: str, problem: str) -> None:
        """Adds a place, once."""
        if (message := f"{place} {problem}") not in self.places:
            self.places.append(message)

    def missing(self, first: int, last: int) -> None:
        """Adds the records `first` to `last`, if there are any."""
        if first <= last:
            self.add(f"record {first}" if first == last else f"records {first} to {last}", "cannot be found")

    def __bool__(self) -> bool:
        return bool(self.places)

    def __str__(self) -> str:
        more = len(self.places) - self.SHOWN
        return "; ".join([*self.places[: self.SHOWN], *([f"and {more} more"] if more > 0 else [])])


def refuse_earlier(run_dir: Path) -> None:
    """Raises ConfigError if the journal is one of an earlier version."""
    if (run_dir / EARLIER).exists() and not (run_dir / JOURNAL).exists():
        raise ConfigError(
            f"{run_dir / EARLIER} was written by headrace 0.1.0 before 28 November 2026, whose journals this version does not read. "
            "Commit a8879fd6 is the last that does: resume the run and look at it with that one, or start a new run"
        )


def require_journal(run_dir: Path) -> None:
    """Raises ConfigError if the directory has no journal that can be read."""
    refuse_earlier(run_dir)
    if not (run_dir / JOURNAL).is_dir():
        raise ConfigError(f"{run_dir} is not the directory of a run: it has no {JOURNAL}")


def holds_records(run_dir: Path) -> bool:
    """Whether there is a journal in which something was written, of whichever version."""
    return any(path.stat().st_size for path in [*segments_of(run_dir), *run_dir.glob(EARLIER)])


# -- writing ----------------------------------------------------------------------------------------------------------------


class Journal:
    """Writes the journal. Opening it cuts off an incomplete last record."""

    def __init__(self, run_dir: Path, flushes: bool = True, position: int = 0, segment: int = SEGMENT) -> None:
        """`flushes`: whether `flush` does anything. `position`: the lowest number for the next record. `segment`: bytes from which on a
        segment is not appended to any more."""
        self._run_dir, self._flushes, self._segment = run_dir, flushes, segment
        self._compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        directory = run_dir / JOURNAL
        try:
            directory.mkdir(exist_ok=True)
            remove_parts(directory)
            path, whole, self._places, end = self._last()
            self.position = max(position, end)
            """Number of the next record."""
            path = path or segment_path(run_dir, self.position)
        except OSError as error:
            raise write_error(Path(error.filename or directory), error) from error
        self._file = self._open(path, whole)

    def _last(self) -> tuple[Path | None, int, list[RecordPlace], int]:
        """Finds the segment to append to, if there is one: its whole bytes, its frames, and the number after the last record."""
        known = segments_of(self._run_dir)
        while known:
            contents = read_segment(known[-1])
            if contents.whole:
                places = [frame.place for frame in contents.frames]
                end = max((place.number + 1 for place in places), default=0)
                return known[-1], contents.whole, places, end or end_of_journal(self._run_dir)
            known.pop().unlink()  # it was begun, and a kill came before its first record
        return None, 0, [], 0

    def write(self, record: AnyRecord) -> None:
        """Raises `HeadraceError` if the file was deleted, or if the disk cannot be written; nothing is written then."""
        self._file.check()
        kind, key = _kind_and_key(record)
        if self._file.size >= self._segment:
            self._begin_segment()
        place = RecordPlace(self.position, kind, key, self._file.size, 0)
        self._file.append(data := framed(place, self._compressor.compress(_encoder.encode(record))))
        self._places.append(place._replace(length=len(data)))
        self.position += 1

    def flush(self) -> None:
        """Raises as `write` does."""
        self._file.check()
        if self._flushes:
            self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _begin_segment(self) -> None:
        """Ends the last segment and begins the next one. A kill may come between any two operations."""
        if self._flushes:
            self._file.flush()
        write_index(self._file.path, self._places, self._file.size)
        following = self._open(segment_path(self._run_dir, self.position), 0)
        self._file.close()
        self._file, self._places = following, []

    def _open(self, path: Path, whole: int) -> AppendFile:
        file = AppendFile(path, whole=lambda _: whole)
        if self._flushes:
            sync_to_disk(path.parent)
        return file


def cut_journal(run_dir: Path, position: int) -> None:
    """Keeps the records before number `position`, and moves the later ones to `journal.discarded`.

    What cannot be read stays with the record before it. If it is killed in the middle, it can be repeated: after each operation there is a
    whole journal, which ends earlier than the one before."""
    segments = from_record(segments_of(run_dir), position)
    ends = {path: 0 if first_of(path) >= position else _end_before(path, position) for path in segments}
    if all(path.stat().st_size == end for path, end in ends.items()):
        return
    discarded = AppendFile(run_dir / f"{JOURNAL}.discarded", whole=lambda path: read_segment(path).whole)
    try:
        for path, end in ends.items():
            discarded.append(path.read_bytes()[end:])
        discarded.flush()
    finally:
        discarded.close()
    for path, end in reversed(ends.items()):
        index_of(path).unlink(missing_ok=True)
        if end:
            os.truncate(path, end)
            sync_to_disk(path)
        else:
            path.unlink()
    sync_to_disk(run_dir / JOURNAL)


def _end_before(segment: Path, position: int) -> int:
    """Returns the byte at which the records from number `position` on begin."""
    contents, following = read_segment(segment), 0
    for item in contents.items:
        if isinstance(item, Spot):
            if following >= position:
                return item.offset
            continue
        if following >= position or item.place.number >= position:
            return item.place.offset
        following = max(following, item.place.number + 1)
    return contents.whole


# -- reading on from a record -----------------------------------------------------------------------------------------------


def read_journal(run_dir: Path, start: int = 0) -> Iterator[AnyRecord]:
    """The records from number `start` on. Reads the segment of that record and all later ones. Raises `JournalDamaged`. Damage before
    `start` is ignored, and an incomplete last record is left out."""
    segments = from_record(segments_of(run_dir), start)
    following = first_of(segments[0]) if segments and first_of(segments[0]) <= start else 0
    for path in segments:
        for item in read_segment(path).items:
            if isinstance(item, Spot):
                if following >= start:
                    raise JournalDamaged(path, item.offset, following, " ".join(item.told(path)))
                continue
            number, offset = item.place.number, item.place.offset
            if following < start and number < start:
                following = max(following, number + 1)
                continue
            following = max(following, start)
            if number != following:
                problem = f"holds record {number} instead of {following}: records are missing or were added"
                raise JournalDamaged(path, offset, following, problem)
            try:
                record = _unpack(item.body)
            except msgspec.MsgspecError as error:
                raise JournalDamaged(path, offset, following, f"record {number} {_STRANGE}: {error}") from error
            following += 1
            yield record


class InOrder:
    """Names what is damaged, missing or there twice among records that are met in the order of their places."""

    def __init__(self, damage: Damage, following: int | None = 0) -> None:
        """`following`: the number that the first record should have; None if any will do."""
        self._damage, self.following, self._unreadable = damage, following, 0

    def spot(self, spot: Spot, segment: Path) -> None:
        self._damage.add(*spot.told(segment))
        self._unreadable += 1

    def takes(self, number: int) -> bool:
        """Returns whether the record is the next one, or one behind a gap."""
        if self.following is not None:
            if number < self.following:
                self._damage.add(f"record {number}", f"comes again after {self.following - 1}: records were added")
                self._unreadable += 1
                return False
            self._damage.missing(self.following + self._unreadable, number - 1)
        self.following, self._unreadable = number + 1, 0
        return True


def end_of_journal(run_dir: Path, damage: Damage | None = None, start: int = 0) -> int:
    """Number of the record after the last one that can be read.

    `damage`: names what cannot be read in the segment of record `start` and in later ones. Of earlier segments, it names those that are not
    there in full length, as far as their indices say: so the time does not depend on the length of the journal."""
    damage = Damage() if damage is None else damage
    order, segments = InOrder(damage), segments_of(run_dir)
    later = from_record(segments, start)
    _check_sealed(segments[: len(segments) - len(later)], order, damage)
    for path in later:
        for item in read_segment(path).items:
            if isinstance(item, Spot):
                order.spot(item, path)
            else:
                order.takes(item.place.number)
    return end_of_journal(run_dir) if order.following is None else order.following


def _check_sealed(segments: Sequence[Path], order: InOrder, damage: Damage) -> None:
    for path in segments:
        table, size = read_index(path) or (None, 0)
        if table is None or not len(table):
            order.following = None
            continue
        if (now := path.stat().st_size) != size:
            damage.add(path.name, f"has {now} bytes instead of {size}")
        order.takes(int(table["number"][0]))
        order.following = int(table["number"][-1]) + 1


# -- reading by place -------------------------------------------------------------------------------------------------------


class JournalStep(Struct, frozen=True):
    """The groups that one optimizer step consumed, in order, before any of them is trimmed."""

    step: int
    t: float
    version: int
    """The version of the weights after the step."""
    groups: tuple[Group, ...]
    report: TrainReport
    steps: int = 0
    """The planned number of steps, see `SteppedRecord`."""
    demonstrations: tuple[Demonstration, ...] = ()

    @classmethod
    def of(cls, record: SteppedRecord, groups: Sequence[Group]) -> JournalStep:
        report, planned, given = record.report, record.steps, record.demonstrations
        return cls(report.step, record.t, report.version, tuple(groups), report, steps=planned, demonstrations=given)


class _Segment:
    """The places in a segment: those of its index if it has one, else those that were found by reading it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.table = table_of([])
        self.spots: list[tuple[int, Spot]] = []
        """Damage that was met by reading it, each with the number of frames before it."""
        self.indexed = self.loaded = False
        self._read, self._last, self._state = 0, b"", (0, 0, 0)

    def load(self, damage: Damage) -> None:
        """Reads the index if there is one that fits, else what was added since the segment was read last."""
        try:
            self._state = self._state_now()
            found = index_that_fits(self.path)
            if found is None:
                self._read_on(damage)
            else:
                self.table, self.indexed = found, True
            self.loaded = True
        except OSError:  # it was set aside by a resume
            self._restart()

    def check(self) -> None:
        """Forgets an index if the segment is another one by now: a resume has cut the journal."""
        try:
            if self.indexed and self._state_now() != self._state:
                self._restart()
        except OSError:
            self._restart()

    def _state_now(self) -> tuple[int, int, int]:
        now = self.path.stat()
        return now.st_ino, now.st_size, now.st_mtime_ns

    def _read_on(self, damage: Damage) -> None:
        if self.indexed or not self._is_as_it_was():
            self._restart()
        contents = read_segment(self.path, self._read)
        places = self.table.tolist()
        for item in contents.items:
            if isinstance(item, Spot):
                self.spots.append((len(places), item))
                damage.add(*item.told(self.path))
            else:
                places.append(item.place)
        self._read, self.table = contents.whole, table_of([RecordPlace(*place) for place in places])
        self._last = self._head()

    def _restart(self) -> None:
        self.table, self.spots, self._read, self._last = table_of([]), [], 0, b""
        self.indexed = self.loaded = False

    def _is_as_it_was(self) -> bool:
        """Whether the last frame that was read is still there: a resume cuts the last segment, and appends to it."""
        return self.path.stat().st_size >= self._read and self._last == self._head()

    def _head(self) -> bytes:
        if not len(self.table):
            return b""
        with self.path.open("rb") as file:
            file.seek(int(self.table["offset"][-1]))
            return file.read(HEAD)

    def find(self, kind: int, key: int, before: int | None) -> RecordPlace | None:
        table = self.table
        chosen = (table["kind"] == kind) & (table["key"] == key)
        if before is not None:
            chosen &= table["number"] < before
        found = np.flatnonzero(chosen)
        return RecordPlace(*table[found[-1]].tolist()) if len(found) else None

    def in_order(self, order: InOrder, kinds: Collection[int]) -> Iterator[RecordPlace]:
        """Yields the places of records of these kinds."""
        table = self.table
        numbers = table["number"]
        if len(table) and not self.spots and (numbers[1:] == numbers[:-1] + 1).all() and order.takes(int(numbers[0])):
            order.following = int(numbers[-1]) + 1
            yield from (RecordPlace(*row) for row in table[np.isin(table["kind"], list(kinds))].tolist())
            return
        spots = [*self.spots]
        for count, row in enumerate(table.tolist()):
            while spots and spots[0][0] <= count:
                order.spot(spots.pop(0)[1], self.path)
            if order.takes(row[0]) and row[1] in kinds:
                yield RecordPlace(*row)
        for _, spot in spots:
            order.spot(spot, self.path)


class JournalReader:
    """Finds records by ticket, step or kind, without reading the others. A run may write to the journal meanwhile (`refresh`).

    Damage that is met is added to `damage`: all of it in a segment that has no index yet, and whatever is asked for elsewhere."""

    def __init__(self, run_dir: Path, damage: Damage | None = None, patient: bool = True) -> None:
        """`patient`: whether a search reads segments that `refresh` has not reached."""
        self._run_dir, self._patient = run_dir, patient
        self.damage = Damage() if damage is None else damage
        self._segments: list[_Segment] = []
        try:
            refuse_earlier(run_dir)
        except ConfigError as error:  # a report can be made without it
            self.damage.add("its records:", str(error))
        self.refresh()

    def refresh(self, seconds: float | None = None) -> bool:
        """Looks for what was added. `seconds`: read about so long, the newest segments first; by default each when it is needed. Returns
        whether there are segments of which nothing was read yet."""
        known = {segment.path: segment for segment in self._segments}
        for segment in self._segments:
            segment.check()
        self._segments = [known.get(path) or _Segment(path) for path in segments_of(self._run_dir)]
        end = time.monotonic() + (seconds or 0.0)
        for segment in reversed(self._segments):
            if segment.loaded and not segment.indexed:
                segment.load(self.damage)
            elif seconds is not None and not segment.loaded:
                segment.load(self.damage)
                if time.monotonic() > end:
                    break
        return not all(segment.loaded for segment in self._segments)

    def records(self, kind: type[R]) -> Iterator[R]:
        """Yields the records of one kind, in order. Those that cannot be read are left out."""
        for place, segment in self._in_order(KINDS[kind]):
            if record := self._read(place, segment):
                assert isinstance(record, kind)
                yield record

    def numbered(self, kinds: Collection[type[Record]] = tuple(KINDS)) -> Iterator[tuple[int, AnyRecord]]:
        """Yields records with their numbers."""
        for place, segment in self._in_order([code for kind in kinds for code in KINDS[kind]]):
            if record := self._read(place, segment):
                yield place.number, record

    def about(self, step: int | None = None, ticket: int | None = None) -> Iterator[tuple[int, AnyRecord]]:
        """Yields the records, with their numbers, of one step (counted from 0, with the groups that it took), of one ticket, or of both; all
        records without either. Only these are read."""
        tickets = set() if ticket is None else {ticket}
        took: dict[int, int] = {}
        for place, segment in self._in_order((_STEPPED, _SKIPPED) if step is not None else ()):
            if place.key == step and isinstance(record := self._read(place, segment), SteppedRecord):
                took |= dict.fromkeys(record.tickets, place.number)
        for place, segment in self._in_order(range(6)):
            of_step = place.kind in (_STEPPED, _SKIPPED) and place.key == step
            of_group = place.kind == _READY and place.key in took
            of_ticket = place.kind in (_DRAWN, _READY, _GONE) and place.key in tickets
            chosen = of_step or of_group or of_ticket or (step is None and ticket is None)
            if chosen and (record := self._read(place, segment)):
                yield place.number, record

    def keys(self, kind: type[Record]) -> set[int]:
        """Returns the tickets, steps or versions of all records of one kind."""
        return {place.key for place, _ in self._in_order(KINDS[kind])}

    def steps(self, picked: Collection[int] | None = None) -> Iterator[JournalStep]:
        """Yields the steps that were not skipped, in order. `picked`: numbers of the steps to read (the first is 0). Steps that cannot be
        read are left out."""
        for place, segment in self._in_order((_STEPPED,)):
            if (picked is None or place.key in picked) and (step := self._step(place, segment)):
                yield step

    def step(self, number: int) -> JournalStep | None:
        """Returns a step that was not skipped, counted from 0; None if there is none, or if it cannot be read."""
        found = self._find(_STEPPED, number)
        return self._step(*found) if found else None

    def step_of(self, ticket: int) -> JournalStep | None:
        """Returns the step that trained a group; None if none did, or if it cannot be read."""
        ready, gone = self._find(_READY, ticket), self._find(_GONE, ticket)
        if ready is None or (gone and gone[0].number > ready[0].number):
            return None
        for place, segment in self._in_order((_STEPPED,), ready[0].number):
            record = self._read(place, segment)
            if isinstance(record, SteppedRecord) and ticket in record.tickets:
                return self._step(place, segment)
        return None

    def count_steps(self) -> int:
        """Returns the number of steps done, including steps that cannot be read any more."""
        for segment in reversed(self._segments):
            self._load(segment)
            if len(done := segment.table["key"][segment.table["kind"] == _STEPPED]):
                return int(done[-1]) + 1
        return 0

    def group(self, ticket: int) -> Group | None:
        """Returns a group; None if it never was ready, or cannot be read."""
        record = self._newest(_READY, ticket)
        return record.group if isinstance(record, ReadyRecord) else None

    def gone(self, ticket: int) -> GoneRecord | None:
        """Returns why a group was not trained; None if it was, or may be."""
        record = self._newest(_GONE, ticket)
        return record if isinstance(record, GoneRecord) else None

    def size_of(self, ticket: int) -> int:
        """Returns the bytes of a group's record on the disk; 0 if there is none."""
        found = self._find(_READY, ticket)
        return found[0].length if found else 0

    def prompt(self, ticket: int) -> Prompt | None:
        record = self._newest(_DRAWN, ticket)
        return record.prompt if isinstance(record, DrawnRecord) else None

    def report(self, step: int) -> TrainReport | None:
        """Returns the report of a step that was not skipped, counted from 0."""
        record = self._newest(_STEPPED, step)
        return record.report if isinstance(record, SteppedRecord) else None

    def _load(self, segment: _Segment) -> None:
        if not segment.loaded:
            segment.load(self.damage)

    def _in_order(self, kinds: Collection[int], start: int = 0) -> Iterator[tuple[RecordPlace, _Segment]]:
        """The places of all records of these kinds, from record `start` on. Names gaps, and records that come twice."""
        first = len(self._segments) - len(from_record([segment.path for segment in self._segments], start))
        order = InOrder(self.damage, None if first else 0)
        for segment in self._segments[first:]:
            self._load(segment)
            for place in segment.in_order(order, kinds):
                if place.number >= start:
                    yield place, segment

    def _step(self, place: RecordPlace, segment: _Segment) -> JournalStep | None:
        record = self._read(place, segment)
        if not isinstance(record, SteppedRecord):
            return None
        groups: list[Group] = []
        for ticket in record.tickets:
            ready = self._newest(_READY, ticket, place.number)
            if not isinstance(ready, ReadyRecord):
                why = f"(step {place.key + 1}) trains ticket {ticket}, whose group cannot be read"
                self.damage.add(f"record {place.number}", why)
                return None
            groups.append(ready.group)
        return JournalStep.of(record, groups)

    def _find(self, kind: int, key: int, before: int | None = None) -> tuple[RecordPlace, _Segment] | None:
        for segment in reversed(self._segments):
            if before is None or first_of(segment.path) < before:
                if self._patient:
                    self._load(segment)
                if place := segment.find(kind, key, before):
                    return place, segment
        return None

    def _newest(self, kind: int, key: int, before: int | None = None) -> AnyRecord | None:
        found = self._find(kind, key, before)
        return self._read(*found) if found else None

    def _read(self, place: RecordPlace, segment: _Segment) -> AnyRecord | None:
        body = read_frame(segment.path, place)
        if body is None:
            self.damage.add(f"record {place.number}", "does not match its checksum")
            return None
        try:
            return _unpack(body)
        except msgspec.MsgspecError as error:
            self.damage.add(f"record {place.number}", f"{_STRANGE}: {error}")
            return None


def read_steps(
    run_dir: Path, picked: Collection[int] | None = None, damage: Damage | None = None
) -> Iterator[JournalStep]:
    """See `JournalReader.steps`."""
    return JournalReader(run_dir, damage).steps(picked)


def read_only(run_dir: Path, kind: type[R], damage: Damage | None = None) -> Iterator[R]:
    """See `JournalReader.records`."""
    return JournalReader(run_dir, damage).records(kind)


def count_steps(run_dir: Path) -> int:
    """See `JournalReader.count_steps`."""
    return JournalReader(run_dir).count_steps()
