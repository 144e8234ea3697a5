"""One completion of the prompt."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.core.protocols import Agent, EnvironmentKind, Limits
from headrace.core.types import Prompt


class SingleTurn:
    """Protocol `Environment`. It gives no rewards: all of them come from the scorer."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        self._prompt = prompt

    async def play(self, agent: Agent) -> Mapping[str, float]:
        await agent.turn(self._prompt.tokens)
        return {}


SINGLE_TURN = EnvironmentKind(SingleTurn, Limits(turns=1), resumes="replayed")
