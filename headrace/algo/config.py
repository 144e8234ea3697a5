"""The algorithm's settings: the name of a recipe, and values that replace its own. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator
from dataclasses import KW_ONLY, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field, field_validator, model_validator
from pydantic.dataclasses import dataclass

from headrace.algo.advantages import ADVANTAGES, ATTEMPTS, PER_TURN
from headrace.algo.policy.loss import Loss, settings_of
from headrace.algo.policy.user import UserLoss, UserPairLoss
from headrace.algo.recipe_parts import (
    Aggregation,
    Correction,
    CorrectionConfig,
    Credit,
    CriticConfig,
    DemonstratedConfig,
    Denominator,
    DistillConfig,
    EntropyConfig,
    ExperienceConfig,
    KLConfig,
    LagWeightConfig,
    Old,
    ProcessConfig,
    SelectConfig,
    SubsetConfig,
)
from headrace.algo.recipes import LOSSES, NOT_HERE, RECIPES, Recipe
from headrace.algo.rules import RULES
from headrace.settings.strict import STRICT

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    P = TypeVar("P", bound=DataclassInstance)


@dataclass(frozen=True, config=STRICT)
@settings_of(LOSSES.values(), before="correction")
class AlgoConfig:
    """A recipe, and settings that replace its values: those without a default here have the recipe's. Every constant of
    a loss is one."""

    name: str = "grpo"
    """A recipe of [algorithms.md](algorithms.md), whose values hold for settings that are not given."""
    _: KW_ONLY
    advantage: str | None = None
    """The advantage from a group's rewards: a name, or `file.py:name` of a function GroupRewards -> one number per
    rollout."""
    loss: str | None = None
    """The policy loss per token: a name, or `file.py:name` of a function Tokens -> Tensor [M], or, with an advantage
    that makes pairs, (chosen, rejected) -> Tensor [K]. Another loss than the recipe's comes with its own constants."""
    aggregation: Aggregation | None = None
    """How the losses of the step's tokens become one number."""
    denominator: Denominator = "all"
    """Whether tokens that a rule takes out (correction, `veto`, `kpop`, `opsm`, `lag`, `select`) count in the
    denominator. `all`: yes. `kept`: as if they had not been sampled."""
    old: Old | None = None
    """The log-probs that ratios are taken against: the `sampler`'s; the `trainer`'s own before the update (in a step's
    first update the current ones, at no cost); `loglinear`: between both, by the lag."""
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    lag: LagWeightConfig = Field(default_factory=LagWeightConfig)
    select: SelectConfig = Field(default_factory=SelectConfig)
    subset: SubsetConfig = Field(default_factory=SubsetConfig)
    experience: ExperienceConfig = Field(default_factory=ExperienceConfig)
    kl: KLConfig = Field(default_factory=KLConfig)
    distill: DistillConfig = Field(default_factory=DistillConfig)
    entropy: EntropyConfig = Field(default_factory=EntropyConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    process: ProcessConfig = Field(default_factory=ProcessConfig)
    demonstrations: DemonstratedConfig = Field(default_factory=DemonstratedConfig)
    length_constant: int = Field(default=0, ge=0)
    """The number of tokens that `token_sum` divides by; 0: the longest completion (rollout.max_tokens)."""
    length_penalty: float = Field(default=0.0, ge=0)
    """The share of its group's mean reward, if above 0, that a rollout of full length (rollout.max_tokens ×
    environment.max_turns) loses; shorter ones in proportion."""
    credit: Credit | None = None
    """The tokens that share an advantage, compared with their like in the group's other rollouts. rollout: all. turn:
    those of a turn, by its rewards and all later ones. agent: those of an agent, by the rewards of its turns and the
    end's. segment: those of a step of a process reward (`reward.services.segments`), by `form`. state: those of a turn,
    by its rollout's advantage and, times `state_weight`, its return among the group's turns that began in the same
    state (GiGPO, arXiv 2505.10978): [named](environments.md#states), or an equal observation."""
    state_weight: float | None = Field(default=None, gt=0)
    """credit = state: the weight of comparisons within a state; 1 if not given."""
    gamma: float | None = Field(default=None, gt=0, le=1)
    """The discount of rewards: per turn (credit = turn or state), or per sampled token (advantage = return_to_go or
    gae)."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """λ of the returns (GAE, arXiv 1506.02438). credit = turn: below 1, what follows counts in part by the mean return
    of the group's next turns, which varies less. advantage = gae: over tokens, with the critic's values; 1 is the
    rollout's own return."""
    attempts: int | None = Field(default=None, ge=1)
    """advantage = best_of_k: k, the attempts of which the best counts, below rollout.group_size; 4 if not given."""
    overlong: Literal["train", "mask"] = "train"
    """Whether completions cut off at max_tokens are trained, or leave the loss and its denominator."""

    @field_validator("name")
    @classmethod
    def _known_recipe(cls, name: str) -> str:
        if why := NOT_HERE.get(name.lower().replace("-", "_").replace("nashmd", "nash_md")):
            raise ValueError(f"algo.name = {name} is not here: it {why}")
        return _known("algo.name", name, tuple(RECIPES))

    @field_validator("advantage", "loss")
    @classmethod
    def _known_function(cls, name: str | None, info: Any) -> str | None:
        if name is None or is_user_function(name):
            return name
        known = tuple(ADVANTAGES) if info.field_name == "advantage" else tuple(LOSSES)
        return _known(f"algo.{info.field_name}", name, known, "path/to/file.py:name")

    @model_validator(mode="after")
    def _pairs(self) -> AlgoConfig:
        if problem := next(_problems(self, self.recipe), None):
            raise ValueError(problem)
        return self

    @property
    def recipe(self) -> Recipe:
        """The row of the table with the settings given here."""
        row = RECIPES[self.name]
        if self.credit not in (None, row.credit):  # a discount of the recipe is one of its turns
            row = replace(row, gamma=1.0)
        given = {name: getattr(self, name) for name in ("advantage", "aggregation", "old", "credit", "gamma")}
        nested = {name: _with(getattr(row, name), getattr(self, name)) for name in _NESTED}
        nested["correction"] = _corrected(row.correction, self.correction)
        if nested["kl"].place == "reward" and self.kl.estimator is None:
            nested["kl"] = replace(nested["kl"], estimator="k1")
        replaced = {name: value for name, value in given.items() if value is not None}
        return replace(row, loss=self._loss(row.loss, self.advantage or row.advantage), **nested, **replaced)

    def _loss(self, of_recipe: Loss, advantage: str) -> Loss:
        """Returns the named loss with the constants that were given."""
        if self.loss is not None and is_user_function(self.loss):
            paired = advantage in ADVANTAGES and ADVANTAGES[advantage].pairs
            return UserPairLoss(self.loss) if paired else UserLoss(self.loss)
        loss = of_recipe if self.loss in (None, of_recipe.name) else LOSSES[self.loss]()
        return replace(loss, **{name: value for name, value in self.constants.items() if name in loss.reads()})

    @property
    def constants(self) -> dict[str, float]:
        """The constants of losses that were given."""
        return {name: value for name in _CONSTANTS if (value := getattr(self, name)) is not None}

    @property
    def compares(self) -> bool:
        """Whether the rollouts of a group are compared, so that nothing is learned from a group without contrast."""
        advantage = ADVANTAGES.get(self.recipe.advantage)
        return advantage is not None and advantage.compares and self.recipe.distill.kind == "none"

    @property
    def min_rollouts(self) -> int:
        """The least number of rollouts from which a group gets an advantage."""
        return 2 if self.compares or self.trains_rewards else 1

    @property
    def has_critic(self) -> bool:
        """Whether the trainer has a value function."""
        advantage = ADVANTAGES.get(self.recipe.advantage)
        return advantage is not None and advantage.critic

    @property
    def trains_rewards(self) -> bool:
        """Whether the trainer has a reward model that it trains."""
        advantage = ADVANTAGES.get(self.recipe.advantage)
        return advantage is not None and advantage.implicit

    @property
    def given_answers(self) -> str:
        """The loss of demonstrations, or none."""
        return self.recipe.demonstrations.kind

    @property
    def of_whole_rollouts(self) -> bool:
        """Whether the algorithm knows a rollout as one weight, as one reward, or as one chain of tokens, and no branches."""
        advantage, loss = ADVANTAGES.get(self.recipe.advantage), self.recipe.loss
        chained = advantage is not None and (
            advantage.spread or advantage.critic or advantage.implicit or advantage.remembers
        )
        return chained or loss.weighs_rollouts or loss.whole or self.given_answers == "compared"

    @property
    def remembers(self) -> bool:
        """Whether the advantage uses the rewards of a prompt in earlier groups."""
        advantage = ADVANTAGES.get(self.recipe.advantage)
        return advantage is not None and advantage.remembers

    @property
    def reference_in_loss(self) -> bool:
        """Whether the trainer needs the reference model."""
        recipe = self.recipe
        return recipe.loss.needs_reference or (recipe.kl.coef > 0 and recipe.kl.place == "loss")

    @property
    def reference_in_reward(self) -> bool:
        """Whether `Scored.references` are needed."""
        return self.recipe.kl.coef > 0 and self.recipe.kl.place == "reward"

    @property
    def teacher_top(self) -> int:
        """Number of the most probable tokens that are asked of a served teacher; 0 if the sampled one is enough, or the trainer holds the teacher."""
        distill = self.recipe.distill
        return 0 if distill.model else distill.top

    @property
    def teaches_alone(self) -> bool:
        """Whether the divergence from a teacher is all that the loss has a gradient by."""
        recipe = self.recipe
        silent = recipe.advantage == "zero" and recipe.loss.name == "reinforce" and not self.reference_in_loss
        return silent and recipe.distill.compares

    def with_length(self, max_tokens: int) -> AlgoConfig:
        """Returns the settings with `length_constant` filled in; called where rollout and algorithm are joined."""
        wanted = self.recipe.aggregation == "token_sum" and not self.length_constant
        return replace(self, length_constant=max_tokens) if wanted else self


_NESTED = ("lag", "select", "subset", "experience", "kl", "distill", "entropy", "critic", "process", "demonstrations")
_OF_A_LOSS = {loss.selection: loss.name for loss in LOSSES.values() if loss.selection}
"""Selection -> the loss that it belongs to."""
_CONSTANTS = tuple(dict.fromkeys(name for loss in LOSSES.values() for name in loss.reads()))


def is_user_function(name: str) -> bool:
    """Whether a name is of the form `file.py:name`."""
    path, colon, function = name.rpartition(":")
    return bool(colon) and path.endswith(".py") and function.isidentifier()


def _known(setting: str, name: str, known: tuple[str, ...], other: str = "") -> str:
    if name in known:
        return name
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}" + (f", or {other}" if other else "")
    raise ValueError(f"{setting} = {name} does not exist; {hint}")


