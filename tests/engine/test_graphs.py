"""Passes in buffers of fixed sizes, which a GPU captures once and replays: with a pretended capture, on a CPU.

The pretended graph keeps the addresses that its function read and wrote, and runs it again at each replay, so that what is not in a buffer by
then is not seen. Attention is that of `plain_pages`, whose tiles are the kernel's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.core.weights import AdapterSpec
from headrace.engine.native.runners import layers
from headrace.engine.native.runners.adapter_tensors import PREFIX
from headrace.engine.native.runners.decoder import FusedRunner
from headrace.engine.native.runners.graphs import CHUNKS, Passed, rows_bucket, tokens_bucket, width_bucket
from headrace.engine.native.runners.layers import Stack
from support.plain_pages import read_pages
from support.tiny_models import RunnerDriver, make, parameters, prompts, reference, skeleton

CPU = torch.device("cpu")
TOLERANCE = 1e-4


class Recorder:
    """A pretended capture."""

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0

    def __call__(self, function):
        self.captures += 1
        found = function()

        def replay() -> None:
            self.replays += 1
            fresh = function()
            for old, new in zip(found, fresh, strict=True):
                if old is not None:
                    old.copy_(new)

        return replay, found


def graphed(name: str, pages: bool = True, slots: int = 0, capture: Recorder | None = None) -> RunnerDriver:
    """`pages`: with a kernel that reads them."""
    runner = FusedRunner(skeleton(name), 256, dtype=torch.float32, device=CPU, max_adapters=slots)
    runner._cache.kernel = read_pages if pages else None
    runner.replay_with(capture)
    return RunnerDriver(runner, parameters(name), 64)


def plain(name: str, slots: int = 0) -> RunnerDriver:
    runner = FusedRunner(skeleton(name), 256, dtype=torch.float32, device=CPU, max_adapters=slots)
    return RunnerDriver(runner, parameters(name), 64)


def put(
    to: RunnerDriver, slot: int, name: str, *, seed: int = 0, rank: int = 4, only: str = "", scale: float = 0.3
) -> None:
    """A random adapter of the linear modules and experts whose names contain `only`."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for key, weight in parameters(name).items():
        if key.endswith("_proj.weight") and only in key:
            module = PREFIX + key.removesuffix(".weight")
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, weight.shape[1], generator=generator) * scale
            tensors[f"{module}.lora_B.weight"] = torch.randn(weight.shape[0], rank, generator=generator) * scale
        elif ".experts." in key and only in key:
            count, out, into = weight.shape
            module = PREFIX + key.replace("gate_up_proj", "base_layer").replace(".down_proj", "")
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank * count, into, generator=generator) * scale
            tensors[f"{module}.lora_B.weight"] = torch.randn(out, rank * count, generator=generator) * scale
    spec = AdapterSpec(name=f"adapter {slot}", rank=rank, alpha=6.0)
    to.runner.use_adapter(slot, to.runner.prepare_adapter(spec, tensors))


def both(ours: RunnerDriver, other: RunnerDriver, texts, counts, adapters=None) -> None:
    """Forwards the same stretches through two runners, and compares their log-probs."""
    adapters = adapters or [-1] * len(texts)
    mine, theirs = ([d.sequence(text, slot) for text, slot in zip(texts, adapters, strict=True)] for d in (ours, other))
    for step in counts:
        found, expected = (
            d.step([(s, n) for s, n in zip(sequences, step, strict=True) if n]).logits.log_softmax(-1)
            for d, sequences in ((ours, mine), (other, theirs))
        )
        assert (found - expected).abs().max() < TOLERANCE


STEPS = [(33, 1, 1, 2), (1, 1, 1, 1), (0, 1, 1, 0), (1, 40, 0, 1), (1, 1, 5, 1)]


