"""Demonstrations, from which a run may learn before its first rollout: questions with the answers that the model should write, or with two of which it
should prefer one. Imports no torch.

A question becomes tokens as those of the task do, by the model's chat template and once (C5). Its answer follows as the model itself would write it,
with the end of turn. Answers alone are trained.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from msgspec.structs import replace
from pydantic import Field, field_validator, model_validator
from pydantic.dataclasses import dataclass as settings_dataclass

from headrace.core.batches import Batch, Demonstration, Group, Row
from headrace.core.chat.reading import CLOSING, OPENING, is_opened_by
from headrace.core.errors import ConfigError, nearest
from headrace.core.types import Prompt
from headrace.episodes.tasks.config import FileKind, TaskConfig
from headrace.episodes.tasks.conversations import Message, prompt_of
from headrace.episodes.tasks.prompts import Encoder, PromptMaker, digest_of, seed_from
from headrace.episodes.tasks.read import kind_of, read_rows
from headrace.episodes.tasks.rows import about, plain_row
from headrace.settings.strict import STRICT

_NO_PAIRS = {
    "kto": "learns from single answers that are right or wrong, and rows here hold two to compare",
    "ipo": "is a loss of tokens; the preference loss of that name is ipo_pairs",
}
"""Losses that are asked for and are not here -> why not."""
_CONSTANTS: dict[str, tuple[str, ...]] = {
    "pair_beta": ("dpo", "ipo_pairs", "simpo", "cpo", "orpo"),
    "pair_margin": ("simpo",),
    "pair_nll": ("dpo", "cpo"),
    "pair_smoothing": ("dpo",),
    "pair_flips": ("dpo",),
}
"""Constant of losses of pairs -> those that have it."""


@settings_dataclass(frozen=True, kw_only=True, config=STRICT)
class WarmStartConfig:
    """Training on given answers, or on pairs of them, before the first rollout (docs/warm_start.md)."""

    path: str = ""
    """The file or directory with questions and answers. Empty: no warm start."""
    kind: FileKind = "auto"
    """The form of the rows, as in `task.kind`. auto: by the file's name."""
    prompt: str = "prompt"
    """The column with the question: a string, or a list of messages (docs/rows.md)."""
    answer: str = "answer"
    """The column with the answer, a text. Empty: `prompt` holds whole conversations that end with the answer."""
    loss: Literal["ce", "dpo", "ipo_pairs", "simpo", "cpo", "orpo"] = "ce"
    """ce: cross-entropy on the answers. The others are [losses of pairs](algorithms.md#preferences); the reference of
    dpo and ipo_pairs is the model before the warm start."""
    rejected: str = "rejected"
    """The column with the rejected answer, a text or a whole conversation. With loss = ce, rows that have it are
    refused; empty: trained without it."""
    pair_beta: float | None = Field(default=None, gt=0)
    """`algo.pair_beta` (of orpo: λ); the recipe's if not given, as the next four are."""
    pair_margin: float | None = Field(default=None, ge=0)
    """`algo.pair_margin` (simpo)."""
    pair_nll: float | None = Field(default=None, ge=0)
    """`algo.pair_nll` (cpo; of dpo: RPO)."""
    pair_smoothing: float | None = Field(default=None, ge=0, lt=0.5)
    """`algo.pair_smoothing` (conservative DPO)."""
    pair_flips: float | None = Field(default=None, ge=0, lt=0.5)
    """`algo.pair_flips` (robust DPO)."""
    held_out_path: str = ""
    """A file of rows for the held-out loss only. Empty: `held_out` rows of `path`, at random."""
    held_out: int = Field(default=64, ge=0)
    """Rows whose loss is measured before the first epoch and after each; rows with their questions are not trained. 0:
    none."""
    epochs: int = Field(default=1, gt=0)
    """Passes over the rows."""
    rows_per_step: int = Field(default=32, gt=0)
    """Rows of an optimizer step. The loss is the mean over the tokens of their answers, or over pairs."""
    learning_rate: float = Field(default=0.0, ge=0)
    """The peak learning rate. 0: 1e-5 for all weights, 1e-4 for an adapter, a tenth of that for pairs. The rest of the
    optimizer is that of [train]."""
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """The learning rate after the warm-up; cosine and linear reach zero at the last step of the warm start."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the learning rate rises linearly."""

    @property
    def paired(self) -> bool:
        return self.loss != "ce"

    @property
    def constants(self) -> dict[str, float]:
        """The constants of a loss of pairs that were given, by their names in [algo]."""
        return {name: value for name in _CONSTANTS if (value := getattr(self, name)) is not None}

    @field_validator("loss", mode="before")
    @classmethod
    def _known_loss(cls, name: Any) -> Any:
        if isinstance(name, str) and (why := _NO_PAIRS.get(name)):
            raise ValueError(
                f'warm_start.loss = {name} {why}; use "dpo" or another loss of pairs here, or algo.name = "{name}" on rollouts'
            )
        return name

    @model_validator(mode="after")
    def _has_rows(self) -> WarmStartConfig:
        fields = WarmStartConfig.__pydantic_fields__  # type: ignore[attr-defined]
        if not self.path and any(getattr(self, name) != field.default for name, field in fields.items()):
            raise ValueError(
                "warm_start.path is missing: name the file with questions and answers, or remove [warm_start]"
            )
        if self.held_out_path and not self.held_out:
            raise ValueError(
                "warm_start.held_out = 0 measures no row of warm_start.held_out_path: raise it, or remove the path"
            )
        if self.paired and not self.rejected:
            raise ValueError(
                f'warm_start.loss = {self.loss} compares two answers, and warm_start.rejected = "" names none: name the column with the worse one'
            )
        if not self.paired and self.rejected not in ("", fields["rejected"].default):
            raise ValueError(
                f'warm_start.rejected = {self.rejected} names worse answers, and warm_start.loss = ce compares none: set warm_start.loss = "dpo" or '
                "another loss of pairs, or remove warm_start.rejected"
            )
        if not self.paired and self.constants:
            raise ValueError(
                f"warm_start.{next(iter(self.constants))} is a constant of pairs, and warm_start.loss = ce has none: set warm_start.loss = "
                '"dpo" or another loss of pairs, or remove it'
            )
        if unread := [name for name in self.constants if self.loss not in _CONSTANTS[name]]:
            raise ValueError(
                f"warm_start.{unread[0]} is a constant of {' and '.join(_CONSTANTS[unread[0]])}, and warm_start.loss = {self.loss} has none of that name; "
                "remove it"
            )
        if self.pair_smoothing and self.pair_flips:
            raise ValueError(
                "warm_start.pair_smoothing and warm_start.pair_flips are two answers to wrong preferences; remove one of them"
            )
        return self


