"""The journal and the log of passes: what a kill, a full disk and a damaged file leave of them."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace import cli
from headrace.core.batches import Group
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.reports import TrainReport
from headrace.core.steps import Finished, StepOutput
from headrace.core.types import Prompt, SamplingMask
from headrace.durable import spelling
from headrace.durable.atomic_files import AppendFile
from headrace.durable.journal import (
    KINDS,
    AnyRecord,
    Damage,
    DrawnRecord,
    GoneRecord,
    Journal,
    JournalDamaged,
    JournalReader,
    LiveRecord,
    ReadyRecord,
    SteppedRecord,
    count_steps,
    cut_journal,
    end_of_journal,
    read_journal,
    read_only,
    read_steps,
)
from headrace.durable.pass_log import PassLog, PassNote, discard_passes, read_passes
from headrace.durable.segments import HEAD, JOURNAL, SEGMENT, framed, index_of, read_index, segments_of
from headrace.facts.facts import StepTrained
from headrace.testing.faultsim.faults import Disk, Fault, Killed
from support.fact_stream import FactStream, records_of, write_journal
from support.few import few
from support.journal_frames import frames_of, places_of, put_frames, spoil

FACTS = list(FactStream(steps=3, groups=2, size=2, tokens=4).facts())
RECORDS: tuple[AnyRecord, ...] = (
    DrawnRecord(0.5, 0, Prompt("p0", 'a\n"b" ✓ null', (1, 2), {"answer": 7, "deep": [1, {"x": None}]})),
    DrawnRecord(0.6, 1, Prompt("p1", "", ())),
    GoneRecord(0.9, 1, "failed", "reward_raised", ("reward_raised", "reward_raised")),
    *records_of(FACTS),
)
SMALL = 900
"""Bytes of a segment for a few records."""
PLACES = len(RECORDS)


@pytest.fixture(scope="module", params=[SEGMENT, SMALL], ids=["one segment", "several segments"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with these records; tests copy it."""
    directory = tmp_path_factory.mktemp("written")
    write_journal(directory, RECORDS, request.param)
    assert (len(segments_of(directory)) > 3) == (request.param == SMALL)
    return directory


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    return copied(written, tmp_path)


def copied(written: Path, to: Path) -> Path:
    shutil.copytree(written / JOURNAL, to / JOURNAL)
    return to


def strict(directory: Path) -> tuple[list[AnyRecord], JournalDamaged | None]:
    """The records up to the first damage, and it."""
    found: list[AnyRecord] = []
    try:
        for record in read_journal(directory):
            found.append(record)
    except JournalDamaged as error:
        return found, error
    return found, None


slow_disk = settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])


# -- what is written is read ------------------------------------------------------------------------------------------


def test_every_record_comes_back(run: Path) -> None:
    assert tuple(read_journal(run)) == RECORDS
    assert end_of_journal(run) == len(RECORDS)
    for start in range(len(RECORDS) + 4):
        assert tuple(read_journal(run, start)) == RECORDS[start:]
        damage = Damage()
        assert end_of_journal(run, damage, start) == len(RECORDS) and not damage
    assert [record for _, record in JournalReader(run).numbered()] == list(RECORDS)


def test_a_resume_opens_what_an_earlier_process_wrote(run: Path) -> None:
    """Process after process, each of which writes a record and is killed."""
    more = [LiveRecord(9.0, version, "f" * 300) for version in range(12)]
    for number, record in enumerate(more, len(RECORDS)):
        journal = Journal(run, segment=SMALL)
        assert journal.position == number
        journal.write(record)
    assert tuple(read_journal(run)) == (*RECORDS, *more)
    damage = Damage()
    assert list(read_only(run, LiveRecord, damage))[-12:] == more and not damage