def _with(part: P, settings: Any) -> P:
    return replace(part, **_given(settings))


def _corrected(part: Correction, settings: CorrectionConfig) -> Correction:
    """The recipe's correction with the values and thresholds given here; a threshold of 0 removes its rule."""
    given, thresholds = _given(settings), {rule.name: rule.threshold for rule in part.rules}
    thresholds |= {name: given.pop(name) for name in RULES if name in given}
    rules = tuple(rule(thresholds[name]) for name, rule in RULES.items() if thresholds.get(name))
    return replace(part, **given, rules=rules)


def _given(settings: Any) -> dict[str, Any]:
    return {f.name: value for f in fields(settings) if (value := getattr(settings, f.name)) is not None}


# --- pairs that cannot work, each with its remedy --------------------------------------------------------------------


def _problems(config: AlgoConfig, recipe: Recipe) -> Iterator[str]:
    yield from _constants(config, recipe)
    yield from _lengths(config, recipe)
    yield from _corrections(config, recipe)
    yield from _selections(config, recipe)
    yield from _subsets(config, recipe)
    yield from _divergences(config, recipe)
    yield from _credits(config, recipe)
    yield from _critics(config, recipe)
    yield from _process_rewards(config, recipe)
    yield from _given_answers(config, recipe)
    yield from _memories(config, recipe)
    yield from _experiences(config, recipe)
    yield from _preferences(config, recipe)


