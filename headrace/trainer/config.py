"""Settings of the trainer, and the learning rate that they say for each step. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from headrace.facts.texts import plural, sparkline
from headrace.models.lora import LoraConfig
from headrace.settings.strict import STRICT
from headrace.trainer.parallel import ParallelConfig

# --- Settings of the trainer. Imports no torch.


ON_CPU = 2048
"""Tokens of a microbatch on a CPU."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainConfig:
    steps: int = Field(default=100, gt=0)
    """Optimizer steps; with `minutes`, the most there can be."""
    minutes: float = Field(default=0.0, ge=0)
    """Minutes to the last checkpoint; `steps`, `staleness.groups_per_step` and `eval.prompts` are then upper limits
    (docs/auto.md). 0: no limit."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """The peak learning rate. For all weights: 1e-6 for billions of parameters, up to 1e-5 for 100 million."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after the warm-up: constant, or falling to zero at `steps`, along a cosine or a line."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the learning rate rises linearly; at most all before the last."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled decay, of matrices only."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay of the mean gradient."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's decay of the mean squared gradient."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """An update's gradient is scaled down to this norm."""
    epochs: int = Field(default=1, gt=0)
    """Times that a step trains each of its groups, as in PPO: updates of one version and one learning rate
    (docs/staleness.md)."""
    minibatches: int = Field(default=1, gt=0)
    """Parts of a step, each with its own update and denominators; divides `staleness.groups_per_step`. A step makes
    `epochs` × `minibatches` updates."""
    microbatch_tokens: Literal["auto"] | Annotated[int, Field(gt=0)] = "auto"
    """Tokens that a rank forwards at once: bounds memory, never changes the gradient. auto: 2048 on a CPU and in ranks elsewhere; on a GPU here as
    many as fit (docs/auto.md)."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of the computation (autocast). auto: the one measured to be faster here (`headrace doctor` prints it)."""
    path: Literal["auto", "kernels", "torch"] = "auto"
    """kernels: headrace's C++ kernels, on a CPU; torch: PyTorch; auto: kernels if they support the model, unless
    PyTorch was measured to be faster."""
    compile: Literal["auto"] | bool = "auto"
    """Compile decoder layers and the head's sums with torch.compile, which takes minutes. auto: on a GPU, without tensor parallelism. Not in a
    pipeline. A model that cannot be compiled exactly is trained without. On a CPU it replaces the C++ kernels."""
    parity: Literal["off", "bitwise"] = "off"
    """bitwise: the sampler's log-probs must equal the trainer's bit for bit, or the run stops (docs/parity.md)."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the trained weights and their gradients. bfloat16: rounded stochastically after every update; 12 bytes
    a parameter, with the optimizer's state, instead of 16."""
    offload_optimizer: bool = False
    """Keep the optimizer's state and float32 weights in the host's memory, and update there: 8 bytes a parameter less
    on the device."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory for about a third more time."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is a GPU, else cpu."""
    cores: tuple[int, ...] = ()
    """CPU cores of the trainer, all its ranks together; empty: all, shared."""
    threads: int = Field(default=0, ge=0)
    """Threads of all ranks together (of each, where ranks are elsewhere). 0: as many as `cores`, or as measured to be
    fastest."""
    max_skipped_steps: int = Field(default=3, gt=0)
    """Steps skipped in a row (non-finite gradient) after which the run stops."""
    max_deaths: int = Field(default=3, ge=0)
    """Times that the trainer or a rank may die or hang within an hour's progress; the run goes on from its last checkpoint and journal."""
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    """Several ranks that train one model. One rank, the default, starts no further process."""

    @property
    def updates(self) -> int:
        """Updates of a step."""
        return self.epochs * self.minibatches

    @property
    def microbatch(self) -> int:
        """The tokens of a microbatch as a number: a CPU's where nobody has chosen."""
        return ON_CPU if self.microbatch_tokens == "auto" else self.microbatch_tokens

    @model_validator(mode="after")
    def _compile_fits(self) -> TrainConfig:
        if self.compile is not True:
            return self
        if self.path == "kernels":
            raise ValueError(
                'train.compile = true compiles the layers that train.path = "kernels" gives to C++ kernels; remove one of the two'
            )
        if self.parity == "bitwise":
            raise ValueError(
                'train.compile = true, and train.parity = "bitwise" is not proven for layers that are compiled; remove one of the two'
            )
        return self

    @model_validator(mode="after")
    def _weights_fit(self) -> TrainConfig:
        if self.weights == "bfloat16" and self.dtype == "float32":
            raise ValueError(
                "train.weights = bfloat16 with train.dtype = float32 would compute more exactly than it remembers; set "
                "train.dtype = bfloat16, or train.weights = float32"
            )
        return self


