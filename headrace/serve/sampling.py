"""Makes the engine's requests from a body. Unsupported fields that would influence sampling are refused here by name."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.core.chat.messages import described, for_template, uses_tools, with_effort
from headrace.core.chat.reading import is_open_in, is_opened_by
from headrace.core.types import Constraint, Request, Sampling
from headrace.models.chat import LONG, ChatEncoder
from headrace.models.control_tokens import texts_of
from headrace.models.grammars import check_constraint
from headrace.serve.serving import Serving
from headrace.web.bodies import Chat, Completions, Drawing, Generate
from headrace.web.constraints import checked, of_answer, of_format
from headrace.web.errors import Refused
from headrace.web.request_fields import continues_last, offered_tools, refuse_unserved, stops

_TOKEN = re.compile(r"0|-?[1-9][0-9]{0,9}")
_LAST = 8
"""Tokens of a prompt in which a template opens the thinking."""


def _sampling(body: Drawing, max_tokens: int, index: int, constraint: Constraint | None = None) -> Sampling:
    """`index`: of the completion among the `n` of its prompt."""
    seed = secrets.randbits(62) if body.seed is None else (body.seed + index) % (1 << 64)
    return Sampling(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=0 if body.top_k in (None, -1) else int(body.top_k or 0),
        min_p=body.min_p or 0.0,
        stop=stops(body),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        seed=seed,
        constraint=constraint,
        logit_bias=_bias(body),
    )


def _bias(body: Drawing) -> tuple[tuple[int, float], ...]:
    given = body.logit_bias or {}
    if not all(_TOKEN.fullmatch(token) for token in given):  # "05" and "5" would be two numbers for one token
        raise Refused(400, 'logit_bias has numbers by token id, such as {"50256": -100}')
    return tuple(sorted((int(token), bias) for token, bias in given.items()))


def _room(serving: Serving, prompt: Sequence[int], least: int = 1) -> int:
    """The number of tokens that fit after a prompt. Raises Refused for fewer than `least`."""
    room = serving.engine.capabilities.context_length - len(prompt)
    if room < least:
        raise Refused(
            400,
            f"{_limit(serving)}, and the prompt has {len(prompt)} of them; shorten it",
            "context_length_exceeded",
        )
    return room


def _limit(serving: Serving) -> str:
    """Says how long prompt and completion may be, in words by which clients tell this refusal from others (LiteLLM, for example)."""
    return f"this model's maximum context length is {serving.engine.capabilities.context_length} tokens"


def _fits(serving: Serving, prompt: Sequence[int], most: int) -> int:
    """Raises Refused if that many tokens do not fit after the prompt."""
    if most > (room := _room(serving, prompt, least=min(most, 1))):
        raise Refused(
            400,
            f"{_limit(serving)}: a prompt of {len(prompt)} leaves room for {room}, and max_tokens = {most}; lower it",
            "context_length_exceeded",
        )
    return most


def of_generate(serving: Serving, body: Generate, name: str) -> list[Request]:
    drawing, can = body.sampling_params, serving.engine.capabilities
    refuse_unserved(drawing)
    if not body.token_ids:
        raise Refused(400, "token_ids is empty; begin with a start token at least")
    most = (
        min(16, _room(serving, body.token_ids))
        if drawing.max_tokens is None
        else _fits(serving, body.token_ids, drawing.max_tokens)
    )
    scores = drawing.prompt_logprobs is not None
    if scores and drawing.logprobs and drawing.prompt_logprobs and drawing.logprobs != drawing.prompt_logprobs:
        raise Refused(
            400, "logprobs and prompt_logprobs ask for two numbers of tokens; ask for one, in two requests for both"
        )
    check_logprobs(
        serving,
        max(drawing.logprobs or 0, drawing.prompt_logprobs or 0),
        most * drawing.n + len(body.token_ids) * scores,
    )
    constraint = body.constraint or of_format(drawing.response_format, drawing.structured_outputs)
    if constraint is not None:
        checked(constraint, "the constraint", check_constraint)
    samplings = [_sampling(drawing, most, index, constraint) for index in range(drawing.n)]
    cuts = samplings[0].top_p < 1 or samplings[0].top_k > 0 or samplings[0].min_p > 0 or constraint is not None
    mask = cuts and can.masks if body.return_sampling_mask is None else body.return_sampling_mask
    return [
        Request(
            id=f"{name}#{index}",
            prompt=tuple(body.token_ids),
            sampling=sampling,
            prefix=tuple(body.prefix_token_ids),
            priority=body.priority,
            adapter=serving.adapter_of(body.model),
            prompt_logprobs=scores,
            top_logprobs=max(drawing.logprobs or 0, drawing.prompt_logprobs or 0),
            return_mask=mask,
            return_routing=can.routing if body.return_routed_experts is None else body.return_routed_experts,
        )
        for index, sampling in enumerate(samplings)
    ]


def check_logprobs(serving: Serving, top: int, positions: int) -> None:
    """Raises Refused for more most probable tokens than an answer may hold."""
    limits = serving.limits
    if top > limits.top_logprobs:
        raise Refused(
            400, f"{top} most probable tokens of a position are too many; ask for at most {limits.top_logprobs}"
        )
    if top * positions > limits.logprobs:
        raise Refused(
            400,
            f"{top} most probable tokens of each of {positions} positions are too many for one answer, which may hold {limits.logprobs}; "
            "ask for fewer of them, or for fewer tokens",
        )


def work_of(body: Completions | Chat | Generate, size: int) -> int:
    """Returns the bytes of a body, for `off_loop`; at least `LONG` for one with a constraint, which takes time to check."""
    drawing = body.sampling_params if isinstance(body, Generate) else body
    constrained = drawing.response_format or drawing.structured_outputs or getattr(body, "constraint", None)
    return max(size, LONG) if constrained or getattr(body, "tools", None) else size


def of_completions(serving: Serving, body: Completions, name: str) -> list[Request]:
    refuse_unserved(body)
    given = given_prompts(body)
    serving.room_for(len(given) * body.n)
    prompts = [_tokens_of(serving, prompt) for prompt in given]
    most = 16 if body.max_tokens is None else body.max_tokens
    scores = body.echo and (body.logprobs is not None or not most)
    if constraint := of_format(body.response_format, body.structured_outputs):
        checked(constraint, "response_format" if body.response_format else "structured_outputs", check_constraint)
    top = body.logprobs or 0
    return list(
        _requests(serving, body, prompts=prompts, name=name, most=most, top=top, scores=scores, constraint=constraint)
    )


def given_prompts(body: Completions) -> list[str | Sequence[int]]:
    """Returns the prompts of a request, each a text or tokens. Raises Refused for none, and for a list of both."""
    prompt = body.prompt
    if prompt == []:
        raise Refused(400, "prompt is an empty list; send a text, tokens, or a list of several of them")
    if isinstance(prompt, str) or all(isinstance(element, int) for element in prompt):
        return [prompt]  # type: ignore[list-item]
    if any(isinstance(element, int) for element in prompt):
        raise Refused(400, "prompt mixes tokens and texts; give each a request of its own")
    return list(prompt)  # type: ignore[arg-type]


def _tokens_of(serving: Serving, prompt: str | Sequence[int]) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        return tuple(prompt)
    _check_length(serving, prompt)
    return serving.encoder.encode_text(prompt)


def _check_length(serving: Serving, text: str) -> None:
    """Raises Refused for a text that has more tokens than the context, without encoding all of it."""
    longest = serving.engine.capabilities.context_length
    if serving.encoder.surely_longer(text, longest):
        raise Refused(
            400,
            f"{_limit(serving)}, and a prompt of {len(text)} characters has more; shorten it",
            "context_length_exceeded",
        )


def of_chat(serving: Serving, body: Chat, name: str) -> list[Request]:
    refuse_unserved(body)
    tools = offered_tools(body)
    if tools or uses_tools(body.messages):
        _ = serving.encoder.call_format  # a template that knows no tools would leave them out without a word
    messages, shown = for_template(body.messages), described(tools)
    arguments = _arguments(serving, body)
    _check_characters(serving, [*messages, *shown])
    serving.note_specials(serving.encoder.specials_in(messages))
    written = serving.encoder.write(messages, shown, arguments, continues_last(body))
    _check_length(serving, written.text)
    prompt = serving.encoder.encode(written)
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    top = (body.top_logprobs or 0) if body.logprobs else 0
    most = _room(serving, prompt) if most is None else most
    constraint = of_answer(
        serving.encoder,
        check_constraint,
        response_format=body.response_format,
        outputs=body.structured_outputs,
        tools=tools,
        tool_choice=body.tool_choice,
        several=body.parallel_tool_calls,
        thinking=bool(begins_thinking(serving.encoder, prompt, body)),
    )
    return list(_requests(serving, body, prompts=[prompt], name=name, most=most, top=top, constraint=constraint))


def _check_characters(serving: Serving, given: Sequence[Mapping[str, Any]]) -> None:
    """Raises Refused for messages and tools whose texts alone exceed the context: a template would be slow to write them."""
    longest, characters = serving.engine.capabilities.context_length, sum(map(len, texts_of(given)))
    if characters > serving.encoder.most_characters(longest):
        raise Refused(
            400,
            f"{_limit(serving)}, and messages and tools of {characters} characters have more; shorten them",
            "context_length_exceeded",
        )


def _arguments(serving: Serving, body: Chat) -> dict[str, Any]:
    """Returns the template's arguments. Raises Refused for one that it does not read."""
    given = body.chat_template_kwargs or {}
    arguments = with_effort(given, body.reasoning_effort, serving.encoder.variables)
    if arguments is None:
        message = f"reasoning_effort = {body.reasoning_effort} is not served: the chat template does not know it; leave it out"
        raise Refused(400, message, "unsupported_parameter")
    if given and (problem := serving.encoder.argument_problem(given)):
        raise Refused(400, f"chat_template_kwargs: {problem}", "unsupported_parameter")
    return arguments


