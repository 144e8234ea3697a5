"""Packed trees through models: attention along each row's own path, and the gradient of the padded computation."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.algo.objective import token_mean
from headrace.core.batches import Row
from headrace.core.types import SamplingMask, TeacherTrace, TopLogprobs
from headrace.native.cuda_ops import is_right, varlen_kernel
from headrace.trainer.forward.forward import Forward, choose_forward
from headrace.trainer.forward.tree_attention import MASK_ELEMENTS, Tree, tree_attention, tree_of, varlen_of
from headrace.trainer.packing import ROOT, Pack, Segment, StepRows, pack_rows, split_ranks
from support.few import few
from support.padded_model import Padded

V = 61
CPU = torch.device("cpu")
SIZES = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GQA = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2}
LAYERS = ["sliding_attention", "full_attention"]
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", GQA, "packed trees, chunked head"),
    "gemma3": ("Gemma3Text", {**GQA, "sliding_window": 3, "layer_types": LAYERS, "query_pre_attn_scalar": 8}, "packed trees, chunked head"),
    "gemma2": ("Gemma2", {**GQA, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0}, "carried states, chunked head"),
    "granite": ("Granite", {**GQA, "logits_scaling": 4.0}, "row by row, own head"),
}  # fmt: skip


@cache
def models(name: str) -> tuple[Any, Forward]:
    """One that is left as it was, and a copy with the way that was chosen for it."""
    kind, sizes, path = MODELS[name]
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    forward = choose_forward(deepcopy(model))
    assert forward.path == path
    return model, forward


def row(prompt: Sequence[int], tokens: Sequence[int], seed: int = 0, mask: str = "") -> Row:
    """With advantages that differ from token to token."""
    rng, count = random.Random(str((prompt, tokens, seed))), len(tokens)
    advantages = tuple(rng.uniform(-2, 2) for _ in tokens)
    kept = tuple(c == "1" for c in mask or "1" * count)
    return Row(tuple(prompt), tuple(tokens), (-1.0,) * count, advantages, kept, (0,) * count)


def group() -> list[Row]:
    return [row((1, 2, 3, 4), (5 + i, *range(i, 2 * i + 1))) for i in range(5)]


def episode() -> list[Row]:
    """Two paths that share two turns, a third that forks inside the second completion, another agent's."""
    start, tool = (7, 8, 9), (40, 41)
    return [
        row((1, 2), (*start, *tool, 10, 11, 12), mask="11100111"),
        row((1, 2), (*start, *tool, 10, 11, 13, 14), mask="000000011"),
        row((1, 2), (*start, 50, 51, 52), mask="000111"),
        row((1, 2, 3), (7, 8)),
    ]


def alike() -> list[Row]:
    return [row((1, 2), (3, 4, 5), seed) for seed in range(3)] + [row((1, 2), (3, 4)), row((1, 2), (3, 4, 5, 6, 7))]


CASES = {"group": group, "episode": episode, "alike": alike}


def ours(forward: Forward, packs: Sequence[Pack]) -> dict[str, Tensor]:
    """The gradient of Σ weight · advantage · log-prob."""
    for pack in packs:
        scores = forward.logprobs(pack, 0.8, torch.float32)
        (scores.logprob * pack.advantage * pack.weight).sum().backward()
    return taken(forward.model)


def padded(model: Any, rows: Sequence[Row]) -> dict[str, Tensor]:
    ids = [one.prompt + one.tokens for one in rows]
    longest, total = max(map(len, ids)), sum(sum(one.mask) for one in rows)
    tokens = torch.tensor([one + (0,) * (longest - len(one)) for one in ids])
    attention = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in ids])
    logp = torch.log_softmax(model(input_ids=tokens, attention_mask=attention, use_cache=False).logits / 0.8, -1)
    loss = torch.zeros(())
    for i, one in enumerate(rows):
        for t, token in enumerate(one.tokens):
            loss = loss + one.mask[t] * one.advantages[t] / total * logp[i, len(one.prompt) + t - 1, token]
    loss.backward()
    return taken(model)


