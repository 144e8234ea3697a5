"""The tokenizer of a model, without torch where that can be, the text of its tokens, and the tokens that end a completion."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace.core.errors import ConfigError

# --- Loads the tokenizer of a model, without torch where that can be.


_GENERIC = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Tokenizer classes that add nothing to tokenizer.json."""


def load_tokenizer(directory: Path) -> Any:
    """Returns the tokenizer of transformers. Raises ConfigError if the directory holds none that can be loaded."""
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
        message = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(
            f"{directory} has no tokenizer that can be loaded ({type(error).__name__}: {message}); save it beside the model with "
            "tokenizer.save_pretrained(directory)"
        ) from None


def _is_generic(directory: Path) -> bool:
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return (directory / "tokenizer.json").exists() and config.get("tokenizer_class") in _GENERIC


# --- The text of tokens, special tokens shown, as engines, rewards and servers read it
# SentencePiece's vocabularies with byte fallback have a token for each byte. The decoder of such a tokenizer gives up a whole run of these
# tokens where one byte of it is wrong: of three smileys, of which the last was cut by `max_tokens`, it writes none. Here a run is read as
# vocabularies of bytes are, each wrong part by itself, so that more tokens never change the text of those before them.


_NO_TEXT = "\ufffd"


def decoder_of(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """`tokenizer`: of transformers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    found = {byte: backend.token_to_id(_of_byte(byte)) for byte in range(256)} if backend and backend.decoder else {}
    bytes_of = {token: bytes([byte]) for byte, token in found.items() if token is not None}

    def decode(tokens: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if _NO_TEXT not in text or backend is None or bytes_of.keys().isdisjoint(tokens):
            return text
        return str(backend.decoder.decode(list(_with_wrong_bytes_apart(tokens, bytes_of, backend.id_to_token))))

    return decode


def _of_byte(byte: int) -> str:
    return f"<0x{byte:02X}>"


def _with_wrong_bytes_apart(
    tokens: Sequence[int], bytes_of: Mapping[int, bytes], spell: Callable[[int], str | None]
) -> Iterator[str]:
    """Yields the tokens as the vocabulary has them, with a sign in the place of bytes that are no text."""
    for of_bytes, run in itertools.groupby(tokens, bytes_of.__contains__):
        if not of_bytes:
            yield from filter(None, map(spell, run))
            continue
        for character in b"".join(bytes_of[token] for token in run).decode(errors="replace"):
            yield from [_NO_TEXT] if character == _NO_TEXT else map(_of_byte, character.encode())


# --- The tokens that end a completion, by the files of a model
# The engine in our process, the clients of servers, rewards, teachers and exports go by the same ones.
#
# Files disagree about them: tools for supervised fine-tuning write a template that ends an answer with `<|im_end|>`, and leave the config's
# `<|endoftext|>` of the base model. Such a model writes `<|im_end|>`, and would be sampled through all turns of a conversation with itself.


QUESTION, ANSWER = "Which river is that?", "It is the Elbe."


class Endings(NamedTuple):
    """The ends of completions, by token id."""

    named: frozenset[int]
    """Tokens that generation_config.json and config.json name."""
    turn: int | None
    """The special token that the chat template writes behind an answer; None without a template, or where it writes plain text."""
    eos: int | None
    """The tokenizer's."""

    @property
    def all(self) -> frozenset[int]:
        """Every token that ends a completion."""
        return self.named if self.turn is None else self.named | {self.turn}

    @property
    def written(self) -> int | None:
        """The end of an answer that somebody else than the model has written; None if nothing ends one."""
        if self.turn is not None:
            return self.turn
        return self.eos if self.eos in self.named or not self.named else min(self.named)


def endings_of(model_dir: Path, tokenizer: Any) -> Endings:
    """`tokenizer`: of transformers; None if the model has none."""
    generation = _read(model_dir / "generation_config.json") or {}
    named = [generation.get("eos_token_id"), _of_config(model_dir)]
    lists = [entry if isinstance(entry, list) else [entry] for entry in named if entry is not None]
    tokens = frozenset(token for tokens in lists for token in tokens)
    return Endings(tokens, end_of_turn(tokenizer), getattr(tokenizer, "eos_token_id", None))


def end_tokens(model_dir: Path) -> frozenset[int]:
    """Returns every token that ends a completion. Loads the tokenizer, if there is one, once for all members of a fleet."""
    files = (path for path in model_dir.glob("*") if path.suffix in (".json", ".jinja", ".model"))
    return _end_tokens(model_dir, tuple(sorted((path.name, path.stat().st_mtime_ns) for path in files)))


@functools.lru_cache(maxsize=4)
def _end_tokens(model_dir: Path, written: tuple[tuple[str, int], ...]) -> frozenset[int]:
    """`written`: the times of its files, so that changed ones are read anew."""
    try:
        tokenizer = load_tokenizer(model_dir)
    except ConfigError:
        tokenizer = None
    return endings_of(model_dir, tokenizer).all


def name_all(directory: Path) -> None:
    """Names in generation_config.json the end that only the chat template knows, so that other engines end there too."""
    try:
        endings = endings_of(directory, load_tokenizer(directory))
    except ConfigError:
        return
    if endings.turn is None or endings.turn in endings.named:
        return
    path = directory / "generation_config.json"
    ends = [endings.turn, *sorted(endings.named)]
    path.write_text(json.dumps({**(_read(path) or {}), "eos_token_id": ends}, indent=2) + "\n", encoding="utf-8")


def as_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message as the templates of models that see read it: some write nothing of a content that is a text."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def writes_parts_alone(tokenizer: Any) -> bool:
    """Whether the chat template writes nothing of a content that is a text, as those of some models that see."""

    def writes(content: Any) -> bool:
        try:
            text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        except Exception:  # a template may raise anything
            return False
        return QUESTION in text and "'type'" not in text  # which printed a list instead of reading its parts

    alone = bool(getattr(tokenizer, "chat_template", None)) and not writes(QUESTION)
    return alone and writes([{"type": "text", "text": QUESTION}])


def end_of_turn(tokenizer: Any) -> int | None:
    """Returns the special token that the chat template writes behind an answer. None without a template, and where plain text follows."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    if writes_parts_alone(tokenizer):
        turns = [as_parts(turn) for turn in turns]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except (
        Exception
    ):  # a template is a program of the model's author and may raise anything: nobody else can use it either
        return None
    _, found, behind = text.rpartition(ANSWER)
    if not found:
        return None
    special = {token for token, added_token in tokenizer.added_tokens_decoder.items() if added_token.special}
    for token in tokenizer(behind, add_special_tokens=False)["input_ids"]:
        if token in special or token in tokenizer.all_special_ids:
            return int(token)
        if tokenizer.decode([token]).strip():
            return None
    return None


def _of_config(model_dir: Path) -> Any:
    config = _read(model_dir / "config.json")
    if config is None:
        return None
    text = config.get("text_config") or config
    if "eos_token_id" in text:
        return text["eos_token_id"]
    from transformers import AutoConfig  # the default of the model's class; imported late because it imports torch

    return getattr(AutoConfig.from_pretrained(model_dir, local_files_only=True).get_text_config(), "eos_token_id", None)


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
