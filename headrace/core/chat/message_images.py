"""Images in messages: parts between those of text, as chat templates and users write them, and the text with places, as everything else keeps it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.core.chat.messages import text_of
from headrace.core.errors import ConfigError

Message = Mapping[str, Any]

PLACES = "image_places"
"""The key of a message under which are the places in its text, in characters, at which it shows images."""
IMAGES = "images"
"""The key of a message under which are the files of these images; missing where a row has them, as in its prompt."""
WITH_IMAGES = ("user", "tool")
"""Roles whose messages may show images while a rollout is played."""


def is_image_part(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def divided(content: Sequence[Message]) -> tuple[str, list[int], list[Message]]:
    """Returns the text of a message's parts, the places of the images in it, and their parts. Raises ConfigError for a part that is neither."""
    text, places, shown = "", [], []
    for part in content:
        if is_image_part(part):
            places.append(len(text))
            shown.append(part)
        else:
            text += text_of([part])
    return text, places, shown


def with_image_parts(message: Message, files: Sequence[str] = ()) -> dict[str, Any]:
    """Returns a message with its places as parts between those of its text. `files`: the file of each, which templates do not need."""
    shown = {key: value for key, value in message.items() if key not in (PLACES, IMAGES)}
    if not (places := message.get(PLACES)):
        return shown
    ends = [0, *places, len(message["content"])]
    texts = [message["content"][start:end] for start, end in itertools.pairwise(ends)]
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(texts):
        if number:
            parts.append({"type": "image", **({"image": files[number - 1]} if files else {})})
        parts += [{"type": "text", "text": text}] if text else []
    return {**shown, "content": parts}


def with_places(message: Message) -> dict[str, Any]:
    """Returns a message of parts as text with places, and the files of its images. Raises ConfigError for a part that is neither text nor an
    image in a file."""
    text, places, shown = divided(message["content"])
    files = [part.get("image") for part in shown]
    if wrong := [file for file in files if not isinstance(file, str) or not file]:
        raise ConfigError(
            f"a part of it is an image of type {type(wrong[0]).__name__}; give the path that the row's column holds: "
            '{"type": "image", "image": path}'
        )
    if files and message.get("role") not in WITH_IMAGES:
        raise ConfigError(
            f"it has the role {message.get('role')}; images are shown by messages of {' and '.join(WITH_IMAGES)}"
        )
    return {**message, "content": text} | ({PLACES: places, IMAGES: files} if files else {})
