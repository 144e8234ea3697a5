"""The trainer against plain padded code with full logits, on tiny random models of several families."""

from __future__ import annotations

import math
import random
import resource
import shutil
from dataclasses import replace
from itertools import cycle

import msgspec
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from headrace.algo.config import AlgoConfig
from headrace.core.batches import Batch, Group, Row
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.types import Prompt
from headrace.trainer.config import TrainConfig, learning_rate
from headrace.trainer.forward.tree_attention import tree_of
from headrace.trainer.packing import StepRows, split_ranks
from headrace.trainer.step.trainer import TorchTrainer
from support import trainer_calls
from support.few import few
from support.trainer_calls import MODELS, SIZES, V, batch, gradients, reference, trainer

model_dir = trainer_calls.model_dir


def close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    """To `tolerance` of the largest gradient; a parameter without gradient on one side has zeros on the other."""
    scale = max(float(grad.abs().max()) for grad in expected.values())
    assert scale > 1e-4
    for name in actual.keys() | expected.keys():
        zero = torch.zeros_like((actual if name in actual else expected)[name])
        difference = (actual.get(name, zero) - expected.get(name, zero)).abs().max()
        assert difference <= tolerance * max(scale, 1), f"{name}: {difference} of {scale}"


# -- the gradient -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", few(MODELS, keep=5))
def test_packed_loss_and_gradient_equal_padded_full_logits(name, model_dir):
    one = trainer(model_dir(name))
    assert one._forward.path == MODELS[name][2]
    loss, grads = gradients(one, batch(temperature=0.7))
    expected_loss, expected = reference(model_dir(name), batch(temperature=0.7), "token_mean")
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    close(grads, expected)


@pytest.mark.parametrize("tokens", [16, 2048])
def test_each_row_is_trained_at_the_temperature_that_it_was_sampled_at(tokens, model_dir):
    """As after a resume with another one, in one step; rows of an earlier version do not say theirs. Prompts and beginnings are shared."""
    heat = cycle([0.5, 2.0, 0.0])
    cold = batch(temperature=0.7)
    groups = [
        msgspec.structs.replace(
            group, rows=tuple(msgspec.structs.replace(row, temperature=next(heat)) for row in group.rows)
        )
        for group in cold.groups
    ]
    mixed = msgspec.structs.replace(cold, groups=tuple(groups))
    loss, grads = gradients(trainer(model_dir("llama"), microbatch_tokens=tokens), mixed)
    expected_loss, expected = reference(model_dir("llama"), mixed, "token_mean")
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    close(grads, expected)


