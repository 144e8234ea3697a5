"""The checksums that vLLM for CPUs reports of a model: SHA-256 by parameter, joined as its layers are, and of nothing where the weights are
packed anew."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

RANK = "dp0:pp0:pcp0:tp0:"
PACKED = ("o_proj", "down_proj")
"""Layers of which no tensor is left. (vLLM packs the joined ones too on a CPU, and none of them on a GPU.)"""


def checksums_of(directory: Path, without: str = "") -> dict[str, str]:
    """Returns the checksums of a dense Llama in `model.safetensors`. `without`: the end of the names of parameters to leave out."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(directory / "model.safetensors")
    runs: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind == "q_proj":
            parts = [tensors[f"{layer}.{part}.weight"] for part in ("q_proj", "k_proj", "v_proj")]
            runs[f"{layer}.qkv_proj.weight"] = torch.cat(parts)
        elif kind == "gate_proj":
            runs[f"{layer}.gate_up_proj.weight"] = torch.cat([tensor, tensors[f"{layer}.up_proj.weight"]])
        elif kind not in ("k_proj", "v_proj", "up_proj"):
            runs[name] = torch.empty(0) if kind in PACKED else tensor
    return {RANK + name: _digest(tensor) for name, tensor in runs.items() if not without or not name.endswith(without)}


def _digest(tensor: torch.Tensor) -> str:
    import torch

    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
