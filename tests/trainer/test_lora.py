"""LoRA: its settings, and peft's adapters in a frozen model, against float64 by hand and against peft itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from pydantic import ValidationError

from headrace.algo.config import AlgoConfig
from headrace.core.batches import Batch, Group, Row
from headrace.core.errors import ConfigError, IdentityError
from headrace.core.types import Prompt
from headrace.models.lora import LoraConfig
from headrace.run.config import load_config
from headrace.trainer.config import TrainConfig
from headrace.trainer.model.adapters import NF4, Adapters, QuantisedLinear
from headrace.trainer.step.learner import Assignment
from headrace.trainer.step.trainer import TorchTrainer
from support.few import few
from support.tiny_models import prompts, reference, saved

PREFIX = "base_model.model."


def adapted(name: str, dtype: torch.dtype = torch.float32, **configs: LoraConfig) -> tuple[Any, Adapters]:
    model = reference(name)
    return model, Adapters(model, configs or {"a": LoraConfig(rank=4)}, dtype, Path("base"))


def scramble(adapters: Adapters, name: str, seed: int = 0) -> None:
    """B is born zero, where mistakes do not show."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapters.parameters(name).values():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)


@torch.no_grad()
def logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


# --- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dora", "quantise", "targets", "publish", "alpha", "rank_pattern"])
def test_what_means_nothing_without_a_rank_is_refused_but_for_adapters_that_have_one(name):
    values = {"dora": True, "quantise": "nf4", "targets": ["q_proj"], "publish": "adapter", "alpha": 8.0}
    lora = {name: values.get(name, {"q_proj": 2})}
    tables = {"model": {"path": "m"}, "task": {"kind": "reasoning_gym", "name": "chain_sum"}, "lora": lora}
    with pytest.raises(ConfigError, match=f"lora.{name} is set, but lora.rank = 0 trains all weights"):
        load_config(tables)
    if name != "dora":  # which is not served beside a base
        load_config({**tables, "adapters": [{"name": "a", "lora": {"rank": 4}}]})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rank": 4, "dora": True, "publish": "adapter"}, "merged"),
        ({"rank": 4, "dora": True, "experts": True}, "cannot be combined"),
        ({"rank": 4, "dora": True, "quantise": "nf4"}, "cannot be combined"),
        ({"rank": 4, "targets": ()}, "lora.targets is empty"),
        ({"rank": 4, "rank_pattern": {"q_proj": 0}}, "q_proj a rank below 1"),
        ({"rank": -1}, "greater than or equal to 0"),
        ({"rank": 4, "quantise": "int3"}, "int8"),
        ({"rank": 4, "publish": "never"}, "merged"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, sentence):
    with pytest.raises(ValidationError, match=sentence):
        LoraConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "name", "merged"),
    [
        ({}, "", False),
        ({"rank": 4}, "policy", False),
        ({"rank": 4, "publish": "merged"}, "", True),
        ({"rank": 4, "dora": True}, "", True),
    ],
)
def test_what_the_engine_serves_follows_from_the_settings(settings, name, merged):
    config = LoraConfig(**settings)
    assert (config.served_name, config.merged) == (name, merged)


def test_the_spec_is_the_settings_in_pefts_terms():
    config = LoraConfig(rank=8, alpha=4, rslora=True, rank_pattern={"q_proj": 2}, alpha_pattern={"k_proj": 1})
    spec = config.spec("a", base="f00")
    assert (spec.name, spec.rank, spec.alpha, spec.rslora, spec.base) == ("a", 8, 4.0, True, "f00")
    assert spec.rank_pattern == {"q_proj": 2} and spec.alpha_pattern == {"k_proj": 1.0}


# --- adapters in a model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2", "llama-tied-biased", "gemma3_text", "mixtral", "qwen3_moe", "olmoe"])
def test_training_begins_at_the_base_model_with_names_and_shapes_of_pefts_files(name, tmp_path):
    experts = name in ("mixtral", "qwen3_moe", "olmoe")
    model, adapters = adapted(name, a=LoraConfig(rank=4, experts=experts))
    text = prompts(20)[0]
    assert torch.allclose(logprobs(model, text), logprobs(reference(name), text), atol=1e-5)
    parameters, state = adapters.parameters("a"), adapters.state("a")
    assert list(parameters) == list(state) and all(key.startswith(PREFIX) for key in state)
    assert all(parameters[key].data_ptr() == state[key].data_ptr() for key in state), (
        "what is published is what is trained"
    )
    assert {p.dtype for p in parameters.values()} == {torch.float32}
    adapters._peft.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "headrace-0" / "adapter_model.safetensors")
    assert {key: tensor.shape for key, tensor in saved.items()} == {key: t.shape for key, t in state.items()}


