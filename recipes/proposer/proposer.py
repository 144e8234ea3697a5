"""The environment of proposer.toml: one role proposes sums, another solves them, and each sum should be neither too easy nor too hard."""

from __future__ import annotations

import random
import re

SOLVERS = 4
WORKED = {"5 + 7": "12", "14 + 3": "17", "26 + 40": "66"}
"""Sums that the solver sees worked out before the question."""
SUM = re.compile(r"(\d{1,4}) \+ (\d{1,4})")


def examples(pairs: dict[str, str]) -> list[dict[str, str]]:
    return [
        {"role": role, "content": content}
        for question, answer in pairs.items()
        for role, content in (("user", question), ("assistant", answer))
    ]


def asked_for(number: int) -> str:
    return f"Write a sum that begins with {number}."


async def play(agent, prompt, seed, **columns):
    number = random.Random(seed).randrange(1, 100)
    proposer = agent.role("proposer")
    shown = {asked_for(int(proposal.split()[0])): proposal for proposal in WORKED}
    proposal = await proposer.chat([*examples(shown), {"role": "user", "content": asked_for(number)}])
    found = SUM.fullmatch(proposal.text.strip())
    if found is None or int(found[1]) != number:
        proposer.reward("fair", -0.5)  # no sum, or another one: less than one that is too easy
        return {}
    answer = str(number + int(found[2]))
    rate = 0.0
    for solver in [agent.role(f"solver {i + 1}") for i in range(SOLVERS)]:
        right = await solved(solver, found[0], answer)
        solver.reward("right", float(right))
        rate += right / SOLVERS
    proposer.reward("fair", 4 * rate * (1 - rate))  # 1 if half of the solvers were right, 0 if all were or none was
    return {}


async def exam(agent, prompt, answer):
    """The environment of sums.toml: a sum that nobody proposed."""
    return {"right": float(await solved(agent, prompt, answer))}


async def solved(solver, question, answer):
    reply = await solver.chat([*examples(WORKED), {"role": "user", "content": question}])
    return reply.text.strip() == answer
