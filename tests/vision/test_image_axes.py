"""Places on three axes: those of transformers for every row, wherever a sequence is cut, forked or packed."""

from __future__ import annotations

import random
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.errors import ConfigError
from headrace.engine.native.forward_pass import ForwardInput
from headrace.engine.native.model_loading import _moves
from headrace.engine.native.runners.model_call import ModelCall
from headrace.engine.native.runners.paged import cut, fill_up
from headrace.engine.native.runners.skeleton import read
from headrace.engine.native.sequences import Running
from headrace.models.image_axes import axes_of, moved_up, places_of
from headrace.models.images import KnownImages
from headrace.trainer.forward.image_places import image_places
from headrace.trainer.model.causal_lm import load_model
from headrace.trainer.packing import ROOT, Segment
from support.tiny_seeing import inputs, made, picture, prompt, seeing

IMAGES = [picture(1), picture(2, 16, 40), picture(3, 48, 32)]
FAMILY = "qwen2_5_vl"


@cache
def directory() -> Path:
    return made(FAMILY, IMAGES)


@cache
def model() -> Any:
    return load_model(directory(), torch.device("cpu"))


@cache
def whole() -> Any:
    return seeing(FAMILY)


def told(row: list[int], shown: list[int]) -> torch.Tensor:
    """[3, T] the places of a row by transformers, from the grids of its images."""
    ids = torch.tensor([KnownImages(directory()).in_vocabulary(row)])
    if not shown:
        return torch.arange(len(row)).expand(3, -1)
    given = inputs(FAMILY, [IMAGES[number] for number in shown], ids)
    found, _ = whole().model.get_rope_index(ids, given["mm_token_type_ids"], given["image_grid_thw"])
    return found[:, 0]


