"""Requests of agents that ask for a format: the turn is held to it, whatever the route, and its id says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic

from headrace.core.batches import Failure
from headrace.core.types import Constraint, Prompt
from headrace.episodes.episodes import name_of_turn
from headrace.episodes.rollout import ConstraintConfig, RolloutConfig
from headrace.episodes.rollout_session import TurnAsked
from support import tool_chats
from support.gateway.gateway_agent import Asks, played, user
from support.gateway.written_turns import Model, encoder_of

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}


def test_every_form_of_a_constraint_reaches_the_turn(tmp_path: Path) -> None:
    says = ["{}<|im_end|>", "{}<|im_end|>", "12<|im_end|>", CALL, CALL, CALL, "so<|im_end|>"]
    model = Model(encoder_of(tmp_path, tool_chats.HERMES), says)

    async def case(asks: Asks) -> None:
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
        await asks.chat(user("one"), response_format=wanted)
        text: Any = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
        await asks.client.responses.create(model="m", input="two", text=text)
        await asks.client.completions.create(
            model="m", prompt="three", extra_body={"structured_outputs": {"regex": "[0-9]+"}}
        )
        await asks.chat(user("four"), tools=[ADD], tool_choice="required")
        function: Any = {"type": "function", **ADD["function"], "strict": True}
        await asks.client.responses.create(
            model="m", input="five", tools=[function], tool_choice={"type": "function", "name": "add"}
        )
        async with anthropic.AsyncAnthropic(
            base_url=asks.url.removesuffix("/v1"), api_key="none", max_retries=0
        ) as client:
            tool: Any = {"name": "add", "input_schema": PARAMETERS}
            await client.messages.create(
                model="m", max_tokens=40, messages=[user("six")], tools=[tool], tool_choice={"type": "any"}
            )
        await asks.chat(user("seven"), tools=[ADD])

    assert not isinstance(found := played(model, case), Failure), found
    schema, same, regex, *calls, free = [one.constraint for one in model.asked]
    assert schema == same == Constraint("json_schema", json.dumps(SCHEMA))
    assert regex == Constraint("regex", "[0-9]+") and free is None
    assert all(call is not None and call.kind == "grammar" and "add" in call.text for call in calls)


def test_the_mark_of_a_thought_in_the_text_of_others_frees_no_answer(tmp_path: Path) -> None:
    """A constraint holds behind the thinking, where the template or the begin of the answer has opened it, and nobody else."""
    model = Model(encoder_of(tmp_path, tool_chats.PLAIN), ["{}<|im_end|>"] * 4)
    wanted: Any = {"type": "json_object"}

    async def case(asks: Asks) -> None:
        await asks.chat(user("What is <think>?"), response_format=wanted)
        await asks.chat(user("<think>"), response_format=wanted)
        for begun in ("<think>so", "It is "):
            begins: Any = {"role": "assistant", "content": begun}
            await asks.chat(
                user("<think>"), begins, response_format=wanted, extra_body={"continue_final_message": True}
            )

    assert not isinstance(found := played(model, case), Failure), found
    assert [asked.constraint.after for asked in model.asked if asked.constraint] == ["", "", "</think>", ""]


def test_the_constraint_is_a_part_of_the_name_of_a_turn_and_makes_its_masks_be_recorded() -> None:
    prompt, constraint = Prompt("p", "?", (1, 2)), Constraint("regex", "[0-9]+")
    free, held = TurnAsked(0, 0, (1, 2)), TurnAsked(0, 0, (1, 2), constraint=constraint)
    names = [
        str(name_of_turn(3, prompt, one))
        for one in (free, held, TurnAsked(0, 0, (1, 2), constraint=Constraint("regex", "x")))
    ]
    assert names[0] == "t3/0" and len(set(names)) == 3
    rollout = RolloutConfig()
    assert rollout.request("r", (1,), 0, 0, constraint=constraint).return_mask
    assert not rollout.request("r", (1,), 0, 0).return_mask
    assert not RolloutConfig(keep_mask=False).request("r", (1,), 0, 0, constraint=constraint).return_mask
    own = RolloutConfig(constraint=ConstraintConfig(choice=("a", "b")))
    assert own.truncates and own.request("r", (1,), 0, 0).sampling.constraint == Constraint("choice", '["a", "b"]')
    assert own.request("r", (1,), 0, 0, constraint=constraint).sampling.constraint == constraint
    assert own.evaluation("r", (1,), 0, 1.0).sampling.constraint == Constraint("choice", '["a", "b"]')
