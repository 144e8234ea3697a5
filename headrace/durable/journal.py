"""`journal.jsonl`: the complete history of every ticket. With the checkpoint before it, a run can be resumed from any byte.

One JSON line per record, `{"n": number, "sum": checksum, "record": {"kind": ..., ...}}`; lines are only appended. A record is written
*before* the buffer changes accordingly. The operating system has it when `write` returns, so a kill of this process loses none. `flush`
(after every step, see `checkpoint.flush_journal`) writes everything to the disk; a loss of power costs the records after the last flush.
An incomplete last line is cut off. Damage is found by number and checksum, and reported. A record is identified by its number, not by its
line: numbers lost with the power are not used again, so that the position in a checkpoint stays valid.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from itertools import repeat
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import xxhash

from headrace.batches import Group
from headrace.durable.atomic_files import AppendFile, keep_lines, read_lines
from headrace.durable.spelling import encode
from headrace.errors import HeadraceError
from headrace.reports import TrainReport
from headrace.types import Prompt, Struct

JOURNAL = "journal.jsonl"


class Record(Struct, frozen=True, tag_field="kind", tag=lambda name: name.removesuffix("Record")):
    """One line of the journal. Its `kind` there is the name of its class without `Record`: `DrawnRecord` is `Drawn`."""

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


class LiveRecord(Record, frozen=True):
    """The engine serves a version. The fingerprint is that of the weights as they are served (C3)."""

    version: int
    fingerprint: str


R = TypeVar("R", bound=Record)
AnyRecord = DrawnRecord | ReadyRecord | GoneRecord | SteppedRecord | LiveRecord


_HEAD = re.compile(rb'\{"n":(\d+),"sum":"([0-9a-f]{16})","record":')
_record: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord, strict=False)
_STRANGE = "was not written by this version of headrace"


class JournalDamaged(HeadraceError):
    """`good`: number of records before the damage."""

    def __init__(self, path: Path, line: int, good: int, problem: str) -> None:
        super().__init__(f"{path}, line {line}: {problem}")
        self.good = good


class Damage:
    """Collects the places of a journal that a reader had to leave out, in words."""

    SHOWN = 3

    def __init__(self) -> None:
        self.places: list[str] = []

    def add(self, place: str, problem: str) -> None:
        self.places.append(f"{place} {problem}")

    def missing(self, first: int, last: int) -> None:
        """Adds the records `first` to `last`, if there are any."""
        if first <= last:
            self.add(f"record {first}" if first == last else f"records {first} to {last}", "cannot be found")

    def __bool__(self) -> bool:
        return bool(self.places)

    def __str__(self) -> str:
        more = len(self.places) - self.SHOWN
        return "; ".join([*self.places[: self.SHOWN], *([f"and {more} more"] if more > 0 else [])])


class Journal:
    """Writes the journal. Opening it cuts off an incomplete last line."""

    def __init__(self, run_dir: Path, flushes: bool = True, position: int = 0) -> None:
        """`flushes`: whether `flush` does anything. `position`: the lowest number for the next record."""
        self._file = AppendFile(run_dir / JOURNAL)
        self._flushes = flushes
        self.position = max(position, end_of_journal(run_dir))
        """Number of the next record."""

    def write(self, record: AnyRecord) -> None:
        """Raises `HeadraceError` if the file was deleted, or if the disk cannot be written; the file is unchanged then."""
        self._file.check()
        body = encode(record)
        self._file.write(b'{"n":%d,"sum":"%s","record":%s}' % (self.position, _sum(self.position, body), body))
        self.position += 1

    def flush(self) -> None:
        """Raises as `write` does."""
        self._file.check()
        if self._flushes:
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_journal(run_dir: Path, start: int = 0) -> Iterator[AnyRecord]:
    """The records from number `start` on. Raises `JournalDamaged`. Damage before `start` is ignored, and an incomplete last line is left
    out."""
    path, following = run_dir / JOURNAL, 0
    for line, text in enumerate(read_lines(path), 1):
        number, body, problem = _parsed(text)
        if following < start and (problem or number < start):
            following = max(following, number + 1)
            continue
        following = max(following, start)
        if not problem and number != following:
            problem = f"holds record {number} instead of {following}: lines are missing or were added"
        if problem:
            raise JournalDamaged(path, line, following, problem)
        try:
            record = _record.decode(body)
        except msgspec.MsgspecError as error:
            raise JournalDamaged(path, line, following, f"{_STRANGE}: {error}") from error
        following += 1
        yield record


def read_record(line: bytes) -> AnyRecord | None:
    """Returns the record of one line, without its newline; None if the line is damaged."""
    _, body, problem = _parsed(line)
    try:
        return None if problem else _record.decode(body)
    except msgspec.MsgspecError:
        return None


def end_of_journal(run_dir: Path, damage: Damage | None = None) -> int:
    """Number of the record after the last one that can be read."""
    return max((number + 1 for number, _, _ in _readable(run_dir, damage)), default=0)


def cut_journal(run_dir: Path, position: int) -> None:
    """Keeps the records before number `position`, and moves the later ones to `journal.jsonl.discarded`.

    A line that cannot be read stays with the record before it."""
    lines = kept = following = 0
    for text in read_lines(run_dir / JOURNAL):
        lines += 1
        number, _, problem = _parsed(text)
        if kept < lines - 1 or following >= position or (not problem and number >= position):
            continue
        kept, following = lines, max(following, number + 1)
    if kept < lines:
        keep_lines(run_dir / JOURNAL, repeat(True, kept))


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


class _Peek(msgspec.Struct, tag_field="kind", tag="Ready"):
    """Decodes only the ticket of a group."""

    group: _Ticket


class _Ticket(msgspec.Struct):
    ticket: int


_peek = msgspec.json.Decoder(_Peek)
_gone = msgspec.json.Decoder(GoneRecord)
_stepped = msgspec.json.Decoder(SteppedRecord, strict=False)


def read_steps(
    run_dir: Path, picked: Collection[int] | None = None, damage: Damage | None = None
) -> Iterator[JournalStep]:
    """The steps that were not skipped, in order. `picked`: numbers of the steps to return (the first is 0); the others are not decoded.

    Steps that cannot be read are left out. They and all other damage are added to `damage`."""
    damage = Damage() if damage is None else damage
    ready: dict[int, bytes] = {}
    for _, line, body in _readable(run_dir, damage):
        try:
            if body.startswith(b'{"kind":"Ready"'):
                ready[_peek.decode(body).group.ticket] = body
            elif body.startswith(b'{"kind":"Gone"'):
                ready.pop(_gone.decode(body).ticket, None)
            elif body.startswith(b'{"kind":"Stepped"'):
                record = _stepped.decode(body)
                groups = [ready.pop(ticket, b"") for ticket in record.tickets]
                step = record.report.step
                if record.report.skipped:
                    continue
                if not all(groups):
                    lost = record.tickets[groups.index(b"")]
                    damage.add(f"line {line}", f"(step {step + 1}) trains ticket {lost}, whose group cannot be read")
                elif picked is None or step in picked:
                    yield _step(record, groups)
        except msgspec.MsgspecError as error:
            damage.add(f"line {line}", f"{_STRANGE}: {error}")


def read_only(run_dir: Path, kind: type[R], damage: Damage | None = None) -> Iterator[R]:
    """The records of one kind, without decoding the others. Records that cannot be read are left out and added to `damage`."""
    start = b'{"kind":"%s"' % str(kind.__struct_config__.tag).encode()
    decoder = msgspec.json.Decoder(kind, strict=False)
    for _, _, body in _readable(run_dir, damage):
        if body.startswith(start):
            yield decoder.decode(body)


def count_steps(run_dir: Path) -> int:
    """Number of steps done, including steps that cannot be read any more."""
    done = 0
    for text in read_lines(run_dir / JOURNAL):
        if b'"record":{"kind":"Stepped"' in text[:80]:
            _, body, problem = _parsed(text)
            if not problem and not (report := _stepped.decode(body).report).skipped:
                done = report.version
    return done


def _step(record: SteppedRecord, bodies: list[bytes]) -> JournalStep:
    groups = []
    for body in bodies:
        ready = _record.decode(body)
        assert isinstance(ready, ReadyRecord)
        groups.append(ready.group)
    report = record.report
    return JournalStep(
        step=report.step, t=record.t, version=report.version, groups=tuple(groups), report=report, steps=record.steps
    )


def _readable(run_dir: Path, damage: Damage | None) -> Iterator[tuple[int, int, bytes]]:
    """Number, line (counted from 1) and body of every readable record."""
    damage = Damage() if damage is None else damage
    following = unreadable = 0
    for line, text in enumerate(read_lines(run_dir / JOURNAL), 1):
        number, body, problem = _parsed(text)
        if not problem and number < following:
            problem = f"holds record {number}, after {following - 1}: lines were added"
        if problem:
            damage.add(f"line {line}", problem)
            unreadable += 1
            continue
        damage.missing(following + unreadable, number - 1)
        following, unreadable = number + 1, 0
        yield number, line, body


def _parsed(line: bytes) -> tuple[int, bytes, str]:
    """Number and body of the record in a line, or -1 and the problem. It expects the exact form that `write` produces, so that it need not
    parse the JSON."""
    head = _HEAD.match(line)
    if head is None or not line.endswith(b"}"):
        return -1, b"", "is no record"
    number, body = int(head[1]), line[head.end() : -1]
    if head[2] != _sum(number, body):
        return -1, b"", "does not match its checksum"
    return number, body, ""


def _sum(number: int, body: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(b"%d|" % number + body).encode()
