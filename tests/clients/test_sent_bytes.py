"""Requests as clients have sent them, each of which was once answered wrongly or without a word that helps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from talking_engine import talking_engine

from headrace.serve.serving import Serving
from support.served import Client, faked
from support.tool_chats import HERMES, save_tokenizer

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
HELLO = '"messages":[{"role":"user","content":"Hello"}]'
CALL = '"function_call":{"name":"weather","arguments":"{}"}'

REFUSED = {
    "anthropic 2.14, tool_runner: only what is new, as the second request of a thread": (
        MESSAGES,
        '{"max_tokens":200,"messages":[{"role":"user","content":"And in Rome?"}],"model":"tiny",'
        '"thread":{"type":"continue","previous_message_id":"msg_923e9e49ec4c4d68aff501c0ec2d099e"}}',
        "thread is not served; send all messages with each request",
    ),
    "anthropic: an effort": (
        MESSAGES,
        f'{{"model":"tiny","max_tokens":9,{HELLO},"output_config":{{"effort":"low"}}}}',
        "output_config.effort is not served; leave it out",
    ),
    "anthropic: a form without a schema": (
        MESSAGES,
        f'{{"model":"tiny","max_tokens":9,{HELLO},"output_config":{{"format":"json"}}}}',
        "output_config.format is an object with a type and a schema",
    ),
    "a system message where Anthropic has it": (CHAT, f'{{"model":"tiny",{HELLO},"system":"Be kind."}}', "system is not served"),
    "instructions of responses": (CHAT, f'{{"model":"tiny",{HELLO},"instructions":"Be kind."}}', "instructions is not served"),
    "a chat that goes on": (CHAT, f'{{"model":"tiny",{HELLO},"previous_response_id":"resp_1"}}', "previous_response_id is not"),
    "a call as it was given before tools": (
        CHAT,
        f'{{"model":"tiny","messages":[{{"role":"user","content":"?"}},{{"role":"assistant","content":null,{CALL}}}]}}',
        "messages[1].function_call is not served; give the call as tool_calls",
    ),
    "DeepSeek's begin of an answer": (
        CHAT,
        '{"model":"tiny","messages":[{"role":"user","content":"?"},{"role":"assistant","content":"So","prefix":true}]}',
        "messages[1].prefix is not served; set continue_final_message",
    ),
    "LiteLLM reads by these words that a prompt is too long": (
        CHAT,
        '{"model":"tiny","messages":[{"role":"user","content":"Hello"}],"max_tokens":400000}',
        "this model's maximum context length is 200000 tokens: a prompt of 24 leaves room for 199976",
    ),
    "a base URL without /v1": ("/chat/completions", f'{{"model":"tiny",{HELLO}}}', "did you mean /v1/chat/completions"),
    "a base URL with /v1 for Anthropic's client": ("/v1/v1/messages", f'{{"model":"tiny",{HELLO}}}', "did you mean /v1/messages"),
}  # fmt: skip


def asked(tmp_path: Path, case: Callable[[Client, Serving], Awaitable[None]]) -> None:
    async def go() -> None:
        model = save_tokenizer(tmp_path, HERMES)
        async with asyncio.timeout(300), faked(model, talking_engine()) as (client, serving):
            await case(client, serving)

    asyncio.run(go())


async def sent(client: Client, path: str, body: str) -> tuple[int, Any]:
    headers = {"content-type": "application/json"}
    return await client.post(path, data=body.encode(), headers=headers)


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_answered_wrongly_is_refused(what: str, tmp_path: Path) -> None:
    path, body, words = REFUSED[what]

    async def case(client: Client, serving: Serving) -> None:
        status, answer = await sent(client, path, body)
        assert status in (400, 404) and words in answer["error"]["message"], answer
        assert serving.counters.completions == 0

    asked(tmp_path, case)


def test_the_refusal_of_a_thread_has_what_the_client_reads(tmp_path: Path) -> None:
    """With these details its tool runner sends the whole conversation instead, and goes on."""

    async def case(client: Client, serving: Serving) -> None:
        body = f'{{"max_tokens":200,{HELLO},"model":"tiny","thread":{{"type":"create"}}}}'
        status, answer = await sent(client, MESSAGES, body)
        assert status == 400
        assert answer["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        status, answer = await sent(client, MESSAGES, body.replace('{"type":"create"}', "null"))
        assert (status, answer["content"][0]["text"]) == (200, "Good day.")

    asked(tmp_path, case)


def test_tokens_are_counted_without_being_sampled(tmp_path: Path) -> None:
    async def case(client: Client, serving: Serving) -> None:
        for more in ("", ',"tools":[{"name":"a","input_schema":{}}]', ',"system":"Be kind."'):
            body = f'{{"model":"tiny",{HELLO}{more}}}'
            status, answer = await sent(client, f"{MESSAGES}/count_tokens", body)
            assert status == 200 and serving.under_way == 0
            _, whole = await sent(client, MESSAGES, body[:-1] + ',"max_tokens":99}')
            assert answer == {"input_tokens": whole["usage"]["input_tokens"]}
        assert serving.counters.completions == 3

    asked(tmp_path, case)
