"""Prompts and rewards of a simulated run: difficulty, lengths, latencies."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

from headrace.core.batches import Failure, Row
from headrace.core.errors import ConfigError
from headrace.core.protocols import Agent, EnvironmentKind, Limits
from headrace.core.types import Episode, Prompt, Request, Scored, Struct
from headrace.episodes.rollout import seed_of

# --- Distributions of lengths and latencies
# Each has its quantile function, so that one uniform number gives one draw.


_NORMAL = NormalDist()
_EDGE = 1e-9
_KEYS = {"fixed": ("mean",), "lognormal": ("mean", "sigma"), "pareto": ("mean", "alpha")}
_REMEDY = (
    "write it as a number, lognormal:mean=4000,sigma=0.8 or pareto:mean=4000,alpha=1.5 (and ,correlation=0.5 for prompts whose "
    "rollouts are alike)"
)


class Distribution(Struct, frozen=True):
    """A distribution of positive numbers: tokens or seconds."""

    kind: Literal["fixed", "lognormal", "pareto", "empirical"]
    mean: float = 0.0
    """Mean of `fixed`, `lognormal` and `pareto`."""
    sigma: float = 0.0
    """`lognormal`: standard deviation of the logarithm. 0.5 is mild, 1 has a tail."""
    alpha: float = 0.0
    """`pareto`: exponent above 1; the nearer to 1, the heavier the tail."""
    values: tuple[float, ...] = ()
    """`empirical`: the values, ascending and equally probable."""
    correlation: float = 0.0
    """Correlation of two draws for the same prompt, through a Gaussian copula: 0 makes them independent, 1 equal. Their common factor is
    the prompt's difficulty."""

    def quantile(self, u: float) -> float:
        """Returns the value below which a share `u` in (0, 1) of the draws is."""
        match self.kind:
            case "fixed":
                return self.mean
            case "lognormal":
                return self.mean * math.exp(self.sigma * normal_quantile(u) - self.sigma**2 / 2)
            case "pareto":
                return self.mean * (self.alpha - 1) / self.alpha * (1 - u) ** (-1 / self.alpha)
            case _:
                return self.values[int(u * len(self.values))]

    def draw(self, u: float, difficulty: float = 0.0) -> float:
        """Returns one draw. `u`: uniform, of this draw; `difficulty`: standard normal, of the prompt."""
        if self.correlation:
            own, shared = math.sqrt(1 - self.correlation), math.sqrt(self.correlation)
            u = _NORMAL.cdf(shared * difficulty + own * normal_quantile(u))
        return self.quantile(min(max(u, _EDGE), 1 - _EDGE))

    def mean_below(self, limit: float, grid: int = 400) -> float:
        """Returns the mean of min(draw, limit), computed numerically."""
        return sum(min(limit, self.quantile((i + 0.5) / grid)) for i in range(grid)) / grid

    @property
    def words(self) -> str:
        """The distribution in a few words."""
        alike = f", correlation {self.correlation:g} within a prompt" if self.correlation else ""
        match self.kind:
            case "fixed":
                return f"{self.mean:g} each"
            case "lognormal":
                return f"log-normal, mean {self.mean:g}, sigma {self.sigma:g}{alike}"
            case "pareto":
                return f"Pareto, mean {self.mean:g}, alpha {self.alpha:g}{alike}"
            case _:
                mean = sum(self.values) / len(self.values)
                return f"as measured ({len(self.values)} draws, mean {mean:.4g}, longest {self.values[-1]:.4g}){alike}"


def fixed(value: float) -> Distribution:
    return Distribution("fixed", mean=float(value))


def empirical(values: Sequence[float], correlation: float = 0.0) -> Distribution:
    assert values, "an empirical distribution needs values"
    return Distribution("empirical", values=tuple(sorted(map(float, values))), correlation=correlation)


def parse(text: str) -> Distribution:
    """Parses `800`, `lognormal:mean=4000,sigma=0.8` or `pareto:mean=4000,alpha=1.5`. Raises ConfigError with the remedy."""
    kind, _, rest = text.partition(":")
    try:
        if not rest:
            return _checked(fixed(float(kind)), text)
        settings = {key.strip(): float(value) for key, _, value in (part.partition("=") for part in rest.split(","))}
    except ValueError:
        raise ConfigError(f"{text} is not a distribution: {_REMEDY}") from None
    if kind not in _KEYS or set(settings) - {"correlation"} != set(_KEYS[kind]):
        raise ConfigError(f"{text} is not a distribution: {_REMEDY}")
    return _checked(Distribution(kind, **settings), text)  # type: ignore[arg-type]


