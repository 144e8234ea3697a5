"""The tokens that end a completion, by the files of a model. The engine in our process and the clients of servers go by the same ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def end_tokens(model_dir: Path) -> frozenset[int]:
    """Returns every end-of-sequence token that the model's generation config or config names."""
    generation = _read(model_dir / "generation_config.json") or {}
    named = [generation.get("eos_token_id"), _of_config(model_dir)]
    lists = [entry if isinstance(entry, list) else [entry] for entry in named if entry is not None]
    return frozenset(token for tokens in lists for token in tokens)


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
