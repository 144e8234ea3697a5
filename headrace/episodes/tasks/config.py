"""Settings of the task: the source of prompts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from headrace.core.chat.rendering import Rendering
from headrace.settings.strict import STRICT

# Settings that belong to some kinds only, as they are when nobody set them.
_OF_FAMILIES: dict[str, Any] = {"name": "", "options": {}}
_OF_FILES: dict[str, Any] = {"path": "", "held_out_path": ""}
_OF_PYTHON: dict[str, Any] = {"rows": ""}
_OF_ROWS: dict[str, Any] = {"prompt": "prompt", "answer": "answer", "shuffle": True}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TaskConfig:
    kind: Literal["reasoning_gym", "jsonl", "csv", "parquet", "datasets", "python", "seeds"]
    """The source of prompts: endless procedural problems, or rows of a file: JSON (an object a line, or one array of objects), CSV (with the
    names of columns in its first line), Parquet, or a directory saved by `datasets`. `headrace.train` writes `python` for rows that it was
    passed (`dataset=`). seeds: endless prompts that have a seed and no question, for environments that make their own first message (docs/libraries.md)."""
    name: str = ""
    """reasoning_gym: the family of problems, such as chain_sum."""
    options: dict[str, Any] = Field(default_factory=dict)
    """reasoning_gym: settings of the family, such as max_terms."""
    path: str = ""
    """The file or directory with the rows."""
    rows: str = ""
    """python: the fingerprint of the rows, which `headrace.train` writes. A resumed run must be passed the same rows."""
    held_out_path: str = ""
    """A file of rows for evaluation only. If empty, `held_out` rows of `path` are used: the last ones after shuffling."""
    prompt: str = "prompt"
    """The column with the prompt: a string, or a list of messages {role, content} (docs/rows.md)."""
    answer: str = "answer"
    """The column with the right answer, shown in few-shot `examples`. Reward functions receive every column in any
    case."""
    chat: bool = True
    """Whether the model's chat template is applied. If false, the prompt is used as it is."""
    template: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, such as { enable_thinking = false }, wherever it is used. A row's column
    `chat_template_kwargs` goes before them."""
    specials_in_text: Literal["plain", "allow"] = "plain"
    """The meaning of a special token's text in a message, such as <|im_end|>: plain: it is text, so that no row and no tool can end a turn;
    allow: it becomes the token."""
    system: str = ""
    """A system message before the prompt."""
    examples: int = Field(default=0, ge=0)
    """Number of solved problems shown before the prompt, as turns of a chat (few-shot). They are never trained on."""
    held_out: int = Field(default=64, ge=0)
    """Number of prompts kept for evaluation. They do not depend on the run's seed, so that runs can be compared."""
    shuffle: bool = True
    """Whether rows are shuffled anew in every epoch and held-out rows are taken at random. If false, the order of the
    file is kept."""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> TaskConfig:
        needed = {"reasoning_gym": "name", "python": "rows", "seeds": ""}.get(self.kind, "path")
        if needed and not getattr(self, needed):
            what = {
                "name": "a problem family, such as chain_sum",
                "path": "the file with the rows",
                "rows": "what headrace.train(dataset=...) writes; pass the rows there, or name a file of another kind",
            }[needed]
            raise ValueError(f"task.{needed} is missing: task.kind = {self.kind} needs {what}")
        foreign = {
            "name": _OF_FILES | _OF_ROWS | _OF_PYTHON,
            "path": _OF_FAMILIES | _OF_PYTHON,
            "rows": _OF_FAMILIES | _OF_FILES,
            "": _OF_FAMILIES | _OF_FILES | _OF_PYTHON | _OF_ROWS | {"examples": 0},
        }
        for setting, unset in foreign[needed].items():
            if getattr(self, setting) != unset:
                raise ValueError(
                    f"task.{setting} means nothing to task.kind = {self.kind}; remove it, or change task.kind"
                )
        if not self.chat and (self.system or self.examples):
            raise ValueError(
                "task.system and task.examples are turns of a chat, but task.chat = false; set task.chat = true or write them "
                "into the prompts"
            )
        if not self.chat and (self.template or self.specials_in_text != "plain"):
            raise ValueError(
                "task.template and task.specials_in_text belong to the chat template, but task.chat = false; set task.chat = true or "
                "remove them: a plain prompt is used as it is, with its special tokens"
            )
        return self

    @property
    def rendering(self) -> Rendering:
        """The use of chat templates."""
        return Rendering(arguments=self.template, allows_specials=self.specials_in_text == "allow")

    @property
    def source(self) -> str:
        """The source of the rows, for messages."""
        return self.path or "dataset="
