"""`journal.jsonl`: what happened to every ticket, complete; with a checkpoint before it, enough to go on from any byte.

One JSON line a record, `{"n": number, "sum": checksum, "record": {"kind": ..., ...}}`, only ever appended to. A record is
written *before* what it says is done to the buffer, and is in the operating system's hands when `write` returns: a kill of
this process loses none. `flush` (after every step, see `checkpoint.flush_journal`) puts all on the disk: a loss of power
costs what came since. A torn end is cut off. Damage in the middle is found by number and checksum, and said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice, repeat
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import xxhash

from headrace.errors import HeadraceError
from headrace.observe.files import AppendFile, keep_lines, read_lines
from headrace.observe.spelling import encode
from headrace.reports import TrainReport
from headrace.types import Group, Prompt, Struct

JOURNAL = "journal.jsonl"


class Record(Struct, frozen=True, tag_field="kind", tag=True):
    t: float
    """Seconds since the start of the run."""


class Drawn(Record, frozen=True):
    """A ticket, and the prompt that the task gave for it."""

    ticket: int
    prompt: Prompt


class Ready(Record, frozen=True):
    """A group whose rollouts are sampled and scored, as the buffer holds it."""

    group: Group


class Gone(Record, frozen=True):
    """A group that will not be trained."""

    ticket: int
    outcome: Literal["dropped", "failed"]
    reason: str
    failures: tuple[str, ...] = ()
    """Reasons of the rollouts that failed, where the group is dropped for another one."""


class Stepped(Record, frozen=True):
    """What one optimizer step took, in order, and what came of it. A skipped one drops its groups."""

    report: TrainReport
    tickets: tuple[int, ...]


class Live(Record, frozen=True):
    """A version that the engine serves, and the fingerprint of its weights as they are served (C3)."""

    version: int
    fingerprint: str


R = TypeVar("R", bound=Record)
AnyRecord = Drawn | Ready | Gone | Stepped | Live


_HEAD = re.compile(rb'\{"n":(\d+),"sum":"([0-9a-f]{16})","record":')
_record: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord, strict=False)


class JournalDamaged(HeadraceError):
    """`good`: records before the damage."""

    def __init__(self, path: Path, good: int, problem: str) -> None:
        super().__init__(f"{path}, line {good + 1}: {problem}")
        self.good = good


class Journal:
    """The end that writes. Opening it cuts a torn last line."""

    def __init__(self, run_dir: Path, flushes: bool = True) -> None:
        """`flushes`: whether `flush` does anything."""
        self._file = AppendFile(run_dir / JOURNAL)
        self._flushes = flushes
        self.position = sum(1 for _ in read_lines(self._file.path))
        """Records so far."""

    def write(self, record: AnyRecord) -> None:
        """Raises `HeadraceError` when the disk does not take it, and the file is then as it was; or when somebody deleted it."""
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
    """The records from number `start` on. Raises `JournalDamaged`; a torn last line is left out."""
    path = run_dir / JOURNAL
    for number, line in enumerate(islice(read_lines(path), start, None), start):
        body = _checked(path, number, line)
        try:
            yield _record.decode(body)
        except msgspec.MsgspecError as error:
            raise JournalDamaged(path, number, f"was not written by this version of headrace: {error}") from error


def cut_journal(run_dir: Path, position: int) -> None:
    """Keeps so many records; the others go to `journal.jsonl.discarded`."""
    keep_lines(run_dir / JOURNAL, repeat(True, position))


class JournalStep(Struct, frozen=True):
    """What one optimizer step consumed, in order, before anything of it is trimmed."""

    step: int
    t: float
    version: int
    """That the step made."""
    groups: tuple[Group, ...]
    report: TrainReport


class _Peek(msgspec.Struct, tag_field="kind", tag="Ready"):
    """Of a group no more than its ticket."""

    group: _Ticket


class _Ticket(msgspec.Struct):
    ticket: int


_peek = msgspec.json.Decoder(_Peek)
_gone = msgspec.json.Decoder(Gone)


def read_steps(run_dir: Path, picked: set[int] | None = None) -> Iterator[JournalStep]:
    """The steps that were not skipped, in order; `picked` by place among them (0 is the first), without decoding the others."""
    path = run_dir / JOURNAL
    ready: dict[int, bytes] = {}
    place = 0
    for number, line in enumerate(read_lines(path)):
        body = _checked(path, number, line)
        if body.startswith(b'{"kind":"Ready"'):
            ready[_peek.decode(body).group.ticket] = body
        elif body.startswith(b'{"kind":"Gone"'):
            ready.pop(_gone.decode(body).ticket, None)
        elif body.startswith(b'{"kind":"Stepped"'):
            record = _record.decode(body)
            assert isinstance(record, Stepped)
            if missing := [ticket for ticket in record.tickets if ticket not in ready]:
                raise JournalDamaged(path, number, f"trains ticket {missing[0]}, whose group is not in the journal")
            groups = [ready.pop(ticket) for ticket in record.tickets]
            if record.report.skipped:
                continue
            if picked is None or place in picked:
                yield _step(record, groups)
            place += 1


def read_only(run_dir: Path, kind: type[R]) -> Iterator[R]:
    """The records of one kind, without decoding the others."""
    path, start = run_dir / JOURNAL, b'{"kind":"%s"' % kind.__name__.encode()
    decoder = msgspec.json.Decoder(kind, strict=False)
    for number, line in enumerate(read_lines(path)):
        body = _checked(path, number, line)
        if body.startswith(start):
            yield decoder.decode(body)


def count_steps(run_dir: Path) -> int:
    """Steps that `read_steps` can give."""
    lines = (line for line in read_lines(run_dir / JOURNAL) if b'"record":{"kind":"Stepped"' in line[:80])
    return sum(b'"skipped":""' in line or b'"skipped":' not in line for line in lines)


def _step(record: Stepped, bodies: list[bytes]) -> JournalStep:
    groups = []
    for body in bodies:
        ready = _record.decode(body)
        assert isinstance(ready, Ready)
        groups.append(ready.group)
    report = record.report
    return JournalStep(report.step, record.t, report.version, tuple(groups), report)


def _checked(path: Path, number: int, line: bytes) -> bytes:
    """The record's own bytes. The line is as `write` spells it, so that nobody has to look for its end."""
    head = _HEAD.match(line)
    if head is None or not line.endswith(b"}"):
        raise JournalDamaged(path, number, "is no record")
    body = line[head.end() : -1]
    if int(head[1]) != number:
        raise JournalDamaged(
            path, number, f"holds record {int(head[1])} instead of {number}: lines are missing or were added"
        )
    if head[2] != _sum(number, body):
        raise JournalDamaged(path, number, "does not match its checksum")
    return body


def _sum(number: int, body: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(b"%d|" % number + body).encode()
