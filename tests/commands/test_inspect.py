"""Rollouts looked at: what is known of every token, tokens as text, and what is printed."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import cli
from headrace.commands.show.inspect import find_step, inspect
from headrace.core.errors import ConfigError
from headrace.core.reports import TrainReport
from headrace.core.types import Completion, VersionSpan
from headrace.durable.journal import AnyRecord, GoneRecord, JournalStep, ReadyRecord, read_steps
from headrace.facts.rollout_view import row_of, span_list, token_details, trimmed_below, view_rollout, view_step
from headrace.run.pieces import split_text
from headrace.views.screen.console import Console
from headrace.views.screen.inspect_view import rollout
from support.fact_stream import FactStream, records_of, write_journal
from support.journal_frames import spoil
from support.spans import spans_of

FACTS = list(FactStream(steps=4, groups=2, size=3, tokens=6, troubles=False).facts())
RECORDS: list[AnyRecord] = [
    GoneRecord(0.1, 99, "dropped", "no_contrast", ("reward_raised",), (0.5, 0.25)),
    *records_of(FACTS),
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text('[model]\npath = "no/where"\n[rollout]\ntemperature = 1.0\n')
    write_journal(tmp_path, RECORDS)
    return tmp_path


def printed(run: Path, **more: object) -> str:
    console = Console(file=io.StringIO(), width=170)
    assert inspect(run, console=console, **more) == 0  # type: ignore[arg-type]
    return console.file.getvalue()  # type: ignore[attr-defined]


# -- what is known of a token -----------------------------------------------------------------------------------------


def test_a_look_has_every_rollout_with_its_own_columns(run: Path) -> None:
    step = list(read_steps(run))[2]
    views = view_step(step)
    assert [(view.ticket, view.rollout) for view in views] == [(g.ticket, i) for g in step.groups for i in range(3)]
    for view in views:
        group = next(group for group in step.groups if group.ticket == view.ticket)
        done, row = group.scored[view.rollout].episode.last, group.rows[view.rollout]
        assert view.step == 3 and view.tokens == done.tokens and view.logprobs == done.logprobs
        assert view.lags == tuple(2 - version for version in done.versions())
        assert view.advantages == row.advantages and set(view.left_out) == {""}
        count = len(view.tokens)
        if group is step.groups[0]:  # whose numbers the trainer recorded (`FactStream`)
            assert view.entropies == pytest.approx([i / 10 for i in range(count)]) and not view.unrecorded
            assert view.gap == pytest.approx(sum(range(count)) / 100 / count, abs=1e-5)
        else:
            assert math.isnan(view.gap) and view.entropies == () and "of some of its rollouts" in view.unrecorded


def test_why_a_token_is_not_in_the_loss(run: Path) -> None:
    step = list(read_steps(run))[2]
    group = step.groups[0]
    count = len(group.rows[0].tokens)
    assert count >= 3

    def reasons(**row: object) -> dict[str, int]:
        changed = msgspec.structs.replace(group.rows[0], **row)
        done = msgspec.structs.replace(group.scored[0].episode.last, logprobs=changed.logprobs, stop=stop)
        turn = msgspec.structs.replace(group.scored[0].episode.turns[0], completion=done)
        one = msgspec.structs.replace(
            group.scored[0], episode=msgspec.structs.replace(group.scored[0].episode, turns=(turn,))
        )
        other = msgspec.structs.replace(group, scored=(one, *group.scored[1:]), rows=(changed, *group.rows[1:]))
        return view_rollout(step, other, 0, oldest=oldest).reasons

    stop, oldest = "stop", None
    assert reasons(mask=(False, *(True,) * (count - 1))) == {"masked": 1}
    assert reasons(logprobs=(-math.inf, math.nan, *(-1.0,) * (count - 2))) == {"no finite log-prob": 2}
    stop = "length"
    assert reasons(mask=(False,) * count) == {"overlong": count}
    oldest = 99
    assert reasons() == {"overdue": count}
    missing = msgspec.structs.replace(group, rows=(msgspec.structs.replace(group.rows[0], tokens=(1,) * count),))
    assert row_of(missing, 0) is None and view_rollout(step, missing, 0).reasons == {"not trained": count}
    assert view_rollout(step, missing, 0).unrecorded == "not trained"


def test_trimming_is_read_from_the_settings() -> None:
    assert trimmed_below({"staleness": {"overdue": "trim", "max_lag": 2}}, 7) == 5
    assert trimmed_below({"staleness": {"overdue": "wait", "max_lag": 2}}, 7) is None and trimmed_below({}, 7) is None


def test_spans_and_tooltips_name_versions_kv_and_mixed_weights(run: Path) -> None:
    step = list(read_steps(run))[2]
    group = step.groups[0]
    done = Completion((5, 6, 7), (-0.5, -1.0, -2.0), (VersionSpan(0, 1, 1), VersionSpan(1, 2, 1, True)), "stop")
    turn = msgspec.structs.replace(group.scored[0].episode.turns[0], completion=done)
    one = msgspec.structs.replace(
        group.scored[0], episode=msgspec.structs.replace(group.scored[0].episode, turns=(turn,))
    )
    found = view_rollout(step, msgspec.structs.replace(group, scored=(one,)), 0, trainer=(-0.5, -1.25, -1.0))
    assert span_list(found) == "0-0 version 1, 1-2 version 2 over KV of 1 (mixed)"
    assert found.mixed == (False, True, True) and found.lags == (1, 0, 0)
    assert "trainer -1.2500 (difference -0.2500, ratio 0.7788)" in token_details(
        found, 1
    ) and "mixed weights" in token_details(found, 1)
    assert found.gap == pytest.approx(1.25 / 3)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=12))
def test_spans_unroll_to_what_they_were_made_of(columns: list[tuple[int, int, bool]]) -> None:
    spans = spans_of(*zip(*columns, strict=True)) if columns else ()
    done = Completion((1,) * len(columns), (-1.0,) * len(columns), spans, "stop")
    group = FactStream(seed=1).group(0, 0)
    turn = msgspec.structs.replace(group.scored[0].episode.turns[0], completion=done)
    one = msgspec.structs.replace(
        group.scored[0], episode=msgspec.structs.replace(group.scored[0].episode, turns=(turn,))
    )
    step = JournalStep(2, 1.0, 3, (), TrainReport(2, 3))
    found = view_rollout(step, msgspec.structs.replace(group, scored=(one,)), 0)
    assert found.mixed == tuple(mixed for _, _, mixed in columns)
    assert found.lags == tuple(step.step - version for version, _, _ in columns)


# -- tokens as text ---------------------------------------------------------------------------------------------------


def bytes_decode(tokens: object) -> str:
    """A tokenizer of bytes, whose 256 is a special token."""
    return bytes(token for token in tokens if token < 256).decode(errors="replace")  # type: ignore[attr-defined]


@given(st.text())
@settings(max_examples=200)
def test_pieces_joined_are_the_text(text: str) -> None:
    tokens = list(text.encode())
    pieces = split_text(tokens, bytes_decode, lambda token: "<end>")
    assert len(pieces) == len(tokens) and "".join(pieces) == text


def test_a_character_of_several_tokens_goes_to_the_last_and_special_tokens_show_their_names() -> None:
    tokens = [*"é".encode(), 256, *b"ab"]
    assert split_text(tokens, bytes_decode, lambda token: "<end>") == ["", "é", "<end>", "a", "b"]
    assert split_text([0xC3], bytes_decode, lambda token: "") == ["\ufffd"], "one that never becomes whole is shown"


# -- what is printed --------------------------------------------------------------------------------------------------


def test_the_last_step_by_default_and_another_one_on_request(run: Path) -> None:
    output = printed(run)
    assert output.startswith("Step 4: 2 groups, 6 rollouts, made version 4")
    assert output.count("prompt: State the result") == 3, "three of them token by token"
    assert "tokens are shown as ids" in output and "--rescore computes the trainer" in output
    assert printed(run, step=2).startswith("Step 2")


def test_one_group_by_its_ticket_with_a_line_for_each_token(run: Path) -> None:
    step = list(read_steps(run))[1]
    ticket = step.groups[1].ticket
    output = printed(run, ticket=ticket, worst=1, tokens=True)
    assert output.startswith("Step 2: 1 group, 3 rollouts")
    worst = min(step.groups[1].scored, key=lambda one: (one.reward, -len(one.episode.last.tokens))).episode.last
    assert all(f"{value:.4f}" in output for value in worst.logprobs)


def test_what_is_not_there_is_refused_with_the_reason(run: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"no step of .* trained ticket 99: it was dropped \(no_contrast\); rewards 0\.500, 0\.250; failed: reward_raised 1",
    ):
        find_step(run, None, 99)
    with pytest.raises(ConfigError, match="has 4 steps, so there is no step 5"):
        find_step(run, 5, None)
    with pytest.raises(ConfigError, match="step 1 did not train ticket 99; it trained"):
        find_step(run, 1, 99)
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match="it has no journal"):
        find_step(tmp_path / "none", None, None)


def test_a_damaged_journal_shows_what_can_be_read_and_names_the_rest(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(run, 2)
    message = " ".join(printed(run, step=3).split())
    assert (
        message.startswith("Step 3")
        and "of the journal cannot be read: record 2 does not match its checksum" in message
    )
    assert cli.main(["inspect", str(run), "--step", "3", "--json"]) == 0
    assert "record 2 does not match its checksum" in json.loads(capsys.readouterr().out)["unreadable"]
    with pytest.raises(ConfigError, match=r"step 1 of .* cannot be read \(.*record 2 does not match its checksum"):
        find_step(run, 1, None)


def test_json_has_everything(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(run), "--step", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    step = list(read_steps(run))[1]
    assert told["report"]["step"] == 1 and len(told["rollouts"]) == 6
    assert told["rollouts"][0]["logprobs"] == list(step.groups[0].scored[0].episode.last.logprobs)


def test_log_probs_of_a_tempered_distribution_are_not_compared(run: Path) -> None:
    (run / "config.toml").write_text('[model]\npath = "no/where"\n[rollout]\ntemperature = 0.7\n')
    assert "tempered" in " ".join(printed(run, rescore=True).split())


def test_text_of_a_model_is_no_markup(run: Path) -> None:
    ready = next(record for record in RECORDS if isinstance(record, ReadyRecord))
    found = view_rollout(next(read_steps(run)), ready.group, 0, pieces=lambda tokens: ["[bold]"] * len(tokens))
    console = Console(file=io.StringIO(), width=100)
    console.print(rollout(found))
    assert "[bold]\n" in console.file.getvalue()  # type: ignore[attr-defined]
