"""Settings of teachers: models whose log-probs the policy learns from, or that are part of its reward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from string import Formatter
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from headrace.algo.recipe_parts import Distill
from headrace.episodes.rollout import ForksConfig
from headrace.episodes.tasks.config import TaskConfig
from headrace.settings.strict import LONGEST_NAME, STRICT

QUESTION, SIBLING = "prompt", "sibling"
"""The names in a teacher's prompt that are no columns."""


def pieces_of(prompt: str) -> list[tuple[str, str]]:
    """Splits a teacher's prompt into pairs of a text and the name in braces behind it, empty at the end. Raises ValueError for one that
    cannot be read."""
    pieces = []
    for text, name, form, conversion in Formatter().parse(prompt):
        if name == "" or form or conversion:
            raise ValueError(f"there is no name alone in the braces behind {text!r:.40}")
        pieces.append((text, name or ""))
    return pieces


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
    """The teacher's name in journals and reports; with mode = "text", its reward's."""
    path: str = ""
    """A directory that `transformers` loads, a known model, or a hub id (org/name@revision too). Empty: the student teaches itself."""
    student: Literal["", "snapshot", "average"] = ""
    """The student as teacher: its weights at the last multiple of `every` steps (snapshot), or their moving average."""
    every: int = Field(default=10, gt=0)
    """student: optimizer steps between two versions of the teacher."""
    decay: float = Field(default=0.99, ge=0, lt=1)
    """student = "average": average = decay * average + (1 - decay) * weights after each step, in float32."""
    mode: Literal["tokens", "text"] = "tokens"
    """tokens: log-probs of every sampled token; needs the student's vocabulary. text: one number for a completion, as a reward."""
    weight: float = 1.0
    """text: its weight in the reward's sum."""
    system: str = ""
    """text: the system message before the prompt."""
    prompt: str = ""
    """tokens: the last question as the teacher reads it: `{prompt}` is the policy's, `{solution}` the row's column of
    that name, `{sibling}` another completion of the group that was right (docs/distillation.md). Empty: as the policy
    read it."""
    right: float = 1.0
    """prompt with {sibling}: the least reward of a completion shown as right."""
    route: RouteConfig | None = None
    """The prompts that it scores; all if not given. Of several teachers with mode = "tokens", the first one that takes
    a prompt scores it."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Settings of [engine] for the teacher's process, on top of the run's."""

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
    def _says_more(self) -> TeacherConfig:
        """Refuses a prompt that cannot be filled in, or that holds nothing that the policy does not read."""
        if not self.prompt:
            return self
        try:
            names = self.prompt_names
        except ValueError as error:
            raise ValueError(
                f"the prompt of the teacher {self.name} cannot be read ({error}); names stand in braces, as in {{{QUESTION}}}, and a brace that is "
                "text is written twice"
            ) from None
        if QUESTION not in names:
            raise ValueError(
                f"the prompt of the teacher {self.name} leaves out the question: write {{{QUESTION}}} where it is to stand"
            )
        if names == {QUESTION}:
            raise ValueError(
                f"the prompt of the teacher {self.name} shows no column of the row: add one in braces, such as {{solution}}, or {{{SIBLING}}}"
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
            ("prompt", "", "" if self.mode == "tokens" else 'mode = "tokens" (text: give it a system message)'),
            ("right", 1.0, "" if SIBLING in self.prompt_names else f"a prompt with {{{SIBLING}}}"),
        ):
            if needed and getattr(self, name) != usual:
                raise ValueError(f"{name} of the teacher {self.name} needs {needed}; set it, or remove {name}")
        return self

    def takes(self, columns: Mapping[str, Any]) -> bool:
        return self.route is None or self.route.takes(columns)

    @property
    def prompt_names(self) -> frozenset[str]:
        """The names in braces in its prompt. Raises ValueError for a prompt that cannot be read."""
        return frozenset(name for _, name in pieces_of(self.prompt) if name)

    @property
    def reads_sibling(self) -> bool:
        """Whether the teacher's prompt shows another completion of the group."""
        return SIBLING in self.prompt_names

    @property
    def asked(self) -> str:
        """The teacher's model, for messages."""
        return f"the student's {self.student}" if self.student else self.path


Shown = Literal["", "more", "sibling"]
"""The thing that a teacher is shown beside the policy's prompt: nothing, anything, or another completion of the group that was right."""


