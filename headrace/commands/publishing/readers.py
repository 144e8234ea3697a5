"""The class that loads an exported model."""

from __future__ import annotations

from pathlib import Path

from headrace.models.images import SERVED, type_of


def is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").exists()


def reader_of(folder: Path) -> str:
    """Returns the name of the class whose `from_pretrained` loads the directory."""
    if is_adapter(folder):
        return "peft.AutoPeftModelForCausalLM"
    return f"transformers.{'AutoModelForImageTextToText' if type_of(folder) in SERVED else 'AutoModelForCausalLM'}"