def test_records_are_printed_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "config.toml").write_text("")

    def printed(*options: str) -> list[dict[str, Any]]:
        assert cli.main(["inspect", str(run), "--records", *options]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    lines = printed()
    assert [line["n"] for line in lines] == list(range(len(RECORDS)))
    assert lines[2]["record"] == {
        "kind": "Gone", "t": 0.9, "ticket": 1, "outcome": "failed", "reason": "reward_raised",
        "failures": ["reward_raised", "reward_raised"], "rewards": [],
    }  # fmt: skip
    step = next(
        number for number, record in enumerate(RECORDS) if isinstance(record, SteppedRecord) and record.report.step == 1
    )
    tickets = RECORDS[step].tickets  # type: ignore[union-attr]
    about = printed("--step", "2")
    assert [line["n"] for line in about][-1] == step and len(about) == 1 + len(tickets)
    assert [line["record"]["kind"] for line in printed("--ticket", "1")][:2] == ["Drawn", "Gone"]
    spoil(run, 2)
    assert cli.main(["inspect", str(run), "--records"]) == 1
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == len(RECORDS) - 1 and "record 2 does not match its checksum" in output.err


def test_no_file_is_an_empty_journal(tmp_path: Path) -> None:
    assert list(read_journal(tmp_path)) == [] and list(read_steps(tmp_path)) == [] and count_steps(tmp_path) == 0


def test_steps_come_with_the_groups_they_took(run: Path) -> None:
    trained = [fact for fact in FACTS if isinstance(fact, StepTrained)]
    assert [(one.step, one.version, one.groups, one.report) for one in read_steps(run)] == [
        (fact.report.step, fact.report.version, fact.groups, fact.report) for fact in trained
    ]
    assert [one.step for one in read_steps(run, {0, 2})] == [0, 2]
    assert count_steps(run) == 3
    reader = JournalReader(run)
    for fact in trained:
        assert reader.step(fact.report.step) in list(read_steps(run))
        for group in fact.groups:
            step = reader.step_of(group.ticket)
            assert step is not None and step.step == fact.report.step and reader.group(group.ticket) == group
    assert reader.step(3) is None and reader.step_of(999) is None and reader.gone(1) == RECORDS[2]


def test_a_skipped_step_is_none_but_its_groups_are_gone(tmp_path: Path) -> None:
    one, two = (ReadyRecord(1.0, FactStream(seed=i).group(i, 0)) for i in range(2))
    skipped = SteppedRecord(2.0, TrainReport(0, 0, skipped="nonfinite_gradient", loss=math.nan), (0,))
    write_journal(tmp_path, [one, two, skipped, SteppedRecord(3.0, TrainReport(0, 1), (1,))])
    (step,) = read_steps(tmp_path)
    assert [group.ticket for group in step.groups] == [1] and step.version == 1
    assert count_steps(tmp_path) == 1 and len(list(read_only(tmp_path, SteppedRecord))) == 2


def test_a_step_whose_group_is_missing_is_left_out_and_said(tmp_path: Path) -> None:
    group = FactStream(seed=1).group(8, 0)
    steps = SteppedRecord(3.0, TrainReport(0, 1), (9,)), SteppedRecord(4.0, TrainReport(1, 2), (8,))
    write_journal(tmp_path, [LiveRecord(1.0, 0, "f"), ReadyRecord(2.0, group), *steps])
    damage = Damage()
    assert [step.step for step in read_steps(tmp_path, damage=damage)] == [1] and count_steps(tmp_path) == 2
    assert str(damage) == "record 2 (step 1) trains ticket 9, whose group cannot be read"


numbers = st.floats() | st.sampled_from([math.inf, -math.inf, math.nan, -0.0, 5e-324])


def bits(values: Sequence[float]) -> list[bytes]:
    """NaN is not equal to itself, 0.0 is to -0.0, and a NaN has 2^52 faces."""
    return [struct.pack("<d", value) for value in values]


@given(st.lists(numbers, min_size=2, max_size=6), numbers, st.text(), st.binary(), st.integers(0, 2**63 - 1))
@slow_disk
def test_any_number_and_any_text_come_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, logprobs: list[float], loss: float, text: str, mask: bytes, ticket: int
) -> None:
    directory = tmp_path_factory.mktemp("numbers")
    group = FactStream(seed=1).group(ticket, 0)
    count = len(logprobs)
    row = msgspec.structs.replace(
        group.rows[0], tokens=(ticket,) * count, logprobs=tuple(logprobs), sampling_mask=SamplingMask(mask, mask)
    )
    columns = {"text": text, "nested": [{"value": loss}], "whole": ticket}
    group = msgspec.structs.replace(group, prompt=Prompt("p", text, (), columns), rows=(row,))
    write_journal(directory, [ReadyRecord(1.0, group), SteppedRecord(2.0, TrainReport(0, 1, loss=loss), (ticket,))])
    (step,) = read_steps(directory)
    found = step.groups[0].rows[0]
    assert bits(found.logprobs) == bits(logprobs) and bits([step.report.loss]) == bits([loss])
    assert found.tokens == row.tokens and found.sampling_mask == row.sampling_mask
    read = step.groups[0].prompt
    assert read.text == text and bits([read.columns["nested"][0]["value"]]) == bits([loss])
    assert read.columns["text"] == text and read.columns["whole"] == ticket


kinds = st.sampled_from(["drawn", "ready", "gone", "stepped", "live"])


