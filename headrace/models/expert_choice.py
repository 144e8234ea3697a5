"""The experts that a mixture's layers choose: found in transformers' own code, told to whoever records them, replaced by recorded ones.

Routers differ in their scores (softmax, sigmoid), in groups of experts, in biases that count for the choice alone, and in how the weights of the chosen are
normalised and scaled. What they share is one call of `topk` (PhiMoE: one of `max` for each expert) over a score for each expert, whose indices
say who computes. The choice is seen and replaced there, within the router's call: with other indices, the values of that call are the scores of the experts
that they name. Everything else is the model's own code, whose gradient autograd makes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

_MASKS = (torch.masked_fill, Tensor.masked_fill)
_CALLS = {torch.topk: "topk", Tensor.topk: "topk", torch.max: "max", Tensor.max: "max"}
_ADAPTED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)")
"""The part that peft adds to the name of a module that it wraps or copies."""
_LAYER = re.compile(r".*?\.\d+(?=\.)")
"""The beginning of the name of a module in a layer: `model.layers.3`."""

Choose = Callable[[int, int, Tensor], Tensor | None]
"""(router, first column, experts [T, k] that it chose) -> the experts [T, k] that take their place, or None."""


class NoRouters(Exception):
    """The error whose message says why the choice of experts cannot be had from a model: half a sentence."""


@dataclass(frozen=True)
class RouterKind:
    """The calls in which the modules of one class choose experts."""

    function: str
    """`topk` or `max`."""
    calls: tuple[int, ...]
    """The calls of the function that choose, numbered within a call of the module."""
    width: int
    """The experts that each of them chooses."""
    experts: int
    """The number of experts among which it chooses; where a router may skip them all, that is one more."""

    @property
    def chosen(self) -> int:
        return self.width * len(self.calls)


Kinds = dict[type, RouterKind]


def router_kinds(model: torch.nn.Module, run: Callable[[], Any], tokens: int) -> Kinds:
    """Finds a model's routers in one pass, which `run` makes over so many tokens; on the meta device too. Raises NoRouters."""
    stacks = {p.shape[0] for p in model.parameters() if p.ndim == 3}
    seen: dict[torch.nn.Module, list[_Call]] = defaultdict(list)
    with _Watch(model) as watch:
        run()
    for call in watch.calls:
        of_experts = call.options in stacks or call.options - 1 in stacks
        if call.module is not model and of_experts and call.last and call.tokens == tokens:
            seen[call.module].append(call)
    kinds: Kinds = {}
    for module, calls in seen.items():
        kind = _kind_of(calls, type(module).__name__)
        if kind and kinds.setdefault(type(module), kind) != kind:
            raise NoRouters(f"two modules of {type(module).__name__} choose differently")
    if any(not any(module in seen for module in modules) for modules in _by_name(model, kinds)):
        raise NoRouters("it has routers that its forward pass does not call")
    if left := _without_router(model, kinds):
        raise NoRouters(f"{left[0]} has experts, and no choice among them is seen")
    if len({kind.chosen for kind in kinds.values()}) > 1:
        raise NoRouters("its layers choose different numbers of experts")
    return kinds


def _by_name(model: torch.nn.Module, kinds: Kinds) -> tuple[tuple[torch.nn.Module, ...], ...]:
    found: dict[str, list[torch.nn.Module]] = {}
    for name, module in model.named_modules():
        if type(module) in kinds:
            found.setdefault(_ADAPTED.sub("", name), []).append(module)
    return tuple(map(tuple, found.values()))


def _without_router(model: torch.nn.Module, kinds: Kinds) -> list[str]:
    """Names of layers with stacked experts whose router was not found."""
    counts = {count for kind in kinds.values() for count in (kind.experts, kind.experts - 1)}
    mixtures: dict[str, None] = {}
    routed: set[str] = set()
    for name, module in model.named_modules():
        layer = (_LAYER.match(name) or [name])[0]
        if type(module) in kinds:
            routed.add(layer)
        own = () if isinstance(module, _ConvNd) else module.parameters(recurse=False)
        if any(p.ndim == 3 and p.shape[0] in counts for p in own):
            mixtures[layer] = None
    return [layer for layer in mixtures if layer not in routed]


