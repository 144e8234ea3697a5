"""The journal and the log of passes: what a kill, a full disk and a damaged file leave of them."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from fact_stream import FactStream, records_of, write_journal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.durable import spelling
from headrace.durable.atomic_files import AppendFile
from headrace.durable.journal import (
    JOURNAL,
    AnyRecord,
    Damage,
    DrawnRecord,
    GoneRecord,
    Journal,
    JournalDamaged,
    LiveRecord,
    ReadyRecord,
    SteppedRecord,
    count_steps,
    cut_journal,
    end_of_journal,
    read_journal,
    read_steps,
)
from headrace.durable.pass_log import PassLog, PassNote, discard_passes, read_passes
from headrace.errors import HeadraceError
from headrace.observe.facts import StepTrained
from headrace.reports import TrainReport
from headrace.steps import Finished, StepOutput
from headrace.types import Prompt

FACTS = list(FactStream(steps=3, groups=2, size=2, tokens=4).facts())
RECORDS: tuple[AnyRecord, ...] = (
    DrawnRecord(0.5, 0, Prompt("p0", 'a\n"b" ✓ null', (1, 2), {"answer": 7, "deep": [1, {"x": None}]})),
    DrawnRecord(0.6, 1, Prompt("p1", "", ())),
    GoneRecord(0.9, 1, "failed", "reward_raised", ("reward_raised", "reward_raised")),
    *records_of(FACTS),
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("written")
    write_journal(directory, RECORDS)
    return (directory / JOURNAL).read_bytes()


def put(directory: Path, data: bytes) -> Path:
    (directory / JOURNAL).write_bytes(data)
    return directory


def ends_of(data: bytes) -> list[int]:
    return [i + 1 for i, byte in enumerate(data) if byte == 10]


slow_disk = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


# -- what is written is read ------------------------------------------------------------------------------------------


def test_every_record_comes_back(tmp_path: Path, written: bytes) -> None:
    assert tuple(read_journal(put(tmp_path, written))) == RECORDS
    assert tuple(read_journal(tmp_path, 5)) == RECORDS[5:]
    assert list(read_journal(tmp_path, len(RECORDS) + 3)) == []


def test_a_line_is_json_for_other_readers(written: bytes) -> None:
    line = json.loads(written.splitlines()[2])
    assert line["n"] == 2 and line["record"]["kind"] == "Gone" and line["record"]["reason"] == "reward_raised"


def test_no_file_is_an_empty_journal(tmp_path: Path) -> None:
    assert list(read_journal(tmp_path)) == [] and list(read_steps(tmp_path)) == [] and count_steps(tmp_path) == 0


def test_steps_come_with_the_groups_they_took(tmp_path: Path, written: bytes) -> None:
    put(tmp_path, written)
    trained = [fact for fact in FACTS if isinstance(fact, StepTrained)]
    assert [(one.step, one.version, one.groups, one.report) for one in read_steps(tmp_path)] == [
        (fact.report.step, fact.report.version, fact.groups, fact.report) for fact in trained
    ]
    assert [one.step for one in read_steps(tmp_path, {0, 2})] == [0, 2]
    assert count_steps(tmp_path) == 3


def test_a_skipped_step_is_none_but_its_groups_are_gone(tmp_path: Path) -> None:
    one, two = (ReadyRecord(1.0, FactStream(seed=i).group(i, 0)) for i in range(2))
    skipped = SteppedRecord(2.0, TrainReport(0, 0, skipped="nonfinite_gradient", loss=math.nan), (0,))
    write_journal(tmp_path, [one, two, skipped, SteppedRecord(3.0, TrainReport(0, 1), (1,))])
    (step,) = read_steps(tmp_path)
    assert [group.ticket for group in step.groups] == [1] and step.version == 1
    assert count_steps(tmp_path) == 1


def test_a_step_whose_group_is_missing_is_left_out_and_said(tmp_path: Path) -> None:
    group = FactStream(seed=1).group(8, 0)
    steps = SteppedRecord(3.0, TrainReport(0, 1), (9,)), SteppedRecord(4.0, TrainReport(1, 2), (8,))
    write_journal(tmp_path, [LiveRecord(1.0, 0, "f"), ReadyRecord(2.0, group), *steps])
    damage = Damage()
    assert [one.step for one in read_steps(tmp_path, damage=damage)] == [1] and count_steps(tmp_path) == 2
    assert str(damage) == "line 3 (step 1) trains ticket 9, whose group cannot be read"


numbers = st.floats() | st.sampled_from([math.inf, -math.inf, math.nan, -0.0, 5e-324])


def same(a: float, b: float) -> bool:
    return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (math.isnan(a) and math.isnan(b))


@given(st.lists(numbers, min_size=2, max_size=6), numbers, st.text())
@slow_disk
def test_any_number_and_any_text_come_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, logprobs: list[float], loss: float, text: str
) -> None:
    directory = tmp_path_factory.mktemp("numbers")
    group = FactStream(seed=1).group(0, 0)
    count = len(logprobs)
    row = msgspec.structs.replace(group.rows[0], tokens=(5,) * count, logprobs=tuple(logprobs))
    group = msgspec.structs.replace(group, prompt=Prompt("p", text, ()), rows=(row,))
    write_journal(directory, [ReadyRecord(1.0, group), SteppedRecord(2.0, TrainReport(0, 1, loss=loss), (0,))])
    (step,) = read_steps(directory)
    found = step.groups[0].rows[0].logprobs
    assert all(same(a, b) for a, b in zip(found, logprobs, strict=True)) and same(step.report.loss, loss)
    assert step.groups[0].prompt.text == text


def test_what_is_not_there_does_not_make_encoding_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most rows have fields that are None; only a number that is none may cost the second look."""
    looks: list[object] = []
    plain = spelling._spelled
    monkeypatch.setattr(spelling, "_spelled", lambda value: (looks.append(value), plain(value))[1])
    group = FactStream(seed=1).group(0, 0)
    spelling.encode(ReadyRecord(1.0, group))
    assert not looks
    row = msgspec.structs.replace(group.rows[0], advantages=(math.nan,) * len(group.rows[0].tokens))
    assert b'"nan"' in spelling.encode(ReadyRecord(1.0, msgspec.structs.replace(group, rows=(row,)))) and looks