@given(st.lists(st.tuples(kinds, st.integers(0, 5)), max_size=40), st.integers(200, 4000), st.data())
@slow_disk
def test_any_records_in_segments_of_any_size_are_found(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[str, int]], segment: int, data: st.DataObject
) -> None:
    """From any record on, by number, kind and ticket; over restarts; with and without their indices."""
    directory, stream, steps = tmp_path_factory.mktemp("any"), FactStream(seed=1), 0
    groups = {ticket: stream.group(ticket, 0) for ticket in range(6)}
    records: list[AnyRecord] = []
    for kind, ticket in drawn:
        records.append(_made(kind, ticket, steps, groups[ticket]))
        steps += kind == "stepped"
    journal = Journal(directory, segment=segment)
    for number, record in enumerate(records):
        if data.draw(st.integers(0, 9)) == 0:
            journal.close()
            journal = Journal(directory, segment=segment)
            assert journal.position == number
        journal.write(record)
    journal.close()
    if data.draw(st.booleans()):
        for path in segments_of(directory):
            index_of(path).unlink(missing_ok=True)
    start = data.draw(st.integers(0, len(records)))
    assert list(read_journal(directory, start)) == records[start:] and count_steps(directory) == steps
    reader = JournalReader(directory)
    assert [record for _, record in reader.numbered()] == records
    for kind in KINDS:
        assert list(reader.records(kind)) == [record for record in records if isinstance(record, kind)]
    ready = {record.group.ticket for record in records if isinstance(record, ReadyRecord)}
    assert reader.keys(ReadyRecord) == ready and {t for t in range(6) if reader.group(t)} == ready
    assert not reader.damage


def _made(kind: str, ticket: int, step: int, group: Group) -> AnyRecord:
    if kind == "drawn":
        return DrawnRecord(1.0, ticket, group.prompt)
    if kind == "ready":
        return ReadyRecord(1.0, group)
    if kind == "gone":
        return GoneRecord(1.0, ticket, "dropped", "no_contrast", rewards=(0.5, math.inf))
    return SteppedRecord(1.0, TrainReport(step, step + 1), ()) if kind == "stepped" else LiveRecord(1.0, ticket, "f")


def test_long_repetitions_are_stored_once(tmp_path: Path) -> None:
    """A training row repeats its episode, megabytes after it: 16 rollouts of 16,384 tokens, each token with a log-prob of 24 random bits."""
    group, rng = FactStream(seed=1, size=2).group(0, 0), np.random.default_rng(0)
    scored, rows = [], []
    for rollout, row in zip(group.scored * 8, group.rows * 8, strict=True):
        tokens, values = (
            tuple(rng.integers(0, 50_000, 16384).tolist()),
            tuple(rng.random(16384).astype(np.float32).tolist()),
        )
        done = msgspec.structs.replace(rollout.episode.last, tokens=tokens, logprobs=values)
        turns = (msgspec.structs.replace(rollout.episode.turns[0], completion=done),)
        scored.append(msgspec.structs.replace(rollout, episode=msgspec.structs.replace(rollout.episode, turns=turns)))
        columns = {"advantages": (0.5,) * 16384, "mask": (True,) * 16384, "versions": (3,) * 16384}
        rows.append(msgspec.structs.replace(row, tokens=tokens, logprobs=values, **columns))
    group = msgspec.structs.replace(group, scored=tuple(scored), rows=tuple(rows))
    write_journal(tmp_path, [ReadyRecord(1.0, group)])
    assert segments_of(tmp_path)[0].stat().st_size < 6.8 * 16 * 16384, "7.1 without long-distance matching"
    assert list(read_journal(tmp_path)) == [ReadyRecord(1.0, group)]


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