def taken(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    scale = max(1.0, *(float(grad.abs().max()) for grad in expected.values()))
    assert actual.keys() == expected.keys() and max(float(grad.abs().max()) for grad in expected.values()) > 1e-4
    for name, grad in expected.items():
        assert (actual[name] - grad).abs().max() <= 1e-5 * scale, name


# -- gradients --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", few(CASES, keep=3))
@pytest.mark.parametrize("budget", [1000, 9])
def test_gradients_equal_the_padded_computation(name, case, budget):
    model, forward = models(name)
    rows = CASES[case]()
    plan = pack_rows(StepRows(rows, token_mean, constant=0, budget=budget, step=0, share=forward.packed), least_saved=1)
    close(ours(forward, plan.packs), padded(model, rows))


token_lists = st.lists(st.integers(0, 2), min_size=1, max_size=8)
tries = st.lists(st.tuples(st.integers(1, 4), token_lists), min_size=1, max_size=6)


def grown(given_rows: list[tuple[int, list[int]]]) -> list[Row]:
    return [row((9, 9, 9, 9)[:prompt], tokens, seed) for seed, (prompt, tokens) in enumerate(given_rows)]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@settings(max_examples=15)
@given(given_rows=tries, budget=st.integers(1, 40))
def test_gradients_of_random_tries(name, given_rows, budget):
    model, forward = models(name)
    rows = grown(given_rows)
    close(
        ours(forward, pack_rows(StepRows(rows, token_mean, constant=0, budget=budget, step=0), least_saved=1).packs),
        padded(model, rows),
    )


@settings(max_examples=15)
@given(given_rows=tries, budget=st.integers(1, 40), ranks=st.integers(1, 4))
def test_gradients_summed_over_ranks_are_those_of_one(given_rows, budget, ranks):
    """Microbatches that fill up are forwarded like the others, and add nothing."""
    _, forward = models("llama")
    rows = grown(given_rows)
    expected = ours(forward, pack_rows(StepRows(rows, token_mean, constant=0, budget=budget, step=0)).packs)
    plans = split_ranks(StepRows(rows, token_mean, constant=0, budget=budget, step=0), ranks)
    parts = [ours(forward, plan.packs) for plan in plans]
    close({name: sum((part[name] for part in parts), torch.zeros(())) for name in expected}, expected)


# -- scores -----------------------------------------------------------------------------------------------------------------


def annotated() -> list[Row]:
    """With sampling masks (the label outside once) and a teacher's tokens, on every second row."""
    rows = []
    for i, one in enumerate(group()):
        count = len(one.tokens)
        kept = [sorted({token, 1, 60}) if t % 2 else [] for t, token in enumerate(one.tokens)]
        kept[0] = [0, 59]
        ids = torch.tensor([[x for row_ids in kept for x in row_ids]], dtype=torch.int32)
        offsets = torch.tensor([0, *map(len, kept)]).cumsum(0)
        top = torch.tensor([[token, 33, 7] for token in one.tokens], dtype=torch.int32)
        traced = TopLogprobs(3, top.numpy().tobytes(), torch.full((count, 3), -2.0).numpy().tobytes())
        columns = [getattr(one, name) for name in one.__struct_fields__[:6]]
        mask = SamplingMask(ids.numpy().tobytes(), offsets.numpy().tobytes())
        teacher = TeacherTrace("teacher", (0,) * count, (-1.0,) * count, traced)
        rows.append(Row(*columns, sampling_mask=mask, teacher=teacher) if i % 2 else one)
    return rows


@pytest.mark.parametrize("name", MODELS)
def test_masks_and_a_teachers_tokens_on_every_way(name):
    model, forward = models(name)
    rows = annotated()
    (pack,) = pack_rows(StepRows(rows, token_mean, constant=0, budget=1000, step=0, share=forward.packed)).packs
    scores = forward.logprobs(pack, 0.7, torch.float32)
    assert scores.outside == 2 and scores.top is not None and scores.top.shape == (len(pack.target), 3)
    place = 0
    order = [int(pack.target[(pack.sequence == sequence).nonzero()[0, 0]]) - 5 for sequence in range(len(rows))]
    assert sorted(order) == list(range(len(rows)))
    for i in order:
        one = rows[i]
        logits = model(torch.tensor([one.prompt + one.tokens])).logits[0].detach().double() / 0.7
        for t, token in enumerate(one.tokens):
            mine = logits[len(one.prompt) + t - 1]
            allowed = sorted({token, 1, 60}) if i % 2 and t % 2 else list(range(V))
            probs = mine.softmax(0)
            assert float(scores.logprob[place].detach()) == pytest.approx(
                float(mine[token] - mine[allowed].logsumexp(0)), abs=1e-5
            )
            assert float(scores.entropy[place]) == pytest.approx(-float((probs * probs.log()).sum()), abs=1e-4)
            if i % 2:
                expected = (mine * 0.7).log_softmax(0)[[token, 33, 7]]  # distributions are compared at temperature 1
                torch.testing.assert_close(scores.top[place].double(), expected, atol=1e-5, rtol=0)
            place += 1
    assert place == len(pack.target)
    assert scores.logprob.requires_grad and scores.top.requires_grad and scores.entropy.requires_grad


def test_a_soft_cap_that_shows_on_large_logits_only_is_not_missed():
    """Logits of 0.02 under a cap of 30: the model's config does not tell of it, its output does once states are large."""
    model, _ = deepcopy(models("gemma2"))
    model.config.final_logit_softcapping = 30.0
    model.get_output_embeddings().weight.data *= 1e-3
    assert choose_forward(model).chunked_head

    class Silent(type(model.config)):  # type: ignore[misc]
        """Keeps its cap to the model."""

        def get_text_config(self, *args: Any, **kwargs: Any) -> Any:
            return transformers.LlamaConfig(**GQA)

    model.config.__class__ = Silent
    assert not choose_forward(model).chunked_head


# -- attention --------------------------------------------------------------------------------------------------------------


def random_segments(rng: random.Random, count: int) -> tuple[Segment, ...]:
    """Trees in preorder: each new segment hangs on the last one or on one of its ancestors, or starts a tree."""
    segments: list[Segment] = []
    chain: list[int] = []
    for number in range(count):
        chain = chain[: rng.randint(0, len(chain))]
        start = segments[-1].end if segments else 0
        segments.append(Segment(start, rng.randint(1, 6), chain[-1] if chain else ROOT))
        chain.append(number)
    return tuple(segments)


def dense(segments: Sequence[Segment], q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """[1, N, H, D] from a mask that is written down token by token."""
    seen = torch.zeros(q.shape[2], q.shape[2], dtype=torch.bool)
    for place, path in paths(segments):
        seen[place, path[-window:] if window else path] = True
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3) / q.shape[3] ** 0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(3) @ v).transpose(1, 2)