def _given_answers(config: AlgoConfig, recipe: Recipe) -> Iterator[str]:
    given = _given(config.demonstrations)
    if recipe.demonstrations.kind == "none" and given.keys() - {"kind"}:
        yield "algo.demonstrations needs a kind (sft, phi, shaped or compared); set it, or remove the settings of algo.demonstrations"
    if "gamma" in given and recipe.demonstrations.kind not in ("shaped", "compared"):
        yield "algo.demonstrations.gamma needs algo.demonstrations.kind = shaped or compared; set it, or remove algo.demonstrations.gamma"
    for name in {"reward", "imitation"} & given.keys() if recipe.demonstrations.kind != "compared" else ():
        yield f"algo.demonstrations.{name} needs algo.demonstrations.kind = compared; set it, or remove algo.demonstrations.{name}"
    if recipe.demonstrations.kind == "compared":
        yield from _compared_answers(config, recipe)
        return
    if ("last_weight" in given) != ("decay_steps" in given):
        yield "algo.demonstrations.last_weight and decay_steps belong together; set both, or remove them"


def _compared_answers(config: AlgoConfig, recipe: Recipe) -> Iterator[str]:
    """Yields what does not go together with given answers that belong to the group of their question."""
    says = "algo.demonstrations.kind = compared"
    if shares := [
        name
        for name in ("weight", "last_weight", "warmup_steps", "decay_steps")
        if name in _given(config.demonstrations)
    ]:
        yield f"algo.demonstrations.{shares[0]} is of the share of given answers, which with {says} is theirs of the tokens of a step; remove it"
    if recipe.advantage not in ("centred", "group_norm"):
        yield (
            f"{says} compares given answers with rollouts by one reward for each, and algo.advantage = {recipe.advantage} does not; set it to centred or "
            "group_norm"
        )
    if recipe.aggregation != "token_mean" or config.denominator != "all":
        yield f"{says} is a mean over the tokens of rollouts and given answers; set algo.aggregation = token_mean and algo.denominator = all"
    if recipe.credit != "rollout" or recipe.subset.kind != "none" or config.length_penalty:
        yield f"{says} compares whole rollouts, all of a group, by their rewards alone; remove algo.credit, algo.subset and algo.length_penalty"