@pytest.mark.slow
def test_a_cut_at_any_byte_costs_the_torn_record_alone(written: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The last segment as a kill or a loss of power can leave it: whole up to any byte, then nothing, or blocks that were never written."""
    places = places_of(written)
    last = segments_of(written)[-1]
    data = last.read_bytes()
    ends = [place.offset + place.length for path, place in places if path == last]
    before = len(places) - len(ends)
    directory = copied(written, tmp_path_factory.mktemp("cut"))
    for cut in range(len(data) + 1):
        for tail in (b"", bytes(64)) if cut % 3 == 0 else (b"",):
            left = data[:cut] + tail
            (directory / JOURNAL / last.name).write_bytes(left)
            whole = before + sum(left[:end] == data[:end] for end in ends)  # a frame may end with zeros of its own
            assert strict(directory) == (list(RECORDS[:whole]), None), (cut, tail)
            if (cut % 7 and cut not in ends) or tail:
                continue
            journal = Journal(directory, segment=SMALL)
            assert journal.position == whole
            journal.write(LiveRecord(9.0, 77, "after"))
            journal.close()
            assert tuple(read_journal(directory)) == (*RECORDS[:whole], LiveRecord(9.0, 77, "after"))
            shutil.rmtree(directory / JOURNAL)
            copied(written, directory)


@pytest.mark.slow
def test_another_byte_anywhere_is_found_and_named(written: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """In any segment, sealed or not; the records before it are what they were, and all others can still be read."""
    directory = copied(written, tmp_path_factory.mktemp("flip"))
    for path, place in places_of(directory):
        data, number = path.read_bytes(), place.number
        for at in range(place.offset, place.offset + place.length):
            path.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
            with pytest.raises(JournalDamaged) as caught:
                next(read_journal(directory, number))
            assert caught.value.good == number and f"{path}, byte {place.offset}: " in str(caught.value), at
            if at % 7 == 0 or at == place.offset:
                assert strict(directory)[0] == list(RECORDS[:number])
                assert tuple(read_journal(directory, number + 1)) == RECORDS[number + 1 :]
                damage = Damage()
                assert end_of_journal(directory, damage, number) >= number and damage
                reader = JournalReader(directory)
                others = [record for known, record in enumerate(RECORDS) if known != number]
                assert [one for _, one in reader.numbered()] == others and reader.damage
        path.write_bytes(data)


def test_an_index_is_only_a_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Missing, cut, changed at any byte, of another segment, or of the segment as it was: nothing is read otherwise."""
    directory = tmp_path_factory.mktemp("index")
    write_journal(directory, RECORDS, SMALL)
    first, second, *_ = segments_of(directory)
    data = index_of(first).read_bytes()
    assert read_index(first) is not None and not index_of(segments_of(directory)[-1]).exists()
    steps = list(read_steps(directory))

    def reads_all() -> None:
        reader = JournalReader(directory)
        assert list(reader.steps()) == steps and not reader.damage
        assert [one for _, one in reader.numbered()] == list(RECORDS) and end_of_journal(directory) == len(RECORDS)

    for at in range(len(data)):
        index_of(first).write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        assert read_index(first) is None
        if at % 20 == 0:
            reads_all()
            index_of(first).write_bytes(data[:at])
            reads_all()
    index_of(first).write_bytes(index_of(second).read_bytes())
    reads_all()
    index_of(first).unlink()
    reads_all()
    index_of(first).write_bytes(data)
    first.write_bytes(first.read_bytes() + frames_of(directory)[0])
    reader = JournalReader(directory)
    assert list(reader.steps()) == steps and "comes again" in str(reader.damage), "it is read as it is now"


def test_a_forged_index_does_not_give_other_records(tmp_path: Path) -> None:
    """Valid in itself, and of a segment of the same length: what lies at its places is checked, and its last record at once."""
    records = [LiveRecord(1.0, 7, "a" * 64), LiveRecord(1.0, 8, "b" * 64), LiveRecord(1.0, 9, "f" * 64)]
    swapped, ended = [records[1], records[0], records[2]], [records[0], records[2], records[1]]
    for name, order in (("one", records), ("two", swapped), ("three", ended)):
        (tmp_path / name).mkdir()
        journal = Journal(tmp_path / name, segment=250)
        for record in [*order, LiveRecord(1.0, 10, "f")]:
            journal.write(record)
        journal.close()
    one, two, three = (segments_of(tmp_path / name)[0] for name in ("one", "two", "three"))
    assert one.stat().st_size == two.stat().st_size == three.stat().st_size and len(segments_of(tmp_path / "one")) == 2
    index_of(one).write_bytes(index_of(two).read_bytes())
    reader = JournalReader(tmp_path / "one")
    found = [(number, one) for number, one in reader.numbered() if number < 3]
    assert set(found) < set(enumerate(records)) and "does not match" in str(reader.damage)
    index_of(one).write_bytes(index_of(three).read_bytes())
    reader = JournalReader(tmp_path / "one")
    assert [record for _, record in reader.numbered()][:3] == records and not reader.damage


def test_a_cut_segment_before_the_last_is_a_gap_that_is_named(tmp_path: Path) -> None:
    write_journal(tmp_path, RECORDS, SMALL)
    second = segments_of(tmp_path)[1]
    lost = {place.number for path, place in places_of(tmp_path) if path == second}
    data = second.read_bytes()
    for cut in (0, 5, HEAD, len(data) - 1):
        second.write_bytes(data[:cut])
        found, error = strict(tmp_path)
        assert error is not None and error.good == len(found) <= max(lost)
        assert found == list(RECORDS[: len(found)]) and "instead of" in str(error)
        damage = Damage()
        assert end_of_journal(tmp_path, damage, len(RECORDS)) == len(RECORDS)
        assert str(damage) == f"{second.name} has {cut} bytes instead of {len(data)}", "a resume looks at its length"
        damage = Damage()
        assert list(read_only(tmp_path, LiveRecord, damage)) and "cannot be found" in str(damage)
    second.unlink()
    damage = Damage()
    assert end_of_journal(tmp_path, damage, len(RECORDS)) == len(RECORDS)
    assert str(damage) == f"records {min(lost)} to {max(lost)} cannot be found" if len(lost) > 1 else "cannot be found"
    assert tuple(read_journal(tmp_path, max(lost) + 1)) == RECORDS[max(lost) + 1 :]


@pytest.mark.parametrize("what", ["missing", "repeated", "swapped"])
def test_records_that_are_missing_repeated_or_swapped_are_found(run: Path, what: str) -> None:
    frames = frames_of(run)
    frames = {
        "missing": [*frames[:3], *frames[4:]],
        "repeated": [*frames[:3], frames[2], *frames[3:]],
        "swapped": [*frames[:3], frames[4], frames[3], *frames[5:]],
    }[what]
    with pytest.raises(JournalDamaged, match=r": holds record [24] instead of 3: records are missing or were added"):
        list(read_journal(put_frames(run, frames)))


def test_a_record_under_another_number_does_not_match_its_checksum(run: Path) -> None:
    """Renumbered by hand after a record was taken out: the checksum covers the number."""
    frames = frames_of(run)
    places = [place for _, place in places_of(run)]
    kept = [framed(places[4]._replace(number=3), frames[4][HEAD:])]
    checksum = frames[4][25:33]
    head = kept[0][:25] + checksum
    import xxhash

    forged = head + struct.pack("<I", xxhash.xxh32_intdigest(head)) + frames[4][HEAD:]
    put_frames(run, [*frames[:3], forged])
    with pytest.raises(JournalDamaged, match="record 3 does not match its checksum"):
        list(read_journal(run))


def test_a_record_of_another_version_says_so(tmp_path: Path) -> None:
    class Strange(msgspec.Struct, tag_field="kind", tag="Live"):
        version: int = 0

    write_journal(tmp_path, [LiveRecord(1.0, 0, "f")])
    (frame,), (_, place) = frames_of(tmp_path), places_of(tmp_path)[0]
    import zstandard

    body = zstandard.compress(msgspec.msgpack.encode(Strange()))
    put_frames(tmp_path, [frame, framed(place._replace(number=1), body)])
    with pytest.raises(JournalDamaged, match="record 1 was not written by this version of headrace"):
        list(read_journal(tmp_path))
    damage = Damage()
    assert len(list(read_only(tmp_path, LiveRecord, damage))) == 1
    assert "record 1 was not written by this version" in str(damage)


def test_a_journal_of_an_earlier_version_is_refused_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "journal.jsonl").write_text('{"n":0}\n')
    damage = Damage()
    assert not list(read_steps(tmp_path, damage=damage)) and "Commit a8879fd6 is the last that does" in str(damage)
    for command in (["inspect"], ["diff", str(tmp_path)], ["replay", "--step", "1"]):
        with pytest.raises(ConfigError, match="Commit a8879fd6 is the last that does: resume the run"):
            raise_from(command, tmp_path)