# -- kills ------------------------------------------------------------------------------------------------------------


@given(st.data())
@slow_disk
def test_a_cut_at_any_byte_costs_the_torn_record_alone(
    tmp_path_factory: pytest.TempPathFactory, written: bytes, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(written)))
    directory = put(tmp_path_factory.mktemp("cut"), written[:cut])
    whole = sum(end <= cut for end in ends_of(written))
    assert tuple(read_journal(directory)) == RECORDS[:whole]
    journal = Journal(directory)
    assert journal.position == whole
    journal.write(LiveRecord(9.0, 77, "after"))
    journal.close()
    assert tuple(read_journal(directory)) == (*RECORDS[:whole], LiveRecord(9.0, 77, "after"))


@given(st.data())
@slow_disk
def test_damage_in_the_middle_is_found_and_named(
    tmp_path_factory: pytest.TempPathFactory, written: bytes, data: st.DataObject
) -> None:
    """Any byte that is another one, newlines included, is found; the records before it are what they were."""
    place = data.draw(st.integers(0, len(written) - 2))  # the last newline lost is a torn end
    other = data.draw(st.integers(0, 255).filter(lambda byte: byte != written[place]))
    directory = put(tmp_path_factory.mktemp("flip"), written[:place] + bytes([other]) + written[place + 1 :])
    line = sum(end <= place for end in ends_of(written))
    found: list[AnyRecord] = []
    with pytest.raises(JournalDamaged, match=rf"journal\.jsonl, line {line + 1}: ") as caught:
        for record in read_journal(directory):
            found.append(record)
    assert tuple(found) == RECORDS[:line] and caught.value.good == line


@pytest.mark.parametrize("what", ["missing", "repeated", "swapped"])
def test_lines_that_are_missing_repeated_or_swapped_are_found(tmp_path: Path, written: bytes, what: str) -> None:
    lines = written.splitlines(keepends=True)
    lines = {
        "missing": [*lines[:3], *lines[4:]],
        "repeated": [*lines[:3], lines[2], *lines[3:]],
        "swapped": [*lines[:3], lines[4], lines[3], *lines[5:]],
    }[what]
    with pytest.raises(
        JournalDamaged, match=r"line 4: holds record [24] instead of 3: lines are missing or were added"
    ):
        list(read_journal(put(tmp_path, b"".join(lines))))


