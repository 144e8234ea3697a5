"""Given answers beside the steps of a run: which ones a step has, what is refused, and that the journal keeps them."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from pathlib import Path

import pytest
from test_warm_start import NUMBERS, written

from headrace.algo.config import AlgoConfig
from headrace.algo.training_rows import algorithm_of
from headrace.core.batches import Demonstration
from headrace.core.errors import ConfigError
from headrace.core.reports import TrainReport
from headrace.durable.journal import Journal, JournalStep, ReadyRecord, SteppedRecord, read_steps
from headrace.episodes.rollout import RolloutConfig
from headrace.episodes.tasks.config import TaskConfig
from headrace.episodes.tasks.demonstrations import (
    AnswerCourse,
    AnswersConfig,
    WarmStartConfig,
    answer_problems,
    read_course,
    read_demonstrations,
)
from headrace.loop.loop_plan import LoopPlan
from headrace.loop.staleness import StalenessConfig, time_limit_problems
from headrace.models.chat import ChatEncoder
from headrace.run import rehearse
from support import trainer_calls


def course(rows: int, per_step: int, seed: int = 0) -> AnswerCourse:
    return AnswerCourse(rows=[Demonstration((n,), (n, 0)) for n in range(rows)], seed=seed, rows_per_step=per_step)


@pytest.mark.parametrize(("rows", "per_step"), [(10, 4), (6, 6), (3, 8), (7, 1)])
def test_each_row_comes_once_before_any_comes_again(rows, per_step):
    """Whatever step a run goes on with, it has the rows that it would have had."""
    given = course(rows, per_step)
    taken = [one.prompt[0] for step in range(3 * rows) for one in given.of_step(step)]
    passes = [tuple(taken[first : first + rows]) for first in range(0, len(taken) - rows + 1, rows)]
    assert all(Counter(found) == Counter(range(rows)) for found in passes)
    assert rows < 5 or len(set(passes)) > 1, "each time in a new order"
    again = course(rows, per_step)
    assert [again.of_step(step) for step in (7, 2, 0)] == [given.of_step(step) for step in (7, 2, 0)]
    assert rows < 5 or course(rows, per_step, seed=1).of_step(0) != given.of_step(0)


def test_rows_are_read_as_those_of_a_warm_start(tiny_llama: Path, tmp_path: Path):
    path, task, encoder = written(tmp_path, NUMBERS), TaskConfig(kind="jsonl", path="x"), ChatEncoder(tiny_llama)
    found = read_course(AnswersConfig(path=path, rows_per_step=4), task, encoder, seed=0, context=64)
    warm = read_demonstrations(WarmStartConfig(path=path, held_out=0), task, encoder, seed=0, context=64)
    assert list(found.rows) == list(warm.trained)
    paired = written(tmp_path, [{**row, "rejected": "worse"} for row in NUMBERS])
    with pytest.raises(ConfigError, match=r'row 1: its column rejected .* set demonstrations.rejected = ""'):
        read_course(AnswersConfig(path=paired), task, encoder, seed=0, context=64)
    alone = read_course(AnswersConfig(path=paired, rejected=""), task, encoder, seed=0, context=64)
    assert list(alone.rows) == list(found.rows)
    with pytest.raises(ConfigError, match=r"there is no column answr \(demonstrations.answer\)"):
        read_course(AnswersConfig(path=path, answer="answr"), task, encoder, seed=0, context=64)


@pytest.mark.parametrize(
    ("path", "kind", "more", "words", "remedied"),
    [
        ("a.jsonl", "none", (1, 0), "set algo.name = chord", ("a.jsonl", "phi", (1, 0))),
        ("", "phi", (1, 0), "name a file of them in demonstrations.path", ("a.jsonl", "phi", (1, 0))),
        ("a.jsonl", "sft", (3, 0), "set it to 9", ("a.jsonl", "sft", (3, 0), 9)),
        ("a.jsonl", "sft", (1, 2), "set that to 0", ("a.jsonl", "sft", (1, 0))),
    ],
)
def test_settings_that_do_not_go_together_are_refused(path, kind, more, words, remedied):
    (problem,) = answer_problems(AnswersConfig(path=path), kind, *more)
    assert words in problem
    path, kind, more, *rows = remedied
    own = AnswersConfig(path=path, rows_per_step=rows[0] if rows else 8)
    assert not list(answer_problems(own, kind, *more))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"demonstrations": {"weight": 0.3}}, "needs a kind"),
        ({"name": "chord", "demonstrations": {"gamma": 0.3}}, "needs algo.demonstrations.kind = shaped"),
        ({"name": "chord", "demonstrations": {"last_weight": 0.1}}, "belong together"),
        ({"name": "chord", "demonstrations": {"decay_steps": 10}}, "belong together"),
    ],
)
def test_settings_of_their_loss_that_have_no_meaning_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        AlgoConfig(**given)


def test_the_journal_holds_what_a_step_trained_so_that_it_is_repeated_without_the_file(tmp_path: Path):
    group = trainer_calls.batch().groups[0]
    answers = (Demonstration((1, 5), (7, 2)), Demonstration((3,), (4, 2)))
    journal = Journal(tmp_path)
    journal.write(ReadyRecord(0.0, group))
    journal.write(SteppedRecord(1.0, TrainReport(0, 1), (group.ticket,), 9, answers))
    journal.close()
    (step,) = read_steps(tmp_path)
    plan = LoopPlan(
        steps=9,
        staleness=StalenessConfig(),
        rollout=RolloutConfig(),
        seed=0,
        max_skipped_steps=1,
        checkpoint_every=0,
        evaluate_every=0,
    )
    algorithm = algorithm_of(AlgoConfig("chord"), 8)
    batch = plan.batch_again(step, algorithm)
    assert batch.demonstrations == answers
    assert len(batch.rows) == len(group.rows), "and they are no rollouts of it"


def test_a_step_that_is_repeated_has_all_that_its_record_says() -> None:
    """The journal's reader and a resume make their steps of one function, and it forgets no field that both have."""
    group = trainer_calls.batch().groups[0]
    record = SteppedRecord(1.0, TrainReport(0, 1), (group.ticket,), 9, (Demonstration((3,), (4, 2)),))
    step = JournalStep.of(record, [group])
    shared = set(JournalStep.__struct_fields__) & set(SteppedRecord.__struct_fields__)
    assert {"t", "report", "steps", "demonstrations"} <= shared
    assert {name: getattr(step, name) for name in shared} == {name: getattr(record, name) for name in shared}


def test_a_time_limit_and_minibatches_exclude_each_other() -> None:
    """The limit may lower the groups of a step to a number that they do not divide."""
    (problem,) = time_limit_problems(StalenessConfig(groups_per_step=8), 5.0, 2)
    assert "set train.steps instead, or remove train.minibatches" in problem
    assert not list(time_limit_problems(StalenessConfig(groups_per_step=8), 0.0, 2))
    assert not list(time_limit_problems(StalenessConfig(groups_per_step=8), 5.0, 1))


def test_every_section_of_the_rehearsal_has_its_place() -> None:
    source = inspect.getsource(rehearse)
    named = set(re.findall(r'sections\[f?"([A-Z][a-z ]+)', source)) | set(
        re.findall(r'\["([A-Z][a-z ]+)", \*filter', source)
    )
    assert {"Demonstrations", "Evaluation sets", "Warm start"} <= named <= set(rehearse._ORDER)
