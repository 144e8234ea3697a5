"""One request for a turn, whatever its format: the fields that its run decides, the turn as a whole or while it is sampled, and the
errors that end a rollout.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace
from starlette.requests import Request as HttpRequest

from headrace.core.chat.messages import TemplateUse, Tool, with_effort
from headrace.core.chat.token_text import TokenPlaces
from headrace.core.chat.tool_calls import CallFormat
from headrace.core.errors import ConfigError, RolloutOver
from headrace.core.types import Constraint
from headrace.episodes.environments.config import EnvironmentConfig
from headrace.episodes.environments.conversation import TurnEncoder, TurnStream
from headrace.episodes.environments.gateway.history_trees import (
    NUMBER,
    GatewayRollout,
    Said,
    Speaker,
    TextEncoder,
    TreeReply,
)
from headrace.models.chat import LONG, off_loop
from headrace.models.grammars import check_constraint
from headrace.web.bodies import Chat, Drawing
from headrace.web.constraints import forces, of_answer
from headrace.web.errors import Refused
from headrace.web.formats.followed_turn import TurnCall, TurnPiece, WholeTurn
from headrace.web.limits import ServerLimits
from headrace.web.request_fields import continues_last, refuse_unserved, stops
from headrace.web.sending import attempt_of, while_there

Ask = Callable[[TurnStream | None], Coroutine[Any, Any, TreeReply]]
"""Samples the turn. It is followed through the stream, if there is one."""

MODEL = "policy"
"""The name of the model in answers to requests that name none. Requests may use any name: there is one model."""
ROLE = f"{MODEL}/"
"""The begin of names that say in which role the model is asked."""
LONGEST_ROLE = 64

_OF_THE_RUN: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "send as many requests, at once if you like"),
    "seed": (
        (None,),
        "leave it out: the run seeds each turn, and with one seed all rollouts of a prompt would be equal",
    ),
    "stop_token_ids": ((None, []), "leave it out, and set rollout.stop to strings"),
    "ignore_eos": ((False,), "leave it out: a turn ends where the model ends it"),
    "top_logprobs": ((None, 0), "leave it out: there are log-probs of the sampled tokens only"),
    "echo": ((None, False), "leave it out: an answer has only what was sampled"),
    "logit_bias": (
        (None, {}),
        "leave it out: with it tokens are drawn from another distribution than the one that is trained",
    ),
}
"""Fields of requests -> the values with which they ask for nothing, and the remedy for others."""


class AnswerEncoder(Protocol):
    """The part of `models.chat.ChatEncoder` that answers to agents use."""

    @property
    def variables(self) -> frozenset[str]: ...

    @property
    def call_format(self) -> CallFormat: ...

    @property
    def special(self) -> Mapping[int, str]: ...

    def end_tokens(self) -> frozenset[int]: ...

    def written(self, tokens: Sequence[int]) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...

    def places(self) -> TokenPlaces: ...


class GatewayRules(Protocol):
    """The limits and settings that hold for the requests of all rollouts."""

    limits: ServerLimits
    encoder: AnswerEncoder
    stop: tuple[str, ...]
    """The strings that end a completion, in all requests."""
    sampling: Mapping[str, object]
    """The run's values of the fields that requests cannot choose, by their names."""
    session_header: str
    """The header that tells agents of one role apart; empty if none does."""

    def remark(self, name: str, sentence: str) -> None:
        """Notes that a field of a request has no effect. The first sentence for each name is kept."""


def speaker_of(request: HttpRequest, rollout: GatewayRollout, rules: GatewayRules, model: str | None) -> Speaker:
    """Returns the agent that asks. Raises Refused for a role without a name."""
    role = model.removeprefix(ROLE) if model and model.startswith(ROLE) else ""
    if (model == ROLE) or not role.isprintable() or len(role) > LONGEST_ROLE:
        message = f"the model {model!r:.80} names no role; write {ROLE} and a name of at most {LONGEST_ROLE} characters"
        raise Refused(400, message)
    return rollout.speaker(role, request.headers.get(rules.session_header, "") if rules.session_header else "")