@pytest.mark.parametrize("weigh", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum"])
def test_every_aggregation_equals_its_formula(weigh, model_dir):
    algo = AlgoConfig(aggregation=weigh).with_length(7)
    loss, grads = gradients(trainer(model_dir("llama"), algo, microbatch_tokens=16), batch(3))
    expected_loss, expected = reference(model_dir("llama"), batch(3), weigh)
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    close(grads, expected)


@pytest.fixture(scope="module")
def whole(model_dir):
    one = trainer(model_dir("qwen3"), microbatch_tokens=10_000)
    return one, gradients(one, batch(5))


@settings(max_examples=25)
@given(st.integers(1, 80), st.randoms(use_true_random=False))
def test_neither_order_nor_split_changes_the_gradient(whole, budget, rng):
    one, (expected_loss, expected) = whole
    groups = [replace_rows(g, rng) for g in batch(5).groups]
    rng.shuffle(groups)
    learner = one._learners[""]
    learner.config = replace(learner.config, microbatch_tokens=budget)
    given_batch = Batch(0, tuple(groups))
    assert budget > 20 or len(one._plans(given_batch)[0].packs) > 1
    loss, grads = gradients(one, given_batch)
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    close(grads, expected)


def replace_rows(old: Group, rng: random.Random) -> Group:
    rows = list(old.rows)
    rng.shuffle(rows)
    return Group(old.ticket, old.prompt, (), tuple(rows))


def test_ranks_with_a_microbatch_to_fill_up_add_up_to_the_step(whole):
    one, (expected_loss, expected) = whole
    given_batch, learner = batch(5), one._learners[""]
    plans = split_ranks(StepRows(given_batch.rows, learner.aggregation, constant=0, budget=10, step=0), 3)
    assert any(not len(pack.target) for plan in plans for pack in plan.packs), "nothing fills up: take another budget"
    loss = sum(one._gradient(given_batch.temperature).fill(plan).loss for plan in plans)
    found = {name: p.grad.clone() for name, p in one._model.named_parameters() if p.grad is not None}
    learner.optimizer.zero_grad()
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    close(found, expected)


def test_a_selection_that_keeps_all_changes_no_gradient_in_bfloat16(model_dir):
    """Its forward pass without gradients shares the autocast, and its cache of lowered weights, with that of the gradient."""
    algos = AlgoConfig("second_moment", select={"tau": 1e9}), AlgoConfig(loss="importance")
    found = [
        gradients(trainer(model_dir("phi"), algo, dtype="bfloat16", microbatch_tokens=24), batch(2))[1]
        for algo in algos
    ]
    assert found[0].keys() == found[1].keys() and found[0]
    for name, grad in found[0].items():
        if "norm" not in name:  # the derivative of the whole step's loss is rounded once more
            assert grad.any() and (grad - found[1][name]).abs().max() <= 0.01 * grad.abs().max()


def test_what_is_random_in_training_mode_is_switched_off(tmp_path):
    """OPT's dropout is a number of its layers and no module; checkpointing needs training mode."""
    noisy = {"dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5, "activation_function": "relu"}
    config = transformers.OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64, **noisy)
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    expected = gradients(trainer(tmp_path), batch(8))[1]
    close(gradients(trainer(tmp_path, gradient_checkpointing=True), batch(8))[1], expected)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_checkpointing_changes_nothing(name, model_dir):
    expected = gradients(trainer(model_dir(name)), batch(8))[1]
    close(gradients(trainer(model_dir(name), gradient_checkpointing=True), batch(8))[1], expected)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_checkpointing_in_bfloat16_reaches_the_same_parameters(name, model_dir):
    """The kernels leave gradients in `.grad`, and checkpointing gives back detached copies of what was saved."""
    expected = gradients(trainer(model_dir(name), dtype="bfloat16"), batch(8))[1]
    found = gradients(trainer(model_dir(name), dtype="bfloat16", gradient_checkpointing=True), batch(8))[1]
    assert found.keys() == expected.keys() and len(expected) > 15


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_long_completions_attend_segment_by_segment_to_the_same_end(name, model_dir):
    rng = random.Random(0)
    long = tuple(
        Row((1, 2, 3), tuple(rng.randrange(V) for _ in range(n)), (-4.0,) * n, (1.0 - i,) * n, (True,) * n, (0,) * n)
        for i, n in enumerate((300, 310, 290))
    )
    one_batch = Batch(0, (Group(0, Prompt("p", "", (1, 2, 3)), (), long),))
    one = trainer(model_dir(name))
    (pack,) = one._plans(one_batch)[0].packs
    assert len(tree_of(pack.segments, torch.device("cpu")).blocks) == 4
    close(gradients(one, one_batch)[1], gradients(trainer(model_dir(name), microbatch_tokens=1), one_batch)[1])


def test_bfloat16_stays_near(model_dir):
    loss, grads = gradients(trainer(model_dir("llama"), dtype="bfloat16", microbatch_tokens=20), batch(2))
    expected_loss, expected = gradients(trainer(model_dir("llama")), batch(2))
    assert loss == pytest.approx(expected_loss, rel=0.05)
    assert all(grad.dtype == torch.float32 for grad in grads.values())
    flat = lambda found: torch.cat([found[name].flatten() for name in expected])  # noqa: E731
    assert torch.cosine_similarity(flat(grads), flat(expected), dim=0) > 0.99


# -- a step -----------------------------------------------------------------------------------------------------------------


def test_report_is_complete_and_right(model_dir):
    one = trainer(model_dir("llama"), microbatch_tokens=20, warmup_steps=4)
    given_batch = batch(1)
    logprobs = score_rows(one, given_batch)
    report = one.step(given_batch)
    ratios = [math.exp(new - old) for new, old in logprobs]
    assert report.version == one.version == 1 and report.skipped == ""
    assert report.lr == pytest.approx(1e-3 / 4)
    assert report.loss_tokens == len(logprobs)
    assert report.ratio_mean == pytest.approx(sum(ratios) / len(ratios), rel=1e-4)
    assert report.ratio_max == pytest.approx(max(ratios), rel=1e-4)
    kl = sum(r - 1 - math.log(r) for r in ratios) / len(ratios)
    assert report.kl == pytest.approx(kl, rel=1e-4)
    assert 0 < report.clip_fraction < 1 and 0 < report.entropy <= math.log(V)
    nan_tokens = sum(
        m and not math.isfinite(lp) for row in given_batch.rows for m, lp in zip(row.mask, row.logprobs, strict=True)
    )
    assert report.dropped_tokens == nan_tokens > 0
    assert report.microbatches > 1 and report.grad_norm > 0 and report.seconds > 0


def test_numbers_of_single_tokens_are_those_of_plain_full_logits(model_dir):
    groups = batch(1, temperature=0.7).groups
    given_batch = Batch(0, tuple(msgspec.structs.replace(group, ticket=40 + i) for i, group in enumerate(groups)), 0.7)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir("llama"), dtype=torch.float32).eval()
    found = trainer(model_dir("llama"), microbatch_tokens=20).step(given_batch).token_numbers
    assert found is not None
    assert [(one.ticket, one.row) for one in found] == [
        (40 + i, n) for i, g in enumerate(groups) for n in range(len(g.rows))
    ]
    for one in found:
        row = groups[one.ticket - 40].rows[one.row]
        logp = model(torch.tensor([row.prompt + row.tokens])).logits[0].detach().div(0.7).log_softmax(-1)
        logp = logp[len(row.prompt) - 1 : -1]
        lost = torch.tensor(
            [not kept or not math.isfinite(old) for kept, old in zip(row.mask, row.logprobs, strict=True)]
        )
        chosen = logp[torch.arange(len(row.tokens)), torch.tensor(row.tokens)].masked_fill(lost, math.nan)
        entropy = -(logp.exp() * logp).sum(-1).masked_fill(lost, math.nan)
        for data, expected in ((one.logprobs, chosen), (one.entropies, entropy)):
            torch.testing.assert_close(
                torch.frombuffer(bytearray(data), dtype=torch.float32), expected, equal_nan=True, atol=1e-4, rtol=1e-4
            )


