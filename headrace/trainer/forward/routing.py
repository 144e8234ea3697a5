"""Recorded experts forced in the trainer's forward pass of a mixture-of-experts model (rollout routing replay, arXiv 2510.11370).

Sampler and trainer round differently, and where two experts are nearly tied they may choose different ones; the trainer would then train
a function that did not sample. Under replay, every position goes to the experts that the sampler chose. Their weights still come
from the live router by the family's own formula, so that the router keeps its gradient: only the indices of its choice are others
(`headrace/models/expert_choice.py`).

Hooks on the router modules of one model instance do this while a context is open. Nothing is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.core.errors import ConfigError
from headrace.models.expert_choice import Choose, Kinds, NoRouters, Routers, router_kinds
from headrace.trainer.forward.carried import places_of_call
from headrace.trainer.forward.context import Context
from headrace.trainer.forward.forward import Forward, inner_of
from headrace.trainer.forward.fused.fused_mixtures import is_fused_router, unfused_routers, weights_of
from headrace.trainer.packing import Pack, pack_sequence

TOLERANCE = 1e-4
"""Largest difference in the probe, in nats. Rounding causes 1e-6, other experts 0.01 and more."""


@dataclass(frozen=True)
class Replayed:
    """Counts of a pack's routes, one for each position and layer with experts."""

    routed: int
    missing: int
    """Routes that were not recorded, so that the live router chose."""


class RoutingReplay:
    """Used as `with replay(pack): forward and backward`. Raises ConfigError if the model's routers are not supported.

    Any number of whole passes over the pack may run inside, each as one call or in parts in the order of its tokens. The
    backward pass need not be inside, even if layers are checkpointed: `enable_checkpointing(model, replay.checkpoint_contexts)`.
    """

    def __init__(self, forward: Forward, dtype: torch.dtype, kinds: Kinds | None = None) -> None:
        """`forward` is used as it will be later, computing in `dtype`; its model is in evaluation mode and not yet checkpointed. `kinds`: what was found out about
        the routers of a model that has no values yet; None: it is tried.

        Costs four forward passes of a dozen tokens.
        """
        self._forward, self._dtype = replace(forward, context=None), dtype
        self._routes: Tensor | None = None
        self._place = 0
        """The next token of the pack whose routes are due."""
        self._now: Tensor | None = None
        """[T, layers, k] routes of the running call, or of the one that is recomputed."""
        self._open = False
        """Whether hooks force the routers."""
        self._context: Context | None = None
        pack = self._pack()
        self.kinds = self._found(pack) if kinds is None else kinds
        """The calls in which the modules of each class choose."""
        self._routers = Routers(forward.model, self.kinds)
        if not len(self._routers):
            raise self._unsupported("it has no top-k routers")
        if kinds is None:
            self._probe(pack)  # by each rank alone
        self._context = forward.context

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
        inner = inner_of(self._forward.model)
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
        try:
            with self._asked(self._recorded):
                yield
        finally:
            self._open = False

    @contextmanager
    def _asked(self, choose: Choose) -> Iterator[None]:
        with ExitStack() as hooks:
            hooks.enter_context(self._routers.asked(choose))
            for layer, modules in enumerate(self._routers.modules):
                for module in modules:  # those that run through the kernels do not call what is asked
                    hooks.callback(module.register_forward_hook(partial(_ask_kernels, choose, layer)).remove)
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

    def _recorded(self, layer: int, column: int, live: Tensor) -> Tensor:
        """[T, k] the experts of these columns, those that the live router chose where none were recorded."""
        assert self._now is not None
        routes = self._now[:, layer]
        missing = (routes < 0).any(-1, keepdim=True)
        return torch.where(missing, live, routes[:, column : column + live.shape[1]])

    def _advance(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook of the inner model: the routes of this call's tokens are due."""
        assert self._routes is not None
        places = places_of_call()
        if places is None:
            places = torch.arange(kwargs["input_ids"].shape[1], device=self._routes.device) + self._place
        end = int(places.max()) + 1
        assert end <= len(self._routes), "the forward pass has more tokens than the pack"
        self._now, self._place = self._routes[places], end % len(self._routes)

    def _check(self, routes: Tensor) -> None:
        expected = (self.layers, self._routers.chosen)
        experts = torch.tensor(self._routers.experts, device=routes.device)[:, None]
        if routes.shape[1:] != expected or bool((routes >= experts).any()):
            raise ValueError(
                f"the recorded routes are of [layers, k] = {list(routes.shape[1:])}, experts up to {int(routes.max())}; {self._kind} "
                f"has {list(expected)} and {int(experts.max())} experts: sample with the model that is trained"
            )

    # -- at the start -------------------------------------------------------------------------------------------------------

    def _pack(self) -> Pack:
        embedding = self._forward.model.get_input_embeddings().weight
        return pack_sequence((torch.arange(1, 14) * 7919 % embedding.shape[0]).tolist()).to(embedding.device)

    @torch.no_grad()
    def _found(self, pack: Pack) -> Kinds:
        model = self._forward.model
        try:
            with unfused_routers(model):
                return router_kinds(model, lambda: self._score(pack), len(pack.tokens))
        except NoRouters as error:
            raise self._unsupported(str(error)) from None

    @torch.no_grad()
    def _probe(self, pack: Pack) -> None:
        """Checks that forcing the live choice gives the model's own numbers, and that forcing another one gives others."""
        seen: dict[tuple[int, int], Tensor] = {}
        with self._asked(lambda layer, column, live: seen.__setitem__((layer, column), live)):
            own = self._score(pack)
        columns = [[live for (of, _), live in sorted(seen.items()) if of == layer] for layer in range(self.layers)]
        routes = torch.stack([torch.cat(parts, -1) for parts in columns], 1)
        if not bool((self._forced_score(pack, routes) - own).abs().max() <= TOLERANCE):
            raise self._unsupported("forcing the experts that it chose itself changes its log-probs")
        experts = torch.tensor(self._routers.experts, device=routes.device)[:, None]
        if not bool((experts > self._routers.chosen).any()):
            return  # all of them compute
        if bool((self._forced_score(pack, (routes + 1) % experts) - own).abs().max() <= TOLERANCE):
            raise self._unsupported("its experts do not use what its routers return")

    def _forced_score(self, pack: Pack, routes: Tensor) -> Tensor:
        with self(replace(pack, routing=routes.to(torch.int16))):
            return self._score(pack)

    def _score(self, pack: Pack) -> Tensor:
        with torch.autocast(pack.tokens.device.type, self._dtype, enabled=self._dtype != torch.float32):
            return self._forward.logprobs(pack, 1.0, self._dtype).logprob

    @property
    def _kind(self) -> str:
        return type(self._forward.model).__name__

    def _unsupported(self, why: str) -> ConfigError:
        return ConfigError(
            f"recorded routes cannot be replayed in {self._kind}: {why}; set rollout.keep_routing = false"
        )


@contextmanager
def no_replay(pack: Pack) -> Iterator[Replayed]:
    """Stands for `RoutingReplay` in runs that record no routes."""
    yield Replayed(0, 0)


def _ask_kernels(choose: Choose, layer: int, module: torch.nn.Module, args: Any, output: Any) -> Any:
    """Forward hook of a router: of one that runs through the kernels, (logits [T, E], weights [T, k], experts [T, k])."""
    if not is_fused_router(module):
        return None
    logits, _, live = output
    experts = choose(layer, 0, live)
    return None if experts is None else (logits, weights_of(module, logits, experts), experts)
