"""A set of parameters that is trained as one, with its optimizer, loss and version: all weights of the model, or one adapter of several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from headrace.algo.config import AlgoConfig
from headrace.algo.objective import (
    AGGREGATIONS,
    AggregationFunction,
    EntropyFactor,
    KLFactor,
    Objective,
    objective_of,
    reach_of,
)
from headrace.algo.policy.loss import Reach
from headrace.core.errors import ConfigError
from headrace.models.lora import LoraConfig
from headrace.trainer.config import TrainConfig, learning_rate
from headrace.trainer.placement.port import Placement
from headrace.trainer.step.value_head import ValueHead

# --- One update with a clipped gradient.


def apply(
    optimizer: torch.optim.Optimizer, placement: Placement, *, lr: float, max_norm: float, unless_zero: bool = False
) -> float:
    """Makes one update with the gradient scaled down to `max_norm`. Returns the norm before that.

    A norm that is not finite updates nothing, and neither does one of 0 under `unless_zero`. The gradients are cleared in either case.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = placement.norm(parameters)
    if torch.isfinite(norm) and not (unless_zero and norm == 0):
        if norm > max_norm:
            placement.clip(parameters, norm, max_norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        torch.autograd.graph.increment_version(parameters)  # the fused step forgets to, and packed copies go by it
    optimizer.zero_grad(set_to_none=True)
    return float(norm)


# --- learner ------------------------------------------------------------


@dataclass(frozen=True)
class Assignment:
    """The settings that one set of parameters is trained with."""

    train: TrainConfig
    algo: AlgoConfig
    lora: LoraConfig = LoraConfig()


class Update(NamedTuple):
    norm: float
    """The norm of the gradient before clipping."""
    made: bool


@dataclass(kw_only=True)
class Learner:
    """Raises ConfigError when the settings cannot work."""

    config: TrainConfig
    algo: AlgoConfig
    parameters: Mapping[str, torch.nn.Parameter]
    """The trained parameters by name, in canonical order."""
    placement: Placement
    critic: ValueHead | None = None
    version: int = 0
    optimizer: torch.optim.Optimizer = field(init=False)
    objective: Objective = field(init=False)
    reach: Reach = field(init=False)
    """The tokens that the loss of a token depends on."""
    entropy: EntropyFactor = field(init=False)
    kl: KLFactor = field(init=False)

    def __post_init__(self) -> None:
        if self.algo.recipe.aggregation == "token_sum" and not self.algo.length_constant:
            raise ConfigError(
                f"algo.name = {self.algo.name} divides by the longest completion there can be: set algo.length_constant, "
                "usually to rollout.max_tokens"
            )
        self.optimizer = self.placement.optimizer(self.parameters.items(), self.config)
        self.entropy, self.kl = EntropyFactor(self.algo.recipe.entropy), KLFactor(self.algo.recipe.kl)
        self.objective, self.reach = objective_of(self.algo, self.kl), reach_of(self.algo)

    @property
    def aggregation(self) -> AggregationFunction:
        return AGGREGATIONS[self.algo.recipe.aggregation]

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that a step has gradients of: the critic's too."""
        return [*self.parameters.values(), *(self.critic.parameters() if self.critic else [])]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer, *(self.critic.optimizers if self.critic else [])]

    @property
    def trains_critic_alone(self) -> bool:
        """Whether the next step leaves the parameters as they are."""
        return self.critic is not None and self.critic.alone

    def lr(self, steps: int = 0) -> float:
        """The learning rate of the next step, in a run of `steps` (0: of `train.steps`)."""
        return learning_rate(self.version, self.config, steps)

    def forget(self) -> None:
        """The gradients so far."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.critic:
            self.critic.forget()

    def update(self, step: int, loss: float, lr: float, unless_zero: bool = False) -> Update:
        """Updates the parameters unless loss or gradient is not finite.

        `step`: the step that the update belongs to, which is done with the first of its updates. `lr`: the learning rate. `unless_zero`: a
        gradient of zero updates nothing either (momentum and decay alone would move the weights).
        """
        finite = self.critic is None or self.critic.bounded(self.config.max_grad_norm)
        if not (finite and torch.isfinite(torch.tensor(loss))):
            self.forget()
            return Update(float("nan"), False)
        if self.trains_critic_alone:
            self.optimizer.zero_grad(set_to_none=True)
            norm, unless_zero = float(self.placement.norm(self.trained)), False
        else:
            norm = apply(
                self.optimizer,
                self.placement,
                lr=lr,
                max_norm=self.config.max_grad_norm,
                unless_zero=unless_zero,
            )
        made = norm < float("inf") and not (unless_zero and norm == 0)
        if made:
            self.version = step + 1
            if self.critic:
                self.critic.update()
        self.forget()
        return Update(norm, made)
