"""Tokenizers that spell each byte: of a character that is no letter a token is a part."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

KINDS = ["byte-level", "byte-fallback"]


def spelled(directory: Path, kind: str) -> Path:
    """Saves a tokenizer of single bytes (or characters): byte-level, or SentencePiece's with byte fallback. Has `</s>` as its end."""
    if kind == "byte-level":
        words = sorted(pre_tokenizers.ByteLevel.alphabet())
        made = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
    else:
        words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
        made = Tokenizer(
            models.BPE(
                {word: place for place, word in enumerate(words)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True
            )
        )
        made.normalizer = normalizers.Replace(" ", "▁")
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        made.decoder = decoders.Sequence(parts)
    made.add_special_tokens(["<s>", "</s>"])
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>").save_pretrained(directory)
    return directory
