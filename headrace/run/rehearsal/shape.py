"""The size of a model, read from its config.json and the headers of its weights: parameters, layers, KV cache per token."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.models.lora import LoraConfig
from headrace.models.resolve import read_header, weight_files


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    parameters: int
    """0 if the files do not say."""
    matrices: tuple[tuple[str, int, int], ...]
    """Linear layers: name, rows, columns; without embeddings and output head."""
    layers: int
    hidden: int
    inner: int
    """Inner width of the MLP of one layer, as one token passes it: with experts, that of the chosen ones together."""
    experts: int
    """Experts of a layer; 0 for a dense model."""
    cached: int
    """Elements that one token takes in the KV cache."""
    positions: int
    """Longest context that the model was made for; 0 if its config does not say."""

    def adapted(self, config: LoraConfig) -> set[str]:
        """Returns the names of the modules that an adapter adapts, without their path. With "all-linear" they are those of all matrices."""
        targets = [name.removesuffix(".weight") for name, _, _ in self.matrices]
        if config.targets != "all-linear":
            targets = list(config.targets)
        return {target.rpartition(".")[2] for target in targets} | ({"experts"} if config.experts else set())

    def adapter(self, config: LoraConfig) -> int:
        """Returns the parameters of a LoRA adapter, without those of experts."""
        targets = config.targets
        return sum(
            config.rank * (rows + columns)
            for name, rows, columns in self.matrices
            if targets == "all-linear" or name.removesuffix(".weight").endswith(targets)
        )


def read_shape(directory: Path) -> ModelShape:
    """Reads the shape of a model from a directory that passed `check_model_dir`."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    text: dict[str, Any] = {**config, **(config.get("text_config") or {})}
    hidden = _number(text, "hidden_size", "n_embd", "d_model")
    heads = _number(text, "num_attention_heads", "n_head")
    layers = _number(text, "num_hidden_layers", "n_layer", "num_layers")
    kv_heads = _number(text, "num_key_value_heads") or heads
    head = _number(text, "head_dim") or (hidden // heads if heads else 0)
    stored = {name: one for path in weight_files(directory) for name, one in read_header(path).items()}
    parameters = sum(one.elements for one in stored.values()) or _from_pickles(directory)
    inner = _number(text, "moe_intermediate_size") * _number(text, "num_experts_per_tok")
    return ModelShape(
        parameters=parameters,
        matrices=tuple(_matrices({name: one.shape for name, one in stored.items()})),
        layers=layers,
        hidden=hidden,
        inner=inner or _number(text, "intermediate_size", "n_inner") or 4 * hidden,
        experts=_number(text, "num_experts", "num_local_experts", "n_routed_experts"),
        cached=2 * layers * kv_heads * head,
        positions=_number(text, "max_position_embeddings", "n_positions"),
    )


def _from_pickles(directory: Path) -> int:
    """Estimates the parameters of `pytorch_model*.bin` from the file sizes, as if all were in the dtype of the config."""
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
