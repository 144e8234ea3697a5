"""The kernels of a training pass: each operation against float64, whole models against Hugging Face's own modules."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from headrace.trainer.config import TrainConfig
from headrace.trainer.forward.forward import choose_forward, packed_hidden
from headrace.trainer.forward.fused import fused_ops, fused_products
from headrace.trainer.forward.fused.fused_ops import PackedWeight, Segments, forward_only, reserve
from headrace.trainer.forward.fused.fused_products import LinearLayer
from headrace.trainer.forward.fused_model import fuse
from headrace.trainer.forward.tree_attention import tree_of
from headrace.trainer.kernels import binding
from headrace.trainer.model.causal_lm import enable_checkpointing
from headrace.trainer.model.low_memory import make_optimizer
from headrace.trainer.packing import Segment
from headrace.trainer.placement.port import Single
from headrace.trainer.step.learner import apply
from support import tiny_models
from support.few import few

pytestmark = [
    pytest.mark.skipif(binding.library() is None, reason="no C++ compiler"),
    pytest.mark.usefixtures("seeded"),
]

F32, BF16 = torch.float32, torch.bfloat16
ROUNDING = {F32: 2e-6, BF16: 4e-3}
"""Of a result, relative to its norm: half a unit in the last place of bfloat16 is 2e-3 for each element on average."""


def distance(actual: Tensor, expected: Tensor) -> float:
    """Relative to the norm, or to a hundredth an element where that is more: gradients of softmax may vanish."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / max(expected.norm(), 0.01 * expected.numel() ** 0.5))


