"""A piece of a model that is timed instead of the whole: a few of its layers, and the same share of its vocabulary.

All layers cost the same, and the cost of the head is proportional to its rows, so the whole model costs `scale` times the piece. The
piece is large enough that its weights do not fit into a second-level cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

PARAMETERS = 16_000_000
"""Fewest parameters of the piece, if the model has as many: 32 MB in bfloat16."""
LEAST_VOCABULARY = 256


class Slice(NamedTuple):
    config: dict[str, Any]
    """The piece's `config.json`."""
    scale: float
    """Cost of the whole model divided by that of the piece."""
    parameters: int
    """Approximate parameters of the whole model; experts are not counted."""


def slice_of(config: Mapping[str, Any], least: int = PARAMETERS) -> Slice | None:
    """Returns the piece of a model, or None if the config does not give the sizes of its layers. `least`: parameters of the piece, if the model has as many."""
    text = {**config, **(config.get("text_config") or {})}
    try:
        layers, hidden = int(text["num_hidden_layers"]), int(text["hidden_size"])
        inner, vocabulary = int(text["intermediate_size"]), int(text["vocab_size"])
    except (KeyError, TypeError, ValueError):
        return None
    if min(layers, hidden, inner, vocabulary) < 1:
        return None
    heads = int(text.get("num_attention_heads") or 1)
    shared = int(text.get("num_key_value_heads") or heads) / heads
    width = heads * int(text.get("head_dim") or hidden // heads)
    parameters = layers * int(2 * hidden * width * (1 + shared) + 3 * hidden * inner) + vocabulary * hidden
    kept = max(1, min(layers, -(-layers * least // parameters)))
    rows = min(vocabulary, max(LEAST_VOCABULARY, vocabulary * kept // layers))
    cut = {**config, **_cut(config, layers, kept, rows)}
    if isinstance(config.get("text_config"), dict):
        cut["text_config"] = {**config["text_config"], **_cut(config["text_config"], layers, kept, rows)}
    return Slice(cut, layers / kept, parameters)


def _cut(config: Mapping[str, Any], layers: int, kept: int, rows: int) -> dict[str, Any]:
    """Returns the changed values of settings that depend on the number of layers or tokens."""
    changed: dict[str, Any] = {}
    for name, value in config.items():
        if name in ("num_hidden_layers", "max_window_layers") and isinstance(value, int):
            changed[name] = min(value, kept)
        elif name == "vocab_size":
            changed[name] = rows
        elif isinstance(value, list) and (name == "layer_types" or len(value) == layers > 2):
            changed[name] = value[:kept]
        elif name == "mlp_only_layers" and isinstance(value, list):
            changed[name] = [layer for layer in value if layer < kept]
        elif name.endswith("_token_id") and isinstance(value, int):
            changed[name] = min(value, rows - 1)
        elif name.endswith("_token_id") and isinstance(value, list):
            changed[name] = [min(token, rows - 1) for token in value]
    return changed
