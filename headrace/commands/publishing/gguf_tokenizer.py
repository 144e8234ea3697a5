"""The tokenizer of a GGUF file, from `tokenizer.json`: byte-level BPE, whose splitting of text llama.cpp knows under a name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from headrace.core.errors import ConfigError
from headrace.models.tokenizer import end_of_turn, load_tokenizer

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {QWEN2: "qwen2", LLAMA3: "llama-bpe"}
"""Regular expressions by which models split text, and their names in llama.cpp (`llama-vocab.cpp`)."""
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Kinds of tokens, as `gguf.TokenType` numbers them."""


class GgufTokenizer(NamedTuple):
    tokens: list[str]
    """[V]"""
    kinds: list[int]
    """[V]"""
    merges: list[str]
    splitting: str
    """The name of its pre-tokenizer."""
    special: dict[str, int]
    """Ids by role: bos, eos, pad, and eot, the end of a turn in the template, as far as the model has them."""
    adds_bos: bool
    template: str
    """The chat template; empty if there is none."""


def read_tokenizer(directory: Path, rows: int) -> GgufTokenizer:
    """Reads the tokenizer of a model's directory. `rows`: of the embedding; ids without a token are unused. Raises ConfigError if llama.cpp
    would read text otherwise."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"a GGUF file holds the tokenizer, and {directory} has no tokenizer.json")
    found = json.loads(path.read_text())
    model, added = found["model"], found.get("added_tokens") or []
    splitting = _splitting(found)
    by_id = {number: token for token, number in model["vocab"].items()}
    kinds = dict.fromkeys(by_id, NORMAL)
    for one in added:
        by_id[one["id"]] = one["content"]
        kinds[one["id"]] = CONTROL if one["special"] else USER_DEFINED
    if max(by_id) >= rows:
        raise ConfigError(f"the tokenizer has a token {max(by_id)}, and the model's embedding only {rows} rows")
    settings = _read(directory / "tokenizer_config.json")
    ids = {token: number for number, token in by_id.items()}
    special = {
        role: ids[text] for role in ("bos", "eos", "pad") if (text := _text(settings.get(f"{role}_token"))) in ids
    }
    if (turn := end_of_turn(load_tokenizer(directory))) is not None:
        special["eot"] = turn  # llama.cpp ends there too
    return GgufTokenizer(
        tokens=[by_id.get(number, f"[PAD{number}]") for number in range(rows)],
        kinds=[kinds.get(number, UNUSED) for number in range(rows)],
        merges=[one if isinstance(one, str) else " ".join(one) for one in model["merges"]],
        splitting=splitting,
        special=special,
        adds_bos=_adds_bos(path, special.get("bos")),
        template=_template(directory, settings),
    )


def _splitting(tokenizer: dict[str, Any]) -> str:
    """Returns llama.cpp's name of the way in which text is split before merges."""
    model, before = tokenizer["model"], tokenizer.get("pre_tokenizer") or {}
    parts = before["pretokenizers"] if before.get("type") == "Sequence" else [before]
    last = parts[-1]
    whole = model["type"] == "BPE" and not model.get("byte_fallback") and last.get("type") == "ByteLevel"
    plain = (tokenizer.get("normalizer") or {"type": "NFC"})["type"] == "NFC" and not last.get("add_prefix_space")
    name = _name(parts[:-1], bool(last.get("use_regex", True))) if whole and plain else ""
    if not name or bool(model.get("ignore_merges")) != (name == "llama-bpe"):
        raise ConfigError(
            "--format gguf writes tokenizers of byte-level BPE that split text as GPT-2, SmolLM, Llama 3 or Qwen2 do, and this model's is another: "
            "llama.cpp would read text as other tokens; export it without --format gguf"
        )
    return name


def _name(parts: list[dict[str, Any]], by_gpt2: bool) -> str:
    """`parts`: before the last one, which turns bytes into letters, and splits as GPT-2 does if `by_gpt2`."""
    match parts:
        case []:
            return "gpt-2" if by_gpt2 else ""
        case [{"type": "Digits", "individual_digits": True}]:
            return "smollm" if by_gpt2 else ""
        case [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}]:
            return "" if by_gpt2 else PATTERNS.get(pattern, "")
    return ""


def _adds_bos(path: Path, bos: int | None) -> bool:
    """Whether the tokenizer puts its first token before a text. Raises ConfigError if it adds anything else."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    bare, whole = (tokenizer.encode("a", add_special_tokens=adds).ids for adds in (False, True))
    if whole not in (bare, [bos, *bare]):
        raise ConfigError("the tokenizer adds other tokens to a text than its first one, which a GGUF file cannot say")
    return whole != bare


def _template(directory: Path, settings: dict[str, Any]) -> str:
    file = directory / "chat_template.jinja"
    found = file.read_text() if file.is_file() else settings.get("chat_template") or ""
    return found if isinstance(found, str) else ""


def _text(token: Any) -> str:
    return token.get("content", "") if isinstance(token, dict) else token or ""


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found