def score_rows(one: TorchTrainer, given_batch: Batch) -> list[tuple[float, float]]:
    """(trainer's, sampler's) log-prob of every loss token, each row scored alone."""
    pairs = []
    for row in given_batch.rows:
        scores = one.score(row.prompt + row.tokens)[len(row.prompt) - 1 :]
        for new, old, mask in zip(scores, row.logprobs, row.mask, strict=True):
            if mask and math.isfinite(old):
                pairs.append((new, old))
    return pairs


def test_score_equals_hugging_face(model_dir):
    tokens = [5, 9, 60, 0, 3, 3, 17]
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir("gemma3"), dtype=torch.float32).eval()
    logp = model(torch.tensor([tokens])).logits[0].log_softmax(-1).detach()
    expected = [float(logp[i, token]) for i, token in enumerate(tokens[1:])]
    assert trainer(model_dir("gemma3")).score(tokens) == pytest.approx(expected, abs=1e-5)
    assert trainer(model_dir("gemma3")).score([4]) == []


def test_a_step_does_what_adamw_does(model_dir):
    settings_ = {"learning_rate": 0.01, "weight_decay": 0.1, "max_grad_norm": 0.05}
    one = trainer(model_dir("llama"), **settings_)
    before = {name: p.clone() for name, p in one.parameters()}
    _, grads = gradients(one, batch(4))
    report = one.step(batch(4))
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads.values()))
    assert report.grad_norm == pytest.approx(norm, rel=1e-5) and norm > 0.05
    for name, after in one.parameters():
        grad = grads[name] * 0.05 / norm  # the first AdamW step moves by g / (|g| + eps)
        decay = 0.1 if after.ndim >= 2 else 0.0
        expected = before[name] * (1 - 0.01 * decay) - 0.01 * grad / (grad.abs() + 1e-8)
        torch.testing.assert_close(after, expected, atol=2e-5, rtol=1e-4)


