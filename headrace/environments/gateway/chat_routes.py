"""`/v1/chat/completions` and `/v1/models` of one rollout."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.chat.messages import Tool
from headrace.environments.gateway.chat_answers import ChatAnswer, Written
from headrace.environments.gateway.chat_tree import TreeReply
from headrace.environments.gateway.gateway_rollout import GatewayRollout
from headrace.errors import ConfigError, RolloutOver
from headrace.web.bodies import Chat
from headrace.web.errors import Refused
from headrace.web.limits import ServerLimits
from headrace.web.sending import GONE, Events, json_response, read_body, while_there
from headrace.web.unserved import offered_tools, refuse_unserved, stops

MODEL = "policy"
"""The name of the model in `/v1/models`. Requests may use any name: there is one model."""
STARTED = int(time.time())


class GatewayRules(Protocol):
    """The limits and settings that hold for the requests of all rollouts."""

    limits: ServerLimits
    written: Written
    stop: tuple[str, ...]
    """The strings that end a completion, in all requests."""

    def replaced(self, name: str, value: object) -> None:
        """Notes that a field of a request has another value in the run."""


async def models(request: HttpRequest, rollout: GatewayRollout, rules: GatewayRules) -> Response:
    data = [{"id": MODEL, "object": "model", "created": STARTED, "owned_by": "headrace"}]
    return json_response({"object": "list", "data": data})


async def chat(request: HttpRequest, rollout: GatewayRollout, rules: GatewayRules) -> Response:
    body = await read_body(request, Chat, rules.limits)
    _check(body, rules)
    answer = await while_there(request, sampled(rollout, body, [schema(one) for one in offered_tools(body)]))
    if answer is None:
        return GONE
    made = ChatAnswer(answer=answer, model=body.model or MODEL, logprobs=bool(body.logprobs), written=rules.written)
    if body.stream:
        return Events(made.events(body.stream_options is not None and body.stream_options.include_usage))
    return json_response(made.whole())


async def sampled(rollout: GatewayRollout, body: Chat, tools: Sequence[Mapping[str, Any]]) -> TreeReply:
    """Raises Refused for what the template refuses, and for a rollout that is over."""
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    try:
        answer = await rollout.do(rollout.tree.ask(body.messages, tools, most or 0))
    except ConfigError as error:
        raise Refused(400, str(error)) from None
    except RolloutOver as error:
        rollout.over.set()
        raise Refused(400, f"the rollout is over: {error}", "rollout_over") from None
    except Exception as error:
        rollout.broken = rollout.broken or error
        rollout.over.set()
        raise Refused(503, "the rollout is over: the engine has failed", "rollout_over") from None
    rollout.answered += 1
    return answer


def schema(tool: Tool) -> dict[str, Any]:
    """The tool as a chat template is given it, without the fields that are not set."""
    function = tool.function
    rest = {"description": function.description, "parameters": function.parameters}
    return {
        "type": "function",
        "function": {"name": function.name, **{name: value for name, value in rest.items() if value is not None}},
    }


def _check(body: Chat, rules: GatewayRules) -> None:
    """Raises Refused for fields that would change what is sampled, and that the run does not have."""
    refuse_unserved(body)
    if body.n != 1:
        raise Refused(400, "n is not served; send as many requests, at once if you like", "unsupported_parameter")
    if body.top_logprobs:
        raise Refused(400, "top_logprobs is not served; leave it out", "unsupported_parameter")
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if most == 0:
        raise Refused(400, "max_tokens = 0 asks for nothing; leave it out", "unsupported_parameter")
    if other := [stop for stop in stops(body) if stop not in rules.stop]:
        raise Refused(
            400,
            f"stop = {other[0]!r} is not a stop string of the run; set rollout.stop = [{other[0]!r}], or leave it out",
            "unsupported_parameter",
        )
    for name in ("temperature", "top_p", "top_k", "min_p", "seed"):
        if (value := getattr(body, name)) is not None:
            rules.replaced(name, value)
