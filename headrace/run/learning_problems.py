"""Pairs of settings that cannot work together, of what a run learns: its algorithm, prompts, lengths and rewards.

Each function is given the sections that it compares. Pairs within one section lie beside that section.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.algo.config import AlgoConfig
from headrace.engine.config import EngineConfig
from headrace.engine.kinds import ENGINES
from headrace.episodes.environments.config import EnvironmentConfig
from headrace.episodes.rollout import RolloutConfig
from headrace.episodes.scoring.config import RewardConfig
from headrace.loop.curriculum_config import CurriculumConfig
from headrace.loop.staleness import StalenessConfig
from headrace.models.lora import LoraConfig
from headrace.trainer.config import TrainConfig


def curriculum_problems(
    own: CurriculumConfig, algo: AlgoConfig, environment: EnvironmentConfig, group_size: int
) -> Iterator[str]:
    """Yields a sentence for each setting that the choice of prompts excludes."""
    if own.chooses and not (algo.compares or algo.recipe.loss.weighs_rollouts):  # it learns from equal rewards too
        yield (
            f'curriculum.kind = "{own.kind}" chooses prompts whose groups have contrast, but algo.name = {algo.name} learns from groups '
            'without it as well; set curriculum.kind = "uniform", or use an algorithm that compares rollouts, such as grpo'
        )
    if own.largest_group and own.largest_group < 2 * group_size:
        yield (
            f"curriculum.largest_group = {own.largest_group} lets no group grow, because groups of rollout.group_size = {group_size} grow by "
            "doubling; raise the first, or lower the second"
        )
    if own.largest_group and environment.draws_problems:
        yield (
            f"curriculum.largest_group = {own.largest_group} changes the size of groups, and environments of Atropos post groups of one size; "
            "set it to 0"
        )


def process_problems(algo: AlgoConfig, lora: LoraConfig, train: TrainConfig) -> Iterator[str]:
    """Yields a sentence for each setting that a reward model which is trained beside the policy excludes."""
    if not algo.trains_rewards:
        return
    named = f"algo.name = {algo.name} trains a second adapter of the policy's base"
    if not lora.rank:
        yield f'{named}, beside the policy\'s own; set lora.rank (16 is usual), or use algo.name = "rloo"'
    if train.parallel.ranks > 1:
        yield f'{named}, on one rank; remove train.parallel, or use algo.name = "rloo"'
    if train.parity == "bitwise":
        yield f'{named}, and train.parity = "bitwise" is proven for steps of the policy alone; set train.parity = "off"'


def critic_problems(algo: AlgoConfig, images: bool) -> Iterator[str]:
    """Yields a sentence if a critic has a model of its own that cannot read the prompts. `images`: whether they have some."""
    if algo.has_critic and algo.recipe.critic.model and images:
        yield (
            f"algo.critic.model = {algo.recipe.critic.model} is trained beside the policy, and images are tokens of the policy's model alone; remove "
            "algo.critic.model, without which the critic is a head on the policy"
        )


def length_problems(
    rollout: RolloutConfig, reward: RewardConfig, algo: AlgoConfig, context_length: int
) -> Iterator[str]:
    """Yields a sentence for each setting that the length of a rollout excludes. `context_length`: of the engine."""
    if rollout.max_tokens >= context_length:
        yield (
            f"rollout.max_tokens = {rollout.max_tokens} leaves no room for a prompt in engine.context_length = "
            f"{context_length}; lower the first or raise the second"
        )
    cache = reward.soft_overlong_punishment.cache
    if cache > rollout.max_tokens:
        yield (
            f"reward.soft_overlong_punishment.cache = {cache} begins before the first of rollout.max_tokens = {rollout.max_tokens}; "
            "lower it (a fifth of max_tokens is usual), or raise max_tokens"
        )
    if cache and algo.recipe.advantage == "zero":
        yield (
            "reward.soft_overlong_punishment changes the reward, which algo.advantage = zero does not look at; remove it, or use another "
            "advantage"
        )


def learning_problems(
    algo: AlgoConfig, rollout: RolloutConfig, reward: RewardConfig, lora: LoraConfig, staleness: StalenessConfig
) -> Iterator[str]:
    """Yields a sentence for each setting of which the algorithm has nothing to learn."""
    if rollout.temperature == 0:
        yield (
            "rollout.temperature = 0 samples the same completion for every rollout of a group, so there is nothing to "
            "learn from; use 1.0 for training (eval.temperature = 0 measures greedy answers)"
        )
    if lora.quantise and lora.merged and algo.reference_in_reward:
        yield (
            f"algo.kl.place = reward asks an engine for the reference's log-probs, and with lora.publish = {lora.publish} that is the "
            f"model before lora.quantise = {lora.quantise}, not the one that training began with; use algo.kl.place = loss, or "
            'lora.publish = "adapter"'
        )
    if lora.rank and algo.recipe.kl.every:
        yield (
            f"algo.kl.every = {algo.recipe.kl.every} moves the reference, and an adapter's is its base, which stays; remove it, or train all weights "
            "(lora.rank = 0)"
        )
    if algo.recipe.credit == "segment" and not reward.segmented:
        yield (
            'algo.credit = "segment" needs scores of steps, and nothing gives any; set segments (the text that ends a step) of one of '
            'reward.functions or reward.services, or algo.credit = "rollout"'
        )
    if algo.recipe.loss.whole and staleness.overdue == "trim":
        yield (
            f'staleness.overdue = "trim" takes tokens out of rollouts, and algo.loss = {algo.recipe.loss} compares whole ones; use "wait" '
            'or "drop"'
        )


def parity_problems(
    train: TrainConfig, engine: EngineConfig, rollout: RolloutConfig, lora: LoraConfig
) -> Iterator[str]:
    """Yields the settings that train.parity = "bitwise" excludes. The other conditions are checked when trainer and engine have loaded
    the model."""
    if train.parity == "off":
        return
    asks = 'train.parity = "bitwise" asks engine and trainer for the same log-probs, bit for bit, which is proven'
    proven = [f'engine.kind = "{kind}"' for kind, core in ENGINES.items() if core.repeated]
    if f'engine.kind = "{engine.kind}"' not in proven:
        yield f'{asks} for {" and ".join(proven)} only; use it, or set train.parity = "off"'
    for name, path in (("engine.path", engine.path), ("train.path", train.path)):
        if path not in ("auto", "kernels"):
            yield f'{asks} for the C++ kernels, and {name} = "{path}" does without; set it to "kernels"'
    for name, device in (("engine.device", engine.device), ("train.device", train.device)):
        if device == "cuda":
            yield f'{asks} on a CPU, and {name} = "cuda"; set it to "cpu"'
    if "auto" not in (engine.dtype, train.dtype) and engine.dtype != train.dtype:
        yield f"{asks} where both compute in one dtype, and engine.dtype = {engine.dtype}, train.dtype = {train.dtype}; make them equal"
    if train.weights != "float32":
        yield f'{asks} for train.weights = "float32" only; use it'
    if lora.merged:
        yield (
            f"{asks} for adapters that the engine serves beside the weights, where one that is merged into them is rounded with them; "
            'set lora.publish = "adapter", and lora.dora = false'
        )
    if lora.quantise:
        yield f"{asks} for frozen weights in train.dtype; remove lora.quantise"
    if lora.experts:
        yield f"{asks} for adapters of other layers than experts; set lora.experts = false"
    if rollout.truncates and not rollout.keep_mask:
        yield f"{asks} where the trainer knows which tokens top_p, top_k and min_p kept; set rollout.keep_mask = true"
