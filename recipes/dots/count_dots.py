"""The reward: it is given the image that the model was shown, and counts for itself."""

from __future__ import annotations

from PIL import Image

CELL = 8


def dots_in(path: str) -> int:
    """The number of cells with a bright pixel."""
    image = Image.open(path).convert("L")
    cells = ((x, y, x + CELL, y + CELL) for y in range(0, image.height, CELL) for x in range(0, image.width, CELL))
    return sum(image.crop(cell).getextrema()[1] > 100 for cell in cells)


def right(prompts: list[str], completions: list[str], image: list[str], **columns: object) -> list[float]:
    return [float(text.strip() == str(dots_in(path))) for text, path in zip(completions, image, strict=True)]
