"""Settings of environments."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic.dataclasses import dataclass

from headrace.core.protocols import Limits, Resumes
from headrace.episodes.environments.kinds import (
    ENVIRONMENTS,
    GATEWAY_KINDS,
    LIBRARIES,
    GatewayKind,
    environment_kind,
)
from headrace.settings.strict import STRICT

ToolPlace = Literal["template", "hermes"]

_OF_FUNCTIONS = ("tool_seconds", "tool_characters", "tools")
_OF_LIBRARIES = ("name", "options")
_OF_ALL = ("max_turns", "max_tokens", "seconds", "episode_seconds", "tools")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EnvironmentConfig:
    kind: str = "single_turn"
    """The environment that is made for each rollout, unless `function` is set (docs/settings.md lists the kinds)."""
    name: str = ""
    """The environment among those of its kind, which says what this is (docs/settings.md)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the kind, which says what they are (docs/settings.md)."""
    function: str = ""
    """`path/to/file.py:name` of a function that plays a rollout, `async def play(agent, prompt, **columns)`, or of a
    class with `step(agent, reply)` (docs/environments.md)."""
    command: tuple[str, ...] = ()
    """process: the command that plays a rollout, as words or one text (docs/agents.md)."""
    directory: str = ""
    """process: the command's working directory. Empty: a new one for each rollout, removed at its end."""
    processes: int = Field(default=64, gt=0)
    """process, verifiers: the most processes, or rollouts, at once; others wait."""
    python: str = ""
    """verifiers: an interpreter that has it. Empty: the one that runs headrace."""
    host: str = "127.0.0.1"
    """gateway, atropos: the address at which agents reach this machine; 0.0.0.0: all of its addresses."""
    port: int = Field(default=0, ge=0, lt=1 << 16)
    """gateway, atropos: the port. 0: a free one, another at each start."""
    max_turns: int = Field(default=8, gt=0)
    """The most turns of a rollout; one that asks for more is cut off, with an empty reply and the stop `limit`."""
    max_tokens: int = Field(default=0, ge=0)
    """The most tokens of a rollout: prompt, completions and results of tools. 0: `engine.context_length`."""
    seconds: float = Field(default=600.0, ge=0)
    """Seconds that the function or agent may take between turns, tools included; then the rollout fails
    (`environment_timeout`). 0: no limit."""
    episode_seconds: float = Field(default=0.0, ge=0)
    """Seconds, sampling included, after which a rollout is cut off at its next turn and trained as it is. 0: no
    limit."""
    tool_seconds: float = Field(default=120.0, ge=0)
    """Seconds of one tool call; then the model reads that it took too long. 0: no limit."""
    tool_characters: int = Field(default=8000, gt=0)
    """Characters of a tool's result shown to the model."""
    tools: ToolPlace = "template"
    """The place where tools are described. template: the chat template, in its format of calls. hermes: the system
    message, for templates that know no tools."""
    resumes: Resumes | Literal["auto"] = "auto"
    """How a rollout goes on after a kill (docs/environments.md). auto: exported for a class with `export_state` and
    `restore`, reasoning_gym and textarena; else replayed."""
    workers: int = Field(default=2, gt=0)
    """Processes that play rollouts, each many at once."""
    memory_gib: float = Field(default=4.0, ge=0)
    """GiB that each of these processes, or with kind = process the command and all that it starts, may allocate. 0: no
    limit."""

    @field_validator("kind")
    @classmethod
    def _is_there(cls, kind: str) -> str:
        if kind not in (known := (*ENVIRONMENTS, *LIBRARIES, *GATEWAY_KINDS)):
            raise ValueError(f'environment.kind = "{kind}" is not one of the environments: {", ".join(known)}')
        return kind

    @field_validator("command", mode="before")
    @classmethod
    def _in_words(cls, command: object) -> object:
        if not isinstance(command, str):
            return tuple(command) if isinstance(command, list) else command
        try:
            return tuple(shlex.split(command))
        except ValueError as error:
            raise ValueError(f"environment.command cannot be split into words: {error}; write it as a list") from None

    @field_validator("function")
    @classmethod
    def _names_a_function(cls, function: str) -> str:
        path, _, name = function.rpartition(":")
        if function and not (path.endswith(".py") and name.isidentifier()):
            raise ValueError(
                f'environment.function = "{function}" is not of the form path/to/file.py:name; write it so'
            )
        return function

    @model_validator(mode="after")
    def _fits_its_kind(self) -> EnvironmentConfig:
        if self.function and self.kind != "single_turn":
            raise ValueError(
                f'environment.function and environment.kind = "{self.kind}" are both set; keep one of them'
            )
        if (asks := self.gateway_kind) and asks.needs and not getattr(self, asks.needs[0]):
            raise ValueError(f'environment.kind = "{self.kind}" needs {asks.needs[1]}')
        if self.is_handed_out and not self.seconds:
            raise ValueError(
                "environment.seconds = 0 would wait for ever for an agent that has vanished: set the seconds that an agent may take "
                "between its turns"
            )
        foreign, owner = self._foreign([name for name in _changed(self) if name not in ("kind", "function")])
        if foreign:
            raise ValueError(
                f"environment.{foreign[0]} belongs to {owner}, which is not set; set it (environment.kind names such environments), or "
                f"remove environment.{foreign[0]}"
            )
        return self

    def _foreign(self, changed: Sequence[str]) -> tuple[Sequence[str], str]:
        """The settings that do not belong to this kind, and the kind that they belong to."""
        mine = (*asks.own, *asks.shared, *_OF_ALL) if (asks := self.gateway_kind) else ()
        for kind, other in GATEWAY_KINDS.items():
            if found := [name for name in changed if name in other.own and name not in mine]:
                return found, f'environment.kind = "{kind}"'
        if mine:
            return [name for name in changed if name not in mine], "another kind of environment"
        if self.function:
            return [name for name in changed if name in _OF_LIBRARIES], "an environment of another library"
        if self.kind in LIBRARIES:
            return [name for name in changed if name in _OF_FUNCTIONS], "environment.function"
        return changed, "environment.function, or to an environment of another library"

    @property
    def setting(self) -> str:
        """The setting that chooses the environment, for messages."""
        return "environment.function" if self.function else f'environment.kind = "{self.kind}"'

    @property
    def export_remedy(self) -> str:
        """The remedy where it exports no state."""
        if self.function:
            return "write it as a class with step, export_state and restore (docs/environments.md)"
        return 'set environment.resumes = "exported" if it follows from its row, its seed and the replies alone (docs/libraries.md)'

    @property
    def in_processes(self) -> bool:
        """Whether code in processes beside generation plays the rollouts: a function or a command of the user, an environment of
        another library, or agents elsewhere."""
        return bool(self.function) or self.kind in LIBRARIES or self.asks_gateway

    @property
    def gateway_kind(self) -> GatewayKind | None:
        """The facts about its kind, if what plays the rollouts asks for its turns over HTTP."""
        return GATEWAY_KINDS.get(self.kind)

    @property
    def asks_gateway(self) -> bool:
        return self.kind in GATEWAY_KINDS

    @property
    def is_handed_out(self) -> bool:
        """Whether agents elsewhere play them."""
        return bool(self.gateway_kind and self.gateway_kind.is_handed_out)

    @property
    def draws_problems(self) -> bool:
        """Whether the environment's players draw problems of their own."""
        return bool(self.gateway_kind and self.gateway_kind.draws_problems)

    @property
    def turns(self) -> int:
        """The most turns that a rollout can have."""
        return self.limits.turns

    @property
    def limits(self) -> Limits:
        if self.in_processes:
            return Limits(
                self.max_turns, tokens=self.max_tokens, whole=self.episode_seconds
            )  # its processes keep the limit of seconds
        return environment_kind(self.kind).limits

    @property
    def rewards(self) -> bool:
        """Whether the environment gives rewards of its own, so that no reward function is needed."""
        return self.in_processes or ENVIRONMENTS[self.kind].rewards