@pytest.mark.parametrize("name", ["llama-tied-biased", "gemma3_text", "ministral3"])
def test_mixed_and_decoding_passes_are_replayed_with_the_same_numbers(name):
    record = Recorder()
    ours = graphed(name, capture=record)
    both(ours, plain(name), prompts(60, 60, 20, 20), STEPS)
    assert ours.runner.passes.graphed == len(STEPS) == record.replays and not ours.runner.passes.eager
    both(ours, plain(name), prompts(50, 50, 9, 9), STEPS)
    assert record.replays == 2 * len(STEPS) and record.captures == 4  # 48 (37 and 43 tokens), 4, 2 and 32


@pytest.mark.parametrize("pages", [True, False])
def test_decoding_in_buffers_of_fixed_sizes_chooses_the_same_tokens(pages):
    texts, counts = prompts(1, 40, 3, 30), (20, 3, 12, 7)
    ours = graphed("qwen2-sliding", pages)
    assert ours.generate(texts, counts) == plain("qwen2-sliding").generate(texts, counts)
    passes = ours.runner.passes
    assert passes.graphed and bool(passes.eager) != pages
    assert all("no kernel" in reason for reason in passes.eager)


def test_sizes_are_few_and_fit():
    assert [rows_bucket(n) for n in (1, 2, 3, 9, 16, 17, 64, 65, 256, 257, 1000)] == [
        *(1, 2, 4, 16, 16, 32, 64, 80, 256, 320, 1024)
    ]
    assert [width_bucket(n) for n in (1, 4, 5, 8, 9, 33)] == [4, 4, 8, 8, 16, 64]
    assert [tokens_bucket(n) for n in (2, 32, 33, 48, 49, 64, 65, 97, 3000)] == [32, 32, 48, 48, 64, 64, 96, 128, 3072]
    for bucket, most in ((rows_bucket, 40), (tokens_bucket, 16)):
        assert all(bucket(n) >= n for n in range(1, 1025)) and len({bucket(n) for n in range(1, 1025)}) < most


@pytest.mark.parametrize("pages", [True, False])
def test_the_rows_that_fill_up_see_and_change_nothing(pages):
    """Every block but the scratch block is as it was, and NaN in what filled up before does no harm."""
    ours = graphed("qwen2", pages)
    sequences = [ours.sequence(text) for text in prompts(33, 5, 8)]
    for sequence in sequences:
        ours.step([(sequence, len(sequence.tokens) - 1)])
    before = ours.runner._cache._data.clone()
    ours.runner._cache._data[:, :, 64] = torch.nan
    logits = ours.step([(sequence, 1) for sequence in sequences]).logits
    changed = (ours.runner._cache._data != before).flatten(3).any(-1).any(0).any(0)
    assert set(changed.nonzero()[:, 0].tolist()) == {*(sequence.blocks[-1] for sequence in sequences), 64}
    expected = [reference("qwen2")(torch.tensor([s.tokens])).logits[0, -1].log_softmax(-1) for s in sequences]
    assert (logits.log_softmax(-1) - torch.stack(expected)).abs().max() < TOLERANCE


def test_sizes_are_captured_with_the_first_weights_and_never_while_decoding(logged):
    record = Recorder()
    runner = FusedRunner(skeleton("llama"), 256, dtype=torch.float32, device=CPU)
    runner._cache.kernel = read_pages
    runner.replay_with(record)
    runner.expect(rows=8, tokens=40)
    ours = RunnerDriver(runner, parameters("llama"), 64)
    assert record.captures == 6  # 32 and 48 tokens; 1, 2, 4 and 8 rows
    both(ours, plain("llama"), prompts(60, 60, 20, 20)[:3], [(33, 1, 1), (1, 1, 1), (1, 30, 1)])
    assert record.captures == 6 and not logged.text
    ours.step([(ours.sequence(prompts(70)[0]), 70)])
    assert record.captures == 7 and "captured between two passes" in logged.text


def test_after_a_nap_the_sizes_that_were_used_are_captured_again():
    record = Recorder()
    ours = graphed("llama", capture=record)
    ours.runner.expect(rows=64, tokens=64)
    both(ours, plain("llama"), prompts(20, 20), [(9, 1), (1, 1)])
    ours.runner.free()
    ours.runner.allocate(64)
    ours.runner.use(ours.runner.prepare(parameters("llama")))
    assert record.captures == 4
    both(ours, plain("llama"), prompts(20, 20), [(9, 1), (1, 1)])
    assert record.captures == 4


