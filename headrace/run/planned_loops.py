"""The settings of a run that its loops obey."""

from __future__ import annotations

from headrace.loop.loop_plan import LoopPlan
from headrace.run.config import RunConfig


def plan_of(config: RunConfig, adapter: str) -> LoopPlan:
    """The plan of a run's loops. `adapter`: the one that they train; empty if they train all weights."""
    return LoopPlan(
        steps=config.train.steps,
        staleness=config.staleness,
        rollout=config.rollout,
        seed=config.seed,
        max_skipped_steps=config.train.max_skipped_steps,
        checkpoint_every=config.checkpoint.every,
        evaluate_every=config.eval.every,
        adapter=adapter,
        curriculum=config.curriculum,
        watch=config.watch,
        save_patience=config.checkpoint.patience,
    )
