"""Tokens that were drawn under a constraint: the trainer gives them the sampler's log-probs bit by bit, and the gradient of a reference in
float64 that knows the language by itself."""

from __future__ import annotations

import json
import string
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from equal_models import DTYPES, DTYPES_AND_TEMPERATURES, ODD, PACKINGS, engine_of, packs_of, sampled_by, scored
from msgspec.structs import replace
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headrace.core.batches import Row
from headrace.core.types import Constraint, Request, Sampling
from headrace.trainer.forward.forward import Forward, choose_forward
from headrace.trainer.forward.fused_model import fuse
from headrace.trainer.model.causal_lm import load_model
from support.tiny_models import make

EOS = 99
LETTERS = [*string.printable[:94], "Ġ", "ab", "abc", "tr", '{"']
TEXTS = ["abcab", "ab", "abc abc", "tree", '{"a', "z" * 9]
CONSTRAINTS = {
    "choices": Constraint("choice", json.dumps(TEXTS)),
    "schema": Constraint(
        "json_schema", '{"type": "object", "additionalProperties": {"type": ["string", "integer"], "maxLength": 6}}'
    ),
    "nearly everything": Constraint("regex", "[^~]{1,30}"),
}
PROMPT = tuple(range(3, 40))
_saved = TemporaryDirectory(prefix="headrace-constrained-")


@cache
def saved() -> Path:
    directory = Path(_saved.name)
    model = make("llama3-rope", **{**ODD, "head_dim": 32, "eos_token_id": EOS, "bos_token_id": None})
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(directory)
    merges = [("a", "b"), ("ab", "c"), ("t", "r"), ("{", '"')]
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(LETTERS)}, merges=merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"eos_token": "<eos>"})
    assert fast.eos_token_id == EOS
    fast.save_pretrained(directory)
    return directory


def trainer() -> Forward:
    forward = choose_forward(load_model(saved(), torch.device("cpu")))
    assert {"layers", "attention"} <= set(fuse(forward))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in forward.model.parameters():
            parameter.mul_(1 + 0.01 * torch.randn_like(parameter))
    return forward


def rows_of(forward: Forward, dtype: torch.dtype, temperature: float, **more) -> list[Row]:
    """Constrained rows, beside others that are not, of prompts that share a beginning."""
    requests = [
        Request(
            f"{name}/{number}",
            PROMPT[: 31 + number % 3],
            Sampling(max_tokens=25, temperature=temperature, seed=number, constraint=constraint, **more),
            return_mask=True,
        )
        for name, constraint in (CONSTRAINTS | {"free": None}).items()
        for number in range(4)
    ]
    engine = engine_of(saved(), dict(forward.model.named_parameters()), dtype)
    return sampled_by(engine, requests)[""]


@pytest.mark.parametrize(
    "more", [{}, {"top_p": 0.8, "top_k": 30}, {"min_p": 1e-6}], ids=["alone", "beside filters", "beside idle filters"]
)
@pytest.mark.parametrize(("dtype", "temperature"), DTYPES_AND_TEMPERATURES)
def test_of_what_constraints_left(temperature, dtype, more):
    forward = trainer()
    rows = rows_of(forward, dtype, temperature, **more)
    with_sets = sum(bool(row.sampling_mask.sets) for row in rows)
    assert with_sets == 12 or (with_sets and "min_p" in more) or "top_k" in more, (
        "what filters cut nothing more from is a set"
    )
    for budget, share in PACKINGS:
        for pack in packs_of(rows, budget, share):
            assert torch.equal(scored(forward, pack, temperature, dtype), pack.sampled)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mask_that_is_dropped_or_of_another_position_shows(dtype):
    forward = trainer()
    rows = [row for row in rows_of(forward, dtype, 1.0) if row.sampling_mask.sets]
    dropped = [replace(row, sampling_mask=None) for row in rows]
    moved = [
        replace(
            row,
            sampling_mask=replace(
                row.sampling_mask, set_of=row.sampling_mask.set_of[:4] + row.sampling_mask.set_of[:-4]
            ),
        )
        for row in rows
    ]
    for wrong in (dropped, moved):
        (pack,) = packs_of(wrong)
        assert (scored(forward, pack, 1.0, dtype) != pack.sampled).sum() > 10


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_a_reference_in_float64_that_knows_the_language(dtype):
    """The reference works out what may follow from the texts themselves, without the recorded sets."""
    forward = trainer()
    rows = rows_of(forward, dtype, 1.0)
    chosen = [
        row
        for row in rows
        if "".join(LETTERS[token] for token in row.tokens[:-1]) in [text.replace(" ", "Ġ") for text in TEXTS]
    ]
    chosen = [row for row in chosen if row.tokens[-1] == EOS]
    assert len(chosen) >= 4
    (pack,) = packs_of(chosen)
    head = forward.model.lm_head.weight
    (ours,) = torch.autograd.grad(scored(forward, pack, 1.0, dtype).sum(), head)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16), torch.no_grad():
        hidden = forward.hidden(pack)[pack.predictor].double()
    weight = head.detach().to(dtype).double().requires_grad_()
    logits = hidden.to(dtype).double() @ weight.t()
    logprobs = []
    for place, (row, position) in enumerate((one, at) for one in chosen for at in range(len(one.tokens))):
        possible = may_follow("".join(LETTERS[token] for token in row.tokens[:position]))
        logprobs.append(logits[place, possible].log_softmax(0)[possible.index(row.tokens[position])])
    theirs = torch.autograd.grad(torch.stack(logprobs).sum(), weight)[0]
    assert torch.stack(logprobs).tolist() == pytest.approx(pack.sampled.tolist(), abs=1e-5)
    assert (ours - theirs).norm() < (0.02 if dtype == torch.bfloat16 else 1e-5) * theirs.norm()


def may_follow(message: str) -> list[int]:
    texts = [text.replace(" ", "Ġ") for text in TEXTS]
    going_on = [
        number for number, letter in enumerate(LETTERS) if any(text.startswith(message + letter) for text in texts)
    ]
    return going_on + ([EOS] if message in texts else [])
