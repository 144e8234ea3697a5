"""Recorded scores are those of one question: whatever a scorer is asked, and whoever it is, is part of the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.core.batches import Failure
from headrace.episodes.scoring.job import ScoringJob
from headrace.episodes.scoring.parts import ScoreLog

JOB = ScoringJob("2 + 2?", ("4", "5"), ((1,), (2,)), {"answer": "4"})
OTHER: dict[str, Any] = {
    "prompt": "2 + 3?",
    "completions": ("4", "6"),
    "completion_tokens": ((1,), (3,)),
    "columns": {"answer": "5"},
    "chat": "messages",
    "transcripts": ([{"role": "tool", "content": "4"}], []),
    "rivals": ("5", "4"),
    "segments": (("4",), ("5",)),
}


def log_of(directory: Path, mark: str = "model a") -> ScoreLog:
    log = ScoreLog({"judge": mark})
    log.open(directory, lambda said: pytest.fail(said))
    return log


def test_every_field_of_a_question_is_in_its_key(tmp_path: Path) -> None:
    """Two rows may have one prompt and other answers, and a row may have changed before a resume."""
    assert set(OTHER) == set(ScoringJob.__struct_fields__), "a field without a case here"
    log = log_of(tmp_path)
    log.keep("judge", JOB, [1.0, 0.0])
    log.close()
    for field, value in OTHER.items():
        assert log_of(tmp_path).find("judge", msgspec.structs.replace(JOB, **{field: value})) is None, field
    assert log_of(tmp_path).find("another judge", JOB) is None
    assert log_of(tmp_path, "model b").find("judge", JOB) is None, "its settings have changed"
    again = log_of(tmp_path)
    assert again.find("judge", JOB) == [1.0, 0.0] and again.find("judge", JOB) is None, "used once"


def test_scores_of_which_one_failed_are_not_kept(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    log.keep("judge", JOB, [1.0, Failure("reward_unreachable")])
    log.close()
    assert log_of(tmp_path).find("judge", JOB) is None
