"""Every recipe through the real trainer: from scored groups to a step that does what the objective says."""

from __future__ import annotations

import math
import random
from itertools import starmap
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.algo.config import AlgoConfig
from headrace.algo.recipes import RECIPES
from headrace.algo.training_rows import algorithm_of
from headrace.core.batches import Batch, Group, Row
from headrace.core.reports import TrainReport
from headrace.core.types import Completion, Episode, Prompt, Scored, TeacherTrace, TopLogprobs, Turn
from headrace.models.lora import LoraConfig
from headrace.trainer.config import TrainConfig
from headrace.trainer.step.learner import Assignment
from headrace.trainer.step.trainer import TorchTrainer
from support import tiny_models
from support.few import few
from support.spans import spans_of

V, K = 32, 4
PROMPT = Prompt("p", "?", (1, 2, 3))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=V, num_key_value_heads=1, max_position_embeddings=64, **sizes))
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


def teacher(rng: random.Random, count: int) -> TeacherTrace:
    ids = np.array([rng.sample(range(V), K) for _ in range(count)], np.int32)
    logprobs = np.log(np.array([[0.4, 0.2, 0.1, 0.05]] * count, np.float32))
    top = TopLogprobs(K, ids.tobytes(), logprobs.tobytes())
    return TeacherTrace("t", (0,) * count, tuple(rng.gauss(-3, 0.3) for _ in range(count)), top)


def scored(rng: random.Random, reward: float) -> Scored:
    count = rng.randint(2, 8)
    versions = sorted(rng.randint(0, 1) for _ in range(count))
    logprobs = tuple(rng.gauss(-3.5, 0.5) for _ in range(count))
    tokens = tuple(rng.randrange(V) for _ in range(count))
    done = Completion(tokens, logprobs, spans_of(versions, versions), "stop")
    return Scored(Episode((Turn(PROMPT.tokens, done),)), reward, {"exact": reward}, teachers=(teacher(rng, count),))


def recipe(name: str, held: Path | None = None) -> AlgoConfig:
    """`held`: the model of a teacher that the trainer holds, where the recipe has one."""
    if held and RECIPES[name].distill.over != "teacher_top":
        return AlgoConfig(name, distill={"model": str(held)})
    return AlgoConfig(name, distill={"k": K}) if name == "opd_topk" else AlgoConfig(name)


def step(
    model_dir: Path,
    algo: AlgoConfig,
    microbatch_tokens: int,
    rewards: tuple[float, ...] = (1.0, 0.0, 0.25, 0.0),
    pushed: bool = False,
    skippable: bool = True,
) -> TrainReport:
    """`pushed`: every token lies far on the side to which its advantage pushes."""
    rng = random.Random(0)
    algorithm = algorithm_of(algo, 8)
    groups = []
    for ticket in range(3):
        rollouts = tuple(scored(rng, reward) for reward in rewards)
        rows = algorithm.rows(PROMPT, rollouts)
        if pushed:
            rows = tuple(replace(row, logprobs=tuple(-30.0 if a > 0 else 0.0 for a in row.advantages)) for row in rows)
        groups.append(Group(ticket, PROMPT, rollouts, rows, pairs=algorithm.pairs(rollouts)))
    config = TrainConfig(device="cpu", dtype="float32", learning_rate=1e-2, microbatch_tokens=microbatch_tokens)
    adapters = {"": Assignment(config, algo, LoraConfig(rank=2))} if algo.trains_rewards else None
    trainer = TorchTrainer(model_dir, config, algo.with_length(8), seed=0, adapters=adapters)
    return trainer.step(Batch(0, algorithm.assemble(tuple(groups)), skippable=skippable))


@pytest.mark.parametrize("name", few(sorted(RECIPES), keep=10))
def test_every_recipe_takes_a_step(model_dir, name):
    report = step(model_dir, recipe(name, tiny_models.saved_with_tokenizer("gpt2")), 16)
    assert report.skipped == "" and report.microbatches > 1
    assert math.isfinite(report.loss) and math.isfinite(report.grad_norm)
    if not name.startswith("mis"):  # which drop everything that is this far off policy, and rightly
        assert report.grad_norm > 0
    assert sum(lag.tokens for lag in report.lags) == report.loss_tokens


REJECTING = {"correction": {"mode": "mask", "low": 0.7, "high": 1.4}, "old": "trainer"}


