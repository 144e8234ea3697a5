"""LoRA beside the base weights: against weights merged by hand, against peft's own model, several at once, and refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.weights import AdapterSpec
from headrace.engine.native.forward_pass import ForwardInput
from headrace.engine.native.runners.adapter_tensors import PREFIX
from headrace.engine.native.runners.decoder import FusedRunner
from headrace.engine.native.runners.layers import by_adapter
from support.few import few
from support.tiny_models import MIXTURES, RunnerDriver, parameters, prompts, reference, skeleton

CPU = torch.device("cpu")
FAMILIES = ["llama-tied-biased", "gemma3_text", "qwen2", "qwen3_moe", "qwen3_moe-mixed", "mixtral", "olmoe"]
RANK = 4
Tensors = dict[str, torch.Tensor]


def adapters_of(name: str, seed: int = 0, only: str = "", rank: int = RANK) -> Tensors:
    """Random A and B for every linear module and all experts, as peft names and shapes them."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, weight in parameters(name).items():
        module = key.removesuffix(".weight")
        if key.endswith("_proj.weight"):
            out, into, rows = *weight.shape, rank
        elif ".experts." in key:
            experts, out, into = weight.shape
            module = module.replace("experts.gate_up_proj", "experts.base_layer").replace(".down_proj", "")
            rows = rank * experts
        else:
            continue
        if only in key:
            tensors[f"{PREFIX}{module}.lora_A.weight"] = torch.randn(rows, into, generator=generator) * 0.3
            tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(out, rows, generator=generator) * 0.3
    return tensors


def merged(name: str, tensors: Tensors, scale: float) -> Any:
    """Hugging Face's model with W + scale * B A in float64: independent of how the runner does it."""
    model = reference(name)
    for key, parameter in model.named_parameters():
        module = key.removesuffix(".weight")
        module = module.replace("experts.gate_up_proj", "experts.base_layer").replace("experts.down_proj", "experts")
        if f"{PREFIX}{module}.lora_A.weight" not in tensors:
            continue
        a, b = (tensors[f"{PREFIX}{module}.lora_{letter}.weight"].double().numpy() for letter in "AB")
        weight = parameter.detach().double().numpy()
        if weight.ndim == 2:
            weight = weight + scale * b @ a
        else:  # in A the ranks of one expert lie together, in B every so many-th column is one expert's
            count, rank = len(weight), len(a) // len(weight)
            weight = np.stack([w + scale * b[:, e::count] @ a[e * rank :][:rank] for e, w in enumerate(weight)])
        parameter.data = torch.from_numpy(weight).float()
    return model


@torch.no_grad()
def wanted(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


def driver(name: str, slots: int = 3, dtype: torch.dtype = torch.float32, exact: bool = False) -> RunnerDriver:
    return RunnerDriver(
        FusedRunner(skeleton(name, dtype), 128, dtype=dtype, device=CPU, exact=exact, max_adapters=slots),
        parameters(name, dtype),
    )


def put(to: RunnerDriver, slot: int, tensors: Tensors, **spec: Any) -> None:
    fields = {"name": f"adapter {slot}", "rank": RANK, "alpha": 6.0, **spec}
    to.runner.use_adapter(slot, to.runner.prepare_adapter(AdapterSpec(**fields), tensors))


# --- against computations of others ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", few(FAMILIES, keep=3))
def test_an_adapter_beside_the_weights_equals_one_merged_into_them(name):
    tensors, text = adapters_of(name), prompts(50)[0]
    ours = driver(name)
    put(ours, 1, tensors)
    expected = wanted(merged(name, tensors, 6.0 / RANK), text)
    assert (ours.logprobs(text, chunk=19, adapter=1) - expected).abs().max() < 1e-4
    base = wanted(reference(name), text)
    assert (ours.logprobs(text) - base).abs().max() < 1e-4
    assert (expected - base).abs().max() > 0.1, "the adapter says nothing"


@pytest.mark.parametrize(
    ("name", "only"),
    [
        ("qwen2", "v_proj"),
        ("qwen2", "up_proj"),
        ("gemma3_text", "layers.1"),
        ("mixtral", "experts.down_proj"),
        ("mixtral", "experts.gate_up_proj"),
    ],
)
def test_what_an_adapter_leaves_out_stays_the_base_models(name, only):
    tensors, text = adapters_of(name, only=only), prompts(20)[0]
    ours = driver(name)
    put(ours, 0, tensors)
    assert (ours.logprobs(text, adapter=0) - wanted(merged(name, tensors, 1.5), text)).abs().max() < 1e-4


def test_experts_alone_are_named_without_base_layer_by_peft_and_told_apart_by_their_sizes():
    tensors, text = adapters_of("mixtral", only="experts.gate_up_proj"), prompts(20)[0]
    bare = {key.replace(".base_layer", ""): tensor for key, tensor in tensors.items()}
    ours = driver("mixtral")
    put(ours, 0, bare)
    assert (ours.logprobs(text, adapter=0) - wanted(merged("mixtral", tensors, 1.5), text)).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mixtral", "gpt_oss"])
def test_equals_pefts_own_model(name):
    peft = pytest.importorskip("peft")
    dense = name not in MIXTURES
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=8,
        init_lora_weights=False,
        target_modules=[
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            *(["gate_proj", "up_proj", "down_proj"] if dense else []),
        ],
        target_parameters=None if dense else ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        rank_pattern={"q_proj": 2},
        alpha_pattern={"o_proj": 3, r"layers\.1\.self_attn\.k_proj": 5},
    )
    torch.manual_seed(1)
    theirs, text = peft.get_peft_model(reference(name), config), prompts(30)[0]
    ours = driver(name)
    patterns = {"rank_pattern": config.rank_pattern, "alpha_pattern": config.alpha_pattern}
    put(ours, 0, peft.get_peft_model_state_dict(theirs), alpha=8.0, **patterns)
    assert (ours.logprobs(text, adapter=0) - wanted(theirs, text)).abs().max() < 1e-4


