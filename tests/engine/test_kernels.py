"""The C++ decoder: against Hugging Face's forward, bit for bit the same in any batch, with and without a matrix unit."""

from __future__ import annotations

import atexit
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from test_adapters import adapters_of
from transformers import AutoModelForCausalLM

from headrace.core.errors import ConfigError
from headrace.core.weights import AdapterSpec
from headrace.engine.config import EngineConfig
from headrace.engine.native.core import NativeEngine
from headrace.engine.native.draws import DrawDetails, Settings
from headrace.engine.native.forward_pass import BLOCK
from headrace.engine.native.kernels import binding
from headrace.engine.native.kernels.runner import KernelRunner, Packer, gate_up_order, padded, refusal
from headrace.engine.native.runners.adapter_tensors import PREFIX
from headrace.engine.native.runners.skeleton import read
from headrace.engine.native.sampler import draw, sample
from headrace.models.saved_buffers import saved_buffers
from headrace.testing.small_models import small_model
from support.few import few
from support.sampling import same
from support.tiny_models import LONGROPE, RunnerDriver, make, prompts

CPU, BF16 = torch.device("cpu"), torch.bfloat16
PORTABLE = "x86-64-v3"
"""Without AVX-512 and matrix unit."""

# Sizes that fit no block of 32, so that every edge is padded somewhere.
ODD = {"hidden_size": 84, "intermediate_size": 112, "vocab_size": 100, "num_attention_heads": 6}
MODELS: dict[str, dict[str, Any]] = {
    "llama-tied-biased": {"head_dim": 16},
    "llama3-rope": {"head_dim": 32},
    "mistral-sliding": {"head_dim": 48},
    "glm4": {"head_dim": 16, "num_attention_heads": 4},
    "qwen2": {"head_dim": 16, "num_attention_heads": 4},
    "lfm2": {
        "hidden_size": 80,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "lfm3": {
        "hidden_size": 80,
        "head_dim": 48,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "num_hidden_layers": 4,
        "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
        "attention_bias": True,
    },
    "gpt_oss": {"hidden_size": 96, "head_dim": 32, "num_local_experts": 5},
    "qwen3_5_text": {
        "head_dim": 32,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 48,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "attention_bias": True,
    },
    "granite4-hybrid": {
        "hidden_size": 96,
        "num_attention_heads": 3,
        "mamba_n_heads": 4,
        "mamba_d_state": 48,
        "mamba_proj_bias": True,
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "intermediate_size": 48,
        "shared_intermediate_size": 80,
        "time_step_limit": (0.3, 1.5),
    },
    "bamba": {
        "hidden_size": 96,
        "num_attention_heads": 3,
        "mamba_n_heads": 12,
        "mamba_n_groups": 2,
        "mamba_conv_bias": False,
        "attention_bias": True,
    },
    "falcon_h1": {
        "hidden_size": 96,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "mamba_d_ssm": 192,
        "mamba_n_groups": 2,
        "mamba_proj_bias": True,
        "projectors_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "falcon_h1-gate-first": {
        "hidden_size": 96,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "mamba_conv_bias": False,
    },
    "falcon_h1-plain": {
        "hidden_size": 96,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "time_step_limit": (0.3, 1.5),
    },
    "nemotron_h": {
        "hidden_size": 96,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 48,
        "time_step_min": 0.3,
        "mlp_bias": True,
        "use_bias": True,
        "attention_bias": True,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 80,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
    },
    "nemotron_h-dense": {
        "layers_block_type": ["mlp", "linear_attention", "mlp", "full_attention", "linear_attention"],
        "use_conv_bias": False,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    "arcee": {"head_dim": 32},
    "gemma4_text": {
        "head_dim": 48,
        "global_head_dim": 64,
        "num_attention_heads": 4,
        "hidden_size_per_layer_input": 48,
    },
    "lfm2_moe": {
        "hidden_size": 96,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "routed_scaling_factor": 1.5,
    },
    "qwen2_moe": {"hidden_size": 96, "num_attention_heads": 6, "moe_intermediate_size": 48},
    "qwen3_next": {
        "hidden_size": 96,
        "head_dim": 32,
        "linear_key_head_dim": 48,
        "linear_value_head_dim": 32,
        "num_experts": 6,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
    },
    "qwen3": {"head_dim": 64, "num_key_value_heads": 1},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 20},
    "smollm3": {"head_dim": 16},
    "granite": {"hidden_size": 96},
    "qwen3_moe-mixed": {"hidden_size": 96, "head_dim": 16, "moe_intermediate_size": 48},
    "ministral3": {"head_dim": 16},
    "cohere2": {"hidden_size": 96, "num_attention_heads": 6},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 20, "hidden_size": 96},
    "olmo3": {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1},
    "mixtral": {"hidden_size": 96, "head_dim": 32, "intermediate_size": 80},
    "olmoe": {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 48},
    "phi3": {"hidden_size": 96, "rope_parameters": {**LONGROPE, "short_factor": [1.1] * 4, "long_factor": [2.0] * 4}},
    "cohere": {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1},
}
NAMES = list(MODELS)
MIXTURES = ["qwen3_moe-mixed", "mixtral", "olmoe", "gpt_oss", "qwen3_next", "granite4-hybrid"]