def check(fused: Callable[..., Any], plain: Callable[..., Any], inputs: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Results and gradients of `fused` against those of `plain` in float64, on the same numbers and slopes."""
    mine = [x.detach().clone().requires_grad_() for x in inputs]
    theirs = [x.detach().double().requires_grad_() for x in inputs]
    actual, expected = fused(*mine), plain(*theirs)
    actual, expected = ((y,) if isinstance(y, Tensor) else y for y in (actual, expected))
    slopes = [torch.randn_like(y) for y in actual]
    torch.autograd.backward(actual, slopes)
    torch.autograd.backward(expected, [slope.double() for slope in slopes])
    pairs = [*zip(actual, expected, strict=True), *((m.grad, t.grad) for m, t in zip(mine, theirs, strict=True))]
    for a, e in pairs:
        assert a is not None and distance(a, e) < ROUNDING[dtype]


# --- operations --------------------------------------------------------------------------------------------------------


def plain_norm(x: Tensor, weight: Tensor, eps: float, unit: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight + unit)


@pytest.mark.parametrize("given_dtype, dtype", [(F32, F32), (F32, BF16), (BF16, BF16)])
@pytest.mark.parametrize("width, unit", [(40, 0.0), (96, 1.0)])
def test_norm(given_dtype, dtype, width, unit):
    x, weight = torch.randn(2, 35, width).to(given_dtype), torch.randn(width)
    check(
        lambda x, w: fused_ops.rms_norm(x, w, 1e-5, unit, dtype),
        lambda x, w: plain_norm(x, w, 1e-5, unit),
        [x, weight],
        dtype,
    )


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("gelu", [False, True])
def test_gated_activation(dtype, gelu):
    def plain(gate, up):
        return (functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)) * up

    gate, up = 4 * torch.randn(33, 41), torch.randn(33, 41)
    check(lambda g, u: fused_ops.gated(g, u, gelu), plain, [gate.to(dtype), up.to(dtype)], dtype)


def test_gated_activation_far_out():
    gate = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4])
    assert fused_ops.gated(gate, torch.ones(5), False).tolist() == pytest.approx([0.0, 0.0, 0.0, 100.0, 1e4])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("dim, normed", [(8, True), (64, False), (64, True)])
def test_rotary(dtype, dim, normed):
    angle = torch.randn(50, dim // 2).repeat(1, 2)
    cos, sin = angle.cos(), angle.sin()

    def plain(x, weight=None):
        x = x if weight is None else plain_norm(x, weight, 1e-6, 1.0)
        turned = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
        return x * cos[:, None].double() + turned * sin[:, None].double()

    inputs = [torch.randn(50, 3, dim).to(dtype), *([torch.randn(dim)] if normed else [])]
    check(
        lambda x, w=None: fused_ops.rotary(x, cos, sin, weight=w, eps=1e-6, unit=1.0, dtype=dtype), plain, inputs, dtype
    )


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    "rows, k, widths",
    [
        (37, 64, (96,)),
        (50, 33, (70, 41)),
        (300, 160, (64, 32, 32)),
        (40, 1024, (48,)),  # rows of 4 KiB, which are copied
        (1100, 70, (1056, 40)),  # sums in several pieces, in every direction, and more rows than are taken at once
    ],
)
def test_products(rows, k, widths, dtype):
    """What is rounded to bfloat16 is the operands and the results, nothing between."""
    x = torch.randn(rows, k).to(dtype)
    weights = [torch.randn(n, k).bfloat16().float() for n in widths]
    biases = [torch.randn(n) for n in widths]

    def fused(x, *rest):
        half = len(rest) // 2
        layers = [LinearLayer(PackedWeight(), w, b) for w, b in zip(rest[:half], rest[half:], strict=True)]
        return fused_products.linears(x, layers, dtype)

    def plain(x, *rest):
        half = len(rest) // 2
        return tuple(functional.linear(x, w, b) for w, b in zip(rest[:half], rest[half:], strict=True))

    check(fused, plain, [x, *weights, *biases], dtype)


@pytest.mark.parametrize("rows, k, n", [(37, 64, 96), (50, 33, 70)])
def test_a_product_onto_what_there_is(rows, k, n):
    total, x, weight, bias = torch.randn(rows, n), torch.randn(rows, k).bfloat16(), torch.randn(n, k), torch.randn(n)
    weight, bias = weight.bfloat16().float(), bias.bfloat16().float()
    check(
        lambda t, x, w, b: fused_products.linear_onto(t, x, LinearLayer(PackedWeight(), w, b), BF16),
        lambda t, x, w, b: t + functional.linear(x, w, b),
        [total, x, weight, bias],
        BF16,
    )
    exact = total.double() + functional.linear(x.double(), weight.double(), bias.double())
    assert (
        distance(fused_products.linear_onto(total, x, LinearLayer(PackedWeight(), weight, bias), BF16), exact)
        < ROUNDING[F32]
    )


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("rows, k, n", [(37, 64, 96), (50, 33, 70)])
def test_a_gated_product(rows, k, n, gelu):
    def plain(x, gate, up, gate_bias, up_bias):
        gate, up = functional.linear(x, gate, gate_bias), functional.linear(x, up, up_bias)
        return (functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)) * up

    def fused(x, gate, up, gate_bias, up_bias):
        layers = [LinearLayer(PackedWeight(), gate, gate_bias), LinearLayer(PackedWeight(), up, up_bias)]
        return fused_products.gated_linear(x, *layers, gelu)

    weights = [torch.randn(*shape).bfloat16().float() / k**0.5 for shape in ((n, k), (n, k), (n,), (n,))]
    weights = [weight.bfloat16().float() for weight in weights]
    check(fused, plain, [torch.randn(rows, k).bfloat16(), *weights], BF16)


def test_gradients_of_products_add_up_and_are_forgotten():
    packed, weight = PackedWeight(), torch.randn(40, 64, requires_grad=True)
    slopes = []
    for _ in range(2):
        x = torch.randn(20, 64).bfloat16()
        (y,) = fused_products.linears(x, [LinearLayer(packed, weight, None)], BF16)
        slope = torch.randn_like(y)
        y.backward(slope)
        slopes.append(slope.double().t() @ x.double())
    assert distance(weight.grad, slopes[0] + slopes[1]) < 1e-6
    weight.grad = None
    y = fused_products.linears(x, [LinearLayer(packed, weight, None)], BF16)[0]
    y.backward(slope)
    assert distance(weight.grad, slopes[1]) < 1e-6


def test_a_weight_that_is_written_to_is_packed_again():
    packed, weight = PackedWeight(), torch.randn(32, 32, requires_grad=True)
    x = torch.eye(32).bfloat16()
    fused_products.linears(x, [LinearLayer(packed, weight, None)], BF16)
    optimizer = make_optimizer([("w", weight)], TrainConfig(learning_rate=1.0))
    weight.grad = torch.ones_like(weight)
    apply(optimizer, Single(), lr=1.0, max_norm=1e9)
    (y,) = fused_products.linears(x, [LinearLayer(packed, weight, None)], BF16)
    assert torch.equal(y, weight.t().bfloat16())


def test_a_weight_in_bfloat16_has_its_gradient_in_bfloat16():
    weight, x = torch.randn(32, 64).bfloat16().requires_grad_(), torch.randn(40, 64).bfloat16()
    slopes = torch.randn(2, 40, 32).bfloat16()
    for slope in slopes:
        fused_products.linears(x, [LinearLayer(PackedWeight(), weight, None)], BF16)[0].backward(slope)
    expected = slopes.double().sum(0).t() @ x.double()
    assert weight.grad.dtype == BF16 and distance(weight.grad, expected) < 2 * ROUNDING[BF16]


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_no_rows_give_a_gradient_of_zero(dtype):
    packed, weight = PackedWeight(), torch.randn(40, 64, requires_grad=True)
    for rows in (20, 0):  # the room for the gradient holds something else before
        weight.grad = None
        (y,) = fused_products.linears(
            torch.randn(rows, 64, requires_grad=True), [LinearLayer(packed, weight, None)], dtype
        )
        y.sum().backward()
    assert y.shape == (0, 40) and not weight.grad.any()


def test_a_frozen_weight_gets_no_gradient():
    frozen, trained = torch.randn(32, 32), torch.randn(32, 32, requires_grad=True)
    x = torch.randn(5, 32, requires_grad=True)
    a, b = fused_products.linears(
        x, [LinearLayer(PackedWeight(), frozen, None), LinearLayer(PackedWeight(), trained, None)], BF16
    )
    (a.sum() + b.sum()).backward()
    assert frozen.grad is None and trained.grad is not None and x.grad is not None


# --- attention ---------------------------------------------------------------------------------------------------------


def segments_of(lengths: Sequence[int], parents: Sequence[int]) -> list[Segment]:
    made: list[Segment] = []
    for length, parent in zip(lengths, parents, strict=True):
        made.append(Segment(made[-1].end if made else 0, length, parent))
    return made


def seen(segments: Sequence[Segment], window: int) -> tuple[Tensor, Tensor]:
    """([N, N] bool: who sees whom; positions [N]), token by token."""
    paths: list[list[int]] = []
    for segment in segments:
        above = paths[segments[segment.parent].end - 1] if segment.parent >= 0 else []
        for token in range(segment.start, segment.end):
            above = [*above, token]
            paths.append(above)
    mask = torch.zeros(len(paths), len(paths), dtype=torch.bool)
    for token, path in enumerate(paths):
        mask[token, path[-window:] if window else path] = True
    return mask, torch.tensor([len(path) - 1 for path in paths])


def check_attention(segments, heads, kv_heads, dim, window, dtype):
    count, scale = segments[-1].end, dim**-0.5
    mask, _ = seen(segments, window)

    def plain(q, k, v):
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
        return torch.einsum("hnm,mhd->nhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)

    q, k, v = (torch.randn(count, h, dim).to(dtype) for h in (heads, kv_heads, kv_heads))
    inputs = [q.float(), k.float(), v]
    check(
        lambda q, k, v: fused_ops.attention(q, k, v, Segments.of(segments), scale=scale, window=window),
        plain,
        inputs,
        dtype,
    )


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("heads, kv_heads, dim", [(9, 3, 64), (4, 2, 8), (2, 1, 256), (2, 2, 128)])
def test_attention(dtype, window, heads, kv_heads, dim):
    check_attention(segments_of([45, 15, 70, 9, 33], [-1, 0, 0, 2, -1]), heads, kv_heads, dim, window, dtype)


@st.composite
def forests(draw):
    lengths = draw(st.lists(st.integers(1, 50), min_size=1, max_size=7))
    return segments_of(lengths, [draw(st.integers(-1, i - 1)) for i in range(len(lengths))])


@given(forests(), st.integers(0, 40))
@settings(max_examples=25)
def test_attention_over_any_forest(segments, window):
    check_attention(segments, 4, 2, 16, window, F32)


def test_large_scores_do_not_overflow():
    segments = Segments.of(segments_of([40], [-1]))
    q, k, v = (100 * torch.ones(40, 1, 32), 100 * torch.ones(40, 1, 32), torch.randn(40, 1, 32))
    out = fused_ops.attention(q, k, v, segments, scale=1.0)
    expected = v.double().cumsum(0) / torch.arange(1, 41)[:, None, None]
    assert distance(out, expected) < 1e-6


# --- whole models ------------------------------------------------------------------------------------------------------

ALL = ("norms", "activations", "products", "attention", "layers")
MIXTURE = ("norms", "products", "attention", "mixtures", "layers")
KINDS = {
    "llama": ALL,
    "llama-tied-biased": ALL,
    "llama3-rope": ALL,
    "mistral-sliding": ALL,
    "qwen2-sliding": ALL,
    "qwen3": ALL,
    "gemma3_text": ALL,
    "qwen3_moe": MIXTURE,
    "qwen3_moe-mixed": (*ALL[:-1], "mixtures", "layers"),
    "mixtral": MIXTURE,
    "olmoe": MIXTURE,
    "gpt_neox": ("products",),
    "gpt2": (),
}
SEGMENTS = segments_of([11, 40, 9, 5, 33], [-1, 0, 0, 2, -1])


def gradients(model: Any, forward: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Of a fixed function of the hidden states of a pack, and these states themselves."""
    _, positions = seen(SEGMENTS, 0)
    tokens = torch.arange(len(positions)) * 7 % 90 + 3
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype != F32):
        hidden = packed_hidden(model, tokens, positions, tree_of(SEGMENTS, torch.device("cpu")))
        slope = torch.linspace(-3, 3, hidden.numel()).sin().view_as(hidden)
        (hidden * slope).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {**found, "hidden": hidden.detach().float()}