def _credits(config: AlgoConfig, recipe: Recipe) -> Iterator[str]:
    if config.attempts and recipe.advantage != "best_of_k":
        yield (
            f"algo.attempts is k of algo.advantage = best_of_k, and algo.advantage = {recipe.advantage} has none; use algo.name = pass@k_training, or "
            "remove it"
        )
    if config.state_weight and recipe.credit != "state":
        yield (
            f'algo.state_weight weighs turns in equal states, and algo.credit = {recipe.credit} compares none; set algo.credit = "state", or remove it'
        )
    if config.name == "gigpo" and recipe.credit != "state":
        yield (
            f"algo.name = gigpo compares turns that began in one state, and algo.credit = {recipe.credit} compares none; remove algo.credit, or use "
            'algo.name = "dr_grpo"'
        )
    spread = recipe.advantage in ADVANTAGES and ADVANTAGES[recipe.advantage].spread
    if recipe.gamma < 1 and recipe.credit not in ("turn", "state") and not (spread or config.has_critic):
        yield (
            f"algo.gamma = {recipe.gamma:g} discounts rewards over turns or tokens, and algo.credit = {recipe.credit} with algo.advantage = "
            f'{recipe.advantage} has neither; set algo.credit = "turn", or algo.name = "reinforce++" or "ppo", or remove algo.gamma'
        )
    if config.lam < 1 and recipe.credit != "turn" and not config.has_critic:
        yield (
            f"algo.lam = {config.lam:g} needs values of what follows: a critic's, or the mean returns of turns; set algo.name = "
            '"ppo" or algo.credit = "turn", or remove algo.lam'
        )
    if recipe.credit == "rollout":
        return
    if config.has_critic:
        yield (
            f'algo.credit = "{recipe.credit}" compares {recipe.credit}s, and a critic (algo.advantage = gae) gives every token its own credit; '
            'remove algo.credit, or use algo.name = "grpo"'
        )
        return
    if recipe.advantage not in PER_TURN:
        yield (
            f'algo.credit = "{recipe.credit}" compares {recipe.credit}s, and algo.advantage = {recipe.advantage} whole rollouts; use one of '
            f"{', '.join(PER_TURN)}"
        )
    if recipe.loss.weighs_rollouts:
        yield f'algo.loss = {recipe.loss} weighs whole rollouts; set algo.credit = "rollout"'
    if config.length_penalty:
        yield 'algo.length_penalty compares whole rollouts; set algo.credit = "rollout", or algo.length_penalty = 0'


