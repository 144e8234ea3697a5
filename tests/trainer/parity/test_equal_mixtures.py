"""Mixtures of experts whose routing was recorded: the trainer computes the log-probs of the sampler, bit by bit, over the recorded choice.
(Live routing: `test_equal_logprobs.py`, with all other families.)"""

from __future__ import annotations

import pytest
import torch
from equal_models import (
    DTYPES,
    MIXTURES,
    PACKINGS,
    engine_of,
    packs_of,
    published,
    requests_of,
    sampled,
    sampled_by,
    saved,
    scored,
    trainer_of,
)
from msgspec.structs import replace

from headrace.core.weights import WeightUpdate
from headrace.trainer.forward.routing import RoutingReplay
from headrace.trainer.model.causal_lm import enable_checkpointing
from support.few import few


def rows_of(name, forward, dtype, temperature=1.0, **options):
    requests = [replace(request, return_routing=True) for request in requests_of(3, temperature)]
    return sampled(name, dict(forward.model.named_parameters()), requests, dtype, routing=True, **options)[""]


@pytest.mark.parametrize("name", few(MIXTURES, keep=1))
@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_experts_in_any_pack(name, dtype):
    forward = trainer_of(name)
    replay = RoutingReplay(forward, dtype)
    rows = rows_of(name, forward, dtype, 0.7, prefill_chunk=9)
    for budget, share in PACKINGS:
        for pack in packs_of(rows, budget, share):
            with replay(pack) as replayed:
                assert torch.equal(scored(forward, pack, 0.7, dtype), pack.sampled)
            assert replayed.missing < replayed.routed / 4, "nothing was recorded"


@pytest.mark.parametrize("name", ["qwen3_moe", "olmoe"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_experts_have_the_gradients_of_live_ones_which_are_the_same(name, dtype):
    forward = trainer_of(name)
    replay = RoutingReplay(forward, dtype)
    (pack,) = packs_of(rows_of(name, forward, dtype))
    found = []
    for recorded, layers in ((False, forward.model), (True, forward.model), (True, enable_checkpointing)):
        if layers is enable_checkpointing:
            enable_checkpointing(forward.model, replay.checkpoint_contexts)
        forward.model.zero_grad()
        if recorded:
            with replay(pack):
                scored(forward, pack, 1.0, dtype).sum().backward()
        else:
            scored(forward, pack, 1.0, dtype).sum().backward()
        found.append({key: p.grad.clone() for key, p in forward.model.named_parameters()})
    assert all(torch.equal(found[0][key], other[key]) for other in found[1:] for key in found[0] if "embed" not in key)


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_choice_shows(dtype):
    """The second expert of each place is the one after it: weights and outputs are others."""
    forward = trainer_of("olmoe")
    replay = RoutingReplay(forward, dtype)
    (pack,) = packs_of(rows_of("olmoe", forward, dtype))
    wrong = pack.routing.clone()
    wrong[..., 1] = (wrong[..., 0] + 1) % 8
    pack.routing.copy_(torch.where(pack.routing < 0, pack.routing, wrong))
    with replay(pack):
        assert (scored(forward, pack, 1.0, dtype) != pack.sampled).float().mean() > 0.9


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_after_a_swap(name, dtype):
    """The engine has other experts and another router from the next pass on, and so have the log-probs."""
    forward = trainer_of(name)
    engine = engine_of(saved(name), dict(forward.model.named_parameters()), dtype)
    for version in (1, 2):
        with torch.no_grad():
            for parameter in forward.model.parameters():
                parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
        update = WeightUpdate(version=version, kind="full", fingerprint="", nbytes=0, seconds=0.0)
        engine.swap(engine.prepare(update, published(dict(forward.model.named_parameters()), dtype)))
        requests = [replace(request, id=f"{version}/{request.id}") for request in requests_of(version, 1.0)]
        (pack,) = packs_of(sampled_by(engine, requests)[""])
        assert torch.equal(scored(forward, pack, 1.0, dtype), pack.sampled)