@pytest.mark.parametrize(
    "aggregation", few(["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum"], keep=2)
)
def test_microbatches_do_not_change_the_denominator_of_what_is_kept(model_dir, aggregation):
    algo = AlgoConfig(aggregation=aggregation, denominator="kept", **REJECTING).with_length(8)
    whole, split = (step(model_dir, algo, budget) for budget in (10_000, 16))
    assert whole.microbatches == 1 and split.microbatches > 1
    assert whole.loss == pytest.approx(split.loss, abs=1e-5)
    assert whole.grad_norm == pytest.approx(split.grad_norm, rel=1e-4)
    taken = sum(lag.masked["mask"] * lag.tokens for lag in whole.lags)
    assert 0 < taken < whole.loss_tokens
    everything = step(model_dir, AlgoConfig(aggregation=aggregation, **REJECTING).with_length(8), 10_000)
    if aggregation == "token_mean":  # the same step, longer
        assert whole.grad_norm * (whole.loss_tokens - taken) == pytest.approx(everything.grad_norm * whole.loss_tokens)
    else:
        assert whole.grad_norm > everything.grad_norm


def test_a_step_of_which_everything_was_rejected_is_skipped_by_name(model_dir):
    """Momentum and weight decay would move the weights without any gradient."""
    correction = {"mode": "mask", "low": 50.0, "high": 60.0}
    report = step(model_dir, AlgoConfig(old="trainer", correction=correction), 16)
    assert (report.skipped, report.version, report.grad_norm) == ("all_rejected", 0, 0.0)
    assert all(lag.masked == {"mask": 1.0} for lag in report.lags)
    again = step(model_dir, AlgoConfig(old="trainer", correction=correction), 16, skippable=False)
    assert (again.skipped, again.version) == ("", 1)  # a step of an earlier version, done again


def test_a_step_that_the_clip_stopped_whole_is_skipped_too_and_one_without_advantages_is_not(model_dir):
    clipped = AlgoConfig(clip_low=1e-9, clip_high=1e-9)
    report = step(model_dir, clipped, 16, pushed=True)
    assert (report.skipped, report.clip_fraction) == ("all_rejected", 1.0)
    assert step(model_dir, AlgoConfig("reinforce"), 16, rewards=(0.0,) * 4).skipped == ""


@pytest.mark.parametrize("name", few(["gspo", "m2po", "clip_cov", "reinforce++", "topr", "opd_topk"], keep=3))
def test_microbatches_do_not_change_the_step(model_dir, name):
    """Of those that look beyond a token: at its sequence, at the batch, at the whole step."""
    whole, split = (step(model_dir, recipe(name), budget) for budget in (10_000, 16))
    assert whole.microbatches == 1 and split.microbatches > 1
    assert whole.loss == pytest.approx(split.loss, abs=1e-5) and whole.grad_norm == pytest.approx(
        split.grad_norm, rel=1e-4
    )
    assert [lag.name for lag in whole.lags] == [lag.name for lag in split.lags]


@pytest.mark.parametrize(
    ("estimator", "unbiased"), few(starmap(pytest.param, [("k2", False), ("k3", False), ("k3", True)]), keep=1)
)
def test_without_advantages_the_divergence_brings_the_trainer_back_from_far_away(
    model_dir, tmp_path, estimator, unbiased
):
    """The reference is the model that training began with; the weights are others, far from it."""
    reference = LlamaForCausalLM.from_pretrained(model_dir)
    torch.manual_seed(7)
    other = LlamaForCausalLM(reference.config)
    other.get_output_embeddings().weight.data *= 120
    (tmp_path / "checkpoint").mkdir()
    other.save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "chat_template.jinja").write_text("{{ messages }}")
    settings = {"device": "cpu", "dtype": "float32", "learning_rate": 5e-2, "weight_decay": 0.0}
    TorchTrainer(tmp_path / "other", TrainConfig(**settings), AlgoConfig(), seed=0).save(tmp_path / "checkpoint")
    algo = AlgoConfig(kl={"coef": 1.0, "estimator": estimator, "unbiased": unbiased})
    trainer = TorchTrainer(model_dir, TrainConfig(**settings), algo, seed=0)
    trainer.restore(tmp_path / "checkpoint")
    unmoved = TorchTrainer(model_dir, TrainConfig(**settings), AlgoConfig(), seed=0)
    rng = random.Random(1)
    rows = [tuple(rng.randrange(V) for _ in range(8)) for _ in range(2)]

    def gap() -> float:
        pairs = [(trainer.score(PROMPT.tokens + row), unmoved.score(PROMPT.tokens + row)) for row in rows]
        return float(np.mean([abs(a - b) for one, two in pairs for a, b in zip(one[2:], two[2:], strict=True)]))

    before = gap()
    for number in range(40):
        made = [
            Row(
                PROMPT.tokens,
                row,
                tuple(trainer.score(PROMPT.tokens + row)[2:]),
                (0.0,) * 8,
                (True,) * 8,
                (number,) * 8,
            )
            for row in rows
        ]
        trainer.step(Batch(number, (Group(0, PROMPT, (), tuple(made)),)))
    assert before > 4 and gap() < before / 4


