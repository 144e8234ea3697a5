"""The fused decoder against Hugging Face's forward, family by family, over caches whose blocks lie anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.core.errors import ConfigError
from headrace.engine.native.forward_pass import BLOCK
from headrace.engine.native.runners.attention import PagedCache
from headrace.engine.native.runners.decoder import FusedRunner
from headrace.engine.native.runners.families import read_spec, serves
from headrace.engine.native.runners.hugging_face import HuggingFaceRunner
from headrace.engine.native.runners.paged import cut, fill_up, require_exact
from headrace.engine.native.runners.skeleton import parameters_from_dir, read
from headrace.engine.native.runners.weight_places import expected_shapes, read_weights
from headrace.models.resolve import resolve_model
from support.few import few
from support.padded_model import Padded
from support.plain_pages import read_pages
from support.tiny_models import (
    MIXTURES,
    MODELS,
    OTHERS,
    RunnerDriver,
    make,
    parameters,
    prompts,
    reference,
    skeleton,
    skip_where_inexact,
)

CPU = torch.device("cpu")
TOLERANCE = 1e-4


def driver(name: str, dtype: torch.dtype = torch.float32, exact: bool = False, blocks: int = 64) -> RunnerDriver:
    if exact:
        skip_where_inexact(dtype)
    return RunnerDriver(
        FusedRunner(skeleton(name, dtype), 256, dtype=dtype, device=CPU, exact=exact), parameters(name, dtype), blocks
    )


@torch.no_grad()
def wanted(model, tokens: list[int]) -> torch.Tensor:
    """[T, V] log-probs after every token."""
    return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


def worst(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


# --- against Hugging Face ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", few(MODELS, keep=6))
def test_log_probs_equal_hugging_faces_whole_or_in_chunks(name):
    ours, text = driver(name), prompts(100)[0]
    expected = wanted(reference(name), text)
    assert worst(ours.logprobs(text), expected) < TOLERANCE
    assert worst(ours.logprobs(text, chunk=17), expected) < TOLERANCE
    assert worst(ours.logprobs(text[:40], chunk=1), expected[:40]) < TOLERANCE


@pytest.mark.parametrize("name", few(MODELS, keep=5))
def test_ragged_batches_choose_the_tokens_that_generate_does(name):
    """Prompts longer and shorter than a chunk, computed beside those that decode; sequences join and leave."""
    texts, counts = prompts(1, 5, 17, 70, 3, 33), (12, 3, 20, 7, 1, 15)
    told, model = driver(name).generate(texts, counts, chunk=16), reference(name)
    for text, count, tokens in zip(texts, counts, told, strict=True):
        answer = model.generate(
            torch.tensor([text]),
            attention_mask=torch.ones(1, len(text), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
        )
        assert tokens == answer[0, len(text) :].tolist()


@pytest.mark.parametrize("name", ["llama-tied-biased", "gemma3_text", "qwen2-sliding", "qwen3_moe", "olmoe"])
def test_in_bfloat16_it_is_no_further_from_the_truth_than_hugging_face_is(name):
    ours, text = driver(name, torch.bfloat16), prompts(90)[0]
    truth, theirs = wanted(reference(name), text), wanted(reference(name, torch.bfloat16), text)
    assert (ours.logprobs(text, chunk=40) - truth).abs().mean() < 1.1 * (theirs - truth).abs().mean()


@pytest.mark.parametrize("name", MIXTURES)
def test_the_experts_told_are_those_that_hugging_face_chooses(name):
    ours, text, model = driver(name), prompts(45)[0], reference(name)
    with torch.no_grad():
        logits = model(torch.tensor([text]), output_router_logits=True).router_logits
    chosen = model.config.num_experts_per_tok
    expected = torch.stack([layer.topk(chosen, -1).indices for layer in logits], 1).numpy()
    sequence, parts = ours.sequence(text), []
    for count in (20, 1, 1, 23):
        parts.append(ours.step([(sequence, count)], routing=True).routing)
    told = np.concatenate(parts)
    assert told.dtype == np.uint8 and told.shape == (45, *ours.runner.experts)
    assert np.array_equal(told, expected)
    assert ours.step([(ours.sequence(text), 3)]).routing is None


def test_dense_models_have_no_experts_to_tell():
    ours = driver("qwen3")
    assert ours.runner.experts == (0, 0)
    assert ours.step([(ours.sequence([5, 6]), 2)], routing=True).routing is None


# --- which models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_spec_knows_every_parameter_of_its_model(name):
    model = skeleton(name)
    assert serves(model)
    assert expected_shapes(read_spec(model)) == {key: tuple(t.shape) for key, t in parameters(name).items()}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in OTHERS),
        ("olmoe", {"clip_qkv": 8.0}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"hidden_act": "relu2"}),
        ("nemotron_h", {"mlp_hidden_act": "silu"}),
        ("starcoder2", {}),
        ("nemotron_h", {"n_group": 2, "topk_group": 1}),
        ("nemotron_h", {"moe_latent_size": 16}),
        ("gemma4_text", {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}),
    ],
)
def test_what_a_spec_cannot_say_is_not_served(name, changes, tmp_path):
    make(name, **changes).save_pretrained(tmp_path)
    assert not serves(read(tmp_path, torch.float32, CPU))


def test_angles_that_depend_on_other_sequences_are_served_up_to_the_length_to_which_they_do_not():
    model = skeleton("phi3")
    assert serves(model) and not serves(replace(model, context_length=257))
    config = deepcopy(model.config)
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert serves(replace(model, config=config)) and not serves(replace(model, config=config, context_length=257))
    assert not serves(replace(model, config=config, context_length=None))


def test_a_parameter_more_or_of_another_shape_is_not_served():
    model = skeleton("llama")
    assert not serves(replace(model, shapes={**model.shapes, "model.layers.0.self_attn.sinks": (4,)}))
    assert not serves(replace(model, shapes={**model.shapes, "model.layers.1.mlp.down_proj.weight": (32, 50)}))


def test_weights_that_touch_become_views_and_norms_carry_their_offset():
    spec, tensors = read_spec(skeleton("gemma3_text")), parameters("gemma3_text")
    packed = torch.cat([tensor.flatten() for tensor in tensors.values()])
    places = np.cumsum([0, *(tensor.numel() for tensor in tensors.values())])
    views = {
        key: packed[at : at + t.numel()].view(t.shape)
        for (key, t), at in zip(tensors.items(), places[:-1], strict=True)
    }
    layer = read_weights(spec, views).layers[1]
    for weight in (layer.qkv[0], layer.out[0], layer.mlp.gate_up[0]):
        assert weight.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
    q, k, v = (tensors[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv")
    assert torch.equal(layer.qkv[0], torch.cat([q, k, v]))
    assert torch.equal(layer.mlp_norm, 1 + tensors["model.layers.1.pre_feedforward_layernorm.weight"])


# --- weights and blocks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mixtral"])
def test_new_weights_serve_from_the_next_pass_over_the_cache_that_is_kept(name):
    """Against Hugging Face's own cache, filled by the old weights."""
    ours, old, new, text = driver(name), reference(name), make(name, seed=1), prompts(30)[0]
    ready = ours.runner.prepare({key: value.detach() for key, value in new.named_parameters()})
    sequence = ours.sequence(text)
    ours.step([(sequence, 20)])
    ours.runner.use(ready)
    told = ours.step([(sequence, 10)], rows=range(10)).logits.log_softmax(-1)
    with torch.no_grad():
        past = old(torch.tensor([text[:20]]), use_cache=True).past_key_values
        expected = new(torch.tensor([text[20:]]), past_key_values=past).logits[0].log_softmax(-1)
    assert worst(told, expected) < TOLERANCE