def _kind_of(calls: list[_Call], name: str) -> RouterKind | None:
    if len({call.visit for call in calls}) > 1:
        raise NoRouters(f"{name} chooses more than once in a pass")
    if last := [call for call in calls if call.function == "topk"][-1:]:
        calls = last  # those before it choose groups
    elif any(call.chosen != 1 for call in calls):
        return None
    return RouterKind(calls[0].function, tuple(call.number for call in calls), calls[0].chosen, calls[0].options)


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call of `topk` or `max`."""

    module: torch.nn.Module
    """The innermost one that was running."""
    visit: int
    """The number of the module's call within the pass."""
    function: str
    number: int
    """Among the calls of this function since the module was called."""
    options: int
    tokens: int
    chosen: int
    last: bool
    """Whether the choice is over the last dimension."""


class _Watch(TorchFunctionMode):
    """Notes every call of `topk` and `max` while modules of `model` run."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self._open: list[tuple[torch.nn.Module, int, dict[str, int]]] = []
        self._visits: dict[torch.nn.Module, int] = defaultdict(int)
        self._model, self._hooks = model, ExitStack()

    def __enter__(self) -> _Watch:
        for module in self._model.modules():
            self._hooks.callback(module.register_forward_pre_hook(self._begin).remove)
            self._hooks.callback(module.register_forward_hook(self._end, always_call=True).remove)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()

    def _begin(self, module: torch.nn.Module, _: Any) -> None:
        self._visits[module] += 1
        self._open.append((module, self._visits[module], defaultdict(int)))

    def _end(self, *_: Any) -> None:
        self._open.pop()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        name = _CALLS.get(function)
        if name is None or not isinstance(found, tuple) or not self._open:
            return found
        scores, indices = args[0], found[1]
        module, visit, counts = self._open[-1]
        self.calls.append(
            _Call(
                module=module,
                visit=visit,
                function=name,
                number=counts[name],
                options=scores.shape[-1],
                tokens=scores.shape[:-1].numel(),
                chosen=indices.shape[-1],
                last=indices.shape[:-1] == scores.shape[:-1],
            )
        )
        for _, _, counts in self._open:
            counts[name] += 1
        return found


class Routers:
    """The routers of a model in the order of its layers: one for each that has experts."""

    def __init__(self, model: torch.nn.Module, kinds: Kinds) -> None:
        self.modules = _by_name(model, kinds)
        """All modules that may be called for each router: peft keeps an original and a trained copy."""
        self._kinds = tuple(kinds[type(modules[0])] for modules in self.modules)  # peft changes classes for a while
        self.chosen = max((kind.chosen for kind in kinds.values()), default=0)
        self.experts = tuple(kind.experts for kind in self._kinds)
        """The number of experts among which each router chooses."""

    def __len__(self) -> int:
        return len(self.modules)

    @contextmanager
    def asked(self, choose: Choose) -> Iterator[None]:
        """Every choice of experts is told to `choose` while it is open, which may make another one."""
        with ExitStack() as hooks:
            for number, modules in enumerate(self.modules):
                for module in modules:
                    running: list[_Choosing] = []
                    begin = partial(_begin, running, self._kinds[number], partial(choose, number))
                    hooks.callback(module.register_forward_pre_hook(begin).remove)
                    hooks.callback(module.register_forward_hook(partial(_end, running), always_call=True).remove)
            yield


def _begin(running: list[_Choosing], kind: RouterKind, choose: Any, *_: Any) -> None:
    running.append(_Choosing(kind, choose))
    running[-1].__enter__()


def _end(running: list[_Choosing], *_: Any) -> None:
    running.pop().__exit__(None, None, None)


class _Choosing(TorchFunctionMode):
    """One call of a router."""

    def __init__(self, kind: RouterKind, choose: Callable[[int, Tensor], Tensor | None]) -> None:
        super().__init__()
        self._kind, self._choose = kind, choose
        self._count = 0
        self._masked: tuple[Tensor, Tensor] | None = None
        """The last masked tensor, and what it was before: groups of experts that the live router did not choose are masked, and recorded experts may
        be in these."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        kind = self._kind
        if function in _MASKS:
            self._masked = found, args[0]
        if _CALLS.get(function) != kind.function or not isinstance(found, tuple):
            return found
        number, self._count = self._count, self._count + 1
        if number not in kind.calls:
            return found
        column = kind.calls.index(number) * kind.width
        other = self._choose(column, found[1].reshape(-1, kind.width))
        if other is None:
            return found
        indices = other.view(found[1].shape)
        scores = self._masked[1] if self._masked and self._masked[0] is args[0] else args[0]
        return type(found)((scores.gather(-1, indices), indices))