@settings_dataclass(frozen=True, kw_only=True, config=STRICT)
class AnswersConfig:
    """Given answers that are trained beside the rollouts of each step (docs/demonstrations.md). Their loss is that of `algo.demonstrations`."""

    path: str = ""
    """The file or directory with questions and answers. Empty: none."""
    kind: FileKind = "auto"
    """The form of the rows, as in `task.kind`. auto: by the file's name."""
    prompt: str = "prompt"
    """The column with the question: a string, or a list of messages (docs/rows.md)."""
    answer: str = "answer"
    """The column with the answer, a text. Empty: `prompt` holds whole conversations that end with the answer."""
    rejected: str = "rejected"
    """The column of worse answers in data sets of pairs. Rows that have it are refused, because only `answer` is
    trained; empty: trained without it."""
    rows_per_step: int = Field(default=8, gt=0)
    """Rows beside the groups of a step; each comes once before any comes again. Not with `algo.demonstrations.kind =
    compared`, which trains the answers of the step's own questions."""


def answer_problems(config: AnswersConfig, kind: str, minibatches: int, examples: int) -> Iterator[str]:
    """Yields settings of demonstrations that do not go together. `kind`: `algo.demonstrations.kind`; `minibatches`: of a step; `examples`:
    `task.examples`."""
    if not config.path:
        if kind != "none":
            yield (
                f"algo.demonstrations.kind = {kind} learns from given answers, and there are none; name a file of them in demonstrations.path, or use an "
                "algorithm without them"
            )
        return
    if kind == "none":
        yield (
            "demonstrations.path names given answers, and algo.demonstrations.kind = none learns nothing from them; set algo.name = chord, or "
            "algo.demonstrations.kind = sft"
        )
    if kind == "compared":
        if minibatches > 1:
            yield (
                "algo.demonstrations.kind = compared trains as many answers in a step as its questions have, which train.minibatches does not divide; set it to 1"
            )
        if config.rows_per_step != AnswersConfig.__pydantic_fields__["rows_per_step"].default:  # type: ignore[attr-defined]
            yield (
                "demonstrations.rows_per_step is for answers of any question, and with algo.demonstrations.kind = compared a step trains those of its own "
                "questions; remove it"
            )
    elif config.rows_per_step % minibatches:
        yield (
            f"demonstrations.rows_per_step = {config.rows_per_step} is not divided by train.minibatches = {minibatches}, each of which has as many of them; "
            f"set it to {-(-config.rows_per_step // minibatches) * minibatches}"
        )
    if examples:
        yield (
            "the rows of demonstrations lack the solved problems that task.examples shows before each prompt; set that to 0"
        )