def _critics(config: AlgoConfig, recipe: Recipe) -> Iterator[str]:
    given = _given(config.critic)
    if not config.has_critic:
        if given:
            yield (
                f"algo.critic.{next(iter(given))} is about a value function, which algo.advantage = {recipe.advantage} has none of; use "
                'algo.name = "ppo" or "vapo", or remove it'
            )
        return
    if recipe.loss.weighs_rollouts:
        yield f"algo.loss = {recipe.loss} weighs whole rollouts, and a critic single tokens; remove algo.loss"
    if recipe.critic.length_rate and config.lam < 1:
        yield (
            f"algo.lam = {config.lam:g} is fixed, and algo.critic.length_rate = {recipe.critic.length_rate:g} makes λ from each length; remove "
            "algo.lam, or set algo.critic.length_rate = 0"
        )
    if recipe.critic.imitation and config.reference_in_reward:
        yield (
            f"algo.critic.imitation = {recipe.critic.imitation:g} imitates rollouts whose rewards sum to more than 0, and with algo.kl.place = reward "
            'those are less a divergence, of either sign; set algo.kl.place = "loss", or algo.critic.imitation = 0'
        )


def _process_rewards(config: AlgoConfig, recipe: Recipe) -> Iterator[str]:
    if not config.trains_rewards:
        if given := _given(config.process):
            yield (
                f"algo.process.{next(iter(given))} is about a reward model that is trained, which algo.advantage = {recipe.advantage} has none of; use "
                'algo.name = "prime", or remove it'
            )
        return
    others = {
        "experience": recipe.experience.rollouts > 0,
        "length_penalty": config.length_penalty > 0,
        'kl.place = "reward"': config.reference_in_reward,
        "demonstrations": recipe.demonstrations.kind == "compared",
        f"loss = {recipe.loss}": recipe.loss.weighs_rollouts or recipe.loss.whole or bool(recipe.loss.pairs),
    }
    for name in (name for name, given in others.items() if given):
        yield (
            f"algo.{name} does not go with algo.advantage = implicit, which rewards single tokens and asks of each whole rollout of today whether it is right; "
            'remove it, or use algo.name = "rloo"'
        )


def _memories(config: AlgoConfig, recipe: Recipe) -> Iterator[str]:
    if not config.remembers:
        return
    others = {
        "length_penalty": (config.length_penalty > 0, "0"),
        "kl.place": (config.reference_in_reward, '"loss"'),
        "subset.kind": (recipe.subset.kind != "none", '"none"'),
    }
    for name in (name for name, (given, _) in others.items() if given):
        yield (
            f"algo.advantage = {recipe.advantage} standardises over all rewards that a prompt had, and algo.{name} compares others; set algo.{name} = "
            f'{others[name][1]}, or algo.advantage = "group_norm"'
        )


def _experiences(config: AlgoConfig, recipe: Recipe) -> Iterator[str]:
    if not recipe.experience.rollouts:
        if _given(config.experience).keys() - {"rollouts"}:
            yield (
                "algo.experience keeps rollouts if algo.experience.rollouts is above 0 (2 is a beginning); set it, or remove the other settings of "
                "algo.experience"
            )
        return
    says = "algo.experience compares good rollouts of earlier groups with the rollouts of a new one"
    others = {
        f"algo.advantage = {recipe.advantage} is not a function of their rewards": recipe.advantage
        in ("gae", "smoothed", "zero"),
        f"algo.loss = {recipe.loss} is one of whole rollouts, without a ratio": recipe.loss.whole
        or recipe.loss.weighs_rollouts,
        f"algo.subset.kind = {recipe.subset.kind} trains a part of them": recipe.subset.kind != "none",
        "algo.demonstrations.kind = compared does so with given answers": recipe.demonstrations.kind == "compared",
    }
    for why in (why for why, given in others.items() if given):
        yield f"{says}, and {why}; remove algo.experience, or use algo.name = grpo without that setting"