def test_training_raises_the_probability_of_what_was_rewarded(model_dir):
    one = trainer(model_dir("llama"), learning_rate=3e-3)
    prompt, good, bad = (1, 2, 3), (10, 11), (20, 21)
    start = one.score(prompt + good)[2:]
    for step in range(10):
        old = {tokens: tuple(one.score(prompt + tokens)[2:]) for tokens in (good, bad)}
        rows = tuple(
            Row(prompt, tokens, old[tokens], (adv,) * 2, (True,) * 2, (0,) * 2)
            for tokens, adv in ((good, 1.0), (bad, -1.0))
        )
        report = one.step(Batch(step, (Group(0, Prompt("p", "", prompt), (), rows),)))
        assert report.ratio_mean == pytest.approx(1, abs=1e-4)  # on policy
    assert sum(one.score(prompt + good)[2:]) > sum(start) + 1


def test_a_non_finite_gradient_changes_nothing(model_dir):
    one, twin = trainer(model_dir("llama")), trainer(model_dir("llama"))
    one.step(batch(1))
    twin.step(batch(1))
    broken = batch(2, step=1)
    rows = list(broken.groups[0].rows)
    rows[0] = Row(rows[0].prompt, (1, 2), (-1.0, -1.0), (math.inf, 1.0), (True, True), (0, 0))
    broken = Batch(1, (Group(0, broken.groups[0].prompt, (), tuple(rows)), *broken.groups[1:]))
    report = one.step(broken)
    assert (report.skipped, report.version, one.version) == ("nonfinite_gradient", 1, 1)
    same_parameters(one, twin)
    assert one.step(batch(3, step=1)).lr == twin.step(batch(3, step=1)).lr
    same_parameters(one, twin)  # nor did the optimizer's state change


def test_a_finite_loss_with_a_non_finite_gradient_changes_nothing(model_dir):
    one, twin = trainer(model_dir("llama")), trainer(model_dir("llama"))
    # A norm's: the gradients of matrices are left in `.grad` by the kernels, and no hook sees them.
    name, parameter = next((n, p) for n, p in one._model.named_parameters() if n.endswith("layernorm.weight"))
    handle = parameter.register_hook(lambda grad: grad * math.nan)
    report = one.step(batch(2))
    assert report.skipped == "nonfinite_gradient" and math.isfinite(report.loss), name
    same_parameters(one, twin)
    handle.remove()
    assert one.step(batch(2)).version == 1


def test_nothing_to_train_is_named(model_dir):
    one, twin = trainer(model_dir("llama")), trainer(model_dir("llama"))
    row = Row((1,), (2, 3), (math.nan, -1.0), (1.0, 1.0), (True, False), (0, 0))
    report = one.step(Batch(0, (Group(0, Prompt("p", "", (1,)), (), (row,)),)))
    assert (report.skipped, report.version, report.dropped_tokens) == ("no_tokens", 0, 1)
    same_parameters(one, twin)


def same_parameters(one: TorchTrainer, other: TorchTrainer) -> None:
    for (name, a), (_, b) in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_batch_says_how_long_the_schedule_is(schedule, model_dir):
    """A run whose number of steps changes (`train.minutes`, a resume) falls to the end that it has now, in its weights and in its report."""
    planned, told = (trainer(model_dir("llama"), schedule=schedule, steps=steps) for steps in (12, 3))
    for step in range(3):
        lrs = [planned.step(batch(step, step)).lr, told.step(msgspec.structs.replace(batch(step, step), steps=12)).lr]
        assert lrs == [learning_rate(step, TrainConfig(steps=12, learning_rate=1e-3, schedule=schedule))] * 2
    same_parameters(planned, told)
    for length in (0, 3):  # 0: that of the settings
        assert told.step(msgspec.structs.replace(batch(3, told.version), steps=length)).lr == 0


def test_tied_parameters_are_published_once(model_dir):
    names = [name for name, _ in trainer(model_dir("llama")).parameters()]
    assert names[0] == "model.embed_tokens.weight" and "lm_head.weight" not in names and len(set(names)) == len(names)
    assert all(tensor.dtype == torch.float32 for _, tensor in trainer(model_dir("llama")).parameters())


