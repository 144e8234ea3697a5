"""Packages that only some settings need, and the command that installs each. headrace itself may lie on no package index, so
that `pip install headrace[...]` would fail: the command names the package."""

from __future__ import annotations

from typing import NamedTuple


class Extra(NamedTuple):
    module: str
    """What is imported."""
    requirement: str
    """As in `pyproject.toml`."""
    brings: str
    beside: tuple[str, ...] = ()
    """Requirements that come with it."""


EXTRAS = {
    "tasks": Extra("reasoning_gym", "reasoning-gym>=0.1.23,<0.2", "procedural tasks, the demo's among them"),
    "parquet": Extra("pyarrow", "pyarrow>=17", "prompts from Parquet files"),
    "datasets": Extra("datasets", "datasets>=4,<6", "prompts from a saved datasets directory"),
    "tensorboard": Extra("tensorboard", "tensorboard>=2.18,<3", "curves in TensorBoard"),
    "trackio": Extra("trackio", "trackio>=0.20,<1", "curves in trackio"),
    "serve": Extra("uvicorn", "uvicorn>=0.34,<1", "the engine behind HTTP (headrace serve)", ("starlette>=0.46,<2",)),
    "lora": Extra("peft", "peft>=0.18,<1", "training of LoRA adapters"),
}
"""By the name of the extra of headrace that has it."""


def install(extra: str) -> str:
    """`pip install 'peft>=0.18,<1'`: quoted, because a shell reads < and > otherwise."""
    found = EXTRAS[extra]
    return "pip install " + " ".join(f"'{one}'" for one in (found.requirement, *found.beside))