def test_a_copied_block_is_its_own():
    ours, (text, other) = driver("llama"), prompts(40, 8)
    first = ours.sequence(text)
    ours.step([(first, 36)])
    fork = ours.sequence(text[:36] + other)
    fork.cached, fork.blocks = 36, [first.blocks[0], ours.free.pop()]
    ours.runner.copy_blocks(np.array(first.blocks[1:]), np.array(fork.blocks[1:]))
    told = ours.step([(fork, 8), (first, 4)]).logits.log_softmax(-1)
    model = reference("llama")
    assert worst(told[0], wanted(model, fork.tokens)[-1]) < TOLERANCE
    assert worst(told[1], wanted(model, text)[-1]) < TOLERANCE


def test_the_bytes_of_a_block_are_those_it_takes():
    for name, dtype in (("llama", torch.float32), ("qwen3", torch.bfloat16)):
        geometry = skeleton(name).geometry
        cache = PagedCache(geometry, dtype, CPU)
        cache.allocate(6)
        assert 7 * geometry.block_nbytes(dtype) == cache._data.nbytes, "six and the scratch block"
        assert FusedRunner(skeleton(name), 64, dtype=dtype, device=CPU).block_nbytes == geometry.block_nbytes(dtype)


# --- what is not finite ------------------------------------------------------------------------------------------------


