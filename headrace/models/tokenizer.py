"""Loads the tokenizer of a model, without torch where that can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError

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