def _changed(config: EnvironmentConfig) -> Iterator[str]:
    """Yields the names of the settings that are not as they are when nobody sets them."""
    for field in dataclasses.fields(config):
        unset = getattr(field.default, "default", field.default)  # of a pydantic Field
        if field.name == "options":
            unset = {}
        if getattr(config, field.name) != unset:
            yield field.name


def chat_problems(config: EnvironmentConfig, *, chat: bool, examples: int, seeds: bool, measured: int) -> Iterator[str]:
    """Returns a sentence for each setting of the task that a conversation cannot follow. `seeds`: whether the prompts have no question;
    `measured`: held-out prompts that are measured."""
    if config.draws_problems and not seeds:
        yield (
            f'environment.kind = "{config.kind}" plays problems that the environments draw, so a task would not be used: set task.kind = "seeds"'
        )
    if config.draws_problems and measured:
        yield (
            f'environment.kind = "{config.kind}" plays problems that the environments draw, so that none of eval.prompts = {measured} is held out: set '
            "eval.prompts = 0"
        )
    if seeds and not config.in_processes:
        yield (
            'task.kind = "seeds" has no questions, and the environment asks none: name another task, or an environment that makes its own '
            "first message (environment.kind, or environment.function)"
        )
    if config.in_processes and not chat:
        yield f"{config.setting} talks through the chat template, and task.chat = false: set it to true"
    if config.in_processes and examples:
        yield (
            f"task.examples = {examples} are turns before the prompt, which {config.setting} begins by itself: set it to 0, and let "
            "the environment begin with the messages of solved examples"
        )


def turn_problems(turns: int, *, length: str) -> Iterator[str]:
    """Returns a sentence for each setting that episodes of several turns cannot follow. `length`: the algorithm that divides by the length
    of the longest rollout; empty if none does."""
    if turns > 1 and length:
        yield (
            f"the environment has up to {turns} turns, and {length} divides by rollout.max_tokens, the longest that one turn can be: set "
            "algo.length_constant to the tokens of the longest episode"
        )