def _preferences(config: AlgoConfig, recipe: Recipe) -> Iterator[str]:
    advantage = ADVANTAGES.get(recipe.advantage)
    paired = advantage is not None and advantage.pairs is not None
    named = " or ".join(name for name, rule in ADVANTAGES.items() if rule.pairs)
    if not recipe.loss.pairs:
        if paired or recipe.aggregation == "pair_mean":
            setting = f"advantage = {recipe.advantage}" if paired else "aggregation = pair_mean"
            yield (
                f"algo.{setting} is about pairs of rollouts, and algo.loss = {recipe.loss} about tokens; use algo.name = dpo or "
                "another of preferences, or remove it"
            )
    elif not paired or recipe.aggregation != "pair_mean":
        yield (
            f"algo.loss = {recipe.loss} compares pairs of rollouts: it needs algo.advantage = {named} and algo.aggregation = pair_mean; use "
            f"algo.name = {recipe.loss if recipe.loss.name in LOSSES else 'dpo'}, and remove what replaces them"
        )
    if not recipe.loss.whole:
        return
    if not recipe.loss.pairs and recipe.aggregation != "seq_mean_token_sum":
        yield (
            f"algo.loss = {recipe.loss} is a mean over rollouts, whose losses lie on their tokens: it needs algo.aggregation = seq_mean_token_sum; use "
            f"algo.name = {recipe.loss}, and remove what replaces it"
        )
    if advantage is not None and (advantage.spread or advantage.critic):
        yield (
            f"algo.advantage = {recipe.advantage} gives every token its own, and algo.loss = {recipe.loss} asks whether a whole rollout is right; use "
            f"algo.name = {recipe.loss}, and remove algo.advantage"
        )
    idle = {
        "kl.coef": recipe.kl.coef > 0,
        "distill": recipe.distill.kind != "none",
        "correction": recipe.correction != Correction(),
        "lag": recipe.lag.kind != "constant",
        "select": recipe.select.kind != "none",
        "entropy": recipe.entropy.on,
        "credit": recipe.credit != "rollout",
    }
    for name in (name for name, given in idle.items() if given):
        yield (
            f"algo.{name} weighs single tokens or turns, and algo.loss = {recipe.loss} is a function of whole rollouts, which pair_beta holds "
            "near the reference or apart; remove it"
        )


def _constants(config: AlgoConfig, recipe: Recipe) -> Iterator[str]:
    loss, given = recipe.loss, [f"algo.{name}" for name in config.constants]
    unread = [name for name in given if name.removeprefix("algo.") not in loss.reads()]
    if unread:
        yield f"{' and '.join(unread)} {_have(unread)} no meaning with algo.loss = {loss}; remove {_them(unread)}"
    yield from loss.problems()
    if not loss.anchored and recipe.old != "sampler":
        yield f"algo.old = {recipe.old} does not reach algo.loss = {loss}, which gets the tokens alone; remove algo.old"


def ratio_problems(config: AlgoConfig, updates: int) -> Iterator[str]:
    """Yields a sentence for each setting that no ratio will reach, because each is 1 in the first update of a step and there are no more. `updates`: of a
    step."""
    recipe, given = config.recipe, [f"algo.{name}" for name in config.constants]
    if recipe.old != "trainer" or updates > 1:
        return
    if given:
        yield (
            f"{' and '.join(given)} {_have(given)} no effect with algo.old = trainer, where every ratio is 1 in the first update of a step; "
            f"remove {_them(given)}, use algo.old = sampler, or set train.epochs or train.minibatches"
        )
    if recipe.loss.needs_gap:
        yield (
            f"algo.loss = {recipe.loss} holds the policy near the sampler's by the ratio between them, which is 1 with "
            "algo.old = trainer; use algo.old = sampler"
        )


def _lengths(config: AlgoConfig, recipe: Recipe) -> Iterator[str]:
    if config.denominator == "kept" and not _rejects(recipe):
        yield (
            f"algo.denominator = kept has no meaning with algo.name = {config.name}, in which no rule takes anything out; remove it, or set "
            f"algo.correction.mode = {_either(['mask', *RULES])}, algo.lag.kind = trim, or algo.select"
        )
    if config.length_constant and recipe.aggregation != "token_sum":
        yield f"algo.length_constant has no meaning with algo.aggregation = {recipe.aggregation}; use token_sum, or remove it"


def _rejects(recipe: Recipe) -> bool:
    chosen = recipe.lag.kind == "trim" or recipe.select.rejects or recipe.loss.rejects
    correction = recipe.correction
    return chosen or correction.mode == "mask" or bool(correction.rules)


