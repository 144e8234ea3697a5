"""Tokens that were drawn from a part of the vocabulary: the trainer gives them the sampler's log-probs, bit by bit, over the recorded masks."""

from __future__ import annotations

from array import array
from itertools import pairwise

import pytest
import torch
from equal_models import (
    DTYPES,
    DTYPES_AND_TEMPERATURES,
    FAMILIES,
    PACKINGS,
    packs_of,
    requests_of,
    sampled,
    scored,
    trainer_of,
)
from msgspec.structs import replace

from headrace.core.batches import Row
from headrace.core.types import SamplingMask
from support.few import few

FILTERS = {
    "top-p": {"top_p": 0.8},
    "top-k": {"top_k": 5},
    "min-p": {"min_p": 0.05},
    "all three": {"top_p": 0.95, "top_k": 40, "min_p": 0.01},
    "hardly any": {"min_p": 3e-4},  # cuts a few tokens at some positions, and nothing at others
    "nothing cut": {"top_k": 100},
}


def rows_of(name, forward, dtype, temperature, settings):
    """Rows with filters in one batch with others; those with filters."""
    requests = [
        replace(request, id=f"{request.id}/{cut}", return_mask=True, sampling=replace(request.sampling, **own))
        for request in requests_of(3, temperature)
        for cut, own in (("cut", settings), ("whole", {}))
    ]
    return sampled(name, dict(forward.model.named_parameters()), requests, dtype)[""]


def counts_of(rows):
    """[T] of all rows: how many ids were kept."""
    offsets = [array("q", row.sampling_mask.offsets) for row in rows]
    return [end - start for own in offsets for start, end in pairwise(own)]


@pytest.mark.parametrize("filters", few(FILTERS, keep=2))
@pytest.mark.parametrize(("dtype", "temperature"), DTYPES_AND_TEMPERATURES)
def test_of_what_filters_kept(filters, temperature, dtype):
    forward = trainer_of("llama3-rope")
    rows = rows_of("llama3-rope", forward, dtype, temperature, FILTERS[filters])
    cut = [count for count in counts_of(rows) if count]
    assert bool(cut) == (filters != "nothing cut") and all(count < 100 for count in cut)
    for budget, share in PACKINGS:
        for pack in packs_of(rows, budget, share):
            assert torch.equal(scored(forward, pack, temperature, dtype), pack.sampled)


@pytest.mark.parametrize("name", few(FAMILIES, keep=3))
@pytest.mark.parametrize("dtype", DTYPES)
def test_of_every_family(name, dtype):
    forward = trainer_of(name)
    (pack,) = packs_of(rows_of(name, forward, dtype, 0.9, FILTERS["all three"]))
    assert torch.equal(scored(forward, pack, 0.9, dtype), pack.sampled)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mask_of_the_next_token_or_without_one_id_shows(dtype):
    forward = trainer_of("qwen2")
    rows = rows_of("qwen2", forward, dtype, 1.0, FILTERS["top-p"])
    for wrong in (moved, one_less):
        (pack,) = packs_of([replace(row, sampling_mask=wrong(row)) for row in rows])
        assert (scored(forward, pack, 1.0, dtype) != pack.sampled).sum() > 10


def moved(row: Row) -> SamplingMask:
    """Every position has the mask of the position before it."""
    ids, offsets = array("i", row.sampling_mask.token_ids), array("q", row.sampling_mask.offsets)
    return SamplingMask(ids.tobytes(), array("q", [0, *offsets[:-1]]).tobytes())


def one_less(row: Row) -> SamplingMask:
    """The first id of every mask of several is missing."""
    ids, offsets = array("i", row.sampling_mask.token_ids), array("q", row.sampling_mask.offsets)
    parts = [ids[start:end] for start, end in pairwise(offsets)]
    parts = [part[1:] if len(part) > 1 else part for part in parts]
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + len(part))
    return SamplingMask(b"".join(part.tobytes() for part in parts), array("q", ends).tobytes())


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_the_formula(dtype):
    """Only the value is taken from the kernels' sums: the gradient is that of PyTorch's over the same mask."""
    forward = trainer_of("qwen3")
    (pack,) = packs_of(rows_of("qwen3", forward, dtype, 1.0, FILTERS["top-k"]))
    norm = forward.model.model.norm.weight
    (ours,) = torch.autograd.grad(scored(forward, pack, 1.0, dtype).sum(), norm)
    hidden = forward.hidden(pack) if dtype == torch.float32 else hidden_in_bfloat16(forward, pack)
    logits = (hidden[pack.predictor].float() @ forward.model.lm_head.weight.to(dtype).float().t()).double()
    kept = torch.ones_like(logits, dtype=torch.bool)
    for row, (start, end) in enumerate(zip(pack.kept.offsets[:-1], pack.kept.offsets[1:], strict=True)):
        if end > start:
            kept[row] = False
            kept[row, pack.kept.ids[start:end]] = True
    plain = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)[range(len(pack.target)), pack.target]
    (theirs,) = torch.autograd.grad(plain.sum(), norm)
    assert (ours - theirs).norm() < (0.02 if dtype == torch.bfloat16 else 1e-4) * theirs.norm()


def hidden_in_bfloat16(forward, pack):
    with torch.autocast("cpu", torch.bfloat16):
        return forward.hidden(pack)