def test_only_the_adapter_wants_a_gradient_and_the_frozen_matrices_lie_in_the_dtype_of_the_computation():
    model, adapters = adapted("qwen2", torch.bfloat16)
    trained = {id(p) for p in adapters.parameters("a").values()}
    assert trained == {id(p) for p in model.parameters() if p.requires_grad}
    base = dict(adapters.base())
    assert list(base) == list(dict(reference("qwen2").named_parameters())), "published in the model's own order"
    low = {name for name, tensor in base.items() if tensor.dtype == torch.bfloat16}
    assert low == {name for name in base if name.endswith("_proj.weight")}, "norms, biases and embeddings are small"


@pytest.mark.parametrize("name", ["qwen2", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("rslora", [False, True])
def test_merged_is_the_base_plus_the_scaled_product_in_float64(name, rslora):
    experts = name != "qwen2"
    model, adapters = adapted(name, a=LoraConfig(rank=4, alpha=6, rslora=rslora, experts=experts))
    scramble(adapters, "a")
    state, scale, changed = adapters.state("a"), 6 / (2 if rslora else 4), 0
    merged = dict(adapters.merged("a"))
    for key, weight in reference(name).named_parameters():
        module = key.removesuffix(".weight")
        module = module.replace("experts.gate_up_proj", "experts").replace("experts.down_proj", "experts.base_layer")
        pair = [state.get(f"{PREFIX}{module}.lora_{letter}.weight") for letter in "AB"]
        expected = weight.detach().double()
        if pair[0] is not None:
            if weight.ndim == 3 and pair[0].shape[-1] != weight.shape[-1]:  # which of the two is inside, the sizes tell
                other = (
                    module + ".base_layer" if not module.endswith("base_layer") else module.removesuffix(".base_layer")
                )
                pair = [state[f"{PREFIX}{other}.lora_{letter}.weight"] for letter in "AB"]
            expected, changed = expected + scale * product(*pair, weight), changed + 1
        assert (merged[key].double() - expected).abs().max() < 1e-5, key
    assert changed == len(state) // 2
    text = prompts(20)[0]
    by_hand = reference(name)
    by_hand.load_state_dict(merged, strict=False)
    assert torch.allclose(logprobs(by_hand, text), logprobs(model, text), atol=1e-4)


def product(a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In A the ranks of one expert lie together, in B every so many-th column is one expert's."""
    a, b = a.double(), b.double()
    if weight.ndim == 2:
        return b @ a
    count, rank = len(weight), len(a) // len(weight)
    return torch.stack([b[:, e::count] @ a[e * rank :][:rank] for e in range(count)])


def test_dora_is_merged_as_peft_merges_it():
    model, adapters = adapted("qwen2", a=LoraConfig(rank=4, dora=True))
    scramble(adapters, "a")
    text, merged = prompts(20)[0], dict(adapters.merged("a"))
    expected = logprobs(model, text)
    by_hand = reference("qwen2")
    by_hand.load_state_dict(merged, strict=False)
    assert torch.allclose(logprobs(by_hand, text), expected, atol=1e-4)
    theirs = adapters._peft.merge_and_unload()
    for key, tensor in theirs.named_parameters():
        assert torch.allclose(merged[key], tensor, atol=1e-5), key


def test_what_is_saved_loads_in_peft_and_says_the_same(tmp_path):
    from safetensors.torch import save_file

    settings = {"rank": 4, "alpha": 3, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.up_proj": 9}}
    model, adapters = adapted("qwen2", north=LoraConfig(**settings))
    scramble(adapters, "north")
    save_file(adapters.state("north"), tmp_path / "adapter_model.safetensors")
    adapters.save_config("north", tmp_path)
    theirs, text = peft.PeftModel.from_pretrained(reference("qwen2"), tmp_path), prompts(25)[0]
    assert torch.equal(logprobs(theirs, text), logprobs(model, text))
    assert adapters.state("north")[f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (2, 32)


def test_the_seed_of_an_adapter_draws_it_whatever_was_drawn_before():
    def first(seed: int, noise: int) -> torch.Tensor:
        torch.manual_seed(noise)
        _, adapters = adapted("qwen2", a=LoraConfig(rank=4, init_seed=seed))
        return next(iter(adapters.state("a").values())).clone()

    assert torch.equal(first(1, 0), first(1, 5)) and not torch.equal(first(1, 0), first(2, 0))


# --- in the trainer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", few(["qwen2", "mixtral"], keep=1))
def test_gradients_of_packed_trees_are_those_of_pefts_model_row_by_row(name, checkpointing):
    train = TrainConfig(dtype="float32", device="cpu", gradient_checkpointing=checkpointing)
    algo, lora = AlgoConfig(name="dapo"), LoraConfig(rank=4, experts=name == "mixtral")
    trainer = TorchTrainer(Path(saved(name)), train, algo, 0, adapters={"a": Assignment(train, algo, lora)})
    scramble(trainer._adapters, "a")
    prompt, *answers = prompts(7, 5, 9)
    rows, weights = [], (0.7, -0.4)
    for answer, weight in zip(answers, weights, strict=True):
        sampled, count = trainer.score([*prompt, *answer], "a")[len(prompt) - 1 :], len(answer)
        columns = (weight,) * count, (True,) * count, (0,) * count
        rows.append(Row(tuple(prompt), tuple(answer), tuple(sampled), *columns))
    group = Group(0, Prompt("p", "", tuple(prompt)), (), tuple(rows))
    batch = Batch(0, (group,), adapter="a")
    trainer._gradient(1.0, "a").fill(trainer._plans(batch)[0])
    found = {key: p.grad.clone() for key, p in trainer._learners["a"].parameters.items()}

    model, adapters = adapted(name, a=lora)
    scramble(adapters, "a")
    loss = torch.zeros(())
    for answer, weight in zip(answers, weights, strict=True):
        whole = torch.tensor([[*prompt, *answer]])
        logp = model(whole).logits[0, :-1].log_softmax(-1).gather(-1, whole[0, 1:, None])[len(prompt) - 1 :]
        loss = loss - weight * logp.sum() / sum(map(len, answers))
    loss.backward()
    for key, parameter in adapters.parameters("a").items():
        scale = parameter.grad.abs().max()
        assert (found[key] - parameter.grad).abs().max() <= 1e-4 * scale + 1e-7, key
    assert "packed trees" in trainer.path


# --- a quantised base --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "nbytes", "error"), [("int8", 1.0, 0.02), ("nf4", 0.5, 0.12)])
def test_the_base_is_small_and_what_is_published_is_what_is_computed_with(kind, nbytes, error):
    model, adapters = adapted("qwen2", a=LoraConfig(rank=4, quantise=kind))
    base, exact, text = dict(adapters.base()), dict(reference("qwen2").named_parameters()), prompts(20)[0]
    assert list(base) == list(exact)
    quantised = [name for name in base if name.endswith("_proj.weight")]
    for name in base:
        if name in quantised:
            assert 0 < (base[name] - exact[name]).abs().mean() < error * exact[name].abs().mean(), name
        else:
            assert torch.equal(base[name], exact[name]), name
    packed = dict(model.named_parameters())
    held = sum(packed[name.replace(".weight", ".base_layer.weight")].nbytes for name in quantised)
    assert held <= nbytes * sum(exact[name].numel() for name in quantised)
    scramble(adapters, "a")
    by_hand = reference("qwen2")
    by_hand.load_state_dict(dict(adapters.merged("a")), strict=False)
    assert torch.allclose(logprobs(by_hand, text), logprobs(model, text), atol=1e-4)
    adapters.check_base()


@pytest.mark.parametrize(("kind", "levels"), [("int8", [i / 127 for i in range(-127, 128)]), ("nf4", NF4)])
def test_every_weight_becomes_the_nearest_level_of_its_block(kind, levels):
    weight = torch.randn(5, 37, generator=torch.Generator().manual_seed(0))
    weight[0] = 0.0  # a block may hold nothing but zeros
    linear = torch.nn.Linear(37, 5, bias=False)
    linear.weight.data = weight.clone()
    full = QuantisedLinear(linear, kind, torch.float32).full().flatten()
    for start in range(0, weight.numel(), 64):
        block = weight.flatten()[start : start + 64].double().numpy()
        scale = abs(block).max()
        nearest = [min(levels, key=lambda level, value=value: abs(level * scale - value)) * scale for value in block]
        assert full[start : start + 64].tolist() == pytest.approx(nearest, abs=1e-6)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_gradients_through_a_quantised_base_are_those_through_what_it_stands_for(kind):
    model, adapters = adapted("qwen2", a=LoraConfig(rank=4, quantise=kind))
    full = reference("qwen2")
    full.load_state_dict(dict(adapters.base()), strict=False)
    other = Adapters(full, {"a": LoraConfig(rank=4)}, torch.float32, Path("base"))
    tokens, gradients = torch.tensor(prompts(20)), []
    for one, each in ((model, adapters), (full, other)):
        scramble(each, "a")
        one(tokens).logits.log_softmax(-1)[0, :-1].gather(-1, tokens[0, 1:, None]).mean().backward()
        gradients.append({name: p.grad for name, p in each.parameters("a").items()})
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], atol=1e-5), name
    assert max(gradient.abs().max() for gradient in gradients[0].values()) > 1e-3


# --- several -----------------------------------------------------------------------------------------------------------


def test_an_adapter_may_be_called_like_a_part_of_the_model():
    _, adapters = adapted("qwen2", model=LoraConfig(rank=4), mlp=LoraConfig(rank=4))
    _, plain = adapted("qwen2", a=LoraConfig(rank=4))
    for name in ("model", "mlp"):
        assert list(adapters.state(name)) == list(adapters.parameters(name)) == list(plain.state("a"))


@pytest.mark.parametrize("name", ["qwen2", "mixtral"])
def test_several_adapters_are_each_their_own(name):
    experts = name == "mixtral"
    configs = {
        "a": LoraConfig(rank=4, experts=experts),
        "b": LoraConfig(rank=2, alpha=8, experts=experts, targets=("q_proj", "v_proj")),
    }
    model, adapters = adapted(name, **configs)
    text = prompts(20)[0]
    base = logprobs(reference(name), text)
    scramble(adapters, "b")
    frozen = {key: tensor.clone() for key, tensor in adapters.state("b").items()}
    adapters.activate("a")
    assert torch.allclose(logprobs(model, text), base, atol=1e-5), "b is changed, a is not"
    for parameter in adapters.parameters("a").values():
        parameter.data += 0.3
    assert all(torch.equal(frozen[key], tensor) for key, tensor in adapters.state("b").items())
    alone, single = adapted(name, b=configs["b"])
    scramble(single, "b")
    adapters.activate("b")
    assert torch.allclose(logprobs(model, text), logprobs(alone, text), atol=1e-5)
    assert {id(p) for p in adapters.parameters("b").values()} == {id(p) for p in model.parameters() if p.requires_grad}


# --- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("qwen2", {"targets": ("q_prj",)}, "q_prj, which is not a linear layer of Qwen2ForCausalLM.*there are.*q_proj"),
        ("qwen2", {"targets": ("lm_head",)}, "output head is never adapted"),
        ("qwen2", {"experts": True}, "no stacked experts"),
        ("mixtral", {"targets": ("q_proj", "w1")}, "lora.experts = true"),
        ("qwen2", {"rank": 40}, "lora.rank = 40 is above the 32 dimensions of model.layers.0.self_attn.q_proj"),
        ("qwen2", {"rank_pattern": {"o_proj": 999}}, "lora.rank = 999 is above the 32 dimensions of .*o_proj"),
        ("qwen2", {"rank_pattern": {"w_proj": 2}}, "lora.rank_pattern names w_proj"),
        ("qwen2", {"alpha_pattern": {"w_proj": 2.0}}, "lora.alpha_pattern names w_proj"),
        ("qwen2", {"targets": ("q_proj",), "rank_pattern": {"v_proj": 2}}, "names v_proj, which is not adapted"),
        ("mixtral", {"alpha_pattern": {"mlp.experts.down_proj": 2.0}}, "which is not adapted.*lora.experts = true"),
        ("gpt2", {}, "GPT2LMHeadModel has no linear layers"),
    ],
)
def test_what_the_model_cannot_do_is_refused_by_name(name, settings, sentence):
    with pytest.raises(ConfigError, match=f"(?s){sentence}"):
        adapted(name, a=LoraConfig(**{"rank": 4, **settings}))


def test_a_base_that_moved_is_noticed():
    model, adapters = adapted("qwen2")
    scramble(adapters, "a")
    adapters.check_base()
    model.model.layers[1].mlp.down_proj.base_layer.weight.data[0, 0] += 1e-3
    with pytest.raises(IdentityError, match="frozen base weights changed"):
        adapters.check_base()
