"""Settings of the trainer. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class TrainConfig:
    steps: int = Field(default=100, gt=0)
    """Optimizer steps of the run; with `minutes` at most."""
    minutes: float = Field(default=0.0, ge=0)
    """That the run may take, from the start of its processes to its last checkpoint: `steps`, `staleness.groups_per_step` and `eval.prompts` are then
    the most that is done, and are fitted to what this machine can do. 0: as long as it takes."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Full fine-tuning by RL: 1e-6 for billions of parameters, up to 1e-5 for 100 million."""
    schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up: stay, or fall to zero along a cosine until `steps`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the learning rate rises linearly."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled (AdamW), on matrices only. RL moves weights little: pulling them to zero is not what one wants."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """0.95 rather than AdamW's 0.999: runs are a few hundred steps, and gradients change as the policy does."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient of the whole step is scaled down to this norm."""
    microbatch_tokens: int = Field(default=2048, gt=0)
    """Tokens forwarded at once: bounds memory, never changes the gradient. A longer row gets a microbatch of its own."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of the computation (autocast). auto: what was measured to be faster here (`headrace doctor` says it)."""
    path: Literal["auto", "kernels", "torch"] = "auto"
    """kernels: our own C++, on a CPU; torch: PyTorch's; auto: kernels where they serve the model, unless PyTorch was measured to be
    faster."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """Of the weights that are trained, and of their gradients. bfloat16: rounded stochastically after every update, 12 bytes a
    parameter with the optimizer's instead of 16; for what does not fit otherwise. The optimizer's state is always float32."""
    offload_optimizer: bool = False
    """Keep the optimizer's state, and float32 masters of the weights, in the memory of the host, where the update is computed
    then: 8 bytes a parameter less on the device. On the CPU it only costs."""
    gradient_checkpointing: bool = False
    """Less memory for about a third more time."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is one."""
    cores: tuple[int, ...] = ()
    """CPU cores of the trainer process; empty shares all of them."""
    threads: int = Field(default=0, ge=0)
    """0: as many as `cores`, or what was measured to be fastest."""
    max_skipped_steps: int = Field(default=3, gt=0)
    """Skipped steps (non-finite gradient) in a row that stop the run."""

    @model_validator(mode="after")
    def _weights_fit(self) -> TrainConfig:
        if self.weights == "bfloat16" and self.dtype == "float32":
            raise ValueError(
                "train.weights = bfloat16 with train.dtype = float32 would compute more exactly than it remembers; set "
                "train.dtype = bfloat16, or train.weights = float32"
            )
        return self
