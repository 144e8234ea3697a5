"""Images in the families of Gemma 3 and 4: the tokens of an image see each other in both directions, and everything else is causal.

    index         0 1 | 2 3 4 5 | 6 7            an image of four features
    sees up to    0 1 | 5 5 5 5 | 6 7
    sees ahead    0 0 | 3 2 1 0 | 0 0            tokens behind its own

(create_masks_for_vision_model of transformers, modeling_gemma3.py and modeling_gemma4.py: in every layer of Gemma 3, in those with a sliding window of
Gemma 4. A window limits what a token sees behind it, and not within its image ahead.) Each feature has its number of tokens ahead in the table, so
that what is seen follows from the token alone, wherever a sequence is cut, forked or packed. An image must be forwarded to its end in one call,
and may begin in an earlier one: what was computed there had seen all of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

WINDOWED, FULL = "sliding_attention", "full_attention"
"""The kinds of layers, as `layer_types` of a config has them."""


def ahead_in_image(count: int) -> Tensor:
    """[count] int64: by how many tokens each feature of an image sees ahead."""
    return torch.arange(count - 1, -1, -1)


def kinds_that_see_ahead(decoder: Any) -> list[str]:
    """Returns the kinds of layers in which a model's tokens see the rest of their image, by the masks that its own code makes. `decoder`: without
    its head, of a model on whose masks an attention function of transformers depends."""
    masks = _masks(decoder, torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2, dtype=torch.long), {})
    return sorted(kind for kind, mask in masks.items() if mask is not None and _is_seen(mask[0, 0, 0, 1]))


def _is_seen(element: Tensor) -> bool:
    """`element`: of a mask of truths, or of one that is added to scores."""
    return bool(element) if element.dtype == torch.bool else float(element) == 0


def ahead_in(model: Any) -> frozenset[str]:
    """Returns the kinds of layers in which the tokens of a model's images see ahead; empty for a model all of whose tokens see back alone."""
    table = getattr(model.get_input_embeddings(), "images", None)
    return frozenset() if table is None else table.ahead_in


def kind_of(window: int | None) -> str:
    return WINDOWED if window else FULL


def ahead_of(model: Any, tokens: Tensor) -> Tensor:
    """Returns by how many tokens each of `tokens` (int64, any shape) sees ahead. For a model that has `ahead_in`."""
    embedding = model.get_input_embeddings()
    found = torch.zeros_like(tokens)
    if not tokens.is_meta and (seen := tokens >= embedding.num_embeddings).any():
        found[seen] = embedding.images.ahead(tokens[seen] - embedding.num_embeddings)
    return found


def give_masks(model: Any) -> None:
    """Lets a language model make its own masks of calls whose tokens are images among others."""
    model.base_model.register_forward_pre_hook(_give_masks, with_kwargs=True)


def _give_masks(
    inner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    tokens = kwargs.get("input_ids")
    if tokens is None or tokens.is_meta or not (ahead := ahead_of(inner, tokens)).any():
        return None
    if ahead[:, -1].any():
        raise RuntimeError("a call ends within an image, whose tokens see each other: forward it to its end")
    index = torch.arange(tokens.shape[1], device=tokens.device)
    of_image = tokens >= inner.get_input_embeddings().num_embeddings
    ends = torch.where(of_image, index + ahead, -1)  # by which an image is known in its row
    return args, {**kwargs, "attention_mask": _masks(inner, tokens, ends, kwargs)}


def _masks(inner: Any, tokens: Tensor, images: Tensor, given: dict[str, Any]) -> dict[str, Tensor | None]:
    """The masks of a call, by kind of layer, from the model's own code. `images` [B, T]: a number for each image in its row, -1 for a text; `given`:
    the other arguments of the call."""
    cache = given.get("cache")
    before = 0 if cache is None else cache.get_seq_length()
    made: dict[str, Tensor | None] = import_module(type(inner).__module__).create_masks_for_vision_model(
        config=inner.config,
        inputs_embeds=inner.get_input_embeddings().weight.new_empty(*tokens.shape, 0),
        attention_mask=given.get("attention_mask"),
        cache=cache,
        position_ids=given.get("position_ids"),
        block_sequence_ids=torch.nn.functional.pad(images, (before, 0), value=-1),
    )
    return made
