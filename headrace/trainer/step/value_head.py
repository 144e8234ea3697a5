"""The critic of a learner: a linear value head beside the policy, or on a model of its own, its optimizer, and its part in a step.

V = (w · h/|h|) / √H + b for the hidden state h [H] that predicts a token: the head's input has a norm that depends on no model, so that one learning
rate serves all of them. It starts at 0 everywhere. The critic is no part of the policy: what is published and exported has no trace of it.
Every rank holds the head whole; a model of its own lies on the ranks as the policy does (`placement/port.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from headrace.trainer.forward.forward import Forward, Lesson, TokenScores
from headrace.trainer.model.causal_lm import enable_checkpointing, load_model
from headrace.trainer.model.low_memory import MixedAdamW
from headrace.trainer.model.outline import cut
from headrace.trainer.packing import Pack
from headrace.trainer.placement.port import Placement, chosen_forward
from headrace.trainer.step.checkpoint_files import SavedTensors

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
        """The head's."""
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

    def scored(
        self, policy: Forward, pack: Pack, temperature: float, dtype: torch.dtype, *, lesson: Lesson | None = None
    ) -> TokenScores:
        """The scores of a microbatch under the policy, with this critic's values."""
        return policy.logprobs(pack, temperature, dtype, self, lesson=lesson)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer]

    @property
    def shares(self) -> bool:
        """Whether the critic can read rows that share tokens, as far as the policy can."""
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
        for optimizer in self.optimizers:
            optimizer.step()
        self._steps += 1 / self._updates
        self.forget()

    def forget(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint, where they lie: of those that are split, this rank's part."""
        found = {f"{PREFIX}{name}": parameter.detach() for name, parameter in self.named_parameters()}
        found[_STEPS] = torch.tensor(self._steps, dtype=torch.float64)
        moments = {parameter: kept for optimizer in self.optimizers for parameter, kept in optimizer.state.items()}
        for name, parameter in self.named_parameters():
            found |= {f"{PREFIX}{key}/{name}": tensor for key, tensor in moments.get(parameter, {}).items()}
        return found

    def read(self, saved: SavedTensors, directory: str, placement: Placement) -> dict[str, Tensor]:
        """Returns what `restore` takes of a checkpoint's tensors: this rank's part of them. Raises CheckpointError if a critic of other sizes was saved, or
        one with a model of its own in the place of one without, or the reverse."""
        self._check(saved, directory)
        split = dict(self.named_parameters())
        split |= {f"{key}/{name}": parameter for name, parameter in split.items() for key in _MOMENTS[:2]}
        found = {}
        for name in (name for name in saved if name.startswith(PREFIX)):
            like = split.get(name.removeprefix(PREFIX))
            read = partial(saved.read, name)
            found[name] = read() if like is None else placement.part(read, like=like.detach())
        return found

    def _check(self, saved: SavedTensors, directory: str) -> None:
        found = saved.shapes.get(f"{PREFIX}weight", self.weight.shape)
        if found != self.weight.shape:
            raise CheckpointError(
                f"checkpoint {directory}: its critic has {found[0]} weights instead of {len(self.weight)}; it belongs to another model: resume "
                "with the model it was written for"
            )
        own = {f"{PREFIX}{name}": parameter.shape for name, parameter in self.named_parameters()}
        kept = {
            name: shape for name, shape in saved.shapes.items() if name in own or name.startswith(f"{PREFIX}{MODEL}.")
        }
        if kept and kept != own:
            raise CheckpointError(
                f"checkpoint {directory}: its critic {_described(kept)}, and this one {_described(own)}; resume with the algo.critic.model it was "
                "written with"
            )

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Restores what `read` returned; without a critic in the checkpoint it begins anew."""
        if f"{PREFIX}weight" not in saved:
            self._begin()
        names = {parameter: name for name, parameter in self.named_parameters()}
        for parameter, name in names.items():
            if f"{PREFIX}{name}" in saved:
                parameter.copy_(saved[f"{PREFIX}{name}"])
        self._steps = float(saved.get(_STEPS, float(saved.get(f"{PREFIX}step/bias", 0)) / self._updates))
        for optimizer in self.optimizers:
            if isinstance(optimizer, MixedAdamW):
                optimizer.take_masters()
            ordered = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
            state = {
                number: {key: saved[f"{PREFIX}{key}/{name}"] for key in _MOMENTS}
                for number, name in enumerate(ordered)
                if f"{PREFIX}step/{name}" in saved
            }
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})

    def _begin(self) -> None:
        self.weight.zero_()
        self.bias.zero_()


class CriticModel(ValueHead):
    """A critic that is a model of its own: the head on it, and all of its weights, are trained by the value loss alone."""

    def __init__(
        self, directory: Path, algo: AlgoConfig, train: TrainConfig, device: torch.device, *, placement: Placement
    ) -> None:
        """Raises ConfigError for a model whose hidden states are not to be had, or that cannot lie on the ranks as the policy does."""
        try:
            way, width = _placed(directory, train, device, placement)
        except ConfigError as error:
            raise ConfigError(f"algo.critic.model = {directory}: {error}") from error
        super().__init__(width, algo, device, train.updates)
        self.trunk, self._way, self._directory, self._placement = way.model, way, directory, placement
        rate = algo.recipe.critic.model_learning_rate
        settings = replace(train, learning_rate=rate, weight_decay=0.0, beta1=0.9, beta2=0.999)  # the head's decays
        self._model_optimizer = placement.optimizer(self.trunk.named_parameters(), settings)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer, self._model_optimizer]

    def scored(
        self, policy: Forward, pack: Pack, temperature: float, dtype: torch.dtype, *, lesson: Lesson | None = None
    ) -> TokenScores:
        scores = policy.logprobs(pack, temperature, dtype, lesson=lesson)
        return scores._replace(value=self._way.values(pack, lambda hidden: self._read(hidden.float())))

    @property
    def shares(self) -> bool:
        return self._way.shares

    def bounded(self, max_norm: float) -> bool:
        parameters = list(self.trunk.parameters())
        norm = self._placement.norm(parameters)
        if norm > max_norm:
            self._placement.clip(parameters, norm, max_norm)
        return bool(norm.isfinite())

    def update(self) -> None:
        super().update()
        torch.autograd.graph.increment_version(list(self.parameters()))  # the fused step forgets to

    def _begin(self) -> None:
        super()._begin()
        if self._steps:
            first = dict(load_model(self._directory, torch.device("cpu")).named_parameters())
            for name, parameter in self.trunk.named_parameters():
                parameter.copy_(self._placement.part(partial(cut, first[name].detach()), like=parameter.detach()))


def _placed(directory: Path, train: TrainConfig, device: torch.device, placement: Placement) -> tuple[Forward, int]:
    """Returns the model as it lies on this rank, without a head of its own, and the width of its hidden states."""
    trunk = placement.load(directory, device, values=False)
    way = chosen_forward(placement, trunk, checkpointed=train.gradient_checkpointing)
    if not way.chunked_head:
        raise ConfigError(
            f"{type(trunk).__name__} shows its logits only, and values are read from the last hidden states; use another model, or none"
        )
    head = trunk.get_output_embeddings().weight
    if head is not trunk.get_input_embeddings().weight:  # nothing reads logits
        trunk.set_output_embeddings(torch.nn.Identity())
    if train.gradient_checkpointing:
        enable_checkpointing(trunk)
    placement.spread(trunk.requires_grad_())
    return way, head.shape[1]


def _described(kept: Mapping[str, Any]) -> str:
    count = sum(name.startswith(f"{PREFIX}{MODEL}.") for name in kept)
    return f"is a model of its own, of {count} tensors" if count else "is a head on the policy"


def _columns(pack: Pack, value: Float[Tensor, " M"], minibatch: int) -> Float[Tensor, "5 M"]:
    """Numbers of trajectories and turns are whole numbers, below 2^24. The rewards stand where others have advantages."""
    given = (value.detach(), pack.advantage, pack.trajectory, pack.turn, torch.full_like(value.detach(), minibatch))
    return torch.stack([column.to(value.dtype) for column in given])
