"""Linear layers in FP8: codes and products computed a second time, Hugging Face's forward with both, and what is refused.

No GPU multiplies here: the same codes are multiplied in float32, torch's own product runs on the CPU, and the kernel that makes codes in Triton's interpreter.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from test_graphs import Recorder, both, put
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from headrace.engine.native.runners import fp8
from headrace.engine.native.runners.decoder import FusedRunner
from headrace.engine.native.runners.fp8 import E4M3, EMULATED, LARGEST, Fp8, coded, emulated_product, scaled_product
from support.looped_experts import looped
from support.plain_pages import read_pages
from support.tiny_models import RunnerDriver, parameters, prompts, reference, skeleton
from support.triton_marks import needs_interpreter, needs_triton

CPU = torch.device("cpu")
CODES = torch.arange(256, dtype=torch.uint8).view(E4M3).double()
CODES = CODES[CODES.isfinite()].unique()
"""Every number that e4m3 has, in order."""


def driver(name: str, by: Fp8 | None = EMULATED, dtype: torch.dtype = torch.float32, **options) -> RunnerDriver:
    runner = FusedRunner(skeleton(name, dtype), 256, dtype=dtype, device=CPU, fp8=by, **options)
    return RunnerDriver(runner, parameters(name, dtype))


def stands_for(x: torch.Tensor) -> torch.Tensor:
    """What codes with a scale for each row stand for [..., k], float64: the nearest number of e4m3, an even code where two are as near."""
    peak = x.float().abs().amax(-1, keepdim=True)
    scale = (peak / LARGEST).clamp(min=2.0**-100)
    wanted = (x.float() / scale).double()
    above = torch.searchsorted(CODES, wanted.contiguous()).clamp(1, len(CODES) - 1)
    low, high = CODES[above - 1], CODES[above]
    even = above % 2 == len(CODES) // 2 % 2  # zero is even, and codes alternate
    upper = (high - wanted < wanted - low) | ((high - wanted == wanted - low) & even)
    return torch.where(upper, high, low) * scale.double()


# --- codes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_the_nearest_numbers_with_a_scale_for_each_row(dtype):
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 6, 40)[:, None]
    x[3] = 0
    x[4, :8] = torch.tensor(
        [448.0, 1.0, 1.0625, 1.1875, 2**-9, 1.5 * 2**-9, 2.5 * 2**-9, 2**-10]
    )  # ties, and below normal numbers
    x[4, 8:] = 0
    codes, scales = coded(x.to(dtype))
    assert torch.equal(codes.double() * scales.double(), stands_for(x.to(dtype)))
    assert scales[4] == 1 and codes.double().abs().amax(-1)[x.abs().amax(-1) > 0].eq(LARGEST).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_none_makes_its_row_none_and_no_other(bad):
    x, weight = torch.ones(3, 32), torch.ones(16, 32)
    x[1, 5] = bad
    found = emulated_product(coded(x), coded(weight), None, torch.float32)
    assert found.isfinite().all(-1).tolist() == [True, False, True]
    found = emulated_product(coded(weight), coded(x), None, torch.float32)
    assert found.isfinite().all(0).tolist() == [True, False, True]


KERNELS = "headrace.engine.native.runners.fp8_kernels"
TRY = """
import torch
from headrace.engine.native.runners.fp8 import coded
from headrace.engine.native.runners.fp8_kernels import coded_rows
for dtype, widths in ((torch.float32, (100,)), (torch.bfloat16, (16, 5000))):
    for width in widths:
        x = torch.randn(5, width, generator=torch.Generator().manual_seed(width)) * torch.logspace(-6, 3, 5)[:, None]
        x[2], x[3, 0] = 0, 2**-9
        x[4, :3], x[4, 3:] = torch.tensor([448.0, 1.0625, 1.5 * 2**-9]), 0
        found, expected = coded_rows(x.to(dtype), 448.0, 2.0**-100), coded(x.to(dtype))
        assert torch.equal(found[1], expected[1]), (dtype, width)
        assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8)), (dtype, width)
    x[0, 9], x[1, -1] = float("nan"), -float("inf")
    codes, scales = coded_rows(x.to(dtype), 448.0, 2.0**-100)
    assert (codes.float() * scales).isfinite().all(-1).tolist() == [False, False, True, True, True]