def test_new_weights_are_copied_over_the_old_ones_and_leave_the_publishers_alone():
    ours, new, text = graphed("llama-tied-biased"), make("llama-tied-biased", seed=1), prompts(5)[0]
    first = parameters("llama-tied-biased")
    at = ours.runner._decoder.layers[0].out.weight.data_ptr()
    published = {key: value.detach().clone() for key, value in new.named_parameters()}
    ours.runner.use(ours.runner.prepare(published))
    assert ours.runner._decoder.layers[0].out.weight.data_ptr() == at
    sequence = ours.sequence(text)
    told = torch.cat([ours.step([(sequence, 1)]).logits.log_softmax(-1) for _ in text])
    assert (told - new(torch.tensor([text])).logits[0].log_softmax(-1)).abs().max() < TOLERANCE
    for ours_, theirs in ((parameters("llama-tied-biased"), first), (published, dict(new.named_parameters()))):
        assert all(torch.equal(ours_[key], theirs[key]) for key in theirs)


# --- adapters ----------------------------------------------------------------------------------------------------------


def test_rows_of_several_adapters_and_of_none_are_replayed_together():
    name, record = "qwen2", Recorder()
    ours, other = graphed(name, slots=3, capture=record), plain(name, slots=3)
    for driver in (ours, other):
        put(driver, 0, name, seed=0)
        put(driver, 2, name, seed=1, rank=2, only="q_proj")
    texts, adapters = prompts(60, 60, 20, 20), [0, -1, 2, 0]
    both(ours, other, texts, STEPS, adapters)
    assert ours.runner.passes.graphed == len(STEPS) and not ours.runner.passes.eager
    captures = record.captures
    for driver in (ours, other):  # other numbers at the same addresses, and an empty slot
        put(driver, 0, name, seed=5)
        driver.runner.use_adapter(2, None)
    both(ours, other, texts, STEPS, [0, -1, -1, 0])
    assert record.captures == captures
    for driver in (ours, other):  # more ranks and modules than there is room for
        put(driver, 1, name, seed=6, rank=7, only="down_proj")
    both(ours, other, texts, STEPS, [0, 1, -1, 1])
    assert record.captures > captures and not ours.runner.passes.eager


def test_an_adapter_that_is_not_finite_reaches_nobody_else():
    name = "qwen2"
    ours, other = graphed(name, slots=2), plain(name, slots=2)
    for driver in (ours, other):
        put(driver, 0, name)
        put(driver, 1, name, scale=float("inf"))
    texts = prompts(9, 9)
    both(ours, other, texts, [(3, 4), (1, 1)], [0, -1])
    assert not ours.runner.passes.eager
    ours.step([(ours.sequence(texts[0], 1), 1)])
    assert [reason for reason in ours.runner.passes.eager if "not finite" in reason]


# --- experts -----------------------------------------------------------------------------------------------------------


def test_experts_chosen_in_a_replayed_pass_are_reported(monkeypatch):
    monkeypatch.setattr(Stack, "static", True)  # as on a GPU that multiplies all experts at once
    ours, other = graphed("qwen3_moe"), plain("qwen3_moe")
    texts = prompts(20, 20)
    for step in ((9, 1), (1, 1)):
        found, expected = (
            driver.step([(driver.sequence(text), count) for text, count in zip(texts, step, strict=True)], routing=True)
            for driver in (ours, other)
        )
        assert found.routing.dtype == expected.routing.dtype and (found.routing == expected.routing).all()
        assert found.routing.shape[0] == sum(step)
    assert ours.step([(ours.sequence(texts[0]), 1)]).routing is None
    assert ours.runner.passes.graphed == 3


