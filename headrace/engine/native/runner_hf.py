"""Any other causal LM: Hugging Face's own forward, flat over the ragged batch, with our attention inside.

The model sees one sequence [1, N] with explicit positions; its attention layers call back here, where keys and values go
into our cache. So it gets continuous batching, chunked prefill and shared prompts without knowing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headrace.engine.native.attention import Ragged
from headrace.engine.native.skeleton import Skeleton, attention


class HuggingFaceRunner:
    def __init__(self, skeleton: Skeleton, dtype: torch.dtype, device: torch.device) -> None:
        self.path = f"hugging face {skeleton.model_type}"
        self.device, self.dtype = device, dtype
        self._model = skeleton.model
        self._places = _places(skeleton.model)
        self._loaded = False

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.nn.Parameter]:
        """One parameter for each place of the model, tied ones repeated."""
        fresh = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}
        return [fresh[name] for name, _, _ in self._places]

    def use(self, weights: list[torch.nn.Parameter]) -> None:
        for (_, module, attribute), parameter in zip(self._places, weights, strict=True):
            module._parameters[attribute] = parameter
        self._loaded = True

    def forward(self, tokens: torch.Tensor, batch: Ragged, rows: torch.Tensor) -> torch.Tensor:
        """tokens [N] -> logits [len(rows), V] of the flat positions `rows`."""
        assert self._loaded, "forward before the first weights"

        def attend(
            module: Any,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            mask: None,
            scaling: float | None = None,
            sliding_window: int | None = None,
            **_: Any,
        ) -> torch.Tensor:
            scale = q.shape[-1] ** -0.5 if scaling is None else scaling
            q, k, v = (states[0].transpose(0, 1) for states in (q, k, v))
            return batch.attend(module.layer_idx, q, k, v, scale, sliding_window)[None]

        with attention(attend):
            out = self._model(
                input_ids=tokens[None], position_ids=batch.positions[None], use_cache=False, logits_to_keep=rows
            )
        return out.logits[0]


def _places(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module, str]]:
    """(canonical name, module, attribute) of every place that holds a parameter; tied places share the name."""
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        (canonical[id(parameter)], module, attribute)
        for module in model.modules()
        for attribute, parameter in module._parameters.items()
        if parameter is not None
    ]
