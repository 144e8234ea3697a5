"""The engine with weights in FP8 on a pretended GPU: what it serves, and which devices and models are refused.

Torch's own product runs, on the CPU; there is no grouped one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from pretend_cuda import DEVICE, PretendedCuda, pretended_cuda

from headrace.core.errors import ConfigError
from headrace.core.types import Request, Sampling
from headrace.engine.native.runners import fp8
from headrace.engine.native.runners.fp8 import device_refusal, fp8_of, scaled_product
from headrace.engine.native.runners.skeleton import parameters_from_dir
from headrace.testing.makers import update
from support.looped_experts import looped
from support.native_calls import make_engine, run, save_model, score


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedCuda]:
    fp8._tried.cache_clear()
    yield from pretended_cuda(monkeypatch)
    fp8._tried.cache_clear()


def served(directory: Path, **config):
    return make_engine(
        directory, **{"weights": "fp8", "device": "cuda", "dtype": "bfloat16", "exact": True, "live": False, **config}
    )


def test_log_probs_that_are_recorded_are_those_of_the_policy_that_sampled(tmp_path, cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    directory = save_model(tmp_path, "qwen2")
    engines = {weights: served(directory, weights=weights, path="fused") for weights in ("fp8", "published")}
    for engine in engines.values():
        engine.swap(engine.prepare(update(0), parameters_from_dir(directory, torch.bfloat16)))
    request = Request("a", (65, 66, 67), Sampling(max_tokens=20, seed=3, ignore_eos=True))
    answer = run(engines["fp8"], [request])["a"]
    again = {weights: score(engine, (65, 66, 67, *answer.tokens))[2:] for weights, engine in engines.items()}
    assert list(again["fp8"]) == answer.logprobs
    assert 1e-3 < np.abs(np.array(again["published"]) - answer.logprobs).mean() < 0.5
    assert engines["fp8"].capabilities.path == "fused qwen2, fp8"


@pytest.mark.parametrize(
    "capability, words", [((8, 0), "from compute capability 8.9 on, and this one has 8.0"), ((7, 5), "has 7.5")]
)
def test_a_gpu_without_fp8_is_refused_with_a_remedy_that_works(capability, words, tmp_path, cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    directory = save_model(tmp_path, "llama")
    with pytest.raises(ConfigError, match=f'{words}; set engine.weights = "published"$'):
        served(directory)
    served(directory, weights="published")


def test_a_gpu_with_wrong_products_is_refused(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    assert device_refusal(DEVICE) == ""

    def without_scales(x, weight, bias, dtype):
        return scaled_product((x[0], torch.ones_like(x[1])), weight, bias, dtype)

    def absent(x, weight, bias, dtype):
        raise RuntimeError("Rowwise scaling is not currently supported on your device\nmore")

    for product, words in (
        (without_scales, "off by"),
        (absent, "RuntimeError: Rowwise scaling is not currently supported on your device"),
    ):
        monkeypatch.setattr(fp8, "scaled_product", product)
        fp8._tried.cache_clear()
        assert f"products of this GPU in FP8 are not right ({words}" in device_refusal(DEVICE)


def test_a_grouped_product_that_fails_leaves_experts_one_by_one(cuda, monkeypatch, logged):
    """On the pretended device torch has none at all."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert device_refusal(DEVICE) == "" and fp8_of(DEVICE).grouped is None
    assert "one by one in FP8" in logged.text
    monkeypatch.setattr(fp8, "grouped_product", looped)
    fp8._tried.cache_clear()
    assert fp8_of(DEVICE).grouped is looped


@pytest.mark.parametrize(
    "name, changes, words",
    [
        ("gpt_neox", {}, "gpt_neox is none of the families"),
        (
            "llama",
            {"intermediate_size": 40},
            r"its mlp.gate_proj is 40 × 32, and FP8 products have widths that are multiples of 16",
        ),
        ("qwen3_moe", {}, r"its mlp.experts.down_proj is 32 × 24"),
    ],
)
def test_a_model_that_has_no_products_in_fp8_is_refused_with_a_remedy_that_works(
    name, changes, words, tmp_path, cuda, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    directory = save_model(tmp_path, name, **changes)
    with pytest.raises(ConfigError, match=f'{words}.*; set engine.weights = "published"'):
        served(directory, path="auto")
    served(directory, weights="published", path="auto")


def test_a_cpu_is_refused_and_has_eight_bits_of_its_own(tmp_path):
    directory = save_model(tmp_path, "llama", head_dim=16)
    with pytest.raises(
        ConfigError,
        match=r'that is of GPUs, and the engine\'s device is cpu; set engine.weights = "int8" or "published"',
    ):
        served(directory, device="cpu", exact=False)
    for weights in ("int8", "published"):
        served(directory, device="cpu", weights=weights, exact=False)
