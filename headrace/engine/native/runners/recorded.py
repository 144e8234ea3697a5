"""The experts that transformers' own layers choose in the engine's passes, at the places of their tokens in the scheduler's blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from headrace.core.errors import ConfigError
from headrace.engine.native.forward_pass import BLOCK
from headrace.engine.native.runners.skeleton import without_values
from headrace.models.expert_choice import NoRouters, Routers, router_kinds

TRIED = 5
"""Tokens of the pass that finds the routers."""


class ExpertRecorder:
    """Raises ConfigError for a mixture whose choice of experts cannot be recorded."""

    def __init__(self, path: str, model: Any, run: Callable[[], Any]) -> None:
        """`path`: the way of serving, in words. `model`: its parameters are on the meta device still. `run`: a pass over TRIED tokens there."""
        try:
            with without_values(model):
                kinds = router_kinds(model, run, TRIED)
        except NoRouters as error:
            raise ConfigError(_cannot(path, str(error))) from None
        except Exception as error:
            raise ConfigError(_cannot(path, "its layers read numbers on their way to it")) from error
        self._routers = Routers(model, kinds)

    @property
    def experts(self) -> tuple[int, int]:
        """(layers with experts, experts chosen in each); (0, 0) of a dense model."""
        return (len(self._routers), self._routers.chosen) if len(self._routers) else (0, 0)

    @contextmanager
    def watching(self) -> Iterator[ChosenExperts]:
        """Records one call of the model, which is whole when the context is left."""
        width = np.uint8 if max(self._routers.experts, default=0) <= 256 else np.uint16
        chosen = ChosenExperts(np.dtype(width), [[] for _ in self._routers.modules])
        with self._routers.asked(chosen.add):
            yield chosen


@dataclass(frozen=True)
class ChosenExperts:
    """The choice of every layer for the tokens of one call."""

    dtype: np.dtype[Any]
    _columns: list[list[torch.Tensor]]
    """The experts [T, columns] that each layer named, call by call."""

    def add(self, layer: int, column: int, experts: torch.Tensor) -> None:
        self._columns[layer].append(experts.detach())

    def array(self) -> np.ndarray:
        """[T, layers, K], in the order in which a layer names them."""
        layers = [torch.cat(columns, -1) for columns in self._columns]
        return torch.stack(layers, 1).cpu().numpy().astype(self.dtype)


def _cannot(path: str, why: str) -> str:
    return f"engine.routing = true, but the choice of experts in {path} cannot be recorded: {why}; set it and rollout.keep_routing to false"


# --- Passes that forward other tokens than they were given


@dataclass(frozen=True)
class RoutedTokens:
    """Tokens of one sequence in a call of the model."""

    table: np.ndarray
    """[W] the blocks of the sequence."""
    positions: np.ndarray
    """[n] their positions in it."""
    first: int = 0
    """The place of the first one among all tokens of the call, row after row; the others follow."""


@dataclass
class PassRoutes:
    """The routes of one pass over sequences whose calls may hold tokens of earlier passes, too."""

    recorder: ExpertRecorder | None
    """None: nothing is recorded."""
    _routes: list[np.ndarray] = field(default_factory=list)
    _places: list[np.ndarray] = field(default_factory=list)

    @contextmanager
    def recorded(self, tokens: Sequence[RoutedTokens]) -> Iterator[None]:
        """Records these tokens of the call that is made within."""
        if self.recorder is None:
            yield
            return
        with self.recorder.watching() as chosen:
            yield
        whole = chosen.array()
        for row in tokens:
            self._routes.append(whole[row.first : row.first + len(row.positions)])
            self._places.append(np.stack([row.table[row.positions // BLOCK], row.positions % BLOCK], 1))

    def output(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """`routing` and `routed` of a `ForwardOutput`."""
        if not self._routes:
            return None, None
        return np.concatenate(self._routes), np.concatenate(self._places)
