"""Recorded experts forced in the trainer's forward pass of a mixture-of-experts model (rollout routing replay, arXiv 2510.11370).

Sampler and trainer round differently, and where two experts are nearly tied they may choose different ones; the trainer would then train
a function that did not sample. Under replay, every position goes to the experts that the sampler chose. Their weights still come
from the live router, softmax over all experts, so that the router keeps its gradient:

    p = softmax(router(x)) [E]      w = p[recorded] [k], divided by its sum where the family does that

Hooks on the router modules of one model instance do this while a context is open. Nothing is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.core.errors import ConfigError
from headrace.trainer.forward.context import Context
from headrace.trainer.forward.forward import Forward
from headrace.trainer.forward.fused.fused_mixtures import is_router, weights_of
from headrace.trainer.packing import Pack, pack_sequence

TOLERANCE = 1e-4
"""Largest difference in the probe, in nats or relative to the weights. Rounding causes 1e-6, a wrong formula 0.1."""

_ADAPTED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)")
"""The part that peft adds to the name of a module that it wraps or copies."""


@dataclass(frozen=True)
class Replayed:
    """Counts of a pack's routes, one for each position and layer with experts."""

    routed: int
    missing: int
    """Routes that were not recorded, so that the live router chose."""


@dataclass
class _Router:
    """The router of one layer: all modules that may be called for it (peft keeps an original and a trained copy)."""

    modules: list[torch.nn.Module]
    normalised: bool = False
    """Whether the chosen experts' probabilities are divided by their sum."""