def test_a_record_under_another_number_does_not_match_its_checksum(tmp_path: Path, written: bytes) -> None:
    """Renumbered by hand after a line was taken out: the checksum covers the number."""
    lines = written.splitlines(keepends=True)
    del lines[3]
    lines[3:] = [line.replace(b'{"n":%d,' % (i + 1), b'{"n":%d,' % i, 1) for i, line in enumerate(lines[3:], 3)]
    with pytest.raises(JournalDamaged, match="line 4: does not match its checksum"):
        list(read_journal(put(tmp_path, b"".join(lines))))


def test_a_record_of_another_version_says_so(tmp_path: Path) -> None:
    class Strange(msgspec.Struct, tag_field="kind", tag=True):
        t: float

    journal = Journal(tmp_path)
    journal.write(Strange(1.0))  # type: ignore[arg-type]
    journal.close()
    with pytest.raises(JournalDamaged, match="line 1: was not written by this version of headrace"):
        list(read_journal(tmp_path))


def test_damage_before_a_checkpoint_does_not_hide_what_follows(tmp_path: Path, written: bytes) -> None:
    """Whatever it does to the lines: records are known by their numbers."""
    lines = written.splitlines(keepends=True)
    split = [lines[1][:50] + b"\n", lines[1][50:]]
    for spoilt, damaged in (
        ([lines[0], b"nonsense\n", *lines[2:]], "line 2 is no record"),
        ([lines[0], *lines[2:]], "record 1 cannot be found"),
        (
            [*lines[:2], lines[2][:-1] + lines[3], *lines[4:]],
            "line 3 does not match its checksum; record 3 cannot be found",
        ),
        ([lines[0], *split, *lines[2:]], "line 2 is no record; line 3 is no record"),
        ([*lines[:3], lines[1], *lines[3:]], "line 4 holds record 1, after 2: lines were added"),
    ):
        put(tmp_path, b"".join(spoilt))
        assert tuple(read_journal(tmp_path, 5)) == RECORDS[5:]
        damage = Damage()
        assert end_of_journal(tmp_path, damage) == len(RECORDS) and str(damage) == damaged
        cut_journal(tmp_path, 5)
        assert tuple(read_journal(tmp_path, 5)) == () and end_of_journal(tmp_path) == 5
        journal = Journal(tmp_path)
        journal.write(RECORDS[5])
        journal.close()
        assert tuple(read_journal(tmp_path, 5)) == RECORDS[5:6]


def test_numbers_that_were_lost_are_not_given_again(tmp_path: Path, written: bytes) -> None:
    """A loss of power took the end, and a checkpoint knows of 9 records."""
    put(tmp_path, b"".join(written.splitlines(keepends=True)[:4]))
    journal = Journal(tmp_path, position=9)
    journal.write(RECORDS[9])
    journal.close()
    assert tuple(read_journal(tmp_path, 9)) == RECORDS[9:10]
    with pytest.raises(JournalDamaged, match="line 5: holds record 9 instead of 4"):
        list(read_journal(tmp_path, 4))
    damage = Damage()
    list(read_steps(tmp_path, damage=damage))
    assert str(damage).startswith("records 4 to 8 cannot be found")


def test_cutting_sets_the_rest_aside_and_numbers_go_on(tmp_path: Path, written: bytes) -> None:
    put(tmp_path, written)
    cut_journal(tmp_path, 4)
    lines = written.splitlines()
    assert (tmp_path / "journal.jsonl.discarded").read_bytes().splitlines() == lines[4:]
    journal = Journal(tmp_path)
    journal.write(RECORDS[4])
    journal.close()
    assert tuple(read_journal(tmp_path)) == RECORDS[:5]
    assert (tmp_path / JOURNAL).read_bytes().splitlines() == lines[:5]


# -- disks ------------------------------------------------------------------------------------------------------------