def poisoned(name: str, parameter: str, row: int | None = None) -> dict[str, torch.Tensor]:
    tensors = {key: tensor.clone() for key, tensor in parameters(name).items()}
    tensors[parameter][slice(None) if row is None else row] = torch.nan
    return tensors


@pytest.mark.parametrize("name", ["llama", "qwen2-sliding", "mixtral"])
@pytest.mark.parametrize("exact", [False, True])
def test_a_sequence_of_nan_poisons_nobody_else_nor_the_next_user_of_its_blocks(name, exact):
    """Its blocks include block 0, which pads everybody's table."""
    if exact:
        skip_where_inexact(torch.float32)
    tensors = poisoned(name, "model.embed_tokens.weight", row=7)
    ours = RunnerDriver(
        FusedRunner(skeleton(name), 256, dtype=torch.float32, device=CPU, exact=exact), tensors, blocks=5
    )
    ours.free = [1, 2, 3, 4, 0]
    healthy, model = [[8 if token == 7 else token for token in text] for text in prompts(20, 50)], reference(name)
    sick = ours.sequence([5, 7, 9])
    sequences = [sick, *(ours.sequence(text) for text in healthy)]
    for counts in ((3, 18, 40), (0, 1, 1), (0, 1, 9)):
        segments = [(s, count) for s, count in zip(sequences, counts, strict=True) if count]
        logits = ours.step(segments).logits
    assert sick.blocks == [0]
    expected = torch.stack([wanted(model, text)[-1] for text in healthy])
    assert worst(logits.log_softmax(-1), expected) < TOLERANCE
    ours.runner.clear_blocks(np.array(sick.blocks))
    ours.free.append(sick.blocks[0])
    assert worst(ours.logprobs(healthy[0][:9]), wanted(model, healthy[0][:9])) < TOLERANCE


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_blame_names_the_first_layer_that_is_not_finite(name):
    def found(tensors):
        ours = RunnerDriver(
            FusedRunner(skeleton(name), 64, dtype=torch.float32, device=CPU, exact=False, max_adapters=1), tensors
        )
        batch = ours.batch([(ours.sequence([5, 7, 9]), 3), (ours.sequence([8, 4]), 2)])
        return ours.runner.blame(batch).tolist()

    assert found(parameters(name)) == [-1] * 5
    assert found(poisoned(name, "model.embed_tokens.weight", row=7)) == [0, 0, 0, -1, -1], "that sequence alone"
    assert found(poisoned(name, "model.layers.1.self_attn.o_proj.weight", row=3)) == [1] * 5
    assert found(poisoned(name, "lm_head.weight", row=3)) == [-1, -1, 2, -1, 2], "logits are made of the rows alone"


# --- exact -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", few(["llama", "gemma3_text", "qwen2-sliding", "qwen3_moe"], keep=2))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_log_probs_depend_on_nothing_but_the_sequence(name, dtype):
    """Bit for bit: alone and whole, alone in chunks, and token by token beside others in any order."""
    ours, texts = driver(name, dtype, exact=True, blocks=128), prompts(70, 5, 33, 64, 1)
    alone = [ours.logprobs(text) for text in texts]
    for chunk in (1, 7, 32, 50):
        assert torch.equal(ours.logprobs(texts[0], chunk), alone[0])
    generator, sequences = np.random.default_rng(0), [ours.sequence(text) for text in texts]
    told: list[list[torch.Tensor]] = [[] for _ in texts]
    while live := [i for i, s in enumerate(sequences) if s.cached < len(s.tokens)]:
        generator.shuffle(live)
        counts = [min(int(generator.integers(1, 40)), len(texts[i]) - sequences[i].cached) for i in live]
        segments = [(sequences[i], count) for i, count in zip(live, counts, strict=True)]
        logits = ours.step(segments, rows=range(sum(counts))).logits.float().log_softmax(-1)
        for i, part in zip(live, logits.split(counts), strict=True):
            told[i].append(part)
    for parts, expected in zip(told, alone, strict=True):
        assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize("name", ["mistral-sliding", "olmoe"])
