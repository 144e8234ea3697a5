"""The weights of a transformers model, put into its modules by name and taken out again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


class ModuleWeights:
    """The places of a model's parameters. Before the first weights they hold parameters on the meta device."""

    def __init__(self, model: torch.nn.Module) -> None:
        canonical = {id(parameter): name for name, parameter in model.named_parameters()}
        self._places = [
            (canonical[id(parameter)], module, attribute)
            for module in model.modules()
            for attribute, parameter in module._parameters.items()
            if parameter is not None
        ]
        """(canonical name, module, attribute) of every place that holds a parameter; tied places share the name."""
        self._nothing = [module._parameters[attribute] for _, module, attribute in self._places]
        self.loaded = False

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.nn.Parameter]:
        """One parameter for each place of the model, tied ones repeated."""
        fresh = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}
        return [fresh[name] for name, _, _ in self._places]

    def use(self, weights: Sequence[torch.nn.Parameter | None]) -> None:
        """Changes pointers, never copies."""
        for (_, module, attribute), parameter in zip(self._places, weights, strict=True):
            module._parameters[attribute] = parameter
        self.loaded = True

    def clear(self) -> None:
        """Lets go of the weights."""
        self.use(self._nothing)
        self.loaded = False


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
