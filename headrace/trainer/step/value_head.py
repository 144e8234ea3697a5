"""The critic of a learner: a linear value head beside the policy, or on a model of its own, its optimizer, and its part in a step.

V = (w · h/|h|) / √H + b for the hidden state h [H] that predicts a token: the head's input has a norm that depends on no model, so that one learning
rate serves all of them. It starts at 0 everywhere. The critic is no part of the policy: what is published and exported has no trace of it, and
every rank holds the head whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from headrace.algo.config import AlgoConfig
from headrace.algo.critic import Discounts, StepTokens, judge
from headrace.algo.policy.tokens import Tokens
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.reports import CriticNumbers
from headrace.trainer.config import TrainConfig
from headrace.trainer.forward.forward import Forward, TokenScores, choose_forward
from headrace.trainer.model.causal_lm import enable_checkpointing, load_model
from headrace.trainer.packing import Pack
from headrace.trainer.placement.port import Placement

if TYPE_CHECKING:
    from jaxtyping import Float

MODEL = "trunk"
"""Begins the names of its own model's parameters, behind `PREFIX`."""
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
        return self._read(trunk * own + (1 - trunk) * own.detach() if trunk else own.detach())

    def _read(self, hidden: Float[Tensor, "M H"]) -> Float[Tensor, " M"]:
        unit = torch.nn.functional.normalize(hidden, dim=-1) / math.sqrt(hidden.shape[-1])
        return (unit * self.weight).sum(-1) + self.bias

    def scored(self, policy: Forward, pack: Pack, temperature: float, dtype: torch.dtype) -> TokenScores:
        """The scores of a microbatch under the policy, with this critic's values."""
        return policy.logprobs(pack, temperature, dtype, self)

    @property
    def shares(self) -> bool:
        """Whether it can read rows that share tokens, as far as the policy can."""
        return True

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

    def bounded(self, max_norm: float) -> bool:
        """Scales down the gradient of a model of its own. Returns whether it is finite; that of a head is bounded by its optimizer alone."""
        return True

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
        """Raises CheckpointError if a critic of other sizes was saved, or one with a model of its own in the place of one without, or the reverse."""
        found = saved.get(f"{PREFIX}weight", self.weight)
        if found.shape != self.weight.shape:
            raise CheckpointError(
                f"checkpoint {directory}: its critic has {len(found)} weights instead of {len(self.weight)}; it belongs to another model: resume "
                "with the model it was written for"
            )
        own = {f"{PREFIX}{name}": parameter.shape for name, parameter in self.named_parameters()}
        kept = {
            name: tensor.shape for name, tensor in saved.items() if name in own or name.startswith(f"{PREFIX}{MODEL}.")
        }
        if kept and kept != own:
            raise CheckpointError(
                f"checkpoint {directory}: its critic {_described(kept)}, and this one {_described(own)}; resume with the algo.critic.model it was "
                "written with"
            )

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Restores what `state` gave; without a critic in the checkpoint it begins anew."""
        if f"{PREFIX}weight" not in saved:
            self._begin()
        for name, parameter in self.named_parameters():
            if f"{PREFIX}{name}" in saved:
                parameter.copy_(saved[f"{PREFIX}{name}"])
        state = {
            number: {key: saved[f"{PREFIX}{key}/{name}"] for key in _MOMENTS}
            for number, name in enumerate(name for name, _ in self.named_parameters())
            if f"{PREFIX}step/{name}" in saved
        }
        self._steps = float(saved.get(_STEPS, float(saved.get(f"{PREFIX}step/bias", 0)) / self._updates))
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})

    def _begin(self) -> None:
        self.weight.zero_()
        self.bias.zero_()


class CriticModel(ValueHead):
    """A critic that is a model of its own: the head on it, and all of its weights, are trained by the value loss alone."""

    def __init__(self, directory: Path, algo: AlgoConfig, train: TrainConfig, device: torch.device) -> None:
        """Raises ConfigError for a model whose hidden states are not to be had."""
        trunk, self._directory = load_model(directory, device), directory
        way = choose_forward(trunk, may_carry=not train.gradient_checkpointing)
        if not way.chunked_head:
            raise ConfigError(
                f"algo.critic.model = {directory}: {type(trunk).__name__} shows its logits only, and values are read from the last hidden states; use "
                "another model, or none"
            )
        super().__init__(trunk.get_output_embeddings().weight.shape[1], algo, device, train.updates)
        trunk.set_output_embeddings(torch.nn.Identity())  # nothing reads logits
        if train.gradient_checkpointing:
            enable_checkpointing(trunk)
        self.trunk, self._way = trunk.requires_grad_(), way
        self.optimizer.add_param_group(
            {"params": list(trunk.parameters()), "lr": algo.recipe.critic.model_learning_rate}
        )

    def scored(self, policy: Forward, pack: Pack, temperature: float, dtype: torch.dtype) -> TokenScores:
        return policy.logprobs(pack, temperature, dtype)._replace(value=self.values(pack))

    @property
    def shares(self) -> bool:
        return self._way.shares

    def values(self, pack: Pack) -> Float[Tensor, " M"]:
        """[M] what the tokens before each loss token are worth, with gradient."""
        hidden = self._way.hidden(pack)
        places, which = torch.unique(pack.predictor, return_inverse=True)  # sums of gradients have an order then (C8)
        return self._read(hidden.index_select(0, places).float())[which]

    def bounded(self, max_norm: float) -> bool:
        norm = torch.nn.utils.clip_grad_norm_(self.trunk.parameters(), max_norm)
        return bool(norm.isfinite())

    def update(self) -> None:
        super().update()
        torch.autograd.graph.increment_version(list(self.parameters()))  # the fused step forgets to

    def _begin(self) -> None:
        super()._begin()
        if self._steps:
            first = dict(load_model(self._directory, self.weight.device).named_parameters())
            for name, parameter in self.trunk.named_parameters():
                parameter.copy_(first[name])


def _described(kept: Mapping[str, Any]) -> str:
    count = sum(name.startswith(f"{PREFIX}{MODEL}.") for name in kept)
    return f"is a model of its own, of {count} tensors" if count else "is a head on the policy"


def _columns(pack: Pack, value: Float[Tensor, " M"], minibatch: int) -> Float[Tensor, "5 M"]:
    """Numbers of trajectories and turns are whole numbers, below 2^24. The rewards stand where others have advantages."""
    given = (value.detach(), pack.advantage, pack.trajectory, pack.turn, torch.full_like(value.detach(), minibatch))
    return torch.stack([column.to(value.dtype) for column in given])
