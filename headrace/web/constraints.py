"""Constraints in requests: `response_format`, vLLM's `structured_outputs`, forced calls and strict tools become a `types.Constraint`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from headrace.core.chat.messages import Tool
from headrace.core.chat.reading import CLOSING
from headrace.core.chat.tool_calls import CallFormat, call_grammar
from headrace.core.types import Constraint
from headrace.web.errors import Refused

Check = Callable[[Constraint], None]
"""Raises ValueError with the reason for a constraint that cannot be followed (`models.grammars.check_constraint`)."""

_OBJECT = '{"type": "object"}'
_NEUTRAL_OUTPUTS: tuple[Any, ...] = (None, False, "", [])


class CallEncoder(Protocol):
    """The part of `models.chat.ChatEncoder` that constraints use."""

    @property
    def call_format(self) -> CallFormat: ...

    @property
    def special(self) -> Mapping[int, str]: ...


def of_format(response_format: Mapping[str, Any] | None, outputs: Mapping[str, Any] | None) -> Constraint | None:
    """`response_format` as OpenAI has it, `outputs`: vLLM's `structured_outputs`. Raises Refused for forms that are none of theirs."""
    asked = [
        constraint
        for constraint in (_of_response_format(response_format or {}), _of_outputs(outputs or {}))
        if constraint is not None
    ]
    if len(asked) > 1:
        raise _refused("response_format and structured_outputs exclude each other; leave one out")
    return asked[0] if asked else None


def _of_response_format(given: Mapping[str, Any]) -> Constraint | None:
    match given.get("type", "text"):
        case "text":
            return None
        case "json_object":
            return Constraint("json_schema", _OBJECT)
        case "json_schema":
            inner = given.get("json_schema", given)  # /v1/responses has its fields beside the type
            if not isinstance(inner, Mapping) or not isinstance(schema := inner.get("schema", {}), (Mapping, bool)):
                raise _refused("response_format.json_schema is an object with a name and a schema")
            return Constraint("json_schema", json.dumps(schema))
        case other:
            raise _refused(f"response_format.type = {other!r:.60} is none; choose text, json_object or json_schema")


def _of_outputs(given: Mapping[str, Any]) -> Constraint | None:
    there = {name: value for name, value in given.items() if value not in _NEUTRAL_OUTPUTS}
    known = ("json", "regex", "choice", "grammar", "json_object")
    if unknown := sorted(set(there) - set(known)):
        raise _refused(f"structured_outputs.{unknown[0]:.60} is not served; there are {', '.join(known)}")
    if len(there) > 1:
        raise _refused("structured_outputs asks for several things at once; leave all but one out")
    match list(there.items()):
        case []:
            return None
        case [("json", str(text))]:
            return Constraint("json_schema", text)
        case [("json", value)]:
            return Constraint("json_schema", json.dumps(value))
        case [("json_object", True)]:
            return Constraint("json_schema", _OBJECT)
        case [("choice", [*texts])] if all(isinstance(choice, str) for choice in texts):
            return Constraint("choice", json.dumps(texts))
        case [("regex", str(text))]:
            return Constraint("regex", text)
        case [("grammar", str(text))]:
            return Constraint("grammar", text)
        case [(name, _)]:
            raise _refused(f"structured_outputs.{name} is of the wrong type")
    raise AssertionError("one thing is asked for")


def forces(tool_choice: Any) -> bool:
    """Whether a call is asked for, whatever its form. Raises Refused for a choice that is none."""
    if tool_choice in (None, "auto", "none"):
        return False
    if tool_choice != "required" and not _named(tool_choice):
        raise _refused(
            f"tool_choice = {tool_choice!r:.100} is none; choose auto, none, required or a function by its name"
        )
    return True


def _named(tool_choice: Any) -> str:
    """The tool that is asked for by its name: chats have it in `function`, responses beside the type."""
    if not isinstance(tool_choice, Mapping) or tool_choice.get("type") != "function":
        return ""
    inner = tool_choice.get("function", tool_choice)
    name = inner.get("name") if isinstance(inner, Mapping) else ""
    return name if isinstance(name, str) else ""


def of_tools(
    encoder: CallEncoder, check: Check, tools: Sequence[Tool], tool_choice: Any, several: bool | None
) -> Constraint | None:
    """The constraint of an answer that may or must call tools. None where all answers are allowed, or where strict tools are only offered
    and the model's format of calls has no grammar here. `several`: `parallel_tool_calls`. Raises Refused."""
    forced = forces(tool_choice)
    if not forced and (not tools or (several is not False and not any(tool.function.strict for tool in tools))):
        return None
    if forced and not tools:
        raise _refused("tool_choice asks for a call, and there are no tools; give some")
    name = _named(tool_choice)
    chosen = [tool for tool in tools if not name or tool.function.name == name]
    if not chosen:
        raise _refused(f"tool_choice names {name:.100}, which is none of the tools")
    format = encoder.call_format
    special = {text: token for token, text in encoder.special.items()}
    made = [
        call_grammar(format, chosen, forced=forced, several=several is not False and not name, special=marks)
        for marks in (special, {})
    ]
    if made[0]:
        # a special token is spelled out for the check, whose tokenizer has none
        checked(Constraint("grammar", made[1]), "a tool's parameters", check)
        return Constraint("grammar", made[0])
    if forced or several is False:
        what = "a forced call" if forced else "parallel_tool_calls = false"
        raise _refused(f"{what} is not served for this model, whose calls ({format.name}) are no JSON; leave it out")
    return None


def checked(constraint: Constraint, what: str, check: Check) -> Constraint:
    """Returns the constraint. Takes up to half a second. Raises Refused with the reason for one that cannot be followed."""
    try:
        check(constraint)
    except ValueError as error:
        raise _refused(f"{what}: {error}") from None
    return constraint


def of_answer(
    encoder: CallEncoder,
    check: Check,
    *,
    response_format: Mapping[str, Any] | None = None,
    outputs: Mapping[str, Any] | None = None,
    tools: Sequence[Tool] = (),
    tool_choice: Any = None,
    several: bool | None = None,
    thinking: bool = False,
) -> Constraint | None:
    """The constraint of the answer to a chat. `thinking`: whether it begins within the model's thinking, which is left free. Raises Refused."""
    constraint = of_format(response_format, outputs)
    if constraint is not None:
        if forces(tool_choice):
            raise _refused("response_format and a forced tool_choice exclude each other; leave one out")
        checked(constraint, "response_format" if response_format else "structured_outputs", check)
    else:
        constraint = of_tools(encoder, check, tools, tool_choice, several)
    if constraint is None or not thinking:
        return constraint
    return Constraint(constraint.kind, constraint.text, after=CLOSING)


def _refused(message: str) -> Refused:
    return Refused(400, message, "invalid_constraint")