def run(script: str, *arguments: object) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).symlink_to("/dev/full")
    journal = Journal(tmp_path)
    with pytest.raises(HeadraceError, match=r"could not write .*journal\.jsonl: No space left"):
        journal.write(LiveRecord(0.0, 0, "f"))
    journal.close()


@pytest.mark.parametrize("fate", ["deleted", "moved", "replaced"])
def test_a_journal_that_is_there_no_more_is_not_written_to_in_silence(tmp_path: Path, fate: str) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    journal = Journal(run_dir)
    journal.write(LiveRecord(0.0, 0, "f"))
    if fate == "deleted":
        shutil.rmtree(run_dir)
    else:
        run_dir.rename(tmp_path / "elsewhere")
    if fate == "replaced":
        shutil.copytree(tmp_path / "elsewhere", run_dir)
    for ask in (lambda: journal.write(LiveRecord(1.0, 1, "f")), journal.flush):
        with pytest.raises(HeadraceError, match=r"journal.jsonl was deleted, moved or replaced.*resume with --resume"):
            ask()
    journal.close()


def test_a_disk_that_fills_leaves_whole_records_and_their_numbers(tmp_path: Path) -> None:
    script = """
import resource, signal, sys
from pathlib import Path
from headrace.errors import HeadraceError
from headrace.durable.journal import Journal, LiveRecord
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = Journal(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    for version in range(100):
        journal.write(LiveRecord(1.0, version, "f" * 40))
except HeadraceError as error:
    print(version, journal.position)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.write(LiveRecord(2.0, 1000, "room again"))
"""
    failed, position = map(int, run(script, tmp_path).split())
    assert failed == position and 3 < position < 10
    found = list(read_journal(tmp_path))
    assert found == [*(LiveRecord(1.0, i, "f" * 40) for i in range(position)), LiveRecord(2.0, 1000, "room again")]


