"""Weights of eight bits in the C++ kernels: the numbers that they stand for, computed a second time by torch, and the same bits in any batch."""

from __future__ import annotations

from ctypes import byref

import numpy as np
import pytest
import torch
from test_kernels import BF16, CPU, NAMES, PORTABLE, _adapter, native, parameters, reference, saved, wanted

from headrace.core.errors import ConfigError
from headrace.core.types import Request, Sampling
from headrace.core.weights import AdapterSpec
from headrace.engine.native.kernels import binding
from headrace.engine.native.kernels.runner import INT8_LEVELS, SIDE, KernelRunner, Packer, gate_up_order, padded
from headrace.engine.native.runners.adapter_tensors import PREFIX
from headrace.engine.native.runners.skeleton import read
from support.few import few
from support.native_calls import make_engine, run, save_model, score
from support.tiny_models import RunnerDriver, prompts

pytestmark = native


def dequantised(weight: torch.Tensor, levels: int = INT8_LEVELS) -> torch.Tensor:
    """What symmetric codes with a scale for each output stand for: [..., out, in]."""
    wide = weight.float()
    peak = wide.abs().amax(-1, keepdim=True)
    by = torch.where(
        peak > 0, torch.full_like(peak, levels) / peak, 0
    )  # `levels / peak` is a product with a reciprocal
    codes = torch.round(wide.double() * by.double()).float()  # of the exact product, to nearest even
    assert codes.abs().max() <= levels
    return codes * (peak / levels)


def driver(name: str, dtype: torch.dtype = BF16, instructions: str = "native", adapters: int = 0) -> RunnerDriver:
    library = binding.library(instructions, str(dtype).removeprefix("torch."))
    if library is None:
        pytest.skip("cannot be compiled here")
    skeleton = read(saved(name), dtype, CPU)
    runner = KernelRunner(
        skeleton, 256, dtype=dtype, device=CPU, max_adapters=adapters, library=library, levels=INT8_LEVELS
    )
    return RunnerDriver(runner, {key: weight.to(dtype) for key, weight in parameters(name).items()})


def quantised_reference(name: str):
    """Hugging Face's model with what the codes stand for: linear layers, stacked experts and the head; neither embedding, norms nor routers."""
    model = reference(name)
    head = dequantised(model.lm_head.weight.detach())
    model.lm_head.weight = torch.nn.Parameter(head)  # the embedding keeps its own where both were one tensor
    for key, parameter in model.named_parameters():
        if parameter.ndim > 1 and any(
            part in key for part in ("_proj", ".feed_forward.w", "put_linear", "per_layer_input_gate")
        ):
            turned = name == "gpt_oss" and ".experts." in key  # stored as [in, out]
            parameter.data = dequantised(parameter.data.mT).mT if turned else dequantised(parameter.data)
    return model


