"""Models without a family of ours, through Hugging Face's own forward over our cache."""

from __future__ import annotations

import pytest
import torch

from headrace.core.errors import ConfigError
from headrace.engine.native.runners.hugging_face import HuggingFaceRunner
from support.few import few
from support.plain_pages import read_pages
from support.tiny_models import (
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
SCORED = ("gemma2", "gpt_oss")
"""Scores with caps or sinks, in some layers behind windows of nine tokens."""
BOTH = [*OTHERS, "llama3-rope", "qwen2-sliding", "gemma3_text", "mixtral", *SCORED]


def driver(name: str, dtype: torch.dtype = torch.float32, exact: bool = False) -> RunnerDriver:
    if exact:
        skip_where_inexact(dtype)
    return RunnerDriver(
        HuggingFaceRunner(skeleton(name, dtype), 256, dtype=dtype, device=CPU, exact=exact), parameters(name, dtype)
    )


@torch.no_grad()
def wanted(model, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


@pytest.mark.parametrize("name", few(BOTH, keep=3))
def test_log_probs_equal_the_models_own(name):
    assert name in OTHERS or name in MODELS or name in SCORED
    ours, text = driver(name), prompts(90)[0]
    assert (ours.logprobs(text, chunk=17) - wanted(reference(name), text)).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", [*OTHERS, *SCORED])
def test_ragged_batches_choose_the_models_own_tokens(name):
    texts, counts, model = prompts(1, 17, 40, 3), (9, 3, 12, 7), reference(name)
    for text, tokens in zip(texts, driver(name).generate(texts, counts), strict=True):
        assert tokens == wanted(model, text + tokens)[len(text) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("name", SCORED)
def test_a_kernel_that_reads_pages_is_told_of_caps_and_sinks(name):
    ours, text = driver(name), prompts(90)[0]
    ours.runner._cache.kernel = read_pages
    assert (ours.logprobs(text, chunk=17) - wanted(reference(name), text)).abs().max() < TOLERANCE


def test_tied_parameters_are_swapped_in_every_place():
    new = make("gpt2", seed=1)
    ours, text = driver("gpt2"), prompts(9)[0]
    before = ours.logprobs(text)
    assert "lm_head.weight" not in parameters("gpt2"), "the head is the embedding"
    ours.runner.use(ours.runner.prepare({key: value.detach() for key, value in new.named_parameters()}))
    assert (ours.logprobs(text) - wanted(new, text)).abs().max() < TOLERANCE
    assert (before - wanted(new, text)).abs().max() > 0.1


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "gemma2"])
def test_exact_log_probs_depend_on_nothing_but_the_sequence(name):
    ours, (text, other) = driver(name, torch.bfloat16, exact=True), prompts(70, 45)
    alone = ours.logprobs(text)
    assert torch.equal(ours.logprobs(text, chunk=11), alone)
    first, second, told = ours.sequence(text), ours.sequence(other), []
    for count, beside in ((30, 5), (1, 20), (1, 1), (38, 19)):
        rows = range(beside, beside + count)
        told.append(ours.step([(second, beside), (first, count)], rows=rows).logits.float().log_softmax(-1))
    assert torch.equal(torch.cat(told), alone)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_blame_names_the_first_layer_that_is_not_finite(name):
    layer = {"gpt2": "transformer.h.1.mlp.c_proj.weight", "gpt_neox": "gpt_neox.layers.1.mlp.dense_4h_to_h.weight"}[
        name
    ]
    embed = {"gpt2": "transformer.wte.weight", "gpt_neox": "gpt_neox.embed_in.weight"}[name]

    def found(parameter: str, row: int) -> list[int]:
        tensors = {key: tensor.clone() for key, tensor in parameters(name).items()}
        tensors[parameter][row] = torch.nan
        ours = RunnerDriver(HuggingFaceRunner(skeleton(name), 64, dtype=torch.float32, device=CPU), tensors)
        batch = ours.batch([(ours.sequence([5, 7, 9]), 3), (ours.sequence([8, 4]), 2)])
        return ours.runner.blame(batch).tolist()

    assert found(layer, 3) == [1] * 5
    tied = name == "gpt2"  # the sick row of the embedding is one of the head, too
    assert found(embed, 7) == [0, 0, 0, -1, 2 if tied else -1]


def test_mixtures_cannot_be_exact_here_and_say_what_can():
    with pytest.raises(ConfigError, match="engine.exact = true.*through the fused path"):
        HuggingFaceRunner(skeleton("mixtral"), 64, dtype=torch.float32, device=CPU, exact=True)
    assert HuggingFaceRunner(skeleton("mixtral"), 64, dtype=torch.float32, device=CPU).experts == (2, 2)
