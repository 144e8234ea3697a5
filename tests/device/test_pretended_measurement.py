"""What `auto` measures on a GPU, on a pretended one: every size has a rate, and what finds no room ends its list."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pretend_cuda import DEVICE, PretendedCuda, pretended_cuda

from headrace.engine.native.runners import decoder
from headrace.run.auto import gpu_probe
from headrace.run.auto.gpu_probe import measure_gpu
from headrace.run.auto.gpu_rates import GpuRequest

SMALL: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedCuda]:
    """Nothing is captured: passes run in the buffers of their size. One round of a clock is enough."""
    monkeypatch.setattr(decoder, "on_cuda", lambda device: None)
    monkeypatch.setattr("headrace.run.auto.probe.ROUNDS", 1)
    monkeypatch.setattr("headrace.run.auto.probe.ENOUGH", 0.0)
    yield from pretended_cuda(monkeypatch)


def asked(**changes: Any) -> GpuRequest:
    sizes = {"rows": (2, 5), "passes": (9, 130), "microbatches": (22, 60), "dtype": "float32", "compile": False}
    return GpuRequest(config=SMALL, **{**sizes, **changes})


def test_every_size_has_a_rate(cuda: PretendedCuda) -> None:
    found = measure_gpu(asked(), DEVICE)
    assert cuda.calls > 100 and not found.problem and not found.notes
    assert [list(rates) for rates in (found.rows, found.passes, found.microbatches)] == [[2, 5], [9, 130], [22, 60]]
    assert min([*found.rows.values(), *found.passes.values(), *found.microbatches.values()]) > 0 and not found.compiled


def test_a_size_without_room_ends_its_list_and_a_part_that_is_elsewhere_has_none(
    cuda: PretendedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        gpu_probe, "SHARE", 9 * 5 * 2 * 2 * 32 * 2 * 8 * 4 / gpu_probe.torch.cuda.mem_get_info(DEVICE)[0]
    )
    found = measure_gpu(asked(rows=(2, 5, 4000), passes=(9,), microbatches=()), DEVICE)
    assert list(found.rows) == [2, 5] and list(found.passes) == [9] and not found.microbatches
    assert not measure_gpu(asked(rows=(), passes=(), microbatches=(22,)), DEVICE).rows


def test_what_a_model_of_its_own_cache_takes_is_not_measured_and_said(cuda: PretendedCuda) -> None:
    found = measure_gpu(asked(path="cache", microbatches=()), DEVICE)
    assert not found.rows and "engine was not measured" in found.words


@pytest.mark.slow
def test_compiled_layers_are_measured_with_the_microbatch_that_is_enough() -> None:
    """By torch's own tracing, on a CPU: a pretended device cannot be traced."""
    found = measure_gpu(asked(rows=(), compile=True), torch.device("cpu"), backend="eager")
    assert len(found.compiled) == 1 and set(found.compiled) <= {22, 60} and not found.notes