def on_axes(tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[3, N] the places that the rotary embedding of our model is given in a pass, where callers pass `places`."""
    seen: list[torch.Tensor] = []
    rotary = model().model.rotary_emb
    hook = rotary.register_forward_pre_hook(lambda module, _: seen.append(module.axes))
    try:
        with torch.no_grad():
            model().model(input_ids=tokens[None], position_ids=places[None], use_cache=False)
    finally:
        hook.remove()
    return seen[0].expand(3, 1, -1)[:, 0]


def said(rng: random.Random) -> tuple[list[int], list[int]]:
    """Tokens with some images among them, and the numbers of these."""
    shown = [rng.randrange(len(IMAGES)) for _ in range(rng.randrange(3))]
    parts = [[rng.randrange(95) for _ in range(rng.randint(2, 4))] for _ in range(len(shown) + 1)]
    tokens = list(parts[0])
    for number, part in zip(shown, parts[1:], strict=True):
        tokens += [*prompt(FAMILY, directory(), [IMAGES[number]], ""), *part]
    return tokens, shown


@pytest.mark.parametrize("seed", range(4))
def test_the_tokens_of_a_tree_have_the_places_of_their_rows(seed: int):
    """Segments are cut anywhere, within images too."""
    rng = random.Random(seed)
    rows, segments, tokens, paths = [], [], [], []
    for _ in range(3):
        prompt_tokens, shown = said(rng)
        cut = rng.randrange(1, len(prompt_tokens))
        start = len(tokens)
        segments += [Segment(start, cut), Segment(start + cut, len(prompt_tokens) - cut, len(segments))]
        tokens += prompt_tokens
        parent = len(segments) - 1
        for _ in range(2):
            more, others = said(rng)
            segments.append(Segment(len(tokens), len(more), parent))
            paths.append([*range(start, start + len(prompt_tokens)), *range(len(tokens), len(tokens) + len(more))])
            tokens += more
            rows.append((prompt_tokens + more, shown + others))
    places = image_places(model(), torch.tensor(tokens), segments)
    assert places is not None and ROOT in {segment.parent for segment in segments}
    found = on_axes(torch.tensor(tokens), places)
    for path, (row, shown) in zip(paths, rows, strict=True):
        assert torch.equal(found[:, path], told(row, shown))


@pytest.mark.parametrize("seed", range(3))
def test_the_engine_gives_every_call_the_places_of_its_rows(seed: int):
    """A call of new rows that are padded, one that goes on by a token in each, and one that goes on in the middle of a sequence."""
    rng = random.Random(seed)
    call = ModelCall(read(directory(), torch.float32, torch.device("cpu")), torch.device("cpu"))
    given = [said(rng) for _ in range(3)]
    longest = max(len(row) for row, _ in given)
    padded = np.array([[0] * (longest - len(row)) + row for row, _ in given]) | (7 << 32)
    for row, (tokens, shown), moved in zip(padded, given, call._moved(padded), strict=True):
        index = np.arange(len(tokens)) - moved[longest - len(tokens) :]
        assert torch.equal(on_axes(torch.tensor(tokens), torch.from_numpy(index)), told(tokens, shown))
        assert np.array_equal(call._moved(row)[longest - len(tokens) :], moved[longest - len(tokens) :])


@pytest.mark.parametrize("seed", range(3))
def test_a_pass_over_blocks_has_the_places_of_its_rows(seed: int):
    """Chunks of prompts and rows that go on by a token, and the same in pieces of one size."""
    rng = random.Random(seed)
    running = Running(4, 256, partial(_moves, model()))
    stretches, expected = [], []
    for number in range(4):
        tokens, shown = said(rng)
        running.history[number, : len(tokens)] = tokens
        start = rng.randrange(len(tokens))
        stop = rng.choice([start + 1, len(tokens)])
        stretches.append((tokens, start, stop))
        expected.append(told(tokens, shown)[:, start:stop])
    starts, stops = [start for _, start, _ in stretches], [stop for _, _, stop in stretches]
    sizes = np.array(stops) - starts
    moved = running.moved(range(4), starts, stops)
    assert moved is not None
    batch = ForwardInput(
        tokens=np.concatenate([tokens[start:stop] for tokens, start, stop in stretches]),
        starts=np.array([0, *sizes.cumsum()], dtype=np.int32),
        context=np.array(starts, dtype=np.int32),
        tables=np.zeros((4, 8), dtype=np.int32),
        rows=np.arange(4),
        adapters=np.zeros(4, dtype=np.int32),
        moved=moved,
    )
    for size in (len(batch.tokens), 5):
        pieces = list(cut(batch, size))
        filled = [fill_up(piece, size, 0, 0) for piece in pieces]
        places = [(one.positions() - one.moved)[: len(piece.tokens)] for one, piece in zip(filled, pieces, strict=True)]
        found = on_axes(torch.from_numpy(batch.tokens), torch.from_numpy(np.concatenate(places)))
        assert torch.equal(found, torch.cat(expected, 1))


def test_what_goes_on_from_a_cache_without_places_is_refused():
    tokens = torch.tensor([prompt(FAMILY, directory(), IMAGES[:1])])
    with torch.no_grad():
        cache_of = model()(input_ids=tokens, use_cache=True).cache
        with pytest.raises(RuntimeError, match="places that follow from the images before"):
            model()(input_ids=tokens[:, :1], cache=cache_of, use_cache=True)


def test_a_whole_sequence_needs_no_places():
    tokens = prompt(FAMILY, directory(), [IMAGES[2], IMAGES[1]])
    places = places_of(model(), torch.tensor(tokens))
    assert torch.equal(on_axes(torch.tensor(tokens), places), told(list(tokens), [2, 1]))
    assert int(moved_up(model(), torch.tensor(tokens)).sum()) == len(tokens) - 1 - int(places[-1])


def test_the_axis_of_each_column_is_found_by_trying():
    for family, sections in (("qwen2_5_vl", "AAABBC" * 2), ("qwen3_vl", "ABCABA" * 2)):
        found = axes_of(seeing(family).model.get_decoder().rotary_emb, 48)
        assert "".join("ABC"[axis] for axis in found) == sections
    with pytest.raises(ConfigError, match="do not turn by one axis each"):
        axes_of(lambda like, places: (like, places.sum(0)[..., None].float().expand(1, 1, 4)), 48)