def rows_of(linear: binding.Linear, library) -> torch.Tensor:
    """[in, out] what the linear layer makes of the rows of a unit matrix: its weights."""
    taken = torch.bfloat16 if library.headrace_taken_bytes() == 2 else torch.float32
    many, wide = padded(linear.k), padded(linear.n)
    unit = torch.eye(many, dtype=taken).view(-1, SIDE, many // SIDE, SIDE).transpose(1, 2).contiguous()
    c = torch.zeros(many // SIDE, wide // SIDE, SIDE, SIDE)
    library.headrace_product(unit.data_ptr(), many, byref(linear), c.data_ptr())
    return c.transpose(1, 2).reshape(many, wide)


@pytest.mark.parametrize("levels", [INT8_LEVELS, 7, 1])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("inputs", [64, 50, 7])
def test_codes_and_scales_are_those_that_torch_computes(inputs, dtype, levels):
    library = binding.library(dtype=str(dtype).removeprefix("torch."))
    weight = torch.randn(96, inputs, generator=torch.Generator().manual_seed(inputs))
    weight *= torch.logspace(-6, 3, 96)[:, None]
    weight[3] = 0
    weight = weight.to(dtype)[: 96 if inputs == 64 else 76]
    order = gate_up_order(48) if inputs == 64 else None
    packer = Packer(library, dtype, levels)
    got = rows_of(packer.linear((weight, None), order), library)
    expected = dequantised(weight, levels)
    expected = expected if order is None else expected[torch.from_numpy(order).long()]
    assert torch.equal(got[:inputs, : len(expected)].T, expected)
    assert not got[inputs:].any() and not got[:, len(expected) :].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [5, 49])
def test_a_weight_that_is_no_number_is_not_made_one(bad, place):
    weight = torch.ones(40, 50, dtype=BF16)
    weight[7, place] = bad
    library = binding.library()
    packer = Packer(library, BF16, INT8_LEVELS)
    got = rows_of(packer.linear((weight, None)), library)
    broken = ~got.isfinite().all(0)
    assert broken.nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("name", few(NAMES, keep=3))
def test_it_is_hugging_faces_forward_of_the_quantised_weights(name):
    """In float32, up to the order of sums; and that is another policy than the one of the weights themselves."""
    text = prompts(60)[0]
    got = driver(name, torch.float32).logprobs(text)
    assert (got - wanted(quantised_reference(name), text)).abs().max() < 2e-4
    assert (got - wanted(reference(name), text)).abs().max() > 2e-3


@pytest.mark.parametrize("instructions", few(["native", PORTABLE, "x86-64-v2"], keep=2))
@pytest.mark.parametrize("name", few(["llama3-rope", "gemma3_text", "olmoe"], keep=1))
def test_a_sequence_is_bit_equal_alone_in_any_batch_and_in_any_chunks(name, instructions):
    texts = prompts(70, 41, 3, 96, 33, 64, 20, 11)
    alone = [driver(name, instructions=instructions).logprobs(text) for text in texts]
    for chunk in (1, 7, 50):
        assert torch.equal(driver(name, instructions=instructions).logprobs(texts[0], chunk), alone[0])
    together = driver(name, instructions=instructions)
    sequences = [together.sequence(text) for text in texts]
    rng = np.random.default_rng(0)
    while left := [s for s in sequences if s.cached < len(s.tokens)]:
        chosen = [left[i] for i in rng.permutation(len(left))[: rng.integers(1, len(left) + 1)]]
        segments = [(s, int(min(rng.choice([1, 1, 5, 40]), len(s.tokens) - s.cached))) for s in chosen]
        got = together.step(segments).logits.log_softmax(-1)
        for (s, _), row in zip(segments, got, strict=True):
            assert torch.equal(row, alone[sequences.index(s)][s.cached - 1])


def test_an_adapter_stands_beside_quantised_weights_and_is_not_quantised():
    name, text = "qwen3", prompts(40)[0]
    rank, tensors = _adapter(name, 1, 4)
    ours = driver(name, torch.float32, adapters=1)
    ours.runner.use_adapter(0, ours.runner.prepare_adapter(AdapterSpec("a", rank, 2.0 * rank), tensors))
    model = quantised_reference(name)
    for key, parameter in model.named_parameters():
        if f"{PREFIX}{key.removesuffix('.weight')}.lora_A.weight" in tensors:
            a, b = (tensors[f"{PREFIX}{key.removesuffix('.weight')}.lora_{which}.weight"] for which in "AB")
            parameter.data += 2.0 * b @ a
    assert (ours.logprobs(text, adapter=0) - wanted(model, text)).abs().max() < 5e-4
    assert torch.equal(ours.logprobs(text), driver(name, torch.float32).logprobs(text))


# --- the engine --------------------------------------------------------------------------------------------------------


def test_log_probs_that_are_recorded_are_those_of_the_policy_that_sampled(tmp_path):
    """To the last bit those with which the same weights score the tokens, and not those of the weights that were published."""
    model_dir = save_model(tmp_path, "qwen3", head_dim=16)
    served = {weights: make_engine(model_dir, weights=weights) for weights in ("published", "int8")}
    request = Request("a", (65, 66, 67), Sampling(max_tokens=20, seed=3, ignore_eos=True))
    answer = run(served["int8"], [request])["a"]
    again = {weights: score(engine, (65, 66, 67, *answer.tokens))[2:] for weights, engine in served.items()}
    assert list(again["int8"]) == answer.logprobs
    assert 1e-3 < np.abs(np.array(again["published"]) - answer.logprobs).mean() < 0.5
    assert served["int8"].capabilities.exact and served["int8"].capabilities.arithmetic == ""
    assert "int8 of 127 levels" in served["int8"].capabilities.path


def test_a_model_that_the_kernels_do_not_serve_is_refused_with_a_remedy_that_works(tmp_path):
    model_dir = save_model(tmp_path, "gpt_neox")
    with pytest.raises(ConfigError, match=r'do not serve gpt_neox here: .*; set engine.weights = "published"'):
        make_engine(model_dir, weights="int8")
    make_engine(model_dir, weights="published")
