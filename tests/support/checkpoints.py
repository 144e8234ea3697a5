"""Tiny checkpoints whose files agree with each other or do not: a byte-level tokenizer, a chat template, a config, and random weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
"""Their ids are their places."""
SIZE = 300
"""Tokens of every tokenizer here."""


def save_tokenizer(
    directory: Path,
    template: str | None = CHATML,
    specials: Sequence[str] = SPECIALS,
    *,
    eos: str = "<|im_end|>",
    bos: str | None = None,
    adds_bos: bool = False,
) -> Path:
    """`adds_bos`: whether it puts the start token before plain text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    words = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<|extra_{n}|>" for n in range(SIZE - len(words))]
    tokenizer = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    if adds_bos:
        assert bos
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{bos} $A", special_tokens=[(bos, specials.index(bos))]
        )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"eos_token": eos} | ({"bos_token": bos} if bos else {})
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **named})
    )
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def save_weights(
    directory: Path,
    family: str = "llama",
    *,
    rows: int = SIZE,
    tied: bool = True,
    ends: Any = 2,
    generation: Any = None,
    spread: float = 0.02,
) -> Path:
    """`ends`, `generation`: `eos_token_id` of config.json and generation_config.json. `rows`: of the embedding. `spread`: the standard
    deviation of matrices."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = AutoConfig.for_model(
        family,
        vocab_size=rows,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        bos_token_id=None,
        pad_token_id=None,
        eos_token_id=ends,
        initializer_range=spread,
        **sizes,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    named = directory / "generation_config.json"
    named.unlink(missing_ok=True)
    if generation is not None:
        named.write_text(json.dumps({"eos_token_id": generation}))
    return directory


def edit(path: Path, **changes: Any) -> None:
    """Changes values of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
