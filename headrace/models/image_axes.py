"""Images in the families of Qwen: places on three axes, and features that are added in further layers.

A token of an image has a place in time, in height and in width; one of a text has the same place on all three. An image takes as many places as its
longer side has features, fewer than it has tokens, and what follows moves up by the rest:

    index        0 1 | 2 3 4 5 6 7 | 8 9          an image of two rows and three columns
    time         0 1 | 2 2 2 2 2 2 | 5 6
    height       0 1 | 2 2 2 3 3 3 | 5 6
    width        0 1 | 2 3 4 2 3 4 | 5 6
    moves up by  0 0 | 0 0 0 0 0 3 | 0 0          what is behind the token

(get_rope_index of transformers, modeling_qwen2_5_vl.py). Each token has numbers of its own for this, so that places follow from the tokens of a
sequence, wherever it is cut, forked or packed. Here a *place* is an index less what the tokens before it move up by. A caller who forwards a whole
sequence passes no `position_ids`; whoever forwards a part of one passes places, and the offsets of an image's features are added here.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.core.errors import ConfigError

ADDED = "image_layers"
"""The argument by which features reach the layers that add them: it goes along with a call, also with one that is checkpointed and made again."""


def grid_moves(height: int, width: int) -> Tensor:
    """[height * width, 4] int64, row by row: by how much the places of each feature on the three axes differ from its place, and what it moves up by."""
    index = torch.arange(height * width)
    down, right = index // width, index % width
    ups = torch.zeros_like(index)
    ups[-1] = len(index) - max(height, width)
    return torch.stack([-index, down - index, right - index, ups], 1)


def axes_of(rotary: Any, width: int) -> list[int]:
    """Returns the axis by which each column of a rotary embedding turns, as it does when one place after the other is moved. `width`: of what it
    turns. Raises ConfigError if a column turns by none or by several."""
    like = torch.zeros(1, 1, width)
    places = torch.eye(3, dtype=torch.long)[:, :, None, None]  # [one for each try, 3, 1, 1]
    turned = torch.stack([rotary(like, place)[1][0, 0] != 0 for place in places])
    if not bool((turned.sum(0) == 1).all()):
        raise ConfigError("columns of its rotary embedding do not turn by one axis each, which is not served")
    return turned.int().argmax(0).tolist()


class OnAxes:
    """A rotary embedding of a model whose images have places on three axes. It was made for one of them, or for three."""

    axis_of: list[int]
    """[D] the axis of each column."""
    axes: Tensor
    """[B, T] or [3, B, T] the places of the call under way; there until they are used."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        turn: Any = super().forward  # type: ignore[misc]
        axes = vars(self).pop("axes", position_ids)
        if axes.ndim == 2 or position_ids.ndim == 3:
            return turn(x, axes)
        columns = torch.tensor(self.axis_of, device=x.device)
        cos, sin = zip(*(turn(x, places) for places in axes), strict=True)
        return _chosen(cos, columns), _chosen(sin, columns)


def _chosen(tables: tuple[Tensor, ...], columns: Tensor) -> Tensor:
    time, height, width = tables
    return torch.where(columns == 0, time, torch.where(columns == 1, height, width))


def give_axes(model: Any, axis_of: list[int], layers: int) -> None:
    """Lets a language model, whose embedding has features of images, see them on three axes, and add further ones behind its first `layers`."""
    inner = model.base_model
    rotary = inner.rotary_emb
    rotary.__class__ = type("OnAxes", (OnAxes, type(rotary)), {})
    rotary.axis_of = axis_of
    inner.register_forward_pre_hook(_give_places, with_kwargs=True)
    for number in range(layers):
        inner.layers[number].register_forward_hook(partial(_add, number), with_kwargs=True)


def _give_places(inner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The rotary embedding is given the places, and the model none: its masks would take a step back for the beginning of another sequence."""
    table, tokens = inner.get_input_embeddings().images, kwargs["input_ids"]
    places, cache = kwargs.get("position_ids"), kwargs.get("cache")
    if places is None:
        if cache is not None and cache.get_seq_length():
            raise RuntimeError("what goes on from a cache has places that follow from the images before: pass them")
        places = places_of(inner, tokens)
    more: dict[str, Any] = {"position_ids": None}
    if not tokens.is_meta and (seen := tokens >= inner.get_input_embeddings().num_embeddings).any():
        numbers = tokens[seen] - inner.get_input_embeddings().num_embeddings
        offsets = places.new_zeros(3, *tokens.shape)
        offsets[:, seen] = table.moves(numbers)[:, :3].T
        places = places[None] + offsets
        if table.layers:
            more[ADDED] = (seen, table.added(numbers))
    inner.rotary_emb.axes = places
    return args, {**kwargs, **more}


def _add(number: int, layer: Any, args: Any, kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
    if ADDED not in kwargs:
        return None
    seen, rows = kwargs[ADDED]
    return output.index_put((seen,), rows[:, number].to(output.dtype), accumulate=True)


def has_axes(model: Any) -> bool:
    """Whether the places of a model's tokens follow from images."""
    return isinstance(getattr(getattr(model, "base_model", model), "rotary_emb", None), OnAxes)


def moved_up(model: Any, tokens: Tensor) -> Tensor:
    """Returns by how many places what is behind each of `tokens` (int64, any shape) moves up. For a model that `has_axes`."""
    embedding = model.get_input_embeddings()
    found = torch.zeros_like(tokens)
    if not tokens.is_meta and (seen := tokens >= embedding.num_embeddings).any():
        found[seen] = embedding.images.moves(tokens[seen] - embedding.num_embeddings)[:, 3]
    return found


def places_of(model: Any, tokens: Tensor) -> Tensor:
    """Returns the places of whole sequences [..., T]. For a model that `has_axes`."""
    moved = moved_up(model, tokens)
    return torch.arange(tokens.shape[-1], device=tokens.device) - (moved.cumsum(-1) - moved)