def raise_from(command: list[str], run_dir: Path) -> None:
    from headrace.commands.replay.rerun import plan_rerun
    from headrace.commands.show.diff import compare_runs
    from headrace.commands.show.inspect import find_step

    {
        "inspect": lambda: find_step(run_dir, None, None),
        "diff": lambda: compare_runs(run_dir, run_dir),
        "replay": lambda: plan_rerun(run_dir, 1, 1),
    }[command[0]]()


def test_damage_before_a_checkpoint_does_not_hide_what_follows(run: Path) -> None:
    """Whatever it does to the frames: records are known by their numbers."""
    frames = frames_of(run)
    torn = frames[1][:20]
    for spoilt, damaged in (
        ([frames[0], b"nonsense", *frames[2:]], f"byte {len(frames[0])} of 000000000000.segment begins no record"),
        ([frames[0], *frames[2:]], "record 1 cannot be found"),
        ([*frames[:2], frames[2][:-1], *frames[3:]], "record 2 does not match its checksum"),
        (
            [frames[0], torn, b"x", frames[1][20:], *frames[2:]],
            f"byte {len(frames[0])} of 000000000000.segment begins no record",
        ),
        ([*frames[:3], frames[1], *frames[3:]], "record 1 comes again after 2: records were added"),
    ):
        put_frames(run, spoilt)
        assert tuple(read_journal(run, 5)) == RECORDS[5:]
        damage = Damage()
        assert end_of_journal(run, damage) == len(RECORDS) and str(damage) == damaged
        cut_journal(run, 5)
        assert tuple(read_journal(run, 5)) == () and end_of_journal(run) == 5
        journal = Journal(run)
        journal.write(RECORDS[5])
        journal.close()
        assert tuple(read_journal(run, 5)) == RECORDS[5:6]


