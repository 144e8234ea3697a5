"""`/v1/messages` of one rollout."""

from __future__ import annotations

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.environments.gateway.anthropic_bodies import (
    Messages,
    events_of,
    message_of,
    messages_of,
    refuse_unserved_messages,
    tools_of,
)
from headrace.environments.gateway.chat_routes import GatewayRules, check_sampling, sampled
from headrace.environments.gateway.gateway_rollout import GatewayRollout
from headrace.web.sending import GONE, json_response, read_body, while_there


async def messages(request: HttpRequest, rollout: GatewayRollout, rules: GatewayRules) -> Response:
    body = await read_body(request, Messages, rules.limits)
    refuse_unserved_messages(body)
    check_sampling(
        rules, body.stop_sequences or (), {name: getattr(body, name) for name in ("temperature", "top_p", "top_k")}
    )
    work = sampled(rollout, messages_of(body), tools_of(body), body.max_tokens)
    answer = await while_there(request, work)
    if answer is None:
        return GONE
    message = message_of(answer, body.model)
    if not body.stream:
        return json_response(message)
    events = (f"event: {event['type']}\ndata: ".encode() + msgspec.json.encode(event) for event in events_of(message))
    return Response(b"\n\n".join([*events, b""]), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