def warm_start_problems(
    config: WarmStartConfig,
    *,
    elsewhere: bool,
    served: bool,
    beside: bool,
    quantised: bool,
    examples: int,
    timed: bool,
) -> Iterator[str]:
    """Yields settings that exclude a warm start, whose weights are files of the run's directory. `elsewhere`: whether parts of the run are on other
    machines; `served`: whether its engines are servers that are up already; `beside`: whether a reference's engine, or that of the student's older
    self, begins with the model; `quantised`: whether an adapter has packed weights beneath it; `examples`: `task.examples`; `timed`: whether the run
    has a time limit."""
    says, already = "warm_start trains before the run, and", "or name warm weights in model.path"
    if not config.path:
        return
    if elsewhere:
        yield f"{says} parts elsewhere do not have the files of its weights; keep [orchestration] on this machine, {already}"
    if served:
        yield f"{says} servers at engine.urls have loaded other weights; remove engine.urls, so that the run starts one, {already}"
    if beside:
        yield (
            f"{says} the engine of a reference or of the student's older self is planned with the weights before it; use algo.kl.place = loss and "
            f"another teacher, {already}"
        )
    if quantised:
        yield f"{says} an adapter that is merged into weights of lora.quantise is rounded with them; remove lora.quantise, {already}"
    if examples:
        yield f"{says} its rows lack the solved problems that task.examples shows before each prompt; set that to 0, {already}"
    if timed:
        yield f"{says} train.minutes does not count its time; set train.steps instead, {already}"


class AnswerTokenizer(Encoder, Protocol):
    """The part of `chat.ChatEncoder` that demonstrations use."""

    @property
    def endings(self) -> Any: ...

    @property
    def unknown(self) -> int | None: ...

    def encode_completion(self, text: str, ended: bool) -> tuple[int, ...]: ...

    def written(self, tokens: Sequence[int]) -> str: ...


