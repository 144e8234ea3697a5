"""Converts messages to tokens and back, with the model's own chat template and tokenizer. Imports transformers at first use."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from headrace.chat.formats import CallFormat
from headrace.chat.probing import format_of
from headrace.errors import ConfigError
from headrace.models.endings import Endings, endings_of
from headrace.models.resolve import resolve_model
from headrace.models.tokenizer import load_tokenizer
from headrace.types import Completion

SpecialTokens = Literal["show", "hide"]
Message = Mapping[str, Any]
"""`{"role": "system" | "user" | "assistant", "content": text}`; with tools, those that `headrace.chat.messages.for_template` returns."""


class ChatEncoder:
    """Encodes prompts once, before they are sampled from, and decodes completions for rewards (C5)."""

    def __init__(self, model_dir: str | Path) -> None:
        """Raises ConfigError if `model_dir` holds no tokenizer that can be loaded."""
        self.directory = Path(model_dir)
        self._tokenizer = load_tokenizer(self.directory)
        self._special: SpecialTokens = "show"

    def with_special_tokens(self, special: SpecialTokens) -> ChatEncoder:
        """Returns an encoder of the same tokenizer, which shows or hides special tokens in the text that it decodes."""
        other = copy.copy(self)
        other._special = special
        for cached in ("_hidden", "_hidden_beside_calls"):
            vars(other).pop(cached, None)
        return other

    @property
    def has_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def template(self) -> str:
        """The chat template, a program in Jinja; empty without one."""
        return str(self._tokenizer.chat_template or "")

    @cached_property
    def call_format(self) -> CallFormat:
        """The format in which the model writes tool calls. Raises ConfigError if the template shows it no tools."""
        self._check_template()
        return format_of(lambda messages, tools: self._rendered(messages, tools, opened=False), str(self.directory))

    def encode_messages(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, tuple[int, ...]]:
        """Returns the conversation as the template writes it, with the assistant's turn opened, and its tokens.

        `tools`: as `headrace.chat.messages.described` returns them, for a template that has a `call_format`. Raises ConfigError if there
        is no template, or the template refuses the messages.
        """
        self._check_template()
        try:
            text = self._rendered(messages, tools, opened=True)
        except Exception as error:  # a template is a program of the model's author and may raise anything
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ConfigError(
                f"the chat template of {self.directory} refuses messages with the roles {roles}: {error}{self._remedy(messages, tools)}"
            ) from None
        # The template has already written the special tokens: adding them again would double the start token.
        return text, self._tokens(text, add_special_tokens=False)

    def _remedy(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        """A change of the messages with which the template accepts them, as the end of a sentence; empty if none is known."""

        def accepts(changed: Sequence[Message], tools: Sequence[Mapping[str, Any]] = tools) -> bool:
            try:
                self._rendered(changed, tools, opened=True)
            except Exception:  # as above
                return False
            return bool(changed)

        joined = [
            one for one, before in zip(messages, [{}, *messages], strict=False) if one.get("role") != before.get("role")
        ]
        system = [one for one in messages if one.get("role") != "system"]
        if len(joined) < len(messages) and accepts(joined):
            return ". It wants users and assistants to take turns: make one message of those that follow each other with the same role"
        if len(system) < len(messages) and accepts(system):
            return ". It has no system role: put that text (task.system) into the first question"
        if tools and accepts(messages, ()):
            return '. It shows no tools: set environment.tools = "hermes", which writes them into the system message'
        return ""

    def written_messages(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Returns the conversation as the template writes it, without opening another turn. For messages that `encode_messages` accepts."""
        return self._rendered(messages, tools, opened=False)

    def _check_template(self) -> None:
        if not self.has_template:
            raise ConfigError(
                f"{self.directory} has no chat template; use an instruct model, add its chat_template.jinja, or set "
                "task.chat = false and write prompts as plain text"
            )

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, *, opened: bool) -> str:
        return self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools or ()) or None,  # templates ask whether there are tools, and an empty list is one for some
            add_generation_prompt=opened,
            tokenize=False,
        )

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of plain text, with the special tokens that the tokenizer adds (usually a start token). A start token that the text
        begins with is not added once more."""
        tokens = self._tokens(text, add_special_tokens=True)
        return tokens[1:] if self.bos is not None and tokens[:2] == (self.bos, self.bos) else tokens

    @property
    def bos(self) -> int | None:
        """The start token; None if the tokenizer has none."""
        return self._tokenizer.bos_token_id

    def encode_completion(self, text: str, ended: bool) -> tuple[int, ...]:
        """Returns the tokens of an assistant's answer, which follow those of `encode_messages`. `ended`: whether to add the end of turn."""
        end = self.endings.written if ended else None
        return (*self._tokens(text, add_special_tokens=False), *(() if end is None else (end,)))

    @cached_property
    def endings(self) -> Endings:
        """The tokens that end a completion, by the files of the model."""
        return endings_of(self.directory, self._tokenizer)

    def end_tokens(self) -> frozenset[int]:
        """Returns every token that ends a completion."""
        return self.endings.all

    def has_ended(self, completion: Completion) -> bool:
        """Whether the model itself has written an end, rather than a stop string or the limit of tokens."""
        return completion.stop == "stop" and not self.endings.all.isdisjoint(completion.tokens[-1:])

    def vocabulary(self) -> dict[str, int]:
        """Returns the id of every token, added tokens included."""
        return dict(self._tokenizer.get_vocab())

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns text for rewards, environments and reports: without the tokens that end a completion and, if they are hidden, without all
        special tokens; otherwise unchanged."""
        return self.written([token for token in tokens if token not in self._hidden])

    def decode_with_calls(self, tokens: Sequence[int]) -> str:
        """Returns the text of `decode`, with the special tokens that mark a tool call. Raises ConfigError without a `call_format`."""
        return self.written([token for token in tokens if token not in self._hidden_beside_calls])

    @cached_property
    def special(self) -> Mapping[int, str]:
        """The tokenizer's special tokens, by id."""
        added = {token: one.content for token, one in self._tokenizer.added_tokens_decoder.items() if one.special}
        return added | dict(zip(self._tokenizer.all_special_ids, self._tokenizer.all_special_tokens, strict=True))

    @cached_property
    def _hidden(self) -> frozenset[int]:
        return self.endings.all | (frozenset(self.special) if self._special == "hide" else frozenset())

    @cached_property
    def _hidden_beside_calls(self) -> frozenset[int]:
        markers = self.call_format.markers
        return frozenset(token for token in self._hidden if self.special.get(token) not in markers)

    def written(self, tokens: Sequence[int]) -> str:
        """Returns text with the special tokens: exactly what the model is given."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _tokens(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


async def open_model(path: str, special: SpecialTokens = "show") -> tuple[Path, ChatEncoder]:
    """Returns the model's directory (fetched if it is not in the cache) and its tokenizer."""
    model_dir = await asyncio.to_thread(resolve_model, path)
    return model_dir, (await asyncio.to_thread(ChatEncoder, model_dir)).with_special_tokens(special)
