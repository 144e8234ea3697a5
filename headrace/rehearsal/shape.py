"""A model by its config.json and the headers of its weights: how many parameters, how much a token takes in the KV cache."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.models.lora import LoraConfig
from headrace.models.model_files import read_header


@dataclass(frozen=True)
class ModelShape:
    parameters: int
    """0 where nothing says."""
    matrices: tuple[tuple[str, int, int], ...]
    """Linear layers by name, with rows and columns; without embeddings and head."""
    layers: int
    hidden: int
    inner: int
    """Of the MLP of one layer, as a token passes it."""
    cached: int
    """Numbers that one token leaves in the KV cache."""
    positions: int
    """That the model was made for; 0 where its config does not say."""

    def adapter(self, config: LoraConfig) -> int:
        """Parameters of a LoRA adapter, without those of experts."""
        targets = config.targets
        return sum(
            config.rank * (rows + columns)
            for name, rows, columns in self.matrices
            if targets == "all-linear" or name.removesuffix(".weight").endswith(targets)
        )


def read_shape(directory: Path) -> ModelShape:
    """Of a directory that `check_model_dir` has found to be whole."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    text: dict[str, Any] = {**config, **(config.get("text_config") or {})}
    hidden = _number(text, "hidden_size", "n_embd", "d_model")
    heads = _number(text, "num_attention_heads", "n_head")
    layers = _number(text, "num_hidden_layers", "n_layer", "num_layers")
    kv_heads = _number(text, "num_key_value_heads") or heads
    head = _number(text, "head_dim") or (hidden // heads if heads else 0)
    stored = {name: one for path in _weight_files(directory) for name, one in read_header(path).items()}
    parameters = sum(one.elements for one in stored.values()) or _from_pickles(directory)
    inner = _number(text, "moe_intermediate_size") * _number(text, "num_experts_per_tok")
    return ModelShape(
        parameters=parameters,
        matrices=tuple(_matrices({name: one.shape for name, one in stored.items()})),
        layers=layers,
        hidden=hidden,
        inner=inner or _number(text, "intermediate_size", "n_inner") or 4 * hidden,
        cached=2 * layers * kv_heads * head,
        positions=_number(text, "max_position_embeddings", "n_positions"),
    )


def _weight_files(directory: Path) -> list[Path]:
    """Those of the index where there is one: some repositories hold the weights twice."""
    for index in directory.glob("*.safetensors.index.json"):
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [directory / shard for shard in sorted(shards)]
    one = directory / "model.safetensors"
    return [one] if one.exists() else sorted(directory.glob("*.safetensors"))


def _from_pickles(directory: Path) -> int:
    """Of `pytorch_model*.bin`, whose content is not read: as if all were in the dtype of the config."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    size = 4 if config.get("dtype", config.get("torch_dtype")) == "float32" else 2
    return sum(path.stat().st_size for path in directory.glob("pytorch_model*.bin")) // size


def _matrices(shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, int, int]]:
    for name, shape in shapes.items():
        if len(shape) == 2 and min(shape) > 1 and not any(word in name for word in ("embed", "lm_head", "wte", "wpe")):
            yield name, *shape


def _number(config: dict[str, Any], *names: str) -> int:
    found = [config[name] for name in names if isinstance(config.get(name), int | float)]
    return int(found[0]) if found and math.isfinite(found[0]) else 0