def teacher_problems(
    teachers: Sequence[TeacherConfig],
    algorithm: str,
    *,
    distill: Distill,
    reference: bool,
    shown: Shown,
    temperature: float,
    truncates: bool,
) -> Iterator[str]:
    """Yields a sentence with its remedy for each pair of settings that cannot work together.

    `distill`: what the algorithm learns from a teacher's log-probs; `reference`: the KL to the reference is part of the reward; `shown`: what the
    algorithm's teacher reads beside the policy's prompt. `temperature` and `truncates`: how rollouts are sampled.
    """
    tokens = [teacher for teacher in teachers if teacher.mode == "tokens"]
    yield from _problems_of_sources(tokens, algorithm, distill, shown)
    served = distill.kind == "sampled" and not distill.model
    needs = "a teacher's" if served else "the reference's" if reference else ""
    other = (
        ', or compare whole distributions (algo.name = "opd_topk"), or let the trainer hold the teacher (algo.distill.model)'
        if served
        else ""
    )
    if needs and temperature not in (0.0, 1.0):  # 0 is refused anyway
        yield (
            f"rollout.temperature = {temperature} does not go with {needs} log-probs of sampled tokens, which are those at temperature 1, as "
            f"distributions at different temperatures are never equal; set rollout.temperature = 1{other}"
        )
    if needs and truncates:
        yield (
            f"rollout.top_p, top_k and min_p do not go with {needs} log-probs of sampled tokens, which are of the whole vocabulary; remove them{other}"
        )
    for teacher in teachers:
        if shown and teacher.mode == "tokens" and not (teacher.prompt and (shown == "more" or teacher.reads_sibling)):
            example = (
                f"Another answer, which is right:\\n{{{SIBLING}}}" if shown == "sibling" else "A solution:\\n{solution}"
            )
            what = (
                "another completion of the group that was right" if shown == "sibling" else "more than the policy reads"
            )
            yield (
                f"{algorithm} learns from a teacher that is shown {what}, and the teacher {teacher.name} is not; give it a prompt, such as "
                f'"{{{QUESTION}}}\\n\\n{example}", or set algo.name = opd_topk'
            )
    names = Counter(teacher.name for teacher in teachers)
    yield from (
        f"{count} teachers are called {name}; give each a name of its own" for name, count in names.items() if count > 1
    )
    if len(selves := [teacher.name for teacher in teachers if teacher.student]) > 1:
        yield f"the teachers {' and '.join(selves)} are both the student itself; keep one of them"


def _problems_of_sources(
    tokens: Sequence[TeacherConfig], algorithm: str, distill: Distill, shown: Shown
) -> Iterator[str]:
    """Yields what is wrong with where log-probs come from. `tokens`: the teachers that are served."""
    distils = distill.kind != "none"
    asked = {
        f"algo.distill.over = {distill.over}": distill.over != "teacher_top",
        f"algo.distill.temperature = {distill.temperature:g}": distill.temperature != 1,
    }
    only_held = next((name for name, given in asked.items() if given), "") if distill.compares else ""
    if distill.model:
        if tokens:
            yield (
                f"algo.distill.model = {distill.model} is a teacher that the trainer holds, and the teacher {tokens[0].name} is served: the policy learns from "
                'one of them; remove algo.distill.model, or the table (mode = "text" would make it a reward)'
            )
        if shown:
            yield (
                f"{algorithm} learns from a teacher that is shown more than the policy reads, and algo.distill.model = {distill.model} reads the same; use a "
                "[[teachers]] table with a prompt, or algo.name = gkd"
            )
    elif only_held and distils:
        path = next((teacher.path for teacher in tokens if teacher.path), "PATH")
        instead = " instead of the [[teachers]] table" if tokens else ""
        yield (
            f"{algorithm} with {only_held} compares what no engine returns: a served teacher gives its own most probable tokens, at temperature 1. Let the "
            f'trainer hold the teacher: algo.distill.model = "{path}"{instead}; or set algo.name = opd_topk, with algo.distill.temperature = 1'
        )
    elif distils and not tokens:
        yield (
            f"{algorithm} learns from a teacher's log-probs, and there is none; add a [[teachers]] table with a name and the "
            "path of a model with the student's tokenizer, or let the trainer hold the model (algo.distill.model)"
        )
    if tokens and not distils:
        yield (
            f"the log-probs of the teacher {tokens[0].name} are not used by {algorithm}; set algo.name = opd or opd_topk, or "
            'algo.distill.kind, or make it a reward with mode = "text"'
        )


def prompt_problems(
    teachers: Sequence[TeacherConfig], task: TaskConfig, forks: ForksConfig, *, played: str, group: int
) -> Iterator[str]:
    """Yields a sentence for each setting that excludes a teacher's own prompt. `played`: the setting of an environment that writes the
    conversation, if there is one; `group`: rollouts of a group."""
    for teacher in teachers:
        if not teacher.prompt:
            continue
        says = f"the prompt of the teacher {teacher.name}"
        if played:
            yield f"{says} words the task's question anew, and with {played} the environment writes what the policy reads; remove one of the two"
        if task.images:
            yield f"{says} is text, and task.images shows the policy images, which the teacher would not see; remove one of the two"
        if task.examples:
            yield (
                f"{says} takes the place of the question, and task.examples = {task.examples} shows solved problems before it, which the teacher would not "
                "see; set task.examples = 0, and write them into task.system"
            )
        if teacher.reads_sibling and forks.alternatives:
            yield (
                f"{says} shows another completion of the group, and with rollout.forks.alternatives completions begin alike; set that to 0, or show a "
                "column of the row"
            )
        if teacher.reads_sibling and group < 2:
            yield f"{says} shows another completion of the group, which has one; raise rollout.group_size"