def test_numbers_that_were_lost_are_not_given_again(run: Path) -> None:
    """A loss of power took the end, and a checkpoint knows of 9 records."""
    put_frames(run, frames_of(run)[:4])
    journal = Journal(run, position=9)
    journal.write(RECORDS[9])
    journal.close()
    assert tuple(read_journal(run, 9)) == RECORDS[9:10]
    with pytest.raises(JournalDamaged, match="holds record 9 instead of 4"):
        list(read_journal(run, 4))
    damage = Damage()
    list(read_steps(run, damage=damage))
    assert str(damage).startswith("records 4 to 8 cannot be found")


def test_a_segment_that_was_begun_and_not_written_to_is_none(tmp_path: Path) -> None:
    """A kill came just behind its beginning, and a loss of power took the records before it too."""
    write_journal(tmp_path, RECORDS[:6], segment=1)
    *kept, last = segments_of(tmp_path)
    last.write_bytes(b"")
    kept[-1].unlink()
    journal = Journal(tmp_path, segment=1)
    assert journal.position == 4
    for record in RECORDS[4:]:
        journal.write(record)
    journal.close()
    assert tuple(read_journal(tmp_path)) == RECORDS and tuple(read_journal(tmp_path, 5)) == RECORDS[5:]


@pytest.mark.parametrize("segment", [SEGMENT, SMALL, 1])
@pytest.mark.parametrize("position", few(range(0, PLACES + 2, 2), keep=3))
def test_cutting_sets_the_rest_aside_and_numbers_go_on(tmp_path: Path, segment: int, position: int) -> None:
    """Also when it is killed between any two operations, and done again; each state between is a whole journal."""

    def make() -> Path:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        (tmp_path / "run").mkdir()
        write_journal(tmp_path / "run", RECORDS, segment)
        return tmp_path / "run"

    (tmp_path / "aside").mkdir()
    frames = frames_of(make())
    disk = Disk(tmp_path / "run")
    with disk.mounted() as mounted:
        cut_journal(mounted, position)
    for at, kind in itertools.product(range(disk.operations + 1), ("kill", "power")):
        path = make()
        broken = Disk(path, [Fault(kind, 0, at, 0.5)] if at < disk.operations else [])  # type: ignore[arg-type]
        try:
            with broken.mounted() as mounted:
                cut_journal(mounted, position)
        except Killed:
            broken.lose()
            found, error = strict(path)
            assert error is None and found == list(RECORDS[: len(found)]) and len(found) >= min(position, len(RECORDS))
            cut_journal(path, position)
        assert frames_of(path) == frames[:position]
        aside = path / f"{JOURNAL}.discarded"
        assert set(frames[position:]) <= set(frames_of(put_frames(tmp_path / "aside", [aside.read_bytes()]))
                                             if aside.exists() else [])  # fmt: skip
        journal = Journal(path, segment=segment)
        assert journal.position == min(position, len(RECORDS))
        journal.write(RECORDS[0])
        journal.close()
        assert tuple(read_journal(path)) == (*RECORDS[:position], RECORDS[0])


