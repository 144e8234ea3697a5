"""`/v1/chat/completions` and `/v1/models` of one rollout."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.core.chat.messages import Tool
from headrace.episodes.environments.gateway.chat_answers import ChatAnswer
from headrace.episodes.environments.gateway.gateway_rollout import GatewayRollout
from headrace.episodes.environments.gateway.turn_request import (
    MODEL,
    GatewayRules,
    TurnRequest,
    asked_of,
    check_drawing,
    constraint_of,
    most_tokens,
    speaker_of,
)
from headrace.web.bodies import Chat
from headrace.web.request_fields import offered_tools
from headrace.web.sending import GONE, Events, json_response, read_body

STARTED = int(time.time())


async def models(request: HttpRequest, rollout: GatewayRollout, rules: GatewayRules) -> Response:
    return json_response(models_body())


async def model(request: HttpRequest, rollout: GatewayRollout, rules: GatewayRules) -> Response:
    """The model under the name that the client gives it."""
    name = request.scope["path"].partition("/models/")[2]
    return json_response(_model(name or MODEL))


def models_body() -> dict[str, Any]:
    return {"object": "list", "data": [_model(MODEL)]}


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": STARTED, "owned_by": "headrace"}


async def chat(request: HttpRequest, rollout: GatewayRollout, rules: GatewayRules) -> Response:
    body = await read_body(request, Chat, rules.limits)
    check_drawing(body, rules)
    speaker = speaker_of(request, rollout, rules, body.model)
    most = most_tokens(
        "max_tokens", body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    )
    tools = offered_tools(body)
    constraint = await constraint_of(
        rules,
        tools,
        response_format=body.response_format,
        outputs=body.structured_outputs,
        tool_choice=body.tool_choice,
        several=body.parallel_tool_calls,
    )
    shown = [schema(one) for one in tools]
    asked = asked_of(body, rules)
    turn = TurnRequest(
        speaker,
        lambda stream: speaker.chats.ask(body.messages, shown, most, stream, asked=asked, constraint=constraint),
    )
    made = ChatAnswer(model=body.model or MODEL, logprobs=bool(body.logprobs), token_bytes=rules.encoder.token_bytes)
    if body.stream:
        return Events(made.events(turn, body.stream_options is not None and body.stream_options.include_usage))
    answer = await turn.whole(request)
    return GONE if answer is None else json_response(made.whole(answer))


def schema(tool: Tool) -> dict[str, Any]:
    """The tool as a chat template is given it, without the fields that are not set."""
    function = tool.function
    rest = {"description": function.description, "parameters": function.parameters}
    return {
        "type": "function",
        "function": {"name": function.name, **{name: value for name, value in rest.items() if value is not None}},
    }
