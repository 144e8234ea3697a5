"""Any other causal LM: Hugging Face's own forward, flat over the ragged batch, with our attention inside.

The model sees one sequence [1, N] with explicit positions; its attention layers call back here, where keys and values go
into our cache. So it gets continuous batching, chunked prefill and shared prompts without knowing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from headrace.core.errors import ConfigError
from headrace.core.weights import AdapterSpec
from headrace.engine.kinds import OWN_FAMILIES
from headrace.engine.native.forward_pass import ForwardInput, ForwardOutput
from headrace.engine.native.runners.attention import Pass
from headrace.engine.native.runners.paged import EXACT_ROWS, PagedRunner
from headrace.engine.native.runners.skeleton import Skeleton, attention


class HuggingFaceRunner(PagedRunner):
    """Raises ConfigError for adapters, and for exactness of mixtures of experts, which it does not support."""

    def __init__(
        self,
        model: Skeleton,
        context_length: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        exact: bool = False,
        max_adapters: int = 0,
    ) -> None:
        self.path = f"hugging face {model.model_type}"
        self._model = model.model
        if max_adapters:
            raise ConfigError(
                f"{self.path} runs through a forward pass that is not ours, and serves no adapters (they are served beside "
                f'{", ".join(OWN_FAMILIES)}); in a run set lora.publish = "merged", in a server leave out --adapters'
            )
        if exact and model.model._can_set_experts_implementation():
            raise ConfigError(
                f"engine.exact = true, but in {self.path} how an expert adds depends on how many tokens chose it; serve "
                "qwen3_moe, mixtral or olmoe through the fused path, or set it to false"
            )
        super().__init__(model.geometry, dtype, device, exact)
        self._places = _places(model.model)
        self._nothing = [module._parameters[attribute] for _, module, attribute in self._places]
        """The parameters without values, on the meta device."""
        self._blocks = _decoder_layers(model.model, model.geometry.layers)
        self._loaded = False

    # -- weights ------------------------------------------------------------------------------------------------------------

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.nn.Parameter]:
        """One parameter for each place of the model, tied ones repeated."""
        fresh = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}
        return [fresh[name] for name, _, _ in self._places]

    def use(self, weights: Sequence[torch.nn.Parameter | None]) -> None:
        for (_, module, attribute), parameter in zip(self._places, weights, strict=True):
            module._parameters[attribute] = parameter
        self._loaded = True

    def free(self) -> None:
        super().free()
        self.use(self._nothing)
        self._loaded = False

    def prepare_adapter(self, spec: AdapterSpec, tensors: Mapping[str, torch.Tensor]) -> Any:
        raise ValueError(f"{self.path} serves no adapters; merge {spec.name} into the weights")

    def use_adapter(self, slot: int, adapter: Any) -> None:
        assert adapter is None, "an adapter that was never prepared"

    # -- the pass -----------------------------------------------------------------------------------------------------------

    def _forward(self, batch: ForwardInput) -> ForwardOutput:
        rows = self._tensor(batch.rows)
        wanted = pad(rows, (0, EXACT_ROWS - len(rows))) if self.exact else rows
        return ForwardOutput(self._run(batch, wanted)[: len(rows)])

    @torch.inference_mode()
    def blame(self, batch: ForwardInput) -> np.ndarray:
        blamed = torch.full((len(batch.tokens),), -1, device=self.device)
        seen = 0

        def look(module: torch.nn.Module, args: Any, output: Any) -> None:
            nonlocal seen
            x = (output[0] if isinstance(output, tuple) else output).reshape(len(blamed), -1)
            blamed[(blamed < 0) & ~x.isfinite().all(-1)] = seen
            seen += 1

        hooks = [block.register_forward_hook(look) for block in self._blocks]
        try:
            rows = self._tensor(batch.rows)
            broken = ~self._run(batch, rows).isfinite().all(-1)
        finally:
            for hook in hooks:
                hook.remove()
        layers = self._cache.geometry.layers
        blamed[rows] = torch.where((blamed[rows] < 0) & broken, layers, blamed[rows])
        return blamed.cpu().numpy()

    def _run(self, batch: ForwardInput, rows: torch.Tensor) -> torch.Tensor:
        """Logits [len(rows), V]."""
        assert self._loaded, "forward before the first weights"
        plan = self._plan(batch)
        with attention(_attend_with(plan)):
            out = self._model(
                input_ids=self._tensor(batch.tokens)[None],
                position_ids=plan.positions[None],
                use_cache=False,
                logits_to_keep=rows,
            )
        return out.logits[0]


def _attend_with(plan: Pass) -> Callable[..., torch.Tensor]:
    def attend(
        module: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        q, k, v = (states[0].transpose(0, 1) for states in (q, k, v))
        return plan.attend(module.layer_idx, q, k, v, scale=scale, window=sliding_window)[None]

    return attend


def _places(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module, str]]:
    """(canonical name, module, attribute) of every place that holds a parameter; tied places share the name."""
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        (canonical[id(parameter)], module, attribute)
        for module in model.modules()
        for attribute, parameter in module._parameters.items()
        if parameter is not None
    ]


def _decoder_layers(model: torch.nn.Module, layers: int) -> list[torch.nn.Module]:
    """The model's decoder layers in order: the first list of modules that is as long as there are layers. Empty if there is
    none: `blame` then names no layer."""
    lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    return list(next((found for found in lists if len(found) == layers), []))
