"""LoRA adapters beside models that transformers computes: against peft's own model, several in one batch, with states and caches of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import peft
import pytest
import torch

from headrace.core.types import Fork, Request, Sampling
from headrace.core.weights import AdapterSpec, WeightUpdate
from headrace.engine.native.forward_pass import ForwardInput, ForwardOutput
from headrace.engine.native.runners.adapter_tensors import PREFIX
from headrace.engine.native.runners.module_adapters import by_slot, in_slots
from support.native_calls import (  # noqa: F401 (a fixture)
    Answer,
    greedy,
    make_engine,
    prompts,
    put,
    reference,
    run,
    saved,
    step,
    teacher_forced,
)

TOLERANCE = 2e-5
RANK, ALPHA = 4, 8.0
WAYS = [
    ("gpt2", "hf"),
    ("gemma2", "cache"),
    ("mamba", "cache"),
    pytest.param("gpt_neox", "hf", marks=pytest.mark.slow),
    pytest.param("llama", "cache", marks=pytest.mark.slow),
]


def adapted(directory: Any, seed: int) -> Any:
    """Peft's model with random adapters of all linear layers that it adapts."""
    torch.manual_seed(seed)
    model = reference(directory)
    targets: Any = ["in_proj", "x_proj"] if model.config.model_type == "mamba" else "all-linear"
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, init_lora_weights=False, target_modules=targets)
    return peft.get_peft_model(model, config).eval()


def load(engine: Any, name: str, model: Any, version: int = 0) -> None:
    spec = AdapterSpec(name, RANK, ALPHA)
    update = WeightUpdate(version=version, kind="adapter", fingerprint="", nbytes=0, seconds=0.0, adapter=spec)
    tensors = {key: tensor.clone() for key, tensor in peft.get_peft_model_state_dict(model).items()}
    engine.swap(engine.prepare(update, tensors))


def assert_of(model: Any, asked: tuple[int, ...], answer: Answer) -> None:
    expected = teacher_forced(model, asked, answer.tokens)
    found = expected[range(len(answer.tokens)), answer.tokens]
    assert (torch.tensor(answer.logprobs) - found).abs().max() < TOLERANCE
    assert answer.tokens == expected.argmax(-1).tolist()


@pytest.mark.parametrize(("name", "path"), WAYS)
def test_adapters_in_one_batch_have_the_numbers_of_peft(name, path, saved):  # noqa: F811
    """Of one prompt, which each computes for itself, in chunks; the base model beside them."""
    directory = saved(name)
    engine = make_engine(directory, path=path, max_adapters=2, prefill_chunk=8)
    models = {"": reference(directory), "north": adapted(directory, 1), "south": adapted(directory, 2)}
    for adapter, model in models.items():
        if adapter:
            load(engine, adapter, model)
    text = prompts(21)[0]
    requests = [greedy(f"{who}{i}", text, 4, adapter=who) for i in range(2) for who in models]
    answers = run(engine, requests)
    for request in requests:
        assert_of(models[request.adapter], text, answers[request.id])
    assert len({tuple(answers[f"{who}0"].logprobs) for who in models}) == 3
    turn = (*text, *answers["north0"].tokens, 7)
    assert_of(models["north"], turn, run(engine, [greedy("turn", turn, 3, adapter="north")])["turn"])


@pytest.mark.parametrize(("name", "path"), WAYS[:3])
@pytest.mark.parametrize("swap", ["keep", "recompute"])
def test_an_adapter_is_replaced_in_the_middle_of_a_completion(name, path, swap, saved):  # noqa: F811
    directory = saved(name)
    engine = make_engine(directory, path=path, max_adapters=1, swap=swap)
    old, new, base = adapted(directory, 1), adapted(directory, 2), reference(directory)
    load(engine, "north", old)
    text, answers = prompts(19)[0], dict[str, Answer]()
    engine.add(greedy("r", text, 8, adapter="north"))
    engine.add(greedy("base", text, 8))
    while len(answers.get("r", Answer()).tokens) < 3:
        step(engine, answers)
    load(engine, "north", new, version=1)
    run(engine, (), answers)
    assert_of(base, text, answers["base"])
    answer = answers["r"]
    before, rest = (Answer(answer.tokens[part], answer.logprobs[part]) for part in (slice(3), slice(3, None)))
    assert_of(old, text, before)
    if swap == "recompute":
        assert_of(new, (*text, *before.tokens), rest)
    else:
        with pytest.raises(AssertionError):
            assert_of(new, (*text, *before.tokens), rest)
    fork = Request("fork", (), Sampling(max_tokens=6, temperature=0.0, ignore_eos=True), fork=Fork("base", 2))
    run(engine, [fork], answers)
    assert_of(base, (*text, *answers["base"].tokens[:2]), answers["fork"])


