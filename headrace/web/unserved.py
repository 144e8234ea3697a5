"""Fields of requests that no server here serves. Those that would influence sampling are refused by name."""

from __future__ import annotations

from typing import Any

from headrace.core.chat.messages import Tool
from headrace.web.bodies import Chat, Drawing
from headrace.web.errors import Refused

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_tokens": (None, 0),
    "bad_words": (None, []),
    "include_stop_str_in_output": (None, False),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
}
"""Fields that are not served, and the values with which they ask for nothing."""

REMEDIES = {
    "functions": "give them as tools",
    "function_call": "give tools and tool_choice",
}


def refuse_unserved(body: Drawing) -> None:
    for name, values in NEUTRAL.items():
        value = getattr(body, name, None)
        if value not in values:
            remedy = f"; {REMEDIES[name]}" if name in REMEDIES else "; leave it out"
            raise Refused(400, f"{name} is not served{remedy}", "unsupported_parameter")


def stops(body: Drawing) -> tuple[str, ...]:
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def offered_tools(body: Chat) -> list[Tool]:
    """Returns the tools that the model is shown."""
    return [] if body.tool_choice == "none" else body.tools or []


def continues_last(body: Chat) -> bool:
    """Whether the answer continues the last message. Raises Refused for fields that do not fit together."""
    if not body.continue_final_message:
        if body.add_generation_prompt is False:
            said = "add_generation_prompt = false is served with continue_final_message = true only; leave it out"
            raise Refused(400, said, "unsupported_parameter")
        return False
    if body.add_generation_prompt:
        raise Refused(400, "continue_final_message and add_generation_prompt exclude each other; leave one out")
    last = body.messages[-1]
    if last.role != "assistant" or last.tool_calls:
        raise Refused(400, "continue_final_message needs a last message of the assistant with text; leave it out")
    return True
