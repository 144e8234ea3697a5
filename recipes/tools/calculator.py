"""The environment of tools.toml: the model is asked for a sum that is too long for it, and may use a calculator."""

from __future__ import annotations

import ast
import operator

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
EXAMPLES = {"512 - 37": "475", "83 + 264": "347", "94 - 158": "-64"}
"""Solved before the question. Every example uses the tool."""


def calculate(expression: str) -> str:
    """Calculates a sum.

    Args:
        expression: numbers with + - * between them
    """
    return str(value_of(ast.parse(expression.strip(), mode="eval").body))


def value_of(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left, op, right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](value_of(left), value_of(right))
        case ast.UnaryOp(ast.USub(), operand):
            return -value_of(operand)
    raise ValueError("only numbers with + - * between them can be calculated")


def solved(expression: str, result: str) -> list[dict[str, str]]:
    call = f'<tool_call>{{"name": "calculate", "arguments": {{"expression": "{expression}"}}}}</tool_call>'
    return [
        {"role": "user", "content": f"State the final answer to the following arithmetic problem: {expression} ="},
        {"role": "assistant", "content": call},
        {"role": "tool", "name": "calculate", "content": result},
        {"role": "assistant", "content": result},
    ]


async def play(agent, prompt, answer, **columns):
    messages = [message for example in EXAMPLES.items() for message in solved(*example)]
    reply = await agent.chat([*messages, {"role": "user", "content": prompt}], tools=[calculate])
    if reply.tool_calls:
        results = await agent.call(reply)
        agent.reward("calculated", 0.2 * (results[0]["content"] == answer))
        reply = await agent.chat(results)
    return {"right": float(reply.text.strip() == answer)}
