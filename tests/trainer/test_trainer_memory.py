"""Weights in bfloat16 and optimizer state on the host: the same arithmetic, what it is rounded to, and the way back from disk."""

from __future__ import annotations

import math
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace.algo.config import AlgoConfig
from headrace.core.batches import Batch, Group, Row
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.types import Prompt
from headrace.processes.launch.local import environment
from headrace.run.config import load_config
from headrace.trainer.config import TrainConfig
from headrace.trainer.model.low_memory import MixedAdamW, lower_weights, round_stochastically
from headrace.trainer.step.learner import Assignment
from headrace.trainer.step.trainer import TorchTrainer, export_weights
from support import tiny_models
from support.few import few

LR, BETAS, DECAY = 3e-3, (0.9, 0.95), 0.1


def trainer(name: str = "llama-tied-biased", **config: Any) -> TorchTrainer:
    config = {"dtype": "bfloat16", "learning_rate": LR, "weight_decay": DECAY, "device": "cpu", **config}
    return TorchTrainer(tiny_models.saved(name), TrainConfig(**config), AlgoConfig(), seed=0)


def batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    prompt = tuple(torch.randint(3, 96, (5,), generator=generator).tolist())
    rows = []
    for advantage in (1.0, -1.0, 0.5):
        tokens = tuple(torch.randint(3, 96, (6,), generator=generator).tolist())
        rows.append(Row(prompt, tokens, (-4.0,) * 6, (advantage,) * 6, (True,) * 6, (step,) * 6))
    return Batch(step, (Group(0, Prompt("p", "", prompt), (), tuple(rows)),))


def train(one: TorchTrainer, steps: int) -> TorchTrainer:
    for _ in range(steps):
        assert not one.step(batch(one.version)).skipped
    return one


def weights(one: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in one.parameters()}


def same(one: TorchTrainer, other: TorchTrainer) -> bool:
    theirs = weights(other)
    return all(
        tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name])
        for name, tensor in weights(one).items()
    )


# -- rounding ---------------------------------------------------------------------------------------------------------------


@given(st.floats(-(2.0**99), 2.0**99, width=32).filter(lambda x: x == 0 or abs(x) > 1e-30))
@settings(max_examples=200)
def test_rounding_gives_one_of_the_two_neighbours(value):
    exact = torch.full((64,), value)
    rounded = round_stochastically(exact).float()
    spacing = abs(value) / 128
    assert rounded.dtype == torch.float32 and bool(((rounded - exact).abs() <= spacing).all())
    assert len(rounded.unique()) <= 2
    low = exact.bfloat16().float()
    assert torch.equal(round_stochastically(low).float(), low)  # what can be represented stays


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rounding_is_unbiased(share, sign):
    torch.manual_seed(0)
    low, spacing, draws = 1.5, 2.0**-7, 200_000
    values = torch.full((draws,), sign * (low + share * spacing))
    rounded = round_stochastically(values).float()
    error = 5 * spacing * math.sqrt(share * (1 - share) / draws)
    assert abs(float(rounded.double().mean()) - float(values[0])) < error
    assert set(rounded.unique().tolist()) == {sign * low, sign * (low + spacing)}