def pair(name: str) -> tuple[Any, Any, Any, Any, tuple[str, ...]]:
    """(own model, its forward, the same fused, its forward, what was fused)."""
    own, mine = tiny_models.reference(name), tiny_models.reference(name)
    own_forward, my_forward = choose_forward(own), choose_forward(mine)
    return own, own_forward, mine, my_forward, fuse(my_forward)


@pytest.mark.parametrize("name", few(KINDS, keep=5))
def test_float32_gradients_are_the_models_own(name):
    own, own_forward, mine, my_forward, kinds = pair(name)
    assert kinds == KINDS[name]
    assert all(p.requires_grad and p.grad is None for p in mine.parameters())  # the trial leaves nothing behind
    expected, actual = gradients(own, own_forward, F32), gradients(mine, my_forward, F32)
    assert actual.keys() == expected.keys()
    for key in expected:
        assert distance(actual[key], expected[key]) < 1e-5, key


@pytest.mark.parametrize(
    "name", few(["llama-tied-biased", "qwen3", "gemma3_text", "qwen3_moe-mixed", "mixtral", "olmoe"], keep=3)
)
def test_bfloat16_is_as_near_to_float32_as_autocast(name):
    own, own_forward, mine, my_forward, _ = pair(name)
    with torch.no_grad():  # what is served is rounded anyway, vectors too
        for parameter in [*own.parameters(), *mine.parameters()]:
            parameter.copy_(parameter.bfloat16())
    truth = gradients(own, own_forward, F32)
    theirs, ours = gradients(own, own_forward, BF16), gradients(mine, my_forward, BF16)

    def error(found: dict[str, Tensor]) -> float:
        return sum(distance(found[key], truth[key]) for key in truth) / len(truth)

    assert ours.keys() == truth.keys()
    assert error(ours) < 1.25 * error(theirs) and error(ours) < 0.1  # some roundings fall well, some ill