def test_the_scale_follows_rank_alpha_and_their_patterns():
    tensors, text = adapters_of("qwen2", only="layers.0.self_attn.q_proj"), prompts(12)[0]
    for spec, scale in [
        ({"alpha": 8.0}, 2.0),
        ({"alpha": 8.0, "rslora": True}, 4.0),
        ({"rank": 9, "rank_pattern": {"q_proj": RANK}, "alpha": 2.0}, 0.5),
        ({"alpha": 2.0, "alpha_pattern": {r".*layers\.0\.self_attn\.q_proj": 12.0, "q_proj": 1.0}}, 3.0),
    ]:
        ours = driver("qwen2")
        put(ours, 0, tensors, **spec)
        assert (ours.logprobs(text, adapter=0) - wanted(merged("qwen2", tensors, scale), text)).abs().max() < 1e-4


def test_in_bfloat16_it_is_as_far_from_the_truth_as_merged_weights_are():
    name, text = "qwen3_moe", prompts(60)[0]
    tensors = adapters_of(name)
    truth = wanted(merged(name, tensors, 1.5), text)
    lowered = wanted(merged(name, tensors, 1.5).to(torch.bfloat16), text).float()
    ours = driver(name, dtype=torch.bfloat16)
    put(ours, 0, tensors)
    assert (ours.logprobs(text, adapter=0) - truth).abs().mean() < 1.5 * (lowered - truth).abs().mean()


# --- several at once ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2", "mixtral"])
@pytest.mark.parametrize("exact", [False, True])
def test_several_adapters_in_one_ragged_batch_each_serve_their_own_requests(name, exact):
    """In exact mode pieces of 32 tokens cut through segments of different adapters."""
    ours, texts = driver(name, exact=exact), prompts(11, 40, 3, 26, 9, 33)
    slots = [2, -1, 0, 2, 1, 0]
    weights = [adapters_of(name, seed) for seed in range(3)]
    for slot, tensors in enumerate(weights):
        put(ours, slot, tensors)
    models = {-1: reference(name)} | {slot: merged(name, weights[slot], 1.5) for slot in range(3)}
    counts = [6, 4, 8, 5, 7, 6]
    told = ours.generate(texts, counts, chunk=13, adapters=slots)
    for text, slot, count, tokens in zip(texts, slots, counts, told, strict=True):
        whole = text + tokens
        assert tokens == wanted(models[slot], whole)[len(text) - 1 : -1].argmax(-1).tolist()
        assert len(tokens) == count


def test_an_adapter_is_replaced_and_emptied_between_two_passes():
    ours, text = driver("qwen2"), prompts(10)[0]
    first, second = adapters_of("qwen2", 0), adapters_of("qwen2", 1)
    put(ours, 0, first)
    old = ours.logprobs(text, adapter=0)
    put(ours, 0, second)
    assert (ours.logprobs(text, adapter=0) - wanted(merged("qwen2", second, 1.5), text)).abs().max() < 1e-4
    put(ours, 0, first)
    assert torch.equal(ours.logprobs(text, adapter=0), old)
    ours.runner.use_adapter(0, None)
    with pytest.raises(AssertionError, match="empty adapter slot 0"):
        ours.logprobs(text, adapter=0)