def _corrections(config: AlgoConfig, recipe: Recipe) -> Iterator[str]:
    correction, lag = recipe.correction, recipe.lag
    if correction.mode != "none" and recipe.old == "sampler" and recipe.loss.anchored:
        yield (
            f"algo.correction.mode = {correction.mode} with algo.old = sampler would count the gap between sampler and "
            "trainer twice, because the loss's own ratio holds it already; use algo.old = trainer, or remove the correction"
        )
    if correction.mode == "none" and {"level", "low", "high"} & _given(config.correction).keys():
        yield "algo.correction.level, low and high need algo.correction.mode = truncate or mask; set it, or remove them"
    if correction.low >= correction.high:
        yield f"algo.correction.low = {correction.low} is not below high = {correction.high}; lower the first or raise the second"
    for name, kind in (("decay", "exponential"), ("maximum", "trim")):
        if name in _given(config.lag) and lag.kind != kind:
            yield f"algo.lag.{name} needs algo.lag.kind = {kind}; set it, or remove algo.lag.{name}"
    if lag.kind == "trim" and "maximum" not in _given(config.lag):
        yield "algo.lag.kind = trim needs algo.lag.maximum, in optimizer steps below staleness.max_lag; set it"


def _subsets(config: AlgoConfig, recipe: Recipe) -> Iterator[str]:
    subset = recipe.subset
    if subset.by and subset.kind != "cleanest":
        yield "algo.subset.by needs algo.subset.kind = cleanest; set it, or remove algo.subset.by"
    if subset.kind == "none":
        if subset.keep:
            yield "algo.subset.keep needs algo.subset.kind = max_variance, shortest, efficient or cleanest; set it, or remove algo.subset.keep"
        return
    if recipe.credit != "rollout":
        yield f'algo.subset.kind = {subset.kind} chooses whole rollouts; set algo.credit = "rollout", or algo.subset.kind = "none"'
    if recipe.loss.pairs:
        yield f'algo.loss = {recipe.loss} chooses its own pairs of rollouts; set algo.subset.kind = "none", or another loss'
    if 0 < subset.keep < config.min_rollouts:
        yield (
            f"algo.subset.keep = {subset.keep} leaves algo.advantage = {recipe.advantage} nothing to compare a rollout with; "
            f"raise it to {config.min_rollouts} or more"
        )


def group_problems(
    config: AlgoConfig, group_size: int, forks: bool, rewards: Collection[str] = (), turns: int = 0
) -> Iterator[str]:
    """Yields a sentence for each reason why groups of so many rollouts cannot be compared. `forks`: whether rollouts branch; `rewards`: the names of
    all rewards, `turns`: the most of a rollout, if they are known."""
    if config.recipe.credit == "state" and turns == 1:
        yield (
            'algo.credit = "state" compares the later turns of a group, and a rollout has one turn here, which begins where all begin; set '
            'environment.function (or another environment of several turns), or algo.name = "grpo"'
        )
    if group_size < config.min_rollouts:
        yield (
            f"rollout.group_size = {group_size} gives {config.name} nothing to compare a rollout with, "
            "so every advantage would be zero; use at least 2 (8 is usual), or algo.name = reinforce"
        )
    subset = config.recipe.subset
    compared, attempts = subset.size(group_size), config.attempts or ATTEMPTS
    if config.recipe.advantage == "best_of_k" and compared <= attempts:
        yield (
            f"algo.attempts = {attempts} takes the best of as many of the {compared} rollouts that are compared (rollout.group_size), and all sets "
            "would be one; raise rollout.group_size (4 times as many is usual), or lower algo.attempts"
        )
    if subset.kind == "none":
        return
    if subset.by and rewards and subset.by not in rewards:
        yield (
            f"algo.subset.by = {subset.by} is the name of no reward; there are {', '.join(rewards)}. Use one of them, or remove algo.subset.by"
        )
    if subset.size(group_size) < config.min_rollouts or subset.keep >= group_size:
        yield (
            f"algo.subset trains {subset.keep or 'half'} of the {group_size} rollouts of a group (rollout.group_size): with "
            f"{config.min_rollouts} to {group_size - 1} it means something. Set algo.subset.keep, or raise rollout.group_size"
        )
    if forks:
        yield (
            f"algo.subset.kind = {subset.kind} chooses whole rollouts, and rollout.forks compares their branches; "
            'set rollout.forks.alternatives = 0, or algo.subset.kind = "none"'
        )


def step_problems(config: AlgoConfig, steps: int, minutes: float, updates: int) -> Iterator[str]:
    """Yields a sentence if a run of `steps`, or of fewer if it has a limit in minutes, would end before the policy is trained, and for what needs several
    `updates` of a step."""
    yield from ratio_problems(config, updates)
    alone = config.recipe.critic.alone_steps
    if not config.has_critic or not alone:
        return
    if steps <= alone:
        yield (
            f"algo.critic.alone_steps = {alone} trains the critic alone in all of train.steps = {steps}, and the policy in none; raise "
            "train.steps, or lower algo.critic.alone_steps"
        )
    elif minutes:
        yield (
            f"train.minutes = {minutes:g} may lower train.steps below the {alone} steps in which the critic is trained alone "
            "(algo.critic.alone_steps); set one of the two to 0"
        )


