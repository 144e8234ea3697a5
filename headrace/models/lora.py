"""LoRA (Hu et al., arXiv:2106.09685): its settings, and the description of an adapter for an engine. Imports neither torch nor peft.

An adapter has the same name in trainer and engine, and its tensors have the names and shapes that peft saves.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from headrace.core.weights import AdapterSpec
from headrace.settings.extras import install
from headrace.settings.strict import LONGEST_NAME, STRICT

POLICY = "policy"
"""The adapter's name in a run that trains one."""

NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]*$"
"""Pattern of an adapter's name, which is used for a directory, a module of peft, and the requests of an engine."""


@dataclass(frozen=True, config=STRICT, kw_only=True)
class AdapterConfig:
    """One of several adapters that a run trains at once on one base model, with its own settings."""

    name: str = Field(pattern=NAME, max_length=LONGEST_NAME)
    """Name of its directory inside the run's, and its name in the engine."""
    task: dict[str, Any] = Field(default_factory=dict)
    """Replaces the run's [task]."""
    reward: dict[str, Any] = Field(default_factory=dict)
    """Replaces the run's [reward]."""
    rollout: dict[str, Any] = Field(default_factory=dict)
    """Overrides single settings of the run's section; so do all sections below."""
    curriculum: dict[str, Any] = Field(default_factory=dict)
    algo: dict[str, Any] = Field(default_factory=dict)
    train: dict[str, Any] = Field(default_factory=dict)
    lora: dict[str, Any] = Field(default_factory=dict)
    staleness: dict[str, Any] = Field(default_factory=dict)
    checkpoint: dict[str, Any] = Field(default_factory=dict)
    eval: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, config=STRICT, kw_only=True)
class LoraConfig:
    rank: int = Field(default=0, ge=0)
    """0 trains all weights. 16 is enough for policy gradients (docs/lora.md); set train.learning_rate to about ten
    times that of full training."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapter is scaled by alpha / rank, so that one learning rate fits all ranks."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Modules that are adapted: all linear layers except the output head, or names or ends of names such as ["q_proj",
    "v_proj"]."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) (Kalajdzievski, arXiv:2312.03732)."""
    dora: bool = False
    """Train lengths and directions of columns separately (Liu et al., arXiv:2402.09353); served merged."""
    rank_pattern: dict[str, int] = Field(default_factory=dict)
    """Ranks of single modules, by name, end of the name or regular expression."""
    alpha_pattern: dict[str, float] = Field(default_factory=dict)
    """Values of alpha of single modules, likewise."""
    experts: bool = False
    """Also adapt each expert of a mixture, with `rank`."""
    quantise: Literal["", "int8", "nf4"] = ""
    """Keep the frozen matrices of linear layers in 8 or 4 bits while training (arXiv:2305.14314); the engine serves the
    dequantised values in its dtype."""
    publish: Literal["auto", "adapter", "merged"] = "auto"
    """The base once, then only the adapter; or merged into full weights. auto: adapter, but merged
    for DoRA, and where transformers computes the model in the native engine (docs/lora.md)."""
    init_seed: int = Field(default=0, ge=0)
    """Seed of each pair's first matrix A; B starts at zero, so training starts at the base model."""

    @model_validator(mode="after")
    def _pairs_fit(self) -> LoraConfig:
        if self.dora and self.publish == "adapter":
            raise ValueError(
                'lora.dora = true with lora.publish = "adapter": no engine of ours serves DoRA beside the base weights; use '
                '"merged" (or "auto")'
            )
        if self.dora and self.quantise:
            raise ValueError(
                "lora.quantise and lora.dora cannot be combined: DoRA needs the lengths of full columns at every step; remove one of them"
            )
        if self.dora and self.experts:
            raise ValueError(
                "lora.experts and lora.dora cannot be combined: peft adapts experts with plain LoRA only; remove one of them"
            )
        if not self.targets and not self.experts:
            raise ValueError('lora.targets is empty: name modules to adapt, or use "all-linear"')
        if bad := [name for name, rank in self.rank_pattern.items() if rank < 1]:
            raise ValueError(
                f"lora.rank_pattern gives {bad[0]} a rank below 1; leave a module out of lora.targets instead"
            )
        return self

    @property
    def merged(self) -> bool:
        """Whether the engine is sent full weights with the adapter merged in."""
        return bool(self.rank) and (self.publish == "merged" or (self.publish == "auto" and self.dora))

    @property
    def served_name(self) -> str:
        """The adapter that requests name in a run with one adapter; empty if the engine serves full weights."""
        return POLICY if self.rank and not self.merged else ""

    def spec(self, name: str, base: str = "") -> AdapterSpec:
        """Returns the description that is published with the adapter. `base`: fingerprint of the published base weights."""
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
    """Yields settings that cannot work together. `weights`: train.weights; `engine_path`: engine.path; `self_taught`: whether an older
    version of the student is a teacher."""
    if not config.rank:
        usual = LoraConfig()
        if given := [
            field.name for field in fields(config) if getattr(config, field.name) != getattr(usual, field.name)
        ]:
            yield f"lora.{given[0]} is set, but lora.rank = 0 trains all weights; set lora.rank, 16 say, or remove lora.{given[0]}"
        return
    if importlib.util.find_spec("peft") is None:
        yield f"lora.rank needs peft, which is not installed: {install('lora')}, or set lora.rank = 0"
    if weights != "float32":
        yield (
            f"train.weights = {weights} sets the dtype of trained weights; with lora.rank they are frozen and kept in the dtype "
            "of the computation; remove train.weights"
        )
    if config.merged:
        return
    if config.experts and (
        engine_path == "kernels" or (engine_path in ("hf", "cache") and config.publish == "adapter")
    ):
        yield f'engine.path = {engine_path} serves no adapters of experts; use engine.path = auto, or lora.publish = "merged"'
    if self_taught:
        yield (
            "a teacher that is the student itself needs full weights, which lora.publish = adapter never publishes; "
            'use lora.publish = "merged"'
        )
