"""The weights that vLLM's modules multiply by, read through their own products.

vLLM packs, fuses and copies weights when it loads them, and multiplies by the copies: on a CPU the parameter itself is emptied. The product with a unit
vector is a column of what is really multiplied by, without any rounding. So a module that kept an old copy is found at the first version that
changes a value in the columns that are read. Which ones these are goes round with the versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headrace.models.vllm_names import parts_of

COLUMNS = 8
"""Columns of a matrix that are read at a version: the product costs no more than that of so many tokens."""


@torch.no_grad()
def unlike(model: torch.nn.Module, tensors: Mapping[str, Tensor], version: int) -> tuple[list[str], int]:
    """Returns the names of the parameters by which the model does not compute, though they were to be loaded from `tensors`, and the number of
    those that were read. Not read are shards, quantised weights and experts, and whatever is made of tensors in another way than by joining."""
    wrong, read = [], 0
    for name, module in model.named_modules():
        for parameter, values in module._parameters.items():
            parts = parts_of(f"{name}.{parameter}", tensors)
            if values is None or not parts:
                continue
            whole = [tensors[part] for part in parts]
            matrix = parameter == "weight" and all(part.dim() == 2 for part in whole)
            same = _multiplies_by(module, whole, version) if matrix else _holds(values, whole)
            if same is None:
                continue
            read += 1
            if not same:
                wrong.append(f"{name}.{parameter}")
    return wrong, read


def borrowed(model: torch.nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of parameters and buffers that lie in the memory of `tensors` instead of being copies. That memory is written to again for the
    version after the next."""
    theirs = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    held = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, tensor in held if tensor.numel() and tensor.untyped_storage().data_ptr() in theirs]


def _multiplies_by(module: Any, parts: list[Tensor], version: int) -> bool | None:
    """None if the module is no whole, unquantised product or table."""
    method = getattr(module, "quant_method", None)
    if method is None or not type(method).__name__.startswith("Unquantized") or getattr(module, "tp_size", 1) > 1:
        return None
    rows, columns = sum(len(part) for part in parts), parts[0].shape[1]
    chosen = [(version + number * max(1, columns // COLUMNS)) % columns for number in range(min(COLUMNS, columns))]
    expected = torch.cat([part[:, chosen] for part in parts]).T
    if hasattr(module, "num_embeddings") and not type(module).__name__.endswith("Head"):  # a table is not multiplied by
        found = module.weight[:rows, chosen].T
        return torch.equal(found, expected.to(found))
    unit = torch.zeros(len(chosen), columns, dtype=expected.dtype, device=module.weight.device)
    unit[range(len(chosen)), chosen] = 1
    found = method.apply(module, unit, None)[:, :rows]  # a vocabulary is padded
    return found.shape == expected.shape and torch.equal(found, expected.to(found))


def _holds(values: Tensor, parts: list[Tensor]) -> bool | None:
    expected = torch.cat([part.flatten() for part in parts])
    return torch.equal(values.flatten(), expected.to(values)) if values.numel() == expected.numel() else None
