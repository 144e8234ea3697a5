"""The settings of a teacher: its engine's, which begin with those of the run's engine, and what its teaching excludes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.episodes.scoring.teacher.config import TeacherConfig
from headrace.native.resources import available_cores
from headrace.settings.toml import build, merge


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