class Flushes:
    """Counts the calls of os.fsync."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, fd: int) -> None:
        self.count += 1


@pytest.mark.parametrize(("policy", "expected"), [(True, 1), (False, 0)])
def test_a_record_is_with_the_system_at_once_and_on_the_disk_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: bool, expected: int
) -> None:
    flushes, journal = Flushes(monkeypatch), Journal(tmp_path, policy)
    journal.write(LiveRecord(0.0, 0, "f"))
    assert flushes.count == 0 and list(read_journal(tmp_path)) == [LiveRecord(0.0, 0, "f")], (
        "before close, before flush"
    )
    journal.flush()
    assert flushes.count == expected
    journal.close()


def test_a_disk_that_cannot_flush_is_an_error_with_the_file_s_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(fd: int) -> None:
        raise OSError(5, "Input/output error")

    file = AppendFile(tmp_path / "file")
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(HeadraceError, match="could not write .*file: Input/output error"):
        file.flush()
    file.close()


# -- passes -----------------------------------------------------------------------------------------------------------

OUTPUTS = tuple(
    StepOutput(i // 4, ("a", "b"), (i, i + 1), (-0.5, -math.inf), (0, 0), (Finished("a", "stop"),) if i == 7 else ())
    for i in range(10)
)


def log(directory: Path, outputs: Sequence[StepOutput], step: int = 0, warn: list[str] | None = None) -> PassLog:
    passes = PassLog(directory, step, [].append if warn is None else warn.append)
    for output in outputs:
        passes.write(msgspec.msgpack.encode(output))
    return passes


def test_passes_come_back_and_go_on_over_a_restart(tmp_path: Path) -> None:
    log(tmp_path, OUTPUTS[:4]).close()
    log(tmp_path, OUTPUTS[4:6]).close()
    assert tuple(read_passes(tmp_path, 0)) == OUTPUTS[:6]
    assert tuple(read_passes(tmp_path, 1)) == ()


def test_notes_lie_between_the_passes(tmp_path: Path) -> None:
    passes = log(tmp_path, OUTPUTS[:1])
    passes.note("t3/1", b"one")
    passes.write(msgspec.msgpack.encode(OUTPUTS[1]))
    passes.note("t3/1", b"")
    passes.close()
    found = tuple(read_passes(tmp_path, 0))
    assert found == (OUTPUTS[0], PassNote("t3/1", b"one"), OUTPUTS[1], PassNote("t3/1", b""))
    assert tuple(read_passes(tmp_path, 0, first=3)) == found[3:], "they are numbered as passes are"


def test_a_file_goes_with_its_checkpoint(tmp_path: Path) -> None:
    passes = log(tmp_path, OUTPUTS[:2])
    for step in (10, 20):
        passes.begin(step)
        passes.write(msgspec.msgpack.encode(OUTPUTS[step // 10 + 1]))
    assert tuple(read_passes(tmp_path, 0)) == OUTPUTS[:4] and tuple(read_passes(tmp_path, 10)) == OUTPUTS[2:4]
    passes.prune(10)
    assert tuple(read_passes(tmp_path, 10)) == OUTPUTS[2:4] and tuple(read_passes(tmp_path, 20)) == OUTPUTS[3:4]
    assert not (tmp_path / "passes/step-000000.bin").exists()
    discard_passes(tmp_path, 20)
    assert tuple(read_passes(tmp_path, 10)) == OUTPUTS[2:3]


@given(st.data())
@slow_disk
def test_passes_cut_or_damaged_at_any_byte_end_there(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("passes")
    log(directory, OUTPUTS).close()
    path = directory / "passes/step-000000.bin"
    whole = path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        path.write_bytes(whole[:place])
    else:
        path.write_bytes(
            whole[:place] + bytes([whole[place] ^ (1 << data.draw(st.integers(0, 7)))]) + whole[place + 1 :]
        )
    found = tuple(read_passes(directory, 0))
    assert found == OUTPUTS[: len(found)] and len(found) < len(OUTPUTS)
    log(directory, OUTPUTS[len(found) :]).close()
    assert tuple(read_passes(directory, 0)) == OUTPUTS, "what is behind the damage is cut, and writing goes on there"


@pytest.mark.parametrize("kind", ["pass", "note"])
def test_every_bit_of_a_head_is_checked(tmp_path: Path, kind: str) -> None:
    passes = log(tmp_path, OUTPUTS[:1] if kind == "pass" else ())
    if kind == "note":
        passes.note("t3/1", b"one")
    passes.close()
    path = tmp_path / "passes/step-000000.bin"
    whole = path.read_bytes()
    assert len(tuple(read_passes(tmp_path, 0))) == 1
    for bit in range(8 * 20):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert tuple(read_passes(tmp_path, 0)) == (), f"bit {bit}"


def test_what_lies_behind_a_hole_is_not_used(tmp_path: Path) -> None:
    """A disk was full for a while, and so was no checkpoint written: tokens behind the hole do not follow those before it."""
    warned: list[str] = []
    passes = log(tmp_path, OUTPUTS[:2], warn=warned)
    passes._give_up("could not write: No space left on device")
    passes.write(msgspec.msgpack.encode(OUTPUTS[2]))
    passes.begin(10)
    passes.write(msgspec.msgpack.encode(OUTPUTS[3]))
    passes.close()
    assert "start again" in warned[0]
    assert tuple(read_passes(tmp_path, 0)) == OUTPUTS[:2], "from the checkpoint that there is"
    assert tuple(read_passes(tmp_path, 10)) == OUTPUTS[3:4], "from one that was written after all"
    log(tmp_path, OUTPUTS[4:6]).close()  # the next process goes on in the newest file
    assert tuple(read_passes(tmp_path, 0)) == OUTPUTS[:2]
    (tmp_path / "passes/step-000000.bin").unlink()
    assert tuple(read_passes(tmp_path, 0)) == (), "the first file could never be made: all came after a hole"


def test_passes_on_a_full_disk_warn_and_let_the_run_go_on(tmp_path: Path) -> None:
    (tmp_path / "passes").mkdir()
    (tmp_path / "passes/step-000000.bin").symlink_to("/dev/full")
    warned: list[str] = []
    log(tmp_path, OUTPUTS[:3], warn=warned).close()
    assert len(warned) == 1 and "No space left" in warned[0]


def test_passes_in_a_directory_that_cannot_be_made_warn(tmp_path: Path) -> None:
    (tmp_path / "passes").write_text("a file")
    warned: list[str] = []
    log(tmp_path, OUTPUTS[:3], warn=warned).close()
    assert len(warned) == 1 and "cannot be written" in warned[0]
