"""The routes that environments of Atropos sample from: `/generate` (tokens in, tokens out, as atroposlib's client of vLLM asks for it),
OpenAI's chats and completions, and `/health`. A request with `n` is a rollout for each completion."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.core.chat.messages import for_template
from headrace.episodes.environments.atropos.open_rollouts import OpenRollout, OpenRollouts, digest_of
from headrace.episodes.environments.atropos.trajectory_bodies import TokensWanted
from headrace.episodes.environments.gateway.chat_answers import ChatAnswer
from headrace.episodes.environments.gateway.chat_routes import models_body, schema
from headrace.episodes.environments.gateway.chat_tree import TreeReply
from headrace.episodes.environments.gateway.completions_routes import TextAnswer, prompt_of
from headrace.episodes.environments.gateway.gateway_rollout import GatewayRollout, Speaker
from headrace.episodes.environments.gateway.turn_request import (
    MODEL,
    GatewayRules,
    TurnRequest,
    asked_of,
    check_drawing,
    constraint_of,
    is_cut,
    most_tokens,
)
from headrace.web.bodies import Chat, Completions, Drawing
from headrace.web.errors import Refused
from headrace.web.request_fields import offered_tools
from headrace.web.sending import GONE, json_response, read_body, while_there

Ask = Callable[[Speaker], Coroutine[Any, Any, TreeReply]]
"""Samples a turn of a rollout."""


class InferenceRoutes:
    def __init__(self, rollouts: OpenRollouts, rules: GatewayRules) -> None:
        self._rollouts, self._rules = rollouts, rules

    async def health(self, request: HttpRequest) -> Response:
        return json_response({})

    async def models(self, request: HttpRequest) -> Response:
        return json_response(models_body())

    async def generate(self, request: HttpRequest) -> Response:
        body = await read_body(request, TokensWanted, self._rules.limits)
        count = self._count(body)
        if body.logprobs or body.prompt_logprobs or body.stream:
            raise Refused(400, "logprobs = 0 is served, and no prompt_logprobs, and no stream", "unsupported_parameter")
        prompt, most = tuple(body.prompt.prompt_token_ids), most_tokens("max_tokens", body.max_tokens)
        known = self._of_tokens(prompt)
        answers = await self._sampled(request, known, digest_of(prompt), count, lambda one: one.texts.ask(prompt, most))
        if answers is None:
            return GONE
        done = [one.completion for one in answers]
        return json_response(
            {
                "text": [one.reply.text for one in answers],
                "prompt": self._rules.encoder.written(prompt),
                "finish_reasons": ["length" if is_cut(one) else "stop" for one in answers],
                "logprobs": [
                    [[{str(token): logprob}] for token, logprob in zip(one.tokens, one.logprobs, strict=True)]
                    if one
                    else []
                    for one in done
                ],
            }
        )

    async def chat(self, request: HttpRequest) -> Response:
        body = await read_body(request, Chat, self._rules.limits)
        count = self._count(body)
        _refuse_stream(body.stream)
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        most, tools = most_tokens("max_tokens", asked), offered_tools(body)
        shown = [schema(one) for one in tools]
        constraint = await constraint_of(
            self._rules,
            tools,
            response_format=body.response_format,
            outputs=body.structured_outputs,
            tool_choice=body.tool_choice,
            several=body.parallel_tool_calls,
        )
        known = [one for one in self._rollouts.playing() if one.served.speaker().chats.continues(body.messages)]
        first = blake2b(msgspec.json.encode([for_template(body.messages), shown]), digest_size=16).digest()
        use = asked_of(body, self._rules)
        answers = await self._sampled(
            request,
            known,
            first,
            count,
            lambda one: one.chats.ask(body.messages, shown, most, asked=use, constraint=constraint),
        )
        made = ChatAnswer(
            model=body.model or MODEL, logprobs=bool(body.logprobs), token_bytes=self._rules.encoder.token_bytes
        )
        return GONE if answers is None else json_response(_joined([made.whole(one) for one in answers]))

    async def completions(self, request: HttpRequest) -> Response:
        body = await read_body(request, Completions, self._rules.limits)
        count = self._count(body)
        _refuse_stream(body.stream)
        prompt, most = prompt_of(body), most_tokens("max_tokens", body.max_tokens)
        known = [one for one in self._rollouts.playing() if one.served.speaker().texts.continues(prompt)]
        first = blake2b(msgspec.json.encode(prompt), digest_size=16).digest()
        constraint = await constraint_of(
            self._rules, response_format=body.response_format, outputs=body.structured_outputs
        )
        answers = await self._sampled(
            request, known, first, count, lambda one: one.texts.ask(prompt, most, constraint=constraint)
        )
        made = TextAnswer(
            model=body.model or MODEL, logprobs=body.logprobs is not None, token_bytes=self._rules.encoder.token_bytes
        )
        return GONE if answers is None else json_response(_joined([made.whole(one) for one in answers]))

    def _count(self, body: Drawing) -> int:
        """Returns the number of completions that are asked for. Raises Refused for what the run does not have."""
        count, body.n = body.n, 1
        check_drawing(body, self._rules)
        return count

    def _of_tokens(self, prompt: tuple[int, ...]) -> list[OpenRollout]:
        """Returns the rollouts that the prompt continues: those with the most of its tokens."""
        known = [one for one in self._rollouts.playing() if one.tokens and prompt[: len(one.tokens)] == one.tokens]
        longest = max((len(one.tokens) for one in known), default=0)
        return [one for one in known if len(one.tokens) == longest < len(prompt)]

    async def _sampled(
        self,
        request: HttpRequest,
        known: Sequence[OpenRollout],
        first: bytes,
        count: int,
        ask: Ask,
    ) -> Sequence[TreeReply] | None:
        """Samples the turns of a request; None if the client has left. `known`: the rollouts that it may continue; `first`: the digest
        of the request, if it continues none."""
        if known and count > 1:
            said = f"n = {count} completions of a later turn would be alternatives, of which one can be posted"
            raise Refused(400, f"{said}: send a request for each rollout")
        idle = [one for one in known if not one.busy][:1]
        if known and not idle:
            raise Refused(409, "the turn that this request continues is being continued by another request")
        for one in idle:
            one.busy = True
        try:
            return await while_there(request, self._turns(idle, first, count, ask))
        finally:
            for one in idle:
                one.busy = False

    async def _turns(
        self,
        found: Sequence[OpenRollout],
        first: bytes,
        count: int,
        ask: Ask,
    ) -> list[TreeReply]:
        rollouts = found or await self._rollouts.take(first, count)
        try:
            ended = await asyncio.gather(*(_turn(one.served, ask) for one in rollouts), return_exceptions=True)
        except asyncio.CancelledError:
            for one in rollouts:
                one.fail("agent_failed", "the environment closed the connection before its turn was sampled")
            raise
        answers: list[TreeReply] = []
        for one, turn in zip(rollouts, ended, strict=True):
            if isinstance(turn, BaseException):
                for other in rollouts:
                    other.fail("agent_failed", f"its request was refused: {turn}")
                raise turn
            self._rollouts.extended(one, turn)
            answers.append(turn)
        return answers


async def _turn(served: GatewayRollout, ask: Ask) -> TreeReply:
    speaker = served.speaker()
    return await TurnRequest(speaker, lambda stream: ask(speaker)).sampled()


def _refuse_stream(stream: bool) -> None:
    if stream:
        raise Refused(400, "stream is not served here; leave it out", "unsupported_parameter")


def _joined(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Joins answers with one choice each."""
    first, *_ = answers
    usages = [one["usage"] for one in answers]
    sampled = sum(one["completion_tokens"] for one in usages)
    prompt = usages[0]["prompt_tokens"]
    return first | {
        "choices": [one["choices"][0] | {"index": place} for place, one in enumerate(answers)],
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
    }
