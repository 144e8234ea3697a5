"""The kernels' draws: the sets of the definition, the sampler's tokens, log-probs of the distribution drawn from, whatever other rows want."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as rounds
from hypothesis import strategies as st

from headrace.engine.native.draws import DrawDetails, Drawn, Settings, uniforms
from headrace.engine.native.forward_pass import ForwardOutput
from headrace.engine.native.kernels import binding
from headrace.engine.native.kernels.drawing import LogitRows
from headrace.engine.native.sampler import draw, sample, score, token_logprobs
from headrace.native.memory import address
from support.sampling import random_logits, reference, same

pytestmark = pytest.mark.skipif(binding.library() is None, reason="no kernels can be compiled here")


@pytest.fixture(scope="module", params=["native", "x86-64-v3"])
def kernels(request) -> Iterator[tuple[ctypes.CDLL, int]]:
    """The library and a decoder with two threads, which draws without a model."""
    library = binding.library(request.param)
    if library is None:
        pytest.skip("cannot be compiled here")
    decoder = library.headrace_open(ctypes.byref(binding.Cache(None, 0)), 2)
    yield library, decoder
    library.headrace_close(decoder)


def forward_of(kernels: tuple[ctypes.CDLL, int], logits: torch.Tensor) -> ForwardOutput:
    """`logits` [R, V], behind whose rows lie numbers that nobody may look at."""
    rows, vocabulary = logits.shape
    room = torch.full((rows, -(-vocabulary // 32) * 32), 1e9)
    room[:, :vocabulary] = logits
    at = LogitRows(*kernels, address(room), vocabulary, room.shape[1])
    return ForwardOutput(room[:, :vocabulary], draw=at.draw, score=at.score)


def wanted(rows: int, masks=True, tops=0, left=None) -> DrawDetails:
    return DrawDetails(masks=np.full(rows, masks), tops=np.full(rows, tops), left=left)


def kept(drawn: Drawn, row: int) -> list[int]:
    assert drawn.mask is not None
    return drawn.mask.token_ids[drawn.mask.offsets[row] : drawn.mask.offsets[row + 1]].tolist()


@rounds(max_examples=100)
@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.sampled_from([1, 2, 7, 16, 255, 256, 257, 900, 5000, 49_152]),
    temperature=st.sampled_from([1.0, 0.6, 2.5]),
    top_k=st.one_of(st.integers(0, 40), st.integers(0, 60_000)),
    top_p=st.sampled_from([1.0, 0.999, 0.95, 0.5, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 1e-4, 0.02, 1.0]),
    spread=st.sampled_from([0.0, 0.01, 0.5, 2.0, 8.0]),
    rounded=st.booleans(),
    forbidden=st.booleans(),
)
def test_what_is_kept_is_the_set_of_the_definition_and_of_the_sampler(
    kernels, seed, vocabulary, temperature, top_k, top_p, min_p, spread, rounded, forbidden
):
    """Ties, single tokens, flat rows and large vocabularies included."""
    logits = random_logits(1, vocabulary, seed, spread)
    if rounded:  # many ties, as bfloat16 logits have
        logits = (logits * 4 / (spread or 1)).round() * spread / 4
    if forbidden:
        logits[0, seed % 3 :: 3] = -torch.inf
        logits[0, seed % vocabulary] = 0.0
    case = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    settings = same(1, seed=seed, **case)
    drawn = draw(forward_of(kernels, logits), settings, None, wanted(1))
    expected = reference(logits[0].numpy(), **case)
    possible = np.flatnonzero(expected).tolist()
    cut = settings.filters().on()[0] and len(possible) < vocabulary
    assert kept(drawn, 0) == (possible if cut else [])
    other = sample(logits, settings, np.ones(1, bool))
    assert kept(other, 0) == kept(drawn, 0)
    assert drawn.tokens[0] in possible
    assert drawn.logprobs[0] == pytest.approx(np.log(expected[drawn.tokens[0]]), abs=1e-5)


CASES = [
    {},
    {"temperature": 0.0, "top_k": 3},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
]


def every_kind(rows: int) -> Settings:
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    columns = {name: [CASES[i % len(CASES)].get(name, value) for i in range(rows)] for name, value in defaults.items()}
    return same(rows, **columns, seed=np.arange(rows) * 13, counter=np.arange(rows) % 5)


def test_tokens_are_those_that_the_sampler_draws_with_the_same_seeds(kernels):
    rows = 700
    logits, settings = random_logits(rows, 1003, spread=3.0), every_kind(rows)
    drawn = draw(forward_of(kernels, logits), settings, None, wanted(rows, tops=3))
    expected = sample(logits, settings, np.ones(rows, bool), top=3)
    assert drawn.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(drawn.logprobs, expected.logprobs, atol=1e-5)
    assert drawn.mask is not None and expected.mask is not None
    assert (drawn.mask.token_ids == expected.mask.token_ids).all()
    assert (drawn.mask.offsets == expected.mask.offsets).all()
    assert (drawn.top_ids == expected.top_ids).all()
    np.testing.assert_allclose(drawn.top_logprobs, expected.top_logprobs, atol=1e-5)


def test_a_row_gets_the_same_wherever_it_lies_and_whatever_others_want(kernels):
    rows, rng = 40, np.random.default_rng(0)
    logits, settings = random_logits(rows, 300), every_kind(rows)
    forward = forward_of(kernels, logits)
    alone = draw(forward, settings, None, wanted(rows, masks=False))
    places = rng.permutation(rows)
    masks, tops = rng.random(rows) < 0.5, np.where(rng.random(rows) < 0.3, 4, 0)
    part = Settings(**{name: values[places] for name, values in vars(settings).items()})
    drawn = draw(forward, part, places, DrawDetails(masks=masks, tops=tops))
    assert alone.mask is None and alone.top_ids is None
    assert drawn.tokens.tolist() == alone.tokens[places].tolist()
    assert drawn.logprobs.tolist() == alone.logprobs[places].tolist()
    assert drawn.top_ids is not None and ((drawn.top_ids >= 0).any(-1) == (tops > 0)).all()
    assert all(not kept(drawn, row) for row in np.flatnonzero(~masks))


def test_only_what_filters_cut_further_than_a_constraint_is_told(kernels):
    logits = random_logits(3, 64)
    logits[:, 8:] = -torch.inf
    settings = same(3, top_k=[8, 5, 64])
    drawn = draw(forward_of(kernels, logits), settings, None, wanted(3, left=np.full(3, 8)))
    assert [len(kept(drawn, row)) for row in range(3)] == [0, 5, 0]
    np.testing.assert_allclose(
        drawn.logprobs[[0, 2]], logits.log_softmax(-1).numpy()[[0, 2], drawn.tokens[[0, 2]]], atol=1e-6
    )


def test_of_equally_probable_tokens_the_smaller_id_is_listed_first(kernels):
    logits = torch.zeros(1, 700)
    logits[0, [5, 300, 40]] = 2.0
    drawn = draw(forward_of(kernels, logits), same(1), None, wanted(1, tops=5))
    assert drawn.top_ids is not None and drawn.top_ids.tolist() == [[5, 40, 300, 0, 1]]


@pytest.mark.parametrize("top", [0, 3])
def test_given_tokens_are_scored_as_the_sampler_scores_them(kernels, top):
    logits = random_logits(30, 1003)
    logits[7, 1002] = torch.nan
    rows, tokens = np.arange(30)[::-1].copy(), np.arange(30) * 33
    found = score(forward_of(kernels, logits), rows, tokens, top)
    expected = token_logprobs(logits[torch.from_numpy(rows)], tokens, top)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    assert np.isnan(found.logprobs).tolist() == (rows == 7).tolist()
    if top:
        whole = rows != 7
        assert (found.top_ids[whole] == expected.top_ids[whole]).all()
        np.testing.assert_allclose(found.top_logprobs[whole], expected.top_logprobs[whole], atol=1e-5)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_row_that_is_not_finite_is_told_and_hurts_nobody(kernels, poison, case):
    logits = random_logits(3, 400)
    clean = draw(forward_of(kernels, logits), same(3, seed=5, **case), None, wanted(3, tops=2))
    logits[1, 250] = poison
    drawn = draw(forward_of(kernels, logits), same(3, seed=5, **case), None, wanted(3, tops=2))
    assert drawn.finite.tolist() == [True, False, True] and kept(drawn, 1) == []
    assert drawn.tokens[[0, 2]].tolist() == clean.tokens[[0, 2]].tolist()


@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("u", [0.0, 1 - 2**-52, 1 - 2**-53])
def test_the_ends_of_the_range_take_tokens_that_can_be_had(kernels, u, top_k):
    library, decoder = kernels
    logits = np.full((2, 512), -np.inf if top_k else -200.0, np.float32)
    logits[:, 300], logits[1, 7] = 0.0, 1.0
    tokens, logprobs, kept = np.zeros(2, np.int64), np.zeros(2), np.zeros(2, np.int64)
    given = {
        "logits": logits,
        "rows": np.arange(2),
        "temperature": np.ones(2),
        "u": np.full(2, u),
        "top_k": np.full(2, top_k),
        "top_p": np.ones(2),
        "min_p": np.full(2, -np.inf),
        "masked": np.zeros(2, bool),
        "tops": np.zeros(2, np.int32),
        "left": np.full(2, 512),
    }
    pointers = {name: address(array) for name, array in given.items()}
    out = {"tokens": address(tokens), "logprobs": address(logprobs), "kept": address(kept)}
    draws = binding.DrawsStruct(count=2, vocabulary=512, listed=0, width=512, **pointers, **out)
    library.headrace_draw(decoder, ctypes.byref(draws))
    assert tokens.tolist() == [300, 7 if u == 0 else 300] and logprobs[0] == 0


@pytest.mark.parametrize("by_runner", [True, False])
def test_every_token_of_a_request_has_a_number_of_its_own(kernels, by_runner):
    """The tokens of one request, drawn one after the other from one distribution, have its frequencies."""
    count, vocabulary = 2000, 50
    logits = random_logits(1, vocabulary, spread=1.0).expand(count, -1)
    settings = same(count, seed=7, counter=np.arange(count))
    forward = forward_of(kernels, logits) if by_runner else ForwardOutput(logits)
    drawn = draw(forward, settings, None, wanted(count, masks=False))
    found = np.bincount(drawn.tokens, minlength=vocabulary) / count
    assert abs(found - logits[0].softmax(-1).numpy()).max() < 0.03
    assert len(np.unique(uniforms(settings.seed, settings.counter))) == count