def test_exact_is_as_right_as_the_fast_way(name):
    text = prompts(100)[0]
    assert worst(driver(name, exact=True).logprobs(text), wanted(reference(name), text)) < TOLERANCE


def test_cut_pieces_tell_the_same_tokens_at_the_same_places():
    ours = driver("llama")
    sequences = [ours.sequence(text) for text in prompts(40, 1, 9, 70)]
    for sequence in sequences[:1]:
        sequence.cached = 13
    batch = ours.batch([(s, len(s.tokens) - s.cached) for s in sequences], rows=[0, 26, 40, 41, 106])
    pieces = list(cut(batch, 32))
    assert [len(piece.tokens) for piece in pieces] == [32, 32, 32, 11]
    assert np.array_equal(np.concatenate([piece.tokens for piece in pieces]), batch.tokens)
    assert np.array_equal(np.concatenate([piece.positions() for piece in pieces]), batch.positions())
    rows = [piece.tokens[piece.rows] for piece in pieces]
    assert np.array_equal(np.concatenate(rows), batch.tokens[batch.rows])
    where = [piece.tables[piece.segments(), piece.positions() // BLOCK] for piece in pieces]
    assert np.array_equal(np.concatenate(where), batch.tables[batch.segments(), batch.positions() // BLOCK])


def test_what_fills_a_batch_up_disturbs_nobody():
    ours = driver("gemma3_text")
    texts = prompts(40, 3, 33)
    for text in texts:
        sequence = ours.sequence(text)
        whole = ours.batch([(sequence, len(text))])
        plain, filled = ours.runner.forward(whole), ours.runner.forward(fill_up(whole, len(text) + 5, 6, scratch=64))
        assert worst(plain.logits, filled.logits) < 1e-5
    assert worst(ours.logprobs(texts[0], chunk=11), wanted(reference("gemma3_text"), texts[0])) < TOLERANCE


# --- the kernel that reads pages ---------------------------------------------------------------------------------------


def in_two_passes(ours: RunnerDriver, name: str, texts: list[list[int]]) -> None:
    """Forwards texts of 50, 3 and 20 tokens in two passes, and compares the log-probs after the last tokens with the model's own."""
    sequences = [ours.sequence(text) for text in texts]
    for counts in ((30, 2, 1), (20, 1, 19)):
        told = ours.step(list(zip(sequences, counts, strict=True))).logits.log_softmax(-1)
    expected = torch.stack([wanted(reference(name), text)[-1] for text in texts])
    assert worst(told, expected) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_kernel_that_reads_pages_is_told_what_it_must_know(name):
    ours, texts = driver(name), prompts(50, 3, 20)
    ours.runner._cache.kernel = read_pages
    in_two_passes(ours, name, texts)


def test_a_kernel_that_reads_pages_finds_the_heads_of_a_token_together():
    """A model that rotates a part of each head leaves them head by head."""
    runner = HuggingFaceRunner(skeleton("gpt_neox"), 256, dtype=torch.float32, device=CPU)
    ours = RunnerDriver(runner, parameters("gpt_neox"))
    ours.runner._cache.kernel = read_pages
    in_two_passes(ours, "gpt_neox", prompts(50, 3, 20))


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen2-sliding"])
def test_all_segments_go_through_one_call_where_a_kernel_takes_ragged_ones(name):
    ours, texts = driver(name), prompts(50, 3, 20)
    calls = []

    def kernel(q, k, v, layout, *, scale, reach):
        calls.append(layout.query_starts.tolist())
        return Padded()(q, k, v, layout, scale=scale, reach=reach)

    ours.runner._cache.ragged = kernel
    in_two_passes(ours, name, texts)
    layers = len(ours.runner.spec.layers)
    assert calls == [[0, 30, 32, 33]] * layers + [[0, 20, 21, 40]] * layers


# --- real weights ------------------------------------------------------------------------------------------------------


REAL = ["smollm2-135m-instruct", "gemma-3-270m"]
TAIL = 60
"""Tokens at the end of a real text that are compared: over 262,144 words not all fit in memory."""


def real_text(name: str) -> tuple[Path, list[int]]:
    """Longer than the sliding window of 512."""
    directory = resolve_model(name)
    words = " ".join((Path(__file__).parents[2] / "LICENSE").read_text().split())
    return directory, AutoTokenizer.from_pretrained(directory)(words)["input_ids"][:600]


@cache
def real_truth(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[TAIL, V]: Hugging Face's own log-probs."""
    directory, tokens = real_text(name)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    with torch.no_grad():
        return model(torch.tensor([tokens]), logits_to_keep=TAIL).logits[0].float().log_softmax(-1)


def real_driver(name: str, runner: type, dtype: torch.dtype) -> RunnerDriver:
    directory = resolve_model(name)
    served = runner(read(directory, dtype, CPU), 640, dtype=dtype, device=CPU)
    return RunnerDriver(served, parameters_from_dir(directory, dtype))


def real_logprobs(ours: RunnerDriver, name: str, chunk: int = TAIL) -> torch.Tensor:
    """As `real_truth`, the tail in chunks and what is before it in three."""
    sequence, parts = ours.sequence(real_text(name)[1]), []
    for count in (256, 256, 600 - TAIL - 512):
        ours.step([(sequence, count)])
    while sequence.cached < 600:
        parts.append(ours.step([(sequence, chunk)], rows=range(chunk)).logits.float().log_softmax(-1))
    return torch.cat(parts)


def real_errors(name: str, told: torch.Tensor) -> tuple[float, float]:
    """Mean error of log-probs in bfloat16, the rounding of the weights included: of these, and of Hugging Face's own."""
    truth, theirs = real_truth(name), real_truth(name, torch.bfloat16)
    return (told - truth).abs().mean().item(), (theirs - truth).abs().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_a_real_model_in_float32_equals_hugging_faces(name):
    """Log-probs, and the tokens chosen for a ragged batch, one of whose texts grows across the sliding window."""
    ours, (directory, tokens) = real_driver(name, FusedRunner, torch.float32), real_text(name)
    errors = (real_logprobs(ours, name) - real_truth(name)).abs()
    assert errors.max() < 1e-3 and errors.mean() < 2e-5, "6e-5 and 6e-6 nats"
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    texts = [tokens[:500], tokens[90:130], tokens[:3]]
    for text, chosen in zip(texts, ours.generate(texts, (24, 24, 24), chunk=128), strict=True):
        answer = model.generate(torch.tensor([text]), max_new_tokens=24, do_sample=False, eos_token_id=None)
        assert chosen == answer[0, len(text) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_a_real_model_in_bfloat16_is_nearer_to_the_truth_than_hugging_faces(name):
    ours, theirs = real_errors(name, real_logprobs(real_driver(name, FusedRunner, torch.bfloat16), name))
    assert ours < 0.8 * theirs, "SmolLM2 0.041 against 0.068 nats, Gemma 0.043 against 0.072"


def test_an_exact_engine_is_refused_where_products_depend_on_a_rows_place():
    def uneven(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found = x @ weight.T
        found[-1, -1] = torch.nextafter(found[-1, -1], torch.tensor(torch.inf))
        return found

    with pytest.raises(
        ConfigError, match=r"depend on a row's place in a batch; set it to false, or use the C\+\+ kernels"
    ):
        require_exact(torch.float32, torch.device("cpu"), uneven)


def test_equal_rows_have_equal_bits_in_avx2_too():
    code = "import torch\nfrom headrace.engine.native.runners.paged import require_exact\n" + "\n".join(
        f"torch.set_num_threads({threads}); require_exact(torch.float32, torch.device('cpu'))" for threads in (1, 2)
    )
    limits = {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **limits}, check=True)
