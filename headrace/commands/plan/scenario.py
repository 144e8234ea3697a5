"""The input of a simulation: settings of a run, the speeds of its parts, the lengths of its completions."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.algo.config import AlgoConfig
from headrace.commands.plan.rates.rates import Rates
from headrace.episodes.rollout import RolloutConfig
from headrace.loop.partial import PartialConfig
from headrace.loop.staleness import StalenessConfig
from headrace.loop.world.surroundings import Distribution, TurnShape, fixed

COARSENESS = 16
"""Simulated tokens of a mean completion at most: enough to see in which part of it weights were swapped."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One simulation."""

    rates: Rates
    completions: Distribution
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    partial: PartialConfig = field(default_factory=PartialConfig)
    steps: int = 20
    epochs: int = 1
    """Number of times that a step trains its groups."""
    minibatches: int = 1
    given: float = 0.0
    """Tokens of demonstrations, and of good earlier rollouts, that a step trains beside its groups."""
    replicas: int = 1
    """Engines, each with `rates.engine`."""
    prompts: Distribution = fixed(100)
    latency: Distribution = fixed(0)
    """Seconds that the reward of one rollout takes."""
    workers: int = 1
    """Number of rollouts that are scored at once."""
    contrast: float = 1.0
    """Share of groups whose rewards differ."""
    solved: float | None = None
    """If set, replaces `contrast`: the mean reward of rollouts that are right or wrong, depending on the prompt's difficulty."""
    recompute: bool = False
    """Whether KV caches are computed again after a swap."""
    identity_every: int = 0
    """Versions between two probes of C3."""
    seed: int = 0
    shape: TurnShape = TurnShape()
    """The turns of a rollout; `completions` are then those of one turn."""
    grain: int = 0
    """Real tokens that one simulated token stands for; 0 chooses it. The lag is resolved to multiples of it."""

    @property
    def mean_completion(self) -> float:
        """Mean tokens of a completion, cut off at max_tokens."""
        return self.completions.mean_below(self.rollout.max_tokens)

    @property
    def looks_ahead(self) -> bool:
        """Whether old log-probs or a critic's values are those before a step of several updates (`Gradient.minibatches`)."""
        return self.algo.recipe.old != "sampler" or self.algo.has_critic

    @property
    def token_grain(self) -> int:
        return self.grain or max(1, int(self.mean_completion / COARSENESS))

    @property
    def gpus(self) -> int:
        return self.replicas * self.rates.engine.gpus + self.rates.trainer.gpus