def test_routing_is_told_in_the_order_of_the_batch_whatever_the_adapters():
    ours, texts = driver("mixtral"), prompts(5, 1, 7)
    for slot in range(2):
        put(ours, slot, adapters_of("mixtral", slot))
    slots = [1, -1, 0]
    together = ours.step([(ours.sequence(t, s), len(t)) for t, s in zip(texts, slots, strict=True)], routing=True)
    apart = [ours.step([(ours.sequence(t, s), len(t))], routing=True) for t, s in zip(texts, slots, strict=True)]
    assert together.routing is not None and together.routing.shape == (13, 2, 2)
    assert np.array_equal(together.routing, np.concatenate([part.routing for part in apart]))
    assert torch.allclose(together.logits, torch.cat([part.logits for part in apart]), atol=1e-4)


def test_sorting_by_adapter_moves_segments_whole_and_keeps_the_order_of_rows():
    batch = ForwardInput(
        tokens=np.array([10, 11, 20, 30, 31, 32]),
        starts=np.array([0, 2, 3, 6], np.int32),
        context=np.array([5, 6, 7], np.int32),
        tables=np.array([[1], [2], [3]], np.int32),
        rows=np.array([1, 2, 5]),
        adapters=np.array([1, -1, 0], np.int32),
    )
    moved, went = by_adapter(batch)
    assert moved.tokens.tolist() == [20, 30, 31, 32, 10, 11]
    assert moved.starts.tolist() == [0, 1, 4, 6] and moved.context.tolist() == [6, 7, 5]
    assert moved.tables.tolist() == [[2], [3], [1]] and moved.adapters.tolist() == [-1, 0, 1]
    assert moved.tokens[moved.rows].tolist() == [11, 20, 32], "the rows wanted, in the order they were asked for"
    assert went is not None and moved.tokens[went].tolist() == batch.tokens.tolist()
    again, nothing = by_adapter(moved)
    assert again is moved and nothing is None


# --- refused -----------------------------------------------------------------------------------------------------------


def change(tensors: Tensors, old: str, new: str) -> Tensors:
    return {key.replace(old, new): tensor for key, tensor in tensors.items()}


Q = f"{PREFIX}model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({}, "holds no tensors"),
        ({f"{Q}.lora_A.weight": torch.zeros(4, 32)}, "one of lora_A and lora_B for model.layers.0.self_attn.q_proj"),
        ({f"{Q}.lora_magnitude_vector.weight": torch.zeros(32)}, "DoRA is not served"),
        ({f"{Q}.lora_B.bias": torch.zeros(32)}, "q_proj.lora_B.bias, which is not a LoRA matrix"),
        ({"model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 32)}, "which is not a LoRA matrix"),
        (change(adapters_of("qwen2", only="layers.1"), "layers.1", "layers.7"), "model.layers.7.*another base model"),
        (change(adapters_of("qwen2", only="q_proj"), "self_attn.q_proj", "lm_head"), "lm_head.*has no place"),
        (adapters_of("llama-tied-biased", only="q_proj"), r"lora_B of model.layers.0.self_attn.q_proj.*\(64, 4\)"),
        (adapters_of("qwen2", rank=5, only="k_proj"), r"k_proj.*\(5, 32\).*rank 4 take \(4, 32\)"),
        (adapters_of("mixtral", only="experts"), "experts.*has no place"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_by_name(tensors, sentence):
    with pytest.raises(ValueError, match=f"(?s){sentence}"):
        put(driver("qwen2"), 0, tensors)


def test_experts_of_another_size_are_refused():
    with pytest.raises(ValueError, match=r"mlp.experts.*\(24, 32\).*another base model"):
        put(driver("mixtral"), 0, adapters_of("qwen3_moe", only="experts.gate_up_proj", rank=3))


def test_adapters_are_read_in_any_order_of_their_tensors():
    tensors, text = adapters_of("qwen2"), prompts(6)[0]
    results = []
    for order in itertools.islice(itertools.permutations(sorted(tensors)[:5]), 0, 120, 50):
        ours = driver("qwen2")
        put(ours, 0, {name: tensors[name] for name in [*order, *(set(tensors) - set(order))]})
        results.append(ours.logprobs(text, adapter=0))
    assert all(torch.equal(results[0], other) for other in results[1:])
