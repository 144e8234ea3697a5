"""Images in packs: the places of tokens where images have places on three axes, and the tokens that see ahead within an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.models.image_axes import has_axes, moved_up
from headrace.models.image_blocks import ahead_in, ahead_of
from headrace.trainer.forward.tree_attention import ImagesAhead
from headrace.trainer.packing import ROOT, Segment


def image_places(model: Any, tokens: Tensor, segments: Sequence[Segment]) -> Tensor | None:
    """Returns [N] the places of the tokens of trees, as `models/image_axes.py` counts them: what an image moves up follows it into every
    branch. None for a model whose places are indices."""
    if not has_axes(model):
        return None
    steps = 1 - moved_up(model, tokens)
    before = steps.cumsum(0) - steps
    ends: list[Tensor | int] = []
    """The place behind each segment."""
    found = []
    for segment in segments:
        first = 0 if segment.parent == ROOT else ends[segment.parent]
        own = before[segment.start : segment.end] - before[segment.start] + first
        found.append(own)
        ends.append(own[-1] + steps[segment.end - 1])
    return torch.cat(found)


def images_ahead(model: Any, tokens: Tensor) -> ImagesAhead | None:
    """Returns what of `tokens` [N] sees later ones; None if nothing does."""
    if not (kinds := ahead_in(model)):
        return None
    counts = ahead_of(model, tokens).cpu()
    return ImagesAhead(counts, kinds) if counts.any() else None
