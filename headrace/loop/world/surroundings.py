"""Prompts and rewards of a simulated run: difficulty, lengths, latencies."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from headrace.core.batches import Failure
from headrace.core.protocols import Agent, EnvironmentKind, Limits
from headrace.core.types import Episode, Prompt, Request, Scored
from headrace.episodes.rollout import seed_of
from headrace.loop.world.codes import PROMPT, difficulty, prompt_tokens, result_tokens
from headrace.loop.world.distributions import Distribution, fixed, solve_shift

_SEEDS = 1 << 63


def uniform(*parts: object) -> float:
    """Returns a number in (0, 1) that depends on the given names and numbers alone."""
    return (seed_of(*parts) + 0.5) / _SEEDS


class CompletionLengths:
    """The lengths of completions, determined by their seeds and their prompts' difficulties alone."""

    def __init__(self, completions: Distribution, max_tokens: int) -> None:
        self._completions, self._limit = completions, max_tokens

    def __call__(self, request: Request) -> tuple[int, bool]:
        """Returns real tokens, and whether max_tokens ends the completion."""
        own = (request.sampling.seed + 0.5) / _SEEDS
        shared = difficulty(request.prompt[:PROMPT]) if self._completions.correlation else 0.0
        wanted = max(1, round(self._completions.draw(own, shared)))
        return min(wanted, self._limit), wanted >= self._limit


@dataclass(frozen=True, kw_only=True)
class TurnShape:
    """The turns of rollouts: how many, and what lies between two of them."""

    turns: Distribution = fixed(1)
    results: Distribution = fixed(1)
    """Tokens that the model reads between two turns."""
    tools: Distribution = fixed(0)
    """Seconds between two turns."""
    most: int = 1
    """The most turns (`environment.max_turns`)."""
    seconds: float = 0.0
    """`environment.episode_seconds`."""

    @property
    def several(self) -> bool:
        return self.most > 1

    def kind(self) -> EnvironmentKind:
        def make(prompt: Prompt, seed: int) -> SimulatedTurns:
            return SimulatedTurns(prompt, seed, self)

        return EnvironmentKind(make, Limits(self.most, whole=self.seconds), "exported")


class SimulatedTurns:
    """Protocol `Environment`: turns with tools between them that take time. All draws follow from its seed and the prompt's difficulty; those
    behind a fork, from the completions too. Its state is the number of turns: an alternative does not wait for the tools of the turns before
    its fork, and ends after as many turns as its rollout."""

    def __init__(self, prompt: Prompt, seed: int, shape: TurnShape) -> None:
        self._prompt, self._seed, self._shape = prompt, seed, shape

    async def play(self, agent: Agent) -> Mapping[str, float]:
        shape, shared, kept = self._shape, difficulty(self._prompt.tokens), len(agent.kept)
        done = await agent.turn(self._prompt.tokens)
        for number in range(1, max(1, round(shape.turns.draw(uniform(self._seed, "turns"), shared)))):
            mark = done.tokens[:1] if 0 < kept < number else ()
            if number > kept:
                await asyncio.sleep(shape.tools.draw(uniform(self._seed, "tools", number, *mark), shared))
            length = shape.results.draw(uniform(self._seed, "results", number, *mark), shared)
            read = result_tokens(length, self._seed, number)
            if agent.cut_off(len(read)):
                break
            if number > kept:
                agent.keep(b"")
            done = await agent.turn(read)
        return {}


class SimulatedTask:
    """Protocol `Task`: prompts without text, each with a length and a difficulty of its own."""

    def __init__(self, prompts: Distribution, seed: int, distinct: int = 0) -> None:
        """`distinct`: the number of different prompts, which come again and again under new ids; 0 if no prompt comes twice."""
        self._prompts, self._seed, self._next = prompts, seed, 0
        self._distinct = distinct

    def draw(self) -> Prompt:
        self._next += 1
        return self._prompt("train", self._next - 1)

    def held_out(self, count: int) -> list[Prompt]:
        return [self._prompt("held-out", number) for number in range(count)]

    def state(self) -> dict[str, Any]:
        return {"next": self._next}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._next = state["next"]

    def _prompt(self, stream: str, number: int) -> Prompt:
        same = number % self._distinct if self._distinct else number
        length = self._prompts.draw(uniform(self._seed, stream, same, "length"))
        tokens = prompt_tokens(same, length, uniform(self._seed, stream, same, "difficulty"))
        return Prompt(f"{stream}/{number}", "", tokens)


class SimulatedScorer:
    """Protocol `Scorer`: rewards that take time, computed by a number of workers."""

    def __init__(
        self,
        *,
        latency: Distribution,
        workers: int,
        seed: int,
        contrast: float = 1.0,
        solved: float | None = None,
        overhead: float = 0.0,
    ) -> None:
        """`overhead`: seconds that a group takes on its way, whatever the rewards; `latency`: seconds of one rollout; `contrast`: share of groups whose rewards differ; `solved`: instead, the mean
        reward of rollouts that are right or wrong, which harder prompts get less often."""
        self._latency, self._seed, self._contrast, self._solved = latency, seed, contrast, solved
        self._overhead = overhead
        self._free = [0.0] * workers
        """The time at which each worker will be free."""

    async def score(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[Scored | Failure]:
        now = asyncio.get_running_loop().time()
        if seconds := self._overhead + self._until_done(now, prompt, len(episodes)):
            await asyncio.sleep(seconds)
        reward = self._rewards(prompt)
        return [Scored(episode, value := reward(i), {"simulated": value}) for i, episode in enumerate(episodes)]

    def _until_done(self, now: float, prompt: Prompt, count: int) -> float:
        if self._latency.kind == "fixed" and not self._latency.mean:
            return 0.0
        last = now
        for i in range(count):
            begin = max(now, heapq.heappop(self._free))
            end = begin + self._latency.draw(uniform(self._seed, prompt.id, i, "latency"))
            heapq.heappush(self._free, end)
            last = max(last, end)
        return last - now

    def _rewards(self, prompt: Prompt) -> Callable[[int], float]:
        if self._solved is None:
            differs = self._contrast >= 1 or uniform(self._seed, prompt.id, "contrast") < self._contrast
            return lambda i: float(i % 2) if differs else 1.0
        chance = NormalDist().cdf(solve_shift(self._solved) - difficulty(prompt.tokens))
        return lambda i: float(uniform(self._seed, prompt.id, i, "solved") < chance)

    async def close(self) -> None:
        pass
