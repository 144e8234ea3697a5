"""Messages <-> tokens, with the model's own chat template and tokenizer. Imports transformers when first used."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError

Message = Mapping[str, str]
"""`{"role": "system" | "user" | "assistant", "content": text}`"""

_GENERIC = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Classes that are what tokenizer.json says and no more."""


class ChatEncoder:
    """Turns prompts into tokens once, before they are sampled from, and completions into text for rewards (C5)."""

    def __init__(self, model_dir: str | Path) -> None:
        """Raises ConfigError where `model_dir` holds no tokenizer that can be loaded."""
        self._directory = Path(model_dir)
        self._tokenizer = _load_tokenizer(self._directory)

    @property
    def has_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode_messages(self, messages: Sequence[Message]) -> tuple[str, tuple[int, ...]]:
        """The conversation as the template writes it, the assistant's turn opened, and its tokens.

        Raises ConfigError without a template, and where the template refuses the messages.
        """
        if not self.has_template:
            raise ConfigError(
                f"{self._directory} has no chat template; use an instruct model, add its chat_template.jinja, or set "
                "task.chat = false and write prompts as plain text"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template is a program of the model's author and may raise anything
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ConfigError(
                f"the chat template of {self._directory} refuses messages of the roles {roles}: {error}. Some templates "
                "know no system role: put task.system into the prompts then"
            ) from None
        # The template has written the special tokens already: adding them again would double the start token.
        return text, self._tokens(text, add_special_tokens=False)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Plain text with whatever the tokenizer puts around it (a start token, for most)."""
        return self._tokens(text, add_special_tokens=True)

    def encode_completion(self, text: str, ended: bool) -> tuple[int, ...]:
        """What an assistant said, as the tokens behind `encode_messages`; with its end of turn where it `ended` by itself."""
        end = self._tokenizer.eos_token_id
        return (*self._tokens(text, add_special_tokens=False), *((end,) if ended and end is not None else ()))

    def vocabulary(self) -> dict[str, int]:
        """What every id stands for, added tokens included."""
        return dict(self._tokenizer.get_vocab())

    def decode(self, tokens: Sequence[int]) -> str:
        """Text for rewards and reports, without special tokens and otherwise as it is."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def written(self, tokens: Sequence[int]) -> str:
        """Text with the special tokens in it: what the model is really given."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _tokens(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


def _load_tokenizer(directory: Path) -> Any:
    if not directory.is_dir():
        raise ConfigError(f"there is no directory {directory}; model.path must name one that holds a model")
    try:
        if _is_generic(directory):
            # AutoTokenizer comes to the same, but imports torch on its way: 2 s and 300 MB in the controller.
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
