"""A model cut into consecutive stages, of which this rank holds one, or several.

The model keeps its class, its names and its own forward. While a stage is computed, modules of other stages are replaced by some that
return what they are given, and the layer before its first by one that returns what the stage before it sent. So whatever a family does
around its layers (masks, positions, scaled embeddings) stays its own, and whether the cut is exact is tried before anything is dropped: with the
whole model, or where ranks read its files in parts with its first layers (`try_cut`).

Parameters that another rank holds lie on torch's meta device: they have a name, a shape and no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.core.errors import ConfigError
from headrace.trainer.forward.forward import softcap_of
from headrace.trainer.forward.head import Scale
from headrace.trainer.forward.tree_attention import NAME, tree_of
from headrace.trainer.model.causal_lm import layers_of
from headrace.trainer.model.outline import named_tensors, outline, sample, shortened
from headrace.trainer.packing import Segment
from headrace.trainer.parallel import cut

PROBE = 12
"""Tokens on which the cut is tried."""

FIRST_MIDDLE_LAST = 3
"""The kinds of stages, each of which is tried if a model is cut into as many."""


class _Through(torch.nn.Module):
    """Stands for a module of another stage."""

    def __init__(self, width: int, dtype: torch.dtype, in_tuple: bool) -> None:
        super().__init__()
        self._width, self._dtype, self._in_tuple = width, dtype, in_tuple

    def forward(self, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not given.is_floating_point():  # ids, or positions
            return torch.zeros(*given.shape, self._width, dtype=self._dtype, device=given.device)
        return (given,) if self._in_tuple else given


class _Inlet(_Through):
    """Stands for the layer before a stage's first, and returns what that stage received."""

    received: Tensor

    def forward(self, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(self.received)


@dataclass
class ModelStage:
    """One stage of a model."""

    number: int
    modules: list[torch.nn.Module]
    """Modules whose own parameters it needs: all its layers, and those beside the layers that are called before or after them."""
    swaps: list[tuple[Any, str, torch.nn.Module]]
    """(parent, name, replacement): what is replaced while the stage is computed."""
    inlet: _Inlet | None
    """None for the first."""

    @contextmanager
    def alone(self, received: Tensor | None) -> Iterator[None]:
        """Within it, the model's forward computes this stage only. `received`: [1, T, H]; None for the first stage."""
        if self.inlet is not None:
            assert received is not None
            self.inlet.received = received
        before = [parent._modules[name] for parent, name, _ in self.swaps]
        for parent, name, replacement in self.swaps:
            parent._modules[name] = replacement
        try:
            yield
        finally:
            for (parent, name, _), module in zip(self.swaps, before, strict=True):
                parent._modules[name] = module
            if self.inlet is not None:
                del self.inlet.received


@dataclass
class _Pass:
    """One pass of one stage over a microbatch, which may be several calls of the model (row by row)."""

    stage: ModelStage
    received: Tensor | None
    """[N, H]; None for the first stage."""
    results: list[Tensor] = field(default_factory=list)
    place: int = 0

    def next(self, count: int) -> Tensor | None:
        """[1, T, H] of the next call."""
        start, self.place = self.place, self.place + count
        return None if self.received is None else self.received[None, start : self.place]


class Chain:
    """Sends hidden states to the next rank of a pipeline, and receives those of the one before. Used where there is no backward pass."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._rank, self._ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self._sending: tuple[Any, Tensor] | None = None

    def send(self, hidden: Tensor) -> None:
        """Returns at once, so that the next microbatch can be computed; waits until the one before has arrived."""
        if self._sending is not None:
            self._sending[0].wait()
        hidden = hidden.contiguous()
        work = dist.isend(hidden, group=self._group, group_dst=(self._rank + 1) % self._ranks)
        self._sending = work, hidden  # it must stay until it was sent

    def receive(self, into: Tensor) -> Tensor:
        dist.recv(into, group=self._group, group_src=(self._rank - 1) % self._ranks)
        return into


class Stages:
    """The stages of one model; `mine` are those that this rank holds. `tried`: the model has no values, and was tried without its adapters (`try_cut`).
    Raises ConfigError if the model cannot be cut."""

    def __init__(
        self, model: Any, count: int, mine: Sequence[int], chain: Chain | None, *, tried: bool = False
    ) -> None:
        self.model, self.count, self._chain = model, count, chain
        self._pass: _Pass | None = None
        inner = model.base_model
        asked = f"train.parallel.pipeline asks for {count} stages, and {type(model).__name__}"
        layers = layers_of(model)
        if inner is model or len(layers) < count:
            has = "has no inner model" if inner is model else f"has {len(layers)} layers"
            raise ConfigError(f"{asked} {has}; lower train.parallel.pipeline, or use train.parallel.shard instead")
        seen = _Seen(
            places={child: (parent, name) for parent in model.modules() for name, child in parent.named_children()}
        )
        with shortened(model) if tried else nullcontext():
            whole = _watched(model, layers, seen)
        self.width, self.dtype = whole.shape[-1], seen.dtype
        if not tried and not seen.plain_head:
            raise ConfigError(f"{asked} makes more of its logits than a product; use train.parallel.shard instead")
        if any(module not in seen.places or set(layers) & set(module.modules()) for module in seen.before + seen.after):
            raise ConfigError(
                f"{asked} has weights around its layers that belong to no module; use train.parallel.shard"
            )
        passed = getattr(model.config.get_text_config(), "num_experts_per_tok", 1)
        costs = [_cost(layer, passed) for layer in layers]
        bounds = cut(costs, count, model.get_output_embeddings().weight.numel())
        every = [self._stage(number, bounds, layers, seen) for number in range(count)]
        self._forward: Callable[..., Any] = inner.forward
        inner.forward = self._run
        self.mine: Sequence[ModelStage] = every
        if not tried and not self._exact(whole):
            raise ConfigError(
                f"{asked} computes something else when its layers are cut into stages; use train.parallel.shard instead"
            )
        self.mine = [every[number] for number in mine]

    def hold(self, device: torch.device, beside: Collection[torch.nn.Parameter]) -> None:
        """Moves the parameters of this rank's stages to the device, and drops all others. `beside`: kept by every rank. What has no values yet stays where it
        is (`filling.fill`)."""
        unread = {
            id(tensor)
            for name, tensor in named_tensors(self.model).items()
            if name in getattr(self.model, "unread", ())
        }
        needed = (p for stage in self.mine for module in stage.modules for p in module._parameters.values())
        held = set(map(id, needed)) | set(map(id, beside))
        dropped: dict[int, torch.nn.Parameter] = {}
        for module in self.model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) in held:
                    if id(parameter) not in unread:
                        parameter.data = parameter.data.to(device)
                    continue
                if id(parameter) not in dropped:  # tied ones stay one
                    gone = torch.empty_like(parameter, device="meta")
                    dropped[id(parameter)] = torch.nn.Parameter(gone, requires_grad=parameter.requires_grad)
                module._parameters[name] = dropped[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in unread:
                    module._buffers[name] = buffer.to(device)

    @contextmanager
    def passing(self, stage: ModelStage, received: Tensor | None) -> Iterator[_Pass]:
        """Within it, calls of the model compute this stage of one microbatch, with gradient."""
        self._pass = _Pass(stage, received)
        try:
            yield self._pass
        finally:
            self._pass = None

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Stands in place of the inner model's forward."""
        if self._pass is not None:
            with self._pass.stage.alone(self._pass.next(kwargs["input_ids"].shape[1])):
                output = self._forward(*args, **kwargs)
            self._pass.results.append(output.last_hidden_state)
            return output
        assert not torch.is_grad_enabled(), "only a schedule has a backward pass"
        output = None
        for stage in self.mine:
            received = None
            if stage.number:
                assert self._chain
                shape, device = kwargs["input_ids"].shape, kwargs["input_ids"].device
                received = self._chain.receive(torch.empty(*shape, self.width, dtype=self.dtype, device=device))
            with stage.alone(received):
                output = self._forward(*args, **kwargs)
            if stage.number < self.count - 1:
                assert self._chain
                self._chain.send(output.last_hidden_state)
        return output

    def _stage(
        self, number: int, bounds: Sequence[range], layers: Sequence[torch.nn.Module], seen: _Seen
    ) -> ModelStage:
        mine, last = bounds[number], number == self.count - 1
        modules = [module for i in mine for module in layers[i].modules()]
        swaps: list[tuple[Any, str, torch.nn.Module]] = []
        through = _Through(self.width, self.dtype, seen.in_tuple)
        inlet = _Inlet(self.width, self.dtype, seen.in_tuple) if number else None
        for i, layer in enumerate(layers):
            if i not in mine:
                parent, name = seen.places[layer]
                swaps.append((parent, name, inlet if inlet is not None and i == mine.start - 1 else through))
        plain = _Through(self.width, self.dtype, False)
        for needed, beside in ((number == 0, seen.before), (last, seen.after)):
            if needed:
                modules += beside
            else:
                swaps += [(*seen.places[module], plain) for module in beside]
        return ModelStage(number, modules, swaps, inlet)

    @torch.no_grad()
    def _exact(self, whole: Tensor) -> bool:
        """Whether the stages one after another give the hidden states of the whole model."""
        hidden: Tensor | None = None
        try:
            for stage in self.mine:
                with _as_trained(self.model), self.passing(stage, hidden) as done:
                    _hidden(self.model)
                (hidden,) = (result[0] for result in done.results)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return False
        assert hidden is not None
        return torch.equal(hidden, whole)


def try_cut(model: Any, count: int) -> None:
    """Tries with the first layers of an outline whether cutting them into stages is exact, in the dtypes that the model has. It may be hollow and have
    adapters, which are left out. Raises ConfigError if it is not."""
    fresh, named = outline(model.files.directory), named_tensors(model)
    for name, parameter in fresh.named_parameters():
        parameter.data = parameter.data.to(named[name].dtype)
    count = min(count, FIRST_MIDDLE_LAST)
    with sample(fresh, least=count):
        Stages(fresh, count, range(count), None)


# -- what a model looks like ------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Seen:
    """How a forward pass uses the model's modules."""

    places: dict[torch.nn.Module, tuple[Any, str]]
    """Parent and name of every module."""
    before: list[torch.nn.Module] = field(default_factory=list)
    after: list[torch.nn.Module] = field(default_factory=list)
    """Modules with parameters beside the layers: called before the first layer, or never; called later, such as the head."""
    dtype: torch.dtype = torch.float32
    """Dtype of the hidden states between layers."""
    in_tuple: bool = False
    """Whether layers return tuples."""
    plain_head: bool = True
    """Whether logits are the head's product, capped as the config says."""


@torch.no_grad()
def _watched(model: Any, layers: Sequence[torch.nn.Module], seen: _Seen) -> Tensor:
    """Returns the hidden states [T, H] of some tokens, and notes how they were made."""
    inside = {module for layer in layers for module in layer.modules()}
    beside = [m for m in model.modules() if any(p is not None for p in m._parameters.values()) and m not in inside]
    late: set[torch.nn.Module] = {model.get_output_embeddings()}
    begun = False

    def layer_called(module: Any, args: Any, output: Any) -> None:
        nonlocal begun
        begun = True
        seen.in_tuple = isinstance(output, tuple)
        seen.dtype = (output[0] if seen.in_tuple else output).dtype

    hooks = [layer.register_forward_hook(layer_called) for layer in layers]
    hooks += [m.register_forward_pre_hook(lambda m, _: late.add(m) if begun else None) for m in beside]
    try:
        with _as_trained(model):
            whole = _hidden(model)
    finally:
        for hook in hooks:
            hook.remove()
    with _as_trained(model):
        logits = model(**_probe(model)).logits[0]
        product = Scale(softcap=softcap_of(model)).of(model.get_output_embeddings()(whole))
    seen.plain_head = torch.allclose(product, logits, rtol=1e-3, atol=1e-5)
    seen.before = [module for module in beside if module not in late]
    seen.after = [module for module in beside if module in late]
    return whole


def _hidden(model: Any) -> Tensor:
    """[T, H] of some tokens."""
    return model.base_model(**_probe(model)).last_hidden_state[0]


def _probe(model: Any) -> dict[str, Any]:
    """Tokens from all over the vocabulary, as arguments of the model and of its inner one."""
    tokens = torch.arange(1, PROBE + 1, device=model.device) * 7919 % model.get_input_embeddings().weight.shape[0]
    given: dict[str, Any] = {"input_ids": tokens[None], "use_cache": False}
    if model.config._attn_implementation == NAME:
        given["tree"] = tree_of([Segment(0, PROBE)], tokens.device)
    return given


def _as_trained(model: Any) -> AbstractContextManager[Any]:
    """An autocast context if weights have been lowered, which other products cannot read."""
    low = any(p.dtype == torch.bfloat16 for p in model.parameters())
    return torch.autocast(model.device.type, torch.bfloat16, enabled=low)


def _cost(layer: torch.nn.Module, passed: int) -> float:
    """The products of a token in a layer: the numbers of its matrices, and of the experts that the token passes."""
    cost = 0.0
    for parameter in layer.parameters():
        if parameter.ndim >= 2:
            cost += parameter.numel() if parameter.ndim == 2 else parameter[0].numel() * passed
    return cost