def train_problems(train: TrainConfig, lora: LoraConfig, groups: int, itself: bool, critic: bool) -> Iterator[str]:
    """Yields the settings that exclude each other, each with its remedy. `groups`: those of a step. `itself`: whether a teacher is the student's older
    self. `critic`: whether the algorithm has one."""
    yield from _update_problems(train, groups)
    yield from _parallel_problems(train, lora, itself=itself, critic=critic)


def _update_problems(train: TrainConfig, groups: int) -> Iterator[str]:
    """Yields a sentence if a step of so many groups cannot make its updates."""
    if groups % train.minibatches:
        fitting = ", ".join(str(number) for number in range(1, groups + 1) if groups % number == 0)
        yield (
            f"train.minibatches = {train.minibatches} does not divide staleness.groups_per_step = {groups}, and minibatches have equally many groups; "
            f"use one of {fitting}, or change groups_per_step"
        )
    if train.minibatches > 1 and train.parity == "bitwise":
        yield (
            f'train.parity = "bitwise" compares every token with the weights that sampled it, and train.minibatches = {train.minibatches} trains most of '
            "them after these have changed; remove one of the two (train.epochs goes with it)"
        )


def _parallel_problems(train: TrainConfig, lora: LoraConfig, *, itself: bool, critic: bool) -> Iterator[str]:
    """Yields the settings that several ranks exclude."""
    parallel, ranks = train.parallel, train.parallel.ranks
    if parallel.gathering == 1:
        for name in ("reshard", "gather", "reduce", *(["expert", "schedule"] if ranks == 1 else [])):
            if getattr(parallel, name) != getattr(ParallelConfig(), name):
                who = "one rank" if ranks == 1 else "weights that are never gathered"
                yield f"train.parallel.{name} has no meaning for {who}; set train.parallel.shard, or remove it"
    if ranks == 1:
        return
    yield from _mesh_problems(parallel)
    asks = f"train.parallel asks for {ranks} ranks"
    yield from _pipeline_problems(train)
    if parallel.pipeline > 1 and critic:
        yield (
            f"train.parallel.pipeline = {parallel.pipeline} leaves the last hidden states to one stage, and a critic (algo.name = ppo, vapo) reads them, or "
            "those of its own model, on every rank; set train.parallel.shard instead, or use an algorithm without a critic"
        )
    if train.parity == "bitwise":
        yield f'{asks}, and train.parity = "bitwise" is proven for one device only; set train.parity = "off"'
    if train.compile is True and (reason := uncompiled(parallel)):
        yield f"train.compile = true, and {reason}; remove train.compile"
    if train.path == "kernels":
        yield f'{asks}, and train.path = "kernels" reads whole weights, of which each rank holds a part; use "auto" or "torch"'
    if train.offload_optimizer:
        yield (
            f"{asks}, which split the optimizer's state, and train.offload_optimizer = true keeps all of it in one place; remove it, and "
            "raise train.parallel.shard for less memory"
        )
    if parallel.gather == "bfloat16" and train.dtype == "float32":
        yield (
            'train.parallel.gather = "bfloat16" with train.dtype = "float32" would round weights that are computed with; set train.dtype = '
            '"bfloat16", or remove train.parallel.gather'
        )
    if parallel.gather == "bfloat16" and lora.rank:
        yield (
            "train.parallel.gather has no meaning where an adapter is trained: the frozen weights are gathered in train.dtype anyway; remove it"
        )
    if lora.quantise:
        yield f"{asks}, and the packed weights of lora.quantise are not split over ranks; remove one of the two"
    if lora.experts:
        yield f"{asks}, and adapters of experts (lora.experts) wrap weights that are split; set lora.experts = false"
    if itself:
        yield f"{asks}, and a teacher that is the student's older self is kept by one rank; train on one rank, or give the teacher a model"
    if 0 < len(train.cores) < ranks:
        yield f"{asks}, and train.cores has {len(train.cores)}; give each rank at least one core, or leave train.cores empty"