def test_small_updates_add_up_in_bfloat16():
    """Each update is 1/40 of the spacing: to the nearest, the weight would never move."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = MixedAdamW([{"params": [weight]}], lr=2**-7 / 40, betas=BETAS)
    for _ in range(100):
        weight.grad = -torch.ones_like(weight)
        optimizer.step()
    assert float(weight.detach().float().mean()) == pytest.approx(1 + 100 * 2**-7 / 40, rel=2e-3)


# -- the update -------------------------------------------------------------------------------------------------------------


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in ((7, 5), (11,), (3, 2, 4))]


def run(optimizer: torch.optim.Optimizer, trained: list[torch.nn.Parameter], steps: int = 6) -> None:
    generator = torch.Generator().manual_seed(4)
    for step in range(steps):
        for number, parameter in enumerate(trained):
            gradient = torch.randn(parameter.shape, generator=generator).bfloat16()
            parameter.grad = None if (step + number) % 3 == 0 else gradient.to(parameter.dtype)
        optimizer.step()


def test_offloaded_and_not_are_torchs_adamw_bit_for_bit():
    plain, here, there = (parameters(torch.float32) for _ in range(3))
    run(torch.optim.AdamW(plain, lr=LR, betas=BETAS, weight_decay=DECAY, fused=True), plain)
    run(MixedAdamW([{"params": here, "weight_decay": DECAY}], LR, BETAS), here)
    run(MixedAdamW([{"params": there, "weight_decay": DECAY}], LR, BETAS, offload=True), there)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(plain, here, there, strict=True))


def test_bfloat16_weights_with_masters_are_the_image_of_float32_training():
    exact, low = parameters(torch.bfloat16), parameters(torch.bfloat16)
    masters = [torch.nn.Parameter(p.detach().float()) for p in exact]
    run(torch.optim.AdamW(masters, lr=LR, betas=BETAS, weight_decay=0.0, fused=True), masters)
    optimizer = MixedAdamW([{"params": low}], LR, BETAS, offload=True)
    run(optimizer, low)
    for master, parameter in zip(masters, low, strict=True):
        assert torch.equal(optimizer.masters[parameter], master)
        assert torch.equal(parameter, master.bfloat16())


def test_moments_of_bfloat16_weights_are_float32():
    low = parameters(torch.bfloat16)
    optimizer = MixedAdamW([{"params": low}], LR, BETAS)
    run(optimizer, low)
    before = {p: {key: tensor.clone() for key, tensor in optimizer.state[p].items()} for p in low}
    optimizer.load_state_dict(optimizer.state_dict())
    for parameter in low:
        for key, tensor in optimizer.state[parameter].items():
            assert tensor.dtype == torch.float32 and torch.equal(tensor, before[parameter][key])


# -- in the trainer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-tied-biased", "mixtral", "gpt2", "gemma3_text"])
def test_lowered_weights_change_log_probs_by_their_own_rounding_alone(name):
    """With weights that bfloat16 can hold, the computation is that of float32 weights under autocast."""
    model = trainer(name)._model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    tokens = torch.arange(3, 20)[None]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model.set_attn_implementation("eager")
        if hasattr(model.config, "num_local_experts"):
            model.set_experts_implementation("eager")  # grouped products know no autocast
        before = model(input_ids=tokens, use_cache=False).logits
        lower_weights(model, torch.bfloat16)
        after = model(input_ids=tokens, use_cache=False).logits
    low = sum(p.numel() for p in model.parameters() if p.dtype == torch.bfloat16)
    assert low > 0.9 * sum(p.numel() for p in model.parameters())
    if name == "gemma3_text":  # its embeddings are scaled in their own dtype
        assert float((after - before).abs().max()) < 0.05 * float(before.abs().max())
    else:
        assert torch.equal(before, after)


@pytest.mark.parametrize("name", ["llama-tied-biased", "mixtral"])
def test_offloading_changes_no_bit_of_a_run(name):
    assert same(train(trainer(name), 3), train(trainer(name, offload_optimizer=True), 3))


def test_bfloat16_weights_follow_float32_ones():
    exact, low = train(trainer(learning_rate=1e-4), 4), train(trainer(weights="bfloat16", learning_rate=1e-4), 4)
    start = weights(trainer())
    for name, tensor in weights(low).items():
        moved, expected = (
            tensor.float() - start[name].float().to(tensor.dtype).float(),
            weights(exact)[name] - start[name],
        )
        assert float(moved.mean()) == pytest.approx(float(expected.mean()), abs=4e-4), name
        assert float((moved - expected).abs().max()) <= float(start[name].abs().max()) / 64, name


KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "offloaded": {"offload_optimizer": True},
    "bfloat16": {"weights": "bfloat16"},
    "bfloat16-offloaded": {"weights": "bfloat16", "offload_optimizer": True},
}


@pytest.mark.parametrize("kind", few(KINDS, keep=2))
def test_a_resumed_run_goes_on_bit_for_bit(kind, tmp_path: Path):
    straight = train(trainer(**KINDS[kind]), 2)
    straight.save(tmp_path)
    train(straight, 2)
    resumed = trainer(**KINDS[kind])
    resumed.restore(tmp_path)
    assert same(train(resumed, 2), straight)


@pytest.mark.parametrize(("written", "read"), [("float32", "offloaded"), ("bfloat16-offloaded", "float32")])
def test_checkpoints_with_float32_weights_are_all_alike(written, read, tmp_path: Path):
    one, other = train(trainer(**KINDS[written]), 2), trainer(**KINDS[read])
    one.save(tmp_path)
    other.restore(tmp_path)
    for name, tensor in other.parameters():
        expected = weights(one)[name]
        assert torch.equal(tensor.to(expected.dtype), expected)
    other.save(tmp_path / "again")
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / file).read_bytes() == (tmp_path / "again" / file).read_bytes()


def test_a_checkpoint_in_bfloat16_is_not_taken_for_float32(tmp_path: Path):
    train(trainer(weights="bfloat16"), 1).save(tmp_path / "low")
    one = trainer()
    before = weights(one)
    with pytest.raises(CheckpointError, match=r"holds .* in bfloat16.*resume with the settings it was written with"):
        one.restore(tmp_path / "low")
    assert all(torch.equal(tensor, before[name]) for name, tensor in one.parameters())


def test_pairs_that_cannot_work_are_refused():
    with pytest.raises(ValidationError, match=r"set train.dtype = bfloat16, or train.weights = float32"):
        TrainConfig(weights="bfloat16", dtype="float32")
    with pytest.raises(ConfigError, match=r"train.dtype comes to float32 here"):
        lower_weights(torch.nn.Linear(2, 2), torch.float32)


@pytest.mark.parametrize("memory", [{"weights": "bfloat16"}, {"weights": "bfloat16", "offload_optimizer": True}])
def test_a_run_is_exported_from_its_checkpoint_whatever_its_weights_are_kept_in(memory, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    one, model_dir = train(trainer(**memory), 2), tiny_models.saved("llama-tied-biased")
    one.save(tmp_path / "step")
    tables = {"model": {"path": str(model_dir)}, "task": {"kind": "reasoning_gym", "name": "chain_sum"}}
    config = load_config({**tables, "reward": {"function": "reasoning_gym"}, "train": {"dtype": "bfloat16", **memory}})
    trained, to = Assignment(config.train, config.algo), tmp_path / "out"
    export_weights(model_dir, trained, seed=0, checkpoint=tmp_path / "step", to=to, dtype="bfloat16", merge=False)
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).named_parameters())
    for name, tensor in one.parameters():
        assert torch.equal(loaded[name], tensor.bfloat16())


def test_an_exported_model_is_whole(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    one = train(trainer(weights="bfloat16"), 1)
    one.export(tmp_path, "float32")
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).named_parameters())
    for name, tensor in one.parameters():
        assert torch.equal(loaded[name], tensor.float())


HOARDER = """
import torch
from headrace.native.memory import held, return_freed_memory

CPU = torch.device("cpu")

def after_growing_blocks():
    before = held(CPU)
    kept = []
    for megabytes in range(20, 60, 4):
        block = torch.ones(megabytes << 18)
        kept.append(torch.ones(1000))  # keeps the end of the heap from sinking
        del block
    return held(CPU) - before

first = after_growing_blocks()
return_freed_memory()
print(first, after_growing_blocks())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_rank_gives_back_what_a_worker_keeps() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", HOARDER], env=environment(()), stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    keeping, giving_back = map(int, answer.split())
    assert keeping > 20e6 and giving_back < 5e6