_LAST = 8
"""Tokens of a prompt in which a template opens the thinking."""
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields of messages in which data sets keep a thought beside the text."""


class Preference(Demonstration, frozen=True, kw_only=True):
    """A question with two answers, of which `answer` is preferred.

    >>> [(row.tokens, row.trajectories) for row in Preference((1, 5), (7, 2), rejected=(8, 2)).rows(step=3)]
    [((7, 2), (0,)), ((8, 2), (1,))]
    """

    rejected: tuple[int, ...]

    @property
    def other(self) -> Demonstration:
        """The question with the rejected answer."""
        return Demonstration(self.prompt, self.rejected)

    def rows(self, step: int) -> tuple[Row, Row]:
        """Returns the rows of both answers. Advantages are as those of rollouts, of which one pair is made."""
        worse = replace(self.other.row(step), advantages=(-1.0,) * len(self.rejected), trajectories=(1,))
        return replace(self.row(step), trajectories=(0,)), worse


def sides_of(one: Demonstration) -> tuple[Demonstration, ...]:
    """Returns the question with each of its answers: one, or the preferred and the rejected one."""
    return (one, one.other) if isinstance(one, Preference) else (one,)


@dataclass(frozen=True, kw_only=True)
class Demonstrations:
    """All rows of a warm start: all of them pairs (`Preference`), or none."""

    trained: Sequence[Demonstration]
    held_out: Sequence[Demonstration]
    seed: int
    epochs: int
    rows_per_step: int

    @property
    def steps_of_epoch(self) -> int:
        return -(-len(self.trained) // self.rows_per_step)

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole warm start."""
        return self.epochs * self.steps_of_epoch

    @property
    def digest(self) -> str:
        """A fingerprint of all tokens, and of what is held out."""
        rows = [str((one.prompt, *(side.answer for side in sides_of(one)))) for one in self.trained]
        return digest_of([*rows, "held out", *(str(side.tokens) for one in self.held_out for side in sides_of(one))])

    def batches(self, adapter: str) -> Iterator[Batch]:
        """Yields the batch of each optimizer step: every row once an epoch, each time in a new order, which the seed decides."""
        step = 0
        for epoch in range(self.epochs):
            order = list(self.trained)
            random.Random(seed_from("warm start", self.seed, epoch)).shuffle(order)
            for first in range(0, len(order), self.rows_per_step):
                taken = order[first : first + self.rows_per_step]
                groups = tuple(_group(number, one, step) for number, one in enumerate(taken))
                yield Batch(step, groups, adapter=adapter, skippable=False, steps=self.steps)
                step += 1


def _group(number: int, one: Demonstration, step: int) -> Group:
    prompt = Prompt(f"warm_start/{number}", "", one.prompt)
    if isinstance(one, Preference):
        return Group(number, prompt, (), one.rows(step), pairs=((0, 1),))
    return Group(number, prompt, (), (one.row(step),))


