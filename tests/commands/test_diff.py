"""The first differences between two runs, found from their journals alone."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from headrace import cli
from headrace.commands.show.diff import RunComparison, compare_runs, report
from headrace.core.batches import Group
from headrace.core.errors import ConfigError
from headrace.core.types import Prompt
from headrace.durable.journal import AnyRecord, DrawnRecord, GoneRecord, ReadyRecord, SteppedRecord
from headrace.views.screen.console import Console
from support.fact_stream import FactStream, records_of, write_journal
from support.journal_frames import spoil

FACTS = list(FactStream(steps=4, groups=2, size=2, tokens=6, troubles=False).facts())
RECORDS: list[AnyRecord] = [DrawnRecord(0.1, 3, Prompt("p3", "", (1, 2))), *records_of(FACTS)]
STEPS = [record for record in RECORDS if isinstance(record, SteppedRecord)]
CONFIG = 'name = "one"\nseed = 1\n[train]\nlearning_rate = 0.01\n[engine]\ndtype = "float32"\n'


def make(directory: Path, records: list[AnyRecord], config: str = CONFIG) -> Path:
    directory.mkdir()
    (directory / "config.toml").write_text(config, encoding="utf-8")
    write_journal(directory, records)
    return directory


def parting(tmp_path: Path, other: list[AnyRecord]) -> RunComparison:
    return compare_runs(make(tmp_path / "a", RECORDS), make(tmp_path / "b", other))


def changed(ticket: int, change: Callable[[Group], Group]) -> list[AnyRecord]:
    return [
        msgspec.structs.replace(record, group=change(record.group))
        if isinstance(record, ReadyRecord) and record.group.ticket == ticket
        else record
        for record in RECORDS
    ]


def with_completion(rollout: int, **fields: object) -> Callable[[Group], Group]:
    def change(group: Group) -> Group:
        one = group.scored[rollout]
        turn = one.episode.turns[0]
        turn = msgspec.structs.replace(turn, completion=msgspec.structs.replace(turn.completion, **fields))
        one = msgspec.structs.replace(one, episode=msgspec.structs.replace(one.episode, turns=(turn,)))
        scored = (*group.scored[:rollout], one, *group.scored[rollout + 1 :])
        return msgspec.structs.replace(group, scored=scored)

    return change


TICKET = STEPS[2].tickets[1]
"""The second group of step 3."""
GROUP = next(record.group for record in RECORDS if isinstance(record, ReadyRecord) and record.group.ticket == TICKET)
DONE = GROUP.scored[1].episode.last


def test_a_run_does_not_part_from_itself(tmp_path: Path) -> None:
    found = parting(tmp_path, [msgspec.structs.replace(record, t=record.t + 5) for record in RECORDS])
    assert found.earliest is None and found.steps == 4 and not found.settings


def test_other_tokens_are_found_at_step_group_rollout_and_token(tmp_path: Path) -> None:
    last = len(DONE.tokens) - 1
    found = parting(tmp_path, changed(TICKET, with_completion(1, tokens=(*DONE.tokens[:-1], 7))))
    one = found.earliest
    assert one is not None and (one.kind, one.step, one.ticket, one.rollout, one.token) == ("token", 3, TICKET, 1, last)
    assert (one.a, one.b) == (str(DONE.tokens[-1]), "7") and set(found.first) == {"token"}
    assert one.place == f"step 3, ticket {TICKET} ({GROUP.prompt.id}), rollout 1, token {last}"


def test_a_completion_that_is_shorter_parts_where_it_ends(tmp_path: Path) -> None:
    shorter = {"tokens": DONE.tokens[:-1], "logprobs": DONE.logprobs[:-1]}
    one = parting(tmp_path, changed(TICKET, with_completion(1, **shorter))).earliest
    assert one is not None and (one.token, one.b) == (len(DONE.tokens) - 1, "ended")


@pytest.mark.parametrize(("by", "kinds"), [(1e-6, {"logprob"}), (0.01, {"logprob", "rounding"})])
def test_log_probs_are_compared_exactly_and_beyond_rounding(tmp_path: Path, by: float, kinds: set[str]) -> None:
    logprobs = (DONE.logprobs[0] - by, *DONE.logprobs[1:])
    found = parting(tmp_path, changed(TICKET, with_completion(1, logprobs=logprobs)))
    assert set(found.first) == kinds and {one.token for one in found.first.values()} == {0}


def test_versions_rewards_advantages_and_masks_are_told_apart(tmp_path: Path) -> None:
    spans = tuple(msgspec.structs.replace(span, version=span.version - 1) for span in DONE.spans)
    row = GROUP.rows[0]
    rows = (
        msgspec.structs.replace(row, advantages=(9.0, *row.advantages[1:]), mask=(*row.mask[:-1], False)),
        GROUP.rows[1],
    )

    def change(group: Group) -> Group:
        group = with_completion(1, spans=spans)(group)
        one = msgspec.structs.replace(group.scored[0], rewards={"correct": 0.25, "format": 0.1})
        return msgspec.structs.replace(group, scored=(one, *group.scored[1:]), rows=rows)

    found = parting(tmp_path, changed(TICKET, change))
    assert set(found.first) == {"version", "reward", "advantage", "mask"}
    assert found.first["reward"].what == "correct" and found.first["reward"].b == "0.25"
    assert found.first["advantage"].b == "9" and found.first["mask"].token == len(row.mask) - 1
    assert found.earliest is not None and found.earliest.kind == "version", "the first in the order of causes"


def test_reports_are_compared_but_for_time(tmp_path: Path) -> None:
    def slower(one: AnyRecord, loss: float) -> AnyRecord:
        if not isinstance(one, SteppedRecord):
            return one
        seconds = msgspec.structs.replace(one.report, seconds=99.0)
        return msgspec.structs.replace(
            one, report=msgspec.structs.replace(seconds, loss=loss) if one.report.step == 1 else seconds
        )

    found = parting(tmp_path, [slower(record, 0.5) for record in RECORDS])
    assert [(one.step, one.what) for one in found.first.values()] == [(2, "loss")] and found.counts == {"report": 1}


def test_groups_taken_otherwise_and_prompts_and_ends(tmp_path: Path) -> None:
    other: list[AnyRecord] = [
        msgspec.structs.replace(record, tickets=record.tickets[::-1]) if record is STEPS[1] else record
        for record in RECORDS
    ]
    other[0] = DrawnRecord(0.1, 3, Prompt("p3", "", (1, 9)))
    other.append(GoneRecord(9.0, 5, "dropped", "no_contrast"))
    both = [*RECORDS, GoneRecord(9.0, 6, "failed", "reward_raised")]
    found = compare_runs(
        make(tmp_path / "a", both), make(tmp_path / "b", [*other, GoneRecord(9.0, 6, "failed", "reward_timeout")])
    )
    assert set(found.first) == {"prompt", "order", "outcome"}
    assert found.first["prompt"].place == "ticket 3 (p3), other tokens" and found.earliest is found.first["prompt"]
    assert found.first["order"].step == 2 and found.counts["outcome"] == 2


def test_a_run_that_ended_earlier_parts_at_its_end(tmp_path: Path) -> None:
    found = parting(tmp_path, RECORDS[: RECORDS.index(STEPS[2]) + 1])
    one = found.earliest
    assert one is not None and (one.kind, one.step, one.a, one.b) == ("length", 4, "done", "not done")
    assert found.steps == 3


def test_what_is_printed_and_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = make(tmp_path / "a", RECORDS)
    changed_config = CONFIG.replace("0.01", "0.02").replace('"one"', '"two"')
    b = make(tmp_path / "b", changed(TICKET, with_completion(1, tokens=(7, *DONE.tokens[1:]))), changed_config)
    console = Console(file=io.StringIO(), width=160)
    assert report(a, b, console) == 1
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert (
        f"The first difference is at step 3, ticket {TICKET} ({GROUP.prompt.id}), rollout 1, token 0: tokens, 100 | 7"
        in output
    )
    assert "train.learning_rate" in output and "0.02" in output and "two" not in output
    assert cli.main(["diff", str(a), str(a)]) == 0
    assert "are the same" in " ".join(capsys.readouterr().out.split())


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    a = make(tmp_path / "a", RECORDS)
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match="not the directory of a run"):
        compare_runs(a, tmp_path / "none")


@pytest.mark.parametrize("config", ["[train", 'name = "one"\nname = "two"\n'])
def test_settings_that_are_no_toml_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str) -> None:
    a, b = make(tmp_path / "a", RECORDS), make(tmp_path / "b", RECORDS, config)
    for run in (a, b):
        (run / "metrics.jsonl").touch()
    for command in ("diff", "compare"):
        assert cli.main([command, str(a), str(b)]) == 2
        assert "b/config.toml is not valid TOML" in " ".join(capsys.readouterr().err.split())


def test_settings_are_utf_8_whatever_the_locale_says(tmp_path: Path) -> None:
    run = make(tmp_path / "a", RECORDS, CONFIG.replace("one", "día"))
    code = "import sys; from pathlib import Path; from headrace.facts.kept_settings import settings_of; print(ascii(settings_of(Path(sys.argv[1]))['name']))"
    plain = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    said = subprocess.run([sys.executable, "-c", code, str(run)], env=plain, capture_output=True, text=True, check=True)
    assert said.stdout == "'d\\xeda'\n"


def test_what_cannot_be_read_is_not_compared_and_said(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", RECORDS), make(tmp_path / "b", RECORDS)
    spoil(b, next(number for number, record in enumerate(RECORDS) if isinstance(record, ReadyRecord)))
    found = compare_runs(a, b)
    assert not found.damage[a] and "does not match its checksum" in str(found.damage[b])
    assert "(step 1) trains ticket" in str(found.damage[b])
    assert found.steps == len(STEPS) - 1 and not found.first, "the other steps are compared, each with its own"
    console = Console(file=io.StringIO(), width=300)
    assert report(a, b, console) == 1
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert "are not compared" in output and "The readable parts of both are the same" in output and "checksum" in output