def uncompiled(parallel: ParallelConfig, asked: bool = True) -> str:
    """Empty if layers are compiled in these ranks; else the reason why not, a whole clause. `asked`: train.compile = true."""
    if parallel.pipeline > 1:
        return f"the stages of train.parallel.pipeline = {parallel.pipeline} call layers in an order of their own"
    if parallel.tensor > 1 and not asked:
        return f"those of train.parallel.tensor = {parallel.tensor} are with train.compile = true, and not by themselves, because a trial that fails there may end the start"
    return ""


def _pipeline_problems(train: TrainConfig) -> Iterator[str]:
    """Yields the settings that do not go together with a pipeline."""
    parallel = train.parallel
    if parallel.pipeline == 1:
        if parallel.schedule != ParallelConfig().schedule:
            yield "train.parallel.schedule orders the microbatches of a pipeline; set train.parallel.pipeline, or remove it"
        return
    asks = f"train.parallel.pipeline = {parallel.pipeline}"
    if parallel.reduce != ParallelConfig().reduce:
        yield f"{asks} sums gradients in the order of its schedule; remove train.parallel.reduce"
    for name in ("expert", "context", "tensor"):
        if (size := getattr(parallel, name)) > 1:
            yield (
                f"{asks} is not combined with train.parallel.{name} = {size}; remove one of the two (train.parallel.replicate gives "
                "several pipelines, and train.parallel.shard splits their stages)"
            )
    if parallel.schedule == "zero_bubble" and parallel.shard > 1:
        yield (
            'train.parallel.schedule = "zero_bubble" computes gradients of weights after the pass in which train.parallel.shard sums and splits them; '
            'use "1f1b" or "interleaved"'
        )
    if parallel.schedule == "zero_bubble" and train.gradient_checkpointing:
        yield (
            'train.parallel.schedule = "zero_bubble" goes through a layer backwards twice, and train.gradient_checkpointing keeps '
            'nothing for the second time; use "1f1b" or "interleaved"'
        )


def _mesh_problems(parallel: ParallelConfig) -> Iterator[str]:
    """Yields sizes that do not go together."""
    if parallel.gathering == parallel.pipeline == 1 and parallel.replicate > 1:
        held = "the whole model" if parallel.tensor == 1 else "its whole part of each layer"
        yield (
            f"train.parallel.replicate = {parallel.replicate} alone would keep {held} on every rank; set train.parallel.shard = "
            f"{parallel.replicate} instead, which computes the same with less memory"
        )
    if parallel.expert not in (1, parallel.split):
        among = " × ".join(["shard", *(name for name in ("context", "tensor") if getattr(parallel, name) > 1)])
        yield (
            f"train.parallel.expert = {parallel.expert} would leave copies of experts among train.parallel.{among} = {parallel.split} ranks; set it "
            f"to {parallel.split}, or remove it"
        )
    if parallel.expert > 1 and parallel.replicate > 1:
        yield (
            f"train.parallel.expert = {parallel.expert} is not combined with train.parallel.replicate = {parallel.replicate}; set shard to "
            f"{parallel.shard * parallel.replicate} and expert to {parallel.ranks} and remove replicate, or remove expert"
        )
    if parallel.tensor == 1:
        return
    asks = f"train.parallel.tensor = {parallel.tensor}"
    if parallel.context > 1:
        yield (
            f"{asks} is not combined with train.parallel.context = {parallel.context}: both split the heads of attention; set one of them to "
            f"{parallel.tensor * parallel.context} and remove the other"
        )


# --- The learning rate as a function of the step
# Computed by the trainer, drawn before a run, and told where a resumed run changes it.
#
# Imports no torch.