@pytest.mark.parametrize("kind", few(["kill", "power", "full"], keep=1))
def test_killed_at_any_operation_of_the_writing_nothing_whole_is_lost(tmp_path: Path, kind: Any) -> None:
    """Also in the middle of a write, and between the operations at which one segment ends and another begins."""
    records, count = RECORDS[:9], 0

    def write(directory: Path) -> int:
        """How many records there are, by a process that is killed or told of a full disk."""
        journal = Journal(directory, segment=300)
        try:
            for record in records[journal.position :]:
                journal.write(record)
                journal.flush()
        except HeadraceError as error:
            assert "No space left" in str(error)
            journal.write(records[journal.position])
        journal.close()
        return journal.position

    (tmp_path / "count").mkdir()
    disk = Disk(tmp_path / "count")
    with disk.mounted() as mounted:
        write(mounted)
    assert disk.operations > 9 + 4 * 3, "there are several segments"
    for at in range(2, disk.operations):
        for share in (0.0, 0.5, 0.99):
            directory = tmp_path / f"run-{kind}-{at}-{share}"
            directory.mkdir()
            disk = Disk(directory, [Fault(kind, 0, at, 0.0 if kind == "full" else share)])
            try:
                with disk.mounted() as mounted:
                    write(mounted)
                count += 1
            except Killed:
                pass
            except HeadraceError:
                assert kind == "full" and at < 4, "there was no journal yet"
            disk.lose()
            found, error = strict(directory)
            assert error is None and found == list(records[: len(found)])
            assert write(directory) == len(records) and tuple(read_journal(directory)) == records
            damage = Damage()
            assert [one for _, one in JournalReader(directory, damage).numbered()] == list(records) and not damage
            shutil.rmtree(directory)
    assert bool(count) == (kind == "full")


# -- a run that goes on meanwhile -------------------------------------------------------------------------------------


@pytest.mark.parametrize("segment", [SMALL, SEGMENT])
def test_a_reader_follows_a_journal_that_is_written_and_cut(tmp_path: Path, segment: int) -> None:
    reader = JournalReader(tmp_path, patient=False)
    journal = Journal(tmp_path, segment=segment)
    for number, record in enumerate(RECORDS):
        journal.write(record)
        reader.refresh(60.0)
        assert [one for _, one in reader.numbered()] == list(RECORDS[: number + 1])
    journal.close()
    step = next(number for number, record in enumerate(RECORDS) if isinstance(record, SteppedRecord))
    cut_journal(tmp_path, step)
    reader.refresh(60.0)
    assert [one for _, one in reader.numbered()] == list(RECORDS[:step]) and reader.report(0) is None
    cut_journal(tmp_path, step - 1)  # and by another process, before it looks again
    again = [msgspec.structs.replace(record, t=77.0) for record in RECORDS[step - 1 :]]
    write_journal(tmp_path, again, segment)
    reader.refresh(60.0)
    assert [one for _, one in reader.numbered()] == [*RECORDS[: step - 1], *again] and not reader.damage


# -- disks ------------------------------------------------------------------------------------------------------------


def child(script: str, *arguments: object) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    for at in range(3):  # the directory, the segment, the record
        with (
            Disk(tmp_path, [Fault("full", 0, at)]).mounted() as mounted,
            pytest.raises(HeadraceError, match=r"could not write .*/journal(/000000000000\.segment)?: No space left"),
        ):
            write_journal(mounted, [LiveRecord(0.0, 0, "f")])


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
        with pytest.raises(HeadraceError, match=r"\.segment was deleted, moved or replaced.*resume with --resume"):
            ask()
    journal.close()


@pytest.mark.parametrize("size", [0, 5, 1000])
def test_a_journal_that_another_program_cuts_or_writes_to_is_not_written_to_in_silence(
    tmp_path: Path, size: int
) -> None:
    """A program that rotates logs copies a file and cuts it: the records would be gone, and later ones stand elsewhere than their index says."""
    journal = Journal(tmp_path)
    journal.write(LiveRecord(0.0, 0, "f"))
    (segment,) = segments_of(tmp_path)
    os.truncate(segment, size)
    for ask in (lambda: journal.write(LiveRecord(1.0, 1, "f")), journal.flush):
        with pytest.raises(HeadraceError, match=rf"has {size} bytes, and \d+ were written to it.*resume with --resume"):
            ask()
    journal.close()


