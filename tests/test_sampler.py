"""Sampling against numpy in float64: the sets that filters keep, the distribution of what is drawn, the log-probs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.native.sampler import BLOCK, Settings, sample, thresholds, uniforms


def same(rows: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, counter=0) -> Settings:
    """Settings with one value for all rows, or an array."""

    def column(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), rows).copy()

    return Settings(
        column(temperature, np.float64),
        column(top_k, np.int64),
        column(top_p, np.float64),
        column(min_p, np.float64),
        column(seed, np.uint64),
        column(counter, np.int64),
    )


def reference(logits: np.ndarray, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """[V] the distribution sampled from, written for one row and without shortcuts."""
    if temperature == 0:
        temperature, top_k, top_p, min_p = 1.0, 0, 1.0, 0.0
    x = logits.astype(np.float64) / temperature

    def normalised(x):
        p = np.exp(x - x.max())
        return p / p.sum()

    if top_k:
        kth = np.sort(x)[::-1][min(top_k, len(x)) - 1]
        x = np.where(x < kth, -np.inf, x)
    if top_p < 1:
        order = np.argsort(-x, kind="stable")
        mass, last = 0.0, order[0]
        for last in order:
            mass += normalised(x)[last]
            if mass >= top_p:
                break
        x = np.where(x < x[last], -np.inf, x)
    if min_p:
        p = normalised(x)
        x = np.where(p < min_p * p.max(), -np.inf, x)
    return normalised(x)


def random_logits(rows: int, vocabulary: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


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


@pytest.mark.parametrize("case", CASES, ids=str)
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


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.sampled_from([2, 7, 64, 256, 257, 900]),
    top_k=st.integers(0, 40),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    rounded=st.booleans(),
)
def test_filters_keep_exactly_the_set_of_the_definition(seed, vocabulary, top_k, top_p, min_p, rounded):
    logits = random_logits(1, vocabulary, seed)
    if rounded:  # many ties, as bfloat16 logits have
        logits = (logits * 4).round() / 4
    keep = thresholds(logits, np.array([top_k]), np.array([top_p]), np.array([min_p]))
    kept = (logits[0] >= keep[0]).numpy()
    x = logits[0].numpy()
    assert set(np.flatnonzero(kept)) == set(np.flatnonzero(reference(x, 1.0, top_k, top_p, min_p)))


def test_top_p_looks_beyond_its_first_guess():
    """A flat distribution: the nucleus holds more entries than the shortcut looks at."""
    vocabulary = 3000
    logits = random_logits(2, vocabulary, spread=0.01)
    logits[1] = random_logits(1, vocabulary, spread=6.0)[0]  # a peaked row beside it
    keep = thresholds(logits, np.zeros(2, np.int64), np.full(2, 0.9), np.zeros(2))
    for row in range(2):
        kept = set(np.flatnonzero((logits[row] >= keep[row]).numpy()))
        wanted = set(np.flatnonzero(reference(logits[row].numpy(), top_p=0.9)))
        assert len(kept ^ wanted) <= 1  # float32 against float64 at the boundary
    assert int((logits[0] >= keep[0]).sum()) > 2500


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
    drawn = sample(logits, same(3, seed=5, **case))
    assert drawn.finite.tolist() == [True, False, True]
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
    from headrace.engine.native.sampler import _mix

    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        states = golden * np.arange(1, 4, dtype=np.uint64)
    assert [hex(value) for value in _mix(states)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


def test_the_ends_of_the_unit_interval_never_reach_a_token_of_probability_zero():
    from headrace.engine.native.sampler import _draw

    p = torch.zeros(3, 600)
    p[:, 10], p[:, 300] = 0.25, 0.75
    tokens = _draw(p, torch.tensor([0.0, 0.25 - 1e-9, 1.0 - 2.0**-53], dtype=torch.float64))
    assert tokens.tolist() == [10, 10, 300]
