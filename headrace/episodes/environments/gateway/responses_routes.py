"""`/v1/responses` of one rollout, whole or as a stream of events."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.episodes.environments.gateway.chat_routes import schema
from headrace.episodes.environments.gateway.gateway_rollout import GatewayRollout
from headrace.episodes.environments.gateway.turn_request import (
    MODEL,
    GatewayRules,
    TurnRequest,
    check_sampling,
    constraint_of,
    most_tokens,
    speaker_of,
    turn_of,
)
from headrace.web.formats.responses import (
    Responses,
    ResponseWriter,
    asked_of_template,
    format_of_response,
    history_of,
    offered_functions,
    refuse_unserved_responses,
    system_of,
)
from headrace.web.sending import GONE, Events, json_response, read_body


async def responses(request: HttpRequest, rollout: GatewayRollout, rules: GatewayRules) -> Response:
    body = await read_body(request, Responses, rules.limits)
    refuse_unserved_responses(body)
    speaker = speaker_of(request, rollout, rules, body.model)
    check_sampling(rules, (), {"temperature": body.temperature, "top_p": body.top_p})
    most = most_tokens("max_output_tokens", body.max_output_tokens)
    tools = offered_functions(body)
    constraint = await constraint_of(
        rules,
        tools,
        response_format=format_of_response(body),
        tool_choice=body.tool_choice,
        several=body.parallel_tool_calls,
    )
    shown = [schema(one) for one in tools]
    history = history_of(body, rollout.responses)
    asked = asked_of_template(body, rules.encoder.variables)
    given = [*system_of(body), *history]
    turn = TurnRequest(
        speaker, lambda stream: speaker.chats.ask(given, shown, most, stream, asked=asked, constraint=constraint)
    )
    made = ResponseWriter(
        body,
        model=body.model or MODEL,
        sampling=rules.sampling,
        history=history,
        stored=rollout.responses,
        token_bytes=rules.encoder.token_bytes,
    )
    if body.stream:
        return Events(made.events(turn), named=True)
    answer = await turn.whole(request)
    return GONE if answer is None else json_response(made.whole(turn_of(answer)))
