"""Placement: one device does what the plain torch calls do, bit for bit, and simulated ranks compute what one device computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import starmap
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from headrace.algo.config import AlgoConfig
from headrace.core.errors import ConfigError
from headrace.testing.simulated_ranks import Ring, Simulated
from headrace.trainer.config import TrainConfig
from headrace.trainer.forward.forward import within
from headrace.trainer.step.checkpoint_files import SavedTensors
from headrace.trainer.step.trainer import TorchTrainer
from support.few import few
from support.plain_trainer import same_numbers
from support.trainer_calls import batch, gradients, model_dir, near, reference  # noqa: F401

BUDGET = 6
"""Tokens of a microbatch: so few that each of two ranks has three microbatches."""
ALGOS = {
    "grpo": AlgoConfig(),
    "kept": AlgoConfig(denominator="kept", old="trainer", correction={"mode": "mask", "low": 0.5, "high": 2.0}),
    "m2po": AlgoConfig("m2po", tau=0.05),
    "kl": AlgoConfig(kl={"coef": 0.1}),
}


def make(directory: Path, algo: AlgoConfig, placement: Simulated | None = None, **config: Any) -> TorchTrainer:
    settings = {"dtype": "float32", "path": "torch", "learning_rate": 1e-3, "device": "cpu", **config}
    settings.setdefault("microbatch_tokens", BUDGET)
    return TorchTrainer(directory, TrainConfig(**settings), algo, seed=0, placement=placement)


# -- one device -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_device_is_the_plain_torch_calls_bit_for_bit(dtype, model_dir):  # noqa: F811
    """Without any placement: the calls as they are written in torch's documentation, around the trainer's own forward and loss."""
    actual, plain = (make(model_dir("llama"), AlgoConfig(), dtype=dtype, max_grad_norm=0.05) for _ in range(2))
    parameters = list(plain._model.parameters())
    matrices, vectors = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.0}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
    learner, precision = plain._learners[""], getattr(torch, dtype)
    for step in range(3):
        given = batch(step, step=step)
        assert actual.step(given).microbatches > 2
        for pack in plain._plans(given)[0].packs:
            with torch.autocast("cpu", precision, enabled=precision != torch.float32):
                scores = plain._forward.logprobs(pack, 1.0, precision)
                tokens = learner_tokens(pack, scores.logprob)
                (learner.objective(tokens).loss * pack.weight).sum().backward()
        assert torch.nn.utils.clip_grad_norm_([*matrices, *vectors], 0.05) > 0.05
        optimizer.step()
        torch.autograd.graph.increment_version(parameters)
        optimizer.zero_grad()
        for (name, one), other in zip(actual.parameters(), parameters, strict=True):
            assert torch.equal(one, other), (step, name)


def learner_tokens(pack: Any, logprob: torch.Tensor) -> Any:
    from headrace.algo.policy.tokens import Tokens

    return Tokens(logprob, pack.sampled, pack.advantage, pack.sequence, pack.lag)


# -- the root ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", few(["llama", "gemma2", "granite", "mixtral", "phi"], keep=2))
def test_every_weight_is_used_within_the_call_of_the_root(name, model_dir):  # noqa: F811
    """And the head's within the call of the head: hooks on either have gathered it."""
    one = make(model_dir(name), AlgoConfig())
    model, head, called, outside = one._model, one._model.get_output_embeddings(), [0], []
    model.register_forward_pre_hook(lambda module, args: called.__setitem__(0, called[0] + 1))
    model.register_forward_hook(lambda module, args, output: called.__setitem__(0, called[0] - 1))
    seen: list[str] = []
    for inner, module in model.named_modules():
        if module is not model and any(True for _ in module.parameters(recurse=False)):
            module.register_forward_pre_hook(
                lambda module, args, inner=inner: (seen if called[0] == 1 else outside).append(inner)
            )
    loss, _ = gradients(one, batch())
    assert outside == [] and loss == loss
    assert head in [model.get_submodule(inner) for inner in seen]
    assert len(set(seen)) > 10


