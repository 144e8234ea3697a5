"""How vLLM's parameters are called, and of which tensors of a model's files each is made (`stacked_params_mapping` of its models, vLLM 0.32)."""

from __future__ import annotations

from collections.abc import Collection

JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Modules that vLLM makes of several, with their names in the files, in its order."""


def parts_of(name: str, there: Collection[str]) -> list[str]:
    """Returns the tensors that one of vLLM's parameters consists of, one behind the other; empty if they are not all `there`."""
    name = name.replace(".base_layer.", ".")  # as modules are called that may have adapters
    if name in there:
        return [name]
    for joined, modules in JOINED.items():
        if f".{joined}." in name:
            parts = [name.replace(f".{joined}.", f".{module}.") for module in modules]
            return parts if all(part in there for part in parts) else []
    return []
