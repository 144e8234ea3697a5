"""Converts messages to tokens and back, with the model's own chat template and tokenizer. Imports transformers at first use."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from headrace.chat.formats import CallFormat
from headrace.chat.probing import format_of
from headrace.errors import ConfigError
from headrace.models.endings import end_tokens
from headrace.models.resolve import resolve_model

Message = Mapping[str, Any]
"""`{"role": "system" | "user" | "assistant", "content": text}`; with tools, those that `headrace.chat.messages.for_template` returns."""

_GENERIC = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Tokenizer classes that add nothing to tokenizer.json."""


class ChatEncoder:
    """Encodes prompts once, before they are sampled from, and decodes completions for rewards (C5)."""

    def __init__(self, model_dir: str | Path) -> None:
        """Raises ConfigError if `model_dir` holds no tokenizer that can be loaded."""
        self.directory = Path(model_dir)
        self._tokenizer = _load_tokenizer(self.directory)

    @property
    def has_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

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
                f"the chat template of {self.directory} refuses messages with the roles {roles}: {error}. Some templates "
                "have no system role: put the text of task.system into the prompts instead"
            ) from None
        # The template has already written the special tokens: adding them again would double the start token.
        return text, self._tokens(text, add_special_tokens=False)

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
        """Returns the tokens of plain text, with the special tokens that the tokenizer adds (usually a start token)."""
        return self._tokens(text, add_special_tokens=True)

    def encode_completion(self, text: str, ended: bool) -> tuple[int, ...]:
        """Returns the tokens of an assistant's answer, which follow those of `encode_messages`. `ended`: whether to add the end of turn."""
        end = self._tokenizer.eos_token_id
        return (*self._tokens(text, add_special_tokens=False), *((end,) if ended and end is not None else ()))

    def end_tokens(self) -> frozenset[int]:
        """Returns the tokens that end a completion, by the files of the model."""
        return end_tokens(self.directory)

    def vocabulary(self) -> dict[str, int]:
        """Returns the id of every token, added tokens included."""
        return dict(self._tokenizer.get_vocab())

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns text for rewards and reports: without special tokens, otherwise unchanged."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def decode_with_calls(self, tokens: Sequence[int]) -> str:
        """Returns the text of `decode`, with the special tokens that mark a tool call. Raises ConfigError without a `call_format`."""
        hidden = self._hidden_beside_calls
        shown = [token for token in tokens if token not in hidden]
        return self._tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    @cached_property
    def _hidden_beside_calls(self) -> frozenset[int]:
        added, markers = self._tokenizer.added_tokens_decoder, self.call_format.markers
        return frozenset(token for token, one in added.items() if one.special and one.content not in markers)

    def written(self, tokens: Sequence[int]) -> str:
        """Returns text with the special tokens: exactly what the model is given."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _tokens(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


def _load_tokenizer(directory: Path) -> Any:
    if not directory.is_dir():
        raise ConfigError(f"there is no directory {directory}; model.path must name one that holds a model")
    try:
        if _is_generic(directory):
            # AutoTokenizer gives the same, but imports torch: 2 s and 300 MB in the controller.
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # transformers raises OSError, ValueError, TypeError, ... for the same mistake
        said = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(
            f"{directory} has no tokenizer that can be loaded ({type(error).__name__}: {said}); save it beside the model with "
            "tokenizer.save_pretrained(directory)"
        ) from None


def _is_generic(directory: Path) -> bool:
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return (directory / "tokenizer.json").exists() and config.get("tokenizer_class") in _GENERIC


async def open_model(path: str) -> tuple[Path, ChatEncoder]:
    """Returns the model's directory (fetched if it is not in the cache) and its tokenizer."""
    model_dir = await asyncio.to_thread(resolve_model, path)
    return model_dir, await asyncio.to_thread(ChatEncoder, model_dir)