def test_selected_tokens_are_in_the_report(model_dir):
    report = step(model_dir, AlgoConfig("clip_cov", select={"fraction": 0.3}), 32)
    taken = sum(lag.masked.get("clip_cov", 0) * lag.tokens for lag in report.lags)
    assert taken == pytest.approx(int(0.3 * report.loss_tokens))


def test_a_users_loss_trains(model_dir, tmp_path):
    (tmp_path / "mine.py").write_text("def loss(tokens):\n    return -tokens.advantage * tokens.logprob\n")
    mine = step(model_dir, AlgoConfig(loss=f"{tmp_path / 'mine.py'}:loss"), 64)
    assert mine.grad_norm == pytest.approx(step(model_dir, AlgoConfig(loss="ce"), 64).grad_norm) and mine.grad_norm > 0


MINE = """
from headrace.algo.policy.tokens import ratio_of
def loss(tokens):
    ratio = ratio_of(tokens.logprob, tokens.sampled)
    bounded = ratio.clamp(0.8, 1.2)
    return -(ratio * tokens.advantage).minimum(bounded * tokens.advantage) - 0.3 * tokens.entropy
"""


def test_an_entropy_bonus_in_a_loss_of_ones_own_is_that_of_the_settings(model_dir, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    mine = step(model_dir, AlgoConfig(loss=f"{tmp_path / 'mine.py'}:loss"), 32)
    built_in = step(model_dir, AlgoConfig(entropy={"coef": 0.3}), 32)
    assert mine.grad_norm == pytest.approx(built_in.grad_norm) and mine.loss == pytest.approx(built_in.loss, abs=1e-6)
    plain = step(model_dir, AlgoConfig(), 32)
    assert built_in.loss == pytest.approx(plain.loss - 0.3 * plain.entropy, abs=1e-5)
    assert abs(built_in.grad_norm - plain.grad_norm) > 1e-4


def test_the_tokens_of_largest_entropy_are_trained_alone(model_dir):
    reports = [
        step(model_dir, AlgoConfig(select={"kind": "entropy", "fraction": 0.25}), budget) for budget in (10_000, 16)
    ]
    for report in reports:
        taken = sum(lag.masked.get("entropy", 0) * lag.tokens for lag in report.lags)
        assert report.loss_tokens - taken == pytest.approx(int(0.25 * report.loss_tokens))
    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=1e-4)


def test_the_factor_of_an_adaptive_entropy_moves_and_is_part_of_a_checkpoint(model_dir, tmp_path):
    """Skywork-OR1's rule, written down: up by `change` at or below the target, down above it, and no bonus then."""
    algo = AlgoConfig(entropy={"coef": 0.01, "target": 3.0, "change": 0.002})
    config = TrainConfig(device="cpu", dtype="float32")
    trainer = TorchTrainer(model_dir, config, algo, seed=0)
    factor = trainer._learners[""].entropy
    assert factor.now == 0.01
    means = (2.0, 0.012, 0.012), (3.5, 0.010, 0.0), (math.nan, 0.010, 0.0), (3.5, 0.008, 0.0), (2.9, 0.010, 0.010)
    for mean, coef, now in means:
        factor.after(mean)
        assert (factor.coef, factor.now) == (pytest.approx(coef), pytest.approx(now))
    trainer.save(tmp_path / "checkpoint")
    other = TorchTrainer(model_dir, config, algo, seed=0)
    other.restore(tmp_path / "checkpoint")
    assert (other._learners[""].entropy.coef, other._learners[""].entropy.mean) == (factor.coef, 2.9)
    TorchTrainer(model_dir, config, AlgoConfig(), seed=0).save(tmp_path / "without")
    begins = TorchTrainer(model_dir, config, algo, seed=0)
    begins.restore(tmp_path / "without")
    assert begins._learners[""].entropy.now == 0.01, "a target that a resume sets begins with the factor beside it"