def learning_rate(step: int, config: TrainConfig, steps: int = 0) -> float:
    """Returns the rate of the optimizer step that follows `step` finished ones, in a run of `steps` (0: of `config.steps`).

    A skipped step leaves it where it is.
    """
    warmup = warmup_of(config, steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.schedule == "constant":
        return config.learning_rate
    done = (step - warmup) / max((steps or config.steps) - warmup, 1)
    if config.schedule == "linear":
        return config.learning_rate * (1 - min(done, 1.0))
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def warmup_of(config: TrainConfig, steps: int = 0) -> int:
    """Returns the number of steps in which the rate rises: `warmup_steps`, but in a shorter run all steps before the last."""
    return min(config.warmup_steps, (steps or config.steps) - 1)


def drawn(config: TrainConfig, before: TrainConfig | None = None, done: int = 0) -> str:
    """Returns the curve in a line, with the rates at its corners. `before`: the settings of the first `done` steps, in a resumed run."""
    rates = [learning_rate(step, before or config) for step in range(min(done, config.steps))]
    rates += [learning_rate(step, config) for step in range(len(rates), config.steps)]
    if min(rates) == max(rates):
        return f"{rates[0]:.3g} in every step"
    told = [f"{rates[step - 1]:.3g} at step {step}" for step in _corners(config, done if before else 0)]
    return f"{sparkline(rates, within=(0.0, max(rates)))}\n{', '.join(told)}"


def _corners(config: TrainConfig, done: int) -> Sequence[int]:
    """Returns the steps, counted from 1, at which the curve begins, bends, or goes on after `done` steps of another process."""
    bends = {1, warmup_of(config) + 1, done, done + 1, config.steps}
    return sorted(step for step in bends if 1 <= step <= config.steps)


def change_of_rate(before: TrainConfig, now: TrainConfig, done: int) -> str:
    """Returns a sentence for a run that is resumed after `done` steps, where its schedule goes on otherwise than it would have; else an
    empty string. Constant rates are what the settings say."""
    parts = ("learning_rate", "schedule", "steps", "warmup_steps")
    if all(getattr(before, part) == getattr(now, part) for part in parts) or not 0 < done < now.steps:
        return ""
    if before.schedule == now.schedule == "constant":
        return ""
    last, following = learning_rate(done - 1, before), learning_rate(done, now)
    how = "rises again" if following > 1.01 * last else "falls" if following < 0.99 * last else "goes on"
    then = f", then to {learning_rate(now.steps - 1, now):.3g} at step {now.steps}" if now.steps > done + 1 else ""
    told = f'train.schedule = "{now.schedule}"'
    told += f" now ends at train.steps = {now.steps} instead of {before.steps}" if before.steps != now.steps else ""
    message = (
        f"the learning rate {how}: {last:.3g} at step {done}, {following:.3g} at step {done + 1}{then}, because {told}"
    )
    if how != "rises again":
        return message
    return f'{message}. To keep {last:.3g}, set train.schedule = "constant" and train.learning_rate = {last:.3g}'


HIGHEST_RATE = {"all weights": 1e-3, "an adapter": 1e-2}
"""Learning rates above these are remarked on: tiny models of tests learn with more, and hardly any other."""
_USUAL = {"all weights": "1e-6 to 1e-5 is usual", "an adapter": "1e-5 to 1e-4 is usual"}


def rate_remarks(train: TrainConfig, lora: LoraConfig) -> Iterator[str]:
    """Yields remarks on a learning rate with which models forget how to write, and on a warm-up that is longer than the run."""
    what, rate = ("an adapter" if lora.rank else "all weights"), train.learning_rate
    if rate > HIGHEST_RATE[what]:
        yield (
            f"train.learning_rate = {rate:g} for {what}: above {HIGHEST_RATE[what]:g} a few steps usually make a model write nonsense; "
            f"{_USUAL[what]}"
        )
    if train.warmup_steps > warmup_of(train):
        yield (
            f"train.warmup_steps = {train.warmup_steps} is longer than this run of train.steps = {train.steps}: the learning rate rises for "
            f"{plural(warmup_of(train), 'step')} instead"
        )