@pytest.mark.parametrize("name", ["qwen3", "olmoe"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_checkpointing_changes_nothing(dtype, name):
    _, _, mine, my_forward, _ = pair(name)
    expected = gradients(mine, my_forward, dtype)
    enable_checkpointing(mine)
    actual = gradients(mine, my_forward, dtype)
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", few(["llama-tied-biased", "qwen3_moe", "mixtral"], keep=1))
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_number_of_threads_changes_no_bit(dtype, name):
    """Experts run one after the other where they are few, and side by side where they are many."""
    _, _, mine, my_forward, _ = pair(name)
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(fused_only(gradients(mine, my_forward, dtype)))
    assert all(torch.equal(found[0][key], other[key]) for other in found[1:] for key in found[0])


def fused_only(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the embedding, whose gradient PyTorch sums."""
    return {key: value for key, value in found.items() if "embed" not in key}


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_copy_of_the_model_is_fused_and_its_own(name):
    _, _, mine, my_forward, _ = pair(name)
    expected = gradients(mine, my_forward, BF16)
    copied = deepcopy(mine)
    with torch.no_grad():
        for parameter in mine.parameters():
            parameter.zero_()
    actual = gradients(copied, my_forward, BF16)
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


def test_adapters_of_peft_wrap_fused_layers():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj", "down_proj"], init_lora_weights=False)
    own, own_forward, mine, my_forward, _ = pair("llama")
    torch.manual_seed(3)
    peft.get_peft_model(own, config)
    torch.manual_seed(3)
    peft.get_peft_model(mine, config)
    expected, actual = gradients(own, own_forward, F32), gradients(mine, my_forward, F32)
    assert actual.keys() == expected.keys() and any("lora_A" in key for key in actual)
    assert all(distance(actual[key], expected[key]) < 1e-5 for key in expected)
    low = gradients(mine, my_forward, BF16)
    assert low.keys() == expected.keys() and all(distance(low[key], expected[key]) < 0.1 for key in expected)


def test_what_a_layer_does_besides_is_not_lost():
    """A layer that looks like Llama's but scales what it gives: the fused layers are taken out again, the rest stays."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    class Scaled(LlamaDecoderLayer):
        def forward(self, hidden_states, **kwargs):
            return 0.5 * super().forward(hidden_states, **kwargs)

    own, mine = tiny_models.reference("llama"), tiny_models.reference("llama")
    for model in (own, mine):
        for layer in model.model.layers:
            layer.__class__ = Scaled
    own_forward, my_forward = choose_forward(own), choose_forward(mine)
    assert fuse(my_forward) == ALL[:4]
    expected, actual = gradients(own, own_forward, F32), gradients(mine, my_forward, F32)
    assert all(distance(actual[key], expected[key]) < 1e-5 for key in expected)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_memory_that_is_reserved_changes_no_number(dtype, name):
    _, _, mine, my_forward, _ = pair(name)
    expected = gradients(mine, my_forward, dtype)
    reserve(mine, 100, dtype)
    actual = gradients(mine, my_forward, dtype)
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


# --- without, and with less --------------------------------------------------------------------------------------------


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_without_a_compiler_the_model_stays_as_it_is(tmp_path):
    code = (
        "from support import tiny_models\n"
        "from headrace.trainer.forward.fused_model import fuse\n"
        "from headrace.trainer.forward.forward import choose_forward\n"
        "model = tiny_models.reference('qwen3')\n"
        "print(fuse(choose_forward(model)), any('forward' in vars(module) for module in model.modules()))"
    )
    result = python(code, CXX="no-such-compiler", HOME=str(tmp_path))
    assert result.stdout.strip() == "() False", result.stderr


TIERS = {"x86-64-v3": "avx2 fma", "skylake-avx512": "avx512f avx512bw avx512vl", "cooperlake": "avx512_bf16"}
"""Sets of instructions as the compiler calls them, and what /proc/cpuinfo says of a processor that executes them."""


@pytest.mark.slow
@pytest.mark.parametrize("instructions", TIERS)
def test_operations_with_fewer_instructions(tmp_path, instructions):
    """The same tests over kernels compiled for another processor, which this one can stand for."""
    machine = Path("/proc/cpuinfo")
    if not machine.exists() or not set(TIERS[instructions].split()) <= set(machine.read_text().split()):
        pytest.skip("this processor does not execute them")
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec c++ "$@" -march={instructions}\n')
    compiler.chmod(0o755)
    code = f"import pytest, sys; sys.exit(pytest.main(['-q', '-k', 'not model and not operations', {__file__!r}]))"
    result = python(code, CXX=str(compiler), HOME=str(tmp_path))
    assert result.returncode == 0, result.stdout[-2000:]


def test_a_pass_without_a_backward_packs_one_direction_and_the_other_is_never_stale() -> None:
    weight, packed = torch.randn(70, 40), PackedWeight()

    def both_are_fresh() -> bool:
        (across, down), (first, second) = packed.packed(weight), PackedWeight().packed(weight)
        assert down is not None and second is not None
        return torch.equal(across, first) and torch.equal(down, second)

    for _ in range(3):
        with forward_only():
            across, down = packed.packed(weight)
        assert down is None, "the one that there may be is of older values"
        assert torch.equal(across, PackedWeight().packed(weight)[0]) and both_are_fresh()
        weight.mul_(1.5)
    assert both_are_fresh()
