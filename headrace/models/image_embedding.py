"""The features of images as further rows of a model's embedding: a frozen table, read from the disk where a row is needed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from headrace.core.errors import ConfigError
from headrace.models.image_axes import give_axes
from headrace.models.image_blocks import give_masks
from headrace.models.images import FOLDER, ROWS, index_of

FEATURES, MOVES, ADDED, AHEAD = "features", "moves", "added", "ahead"
"""The names of the tables in their file."""


class ImageTable:
    """[R, H] float32: the features of all images of a run, one after the other, and what else a model has of each. No module and no tensor, so that
    it is in no state dict, no copy of a model has a second one, and no optimizer moves it."""

    def __init__(self, directory: Path) -> None:
        with safe_open(directory / FOLDER / ROWS, "pt") as file:
            parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        self._rows: Tensor = parts[FEATURES]
        self._moves: Any = parts.get(MOVES)
        self._added: Any = parts.get(ADDED)
        self._ahead: Any = parts.get(AHEAD)
        self.ahead_in = frozenset[str]() if self._ahead is None else frozenset(index_of(directory)["ahead_in"])
        """The kinds of layers in which a feature sees the rest of its image."""

    def __len__(self) -> int:
        return len(self._rows)

    def __deepcopy__(self, memo: Any) -> ImageTable:
        return self

    @property
    def width(self) -> int:
        return self._rows.shape[1]

    @property
    def layers(self) -> int:
        """The layers that add features of their own."""
        return 0 if self._added is None else self._added.shape[1]

    def rows(self, numbers: Tensor) -> Tensor:
        """Returns rows [n, H] on the device of `numbers` [n]. Raises IndexError for a number without a row."""
        return self._rows[numbers.cpu()].to(numbers.device)

    def moves(self, numbers: Tensor) -> Tensor:
        """[n, 4], as `image_axes.grid_moves` has them. For a model whose images have places on three axes."""
        found: Tensor = self._moves[numbers.cpu()].to(numbers.device)
        return found

    def added(self, numbers: Tensor) -> Tensor:
        """[n, layers, H]: what the first layers add to their results."""
        found: Tensor = self._added[numbers.cpu()].to(numbers.device)
        return found

    def ahead(self, numbers: Tensor) -> Tensor:
        """[n] int64: by how many tokens each sees ahead. For a model with `ahead_in`."""
        found: Tensor = self._ahead[numbers.cpu()].to(numbers.device)
        return found


class ImageEmbedding:
    """Half of an embedding, whose other half is the model's own class, which may scale. Tokens beyond the vocabulary are rows of the table, as they
    are. Its weight, its name and its gradient are those of the other half."""

    images: ImageTable
    num_embeddings: int

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = super().forward(tokens.clamp(max=self.num_embeddings - 1))  # type: ignore[misc]
        seen = tokens >= self.num_embeddings
        if tokens.is_meta or not seen.any():
            return found
        rows = self.images.rows(tokens[seen] - self.num_embeddings)
        return found.index_put((seen,), rows.to(found.dtype))


class PaddedEmbedding:
    """Half of an embedding in which tokens beyond the vocabulary have the row of one of its tokens, as Gemma 4 has it for embeddings of every layer."""

    num_embeddings: int
    of_images: int

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = super().forward(tokens.masked_fill(tokens >= self.num_embeddings, self.of_images))  # type: ignore[misc]
        return found


def _over(half: type, other: type) -> type:
    return type(half.__name__, (half, other), {})


def vocabulary_of(model: Any) -> float:
    """Returns the number at which features of images begin; infinity where there are none."""
    embedding = model.get_input_embeddings()
    return embedding.num_embeddings if isinstance(embedding, ImageEmbedding) else math.inf


def show_images(model: Any, directory: Path) -> int:
    """Lets a language model see the images of its directory, if there are any. Returns the number of rows. Raises ConfigError if they are not for
    this model."""
    if not (directory / FOLDER).is_dir():
        return 0
    embedding: Any = model.get_input_embeddings()
    table = ImageTable(directory)
    if not len(table):
        return 0
    if not isinstance(embedding, nn.Embedding) or embedding.embedding_dim != table.width:
        raise ConfigError(
            f"{type(model).__name__} does not embed tokens as a model that sees the images of {directory} does; choose another model"
        )
    # The class alone changes, so that the weight stays the same object wherever it is tied or known by its name.
    embedding.__class__ = _over(ImageEmbedding, type(embedding))
    vars(embedding)["images"] = table
    index = index_of(directory)
    if (each := getattr(model.base_model, "embed_tokens_per_layer", None)) is not None:
        each.__class__ = _over(PaddedEmbedding, type(each))
        each.of_images = index["padding"]
    if (axis_of := index.get("axes")) is not None:
        give_axes(model, axis_of, table.layers)
    if table.ahead_in:
        give_masks(model)
    return len(table)
