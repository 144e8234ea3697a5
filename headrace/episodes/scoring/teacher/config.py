"""Settings of teachers: models whose log-probs the policy learns from, or that are part of its reward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from headrace.settings.strict import LONGEST_NAME, STRICT


@dataclass(frozen=True, config=STRICT)
class RouteConfig:
    """The prompts that a teacher takes: those of rows whose `column` holds one of `values`."""

    column: str = Field(min_length=1)
    """A column of the task's rows."""
    values: tuple[str | int | bool, ...] = Field(min_length=1)
    """The values of the column in rows that the teacher takes."""

    def takes(self, columns: Mapping[str, Any]) -> bool:
        return self.column in columns and columns[self.column] in self.values


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TeacherConfig:
    """One `[[teachers]]` table."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=LONGEST_NAME)
    """The teacher's name in journals and reports; with mode = "text", the name of its reward."""
    path: str = ""
    """A directory that `transformers` loads, a known model, or a hub id. Empty if the student teaches itself."""
    student: Literal["", "snapshot", "average"] = ""
    """The student itself as teacher: its weights at the last multiple of `every` steps (snapshot), or their moving
    average."""
    every: int = Field(default=10, gt=0)
    """student: optimizer steps between two versions of the teacher."""
    decay: float = Field(default=0.99, ge=0, lt=1)
    """student = "average": after each step, average = decay * average + (1 - decay) * weights, in float32."""
    mode: Literal["tokens", "text"] = "tokens"
    """tokens: the teacher gives the log-prob of every sampled token, and of its `algo.distill.k` most probable ones if
    the algorithm compares those; it must have the student's vocabulary. text: it gives one number for a whole
    completion, as a reward; any vocabulary."""
    weight: float = 1.0
    """text: its weight in the reward's sum."""
    system: str = ""
    """text: the system message before the prompt."""
    route: RouteConfig | None = None
    """The prompts that it scores; all if not given. Of several teachers with mode = "tokens", the first one that takes
    a prompt scores it."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Settings of [engine] for the process that serves the teacher, on top of the run's."""

    @model_validator(mode="after")
    def _one_source(self) -> TeacherConfig:
        if bool(self.path) == bool(self.student):
            raise ValueError(
                f'the teacher {self.name} needs either a path (another model) or student = "snapshot" or "average" (the '
                f"student itself), and has {'both' if self.path else 'neither'}; give one"
            )
        if self.student and self.mode == "text":
            raise ValueError(
                f"the teacher {self.name} is the student, whose vocabulary is the same; leave mode = tokens"
            )
        return self

    @model_validator(mode="after")
    def _nothing_idle(self) -> TeacherConfig:
        """Refuses what would have no effect."""
        for name, usual, needed in (
            ("weight", 1.0, "" if self.mode == "text" else 'mode = "text" (algo.distill.coef weighs log-probs)'),
            ("system", "", "" if self.mode == "text" else 'mode = "text"'),
            ("every", 10, "" if self.student else "student"),
            ("decay", 0.99, "" if self.student == "average" else 'student = "average"'),
        ):
            if needed and getattr(self, name) != usual:
                raise ValueError(f"{name} of the teacher {self.name} needs {needed}; set it, or remove {name}")
        return self

    def takes(self, columns: Mapping[str, Any]) -> bool:
        return self.route is None or self.route.takes(columns)

    @property
    def asked(self) -> str:
        """The teacher's model, for messages."""
        return f"the student's {self.student}" if self.student else self.path


def teacher_problems(
    teachers: Sequence[TeacherConfig],
    algorithm: str,
    *,
    distils: bool,
    reference: bool,
    temperature: float,
    truncates: bool,
) -> Iterator[str]:
    """Yields a sentence with its remedy for each pair of settings that cannot work together.

    `distils`: the algorithm learns from a teacher's log-probs; `reference`: the KL to the reference is part of the reward.
    """
    tokens = [teacher.name for teacher in teachers if teacher.mode == "tokens"]
    if distils and not tokens:
        yield (
            f"{algorithm} learns from a teacher's log-probs, and there is none; add a [[teachers]] table with a name and the "
            "path of a model with the student's tokenizer"
        )
    if tokens and not distils:
        yield (
            f"the log-probs of the teacher {tokens[0]} are not used by {algorithm}; set algo.name = opd or opd_topk, or "
            'algo.distill.kind, or make it a reward with mode = "text"'
        )
    needs = "a teacher's" if distils else "the reference's" if reference else ""
    if needs and temperature not in (0.0, 1.0):  # 0 is refused anyway
        yield (
            f"rollout.temperature = {temperature} does not go with {needs} log-probs, which are those at temperature 1, as "
            "distributions at different temperatures are never equal; set rollout.temperature = 1"
        )
    if needs and truncates:
        yield (
            f"rollout.top_p, top_k and min_p do not go with {needs} log-probs, which are of the whole vocabulary; remove them"
        )
    names = Counter(teacher.name for teacher in teachers)
    yield from (
        f"{count} teachers are called {name}; give each a name of its own" for name, count in names.items() if count > 1
    )
    if len(selves := [teacher.name for teacher in teachers if teacher.student]) > 1:
        yield f"the teachers {' and '.join(selves)} are both the student itself; keep one of them"
