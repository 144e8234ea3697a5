"""The short form of `make models`, and what the page says of every architecture that transformers has now."""

from __future__ import annotations

import runpy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.algo.config import AlgoConfig
from headrace.engine.native.core import NativeEngine
from headrace.testing.makers import update
from headrace.testing.small_models import TYPES
from headrace.trainer.config import TrainConfig
from headrace.trainer.step.trainer import TorchTrainer
from headrace.weight_sync.packed import PackedBuffer, lay_out
from support.few import few
from support.model_page import PAGE, model_types
from support.native_calls import greedy, make_engine, run, teacher_forced
from support.tiny_models import SMALL

MADE = runpy.run_path(str(PAGE.parent / "make_models.py"))
SHORT = ("qwen2", "gpt_bigcode", "gemma2", "openai-gpt", "falcon_mamba", "lfm2", "qwen3_5_text", "granitemoe", "bert")
"""One of each way: kernels, our attention in transformers' layers, softcaps, one that keeps nothing, a recurrent one, convolutions, a delta rule and a
mixture in kernels, and one that is refused."""


def test_every_architecture_of_this_transformers_is_on_the_page():
    """A new release shows here what changed: `make models` writes the page again."""
    assert set(model_types()) == set(TYPES)


@pytest.mark.parametrize("model_type", few(SHORT, keep=3))
def test_what_the_page_says_is_so(model_type):
    row = MADE["tried"](model_type)
    page = model_types()[model_type]
    assert row.outcome == page.outcome, row
    assert MADE["_learns"](row) == (row.outcome == "served"), row
    assert row.trained == page.way
    assert MADE["_experts"](row) == page.experts
    assert page.experts != "replayed" or float(row.replayed) < 1e-5


def test_everything_that_is_served_is_trained():
    ways_of_trees = {"packed trees, chunked head", "carried states, chunked head"}
    known = {*ways_of_trees, "row by row, chunked head", "row by row, own head"}
    assert {row.way for row in model_types().values() if row.outcome == "served"} <= known


def test_buffers_that_a_model_saves_are_published_in_their_own_dtype_and_served(tmp_path):
    """The bias with which DeepSeek V3 chooses experts: read by the trainer, packed, verified, and used by the engine."""
    torch.manual_seed(0)
    latent = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    sizes = {"num_key_value_heads": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "head_dim": 8}
    config = AutoConfig.for_model("deepseek_v3", **{**SMALL, **latent, **experts, **sizes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    model.state_dict()[name].add_(torch.randn(8))
    model.save_pretrained(tmp_path)
    trainer = TorchTrainer(tmp_path, TrainConfig(dtype="float32", device="cpu"), AlgoConfig(), seed=0)
    manifest = lay_out(trainer.parameters(), torch.bfloat16, trainer.tied, trainer.kept)
    assert {spec.dtype for spec in manifest.tensors if spec.name == name} == {"float32"}
    manifest = lay_out(trainer.parameters(), torch.float32, trainer.tied, trainer.kept)
    packed = PackedBuffer(manifest, memoryview(bytearray(manifest.nbytes)))
    packed.fill(trainer.parameters())
    engine: NativeEngine = make_engine(tmp_path, live=False)
    engine.swap(engine.prepare(update(0), packed.views))
    prompt = tuple(range(3, 23))
    answer = run(engine, [greedy("a", prompt, 8)])["a"]
    told = teacher_forced(model, prompt, answer.tokens)
    assert answer.tokens == told.argmax(-1).tolist()
    assert (torch.tensor(answer.logprobs) - told.max(-1).values).abs().max() < 1e-5
    without = {key: tensor for key, tensor in packed.views.items() if key != name}
    with pytest.raises(ValueError, match=f"lacks the parameter {name}"):
        engine.prepare(update(1), without)
