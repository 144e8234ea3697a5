"""The critic of a learner: a linear value head beside the model, its optimizer, and its part in a step.

V = (w · h/|h|) / √H + b for the hidden state h [H] that predicts a token: the head's input has a norm that depends on no model, so that one learning
rate serves all of them. It starts at 0 everywhere. The head is no part of the model: what is published and exported has no trace of it, and
every rank holds it whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from headrace.algo.config import AlgoConfig
from headrace.algo.critic import Discounts, StepTokens, judge
from headrace.algo.policy.tokens import Tokens
from headrace.core.errors import CheckpointError
from headrace.core.reports import CriticNumbers
from headrace.trainer.packing import Pack
from headrace.trainer.placement.port import Placement

if TYPE_CHECKING:
    from jaxtyping import Float

PREFIX = "critic/"
"""Begins the names of its tensors in a checkpoint."""
_STEPS = f"{PREFIX}steps"
"""Its steps so far. A checkpoint of an earlier version has its updates alone."""
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_PART = 1e-6
"""Below every part of a step, and above what rounding leaves of their sum."""


@dataclass(frozen=True)
class JudgedPack:
    """The part of a microbatch in what the critic found for the step."""

    advantage: Float[Tensor, " M"]
    target: Float[Tensor, " M"]
    """The return that the value is drawn to."""
    share: float
    """The weight of each token's value loss: one of all loss tokens of the update."""
    imitated: Float[Tensor, " M"]
    """[M] the weight of each token's negative log-likelihood."""


class ValueHead(torch.nn.Module):
    def __init__(self, width: int, algo: AlgoConfig, device: torch.device, updates: int = 1) -> None:
        """`width`: of the hidden states. `updates`: those of a step."""
        super().__init__()
        recipe = algo.recipe.critic
        self._recipe, self._discounts = recipe, Discounts(algo.recipe.gamma, algo.lam, recipe)
        self.weight = torch.nn.Parameter(torch.zeros(width, device=device))
        self.bias = torch.nn.Parameter(torch.zeros(1, device=device))
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=recipe.learning_rate, weight_decay=0.0, fused=True)
        self._updates = updates
        self._steps = 0.0
        """Steps of the head so far. Each of its updates is a part of one, whose size a resumed run may have changed."""

    def forward(self, hidden: Float[Tensor, "M H"]) -> Float[Tensor, " M"]:
        """[M] values, in float32 or wider. Their gradient by the hidden states is scaled by `algo.critic.trunk`."""
        own, trunk = hidden.to(torch.promote_types(hidden.dtype, torch.float32)), self._recipe.trunk
        own = trunk * own + (1 - trunk) * own.detach() if trunk else own.detach()
        unit = torch.nn.functional.normalize(own, dim=-1) / math.sqrt(own.shape[-1])
        return (unit * self.weight).sum(-1) + self.bias

    @property
    def alone(self) -> bool:
        """Whether the next step trains the critic only. Its own updates count, so that one that begins in a resumed run has its first steps, too."""
        return self._steps < self._recipe.alone_steps - _PART

    def judged(
        self,
        packs: Sequence[Pack],
        values: Sequence[Float[Tensor, " M"]],
        placement: Placement,
        minibatches: Sequence[int] = (),
    ) -> tuple[list[JudgedPack], CriticNumbers]:
        """Returns the parts of this rank's microbatches, from their values, and the numbers of the step. Every rank calls it. `minibatches`: the
        number of each pack's, by whose tokens its losses are divided; empty: there is one."""
        places = minibatches or [0] * len(packs)
        columns = torch.cat([_columns(*one) for one in zip(packs, values, places, strict=True)], 1)
        joined, mine = placement.join(columns)
        value, reward, trajectory, turn, place = joined.cpu().double().numpy()
        found = judge(StepTokens(value, reward, trajectory.astype(int), turn.astype(int)), self._discounts)
        minibatch, most = place.astype(int), max(places) + 1
        tokens = np.bincount(minibatch, minlength=most)
        succeeded = np.maximum(np.bincount(minibatch, found.succeeded, most), 1)
        made = torch.stack(
            [
                torch.from_numpy(found.advantage),
                torch.from_numpy(found.target),
                torch.from_numpy(found.succeeded * (self._recipe.imitation / succeeded[minibatch])),
            ]
        )
        parts = made[:, mine].to(columns.device, columns.dtype).split([len(pack.target) for pack in packs], 1)
        shares = [1 / max(int(tokens[number]), 1) for number in places]
        judged = [JudgedPack(own[0], own[1], share, own[2]) for own, share in zip(parts, shares, strict=True)]
        return judged, found.numbers

    def loss(
        self, policy: Float[Tensor, ""], tokens: Tokens, value: Float[Tensor, " M"], judged: JudgedPack
    ) -> Float[Tensor, ""]:
        """Returns the loss of a microbatch, from that of the policy. In a step of the critic alone the policy has a gradient of zero, rather than none, so
        that ranks which split a model wait for the same things as ever."""
        of_values = (value - judged.target).square().sum() * (judged.share / 2)
        if self.alone:
            return of_values + 0.0 * policy
        return policy + of_values - (judged.imitated * tokens.logprob).sum()

    def update(self) -> None:
        self.optimizer.step()
        self._steps += 1 / self._updates
        self.forget()

    def forget(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint, where they lie."""
        found = {f"{PREFIX}{name}": parameter.detach() for name, parameter in self.named_parameters()}
        found[_STEPS] = torch.tensor(self._steps, dtype=torch.float64)
        for name, parameter in self.named_parameters():
            moments = self.optimizer.state.get(parameter, {})
            found |= {f"{PREFIX}{key}/{name}": tensor for key, tensor in moments.items()}
        return found

    def check(self, saved: Mapping[str, Tensor], directory: str) -> None:
        """Raises CheckpointError if a head of another width was saved."""
        found = saved.get(f"{PREFIX}weight", self.weight)
        if found.shape != self.weight.shape:
            raise CheckpointError(
                f"checkpoint {directory}: its critic has {len(found)} weights instead of {len(self.weight)}; it belongs to another model: resume "
                "with the model it was written for"
            )

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Restores what `state` gave; without a critic in the checkpoint it begins anew."""
        for name, parameter in self.named_parameters():
            parameter.copy_(saved.get(f"{PREFIX}{name}", torch.zeros_like(parameter)))
        state = {
            number: {key: saved[f"{PREFIX}{key}/{name}"] for key in _MOMENTS}
            for number, name in enumerate(name for name, _ in self.named_parameters())
            if f"{PREFIX}step/{name}" in saved
        }
        self._steps = float(saved.get(_STEPS, float(saved.get(f"{PREFIX}step/bias", 0)) / self._updates))
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})


def _columns(pack: Pack, value: Float[Tensor, " M"], minibatch: int) -> Float[Tensor, "5 M"]:
    """Numbers of trajectories and turns are whole numbers, below 2^24. The rewards stand where others have advantages."""
    given = (value.detach(), pack.advantage, pack.trajectory, pack.turn, torch.full_like(value.detach(), minibatch))
    return torch.stack([column.to(value.dtype) for column in given])