native = pytest.mark.skipif(binding.library() is None, reason="no C++ compiler here: the engine runs in PyTorch")
pytestmark = native


@cache
def saved(name: str) -> Path:
    """Of weights that bfloat16 holds: then what differs is what is computed."""
    directory = Path(mkdtemp(prefix=f"headrace-kernels-{name}-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    model = make(name, **{**ODD, **MODELS[name]})
    for buffer in saved_buffers(model).values():  # biases that decide which experts are chosen
        buffer.copy_(torch.linspace(0.3, -0.3, len(buffer)))
    model.to(BF16).float().save_pretrained(directory)
    return directory


@cache
def parameters(name: str) -> dict[str, torch.Tensor]:
    model = reference(name)
    tensors = (*model.named_parameters(), *saved_buffers(model).items())
    return {key: value.detach().to(BF16) for key, value in tensors}


def reference(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(saved(name), dtype=dtype, attn_implementation="eager").eval()


def driver(
    name: str, adapters: int = 0, instructions: str = "native", blocks: int = 64, dtype: torch.dtype = BF16
) -> RunnerDriver:
    library = binding.library(instructions, str(dtype).removeprefix("torch."))
    runner = KernelRunner(
        read(saved(name), dtype, CPU), 256, dtype=dtype, device=CPU, max_adapters=adapters, library=library
    )
    return RunnerDriver(runner, {key: weight.to(dtype) for key, weight in parameters(name).items()}, blocks)


@torch.no_grad()
def wanted(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


def copied(driver: RunnerDriver, *arguments: Any, **options: Any) -> torch.Tensor:
    """The logits of one step; the runner uses their memory again."""
    return driver.step(*arguments, **options).logits.clone()


# --- what is computed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("instructions", few(["native", PORTABLE], keep=1))
@pytest.mark.parametrize("name", few(NAMES, keep=3))
def test_it_is_closer_to_the_truth_than_hugging_face_in_bfloat16(name, instructions):
    if binding.library(instructions) is None:
        pytest.skip("cannot be compiled here")
    text = prompts(100)[0]
    truth, theirs = wanted(reference(name), text), wanted(reference(name, BF16), text)
    ours = driver(name, instructions=instructions)
    for chunk in (1000, 17, 1):
        error = (ours.logprobs(text, chunk) - truth).abs()
        # Not the mean or the largest: of experts that nearly tie another may be chosen, and that is many roundings.
        assert error.median() < 0.8 * (theirs - truth).abs().median()
        assert error.quantile(0.98) < 0.1


@pytest.mark.parametrize("instructions", few(["native", PORTABLE], keep=1))
@pytest.mark.parametrize("name", few(NAMES, keep=3))
def test_in_float32_it_is_hugging_faces_forward_up_to_the_order_of_sums(name, instructions):
    if binding.library(instructions, "float32") is None:
        pytest.skip("cannot be compiled here")
    text = prompts(100)[0]
    ours = driver(name, instructions=instructions, dtype=torch.float32)
    whole = ours.logprobs(text)
    assert (whole - wanted(reference(name), text)).abs().max() < 1e-4
    for chunk in (17, 1):
        assert torch.equal(ours.logprobs(text, chunk), whole)


@pytest.mark.parametrize("name", few(NAMES, keep=3))
def test_greedy_tokens_are_the_best_there_are_up_to_rounding(name):
    """Prompts in chunks beside those that decode; sequences join and leave."""
    texts, counts = prompts(1, 5, 17, 70, 3, 33), (12, 3, 20, 7, 1, 15)
    model = reference(name)
    for text, tokens in zip(texts, driver(name).generate(texts, counts), strict=True):
        truth = wanted(model, text + tokens)[len(text) - 1 : -1]
        assert (truth.amax(-1) - truth[range(len(tokens)), tokens]).max() < 0.1


@pytest.mark.parametrize("name", MIXTURES)
def test_the_experts_told_are_those_that_the_router_scores_highest(name):
    """Up to what rounding before the router may swap."""
    ours, text, model = driver(name), prompts(45)[0], reference(name)
    routing = ours.step([(ours.sequence(text), len(text))], routing=True).routing
    with torch.no_grad():
        logits = torch.stack(model(torch.tensor([text]), output_router_logits=True).router_logits, 1)
    assert routing.shape == (45, logits.shape[1], model.config.num_experts_per_tok) and routing.dtype == np.uint8
    best = logits.topk(routing.shape[2], -1)
    told = logits.gather(-1, torch.from_numpy(routing.astype(np.int64)))
    assert (best.values - told).abs().max() < 0.1
    assert (best.indices.numpy() == routing).mean() > 0.9


# --- a token's result depends on its own sequence alone ------------------------------------------------------------------


@pytest.mark.parametrize("name", few(NAMES, keep=4))
def test_prefill_and_decoding_are_one_path(name):
    text = prompts(90)[0]
    ours = driver(name)
    whole = ours.logprobs(text)
    for chunk in (1, 7, 32, 50):
        assert torch.equal(ours.logprobs(text, chunk), whole)


@pytest.mark.parametrize("instructions", few(["native", PORTABLE], keep=1))
@pytest.mark.parametrize("name", few(NAMES, keep=3))
def test_a_sequence_is_bit_equal_alone_and_in_any_batch(name, instructions):
    if binding.library(instructions) is None:
        pytest.skip("cannot be compiled here")
    texts = prompts(70, 41, 3, 96, 33, 64)
    alone = [driver(name, instructions=instructions).logprobs(text) for text in texts]
    together = driver(name, instructions=instructions)
    sequences = [together.sequence(text) for text in texts]
    rng = np.random.default_rng(0)
    while any(s.cached < len(s.tokens) for s in sequences):
        left = [s for s in sequences if s.cached < len(s.tokens)]
        chosen = [left[i] for i in rng.permutation(len(left))[: rng.integers(1, len(left) + 1)]]
        segments = [(s, int(min(rng.choice([1, 1, 5, 40]), len(s.tokens) - s.cached))) for s in chosen]
        got = together.step(segments).logits.log_softmax(-1)
        for (s, _), row in zip(segments, got, strict=True):
            assert torch.equal(row, alone[sequences.index(s)][s.cached - 1])


@pytest.mark.parametrize(
    "name", few(["gpt_oss", "llama-tied-biased", "gemma4_text", "mistral-sliding", "gemma2", "qwen3", "olmoe"], keep=2)
)
@pytest.mark.parametrize("siblings", [2, 20])
def test_blocks_that_sequences_share_are_read_together_to_the_same_effect(name, siblings):
    prompt, *tails = prompts(2 * BLOCK + 5, *([9] * siblings))
    ours = driver(name, blocks=64)
    first = ours.sequence(prompt + tails[0])
    ours.step([(first, len(prompt))])
    sequences = [first]
    for tail in tails[1:]:
        other = ours.sequence(prompt + tail)
        other.blocks, other.cached = [*first.blocks[:2], ours.free.pop()], len(prompt)
        ours.runner.copy_blocks(np.array([first.blocks[2]]), np.array([other.blocks[2]]))
        sequences.append(other)
    alone = driver(name)
    expected = [alone.logprobs(s.tokens) for s in sequences]
    for step in range(9):
        got = ours.step([(s, 1) for s in sequences]).logits.log_softmax(-1)
        for row, whole in zip(got, expected, strict=True):
            assert torch.equal(row, whole[len(prompt) + step])


@pytest.mark.parametrize("name", few(["lfm2", "lfm3", "qwen3", "gemma4_text"], keep=1))
@pytest.mark.parametrize("cut", [BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK])
def test_a_sequence_goes_on_from_any_place_of_another_that_has_gone_further(name, cut):
    """The last block holds more than the fork has of it."""
    source, tail = prompts(2 * BLOCK + 20, 9)
    ours = driver(name)
    first = ours.sequence(source)
    ours.step([(first, len(source))])
    fork = ours.sequence(source[:cut] + tail)
    whole = cut // BLOCK
    fork.blocks, fork.cached = [*first.blocks[:whole], ours.free.pop()], cut
    ours.runner.copy_blocks(np.array([first.blocks[whole]]), np.array([fork.blocks[whole]]))
    expected = driver(name).logprobs(fork.tokens)
    for place in range(cut, len(fork.tokens)):
        assert torch.equal(ours.step([(fork, 1)]).logits[0].log_softmax(-1), expected[place])


@pytest.mark.parametrize("name", ["lfm2", "gemma4_text"])
def test_blocks_that_were_taken_out_go_on_in_other_memory(name):
    """What blocks hold of all kinds of layers, and as many bytes as are said."""
    text = prompts(90)[0]
    ours, expected = driver(name), driver(name).logprobs(text)
    sequence = ours.sequence(text)
    ours.step([(sequence, 80)])
    blocks = np.array(sequence.blocks)
    content = ours.runner.take_out(blocks)
    assert content.nbytes == len(blocks) * ours.runner.block_nbytes
    live = ours.runner._live
    ours.runner.free()
    ours.runner.allocate(64)
    ours.runner.use(live)
    ours.runner.put_back(blocks, content)
    assert torch.equal(ours.step([(sequence, 10)], rows=range(10)).logits.log_softmax(-1), expected[80:])


# --- adapters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("qwen3", BF16),
        ("mixtral", torch.float32),
        ("phi3", BF16),
        ("lfm2", BF16),
        ("lfm3", torch.float32),
        ("gpt_oss", torch.float32),
        ("qwen3_next", torch.float32),
        ("granite4-hybrid", torch.float32),
        ("falcon_h1", torch.float32),
        ("nemotron_h", torch.float32),
        ("arcee", BF16),
        ("gemma4_text", torch.float32),
        pytest.param("cohere2", BF16, marks=pytest.mark.slow),
    ],
)
def test_adapters_side_by_side_equal_weights_merged_by_hand(name, dtype):
    """Of a mixture in float32, because in bfloat16 experts may nearly tie; of a delta rule, because what it normalises may be small."""
    ours, texts = driver(name, adapters=3, dtype=dtype), prompts(40, 25, 61)
    made = [_adapter(name, seed, rank) for seed, rank in ((1, 4), (2, 40))]
    for slot, (rank, tensors) in enumerate(made):
        ours.runner.use_adapter(slot, ours.runner.prepare_adapter(AdapterSpec(f"a{slot}", rank, 2.0 * rank), tensors))
    models = [_merged(name, tensors, 2.0) for _, tensors in made] + [reference(name)]
    sequences = [ours.sequence(text, adapter) for text, adapter in zip(texts, (0, 1, -1), strict=True)]
    got = ours.step([(s, len(s.tokens)) for s in sequences], rows=range(sum(map(len, texts)))).logits.log_softmax(-1)
    for part, model, text in zip(got.split([len(text) for text in texts]), models, texts, strict=True):
        assert (part - wanted(model, text)).abs().max() < 0.1
    # What an adapter does is no rounding error, and an emptied slot does nothing.
    assert (got[: len(texts[0])] - wanted(reference(name), texts[0])).abs().max() > 0.5
    ours.runner.use_adapter(0, None)
    again = ours.logprobs(texts[0], adapter=0)
    assert (again - wanted(reference(name), texts[0])).abs().max() < 0.1


def _adapter(name: str, seed: int, rank: int) -> tuple[int, dict[str, torch.Tensor]]:
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for key, weight in parameters(name).items():
        if re.search(r"(_proj(_\w+)?|per_layer\w*(gate|projection))\.weight$", key):
            module = f"{PREFIX}{key.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, weight.shape[1], generator=generator) * 0.1
            tensors[f"{module}.lora_B.weight"] = torch.randn(len(weight), rank, generator=generator) * 0.1
    return rank, tensors


def _merged(name: str, tensors: dict[str, torch.Tensor], scale: float) -> Any:
    model = reference(name)
    for key, parameter in model.named_parameters():
        module = f"{PREFIX}{key.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in tensors:
            parameter.data += scale * tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]
    return model


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_the_language_part_of_a_model_that_sees_is_served_by_its_own_names(kind, tmp_path):
    """A token in whose place an image would be is read as padding, and scored as itself. So is an adapter of the whole model."""
    model = small_model(kind)
    model.config.video_token_id = 10**6  # of a vocabulary that was cut
    model.save_pretrained(tmp_path)
    runner = KernelRunner(read(tmp_path, torch.float32, CPU), 256, dtype=torch.float32, device=CPU, max_adapters=1)
    ours = RunnerDriver(runner, dict(model.named_parameters()) | saved_buffers(model))
    text = [5, 9, model.config.image_token_id, 7, model.config.image_token_id, *range(10, 40)]
    torch.testing.assert_close(ours.logprobs(text), wanted(model, text), rtol=0, atol=3e-5)
    rank, tensors = 4, {}
    for key, weight in model.named_parameters():
        if "language_model.layers" in key and re.search(r"(q|o|down)_proj.weight$", key):
            pair = {"A": torch.randn(rank, weight.shape[1]) * 0.1, "B": torch.randn(len(weight), rank) * 0.1}
            weight.data += 2 * pair["B"] @ pair["A"]
            tensors |= {f"{PREFIX}{key.removesuffix('.weight')}.lora_{one}.weight": it for one, it in pair.items()}
    runner.use_adapter(0, runner.prepare_adapter(AdapterSpec("a", rank, 2.0 * rank), tensors))
    torch.testing.assert_close(ours.logprobs(text, adapter=0), wanted(model, text), rtol=0, atol=3e-5)


def test_an_adapter_for_another_model_is_refused():
    with pytest.raises(ValueError, match="another base model"):
        driver("qwen3", adapters=1).runner.prepare_adapter(AdapterSpec("a", 4, 8.0), adapters_of("llama"))


def test_an_adapter_of_experts_is_refused():
    tensors = adapters_of("mixtral", only="experts")
    shapes = {key: weight.shape for key, weight in parameters("mixtral").items()}
    for key in tensors:  # as large as this model's
        _, out, into = shapes["model.layers.0.mlp.experts." + ("gate_up_proj" if "base_layer" in key else "down_proj")]
        tensors[key] = torch.zeros((16, into) if "lora_A" in key else (out, 16))
    with pytest.raises(ValueError, match='adapts experts.*engine.path = "fused"'):
        driver("mixtral", adapters=1).runner.prepare_adapter(AdapterSpec("a", 4, 8.0), tensors)


@pytest.mark.parametrize(
    "path, adapters, served", [("auto", 0, "kernels"), ("auto", 1, "fused"), ("kernels", 1, "kernels")]
)
def test_a_mixture_with_room_for_adapters_is_served_by_what_has_all_of_them_unless_kernels_are_asked_for(
    path, adapters, served
):
    options = {"device": "cpu", "dtype": "bfloat16", "kv_gib": 0.01, "context_length": 64}
    engine = NativeEngine(saved("mixtral"), EngineConfig(path=path, max_adapters=adapters, **options))
    assert engine.capabilities.path.split()[0] == served


# --- drawing -----------------------------------------------------------------------------------------------------------


def test_what_a_pass_draws_is_drawn_from_its_own_logits():
    """More of it is in test_drawing.py, without a model."""
    ours = driver("qwen2")
    forward = ours.step([(ours.sequence(prompts(60)[0]), 60)], rows=range(60))
    settings = same(60, temperature=np.where(np.arange(60) % 3 == 0, 0.0, 0.8), seed=np.arange(60))
    for places in (None, np.arange(60)[::-7]):
        some = slice(None) if places is None else torch.from_numpy(places.copy())
        part = Settings(
            **{name: values if places is None else values[places] for name, values in vars(settings).items()}
        )
        rows = DrawDetails(masks=np.zeros(len(part.seed), bool), tops=np.zeros(len(part.seed), np.int64))
        drawn, expected = draw(forward, part, places, rows), sample(forward.logits[some], part)
        assert drawn.tokens.tolist() == expected.tokens.tolist()
        np.testing.assert_allclose(drawn.logprobs, expected.logprobs, atol=1e-5)


# --- faults ------------------------------------------------------------------------------------------------------------


def test_what_is_not_finite_is_traced_to_its_layer_and_spoils_nobody_else():
    name, texts = "llama3-rope", prompts(40, 35)
    weights = parameters(name)
    expected = driver(name).logprobs(texts[1])
    ours = RunnerDriver(KernelRunner(read(saved(name), BF16, CPU), 256, dtype=BF16, device=CPU), weights)
    bad, good = ours.sequence(texts[0]), ours.sequence(texts[1])
    batch = ours.batch([(bad, 40), (good, 35)], rows=range(75))
    poisoned = dict(weights)
    embed = weights["model.embed_tokens.weight"].clone()
    only = next(token for token in texts[0] if token not in texts[1])
    embed[only] = float("nan")
    poisoned["model.embed_tokens.weight"] = embed
    ours.runner.use(ours.runner.prepare(poisoned))
    logits = ours.runner.forward(batch).logits.clone()
    blamed = ours.runner.blame(batch)
    place = texts[0].index(only)
    assert blamed[place] == 0 and (blamed[40:] == -1).all()
    assert not logits[place:40].isfinite().all() and torch.equal(logits[40:].log_softmax(-1), expected)
    ours.runner.clear_blocks(np.array(bad.blocks))
    ours.runner.use(ours.runner.prepare(weights))
    fresh = ours.sequence(texts[1])
    fresh.blocks = list(bad.blocks)
    assert torch.equal(ours.step([(fresh, 35)], rows=range(35)).logits.log_softmax(-1), expected)


def test_weights_are_swapped_between_passes():
    one, other = driver("llama3-rope"), dict(parameters("llama3-rope"))
    other["model.norm.weight"] = other["model.norm.weight"] * 2
    text = prompts(30)[0]
    before = one.logprobs(text)
    one.runner.use(one.runner.prepare(other))
    assert not torch.equal(one.logprobs(text), before)
    one.runner.use(one.runner.prepare(parameters("llama3-rope")))
    assert torch.equal(one.logprobs(text), before)


# --- packing and building ----------------------------------------------------------------------------------------------


def test_a_packed_matrix_holds_every_number_where_the_kernel_looks_for_it():
    weight = torch.arange(40 * 50, dtype=torch.float32).view(40, 50).to(BF16)
    packer = Packer(binding.library())
    linear = packer.linear((weight, None))
    assert (linear.n, linear.k) == (40, 50)
    flat = (
        packer._kept[0][: padded(40) * padded(50)].float().view(2, 2, 2, 16, 16, 2)
    )  # panel, step, tile, pair, output, two
    seen = flat.permute(0, 2, 4, 1, 3, 5).reshape(64, 64)
    assert torch.equal(seen[:40, :50], weight.float())
    assert not seen[40:].any() and not seen[:, 50:].any()


def test_gates_and_ups_alternate_by_sixteen():
    assert gate_up_order(32).tolist() == [*range(16), *range(32, 48), *range(16, 32), *range(48, 64)]


def test_only_what_it_can_compute_is_served():
    assert not refusal(read(saved("qwen3"), BF16, CPU), BF16, CPU)
    assert not refusal(read(saved("qwen3"), torch.float32, CPU), torch.float32, CPU)
    assert "not torch.float16" in refusal(read(saved("qwen3"), torch.float16, CPU), torch.float16, CPU)


def test_where_logits_are_capped_no_trainer_is_said_to_compute_the_same(tmp_path):
    make("gemma3_text", final_logit_softcapping=3.0, head_dim=16).save_pretrained(tmp_path)
    capped = read(tmp_path, torch.float32, CPU)
    assert not refusal(capped, torch.float32, CPU)
    assert KernelRunner(capped, 64, dtype=torch.float32, device=CPU).arithmetic == ""


def test_a_path_that_lacks_convolutions_says_so():
    options = {"device": "cpu", "dtype": "bfloat16", "kv_gib": 0.01, "context_length": 64}
    with pytest.raises(ConfigError, match='"fused" does not serve lfm2 here: its convolutions are computed by the C'):
        NativeEngine(saved("lfm2"), EngineConfig(path="fused", **options))
    assert NativeEngine(saved("lfm2"), EngineConfig(path="cache", **options)).capabilities.path == "own cache lfm2"


@pytest.mark.slow
def test_without_a_compiler_the_engine_runs_in_pytorch(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from headrace.engine.config import EngineConfig\n"
        "from headrace.engine.native.kernels.binding import built\n"
        "from headrace.engine.native.core import NativeEngine\n"
        "assert built().library is None and 'compiler' in built().reason, built()\n"
        "print(NativeEngine(Path(sys.argv[1]), EngineConfig(kv_gib=0.1, context_length=64)).capabilities.path)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(saved("qwen3"))],
        env={"PATH": "/nowhere", "CXX": "no-such-compiler", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.stdout.strip() == "fused qwen3", result.stderr


# --- real weights ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma-3-270m"])
def test_a_real_model_is_nearer_to_the_truth_than_hugging_faces_in_bfloat16(name):
    """And the same, bit for bit, when the tail of the text is computed token by token."""
    from test_families import real_driver, real_errors, real_logprobs

    decoder = real_driver(name, KernelRunner, BF16)
    told = real_logprobs(decoder, name)
    ours, theirs = real_errors(name, told)
    assert ours < 0.6 * theirs, "SmolLM2 0.031 against 0.068 nats, Gemma 0.031 against 0.072"
    assert torch.equal(real_logprobs(decoder, name, chunk=1), told)
