"""The engine adds adapters to its products as the trainer does: log-probs are equal bit by bit, for several adapters in one batch."""

from __future__ import annotations

import pytest
import torch
from equal_models import (
    DTYPES,
    DTYPES_AND_TEMPERATURES,
    FAMILIES,
    MIXTURES,
    PACKINGS,
    name_of,
    packs_of,
    requests_of,
    sampled,
    saved,
    scored,
    trainer_of,
)
from msgspec.structs import replace

from headrace.models.lora import LoraConfig
from headrace.trainer.model.adapters import Adapters
from headrace.trainer.model.causal_lm import enable_checkpointing
from support.few import few

LORAS = {
    "all": LoraConfig(rank=4, alpha=9.0),  # a scale that bfloat16 does not hold
    "some": LoraConfig(rank=24, targets=("q_proj", "v_proj", "up_proj", "down_proj"), rslora=True),
    "odd": LoraConfig(rank=3, rank_pattern={"k_proj": 17, "gate_proj": 33}, alpha_pattern={"o_proj": 5.0}),
}
BESIDE_EXPERTS = {
    "all": LoraConfig(rank=4, alpha=9.0),
    "some": LoraConfig(rank=24, targets=("q_proj", "v_proj"), rslora=True),
    "odd": LoraConfig(rank=3, rank_pattern={"k_proj": 17}, alpha_pattern={"o_proj": 5.0}),
}
"""The same of a mixture, whose experts have no adapters here."""


def loras_of(name):
    return BESIDE_EXPERTS if name in MIXTURES else LORAS


def adapted(name, dtype):
    """A trainer's model, and its adapters with random B, as wide as changes of a long run."""
    forward = trainer_of(name)
    adapters = Adapters(forward.model, loras_of(name), dtype, saved(name))
    torch.manual_seed(7)
    with torch.no_grad():
        for lora in LORAS:
            for key, tensor in adapters.state(lora).items():
                if "lora_B" in key:
                    tensor.normal_(std=0.05)
    return forward, adapters


def rows_of(name, adapters, dtype, temperature=1.0, **options):
    """Every request is made for each adapter, and once without any."""
    specs = {one: (lora.spec(one), adapters.state(one)) for one, lora in loras_of(name).items()}
    requests = [
        replace(request, id=f"{request.id}/{lora}", adapter=lora)
        for request in requests_of(3, temperature)
        for lora in (*LORAS, "")
    ]
    return sampled(name, dict(adapters.base()), requests, dtype, adapters=specs, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("dtype", "temperature"), DTYPES_AND_TEMPERATURES)
def test_several_adapters_in_any_pack_of_any_batch(name, temperature, dtype):
    forward, adapters = adapted(name, dtype)
    rows = rows_of(name, adapters, dtype, temperature, max_running=11)
    plain = rows.pop("")
    said = {}
    for row in rows:
        adapters.activate(row)
        for budget, share in PACKINGS:
            for pack in packs_of(rows[row], budget, share):
                assert torch.equal(scored(forward, pack, temperature, dtype), pack.sampled)
        (pack,) = packs_of(plain)
        said[row] = scored(forward, pack, temperature, dtype)
        assert (said[row] - pack.sampled).abs().max() > 0.01, "the adapter says nothing"


@pytest.mark.parametrize("name", few(["gemma3_text", "qwen3_moe"], keep=1))
@pytest.mark.parametrize("dtype", DTYPES)
def test_checkpointing_changes_neither_log_probs_nor_gradients(dtype, name):
    forward, adapters = adapted(name, dtype)
    (pack,) = packs_of(rows_of(name, adapters, dtype)["odd"])
    parameters = adapters.parameters("odd").values()
    found = []
    for _ in range(2):
        logprob = scored(forward, pack, 1.0, dtype)
        assert torch.equal(logprob, pack.sampled)
        found.append(torch.autograd.grad(logprob.sum(), [*parameters]))
        enable_checkpointing(forward.model)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_computed_with_is_what_is_published(dtype):
    """Where the dtype is narrow, the trainer rounds B before it scales it, and then once more, as the engine does."""
    forward, adapters = adapted("qwen2", dtype)
    (pack,) = packs_of(rows_of("qwen2", adapters, dtype)["all"])
    adapters.activate("all")
    with torch.no_grad():
        for parameter in adapters.parameters("all").values():
            parameter.copy_(parameter.to(dtype))
    assert torch.equal(scored(forward, pack, 1.0, dtype), pack.sampled)
    with torch.no_grad():
        next(iter(adapters.parameters("all").values())).flatten()[5] += 0.1
    assert not torch.equal(scored(forward, pack, 1.0, dtype), pack.sampled), name_of(dtype)
