"""The prompt of a teacher that is shown more than the policy: the task's conversation, with the last question in the teacher's own words.

What it is shown is in no prompt of the policy and in no evaluation: only the scoring of tokens that are sampled already reads it
(on-policy self-distillation, OPSD, arXiv 2601.18734; SDPO, arXiv 2601.20802).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.core.errors import ConfigError, nearest
from headrace.core.types import Prompt
from headrace.episodes.scoring.teacher.config import QUESTION, SIBLING, TeacherConfig, pieces_of
from headrace.episodes.tasks.config import TaskConfig
from headrace.episodes.tasks.conversations import place_of_question
from headrace.episodes.tasks.prompts import Encoder, PromptMaker


class OwnPrompt:
    """Writes a teacher's prompts. They pass through the chat template as those of the task do, with its system message."""

    def __init__(self, teacher: TeacherConfig, task: TaskConfig, encoder: Encoder) -> None:
        """`encoder`: the student's, as the task uses it."""
        self._name, self._pieces = teacher.name, pieces_of(teacher.prompt)
        self._question = task.prompt
        self._columns = sorted(teacher.prompt_names - {QUESTION, SIBLING, task.prompt})
        self._maker = PromptMaker(task, encoder)
        self.reads_sibling = teacher.reads_sibling
        """Whether it shows another completion of the group."""
        self.right = teacher.right
        """The least reward of such a completion."""

    def problem(self, columns: Mapping[str, Any]) -> str:
        """Says which column of a row cannot be shown; empty if all can."""
        for name in self._columns:
            if name not in columns:
                known = ", ".join(map(str, columns)) or "none"
                return f"there is no column {name} in it{nearest(name, columns)}; its columns are: {known}"
            if not isinstance(columns[name], (str, int, float)):
                return f"its column {name} is {_kind(columns[name])} and no text"
            if not str(columns[name]).strip():
                return f"its column {name} is empty"
        if self.reads_sibling and SIBLING in columns:
            return f"its column {SIBLING} has the name of what {{{SIBLING}}} stands for; rename the column"
        return ""

    def tokens(self, prompt: Prompt, sibling: str = "") -> tuple[int, ...]:
        """Returns the teacher's tokens before the completion. Raises ConfigError for a row that lacks something, or that the chat template
        refuses."""
        if problem := self.problem(prompt.columns):
            raise ConfigError(f"the prompt {prompt.id} cannot be shown to the teacher {self._name}: {problem}")
        values = {**prompt.columns, self._question: prompt.text, QUESTION: prompt.text, SIBLING: sibling}
        question = "".join(text + (str(values[name]) if name else "") for text, name in self._pieces)
        if not prompt.chat:
            return self._maker.make(prompt.id, question, prompt.columns).tokens
        messages = list(prompt.columns[prompt.chat])
        place = place_of_question(messages)
        messages[place] = {**messages[place], "content": question}
        return self._maker.make(prompt.id, messages, prompt.columns, prompt.chat).tokens


def _kind(value: Any) -> str:
    return "empty (null)" if value is None else f"of type {type(value).__name__}"


def first_problem(teachers: Sequence[tuple[TeacherConfig, OwnPrompt | None]], rows: Iterable[Mapping[str, Any]]) -> str:
    """Says which row cannot be shown to the teacher that scores it; empty if all can. `teachers`: those by token, in their order."""
    for number, row in enumerate(rows, 1):
        teacher, shows = next((pair for pair in teachers if pair[0].takes(row)), (None, None))
        if teacher and shows and (problem := shows.problem(row)):
            return f"row {number} cannot be shown to the teacher {teacher.name}: {problem}"
    return ""