def test_new_base_weights_are_under_the_adapter(saved):  # noqa: F811
    engine = make_engine(saved("gemma2"), path="cache", max_adapters=1)
    model = adapted(saved("gemma2"), 1)
    load(engine, "north", model)
    text = prompts(19)[0]
    run(engine, [greedy("before", text, 2, adapter="north")])
    put(engine, saved("gemma2", 1), 1)
    with torch.no_grad():
        other = dict(reference(saved("gemma2", 1)).named_parameters())
        for key, parameter in model.named_parameters():
            plain = key.removeprefix(PREFIX).replace(".base_layer", "")
            if plain in other:
                parameter.copy_(other[plain])
    assert_of(model, text, run(engine, [greedy("after", text, 3, adapter="north")])["after"])


def test_an_exact_engine_is_exact_with_adapters(saved):  # noqa: F811
    found = []
    for chunk, others in ((16, 0), (5, 2)):
        engine = make_engine(saved("gpt2"), path="hf", exact=True, max_adapters=2, prefill_chunk=chunk)
        for seed, adapter in enumerate(("north", "south")):
            load(engine, adapter, adapted(saved("gpt2"), seed))
        texts = prompts(30, 11, 17)
        beside = [greedy(f"o{i}", texts[1 + i], 5, adapter=("south", "")[i]) for i in range(others)]
        found.append(run(engine, [*beside, greedy("r", texts[0], 5, adapter="north")])["r"].logprobs)
    assert found[0] == found[1]


def test_what_has_no_place_is_refused_by_name(saved):  # noqa: F811
    engine = make_engine(saved("mamba"), path="cache", max_adapters=1)
    spec = AdapterSpec("north", RANK, ALPHA)
    update = WeightUpdate(version=0, kind="adapter", fingerprint="", nbytes=0, seconds=0.0, adapter=spec)
    name = f"{PREFIX}backbone.layers.0.mixer.conv1d"
    tensors = {f"{name}.lora_A.weight": torch.zeros(4, 4), f"{name}.lora_B.weight": torch.zeros(8, 4)}
    with pytest.raises(ValueError, match=r"conv1d .* has no place \(linear layers can be adapted"):
        engine.prepare(update, tensors)


def test_a_pass_over_several_adapters_is_put_together_in_its_order():
    """Of segments that are told apart by their tokens, with rows between them."""
    batch = ForwardInput(
        tokens=np.array([10, 11, 20, 30, 31, 32, 40]),
        starts=np.array([0, 2, 3, 6, 7], np.int32),
        context=np.array([5, 6, 7, 8], np.int32),
        tables=np.array([[1], [2], [3], [4]], np.int32),
        rows=np.array([1, 2, 4, 5, 6]),
        adapters=np.array([1, -1, 1, 0], np.int32),
        moved=np.arange(7),
    )
    parts = {part.slot: part.batch for part in by_slot(batch)}
    assert parts[1].tokens.tolist() == [10, 11, 30, 31, 32] and parts[1].starts.tolist() == [0, 2, 5]
    assert parts[1].tokens[parts[1].rows].tolist() == [11, 31, 32] and parts[1].tables.tolist() == [[1], [3]]
    assert parts[-1].moved is not None and parts[-1].moved.tolist() == [2] and parts[0].context.tolist() == [8]

    def forward(slot: int, part: ForwardInput) -> ForwardOutput:
        asked = torch.from_numpy(part.tokens[part.rows])[:, None].float()
        return ForwardOutput(asked, part.tokens[:, None, None], again=part.context.copy())

    whole = in_slots(batch, forward)
    assert whole.logits[:, 0].tolist() == [11, 20, 31, 32, 40]
    assert whole.routing is not None and whole.routing[:, 0, 0].tolist() == batch.tokens.tolist()
    assert whole.again is not None and whole.again.tolist() == [5, 6, 7, 8] and whole.routed is None