def _checked(made: Distribution, text: str) -> Distribution:
    tail = made.kind != "pareto" or made.alpha > 1
    if not (made.mean >= 0 and made.sigma >= 0 and tail and 0 <= made.correlation <= 1):
        raise ConfigError(f"{text}: mean and sigma are at least 0, alpha is above 1, correlation is from 0 to 1")
    return made


def normal_quantile(u: float) -> float:
    return _NORMAL.inv_cdf(min(max(u, _EDGE), 1 - _EDGE))


@lru_cache(maxsize=64)
def solve_shift(mean: float) -> float:
    """Returns `a` such that Φ(a - z), averaged over z ~ N(0, 1), is `mean`: Φ(a / √2) = mean."""
    return math.sqrt(2) * normal_quantile(mean)


# --- The codes in simulated tokens
# Nothing reads these tokens as text, so they carry the values that the simulation needs.
#
# One simulated token stands for `grain` real ones, so that an hour of a thousand GPUs, which is billions of tokens, passes through the
# real pipeline in seconds. Times are computed from real lengths; only the lag is coarse, with a resolution of `grain` tokens.
#
#     prompt      (number, real length, difficulty code)
#     completion  (real length, 0, 0, ...): ceil(length / grain) tokens
#     result      (real length, mark): what lies between two turns; the mark makes it a sequence of its own


_SCALE = 1 << 30
PROMPT = 3
"""Simulated tokens of a prompt."""
RESULT = 2
"""Simulated tokens of a result."""


def prompt_tokens(number: int, length: float, u: float) -> tuple[int, int, int]:
    """Encodes a prompt. `u`: uniform in (0, 1), its rank by difficulty."""
    return number, max(1, round(length)), int(u * _SCALE)


@lru_cache(maxsize=1 << 14)  # called for every rollout of a group
def difficulty(prompt: tuple[int, ...]) -> float:
    """Returns the difficulty of a prompt, standard normal."""
    return normal_quantile((prompt[2] + 0.5) / _SCALE)


def result_tokens(length: float, seed: int, number: int) -> tuple[int, int]:
    """Encodes the result before turn `number` of a rollout. `seed`: of its environment."""
    return max(1, round(length)), hash((seed, number))


def completion_tokens(length: int, grain: int) -> tuple[int, ...]:
    return (length, *(0,) * (-(-length // grain) - 1))


class CodePart(NamedTuple):
    """A completion or a result in a sequence of codes."""

    real: int
    """Real tokens."""
    start: int
    end: int
    """The simulated tokens of the part begin at `start` and end before `end`."""
    sampled: bool


def parts_of(codes: Sequence[int], grain: int, start: int = 0) -> Iterator[CodePart]:
    """Yields what the codes from `start` on stand for: completions, with a result between two of them."""
    sampled = True
    while start < len(codes):
        end = min(start + (-(-codes[start] // grain) if sampled else RESULT), len(codes))
        yield CodePart(min(codes[start], (end - start) * grain) if sampled else codes[start], start, end, sampled)
        start, sampled = end, not sampled


def context_length(prompt: Sequence[int], grain: int) -> int:
    """Returns the real tokens of a request's prompt: those of the prompt itself, and of all turns and results behind it."""
    if len(prompt) < PROMPT:
        return len(prompt)  # of the probe, which is no code
    return prompt[1] + sum(part.real for part in parts_of(prompt, grain, PROMPT))


def real_tokens(row: Row, grain: int) -> int:
    """Returns the real tokens that the row stands for: sampled ones and results."""
    return sum(part.real for part in parts_of(row.tokens, grain))


def loss_tokens(row: Row, grain: int) -> int:
    """Returns the sampled ones in the loss."""
    total = 0.0
    for part in parts_of(row.tokens, grain):
        total += part.real * sum(row.mask[part.start : part.end]) / (part.end - part.start)
    return round(total)


def shared_again(rollout: Scored, grain: int) -> int:
    """Returns the real tokens that the rows of a rollout that branches repeat: the turns before the fork, and what lies before its first turn,
    in all rows but the first."""
    if not rollout.branches:
        return 0
    turns, pivot = rollout.episode.turns, rollout.branches[0].first
    sampled = sum(min(turn.completion.tokens[0], len(turn.completion.tokens) * grain) for turn in turns[:pivot])
    read = sum(turn.context[0] for turn in turns[1 : pivot + 1])
    return (len(rollout.branches) - 1) * (sampled + read)


# --- Task, environment and scorer of a simulated run


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