class RoutingReplay:
    """Used as `with replay(pack): forward and backward`. Raises ConfigError if the model's routers are not supported.

    Any number of whole passes over the pack may run inside, each as one call or row after row in the order of its tokens. The
    backward pass need not be inside, even if layers are checkpointed: `enable_checkpointing(model, replay.checkpoint_contexts)`.
    """

    def __init__(self, forward: Forward, dtype: torch.dtype, normalised: bool | None = None) -> None:
        """`forward` is used as it will be later, computing in `dtype`; its model is in evaluation mode and not yet checkpointed. `normalised`: what was found out about
        all routers of a model that has no values yet; None: it is tried.

        Costs three forward passes of a dozen tokens.
        """
        self._forward, self._dtype = replace(forward, context=None), dtype
        self._routers = _routers_of(forward.model)
        self._routes: Tensor | None = None
        self._place = 0
        """The next token of the pack whose routes are due."""
        self._now: Tensor | None = None
        """[T, layers, k] routes of the running call, or of the one that is recomputed."""
        self._open = False
        """Whether hooks force the routers."""
        if not self._routers:
            raise self._unsupported("it has no top-k routers")
        self._context: Context | None = None
        if normalised is None:
            self._probe()  # by each rank alone
        else:
            for router in self._routers:
                router.normalised = normalised
        self._context = forward.context

    @property
    def normalised(self) -> bool:
        """Whether the chosen experts' probabilities are divided by their sum. Raises ConfigError if that differs from layer to layer."""
        if len(found := {router.normalised for router in self._routers}) > 1:
            raise self._unsupported("its routers differ from layer to layer")
        return found.pop()

    @property
    def layers(self) -> int:
        """The number of layers with experts."""
        return len(self._routers)

    @contextmanager
    def __call__(self, pack: Pack) -> Iterator[Replayed]:
        """Forces the pack's routes. Raises ValueError if they were recorded from another model."""
        total = len(pack.tokens) * self.layers
        if pack.routing is None:
            yield Replayed(total, total)
            return
        routes = pack.routing.long()
        self._check(routes)
        missing = int((routes < 0).any(-1).sum())
        if self._context:
            routes = self._context.part(routes, fill=-1)
        inner: Any = self._forward.model.base_model
        with self._forced(), ExitStack() as hooks:
            hooks.callback(inner.register_forward_pre_hook(self._advance, with_kwargs=True).remove)
            self._routes, self._place, passed = routes, 0, False
            try:
                yield Replayed(total, missing)
                passed = True
            finally:
                left, seen = self._place, self._now is not None
                self._routes = self._now = None
            assert not passed or (seen and left == 0), "the forward pass did not have every token"

    @contextmanager
    def _forced(self) -> Iterator[None]:
        if self._open:  # layers are computed again in a backward pass within the context of their forward pass
            yield
            return
        self._open = True
        with ExitStack() as hooks:
            hooks.callback(setattr, self, "_open", False)
            for layer, router in enumerate(self._routers):
                for module in router.modules:
                    hooks.callback(module.register_forward_hook(partial(self._force, layer)).remove)
            yield

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Returns `context_fn` of torch's checkpoint: a recomputed layer gets the routes that it got before."""
        seen: list[Tensor | None] = []
        return self._remember(seen), self._recall(seen)

    @contextmanager
    def _remember(self, seen: list[Tensor | None]) -> Iterator[None]:
        seen.append(self._now)
        yield

    @contextmanager
    def _recall(self, seen: list[Tensor | None]) -> Iterator[None]:
        if seen[0] is None:
            yield
            return
        before, self._now = self._now, seen[0]
        try:
            with self._forced():
                yield
        finally:
            self._now = before

    def _force(self, layer: int, module: torch.nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        """Forward hook of a router: (logits [T, E], weights [T, k], experts [T, k]), the latter two as recorded."""
        logits, weights, live = output
        assert self._now is not None
        routes = self._now[:, layer]
        experts = torch.where((routes < 0).any(-1, keepdim=True), live, routes)
        if (served := weights_of(module, logits, experts)) is not None:
            return logits, served, experts
        return logits, _weights(logits, experts, self._routers[layer].normalised).to(weights.dtype), experts

    def _advance(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook of the inner model: the routes of this call's tokens are due."""
        assert self._routes is not None
        end = self._place + kwargs["input_ids"].shape[1]
        assert end <= len(self._routes), "the forward pass has more tokens than the pack"
        self._now, self._place = self._routes[self._place : end], end % len(self._routes)

    def _check(self, routes: Tensor) -> None:
        router: Any = self._routers[0].modules[0]
        expected = (self.layers, router.top_k)
        if routes.shape[1:] != expected or int(routes.max()) >= router.num_experts:
            raise ValueError(
                f"the recorded routes are of [layers, k] = {list(routes.shape[1:])}, experts up to {int(routes.max())}; {self._kind} "
                f"has {list(expected)} and {router.num_experts} experts: sample with the model that is trained"
            )

    # -- at the start -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _probe(self) -> None:
        """Checks that forcing the live choice gives the model's own numbers, and that the experts use the values that the
        hooks return."""
        embedding = self._forward.model.get_input_embeddings().weight
        tokens = (torch.arange(1, 14) * 7919 % embedding.shape[0]).tolist()
        pack = pack_sequence(tokens).to(embedding.device)
        seen: list[Any] = [None] * self.layers
        own = self._hooked(pack, lambda layer, output: seen.__setitem__(layer, output))
        for router, output in zip(self._routers, seen, strict=True):
            router.normalised = self._is_normalised(output)
        routes = torch.stack([experts for _, _, experts in seen], 1).to(torch.int16)
        with self(replace(pack, routing=routes)):
            forced = self._score(pack)
        if not bool((forced - own).abs().max() <= TOLERANCE):
            raise self._unsupported("forcing the experts that it chose itself changes its log-probs")
        muted = self._hooked(pack, lambda _, output: (output[0], torch.zeros_like(output[1]), output[2]))
        if bool((muted - own).abs().max() <= TOLERANCE):
            raise self._unsupported("its experts do not use what its routers return")

    def _hooked(self, pack: Pack, act: Callable[[int, Any], Any]) -> Tensor:
        with ExitStack() as hooks:
            for layer, router in enumerate(self._routers):
                for module in router.modules:
                    hook = module.register_forward_hook(lambda module, args, output, layer=layer: act(layer, output))
                    hooks.callback(hook.remove)
            return self._score(pack)

    def _score(self, pack: Pack) -> Tensor:
        with torch.autocast(pack.tokens.device.type, self._dtype, enabled=self._dtype != torch.float32):
            return self._forward.logprobs(pack, 1.0, self._dtype).logprob

    @property
    def _kind(self) -> str:
        return type(self._forward.model).__name__

    def _is_normalised(self, output: Any) -> bool:
        if not (isinstance(output, tuple) and len(output) == 3 and output[1].shape == output[2].shape):
            raise self._unsupported("its routers do not return logits, weights and experts")
        logits, weights, experts = output
        for normalised in (False, True):
            formula = _weights(logits, experts, normalised).to(weights.dtype)
            if bool((formula - weights).abs().max() <= TOLERANCE):
                return normalised
        raise self._unsupported("its routers' weights are not a softmax of their logits")

    def _unsupported(self, why: str) -> ConfigError:
        return ConfigError(
            f"recorded routes cannot be replayed in {self._kind}: {why}; set rollout.keep_routing = false (known to work: "
            "Qwen3-MoE, Mixtral, OLMoE)"
        )


@contextmanager
def no_replay(pack: Pack) -> Iterator[Replayed]:
    """Stands for `RoutingReplay` in runs that record no routes."""
    yield Replayed(0, 0)


def _weights(logits: Tensor, experts: Tensor, normalised: bool) -> Tensor:
    """[T, E] and [T, k] -> [T, k] float32."""
    chosen = logits.float().softmax(-1).gather(1, experts)
    return chosen / chosen.sum(-1, keepdim=True) if normalised else chosen


def _routers_of(model: torch.nn.Module) -> list[_Router]:
    """Returns one router for each layer with experts, in order."""
    by_name: dict[str, _Router] = {}
    for name, module in model.named_modules():
        if is_router(module):
            by_name.setdefault(_ADAPTED.sub("", name), _Router([])).modules.append(module)
    return list(by_name.values())