"""


@needs_interpreter
@pytest.mark.slow  # 10 CPU s, for Triton and its interpreter
def test_the_kernel_makes_the_same_codes():
    """In Triton's interpreter, which is chosen when triton is imported: in a process of its own."""
    subprocess.run([sys.executable, "-c", TRY], check=True, env={**os.environ, "TRITON_INTERPRET": "1"})


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", [89, 90])
def test_the_kernel_compiles_for_gpus(capability, tmp_path, monkeypatch):
    """Down to machine code, by Triton's own assembler; nothing is run."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delitem(sys.modules, KERNELS, raising=False)
    function = importlib.import_module(KERNELS)._code
    constants = {"LARGEST": LARGEST, "LEAST": 2.0**-100, "STEP": 4096}
    types = {"x": "*bf16", "codes": "*u8", "scales": "*fp32", "width": "i32"} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=function,
        signature={name: types[name] for name in function.arg_names},
        constexprs={(function.arg_names.index(name),): value for name, value in constants.items()},
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert len(made.asm["cubin"]) > 1000
    sys.modules.pop(KERNELS, None)


# --- products ----------------------------------------------------------------------------------------------------------


def test_torchs_own_product_is_the_emulated_one():
    """On the CPU, which takes the same arguments; it makes bfloat16 of the sum."""
    assert fp8._deviation(Fp8(coded, scaled_product), CPU) < 0.005
    assert fp8._deviation(EMULATED, CPU) < 0.005


class Coded(TorchFunctionMode):
    """Products of linear layers are those of what the codes of both sides stand for, in float64; not those of `but`."""

    def __init__(self, but: list[torch.Tensor]) -> None:
        super().__init__()
        self._but, self.products = {weight.data_ptr() for weight in but}, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is linear and args[1].data_ptr() not in self._but:
            self.products += 1
            x, weight, bias = (*args, None)[:3]
            out = stands_for(x) @ stands_for(weight).T
            return (out if bias is None else out + bias).to(x.dtype)
        return func(*args, **kwargs)


@pytest.mark.parametrize("name", ["llama-tied-biased", "qwen2", "gemma3_text", "mixtral"])
def test_it_is_hugging_faces_forward_with_the_codes_of_both(name):
    """Up to codes that another order of sums makes the neighbouring ones; and that is another policy than that of the weights themselves."""
    text, model = prompts(60)[0], reference(name)
    if name == "mixtral":
        model.set_experts_implementation("eager")
    stay = [model.lm_head.weight, *(p for key, p in model.named_parameters() if key.endswith("mlp.gate.weight"))]
    with torch.no_grad(), Coded(stay) as mode:
        expected = model(torch.tensor([text])).logits[0].log_softmax(-1)
    assert mode.products >= 14
    got = driver(name).logprobs(text)
    with torch.no_grad():
        published = model(torch.tensor([text])).logits[0].log_softmax(-1)
    assert (got - expected).abs().mean() < 0.05 * (got - published).abs().mean()
    assert (got - published).abs().mean() > 5e-3


def test_an_adapter_stands_beside_the_codes_and_is_not_quantised():
    ours = driver("llama", max_adapters=1)
    put(ours, 0, "llama", scale=0.3)
    text = prompts(30)[0]
    adapted, base = ours.logprobs(text, adapter=0), ours.logprobs(text)
    plain = driver("llama", None, max_adapters=1)
    put(plain, 0, "llama", scale=0.3)
    assert torch.equal(base, driver("llama").logprobs(text))
    assert (adapted - plain.logprobs(text, adapter=0)).abs().mean() < 0.5 * (adapted - base).abs().mean()


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_captured_passes_serve_the_codes_of_new_weights(name):
    """The addresses stay, and what lies there is the next version's: codes and scales."""
    by = replace(EMULATED, grouped=looped)
    ours, record = FusedRunner(skeleton(name), 256, dtype=torch.float32, device=CPU, fp8=by), Recorder()
    ours._cache.kernel = read_pages
    ours.replay_with(record)
    ours, other = RunnerDriver(ours, parameters(name), 64), driver(name)
    both(ours, other, prompts(50, 20), [(40, 9), (1, 1), (1, 1)])
    newer = {key: value * 1.5 + 0.01 for key, value in parameters(name).items()}
    for one in (ours, other):
        one.runner.use(one.runner.prepare(newer))
    both(ours, other, prompts(50, 20), [(40, 9), (1, 1), (1, 1)])
    assert ours.runner.passes.graphed == 6 and not ours.runner.passes.eager


def test_experts_that_are_multiplied_one_by_one_are_not_captured():
    ours = FusedRunner(skeleton("mixtral"), 256, dtype=torch.float32, device=CPU, fp8=EMULATED)
    ours.replay_with(Recorder())
    one = RunnerDriver(ours, parameters("mixtral"), 64)
    assert "one by one" in ours._not_graphed(one.batch([(one.sequence([5]), 1)]))


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_an_exact_engine_gives_the_same_bits_alone_and_in_a_batch(name):
    alone = driver(name, exact=True).logprobs(prompts(70)[0])
    for chunk in (1, 7):
        assert torch.equal(driver(name, exact=True).logprobs(prompts(70)[0], chunk), alone)
