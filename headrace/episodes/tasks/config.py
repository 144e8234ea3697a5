"""Settings of the task: the source of prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from headrace.core.chat.messages import Rendering
from headrace.episodes.tasks.task_kinds import TASK_KINDS, TaskKind
from headrace.settings.strict import STRICT

if TYPE_CHECKING:
    Kind = str
    FileKind = str
else:
    Kind = Literal[tuple(TASK_KINDS)]
    FileKind = Literal[("auto", *(name for name, kind in TASK_KINDS.items() if kind.reads))]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TaskConfig:
    kind: Kind
    """The source of prompts. Each states its settings (`task_kinds.py`), and docs/settings.md lists them."""
    name: str = ""
    """reasoning_gym: the family of problems, such as chain_sum."""
    options: dict[str, Any] = Field(default_factory=dict)
    """reasoning_gym: settings of the family, such as max_terms."""
    path: str = ""
    """The file or directory with the rows."""
    rows: str = ""
    """python: the fingerprint of the rows, written by `headrace.train`; a resumed run must be passed the same rows."""
    held_out_path: str = ""
    """A file of rows for evaluation only. Empty: the last `held_out` rows of `path` after shuffling."""
    prompt: str = "prompt"
    """The column with the prompt: a string, or a list of messages (docs/rows.md)."""
    answer: str = "answer"
    """The column with the right answer, for few-shot `examples`. Reward functions receive every column."""
    images: tuple[str, ...] = ()
    """Columns with images shown before the prompt's text: a path, bytes or a list of them (docs/vision.md)."""
    chat: bool = True
    """Apply the model's chat template. false: the prompt is used as it is."""
    template: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, such as { enable_thinking = false }; a row's column `chat_template_kwargs` goes
    before them."""
    specials_in_text: Literal["plain", "allow"] = "plain"
    """The text of a special token in a message, such as <|im_end|>. plain: stays text; allow: becomes the token."""
    system: str = ""
    """A system message before the prompt."""
    examples: int = Field(default=0, ge=0)
    """Solved problems shown before the prompt as turns of a chat (few-shot); never trained."""
    held_out: int = Field(default=64, ge=0)
    """Prompts kept for evaluation, the same whatever the run's seed."""
    shuffle: bool = True
    """Shuffle rows in every epoch, and hold out rows at random. false: the order of the file."""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> TaskConfig:
        if self.facts.needs and not getattr(self, self.facts.needs[0]):
            needed, what = self.facts.needs
            raise ValueError(f"task.{needed} is missing: task.kind = {self.kind} needs {what}")
        fields = TaskConfig.__pydantic_fields__  # type: ignore[attr-defined]
        for setting in dict.fromkeys(name for kind in TASK_KINDS.values() for name in kind.own):
            if setting not in self.facts.own and getattr(self, setting) != fields[setting].get_default(
                call_default_factory=True
            ):
                raise ValueError(
                    f"task.{setting} means nothing to task.kind = {self.kind}; remove it, or change task.kind"
                )
        if not self.chat and (self.system or self.examples):
            raise ValueError(
                "task.system and task.examples are turns of a chat, but task.chat = false; set task.chat = true or write them "
                "into the prompts"
            )
        if self.images and (not self.chat or self.examples):
            raise ValueError(
                "task.images are shown by the model's chat template, in the last question alone: set task.chat = true and task.examples = 0"
            )
        if len({*self.images, self.prompt}) <= len(self.images):
            raise ValueError("task.images names a column twice, or that of the prompt; name each once")
        if not self.chat and (self.template or self.specials_in_text != "plain"):
            raise ValueError(
                "task.template and task.specials_in_text belong to the chat template, but task.chat = false; set task.chat = true or "
                "remove them: a plain prompt is used as it is, with its special tokens"
            )
        return self

    @property
    def facts(self) -> TaskKind:
        """The facts about its kind."""
        return TASK_KINDS[self.kind]

    @property
    def rendering(self) -> Rendering:
        """The use of chat templates."""
        return Rendering(arguments=self.template, allows_specials=self.specials_in_text == "allow")

    @property
    def source(self) -> str:
        """The source of the rows, for messages."""
        return self.path or "dataset="
