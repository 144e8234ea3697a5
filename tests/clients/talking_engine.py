"""An engine that answers what its prompt asks for, so that clients of any framework find what they look for: text, a call of the tool that they
offer, its result in words, JSON, or the settings that have arrived."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec.structs import replace

from headrace.core.types import Request
from headrace.testing.fake_engine import FakeEngine
from support.tool_chats import CHARACTERS, SPECIAL, tokens_of

WORDS = (*SPECIAL, *CHARACTERS)
PERSON = '{"name": "Ann", "age": 30}'
CONTEXT = 200_000


def answer(request: Request) -> Sequence[int]:
    """The tokens of the answer of a model whose template is Hermes'. A story has no end."""
    prompt = "".join(WORDS[token] for token in request.prompt)
    if "Tell me a story." in prompt:
        return tokens_of("and then ") * (CONTEXT // 9)
    return tokens_of(_said(request, prompt) + "<|im_end|>")


def _said(request: Request, prompt: str) -> str:
    *_, asked = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", prompt, re.DOTALL) or [prompt]
    tools = re.findall(r'"function": {"name": "(\w+)"', prompt)
    if "<tool_response>" in asked:
        return "It rains."
    if "Ann" in asked:
        return f'<tool_call>\n{{"name": "{tools[-1]}", "arguments": {PERSON}}}\n</tool_call>' if tools else PERSON
    if "weather" in asked and tools:
        message = "" if "Use the tool." in prompt else "Let me see.\n"
        return f'{message}<tool_call>\n{{"name": "{tools[0]}", "arguments": {{"place": "Paris"}}}}\n</tool_call>'
    if "settings" in asked:
        drawn = request.sampling
        return f"{drawn.seed} {drawn.temperature:g} {drawn.top_p:g} {drawn.max_tokens} {len(drawn.stop)}"
    return "Good day."


class TalkingEngine(FakeEngine):
    """Has no logits to hold to a form, but what it answers has the form that its prompt asks for."""

    def _refuse(self, request: Request) -> None:
        super()._refuse(replace(request, sampling=replace(request.sampling, constraint=None)))


def talking_engine() -> FakeEngine:
    return TalkingEngine(seconds_per_token=0.002, script=answer, context_length=CONTEXT)
