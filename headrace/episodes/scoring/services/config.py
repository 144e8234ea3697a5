"""Settings of scorers behind HTTP. Imports no client."""

from __future__ import annotations

import dataclasses
import os
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator
from pydantic.dataclasses import dataclass

from headrace.core.errors import ConfigError
from headrace.episodes.scoring.extract import Extract, Form
from headrace.settings.extras import EXTRAS, install, is_installed
from headrace.settings.secrets import check_token, read_token
from headrace.settings.strict import LONGEST_NAME, STRICT

LABELS = string.ascii_uppercase
"""Names of the completions that a judge ranks; more cannot be ranked at once."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EndpointConfig:
    """The settings that services and judges share."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=LONGEST_NAME)
    """The name of its reward in journals and reports."""
    url: str
    """The address that is asked (http or https)."""
    weight: float = 1.0
    """The weight in the sum; negative for a penalty."""
    concurrency: int = Field(default=16, gt=0)
    """Requests in progress at once; others wait."""
    timeout: float = Field(default=60.0, gt=0)
    """Seconds for one attempt."""
    retries: int = Field(default=4, ge=0)
    """Attempts after the first, with pauses from half a second on, or the server's `Retry-After`."""
    deadline: float = Field(default=300.0, gt=0)
    """Seconds of a request with all its attempts. Then its rollouts fail (`reward_timeout`)."""
    token_file: str = ""
    """A file, readable by you alone, with the token that is sent as `Authorization: Bearer`."""
    token_env: str = ""
    """An environment variable with that token."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f'url = "{url}" is not an address; write http://host:port/path or https://host/path')
        if parts.username or parts.password:
            raise ValueError(
                "url holds a name or a password, which would stand in journals; use token_file or token_env"
            )
        return url.rstrip("/")

    @model_validator(mode="after")
    def _fits(self) -> EndpointConfig:
        if self.token_file and self.token_env:
            raise ValueError(f"{self.name} has token_file and token_env; keep one")
        if self.deadline < self.timeout:
            raise ValueError(
                f"{self.name}: deadline = {self.deadline:g} ends before one attempt may (timeout = {self.timeout:g}); raise it"
            )
        return self

    @property
    def mark(self) -> dict[str, Any]:
        """The settings that change scores, without those of fetching them."""
        fetching = ("url", "concurrency", "timeout", "retries", "deadline", "token_file", "token_env")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in fetching}

    def token(self) -> str:
        """Raises ConfigError if the token cannot be had."""
        if self.token_file:
            return read_token(Path(self.token_file), f"token_file of {self.name}")
        if not self.token_env:
            return ""
        if not (token := os.environ.get(self.token_env, "")):
            raise ConfigError(
                f"token_env of {self.name} names {self.token_env}, which is not set; export it, or use token_file"
            )
        return check_token(token, f"token_env of {self.name} ({self.token_env})")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ServiceConfig(EndpointConfig):
    """An HTTP service that gives rewards."""

    extract: Extract = ""
    """The part of a completion that it receives; see `reward.functions`."""
    compares: bool = False
    """Whether it compares two completions; the reward is the share of comparisons won."""
    segments: str = ""
    """The text that ends a step, such as `"\\n\\n"`, for a process reward model, which returns a score for each step.
    Empty: one for each completion."""
    form: Form = "sum"
    """segments: the reward is the sum of the steps' scores, or the smallest."""

    @model_validator(mode="after")
    def _nothing_idle(self) -> ServiceConfig:
        if problem := next(step_problems(self.name, self), ""):
            raise ValueError(problem)
        return self


class _Stepwise(Protocol):
    @property
    def segments(self) -> str: ...
    @property
    def form(self) -> Form: ...
    @property
    def compares(self) -> bool: ...
    @property
    def extract(self) -> Extract: ...


def step_problems(name: str, endpoint: _Stepwise) -> Iterator[str]:
    """Returns a sentence with its remedy for settings of a function or service that cannot work together."""
    if endpoint.segments and (endpoint.compares or endpoint.extract):
        other = "compares" if endpoint.compares else "extract"
        yield f"{name}: segments scores the steps of a whole completion, and {other} has no meaning with it; remove one"
    if endpoint.form != "sum" and not endpoint.segments:
        yield f'{name}: form = "{endpoint.form}" needs segments, the text that ends a step; set it, or remove form'


@dataclass(frozen=True, kw_only=True, config=STRICT)
class JudgeConfig(EndpointConfig):
    """A language model that judges, behind a server with OpenAI's chat API (`url` ends before `/chat/completions`)."""

    model: str
    """The model's name on the server."""
    criterion: str = Field(min_length=1)
    """A few sentences that describe a good completion."""
    mode: Literal["score", "rank", "compare"] = "score"
    """Judges each completion by itself, orders a group, or compares two at a time (docs/scoring.md)."""
    low: float = 0.0
    """score: the lowest number."""
    high: float = 10.0
    """score: the highest number."""
    max_tokens: int = Field(default=512, gt=0)
    """Tokens that the judge may write; one that thinks needs thousands."""
    temperature: float = Field(default=0.0, ge=0)
    """The judge's sampling temperature."""
    extract: Extract = ""
    """The part of a completion that the judge reads; see `reward.functions`."""

    @model_validator(mode="after")
    def _a_scale(self) -> JudgeConfig:
        if self.low >= self.high:
            raise ValueError(f"{self.name}: low = {self.low:g} is not below high = {self.high:g}")
        if self.mode != "score" and (self.low, self.high) != (0.0, 10.0):
            raise ValueError(f'{self.name}: low and high have no meaning with mode = "{self.mode}"; remove them')
        return self


def check_client(names: list[str]) -> None:
    """Raises ConfigError if a scorer is behind HTTP and the client is not installed."""
    if names and not is_installed(EXTRAS["remote"].module):
        raise ConfigError(f"{names[0]} gives rewards over HTTP, which needs a client: {install('remote')}")