def check_drawing(body: Drawing, rules: GatewayRules) -> None:
    """Raises Refused for fields that would change what is sampled, and that the run does not have."""
    for name, (neutral, remedy) in _OF_THE_RUN.items():
        if hasattr(body, name) and getattr(body, name) not in neutral:
            raise Refused(400, f"{name} is not served; {remedy}", "unsupported_parameter")
    if getattr(body, "skip_special_tokens", None) is not None:
        rules.remark(
            "skip_special_tokens",
            f"the agent asks for skip_special_tokens = {body.skip_special_tokens}; replies show special tokens as reward.special_tokens says",
        )
    refuse_unserved(body)
    check_sampling(
        rules, stops(body), {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    )


def check_sampling(rules: GatewayRules, stop: Sequence[str], fields: Mapping[str, object]) -> None:
    """Raises Refused for a stop string that the run does not have. `fields`: those that the run decides, with the values that the request
    asks for."""
    if other := [text for text in stop if text not in rules.stop]:
        raise Refused(
            400,
            f"stop = {other[0]!r} is not a stop string of the run; set rollout.stop = [{other[0]!r}], or leave it out",
            "unsupported_parameter",
        )
    for name, value in fields.items():
        if value is not None:
            _replaced(rules, name, value)


def _replaced(rules: GatewayRules, name: str, value: object) -> None:
    own = rules.sampling.get(name)
    if value != own:
        rules.remark(
            name, f"the agent asks for {name} = {value}; all its turns are sampled with rollout.{name} = {own}"
        )


async def constraint_of(
    rules: GatewayRules,
    tools: Sequence[Tool] = (),
    *,
    response_format: Mapping[str, Any] | None = None,
    outputs: Mapping[str, Any] | None = None,
    tool_choice: Any = None,
    several: bool | None = None,
) -> Constraint | None:
    """Returns the language that an answer is held to: what it leaves is recorded, and the turn trains over it. Compiles in a thread. Strict
    tools hold an answer to nothing unless a call is asked for: frameworks declare them by default, and answer arguments that do not fit, so
    that the model can learn from the answer. Raises Refused."""
    note_strict(rules, () if forces(tool_choice) else tools)
    lenient = [replace(tool, function=replace(tool.function, strict=None)) for tool in tools]
    make = partial(
        of_answer,
        rules.encoder,
        check_constraint,
        response_format=response_format,
        outputs=outputs,
        tools=lenient,
        tool_choice=tool_choice,
        several=several,
    )
    return await off_loop(LONG, make) if response_format or outputs or tools or tool_choice else None


def note_strict(rules: GatewayRules, tools: Sequence[Tool]) -> None:
    """Notes that arguments of tools are what the model writes."""
    if any(tool.function.strict for tool in tools):
        message = (
            "the agent declares strict tools; their arguments are what the model writes, and need not fit the schema"
        )
        rules.remark("strict", message)


def asked_of(body: Chat, rules: GatewayRules) -> TemplateUse:
    """Returns what a request asks of the template. An effort that the template does not know is noted: frameworks name one by default."""
    given = body.chat_template_kwargs or {}
    arguments = with_effort(given, body.reasoning_effort, rules.encoder.variables)
    if arguments is None:
        message = (
            f"the agent asks for reasoning_effort = {body.reasoning_effort}, which the chat template does not know"
        )
        rules.remark("reasoning_effort", message)
    return TemplateUse(arguments=given if arguments is None else arguments, continues=continues_last(body))


def most_tokens(name: str, value: int | None) -> int:
    """Returns the most tokens that a request asks for, 0 if it leaves that open. Raises Refused for none at all."""
    if value == 0:
        raise Refused(400, f"{name} = 0 asks for nothing; leave it out", "unsupported_parameter")
    return value or 0


def is_cut(answer: TreeReply) -> bool:
    """Whether the turn ended at a limit, and not where the model or a stop string ended it."""
    return bool(answer.reply.over) or answer.reply.stop == "length"


def turn_of(answer: TreeReply) -> WholeTurn:
    """The answer to a request as formats read it."""
    reply, done = answer.reply, answer.completion
    return WholeTurn(
        text=reply.text,
        calls=[TurnCall(call.id, call.name, call.arguments) for call in reply.calls if not call.problem],
        cut=is_cut(answer),
        prompt_tokens=answer.prompt_tokens,
        count=reply.tokens,
        tokens=done.tokens if done else (),
        logprobs=done.logprobs if done else (),
    )


class TurnRequest:
    """Protocol `FollowedTurn`."""

    def __init__(self, speaker: Speaker, ask: Ask) -> None:
        self._speaker, self._ask, self._stream = speaker, ask, TurnStream()
        self._answer: TreeReply | None = None

    async def whole(self, request: HttpRequest) -> TreeReply | None:
        """Returns the turn; None if the client has left. Raises Refused."""
        speaker, number = self._speaker, request.scope[NUMBER]
        rollout, alone = speaker.rollout, not speaker.rollout.asking
        digest, again = attempt_of(request)
        if again and (lost := rollout.said_before(number, speaker, digest)):
            return lost
        answer = await while_there(request, self.sampled())
        if answer and digest and alone:
            rollout.said_last = Said(number, speaker, digest, answer)
        return answer

    async def pieces(self) -> AsyncGenerator[TurnPiece, None]:
        """Yields the turn while it is sampled. Raises Refused, before the first piece if nothing was sampled."""
        sampling = asyncio.ensure_future(self.sampled(self._stream))
        sampling.add_done_callback(lambda _: self._stream.changed.set())
        try:
            while await self._stream.changed.wait() and not sampling.done():
                self._stream.changed.clear()
                yield self._stream.new()
            self._answer = await sampling
            if self._answer.completion is not None:
                yield self._stream.rest(self._answer.completion)
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)

    @property
    def answer(self) -> TreeReply:
        """The turn, once there are no more pieces."""
        assert self._answer is not None
        return self._answer

    @property
    def turn(self) -> WholeTurn:
        return turn_of(self.answer)

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the turn, once there is a piece."""
        return self._stream.prompt_tokens

    async def sampled(self, stream: TurnStream | None = None) -> TreeReply:
        """Returns the turn. Raises Refused."""
        rollout = self._speaker.rollout
        try:
            answer = await rollout.do(self._ask(stream))
        except ConfigError as error:
            raise rollout.refused(Refused(400, str(error))) from None
        except Refused as refused:
            raise rollout.refused(refused) from None
        except RolloutOver as error:
            rollout.over.set()
            raise rollout.refused(Refused(400, f"the rollout is over: {error}", "rollout_over")) from None
        except Exception as error:
            rollout.broken = rollout.broken or error
            rollout.over.set()
            message = "the rollout is over: the engine has failed"
            raise rollout.refused(Refused(503, message, "rollout_over")) from None
        self._speaker.answered(answer)
        return answer


# --- All that a run tells an environment whose player asks the gateway for its turns.


class GatewayEncoder(TurnEncoder, TextEncoder, AnswerEncoder, Protocol):
    """The part of `models.chat.ChatEncoder` that the gateway uses."""

    directory: Path


@dataclass(frozen=True, kw_only=True)
class OpenedWith:
    config: EnvironmentConfig
    encoder: GatewayEncoder
    system: str = ""
    """The system message of conversations that have none."""
    sampling: Mapping[str, object] = field(default_factory=dict)
    """The run's temperature, top_p, top_k and min_p."""
    stop: Sequence[str] = ()
    """Its stop strings."""
    alone: bool = True
    """Whether nothing else gives rewards."""
    log: Path | None = None
    """Receives what players print, or lines on what they post. The file with the address of the run is written beside it."""
    seeds: bool = False
    """Whether the prompts are seeds, from which players make their problems."""
    held_out: int = 0
    """Prompts that are kept for evaluation."""
    name: str = ""
    """The run's."""
    steps: int = 0
    group_size: int = 1
    groups_per_step: int = 1
    longest: int = 0
    """The most tokens of a rollout."""