# -- checkpoints ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(name, model_dir, tmp_path):
    straight = trainer(model_dir(name), schedule="cosine", warmup_steps=2, steps=6)
    for step in range(3):
        straight.step(batch(step, step))
    straight.save(tmp_path / "saved")
    resumed = trainer(model_dir(name), schedule="cosine", warmup_steps=2, steps=6)
    resumed.restore(tmp_path / "saved")
    assert resumed.version == 3
    for step in range(3, 6):
        a, b = straight.step(batch(step, step)), resumed.step(batch(step, step))
        assert (a.loss, a.grad_norm, a.lr) == (b.loss, b.grad_norm, b.lr)
    same_parameters(straight, resumed)


def test_the_random_generator_is_restored(model_dir, tmp_path):
    one = trainer(model_dir("llama"))
    one.save(tmp_path / "saved")
    expected = torch.rand(4)
    torch.manual_seed(9)
    one.restore(tmp_path / "saved")
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "trainer.json"])
@pytest.mark.parametrize("damage", few(["missing", "truncated"], keep=1))
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(file, damage, model_dir, tmp_path):
    one, twin = trainer(model_dir("llama")), trainer(model_dir("llama"))
    one.step(batch(1))
    twin.step(batch(1))
    one.save(tmp_path / "step-1")
    path = tmp_path / "step-1" / file
    whole_file = path.read_bytes()
    path.unlink()
    if damage == "truncated":
        path.write_bytes(whole_file[: len(whole_file) // 2])
    one.step(batch(2, 1))
    twin.step(batch(2, 1))
    with pytest.raises(CheckpointError, match=f"checkpoint step-1: {file} cannot be read"):
        one.restore(tmp_path / "step-1")
    same_parameters(one, twin)


def test_a_checkpoint_of_another_model_is_refused(model_dir, tmp_path):
    trainer(model_dir("llama")).save(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="belongs to another model"):
        trainer(model_dir("gpt2")).restore(tmp_path / "saved")


def test_a_place_that_cannot_be_written_is_an_os_error(model_dir, tmp_path):
    (tmp_path / "saved" / "model.safetensors").mkdir(parents=True)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        trainer(model_dir("llama")).save(tmp_path / "saved")


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_export_loads_in_transformers(name, dtype, model_dir, tmp_path):
    one = trainer(model_dir(name))
    one.step(batch(1))
    one.export(tmp_path / "out", dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == getattr(torch, dtype)
    for (name_, trained), (other, loaded) in zip(one.parameters(), model.named_parameters(), strict=True):
        assert name_ == other and torch.equal(trained.to(loaded.dtype), loaded)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert sum(tensor.numel() for tensor in stored.values()) == sum(
        p.numel() for _, p in one.parameters()
    )  # tied ones once
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_an_export_that_the_disk_does_not_take_is_an_os_error(model_dir, tmp_path):
    """safetensors has an error of its own for it. A limit on the size of files stands for the full disk."""
    one = trainer(model_dir("llama"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            one.export(tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# -- bad input --------------------------------------------------------------------------------------------------------------


def test_missing_directory_and_missing_weights_are_config_errors(model_dir, tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        trainer(tmp_path / "nowhere")
    shutil.copytree(model_dir("llama"), tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot load a causal language model"):
        trainer(tmp_path / "bare")


def test_a_missing_parameter_is_not_made_up(model_dir, tmp_path):
    shutil.copytree(model_dir("llama"), tmp_path / "holed")
    tensors = load_file(tmp_path / "holed" / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "holed" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"the first: model\.norm\.weight"):
        trainer(tmp_path / "holed")


def test_dr_grpo_needs_its_constant(model_dir):
    with pytest.raises(ConfigError, match=r"set algo\.length_constant, usually to rollout\.max_tokens"):
        trainer(model_dir("llama"), AlgoConfig("dr_grpo"))
    assert trainer(model_dir("llama"), AlgoConfig("dr_grpo").with_length(7)).step(batch()).version == 1


def test_a_batch_of_another_step_is_our_own_mistake(model_dir):
    with pytest.raises(AssertionError, match="batch of step 3 for weights of version 0"):
        trainer(model_dir("llama")).step(batch(step=3))