def _selections(config: AlgoConfig, recipe: Recipe) -> Iterator[str]:
    select, given = recipe.select, _given(config.select)
    if "tau" in given and select.kind != "second_moment":
        yield "algo.select.tau needs algo.select.kind = second_moment; set it, or remove algo.select.tau"
    if "fraction" in given and select.kind not in ("clip_cov", "kl_cov", "entropy"):
        yield "algo.select.fraction needs algo.select.kind = clip_cov, kl_cov or entropy; set it, or remove algo.select.fraction"
    if "change" in _given(config.entropy) and not recipe.entropy.target:
        yield "algo.entropy.change needs algo.entropy.target, in nats; set it, or remove algo.entropy.change"
    if recipe.loss.selection != (select.kind if select.kind in _OF_A_LOSS else ""):
        needed = recipe.loss.selection or select.kind
        yield f"algo.loss = {_OF_A_LOSS[needed]} and algo.select.kind = {needed} belong together; set both, or use algo.name = {_OF_A_LOSS[needed]}"
    if select.kind in ("clip_cov", "kl_cov") and recipe.distill.kind == "sampled":
        yield (
            f"algo.select.kind = {select.kind} chooses by the advantage, which algo.distill.kind = sampled only makes in "
            "the loss; remove one of them"
        )


def _divergences(config: AlgoConfig, recipe: Recipe) -> Iterator[str]:
    kl, distill, given = recipe.kl, recipe.distill, _given(config.distill)
    yield from kl.problems(_given(config.kl).keys())
    if distill.kind == "none" and given.keys() - {"kind"}:
        yield "algo.distill needs algo.distill.kind; set it, use algo.name = opd, or remove the settings of algo.distill"
    if "k" in given and not distill.top:
        whole = f", over = {distill.over}" if distill.compares else ""
        yield (
            f"algo.distill.k has no meaning with algo.distill.kind = {distill.kind}{whole}; use forward, reverse or jsd over the teacher's or the "
            "student's most probable tokens, or remove it"
        )
    if not distill.compares and (unread := {"over", "temperature"} & given.keys()):
        yield (
            f"algo.distill.{min(unread)} is of distributions that are compared, and algo.distill.kind = {distill.kind} compares none; use forward, "
            "reverse or jsd, or remove it"
        )
    if "beta" in given and distill.kind != "jsd":
        yield "algo.distill.beta needs algo.distill.kind = jsd; set it, or remove algo.distill.beta"
    for name, given_here in (
        ("algo.kl.place = reward", kl.coef > 0 and kl.place == "reward"),
        ("algo.length_penalty", config.length_penalty > 0),
    ):
        if given_here and recipe.advantage in ADVANTAGES and not ADVANTAGES[recipe.advantage].reads_sum:
            yield (
                f"{name} changes the sum of the rewards, which algo.advantage = {recipe.advantage} does not look at; "
                "remove it, or use another advantage"
            )
    if recipe.advantage == "zero" and distill.compares:
        about_policy = {
            **dict.fromkeys(config.constants, True),
            "correction": recipe.correction != Correction(),
            "lag": recipe.lag.kind != "constant",
            "select": recipe.select.kind != "none",
        }
        if idle := [name for name, given_here in about_policy.items() if given_here]:
            yield (
                f"algo.{idle[0]} is about the policy loss, which algo.advantage = zero makes nothing of; the divergence to the teacher's "
                f"distribution needs no importance weight: remove it, or use algo.distill.kind = sampled"
            )
    if recipe.loss.weighs_rollouts and distill.kind != "none":
        yield (
            f"algo.loss = {recipe.loss} leaves out what has no reward, and a teacher's word on it; remove algo.distill, or use "
            "algo.loss = reinforce"
        )
    if recipe.advantage == "zero" and distill.kind == "none":
        yield "algo.advantage = zero without algo.distill would teach nothing; set algo.distill.kind, or another advantage"


def _either(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _have(names: list[str]) -> str:
    return "has" if len(names) == 1 else "have"


def _them(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"
