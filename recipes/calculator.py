"""The environment of tools.toml: the model is asked for a sum that is too long for it, and may use a calculator."""

from __future__ import annotations

import ast
import operator

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
EXAMPLE = [
    {"role": "user", "content": "State the final answer to the following arithmetic problem: 512 - 37 ="},
    {
        "role": "assistant",
        "content": '<tool_call>{"name": "calculate", "arguments": {"expression": "512 - 37"}}</tool_call>',
    },
    {"role": "tool", "name": "calculate", "content": "475"},
    {"role": "assistant", "content": "475"},
]


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


async def play(agent, prompt, answer, **columns):
    reply = await agent.chat([*EXAMPLE, {"role": "user", "content": prompt}], tools=[calculate])
    for _ in range(2):
        if not reply.tool_calls:
            break
        reply = await agent.chat(await agent.call(reply))
    return float(reply.text.strip() == answer)