def paths(segments: Sequence[Segment]) -> Iterator[tuple[int, list[int]]]:
    above: list[list[int]] = []
    for segment in segments:
        before = [] if segment.parent == ROOT else above[segment.parent]
        above.append([*before, *range(segment.start, segment.end)])
        for place in range(segment.start, segment.end):
            yield place, [*before, *range(segment.start, place + 1)]


def heads(count: int) -> list[Tensor]:
    torch.manual_seed(count)
    return [torch.randn(1, h, count, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]


@settings(max_examples=40)
@given(
    st.randoms(use_true_random=False),
    st.integers(1, 9),
    st.sampled_from([0, 2, 5]),
    st.sampled_from([-(10**9), 0, 100, 10**9]),
)
def test_every_cut_of_a_tree_sees_what_a_dense_mask_shows(rng, count, window, call_price):
    segments = random_segments(rng, count)
    tree = tree_of(segments, CPU, call_price)
    roots = sum(segment.parent == ROOT for segment in segments)
    assert {-(10**9): count, 10**9: roots}.get(call_price, len(tree.blocks)) == len(tree.blocks)
    inputs = heads(segments[-1].end)
    expected = dense(segments, *inputs, window)
    slope = torch.randn_like(expected)
    actual, _ = tree_attention(torch.nn.Module(), *inputs, None, sliding_window=window or None, tree=tree)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)  # short calls are computed in float32
    for one, other in zip(gradients(actual, slope, inputs), gradients(expected, slope, inputs), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
    spread = varlen_of(segments, CPU).attend(Padded(), *inputs, scaling=None, window=window)
    torch.testing.assert_close(spread, expected)
    for one, other in zip(gradients(spread, slope, inputs), gradients(expected, slope, inputs), strict=True):
        torch.testing.assert_close(one, other)


def gradients(out: Tensor, slope: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad((out * slope).sum(), inputs, retain_graph=True)


def test_a_varlen_kernel_is_tried_before_it_is_trusted():
    assert is_right(Padded(), CPU, torch.float32) and is_right(Padded(), CPU, torch.bfloat16, 128)
    assert not is_right(Padded(lower_right=False), CPU, torch.float32)
    assert not is_right(lambda *given, scale, reach: Padded()(*given, scale=scale, reach=0), CPU, torch.float32)
    assert varlen_kernel(CPU, torch.bfloat16, 64) is None


def calls(tree: Tree) -> list[int]:
    """Queries of each."""
    return [len(block.asking) for block in tree.blocks]


def test_which_calls_a_tree_is_cut_into():
    short = (Segment(0, 40), *(Segment(40 + 10 * i, 10, 0) for i in range(8)))
    assert calls(tree_of(short, CPU)) == [120]  # nine calls would cost more than the pairs that nobody sees
    long = (Segment(0, 200), *(Segment(200 + 200 * i, 200, 0) for i in range(8)))
    assert calls(tree_of(long, CPU)) == [200] * 9
    template = [Segment(0, 30)]  # eight groups behind a template: one call for each
    for _ in range(8):
        prompt, start = len(template), template[-1].end
        template += [Segment(start, 15, 0), *(Segment(start + 15 + 15 * i, 15, prompt) for i in range(8))]
    assert calls(tree_of(template, CPU)) == [30] + [135] * 8
    assert calls(tree_of((Segment(0, 3000), Segment(3000, 5, 0), Segment(3005, 5, 0)), CPU)) == [3000, 5, 5]


def test_plain_causal_attention_needs_no_mask():
    (alone,) = tree_of((Segment(0, 50),), CPU).blocks
    for window in (None, 50):
        (part,) = alone.parts(window, torch.float32)
        assert part.mask is None and part.queries == part.keys == slice(0, 50)
    (part,) = alone.parts(3, torch.float32)
    assert part.mask is not None and (part.mask == 0).sum(1).tolist() == [1, 2, *[3] * 48]


@pytest.mark.parametrize(
    "segments", [(Segment(0, 3000),), (Segment(0, 2500), Segment(2500, 400, 0), Segment(2900, 100, 0))]
)
def test_long_masks_are_made_in_parts_of_what_can_be_seen(segments):
    tree = tree_of(segments, CPU)
    for block in tree.blocks:
        parts = block.parts(100, torch.float32)
        assert [part.queries.start for part in parts[1:]] == [part.queries.stop for part in parts[:-1]]
        for part in parts:
            assert part.mask is not None and part.mask.numel() <= MASK_ELEMENTS
            assert part.mask.shape[1] <= part.mask.shape[0] + 99
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 3000, 4) for _ in range(3))
    with torch.no_grad():
        actual, _ = tree_attention(torch.nn.Module(), q, k, v, None, sliding_window=100, tree=tree)
        torch.testing.assert_close(actual, dense(segments, q, k, v, 100), atol=1e-5, rtol=1e-4)