@dataclass(frozen=True, kw_only=True)
class AnswerCourse:
    """The demonstrations beside the steps of a run: which ones a step has depends on its number alone, so that a run that goes on repeats none and leaves
    none out."""

    rows: Sequence[Demonstration]
    seed: int
    rows_per_step: int

    def of_step(self, step: int) -> tuple[Demonstration, ...]:
        """Returns those of the step that follows `step` finished ones: each row comes once before any comes again, each time in a new order."""
        first, count = step * self.rows_per_step, len(self.rows)
        places = range(first, first + self.rows_per_step)
        orders = {pass_: self._order(pass_) for pass_ in {place // count for place in places}}
        return tuple(self.rows[orders[place // count][place % count]] for place in places)

    def _order(self, pass_: int) -> list[int]:
        order = list(range(len(self.rows)))
        random.Random(seed_from("demonstrations", self.seed, pass_)).shuffle(order)
        return order


def read_course(
    config: AnswersConfig, task: TaskConfig, encoder: AnswerTokenizer, *, seed: int, context: int
) -> AnswerCourse:
    """Reads and checks the rows that are trained beside the steps of a run, as `read_demonstrations` does."""
    rows = _Reader(config, task, encoder, context).read(config.path)
    return AnswerCourse(rows=rows, seed=seed, rows_per_step=config.rows_per_step)


def unanswered(course: AnswerCourse, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yields a sentence if no prompt of those looked at is the question of a given answer, which is then compared with no rollout."""
    if not {prompt.tokens for prompt in prompts} & {row.prompt for row in course.rows}:
        yield (
            f"none of the first {len(prompts)} prompts of the task has an answer in demonstrations.path, and a given answer is trained only beside rollouts "
            "of its own question (its prompt must have the same tokens); check the rows, or use algo.name = chord, which needs no such match"
        )


def read_demonstrations(
    config: WarmStartConfig, task: TaskConfig, encoder: AnswerTokenizer, *, seed: int, context: int
) -> Demonstrations:
    """Reads and checks all rows. `task`: how questions are shown to the model; `context`: the most tokens of a row.

    Raises ConfigError with the place and the remedy if a row cannot be trained."""
    reader = _Reader(config, task, encoder, context)
    rows = reader.read(config.path)
    if config.held_out_path:
        apart = reader.read(config.held_out_path)
        chosen = random.Random(seed_from("warm start", "held out")).sample(apart, min(config.held_out, len(apart)))
    elif config.held_out < len(rows):
        chosen = random.Random(seed_from("warm start", "held out")).sample(rows, config.held_out)
    else:
        raise ConfigError(
            f"warm_start.held_out = {config.held_out} keeps back all of the {len(rows)} rows of {config.path}; lower it, or name other rows in "
            "warm_start.held_out_path"
        )
    asked = {one.prompt for one in chosen}
    trained = [row for row in rows if row.prompt not in asked]
    if not trained:
        raise ConfigError(
            f"all rows of {config.path} have the question of a held-out row, so none is left to be trained; lower warm_start.held_out"
        )
    sizes = {"epochs": config.epochs, "rows_per_step": config.rows_per_step}
    return Demonstrations(trained=trained, held_out=chosen, seed=seed, **sizes)


@dataclass(frozen=True)
class _Reader:
    config: WarmStartConfig | AnswersConfig
    task: TaskConfig
    encoder: AnswerTokenizer
    context: int

    @property
    def section(self) -> str:
        return "warm_start" if isinstance(self.config, WarmStartConfig) else "demonstrations"

    @property
    def rejected(self) -> str:
        """The column with the worse answers; empty if there are none."""
        return self.config.rejected if isinstance(self.config, WarmStartConfig) and self.config.paired else ""

    def read(self, path: str) -> list[Demonstration]:
        if self.encoder.endings.written is None:
            raise ConfigError(
                f"the model's files name no token that ends an answer, so {self.section} would teach the model answers without an end; add eos_token_id to "
                "its generation_config.json"
            )
        kind = kind_of(path) if self.config.kind == "auto" else self.config.kind
        with _named_here(self.section):
            raw = read_rows("jsonl" if kind == "reasoning_gym" else kind, path)
        if not raw:
            raise ConfigError(f"{path} holds no rows; {self.section} needs questions with answers")
        maker = PromptMaker(self.task, self.encoder)
        found = []
        for number, row in enumerate(raw, 1):
            with about(f"{path}, row {number}:"):
                found.append(self._demonstration(row, f"{self.section}/{number - 1}", maker))
        return found

    def _demonstration(self, row: dict[str, Any], name: str, maker: PromptMaker) -> Demonstration:
        config = self.config
        for setting, column in (("prompt", config.prompt), ("answer", config.answer), ("rejected", self.rejected)):
            if column and column not in row:
                known = ", ".join(map(str, row)) or "none"
                raise ConfigError(
                    f"there is no column {column} ({self.section}.{setting}){nearest(column, row)}; its columns are: {known}"
                )
        if isinstance(config, WarmStartConfig) and not config.paired and config.rejected and config.rejected in row:
            raise ConfigError(
                f'its column {config.rejected} holds a worse answer, which warm_start.loss = ce does not read; set warm_start.loss = "dpo" or another loss of '
                'pairs, or warm_start.rejected = "" to train the answers alone'
            )
        if isinstance(config, AnswersConfig) and config.rejected and config.rejected in row:
            raise ConfigError(
                f"its column {config.rejected} holds a worse answer, and demonstrations are learned from one by one; set demonstrations.rejected = "
                '"" to train the answers alone, or train the pairs before the run, with warm_start.loss = "dpo"'
            )
        columns = plain_row(row, "it")
        with about(f"the prompt in column {config.prompt}"):
            question = prompt_of(columns[config.prompt], self.task)
        if config.answer:
            answer = columns[config.answer]
        else:
            question, answer = _last_message(question, config.prompt, self.section)
        maker.check(columns)
        prompt = maker.make(name, question, columns)
        one = self._answered(prompt.tokens, answer)
        if not self.rejected:
            return one
        with about(f"in column {self.rejected},"):
            worse = self._answered(prompt.tokens, self._worse(columns[self.rejected], question))
        if one.answer == worse.answer:
            raise ConfigError("its two answers are equal, so neither is to be preferred; remove such rows")
        return Preference(one.prompt, one.answer, rejected=worse.answer)

    def _worse(self, given: Any, question: str | list[Message]) -> Any:
        """Returns the rejected answer, which data sets keep as a text, or behind the question once more."""
        if not isinstance(given, list):
            return given
        with about("the conversation"):
            said = prompt_of(given, self.task)
        if len(said) < 2 or not isinstance(said[-1], dict) or said[-1]["role"] != "assistant":
            raise ConfigError(
                "the conversation does not end with the assistant's answer to a question; write that answer as a text, or remove such rows"
            )
        asked, answer = _last_message(said, self.rejected, self.section)
        if asked != ([{"role": "user", "content": question}] if isinstance(question, str) else question):
            raise ConfigError(
                "its conversation asks something else than that of the preferred answer; remove such rows"
            )
        return answer

    def _answered(self, prompt: tuple[int, ...], answer: Any) -> Demonstration:
        _check_text(answer)
        if is_opened_by(self.encoder.written(prompt[-_LAST:])):
            _check_thought(answer)
        one = Demonstration(prompt, self.encoder.encode_completion(answer, True))
        if not self.encoder.endings.all.isdisjoint(one.answer[:-1]):
            raise ConfigError(
                "its answer holds a token that ends answers, which is added behind it anyway; remove it from the text"
            )
        unknown = self.encoder.unknown
        if (
            unknown is not None
            and unknown in one.answer[:-1]
            and (text := self.encoder.written((unknown,))) not in answer
        ):
            raise ConfigError(
                f"its answer holds a character that the model's tokenizer has no token for, and would teach the model to write {text}; remove such rows"
            )
        if control := sorted(self.encoder.specials_in([{"role": "assistant", "content": answer}])):
            raise ConfigError(
                f"its answer holds {control[0]}, by which the chat template begins or ends a turn, and would teach the model to write it; remove it from "
                'the text, or set task.specials_in_text = "allow" if that is meant'
            )
        if len(one.tokens) > self.context:
            raise ConfigError(
                f"it has {len(one.tokens):,} tokens with its answer, and engine.context_length = {self.context}; raise that, or remove such rows"
            )
        return one


def _check_text(answer: Any) -> None:
    if not isinstance(answer, str) or not answer.strip():
        raise ConfigError("its answer is empty, or no text; remove such rows")


def _check_thought(answer: str) -> None:
    """Raises ConfigError for an answer that the model would learn to write within its thinking, which the chat template has begun."""
    if answer.lstrip().startswith(OPENING):
        raise ConfigError(
            f"its answer begins with {OPENING}, which the chat template has written before it already; remove it from the answers"
        )
    if CLOSING not in answer:
        raise ConfigError(
            f"the chat template begins the model's thinking ({OPENING}), and its answer does not end it; write the thought and {CLOSING} before the answer, or "
            "turn thinking off, with task.template = { enable_thinking = false } where the template knows that"
        )


def _last_message(question: str | list[Message], column: str, section: str) -> tuple[list[Message], Any]:
    """Splits a conversation before its last message."""
    if isinstance(question, str) or len(question) < 2 or question[-1]["role"] != "assistant":
        raise ConfigError(
            f'the column {column} holds no conversation that ends with the assistant\'s answer, which {section}.answer = "" asks for; name the column '
            f"with answers in {section}.answer, or remove such rows"
        )
    if question[-1].get("tool_calls"):
        raise ConfigError(
            f"its last message calls a tool, and {section} trains answers that are text; remove such rows"
        )
    if thoughts := [name for name in _THOUGHTS if question[-1].get(name)]:
        raise ConfigError(
            f"its last message has {thoughts[0]} beside its text, and the text alone would be trained; write it into the text as the model does, as in "
            f"{OPENING}...{CLOSING}, or remove {thoughts[0]}"
        )
    if question[-1].get("weight") == 0 or question[-1].get("train") is False:
        raise ConfigError(
            "its last message says that it is not to be trained (weight = 0, or train = false), and it is the one that would be; remove such rows"
        )
    return question[:-1], question[-1]["content"]


@contextmanager
def _named_here(section: str) -> Iterator[None]:
    """Errors in files of rows name settings of a task; these rows have the same settings in another section."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(re.sub(r"(?<![\w/.])task\.(kind|path)\b", rf"{section}.\1", str(error))) from None
