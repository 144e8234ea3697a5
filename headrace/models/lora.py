"""LoRA (Hu et al., arXiv:2106.09685): its settings, and what an adapter is to an engine. Imports no torch and no peft.

An adapter has one name from the trainer to the engine, and one shape: that of the tensors which peft saves.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from headrace.settings.extras import install
from headrace.weights import AdapterSpec

POLICY = "policy"
"""The adapter's name in a run that trains one."""

NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]*$"
"""What an adapter may be called: it names a directory, a module of peft's, and the requests of an engine."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class AdapterConfig:
    """One of several adapters that a run trains at once on one base: what it has of its own."""

    name: str = Field(pattern=NAME)
    """Of its directory in that of the run, and in the engine."""
    task: dict[str, Any] = Field(default_factory=dict)
    """A table in place of the run's; so is `reward`."""
    reward: dict[str, Any] = Field(default_factory=dict)
    rollout: dict[str, Any] = Field(default_factory=dict)
    """Settings on top of the run's; so are all below."""
    algo: dict[str, Any] = Field(default_factory=dict)
    train: dict[str, Any] = Field(default_factory=dict)
    lora: dict[str, Any] = Field(default_factory=dict)
    staleness: dict[str, Any] = Field(default_factory=dict)
    checkpoint: dict[str, Any] = Field(default_factory=dict)
    eval: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class LoraConfig:
    rank: int = Field(default=0, ge=0)
    """0 trains all weights of the model. Policy gradients carry little information a step, so that small ranks lose nothing
    (Schulman et al. 2025, LoRA Without Regret): 16 is plenty. Set train.learning_rate to about ten times that of full
    training."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapter's product is scaled by alpha / rank: the learning rate that fits one rank then fits the others."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Modules that are adapted, by name or the end of it: every linear layer but the output head, or those of a list such as
    ["q_proj", "v_proj"]."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) (Kalajdzievski, arXiv:2312.03732)."""
    dora: bool = False
    """Train lengths and directions of the columns apart (Liu et al., arXiv:2402.09353). Served merged."""
    rank_pattern: dict[str, int] = Field(default_factory=dict)
    """Module name, the end of it or a regular expression for it -> its rank."""
    alpha_pattern: dict[str, float] = Field(default_factory=dict)
    """The same for alpha."""
    experts: bool = False
    """Adapt the experts of a mixture-of-experts model too, each with `rank`."""
    quantise: Literal["", "int8", "nf4"] = ""
    """Keep the frozen matrices of linear layers in 8 or 4 bits while training (Dettmers et al., arXiv:2305.14314). The engine serves what they
    stand for, in its own dtype."""
    publish: Literal["auto", "adapter", "merged"] = "auto"
    """adapter: the base weights are published once, then the adapter alone. merged: full weights with the adapter in them,
    which any engine serves. auto: adapter, but merged for DoRA, which is not served beside the base weights."""
    init_seed: int = Field(default=0, ge=0)
    """Draws the first matrix A of each pair; B begins at zero, so that training begins at the base model."""

    @model_validator(mode="after")
    def _pairs_fit(self) -> LoraConfig:
        if self.dora and self.publish == "adapter":
            raise ValueError(
                'lora.dora = true with lora.publish = "adapter": no engine of ours serves DoRA beside the base weights; use '
                '"merged" (or "auto")'
            )
        if self.dora and self.quantise:
            raise ValueError(
                "lora.quantise and lora.dora exclude each other: DoRA needs the lengths of full columns at every step"
            )
        if self.dora and self.experts:
            raise ValueError("lora.experts and lora.dora exclude each other: peft adapts experts by plain LoRA only")
        if not self.targets and not self.experts:
            raise ValueError('lora.targets is empty: name modules to adapt, or use "all-linear"')
        if bad := [name for name, rank in self.rank_pattern.items() if rank < 1]:
            raise ValueError(
                f"lora.rank_pattern gives {bad[0]} a rank below 1; leave a module out of lora.targets instead"
            )
        return self

    @property
    def merged(self) -> bool:
        """Whether an engine is given full weights with the adapter in them."""
        return bool(self.rank) and (self.publish == "merged" or (self.publish == "auto" and self.dora))

    @property
    def served_name(self) -> str:
        """What requests of a run with one adapter name; empty where the engine serves full weights."""
        return POLICY if self.rank and not self.merged else ""

    def spec(self, name: str, base: str = "") -> AdapterSpec:
        """`base`: fingerprint of the base weights as they were published."""
        return AdapterSpec(
            name=name,
            rank=self.rank,
            alpha=self.alpha,
            rslora=self.rslora,
            rank_pattern=dict(self.rank_pattern),
            alpha_pattern=dict(self.alpha_pattern),
            base=base,
        )


def lora_problems(config: LoraConfig, weights: str, engine_path: str, self_taught: bool) -> Iterator[str]:
    """`weights`, `engine_path`: train.weights and engine.path. `self_taught`: the student's older self is a teacher."""
    if not config.rank:
        usual = LoraConfig()
        if given := [one.name for one in fields(config) if getattr(config, one.name) != getattr(usual, one.name)]:
            yield f"lora.{given[0]} is set, but lora.rank = 0 trains all weights; set lora.rank, 16 say, or remove lora.{given[0]}"
        return
    if importlib.util.find_spec("peft") is None:
        yield f"lora.rank needs peft, which is not installed: {install('lora')}, or set lora.rank = 0"
    if weights != "float32":
        yield (
            f"train.weights = {weights} is about weights that are trained; with lora.rank they are frozen, and lie in the dtype "
            "of the computation anyway; remove train.weights"
        )
    if config.merged:
        return
    if engine_path == "hf":
        yield 'engine.path = hf serves no adapters; use engine.path = auto, or lora.publish = "merged"'
    if self_taught:
        yield (
            "a teacher that is the student itself is published as full weights, and lora.publish = adapter never makes them; "
            'use lora.publish = "merged"'
        )