def batch(number: int) -> Batch:
    rng = random.Random(number)
    rollouts = tuple(scored(rng, reward) for reward in (1.0, 0.0, 0.25, 0.0))
    return Batch(number, (Group(0, PROMPT, rollouts, algorithm_of(AlgoConfig(), 8).rows(PROMPT, rollouts)),))


def test_the_factor_of_an_adaptive_divergence_moves_and_is_part_of_a_checkpoint(model_dir, tmp_path):
    """Ziegler's rule, written down; and a step under the factor that it came to is the step of a run that has this factor from its beginning."""
    algo = AlgoConfig(kl={"coef": 0.5, "target": 0.1})
    config = TrainConfig(device="cpu", dtype="float32", learning_rate=1e-2, microbatch_tokens=32)
    trainer = TorchTrainer(model_dir, config, algo, seed=0)
    factor, expected = trainer._learners[""].kl, 0.5
    for mean, times in ((0.11, 1.01), (5.0, 1.02), (0.0, 0.98), (0.1, 1.0), (float("nan"), 1.0)):
        factor.after(mean)
        expected *= times
        assert factor.coef == pytest.approx(expected)
    first = trainer.step(batch(0))
    expected *= 0.98
    assert first.reference_kl == 0 and factor.coef == pytest.approx(expected)
    trainer.save(tmp_path / "checkpoint")
    adaptive, fixed, later = (
        TorchTrainer(model_dir, config, AlgoConfig(kl=kl), seed=0)
        for kl in ({"coef": 0.1, "target": 0.1}, {"coef": expected}, {"coef": 0.1})
    )
    for other in (adaptive, fixed, later):
        other.restore(tmp_path / "checkpoint")
    assert adaptive._learners[""].kl.coef == factor.coef and later._learners[""].kl.coef == 0.1, "a fixed one is set"
    found = [other.step(batch(1)) for other in (adaptive, fixed, later)]
    assert found[0].loss == pytest.approx(found[1].loss, rel=1e-6) and found[0].reference_kl > 0
    assert found[0].grad_norm == pytest.approx(found[1].grad_norm, rel=1e-6) != found[2].grad_norm
    fixed.save(tmp_path / "fixed")
    begins = TorchTrainer(model_dir, config, AlgoConfig(kl={"coef": 0.2, "target": 0.1}), seed=0)
    begins.restore(tmp_path / "fixed")
    assert begins._learners[""].kl.coef == 0.2, (
        "a target that a resume sets begins with the factor that is set beside it"
    )


WAYS = [("float32", "torch"), ("float32", "kernels"), ("bfloat16", "kernels"), ("bfloat16", "torch")]


@pytest.mark.parametrize(("dtype", "path"), few(starmap(pytest.param, WAYS), keep=2))
def test_a_reference_that_moves_is_the_policy_of_each_second_step_and_part_of_a_checkpoint(
    model_dir, tmp_path, dtype, path
):
    """Kernels keep packed copies of weights: they must see that those of the reference have changed."""
    config = TrainConfig(device="cpu", dtype=dtype, path=path, learning_rate=1e-2, microbatch_tokens=32)
    algo = AlgoConfig(kl={"coef": 0.1, "every": 2})
    trainer, stays = (TorchTrainer(model_dir, config, one, seed=0) for one in (algo, AlgoConfig(kl={"coef": 0.1})))
    found, first = [[one.step(batch(number)) for number in range(3)] for one in (trainer, stays)]
    assert [report.reference_kl > 0 for report in found] == [False, True, False], "it is the policy again"
    assert [report.reference_kl > 0 for report in first] == [False, True, True]
    assert found[1].grad_norm == first[1].grad_norm and found[2].grad_norm != first[2].grad_norm
    trainer.save(tmp_path / "checkpoint")
    resumed, later = (TorchTrainer(model_dir, config, one, seed=0) for one in (algo, AlgoConfig(kl={"coef": 0.1})))
    for one in (resumed, later):
        one.restore(tmp_path / "checkpoint")
    ends = [one.step(batch(3)) for one in (trainer, resumed, later)]
    assert 0 < ends[0].reference_kl == ends[1].reference_kl < ends[2].reference_kl
    assert ends[0].grad_norm == ends[1].grad_norm
    stays.save(tmp_path / "without")
    resumed.restore(tmp_path / "without")  # it goes on with what it has, and moves at the next fourth step
    assert resumed.step(batch(3)).reference_kl > 0
    assert resumed.step(batch(4)).reference_kl == 0
