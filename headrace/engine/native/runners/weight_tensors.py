"""New weights: checked by name, shape and dtype; moved to the device; neighbours fused without a copy where they touch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

Shapes = Mapping[str, tuple[int, ...]]


def check(expected: Shapes, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Raises ValueError naming the first parameter that is missing, unknown, or of another shape or dtype."""
    for name, shape in expected.items():
        if name not in tensors:
            raise ValueError(
                f"the update lacks the parameter {name}; publish every parameter of the model that is served"
            )
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} came with shape {tuple(tensor.shape)}, the engine's model has {shape}; serve the same model"
            )
        if tensor.dtype != dtype:
            raise ValueError(f"{name} came as {tensor.dtype}, the engine serves {dtype}; publish in the engine's dtype")
    for name in tensors:
        if name not in expected:
            raise ValueError(f"the update holds {name}, which the engine's model does not have; serve the same model")


def on_device(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Returns the views themselves on a CPU, and copies elsewhere, made in the preparing thread while generation continues."""
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    if device.type == "cuda":  # the stream and not the device, which nobody may wait for while a graph is captured
        torch.cuda.current_stream(device).synchronize()
    return moved


def fuse(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One matrix of all rows: a view when the parts touch in memory (they do in a packed update), else a copy."""
    first, end = parts[0], parts[0].data_ptr()
    storage = first.untyped_storage().data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != storage or not part.is_contiguous():
            return torch.cat(list(parts))
        end += part.numel() * part.element_size()
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    return first.as_strided(shape, first.stride(), first.storage_offset())


def parameters_from_dir(model_dir: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The parameters of a saved model in canonical order, as a trainer would publish them. For models that are not trained.
    Raises ValueError if the files lack some, for which transformers would use random numbers.
    """
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=dtype, local_files_only=True, output_loading_info=True
    )
    if wrong := sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]])):
        raise ValueError(
            f"the weights in {model_dir} lack or do not fit {len(wrong)} parameters of its config.json, the first: {wrong[0]}; "
            "save the model again with `save_pretrained`"
        )
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
