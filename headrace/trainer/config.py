"""Settings of the trainer. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from headrace.settings.strict import STRICT
from headrace.trainer.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainConfig:
    steps: int = Field(default=100, gt=0)
    """Optimizer steps of the run; with `minutes`, the most there can be."""
    minutes: float = Field(default=0.0, ge=0)
    """Minutes that the run may take, from the start of its processes to its last checkpoint; 0 sets no limit. `steps`,
    `staleness.groups_per_step` and `eval.prompts` are then upper limits, which are lowered to what this machine can do
    in that time."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """The peak learning rate. For RL on all weights: 1e-6 for billions of parameters, up to 1e-5 for 100 million."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """The learning rate after the warm-up: constant, or falling to zero until `steps`, along a cosine or a straight line."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of steps in which the learning rate rises linearly."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay, applied to matrices only. The default is 0 because RL moves weights little, and
    pulling them to zero is not wanted."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay of the mean gradient."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's decay of the mean squared gradient. 0.95 instead of AdamW's 0.999, because runs take a few hundred steps
    and gradients change with the policy."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient of the whole step is scaled down to this norm."""
    microbatch_tokens: int = Field(default=2048, gt=0)
    """Tokens that a rank forwards at once. This bounds memory and never changes the gradient. A longer row gets a
    microbatch of its own."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of the computation (autocast). auto: the one measured to be faster on this machine (`headrace doctor`
    prints it)."""
    path: Literal["auto", "kernels", "torch"] = "auto"
    """kernels: headrace's C++ kernels, on a CPU; torch: PyTorch; auto: kernels if they support the model, unless
    PyTorch was measured to be faster."""
    parity: Literal["off", "bitwise"] = "off"
    """bitwise: a token that was sampled with the trainer's current weights must have exactly the log-prob that the trainer
    computes. If one differs, its batch is not trained and the run stops, naming the first layer that differs. Refused
    if equality is not proven for the model and the processor. off: no such check."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the trained weights and of their gradients. bfloat16: rounded stochastically after every update; 12
    bytes per parameter, with the optimizer's state, instead of 16. For models that do not fit otherwise. The
    optimizer's state is always float32."""
    offload_optimizer: bool = False
    """Keep the optimizer's state, and float32 masters of the weights, in the host's memory, and compute the update
    there: 8 bytes per parameter less on the device. On a CPU it only costs time."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory for about a third more time."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is a GPU, else cpu."""
    cores: tuple[int, ...] = ()
    """CPU cores of the trainer's process, or of its ranks together; if empty, all cores are shared."""
    threads: int = Field(default=0, ge=0)
    """Number of threads, of all ranks together (of each, where ranks are elsewhere). 0: as many as `cores`, or as were measured to be fastest."""
    max_skipped_steps: int = Field(default=3, gt=0)
    """Number of consecutive skipped steps (non-finite gradient) after which the run stops."""
    max_deaths: int = Field(default=3, ge=0)
    """Number of times that the trainer's process, or one of its ranks, may die or hang (no answer for watch.stop_after
    seconds). The run then goes on by itself from its last checkpoint and its journal. Deaths before an hour of
    progress do not count. 0 ends the run, which can be resumed."""
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    """Several ranks that train one model. One rank, the default, starts no further process."""

    @model_validator(mode="after")
    def _weights_fit(self) -> TrainConfig:
        if self.weights == "bfloat16" and self.dtype == "float32":
            raise ValueError(
                "train.weights = bfloat16 with train.dtype = float32 would compute more exactly than it remembers; set "
                "train.dtype = bfloat16, or train.weights = float32"
            )
        return self


def parity_problems(train: TrainConfig, engine: Any, rollout: Any, lora: Any) -> Iterator[str]:
    """Yields the settings that train.parity = "bitwise" excludes. The other conditions are checked when trainer and engine have loaded
    the model.

    `engine`, `rollout` and `lora`: their settings.
    """
    if train.parity == "off":
        return
    asks = 'train.parity = "bitwise" asks engine and trainer for the same log-probs, bit for bit, which is proven'
    if engine.kind != "native":
        yield f'{asks} for engine.kind = "native" only; use it, or set train.parity = "off"'
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
