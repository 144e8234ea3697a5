"""Makes a `Prompt` from a question: messages, the chat template (applied here and nowhere else), columns for rewards."""

from __future__ import annotations

import datetime
import decimal
import difflib
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from headrace.errors import ConfigError
from headrace.tasks.config import TaskConfig
from headrace.types import Prompt

Message = dict[str, str]

RESERVED = ("prompts", "completions", "completion_tokens", "transcripts")
"""Names of arguments of reward functions that are not columns."""


class Encoder(Protocol):
    """The part of `chat.ChatEncoder` that tasks use."""

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> tuple[str, tuple[int, ...]]: ...

    def encode_text(self, text: str) -> tuple[int, ...]: ...


class PromptMaker:
    """Makes prompts: puts the system message and the solved examples before a question, and encodes them."""

    def __init__(self, config: TaskConfig, encoder: Encoder, examples: Sequence[tuple[str, str]] = ()) -> None:
        """`examples`: pairs of question and answer."""
        self._chat, self._encoder = config.chat, encoder
        self._front: list[Message] = [{"role": "system", "content": config.system}] if config.system else []
        for question, answer in examples:
            self._front += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def make(self, id: str, question: str | list[Message], columns: dict[str, Any], chat: str = "") -> Prompt:
        """`question`: the user's text, or a whole conversation, which the column `chat` holds as well. The prompt's text is the last
        user message. Raises ConfigError if the chat template refuses the messages."""
        if not self._chat:
            assert isinstance(question, str)
            return Prompt(id, question, self._encoder.encode_text(question), columns)
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
        try:
            _, tokens = self._encoder.encode_messages([*self._front, *messages])
        except ConfigError as error:  # the template refuses it
            raise ConfigError(f"prompt {id}: {error}") from None
        return Prompt(id, last_user(messages), tokens, columns, chat)


def last_user(messages: Sequence[Message]) -> str:
    asked = [message["content"] for message in messages if message["role"] == "user"]
    return asked[-1] if asked else messages[-1]["content"]


def prompt_problem(value: Any, config: TaskConfig) -> str:
    """Says what is wrong with the value of a prompt column; empty if nothing is."""
    if isinstance(value, str):
        return "" if value else "is empty"
    if not isinstance(value, list):
        return f"is {_kind(value)}; a prompt is a string or a list of messages {{role, content}}"
    if not value:
        return "is an empty list of messages"
    if not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
    ):
        return "is a list with something else than messages {role: text, content: text}"
    if not config.chat:
        return "is a list of messages, which need the chat template; set task.chat = true, or give plain strings"
    if value[0]["role"] == "system" and (config.system or config.examples):
        return "begins with a system message of its own; remove it, or task.system and task.examples"
    return ""


def _kind(value: Any) -> str:
    return "empty (null)" if value is None else f"of type {type(value).__name__}"


def jsonable(value: Any) -> Any:
    """Returns the value in a form that JSON and msgpack can hold: dates as ISO text, tuples and sets as lists, NumPy values as plain ones,
    integers beyond 64 bits as their digits. Raises TypeError for a value that has no such form."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, float):
        return float(value)  # numpy.float64 is a float and numpy.str_ a str, which encoders refuse all the same
    if isinstance(value, str):
        return _whole_text(str(value))
    if isinstance(value, Mapping):
        return {str(key): jsonable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return sorted((jsonable(inner) for inner in value), key=repr)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return float(value)
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    raise TypeError(f"{type(value).__name__} has no place in JSON")


def _whole_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TypeError("text with half of a surrogate pair has no place in UTF-8") from None
    return text


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns `; did you mean x?` with names that are similar; empty if none is."""
    near = difflib.get_close_matches(name, list(names), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def seed_from(*parts: object) -> int:
    """Returns 31 bits that depend on the names and numbers alone, not on the machine."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest(), "big") >> 1


def digest_of(parts: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def checked_cursor(state: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Returns the cursor. Raises ConfigError if it belongs to other data, in which prompt ids would name other prompts."""
    if state.get("source") != source:
        raise ConfigError(
            "the task is not the one that the checkpoint was written with (its data or settings changed); give the old data "
            "back, or start a new run from the exported weights"
        )
    return state


def take(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    if count > len(prompts):
        raise ConfigError(
            f"{count} held-out prompts are asked for, but there are {len(prompts)}; raise task.held_out or lower eval.prompts"
        )
    return list(prompts[:count])
