"""The reward model of a learner (PRIME): a second adapter φ of the policy's base, its optimizer, and its part in a step, which comes before the policy's.

The rewards of a step are made by the φ that the step has trained. The reference is the base without adapters, of which φ is the equal at first. The adapter is in nothing that
is published or exported; a checkpoint has it beside the policy's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.algo.implicit import StepOutcomes, credited, numbers_of, taught
from headrace.core.errors import CheckpointError
from headrace.core.reports import ProcessNumbers
from headrace.trainer.forward.forward import Forward
from headrace.trainer.model.adapters import Adapters
from headrace.trainer.model.causal_lm import computed_in
from headrace.trainer.packing import Pack, StepPlan
from headrace.trainer.placement.port import Microbatches, Placement
from headrace.trainer.step.checkpoint_files import SavedTensors
from headrace.trainer.step.gradient import Replay
from headrace.trainer.step.learner import Assignment, apply
from headrace.trainer.step.reference import Reference

if TYPE_CHECKING:
    from jaxtyping import Float

ADAPTER = "process reward"
"""Its name among the trainer's adapters, which no setting can have."""
WITHOUT_ADAPTER = "algo.name = prime trains a second adapter of the policy's base, beside the policy's own; set lora.rank (16 is usual), or use algo.name = rloo"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class Scoring(NamedTuple):
    """The means of computing log-probs of a microbatch."""

    forward: Forward
    reference: Reference
    replay: Replay
    dtype: torch.dtype
    device: torch.device


class ProcessReward:
    prefix = "process/"
    """Begins the names of its tensors in a checkpoint."""

    def __init__(
        self, name: str, policy: Assignment, adapters: Adapters, *, models: Scoring, placement: Placement
    ) -> None:
        """`name`: of the policy's adapter; `adapters`: that and the one of this module."""
        self._name, self._adapters, self._models, self._placement = name, adapters, models, placement
        self._recipe = policy.algo.recipe.process
        self._rate = self._recipe.learning_rate or policy.train.learning_rate
        self._max_norm = policy.train.max_grad_norm
        self.parameters = adapters.parameters(ADAPTER)
        adapters.activate(name)
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=self._rate, weight_decay=0.0)

    def rewarded(
        self, plans: Mapping[int, StepPlan], firsts: Sequence[int]
    ) -> tuple[dict[int, StepPlan], ProcessNumbers]:
        """Trains φ on the step, and returns its plans with advantages in the place of rewards, and its numbers. `firsts`: the first trajectory of each group."""
        packs = [_bare(pack.to(self._models.device)) for plan in plans.values() for pack in plan.packs]
        tokens = StepOutcomes(
            _joined([pack.advantage for pack in packs]),
            _joined([pack.trajectory for pack in packs]).astype(np.int64),
            _joined([pack.turn for pack in packs]).astype(np.int64),
            firsts,
        )
        base = _joined([self._referred(pack) for pack in packs])
        self._adapters.activate(ADAPTER)
        try:
            found = taught(self._scores(packs) - base, tokens, self._recipe.beta)
            self._train(packs, torch.from_numpy(found.slope))
            q = self._scores(packs) - base
        finally:
            self._adapters.activate(self._name)
        advantages = iter(torch.from_numpy(credited(q, tokens, self._recipe.beta)).float().split(_counts(packs)))
        made = {
            number: replace(plan, packs=tuple(replace(pack, advantage=next(advantages)) for pack in plan.packs))
            for number, plan in plans.items()
        }
        return made, numbers_of(found, q, self._recipe.beta)

    def _referred(self, pack: Pack) -> Float[Tensor, " M"]:
        with computed_in(self._models.dtype, self._models.device):
            return self._models.reference(pack, 1.0)

    @torch.no_grad()
    def _scores(self, packs: Sequence[Pack]) -> np.ndarray:
        """[M] log-probs of φ, the active adapter."""
        found = []
        for pack in packs:
            with computed_in(self._models.dtype, self._models.device), self._models.replay(pack):
                found.append(self._models.forward.logprobs(pack, 1.0, self._models.dtype).logprob)
        return _joined(found)

    def _train(self, packs: Sequence[Pack], slope: Float[Tensor, " M"]) -> None:
        """Makes an update; a gradient that is not finite makes none."""
        slopes = slope.float().to(self._models.device).split(_counts(packs))

        @contextmanager
        def loss(number: int) -> Iterator[Tensor]:
            with self._models.replay(packs[number]):
                yield (
                    self._models.forward.logprobs(packs[number], 1.0, self._models.dtype).logprob * slopes[number]
                ).sum()

        def body(number: int) -> Tensor:
            with self._models.replay(packs[number]):
                return self._models.forward.hidden(packs[number])

        def precision() -> AbstractContextManager[None]:
            return computed_in(self._models.dtype, self._models.device)

        parameters = list(self.parameters.values())
        self._placement.accumulate(
            Microbatches(packs=packs, loss=loss, body=body, precision=precision, parameters=parameters)
        )
        apply(self.optimizer, self._placement, lr=self._rate, max_norm=self._max_norm)

    def state(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint, where they lie."""
        found = {f"{self.prefix}{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            moments = self.optimizer.state.get(parameter, {})
            found |= {f"{self.prefix}{key}/{name}": tensor for key, tensor in moments.items()}
        return found

    def copy(self) -> dict[str, Tensor]:
        """Returns `state` as it is now, for `restore`."""
        return {name: tensor.clone() for name, tensor in self.state().items()}

    def read(self, saved: SavedTensors, directory: str) -> dict[str, Tensor]:
        """Returns what `restore` takes of a checkpoint's tensors. Raises CheckpointError if another adapter was saved."""
        own = {name: saved.read(name) for name in saved if name.startswith(self.prefix)}
        expected = {f"{self.prefix}{name}": parameter.shape for name, parameter in self.parameters.items()}
        if own and {name: own[name].shape for name in expected if name in own} != expected:
            raise CheckpointError(
                f"checkpoint {directory}: its process reward (algo.name = prime) is an adapter of another shape; resume with the lora settings "
                "it was written with"
            )
        return own

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Restores what `state` gave. Nothing, from a checkpoint without it, leaves all as it is."""
        if not saved:
            return
        state = {}
        for number, (name, parameter) in enumerate(self.parameters.items()):
            parameter.copy_(saved[f"{self.prefix}{name}"])
            if f"{self.prefix}step/{name}" in saved:
                state[number] = {key: saved[f"{self.prefix}{key}/{name}"].clone() for key in _MOMENTS}
        torch.autograd.graph.increment_version(list(self.parameters.values()))
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})


def _bare(pack: Pack) -> Pack:
    """The pack as models alone see it: at temperature 1, without sampling filters or a teacher."""
    return replace(pack, temperature=1.0, kept=None, teacher=None, top_ids=None, top_logprobs=None)


def _counts(packs: Sequence[Pack]) -> list[int]:
    return [len(pack.target) for pack in packs]


def _joined(columns: Sequence[Tensor]) -> np.ndarray:
    """[M] float64 on the host"""
    joined: np.ndarray = torch.cat([column.detach().double().cpu() for column in columns]).numpy()
    return joined
