"""Pairs of settings that cannot work together, or not as one might expect, of what a run learns: its algorithm, prompts, lengths, rewards, teachers, and
a quantised policy.

Each function is given the sections that it compares. Pairs within one section lie beside that section.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from headrace.algo.config import AlgoConfig
from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.engine.kinds import ENGINES
from headrace.episodes.environments.config import EnvironmentConfig
from headrace.episodes.rollout import RolloutConfig
from headrace.episodes.scoring.config import RewardConfig
from headrace.episodes.scoring.teacher.config import TeacherConfig
from headrace.loop.curriculum_config import CurriculumConfig
from headrace.loop.staleness import StalenessConfig
from headrace.models.lora import LoraConfig
from headrace.native.resources import available_cores
from headrace.settings.process_config import WatchConfig
from headrace.settings.toml import build, merge
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


def beside_problems(algo: AlgoConfig, pipeline: int, images: bool) -> Iterator[str]:
    """Yields a sentence for each model that the trainer holds beside the policy and that cannot read the prompts, or not where the policy does. `pipeline`:
    the trainer's stages; `images`: whether prompts have some."""
    if algo.has_critic and algo.recipe.critic.model and images:
        yield (
            f"algo.critic.model = {algo.recipe.critic.model} is trained beside the policy, and images are tokens of the policy's model alone; remove "
            "algo.critic.model, without which the critic is a head on the policy"
        )
    if algo.recipe.distill.model and images:
        yield (
            f"algo.distill.model = {algo.recipe.distill.model} reads what the policy is trained on, and images are tokens of the policy's model alone; use "
            "[[teachers]], whose engines read the prompt's images"
        )
    if algo.recipe.distill.model and pipeline > 1:
        yield (
            f"train.parallel.pipeline = {pipeline} leaves the last hidden states to one stage, and a teacher that the trainer holds "
            "(algo.distill.model) is compared with them on every rank; set train.parallel.shard instead, or use [[teachers]]"
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


def teacher_engine(engine: EngineConfig, teacher: TeacherConfig) -> EngineConfig:
    """Returns the run's engine settings with the teacher's own on top. Raises ConfigError naming the teacher."""
    base = {**dataclasses.asdict(engine.for_worker), "path": "auto", "max_adapters": 0, "routing": False}
    try:
        return build(EngineConfig, merge(base, teacher.engine))
    except ConfigError as error:
        lines = [f"the teacher {teacher.name}, engine.{line}" for line in str(error).splitlines()]
        raise ConfigError("\n".join(lines)) from None


def teacher_engine_problems(
    teachers: Sequence[TeacherConfig], beside: EngineConfig, context_length: int, functions: frozenset[str]
) -> Iterator[str]:
    """Yields a sentence for each setting of a teacher's engine, or name, that the run excludes. `beside`: what an engine beside the run's own begins
    with; `context_length`: of the run's engine; `functions`: names of the reward functions."""
    for teacher in teachers:
        try:
            engine = teacher_engine(beside, teacher)
        except ConfigError as error:
            yield str(error)
            continue
        if teacher.mode == "tokens" and engine.context_length < context_length:
            yield (
                f"the teacher {teacher.name} has engine.context_length = {engine.context_length}, too short for all that the run's "
                f"engine.context_length = {context_length} lets the policy write; leave it as the run's"
            )
        if teacher.mode == "text" and teacher.name in functions:
            yield f"the teacher {teacher.name} has the name of a reward function; give it another"
        if strange := set(engine.cores) - available_cores():
            yield f"the teacher {teacher.name} has engine.cores {sorted(strange)}, which this process may not use"


# --- A policy whose weights are quantised in the engine (`engine.weights`): what corrects for it in training, and what it excludes
# The log-probs that are recorded are those of the quantised policy, which sampled. So whatever weighs tokens by their ratio to the sampler's log-probs
# corrects for quantisation as it does for lag, and no further weight is needed.

_WEIGHTS = {"truncate": "truncated importance sampling (TIS)", "mask": "masked importance sampling (MIS)"}


def correction_of(algo: AlgoConfig) -> str:
    """Returns what corrects for the gap between sampler and trainer, in words; empty if nothing does."""
    recipe = algo.recipe
    correction, loss = recipe.correction, recipe.loss
    if correction.mode != "none":
        return (
            f"{_WEIGHTS[correction.mode]} by {correction.level}, weights of {correction.low:g} to {correction.high:g}"
        )
    if recipe.old == "sampler" and loss.weighs:
        return f"the ratio in algo.loss = {loss}, which is taken to the sampler's own log-probs"
    return ""


def quantised_problems(engine: EngineConfig, algo: AlgoConfig, train: TrainConfig, watch: WatchConfig) -> Iterator[str]:
    """Yields a sentence for each setting that a quantised policy excludes. (`engine_problems` has those of the engine itself.)"""
    if engine.weights == "published":
        return
    asked = f'engine.weights = "{engine.weights}"'
    if train.parity == "bitwise":
        yield (
            f'{asked} samples from another policy than the trainer\'s, and train.parity = "bitwise" asks for the same one, bit for bit; set '
            'train.parity = "off", or engine.weights = "published"'
        )
    if not watch.identity_every:
        yield (
            f"{asked} is measured against the policy that is trained at every version, and watch.identity_every = 0 switches that off; set it to 1, "
            'or engine.weights = "published"'
        )
    if not correction_of(algo) and algo.correction.mode is None:
        anchored = algo.recipe.loss.anchored and algo.recipe.old != "sampler"
        remedy = (
            'set algo.correction.mode = "truncate" (TIS) or "mask" (MIS)'
            if anchored
            else "use algo.name = grpo, tis or mis"
        )
        yield (
            f"{asked} samples from another policy than the one that is trained, and algo.name = {algo.name} with algo.old = {algo.recipe.old} and "
            f'algo.loss = {algo.recipe.loss} weighs no token for that; {remedy}, or algo.correction.mode = "none" to train without a correction'
        )


def quantised_words(engine: EngineConfig, algo: AlgoConfig, watch: WatchConfig) -> str:
    """Returns what the run makes of a quantised policy, in a sentence; empty if the policy is served as it is published."""
    if engine.weights == "published":
        return ""
    corrected = correction_of(algo) or "nothing, as algo.correction.mode = none asks"
    return (
        f"the sampler has {engine.weights} weights (engine.weights); {corrected} corrects for it; every version is measured, and the run ends where "
        f"log-probs differ by more than {watch.mismatch:g} nats a token (watch.mismatch)"
    )


# --- Warnings about algorithms that work, but not as one might expect -------------------------------------------------


LONG = 512
"""Number of tokens above which a product over a sequence deserves a warning (NeMo-RL #2269)."""


def caveats(algo: AlgoConfig, max_tokens: int, max_lag: int = 0) -> list[str]:
    """Returns warnings about an algorithm in a run with completions of `max_tokens` and the lag bound `max_lag`."""
    return [*_of_lag(algo, max_lag), *_of_length(algo, max_tokens)]


def trusts_a_region(algo: AlgoConfig) -> bool:
    """Whether a bound on the ratio to the sampler, or a correction, keeps the policy near the one that sampled. A
    user's own loss is assumed to. (The ratio to the trainer's own log-probs bounds what one step does.)"""
    recipe, correction = algo.recipe, algo.recipe.correction
    if recipe.loss.whole:  # which rollouts are better does not depend on who sampled them
        return True
    bounds = recipe.loss.holds and recipe.old != "trainer"  # where every ratio is 1
    corrects = correction.mode != "none" or bool(correction.rules)
    return bounds or corrects or recipe.select.kind == "second_moment"


def _of_lag(algo: AlgoConfig, max_lag: int) -> list[str]:
    if max_lag == 0 or trusts_a_region(algo):
        return []
    why = ", where every ratio is 1" if algo.recipe.old == "trainer" else ""
    return [
        f"staleness.max_lag = {max_lag} with algo.loss = {algo.recipe.loss}, algo.old = {algo.recipe.old}{why}: neither a clip nor a "
        "correction holds the policy near the older one that sampled. In one published comparison plain policy gradients at age <= 1 "
        "finished 2 of 128 answers, with truncated importance sampling 98; use algo.name = tis (or algo.correction.mode = truncate), "
        "a loss with a clip (algo.name = grpo), or staleness.max_lag = 0"
    ]


def _of_length(algo: AlgoConfig, max_tokens: int) -> list[str]:
    correction = algo.recipe.correction
    if max_tokens <= LONG or correction.mode == "none" or correction.level != "sequence":
        return []
    return [
        f"algo.correction.level = sequence multiplies the ratios of up to {max_tokens} tokens: such a product is nearly "
        f"always outside [{correction.low}, {correction.high}] and most sequences will teach nothing; "
        "algo.correction.level = geometric does not depend on the length"
    ]
