"""Given answers beside the steps of a run: which ones a step has, what is refused, and that the journal keeps them."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from pathlib import Path
from statistics import stdev

import msgspec
import pytest
from test_warm_start import NUMBERS, written

from headrace.algo.config import AlgoConfig
from headrace.algo.training_rows import Algorithm, algorithm_of
from headrace.core.batches import Demonstration, Group
from headrace.core.errors import ConfigError
from headrace.core.reports import TrainReport
from headrace.core.types import Completion, Episode, Prompt, Scored, Turn, VersionSpan
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
    unanswered,
)
from headrace.loop.loop_plan import LoopPlan
from headrace.loop.staleness import StalenessConfig, time_limit_problems
from headrace.models.chat import ChatEncoder
from headrace.run import machine_trial, rehearse, row_trial
from headrace.run.rehearsed import ORDER
from support import trainer_calls

PLAN = LoopPlan(
    steps=9,
    staleness=StalenessConfig(),
    rollout=RolloutConfig(),
    seed=0,
    max_skipped_steps=1,
    checkpoint_every=0,
    evaluate_every=0,
)


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
        ("a.jsonl", "compared", (2, 0), "set it to 1", ("a.jsonl", "compared", (1, 0))),
        ("", "compared", (1, 0), "name a file of them", ("a.jsonl", "compared", (1, 0))),
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
        ({"name": "chord", "demonstrations": {"reward": 2.0}}, "needs algo.demonstrations.kind = compared"),
        (
            {"name": "chord", "demonstrations": {"imitation": 0.5}},
            "imitation needs algo.demonstrations.kind = compared",
        ),
        ({"name": "srft", "demonstrations": {"weight": 0.3}}, "remove it"),
        ({"name": "luffy", "demonstrations": {"weight": 0.3}}, "remove it"),
        ({"name": "luffy", "advantage": "leave_one_out"}, "set it to centred or group_norm"),
        ({"name": "luffy", "aggregation": "token_sum", "length_constant": 9}, "set algo.aggregation = token_mean"),
        ({"name": "luffy", "denominator": "kept", "lag": {"kind": "trim", "maximum": 1}}, "algo.denominator = all"),
        ({"name": "luffy", "credit": "turn"}, "remove algo.credit"),
        ({"name": "luffy", "subset": {"kind": "shortest"}}, "remove algo.credit, algo.subset"),
        ({"name": "luffy", "length_penalty": 0.5}, "algo.length_penalty"),
        ({"name": "chord", "demonstrations": {"last_weight": 0.1}}, "belong together"),
        ({"name": "chord", "demonstrations": {"decay_steps": 10}}, "belong together"),
    ],
)
def test_settings_of_their_loss_that_have_no_meaning_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        AlgoConfig(**given)


def test_rows_of_a_step_have_no_meaning_where_its_questions_choose_them():
    (problem,) = answer_problems(AnswersConfig(path="a.jsonl", rows_per_step=4), "compared", 1, 0)
    assert "remove it" in problem


def group_of(ticket: int, tokens: tuple[int, ...], algorithm: Algorithm, *rewards: float) -> Group:
    prompt = Prompt(str(ticket), "", tokens)
    completion = Completion((7, 2), (-1.0, -1.0), (VersionSpan(0, 0, 0),), "stop")
    scored = tuple(Scored(Episode((Turn(tokens, completion),)), reward, {}) for reward in rewards)
    return Group(ticket, prompt, scored, algorithm.rows(prompt, scored))


@pytest.mark.parametrize(("name", "advantage"), [("luffy", None), ("luffy", "group_norm")])
def test_an_answer_is_compared_with_the_rollouts_of_its_question_and_they_with_it(name: str, advantage: str | None):
    """The mean and the deviation, by the standard library, are of rollouts and answers together, as in the paper."""
    given = [
        Demonstration((1,), (5, 2)),
        Demonstration((1,), (6, 2)),
        Demonstration((1,), (5, 2)),
        Demonstration((8,), (9, 2)),
    ]
    algorithm = algorithm_of(AlgoConfig(name, advantage=advantage, demonstrations={"reward": 2.0}), 8, None, given)
    mixed, other = group_of(0, (1,), algorithm, 1.0, 0.0, 0.0), group_of(1, (3,), algorithm, 1.0, 0.0)
    rewards = [1.0, 0.0, 0.0, 2.0, 2.0]
    scale = stdev(rewards) + 1e-6 if advantage else 1.0
    expected = [(reward - 1.0) / scale for reward in rewards]
    assert [row.advantages[0] for row in mixed.rows] == pytest.approx(expected[:3])
    found = algorithm.answers((mixed, other))
    assert [(one.prompt, one.answer) for one in found] == [((1,), (5, 2)), ((1,), (6, 2))], (
        "of its questions, once each"
    )
    assert [one.advantage for one in found] == pytest.approx(expected[3:])
    assert found[0].row(4).advantages == (found[0].advantage,) * 2
    plain = group_of(1, (3,), algorithm_of(AlgoConfig(name, advantage=advantage), 8), 1.0, 0.0)
    assert other.rows == plain.rows, "a question without an answer is compared as ever"


def test_a_question_that_no_rollout_solves_is_learned_from_its_answer():
    """Without one, nothing is; and where every rollout is as good as the answer, neither."""
    algorithm = algorithm_of(AlgoConfig("luffy"), 8, None, [Demonstration((1,), (5, 2))])
    failed, alone, solved = (
        group_of(0, (1,), algorithm, 0.0, 0.0, 0.0),
        group_of(1, (3,), algorithm, 0.0, 0.0, 0.0),
        group_of(2, (1,), algorithm, 1.0, 1.0),
    )
    assert [algorithm.barren(group.rows) for group in (failed, alone, solved)] == ["", "no_contrast", "no_contrast"]
    assert [row.advantages[0] for row in failed.rows] == [-0.25] * 3
    assert [one.advantage for one in algorithm.answers((failed, alone))] == [0.75]


def test_the_batch_of_a_step_has_the_answers_to_its_questions_also_when_it_is_made_again(tmp_path: Path):
    algorithm = algorithm_of(AlgoConfig("luffy"), 8, None, [Demonstration((1,), (5, 2)), Demonstration((8,), (9, 2))])
    group = group_of(0, (1,), algorithm, 1.0, 0.0, 0.0)
    batch = PLAN.batch(0, (group,), algorithm)
    assert batch.demonstrations == (Demonstration((1,), (5, 2), 0.5),)
    journal = Journal(tmp_path)
    journal.write(ReadyRecord(0.0, group))
    journal.write(SteppedRecord(1.0, TrainReport(0, 1), (group.ticket,), 9, batch.demonstrations))
    journal.close()
    (step,) = read_steps(tmp_path)
    without_the_file = algorithm_of(AlgoConfig("luffy"), 8)
    assert PLAN.batch_again(step, without_the_file) == msgspec.structs.replace(batch, steps=PLAN.steps)
    packed = algorithm_of(AlgoConfig("luffy"), 8, None, step.demonstrations)
    assert packed.rows(group.prompt, group.scored) == group.rows, "a bundle makes its rows again of what was journaled"


def test_answers_to_none_of_the_tasks_questions_are_remarked():
    given = AnswerCourse(rows=[Demonstration((1,), (5, 2))], seed=0, rows_per_step=8)
    (words,) = unanswered(given, [Prompt("a", "", (2,)), Prompt("b", "", (3,))])
    assert "none of the first 2 prompts" in words and "algo.name = chord" in words
    assert not list(unanswered(given, [Prompt("a", "", (2,)), Prompt("b", "", (1,))]))


def test_the_journal_holds_what_a_step_trained_so_that_it_is_repeated_without_the_file(tmp_path: Path):
    group = trainer_calls.batch().groups[0]
    answers = (Demonstration((1, 5), (7, 2)), Demonstration((3,), (4, 2)))
    journal = Journal(tmp_path)
    journal.write(ReadyRecord(0.0, group))
    journal.write(SteppedRecord(1.0, TrainReport(0, 1), (group.ticket,), 9, answers))
    journal.close()
    (step,) = read_steps(tmp_path)
    algorithm = algorithm_of(AlgoConfig("chord"), 8)
    batch = PLAN.batch_again(step, algorithm)
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
    source = "".join(map(inspect.getsource, (rehearse, machine_trial, row_trial)))
    named = set(re.findall(r'sections\[f?"([A-Z][a-z ]+)', source))
    assert {"Demonstrations", "Evaluation sets", "Warm start"} <= named <= set(ORDER)