def test_adapters_of_experts_are_replayed_whatever_experts_their_rows_choose(monkeypatch):
    """Of three slots: experts and linear layers, none, and one kind of experts alone, of another rank. Then other numbers, and more ranks than there is room for."""
    monkeypatch.setattr(Stack, "static", True)
    name, record = "qwen3_moe", Recorder()
    ours, other = graphed(name, slots=3, capture=record), plain(name, slots=3)
    for driver in (ours, other):
        put(driver, 0, name, seed=0)
        put(driver, 2, name, seed=1, rank=2, only="experts.gate_up_proj")
    texts = prompts(60, 60, 20, 20)
    both(ours, other, texts, STEPS, [0, -1, 2, 0])
    assert ours.runner.passes.graphed == len(STEPS) and not ours.runner.passes.eager
    captures = record.captures
    for driver in (ours, other):
        put(driver, 0, name, seed=5, rank=3, only="experts.down_proj")
        driver.runner.use_adapter(2, None)
    both(ours, other, texts, STEPS, [0, -1, -1, 0])
    assert record.captures == captures
    for driver in (ours, other):
        put(driver, 1, name, seed=6, rank=9, only="experts")
    both(ours, other, texts, STEPS, [0, 1, -1, 1])
    assert record.captures > captures and not ours.runner.passes.eager


def test_an_adapter_of_experts_of_odd_widths_is_not_replayed_and_says_so(monkeypatch):
    monkeypatch.setattr(layers, "ALIGNED", 5)
    monkeypatch.setattr(Stack, "static", True)
    ours, other = graphed("qwen3_moe", slots=1), plain("qwen3_moe", slots=1)
    for driver in (ours, other):
        put(driver, 0, "qwen3_moe", only="experts")
    both(ours, other, prompts(9, 9), [(3, 4)], [0, -1])
    assert [reason for reason in ours.runner.passes.eager if "not multiples of 5" in reason]


def test_mixtures_are_not_captured_where_experts_are_multiplied_one_by_one():
    ours = graphed("mixtral")
    text = prompts(6)[0]
    expected = reference("mixtral")(torch.tensor([text])).logits[0].log_softmax(-1)
    assert (ours.logprobs(text, chunk=1) - expected).abs().max() < TOLERANCE
    assert ours.runner._graphs is None and not ours.runner.passes.graphed


# --- what is not replayed ----------------------------------------------------------------------------------------------


def test_a_pass_that_is_not_replayed_is_counted_and_told_once(logged):
    ours = graphed("llama")
    short = [(ours.sequence(text), 2) for text in prompts(*[2] * (CHUNKS + 5))]
    graphs = ours.runner._graphs
    assert "prompt chunks" in graphs.refusal(ours.batch(short[:40])) and not graphs.refusal(ours.batch(short[:9]))
    for _ in range(2):
        ours.runner.passes.count("a reason")
    assert logged.text.count("not replayed as a CUDA graph (a reason)") == 1
    assert ours.runner.passes.eager == {"a reason": 2} and ours.runner.passes.graphed == 0
    assert isinstance(Passed(torch.zeros(1), None), tuple)


@pytest.mark.parametrize("replayed", [True, False])
def test_tokens_that_the_host_does_not_know_yet_are_taken_from_the_device(replayed):
    """Where a pass is not replayed, they are looked at first."""
    ours, other = graphed("llama-tied-biased"), plain("llama-tied-biased")
    texts = prompts(9, 30, 4)
    mine, theirs = ([d.sequence(text, -1) for text in texts] for d in (ours, other))
    for driver, sequences in ((ours, mine), (other, theirs)):
        driver.step([(sequence, len(text) - 1) for sequence, text in zip(sequences, texts, strict=True)])
    if not replayed:
        ours.runner._graphs = None
    forward, seen = ours.runner.forward, []

    def fed(batch):
        seen.append(batch.tokens)
        return forward(replace(batch, tokens=np.zeros_like(batch.tokens), fed=torch.from_numpy(batch.tokens.copy())))

    ours.runner.forward = fed
    found, expected = (d.step([(s, 1) for s in some]).logits for d, some in ((ours, mine), (other, theirs)))
    assert seen[0].any() and (found.log_softmax(-1) - expected.log_softmax(-1)).abs().max() < TOLERANCE