def test_a_disk_that_fills_leaves_whole_records_and_their_numbers(tmp_path: Path) -> None:
    script = """
import resource, signal, sys
from pathlib import Path
from headrace.core.errors import HeadraceError
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
    failed, position = map(int, child(script, tmp_path).split())
    assert failed == position and 3 < position < 20
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
    journal = Journal(tmp_path, policy)
    flushes = Flushes(monkeypatch)
    journal.write(LiveRecord(0.0, 0, "f"))
    assert flushes.count == 0 and list(read_journal(tmp_path)) == [LiveRecord(0.0, 0, "f")], (
        "before close, before flush"
    )
    journal.flush()
    assert flushes.count == expected
    journal.close()


def test_a_segment_is_on_the_disk_before_the_next_one_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path, segment=1)
    flushes = Flushes(monkeypatch)
    for version in range(3):
        journal.write(LiveRecord(0.0, version, "f"))
    assert flushes.count == 2 * 2, "the segment, and the name of the next one"
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


def test_a_resume_reads_no_more_of_an_old_journal_than_of_a_young_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of segments that are read on the way to the last record, of a journal ten times as long."""
    group, read = FactStream(seed=1).group(0, 0), []
    plain = Path.open
    for count in (30, 300):
        directory = tmp_path / str(count)
        directory.mkdir()
        write_journal(directory, [ReadyRecord(1.0, group)] * count, segment=20_000)
        opened: list[int] = []

        def counted(path: Path, mode: str = "r", *more: Any, opened: list[int] = opened, **named: Any) -> Any:
            if path.suffix == ".segment":
                opened.append(path.stat().st_size)
            return plain(path, mode, *more, **named)

        monkeypatch.setattr(Path, "open", counted)
        position = count - 3
        assert end_of_journal(directory, Damage(), position) == count
        assert len(list(read_journal(directory, position))) == 3
        Journal(directory, segment=20_000).close()
        read.append(sum(opened))
        monkeypatch.undo()
    assert read[1] < 2 * read[0] and len(segments_of(tmp_path / "300")) > 5


# -- passes -----------------------------------------------------------------------------------------------------------

OUTPUTS = tuple(
    StepOutput(i // 4, ("a", "b"), (i, i + 1), (-0.5, -math.inf), (0, 0), (Finished("a", "stop"),) if i == 7 else ())
    for i in range(10)
)


def log(directory: Path, outputs: Sequence[StepOutput], step: int = 0, warn: list[str] | None = None) -> PassLog:
    passes = PassLog(directory, step, [].append if warn is None else warn.append)
    for output in outputs:
        passes.write(output)
    return passes


def test_passes_come_back_and_go_on_over_a_restart(tmp_path: Path) -> None:
    log(tmp_path, OUTPUTS[:4]).close()
    log(tmp_path, OUTPUTS[4:6]).close()
    assert tuple(read_passes(tmp_path, 0)) == OUTPUTS[:6]
    assert tuple(read_passes(tmp_path, 1)) == ()


def test_passes_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """Three passes of two requests, as they were written until the 29th of November 2026."""
    passes = log(tmp_path, OUTPUTS[:1])
    passes._append(bytes.fromhex(EARLIER), 0)
    passes.write(OUTPUTS[1])
    passes.close()
    before, earlier, after = read_passes(tmp_path, 0)
    assert (before, after) == OUTPUTS[:2]
    assert isinstance(earlier, StepOutput)
    assert list(earlier.sampled()) == [
        ("a", 20, 0.0, 4), ("a", 21, -0.25, 4), ("a", 22, -0.5, 4), ("b", 8, -2.0, 4), ("b", 9, -2.0, 4), ("b", 10, -2.0, 4)
    ]  # fmt: skip
    assert earlier.as_runs().rows.kv_versions == (4, 3) and earlier.finished == (Finished("a", "stop"),)


EARLIER = (
    "8ba776657273696f6e04ab726571756573745f69647390a6746f6b656e7390a86c6f6770726f627390ab6b765f76657273696f6e7390a866696e69736865649184aa72"
    "6571756573745f6964a161a473746f70a473746f70a56572726f72a0a7726f7574696e67c0a876657273696f6e7390a764657461696c7390a673636f72657390a56d69"
    "786564c2a472756e7386ab726571756573745f69647392a161a162a5636f756e7403a6746f6b656e73c41814000000150000001600000008000000090000000a000000"
    "a86c6f6770726f6273c4300000000000000080000000000000d0bf000000000000e0bf00000000000000c000000000000000c000000000000000c0a876657273696f6e"
    "73920404ab6b765f76657273696f6e73920403"
)


def test_notes_lie_between_the_passes(tmp_path: Path) -> None:
    passes = log(tmp_path, OUTPUTS[:1])
    passes.note("t3/1", b"one")
    passes.write(OUTPUTS[1])
    passes.note("t3/1", b"")
    passes.close()
    found = tuple(read_passes(tmp_path, 0))
    assert found == (OUTPUTS[0], PassNote("t3/1", b"one"), OUTPUTS[1], PassNote("t3/1", b""))
    assert tuple(read_passes(tmp_path, 0, first=3)) == found[3:], "they are numbered as passes are"


def test_a_file_goes_with_its_checkpoint(tmp_path: Path) -> None:
    passes = log(tmp_path, OUTPUTS[:2])
    for step in (10, 20):
        passes.begin(step)
        passes.write(OUTPUTS[step // 10 + 1])
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
    passes.write(OUTPUTS[2])
    passes.begin(10)
    passes.write(OUTPUTS[3])
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
