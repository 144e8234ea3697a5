"""The part that runners over a transformers model share: weights in its modules, by name, and the search for a layer that breaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headrace.core.weights import AdapterSpec
from headrace.engine.native.runners.module_adapters import ModuleAdapters
from headrace.models.saved_buffers import saved_buffers


class ModuleWeights:
    """The places of a model's parameters, and of buffers that it saves. Before the first weights they hold nothing that counts."""

    def __init__(self, model: torch.nn.Module) -> None:
        canonical = {id(parameter): name for name, parameter in model.named_parameters()}
        canonical |= {id(buffer): name for name, buffer in saved_buffers(model).items()}
        self._places = [
            (canonical[id(tensor)], held, attribute)
            for module in model.modules()
            for held in (module._parameters, module._buffers)
            for attribute, tensor in held.items()
            if id(tensor) in canonical
        ]
        """(canonical name, the dictionary of a module, key) of every place; tied places share the name."""
        self._nothing = [held[attribute] for _, held, attribute in self._places]
        self.loaded = False

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor | None]:
        """One tensor for each place of the model, tied ones repeated."""
        parameters = {
            name: torch.nn.Parameter(tensors[name], requires_grad=False)
            for name, before in zip((name for name, _, _ in self._places), self._nothing, strict=True)
            if isinstance(before, torch.nn.Parameter)
        }
        return [parameters.get(name, tensors[name]) for name, _, _ in self._places]

    def use(self, weights: Sequence[torch.Tensor | None]) -> None:
        """Changes pointers, never copies."""
        for (_, held, attribute), tensor in zip(self._places, weights, strict=True):
            held[attribute] = tensor  # type: ignore[assignment]
        self.loaded = True

    def clear(self) -> None:
        """Lets go of the weights."""
        self.use(self._nothing)
        self.loaded = False


class ModuleRunner:
    """The part of a runner that is the same whoever keeps keys and values: weights in modules, and adapters beside them."""

    def __init__(
        self, path: str, model: torch.nn.Module, max_adapters: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`path`: the way of serving, in words."""
        self.path = path
        self._weights, self._adapters = ModuleWeights(model), ModuleAdapters(model, max_adapters)
        self._dtype, self._device = dtype, device

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        return self._weights.prepare(tensors)

    def use(self, weights: Any) -> None:
        self._weights.use(weights)

    def prepare_adapter(self, spec: AdapterSpec, tensors: Mapping[str, torch.Tensor]) -> Any:
        return self._adapters.read(spec, tensors, self._dtype, self._device)

    def use_adapter(self, slot: int, adapter: Any) -> None:
        self._adapters.put(slot, adapter)


def decoder_layers(model: torch.nn.Module, layers: int) -> list[torch.nn.Module]:
    """The model's decoder layers in order: the first list of modules that is as long as there are layers. Empty if there is
    none: `blame` then names no layer."""
    lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    return list(next((found for found in lists if len(found) == layers), []))


class LayerWatch:
    """Finds the first decoder layer after which a token's hidden state is not finite."""

    def __init__(self, layers: Sequence[torch.nn.Module], tokens: int, device: torch.device) -> None:
        self.blamed = torch.full((tokens,), -1, device=device)
        """[tokens]: the layer, or -1."""
        self._layers, self._seen = layers, 0

    def __enter__(self) -> LayerWatch:
        self._hooks = [layer.register_forward_hook(self._look) for layer in self._layers]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _look(self, module: torch.nn.Module, args: object, output: object) -> None:
        x = output[0] if isinstance(output, tuple) else output
        assert isinstance(x, torch.Tensor)
        x = x.reshape(len(self.blamed), -1)
        self.blamed[(self.blamed < 0) & ~x.isfinite().all(-1)] = self._seen
        self._seen += 1
