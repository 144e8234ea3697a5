"""Sampling against numpy in float64: the sets that filters keep, the distribution of what is drawn, the log-probs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.native.draws import Drawn, Settings, _mix, uniforms
from headrace.engine.native.sampler import BLOCK, CHUNK, sample, token_logprobs
from support.few import few
from support.sampling import random_logits, reference, same

CASES = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.5},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 2.0, "top_k": 3, "top_p": 0.99},
]


@pytest.mark.parametrize("case", few(CASES, keep=3), ids=str)
def test_frequencies_follow_the_distribution(case):
    vocabulary, draws = 300, 40_000  # 300: more than one block, and a last block that is not full
    assert vocabulary > BLOCK
    logits = random_logits(1, vocabulary)
    wanted = reference(logits[0].numpy(), **case)
    drawn = sample(logits.expand(draws, vocabulary), same(draws, seed=np.arange(draws), **case))
    counts = np.bincount(drawn.tokens, minlength=vocabulary)
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(wanted))
    frequent = wanted * draws >= 5
    chi = ((counts - wanted * draws) ** 2 / np.maximum(wanted * draws, 1e-9))[frequent].sum()
    freedom = frequent.sum()
    assert chi < freedom + 5 * np.sqrt(2 * freedom) + 5
    assert np.abs(drawn.logprobs - np.log(wanted[drawn.tokens])).max() < 1e-5
    assert drawn.finite.all()


def test_greedy_takes_the_largest_and_reports_the_plain_distribution():
    logits = random_logits(6, 1000)
    drawn = sample(logits, same(6, temperature=0.0, top_k=1, top_p=0.1))
    assert drawn.tokens.tolist() == logits.argmax(-1).tolist()
    plain = logits.double().log_softmax(-1).numpy()
    assert np.abs(drawn.logprobs - plain[np.arange(6), drawn.tokens]).max() < 1e-5


def test_rows_of_one_batch_do_not_see_each_other():
    logits = random_logits(len(CASES) + 1, 700)
    cases = [*CASES, {"temperature": 0.0}]
    columns = {
        name: [case.get(name, default) for case in cases]
        for name, default in {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}.items()
    }
    seeds, counters = np.arange(len(cases)) * 7, np.arange(len(cases)) + 3
    together = sample(logits, same(len(cases), **columns, seed=seeds, counter=counters))
    for row, case in enumerate(cases):
        alone = sample(logits[row : row + 1], same(1, **case, seed=seeds[row], counter=counters[row]))
        assert alone.tokens[0] == together.tokens[row]
        assert alone.logprobs[0] == pytest.approx(together.logprobs[row], abs=1e-6)
        wanted = reference(logits[row].numpy(), **case)
        assert together.logprobs[row] == pytest.approx(np.log(wanted[together.tokens[row]]), abs=1e-5)


def kept(drawn: Drawn, row: int) -> list[int]:
    assert drawn.mask is not None
    return drawn.mask.token_ids[drawn.mask.offsets[row] : drawn.mask.offsets[row + 1]].tolist()


def everything(rows: int) -> np.ndarray:
    return np.ones(rows, bool)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.sampled_from([2, 7, 64, 256, 257, 900, 5000]),
    temperature=st.sampled_from([1.0, 0.6, 2.5]),
    top_k=st.one_of(st.integers(0, 40), st.integers(0, 1000)),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 1e-4, 0.02, 0.3, 1.0]),
    spread=st.sampled_from([0.01, 0.5, 2.0, 8.0]),
    rounded=st.booleans(),
    forbidden=st.booleans(),
)
def test_the_mask_is_exactly_the_set_of_the_definition(
    seed, vocabulary, temperature, top_k, top_p, min_p, spread, rounded, forbidden
):
    logits = random_logits(1, vocabulary, seed, spread)
    if rounded:  # many ties, as bfloat16 logits have
        logits = (logits * 4 / spread).round() * spread / 4
    if forbidden:
        logits[0, seed % 3 :: 3] = -torch.inf
        logits[0, seed % vocabulary] = 0.0
    case = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    drawn = sample(logits, same(1, seed=seed, **case), everything(1))
    wanted = reference(logits[0].numpy(), **case)
    found = kept(drawn, 0) or list(range(vocabulary))
    possible = set(np.flatnonzero(wanted)) if kept(drawn, 0) else set(range(vocabulary))
    assert set(found) == possible and drawn.tokens[0] in possible
    assert drawn.logprobs[0] == pytest.approx(np.log(wanted[drawn.tokens[0]]), abs=1e-5)
    exact = torch.log_softmax(logits[0, found].double() / temperature, -1)[found.index(drawn.tokens[0])]
    assert drawn.logprobs[0] == pytest.approx(float(exact), abs=1e-6 if kept(drawn, 0) else 1e-5)


def test_an_empty_row_of_the_mask_is_one_from_which_nothing_was_cut():
    logits = random_logits(6, 400)
    columns = {
        "temperature": [1.0, 0.7, 0.0, 1.0, 1.0, 1.0],
        "top_k": [0, 5, 5, 5, 400, 0],
        "min_p": [0.0, 0.0, 0.0, 0.0, 0.0, 0.5],
    }
    want = np.array([True, True, True, False, True, True])
    drawn = sample(logits, same(6, **columns), want)
    assert drawn.mask is not None
    assert drawn.mask.token_ids.dtype == np.int32 and drawn.mask.offsets.dtype == np.int64
    # plain, five kept, greedy, not asked, all four hundred kept, those within a factor of two of the best
    assert np.diff(drawn.mask.offsets)[:5].tolist() == [0, 5, 0, 0, 0]
    assert kept(drawn, 1) == sorted(logits[1].topk(5).indices.tolist())
    assert kept(drawn, 5) == np.flatnonzero(logits[5] >= logits[5].max() + np.log(0.5)).tolist()
    without = sample(logits, same(6, **columns))
    assert without.mask is None and without.tokens.tolist() == drawn.tokens.tolist()


def test_a_flat_distribution_keeps_much_of_a_large_vocabulary():
    """Nothing may depend on the kept set being small; a peaked row beside it stays what it is alone."""
    logits = random_logits(3, 20_000, spread=0.01)
    logits[1] = random_logits(1, 20_000, spread=6.0)[0]
    drawn = sample(logits, same(3, top_p=0.9, seed=np.arange(3)), everything(3))
    for row in range(3):
        wanted = reference(logits[row].numpy(), top_p=0.9)
        assert kept(drawn, row) == np.flatnonzero(wanted).tolist()
        assert drawn.logprobs[row] == pytest.approx(np.log(wanted[drawn.tokens[row]]), abs=1e-4)
    assert len(kept(drawn, 0)) > 17_000 > 1_000 > len(kept(drawn, 1))


def mixed(rows: int) -> Settings:
    """Every kind of row."""
    cases = [*CASES, {"temperature": 0.0}, {"top_p": 0.999}]
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    columns = {
        name: [cases[i % len(cases)].get(name, default) for i in range(rows)] for name, default in defaults.items()
    }
    return same(rows, **columns, seed=np.arange(rows) * 13, counter=np.arange(rows) % 5)


def part(whole: Settings, rows: np.ndarray) -> Settings:
    return Settings(
        **{name: getattr(whole, name)[rows] for name in ("temperature", "top_k", "top_p", "min_p", "seed", "counter")}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_row_gives_is_bit_for_bit_the_same_in_any_batch(dtype):
    vocabulary = 40_000  # more rows than are worked on at once
    rows = 2 * CHUNK["cpu"] // vocabulary + 3
    logits, whole = random_logits(rows, vocabulary, spread=3.0).to(dtype), mixed(rows)
    together = sample(logits, whole, everything(rows), top=4)
    assert together.top_ids is not None and together.top_logprobs is not None
    order = np.random.default_rng(0).permutation(rows)
    for some in (order[:1], order[1:3], order[3:]):
        drawn = sample(logits[some], part(whole, some), everything(len(some)), top=4)
        assert drawn.tokens.tolist() == together.tokens[some].tolist()
        assert drawn.logprobs.tolist() == together.logprobs[some].tolist()
        assert drawn.top_ids.tolist() == together.top_ids[some].tolist()
        assert drawn.top_logprobs.tolist() == together.top_logprobs[some].tolist()
        assert [kept(drawn, i) for i in range(len(some))] == [kept(together, row) for row in some]


@pytest.mark.parametrize("vocabulary", [3, 50, 256, 3001])
def test_top_logprobs_are_those_of_the_distribution_sampled_from(vocabulary):
    logits, whole = random_logits(20, vocabulary), mixed(20)
    drawn = sample(logits, whole, top=6)
    plain = sample(logits, whole)
    assert drawn.tokens.tolist() == plain.tokens.tolist() and drawn.logprobs.tolist() == plain.logprobs.tolist()
    assert drawn.top_ids is not None and drawn.top_logprobs is not None
    assert drawn.top_ids.shape == drawn.top_logprobs.shape == (20, 6)
    for row in range(20):
        case = {name: getattr(whole, name)[row] for name in ("temperature", "top_k", "top_p", "min_p")}
        wanted = reference(logits[row].numpy(), **case)
        best = [token for token in np.argsort(-wanted, kind="stable")[:6] if wanted[token] > 0]
        assert drawn.top_ids[row].tolist() == best + [-1] * (6 - len(best))
        assert np.abs(drawn.top_logprobs[row, : len(best)] - np.log(wanted[best])).max() < 1e-5
        assert (drawn.top_logprobs[row, len(best) :] == -np.inf).all()


def test_of_equally_probable_tokens_the_smaller_id_comes_first():
    logits = torch.zeros(1, 700)
    logits[0, [5, 300, 40]] = 2.0
    assert sample(logits, same(1), top=5).top_ids.tolist() == [[5, 40, 300, 0, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("top", [0, 3])
def test_given_tokens_are_scored_at_temperature_one(dtype, top):
    logits = random_logits(30, 1003).to(dtype)
    tokens = np.arange(30) * 33
    logprobs, ids, best = token_logprobs(logits, tokens, top)
    wanted = logits.double().log_softmax(-1)
    assert np.abs(logprobs - wanted.numpy()[np.arange(30), tokens]).max() < 1e-5
    if not top:
        assert ids is None and best is None
    else:
        found = wanted.topk(3, -1)
        assert ids is not None and best is not None
        assert np.abs(best - found.values.numpy()).max() < 1e-5
        assert np.abs(wanted.gather(1, torch.from_numpy(ids).long()).numpy() - best).max() < 1e-5


def test_scores_of_a_row_that_is_not_finite_are_not_numbers():
    logits = random_logits(3, 300)
    logits[1, 299] = torch.nan
    logprobs, _, _ = token_logprobs(logits, np.zeros(3, np.int64), top=2)
    assert np.isfinite(logprobs).tolist() == [True, False, True]


def test_bfloat16_logits_are_sampled_in_float32():
    logits = random_logits(4, 500).bfloat16()
    drawn = sample(logits, same(4, temperature=0.3, seed=np.arange(4)))
    for row in range(4):
        wanted = reference(logits[row].float().numpy(), temperature=0.3)
        assert drawn.logprobs[row] == pytest.approx(np.log(wanted[drawn.tokens[row]]), abs=1e-5)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("case", [{}, {"temperature": 0.0}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}], ids=str)
def test_a_row_that_is_not_finite_is_told_and_hurts_nobody(poison, case):
    logits = random_logits(3, 400)
    clean = sample(logits, same(3, seed=5, **case))
    logits[1, 250] = poison
    drawn = sample(logits, same(3, seed=5, **case), everything(3), top=2)
    assert drawn.finite.tolist() == [True, False, True]
    assert kept(drawn, 1) == []
    assert drawn.tokens[[0, 2]].tolist() == clean.tokens[[0, 2]].tolist()


def test_tokens_that_a_model_forbids_are_never_drawn():
    logits = random_logits(200, 300)
    logits[:, ::2] = -torch.inf
    drawn = sample(logits, same(200, seed=np.arange(200)))
    assert drawn.finite.all() and (drawn.tokens % 2 == 1).all()


def test_uniforms_are_uniform_and_depend_on_seed_and_counter_alone():
    seeds, counters = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200))
    u = uniforms(seeds.ravel(), counters.ravel())
    assert len(np.unique(u)) == len(u) and u.min() >= 0 and u.max() < 1
    counts = np.histogram(u, bins=50, range=(0, 1))[0]
    assert ((counts - 800.0) ** 2 / 800).sum() < 50 + 5 * np.sqrt(100)
    square = u.reshape(200, 200)
    for left, right in ((square[1:], square[:-1]), (square[:, 1:], square[:, :-1])):  # neighbours share nothing
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 0.03
    order = np.random.default_rng(0).permutation(len(u))
    assert (uniforms(seeds.ravel()[order], counters.ravel()[order]) == u[order]).all()


def test_the_generator_is_splitmix64():
    """First outputs for the state 0, as published with the reference implementation; our state is the mixed seed."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        states = golden * np.arange(1, 4, dtype=np.uint64)
    assert [hex(value) for value in _mix(states)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


def test_the_ends_of_the_unit_interval_never_reach_a_token_of_probability_zero():
    from headrace.engine.native.sampler import _draw_kept, _search

    p = np.zeros((3, 600))
    p[:, 10], p[:, 300] = 0.25, 0.75
    u = np.array([0.0, 0.25 - 1e-9, 1.0 - 2.0**-53])
    column, inside = _search(torch.from_numpy(p.cumsum(-1)), torch.from_numpy(u))
    assert column.tolist() == [10, 10, 300]
    assert inside.tolist() == pytest.approx([0.0, 1.0, 1.0], abs=1e-8)
    with np.errstate(divide="ignore"):
        columns, total = _draw_kept(np.log(p), np.zeros(3), np.ones(3), u)
    assert columns.tolist() == [10, 10, 300] and total.tolist() == pytest.approx([1.0] * 3)
