"""The value of a prompt column: a text, or messages in one of the forms that data sets have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.core.chat.message_images import IMAGES, PLACES, divided, with_image_parts
from headrace.core.chat.messages import role_problem
from headrace.core.errors import ConfigError, nearest
from headrace.core.rewards import named_twice
from headrace.episodes.tasks.config import TaskConfig

Message = dict[str, Any]

_SHAREGPT = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}
"""Speakers of ShareGPT's rows (`{"from": ..., "value": ...}`) and their roles."""


def prompt_of(value: Any, config: TaskConfig) -> str | list[Message]:
    """Returns a prompt as text or as messages `{role, content}` whose content is text, with the places of images as `PLACES`. Raises ConfigError
    with what is wrong, without a subject."""
    if isinstance(value, str):
        if not value:
            raise ConfigError("is empty")
        return value
    if not isinstance(value, list):
        raise ConfigError(f"is {_kind(value)}; a prompt is a string or a list of messages {{role, content}}")
    if not value:
        raise ConfigError("is an empty list of messages")
    messages = [_message(message, place) for place, message in enumerate(value, 1)]
    if not config.images and any(PLACES in message for message in messages):
        raise ConfigError(
            "has a part of a message that is an image; set task.images to the columns with the images, or remove such rows"
        )
    if problem := role_problem(messages):
        raise ConfigError(f"is a list whose {problem}")
    if not config.chat:
        raise ConfigError(
            "is a list of messages, which need the chat template; set task.chat = true, or give plain strings"
        )
    if messages[0]["role"] == "system" and (config.system or config.examples):
        raise ConfigError("begins with a system message of its own; remove it, or task.system and task.examples")
    return messages


def as_messages(prompt: str | list[Message]) -> list[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def last_user(messages: Sequence[Mapping[str, Any]]) -> str:
    text: str = messages[place_of_question(messages)]["content"]
    return text


def place_of_question(messages: Sequence[Mapping[str, Any]]) -> int:
    """Returns the place of the user's last message, or of the last one where no user speaks."""
    asked = [place for place, message in enumerate(messages) if message["role"] == "user"]
    return asked[-1] if asked else len(messages) - 1


def _message(given: Any, place: int) -> Message:
    """Arrow writes null for keys that other messages have."""
    message = {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else {}
    if "role" not in message and isinstance(message.get("from"), str):
        message = _of_sharegpt(message, place)
    message = {key: value for key, value in message.items() if key not in (PLACES, IMAGES)}
    content, calls = message.get("content", ""), message.get("tool_calls")
    spoken = isinstance(content, (str, list)) and ("content" in message or calls)
    if not isinstance(message.get("role"), str) or not spoken:
        raise ConfigError("is a list with something else than messages {role: text, content: text}")
    if isinstance(content, list) and not all(isinstance(part, dict) for part in content):
        raise ConfigError(f"has a list in message {place} that holds no parts {{type: text, text: ...}}")
    try:
        message["content"], places = _with_places(content)
    except ConfigError as error:
        raise ConfigError(f"has a message {place} that is not text: {error}. Remove such rows") from None
    if places:
        message[PLACES] = places
    return message | ({"tool_calls": [_call(call, place) for call in calls]} if calls else {})


def _with_places(content: str | Sequence[Mapping[str, Any]]) -> tuple[str, list[int]]:
    """Returns the text of a message, and the places of images in it. Raises ConfigError for a part that is neither."""
    if isinstance(content, str):
        return content, []
    text, places, shown = divided(content)
    for part in shown:
        if held := [name for name, value in part.items() if name != "type" and value is not None]:
            raise ConfigError(
                f"a part of it holds an image of its own ({held[0]}); put it into a column that task.images names, and leave "
                '{"type": "image"} in its place'
            )
    return text, places


def count_places(prompt: str | Sequence[Message]) -> int:
    """Returns the number of places for images in a prompt's messages."""
    return 0 if isinstance(prompt, str) else sum(len(message.get(PLACES, ())) for message in prompt)


def with_images(messages: Sequence[Message], count: int) -> list[Message]:
    """Returns the messages with places for so many images: those that they have, or else before the text of the last one of the user."""
    if count_places(messages) or not count:
        return list(messages)
    last = place_of_question(messages)
    return [*messages[:last], {**messages[last], PLACES: [0] * count}, *messages[last + 1 :]]


def with_files(messages: Sequence[Message], files: Sequence[str]) -> list[Message]:
    """Returns messages whose images are parts with their files, in order: those of a row, for whoever shows them."""
    left = list(files)
    shown = []
    for message in with_images(messages, len(files)):
        count = len(message.get(PLACES, ()))
        shown.append(with_image_parts(message, left[:count]))
        del left[:count]
    return shown


def _of_sharegpt(message: Message, place: int) -> Message:
    speaker = message["from"]
    if speaker not in _SHAREGPT:
        raise ConfigError(
            f"is a list whose message {place} is from {speaker}{nearest(speaker, _SHAREGPT)}; there are {', '.join(_SHAREGPT)}"
        )
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": _SHAREGPT[speaker], "content": message.get("value"), **rest}


def _call(given: Any, place: int) -> Message:
    """Returns a tool call with its arguments as an object, as chat templates expect them."""
    given = {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else {}
    function = given.get("function", given)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConfigError(f"has a tool call without a name in message {place}; write {{function: {{name, arguments}}}}")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and (twice := named_twice(arguments)):
        raise ConfigError(
            f"has a tool call in message {place} whose arguments have {twice} twice; leave one of them out"
        )
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) and arguments else arguments
    except ValueError:
        arguments = ()
    if not isinstance(arguments, dict) and arguments not in (None, ""):
        raise ConfigError(f"has a tool call in message {place} whose arguments are not a JSON object")
    named = {"name": function["name"], "arguments": arguments or {}}
    return (
        {**given, "type": "function", "function": named}
        if "function" in given
        else {"type": "function", "function": named}
    )


def _kind(value: Any) -> str:
    return "empty (null)" if value is None else f"of type {type(value).__name__}"
