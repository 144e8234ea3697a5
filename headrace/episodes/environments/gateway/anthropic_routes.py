"""`/v1/messages` of one rollout."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.core.chat.messages import TemplateUse
from headrace.episodes.environments.gateway.chat_routes import schema
from headrace.episodes.environments.gateway.gateway_rollout import GatewayRollout
from headrace.episodes.environments.gateway.turn_request import (
    GatewayRules,
    TurnRequest,
    check_sampling,
    constraint_of,
    speaker_of,
    turn_of,
)
from headrace.web.formats.anthropic_messages import (
    Messages,
    choice_of,
    events_of,
    format_of,
    message_of,
    messages_of,
    parallel_of,
    refuse_unserved_messages,
    tools_of,
    unshown,
)
from headrace.web.request_fields import note_ignored
from headrace.web.sending import GONE, Events, json_response, read_body


async def messages(request: HttpRequest, rollout: GatewayRollout, rules: GatewayRules) -> Response:
    body = await read_body(request, Messages, rules.limits)
    refuse_unserved_messages(body)
    check_sampling(
        rules, body.stop_sequences or (), {name: getattr(body, name) for name in ("temperature", "top_p", "top_k")}
    )
    speaker = speaker_of(request, rollout, rules, body.model)
    talk, offered = messages_of(body), tools_of(body)
    for name in unshown(body):
        note_ignored(request.scope, name)
    constraint = await constraint_of(
        rules, offered, response_format=format_of(body), tool_choice=choice_of(body), several=parallel_of(body)
    )
    tools = [schema(one) for one in offered]
    asked = TemplateUse(continues=body.messages[-1].role == "assistant")
    turn = TurnRequest(
        speaker,
        lambda stream: speaker.chats.ask(talk, tools, body.max_tokens, stream, asked=asked, constraint=constraint),
    )
    if body.stream:
        return Events(events_of(turn, body.model), named=True)
    answer = await turn.whole(request)
    return GONE if answer is None else json_response(message_of(turn_of(answer), body.model))
