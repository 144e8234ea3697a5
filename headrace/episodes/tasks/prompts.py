"""Makes a `Prompt` from a question: messages, the chat template (applied here and nowhere else), columns for rewards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol

from headrace.core.chat.message_images import with_image_parts
from headrace.core.chat.messages import ARGUMENTS, TOOLS, arguments_of, begins_answer, tools_of
from headrace.core.errors import ConfigError
from headrace.core.protocols import Task
from headrace.core.types import Prompt
from headrace.episodes.tasks.config import TaskConfig
from headrace.episodes.tasks.conversations import Message, as_messages, last_user, with_images
from headrace.models.control_tokens import texts_of
from headrace.models.images import KnownImages

RESERVED = ("prompts", "completions", "completion_tokens", "transcripts")
"""Names of arguments of reward functions that are not columns."""


class RemarkedTask(Task, Protocol):
    """A task that the rehearsal asks for what a person should know about its prompts."""

    def remarks(self) -> Sequence[str]:
        """Returns sentences on prompts that work, but perhaps not as intended."""


def open_task(
    config: TaskConfig,
    seed: int,
    encoder: Encoder,
    rows: Sequence[Mapping[str, Any]] | None = None,
    *,
    measured: bool = False,
) -> RemarkedTask:
    """Makes the task of a kind. `rows`: those that were passed from Python, if any. `measured`: whether all rows of a file are held out."""
    passed = [rows] if config.facts.passed else []
    only: dict[str, Any] = {"measured": True} if measured else {}
    task: RemarkedTask = resolve_name(config.facts.opens)(config, seed, encoder, *passed, **only)
    return task


class Encoder(Protocol):
    """The part of `chat.ChatEncoder` that tasks use."""

    @property
    def shows_tools(self) -> str: ...

    def argument_problem(self, names: Iterable[str]) -> str: ...

    def specials_in(self, messages: Sequence[Mapping[str, Any]]) -> set[str]: ...

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
    ) -> tuple[str, tuple[int, ...]]: ...

    def encode_text(self, text: str) -> tuple[int, ...]: ...

    @property
    def unknown(self) -> int | None: ...

    def lacking(self, characters: Iterable[str]) -> set[str]: ...

    @property
    def images(self) -> KnownImages | None: ...


class PromptMaker:
    """Makes prompts: puts the system message and the solved examples before a question, and encodes them."""

    def __init__(self, config: TaskConfig, encoder: Encoder, examples: Sequence[tuple[str, str]] = ()) -> None:
        """`examples`: pairs of question and answer. Raises ConfigError for a template's argument that the template does not know."""
        self._chat, self._encoder = config.chat, encoder
        self._front: list[Message] = [{"role": "system", "content": config.system}] if config.system else []
        for question, answer in examples:
            self._front += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if config.template and (problem := encoder.argument_problem(config.template)):
            raise ConfigError(f"task.template: {problem}")

    def make(
        self,
        id: str,
        question: str | list[Message],
        columns: dict[str, Any],
        chat: str = "",
        images: Sequence[Path] = (),
    ) -> Prompt:
        """`question`: the user's text, or a whole conversation, which the column `chat` holds as well. The prompt's text is the last
        user message, before whose text the `images` are shown, files named by their digests. Raises ConfigError if the chat template refuses the messages."""
        if not self._chat:
            assert isinstance(question, str)
            return Prompt(id, question, self._encoder.encode_text(question), columns)
        messages = as_messages(question)
        try:
            given = (
                [*self._front, *map(with_image_parts, with_images(messages, len(images)))],
                tools_of(columns),
                arguments_of(columns),
            )
            _, tokens = self._encoder.encode_messages(*given)
            if self._encoder.images is not None:
                tokens = self._encoder.images.placed(tokens, [path.name for path in images])
        except ConfigError as error:  # the template refuses it
            raise ConfigError(f"prompt {id}: {error}") from None
        return Prompt(id, last_user(messages), tokens, columns, chat, images=tuple(map(str, images)))

    def check(self, columns: Mapping[str, Any]) -> None:
        """Raises ConfigError for tools and arguments of a row that the template would leave out without a word."""
        if not self._chat:
            return
        if tools_of(columns) and (problem := self._encoder.shows_tools):
            raise ConfigError(f"{problem}. Or rename the column {TOOLS}, if it is for the reward alone")
        if (names := arguments_of(columns)) and (problem := self._encoder.argument_problem(names)):
            raise ConfigError(f"the column {ARGUMENTS}: {problem}")

    def remarks(self, questions: Iterable[tuple[str | list[Message], Mapping[str, Any]]] = ()) -> list[str]:
        """Returns sentences on prompts that are used in another way than one may expect. `questions`: with the columns of each."""
        lacking = _Lacking(self._encoder)
        if not self._chat:
            for question, _ in questions:
                lacking.read(question)
            return [*lacking.remarks()]
        held, specials, begun, rows = set(self._encoder.specials_in(self._front)), 0, list[str](), 0
        for question, columns in questions:
            rows += 1
            messages = as_messages(question)
            beside = {"role": "", "content": [columns.get(TOOLS), columns.get(ARGUMENTS)]}
            found = self._encoder.specials_in([*messages, beside])
            held, specials = held | found, specials + bool(found)
            begun += [messages[-1]["content"]] if begins_answer(messages) else []
            said = [(message.get("content"), message.get("tool_calls")) for message in (*self._front, *messages)]
            lacking.read([*said, beside["content"]])
        return [*_of_specials(held, specials, rows), *_of_begun(begun, rows), *lacking.remarks()]


class _Lacking:
    """Counts the rows with characters that the model cannot tell apart."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._known, self._lacking = set[str](), set[str]()
        self._rows = self._with = 0

    def read(self, row: Any) -> None:
        """`row`: all texts that its prompt is made of, within lists and mappings."""
        if self._encoder.unknown is None:  # most tokenizers have a token for every byte
            return
        characters = {one for text in texts_of(row) for one in text}
        new = characters - self._known
        self._lacking |= self._encoder.lacking(new)
        self._known |= new
        self._rows, self._with = self._rows + 1, self._with + (not self._lacking.isdisjoint(characters))

    def remarks(self) -> Iterator[str]:
        if self._with:
            yield (
                f"{self._with} of {self._rows} rows hold characters that the model's tokenizer has no token for "
                f"({', '.join(map(repr, sorted(self._lacking)[:5]))}): the model reads one unknown token in their place; write them otherwise, or use a model "
                "that knows them"
            )


def _of_specials(held: set[str], count: int, rows: int) -> Iterator[str]:
    if held:
        where = f"{count} of {rows} rows hold" if count else "task.system or an example holds"
        yield (
            f"{where} the text of special tokens ({', '.join(sorted(held)[:5])}), which the model reads as text; set "
            'task.specials_in_text = "allow" if they are meant as tokens'
        )


def _of_begun(begun: Sequence[str], rows: int) -> Iterator[str]:
    if begun:
        yield (
            f"{len(begun)} of {rows} prompts end with a message of the assistant (the first: {begun[0]!r:.40}), which the policy "
            "continues; the reward reads only what it adds. Where these are finished answers, remove them from the rows"
        )


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
            f"{count} held-out prompts are requested, but there are {len(prompts)}; raise task.held_out or lower eval.prompts"
        )
    return list(prompts[:count])