def test_within_restores_the_forward_that_a_module_had():
    layer = torch.nn.Linear(2, 2)
    own, x = layer(torch.ones(2)), torch.ones(2)
    assert within(layer, lambda: 3) == 3 and "forward" not in vars(layer)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        within(layer, lambda: 1 // 0)
    assert torch.equal(layer(x), x)
    del layer.forward
    assert torch.equal(layer(x), own)


# -- ranks ------------------------------------------------------------------------------------------------------------------


def on_ranks(
    directory: Path, algo: AlgoConfig, work: Callable[[TorchTrainer], Any], ranks: int = 2, **config: Any
) -> list[Any]:
    return Ring(ranks).run(lambda placement: work(make(directory, algo, placement, **config)))


def whole_gradients(trainer: TorchTrainer) -> tuple[float, float, dict[str, torch.Tensor], int]:
    given = batch(4)
    plan = trainer._plans(given)[0]
    sums = trainer._gradient(given.temperature).fill(plan)
    parameters = dict(trainer._model.named_parameters())
    found = {name: trainer._placement.whole(p.grad) for name, p in parameters.items() if p.grad is not None}
    norm = trainer._placement.norm([p for p in parameters.values() if p.grad is not None])
    return sums.loss, float(norm), found, len(plan.packs)


@pytest.mark.parametrize(
    ("algo", "ranks"), few(starmap(pytest.param, [("grpo", 3), ("kept", 2), ("m2po", 2), ("kl", 2)]), keep=2)
)
def test_ranks_have_the_gradient_of_one_device(algo, ranks, model_dir):  # noqa: F811
    loss, norm, expected, _ = whole_gradients(make(model_dir("llama"), ALGOS[algo]))
    found = on_ranks(model_dir("llama"), ALGOS[algo], whole_gradients, ranks)
    for one_loss, one_norm, one, packs in found:
        assert packs >= (3 if ranks == 2 else 2)
        assert (one_loss, one_norm) == pytest.approx((loss, norm), rel=3e-6)
        near(one, expected)


def test_one_device_and_ranks_have_the_gradient_of_a_float64_reference(model_dir):  # noqa: F811
    """Padded rows, full logits, PPO by its formula, in float64."""
    directory, given = model_dir("qwen3"), batch(4)
    loss, expected = reference(directory, given, "token_mean", torch.float64)
    for one_loss, _, one, _ in [
        whole_gradients(make(directory, AlgoConfig())),
        *on_ranks(directory, AlgoConfig(), whole_gradients),
    ]:
        assert one_loss == pytest.approx(loss, rel=3e-6)
        near(one, expected, 1e-5)


def three_steps(trainer: TorchTrainer) -> tuple[list[Any], dict[str, torch.Tensor], list[float]]:
    reports = [trainer.step(batch(step, step=step)) for step in range(3)]
    return reports, {name: tensor.clone() for name, tensor in trainer.parameters()}, trainer.score([3, 1, 4, 1, 5])


@pytest.mark.parametrize("name", few(["llama", "mixtral"], keep=1))
def test_three_steps_of_ranks_end_at_the_weights_of_one_device(name, model_dir):  # noqa: F811
    expected_reports, expected, score = three_steps(make(model_dir(name), ALGOS["kl"]))
    for reports, found, one_score in on_ranks(model_dir(name), ALGOS["kl"], three_steps):
        for one, other in zip(reports, expected_reports, strict=True):
            assert (one.loss_tokens, one.dropped_tokens, one.version) == (
                other.loss_tokens,
                other.dropped_tokens,
                other.version,
            )
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
            assert (one.kl, one.entropy, one.ratio_max) == pytest.approx(
                (other.kl, other.entropy, other.ratio_max), rel=1e-4
            )
            assert one.lags[0].gaps == pytest.approx(other.lags[0].gaps, rel=1e-3)
            same_numbers(one, other)
        for key, tensor in expected.items():  # Adam makes ±lr of the rounding of a gradient near zero
            assert (found[key] - tensor).abs().max() <= 3e-5, key
        assert one_score == pytest.approx(score, abs=1e-4)


def test_a_norm_above_the_bound_is_clipped_by_the_whole_norm(model_dir):  # noqa: F811
    config = {"max_grad_norm": 1e-3}
    one = make(model_dir("llama"), AlgoConfig(), **config)
    expected = three_steps(one)[1]
    for _, found, _ in on_ranks(model_dir("llama"), AlgoConfig(), three_steps, **config):
        for key, tensor in expected.items():
            assert (found[key] - tensor).abs().max() <= 3e-5, key


def test_what_ranks_save_one_device_resumes_and_the_other_way_round(model_dir, tmp_path):  # noqa: F811
    directory = model_dir("llama")

    def saved_after_two(trainer: TorchTrainer) -> None:
        for step in range(2):
            trainer.step(batch(step, step=step))
        trainer.save(tmp_path / "ranks")
        trainer.export(tmp_path / "export")

    on_ranks(directory, AlgoConfig(), saved_after_two)
    single = make(directory, AlgoConfig())
    single.restore(tmp_path / "ranks")
    assert single.version == 2
    single.save(tmp_path / "single")
    for stem in ("model", "optimizer"):
        one = SavedTensors(sorted((tmp_path / "ranks").glob(f"{stem}*.safetensors")))
        other = load_file(tmp_path / "single" / f"{stem}.safetensors")
        assert set(one) == other.keys()
        assert all(torch.equal(one.read(name), other[name]) for name in one if not name.startswith("rng/"))
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.bfloat16)
    for name, tensor in single.parameters():
        assert torch.equal(exported.get_parameter(name), tensor.bfloat16()), name

    def third(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
        trainer.restore(tmp_path / "single")
        trainer.step(batch(2, step=2))
        return {name: tensor.clone() for name, tensor in trainer.parameters()}

    expected = third(make(directory, AlgoConfig()))
    for found in on_ranks(directory, AlgoConfig(), third):
        for name, tensor in expected.items():
            assert (found[name] - tensor).abs().max() <= 3e-5, name


def test_each_rank_writes_its_part_and_the_facts_are_from_the_one_that_leads(model_dir, tmp_path):  # noqa: F811
    def save(trainer: TorchTrainer) -> bool:
        trainer.save(tmp_path / f"by-{trainer._placement.leads}")
        return trainer._placement.leads

    assert on_ranks(model_dir("llama"), AlgoConfig(), save) == [True, False]
    written = {path.name: sorted(file.name for file in path.iterdir()) for path in tmp_path.iterdir()}
    first, second = ([f"{stem}-0000{rank}-of-00002.safetensors" for stem in ("model", "optimizer")] for rank in (1, 2))
    assert written == {"by-True": [*first, "trainer.json"], "by-False": second}


def test_weights_read_outside_of_the_root_show(model_dir):  # noqa: F811
    """What the fake is for."""

    def read(trainer: TorchTrainer) -> bool:
        trainer.step(batch())
        return all(bool(p.isfinite().all()) for p in trainer._model.parameters() if len(p) > 1)

    assert on_ranks(model_dir("llama"), AlgoConfig(), read) == [False, False]


def test_kernels_are_refused_where_weights_lie_in_parts(model_dir):  # noqa: F811
    with pytest.raises(ConfigError, match="each rank holds a part"):
        on_ranks(model_dir("llama"), AlgoConfig(), lambda one: None, path="kernels")


def test_ranks_that_make_different_calls_end_with_an_error():
    def work(placement: Simulated) -> None:
        (placement.sum if placement.leads else placement.largest)(torch.zeros(1))

    with pytest.raises(AssertionError, match="different things"):
        Ring(2).run(work)


def test_a_rank_that_fails_ends_the_others():
    def work(placement: Simulated) -> None:
        if placement.leads:
            raise ValueError("this one")
        placement.sum(torch.zeros(1))

    before = threading.active_count()
    with pytest.raises(ValueError, match="this one"):
        Ring(2).run(work)
    assert threading.active_count() == before