def _requests(
    serving: Serving,
    body: Completions | Chat,
    *,
    prompts: Sequence[tuple[int, ...]],
    name: str,
    most: int,
    top: int,
    scores: bool = False,
    constraint: Constraint | None = None,
) -> Iterator[Request]:
    """`scores`: whether the prompts are scored too."""
    adapter = serving.adapter_of(body.model)
    for place, prompt in enumerate(prompts):
        if not prompt:
            raise Refused(400, "the prompt has no tokens; begin with a start token at least")
        _fits(serving, prompt, most)
        check_logprobs(serving, top, (most + len(prompt) * scores) * len(prompts) * body.n)
        for index in range(body.n):
            sampling = _sampling(body, most, index, constraint)
            yield Request(
                id=f"{name}#{place * body.n + index}",
                prompt=prompt,
                sampling=sampling,
                priority=body.priority,
                adapter=adapter,
                prompt_logprobs=scores,
                top_logprobs=top,
            )


def holds_strict_tools(chat: Chat, request: Request) -> bool:
    """Whether the arguments of calls fit the schemas of strict tools, if there are any: not where the model's calls have no grammar here."""
    return request.sampling.constraint is not None or not any(tool.function.strict for tool in offered_tools(chat))


def begins_thinking(encoder: ChatEncoder, prompt: Sequence[int], chat: Chat) -> bool | None:
    """Whether the prompt of a chat ends within the model's thinking; None for a model that does not think."""
    if not encoder.thinks:
        return None
    if chat.continue_final_message:
        content = chat.messages[-1].content
        return is_open_in(
            content if isinstance(content, str) else "".join(part.get("text", "") for part in content or ())
        )
    return is_opened_by(encoder.written(prompt[-_LAST:]))
