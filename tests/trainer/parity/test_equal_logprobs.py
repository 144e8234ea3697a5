"""Engine and trainer compute one forward pass: at equal weights log-probs are equal, bit by bit, whatever a batch or a
pack is made of."""

from __future__ import annotations

from itertools import starmap

import pytest
import torch
from equal_models import (
    DTYPES,
    FAMILIES,
    PACKINGS,
    engine_of,
    packs_of,
    requests_of,
    sampled,
    sampled_by,
    scored,
    trainer_of,
)

from headrace.models.resolve import resolve_model
from headrace.trainer.forward.forward import choose_forward
from headrace.trainer.forward.fused_model import fuse
from headrace.trainer.model.causal_lm import enable_checkpointing, load_model
from support.few import few


def rows_of(name, forward, requests, dtype, **options):
    return sampled(name, dict(forward.model.named_parameters()), requests, dtype, **options)[""]


@pytest.mark.parametrize("name", few(FAMILIES, keep=3))
@pytest.mark.parametrize("temperature", few([0.7, 1.0], keep=1))
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_any_pack_of_any_batch(name, temperature, dtype):
    forward = trainer_of(name)
    rows = rows_of(name, forward, requests_of(3, temperature), dtype)
    for budget, share in PACKINGS:
        packs = packs_of(rows, budget, share)
        assert share is False or max(len(pack.segments) for pack in packs) > 3
        for pack in packs:
            assert torch.equal(scored(forward, pack, temperature, dtype), pack.sampled)


@pytest.mark.parametrize("name", few(["qwen3", "qwen3_moe-mixed", "mixtral", "olmoe"], keep=2))
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_and_other_sequences_change_nothing(dtype, name):
    forward = trainer_of(name, seed=1)
    requests = requests_of(5, 1.0)
    for options in ({"prefill_chunk": 5, "max_running": 1}, {"prefill_chunk": 200, "max_running": 15}):
        (pack,) = packs_of(rows_of(name, forward, requests, dtype, **options))
        assert torch.equal(scored(forward, pack, 1.0, dtype), pack.sampled)


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_and_checkpointing_change_nothing(dtype, name):
    forward = trainer_of(name)
    (pack,) = packs_of(rows_of(name, forward, requests_of(7, 1.0), dtype))
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(scored(forward, pack, 1.0, dtype), pack.sampled)
    finally:
        torch.set_num_threads(before)
    enable_checkpointing(forward.model)
    assert torch.equal(scored(forward, pack, 1.0, dtype), pack.sampled)


@pytest.mark.parametrize(
    "name, place",
    few(
        starmap(
            pytest.param,
            [
                ("llama3-rope", "model.norm.weight"),
                ("llama3-rope", "model.layers.1.mlp.down_proj.weight"),
                ("olmoe", "model.layers.0.mlp.gate.weight"),
                ("olmoe", "model.layers.1.mlp.experts.gate_up_proj"),
                ("mixtral", "model.layers.0.mlp.experts.down_proj"),
            ],
        ),
        keep=2,
    ),
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_weight_that_differs_shows(name, place, dtype):
    forward = trainer_of(name)
    (pack,) = packs_of(rows_of(name, forward, requests_of(3, 1.0), dtype))
    with torch.no_grad():
        forward.model.get_parameter(place).flatten()[3] += 0.1
    assert not torch.equal(scored(forward, pack, 1.0, dtype), pack.sampled)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype == torch.bfloat16])
def test_the_head_is_packed_once_for_each_of_its_values(dtype):
    forward = trainer_of("llama3-rope")
    head = forward.model.get_output_embeddings()
    (pack,) = packs_of(rows_of("llama3-rope", forward, requests_of(3, 1.0), dtype))
    found = []
    for _ in range(3):
        scored(forward, pack, 1.0, dtype)
        assert head.packed._packed_from[0] == (head.weight.data_ptr(), head.weight._version)
        found.append(head.packed._packed[0].clone())
        with torch.no_grad():
            head.weight.mul_(1.5)
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_real_model(dtype):
    """Its residual stream has numbers of thousands, beside which sums round more than those of tiny models."""
    directory = resolve_model("smollm2-135m-instruct")
    forward = choose_forward(load_model(directory, torch.device("cpu")))
    assert "layers" in fuse(forward)
    engine = engine_of(directory, dict(forward.model.named_parameters()), dtype, kv_gib=0.1)
    (pack,) = packs_of(sampled_by(engine, requests_of(3, 1.0))[""])
    assert torch.equal(scored(forward, pack, 1.0, dtype), pack.sampled)
