"""How many groups without contrast does a curriculum draw? A model of solve rates instead of a model of language: seconds, not minutes.

The demo's task has 136 different prompts. Here each has a logit of its solve rate. A trained group raises that of its own prompt by `OWN`
and all others by `ALL`, and every step moves each by a random amount. The numbers are chosen so that uniform drawing gives the shares of
the real demo, a quarter of 40 steps at a time: 33, 37, 56 and 74 % (seed 0). 16 groups are in flight and end out of order.

    python benchmarks/curriculum.py
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from headrace.core.types import Prompt
from headrace.durable.journal import GoneRecord, ReadyRecord
from headrace.loop.curriculum import open_curriculum
from headrace.loop.curriculum_config import CurriculumConfig
from headrace.testing.makers import completion, group, row, scored

PROMPTS, STEPS, GROUPS, SIZE, FLYING = 136, 40, 8, 8, 16
MEAN, SPREAD, OWN, ALL, WOBBLE = -2.2, 2.0, 0.5, 0.019, 0.3
SEEDS = 8


@dataclass
class Problems:
    """Protocol `Task`: the prompts in a random order, with repetitions."""

    chance: random.Random

    def draw(self) -> Prompt:
        number = self.chance.randrange(PROMPTS)
        return Prompt(f"train/{number}", "", (number,))

    def held_out(self, count: int) -> list[Prompt]:
        return []

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass


@dataclass(frozen=True)
class Drawn:
    """The result of one simulated run."""

    flat: float
    """Share of drawn groups without contrast."""
    quarters: list[float]
    """The same in each quarter of the steps."""
    effective: float
    """Equally likely prompts that would be drawn as unevenly."""
    draws: int
    rollouts: int
    solved: float
    """Mean solve rate of all prompts at the end."""


def simulate(config: CurriculumConfig, seed: int) -> Drawn:
    chance, spread = random.Random(f"run/{seed}"), random.Random(f"prompts/{seed}")
    logits = [spread.gauss(MEAN, SPREAD) for _ in range(PROMPTS)]
    curriculum = open_curriculum(Problems(random.Random(f"task/{seed}")), config, SIZE)
    flying: list[tuple[int, int, tuple[float, ...]]] = []
    quarters = [Counter[bool]() for _ in range(4)]
    times: Counter[int] = Counter()
    trained = ticket = rollouts = 0
    while trained < STEPS * GROUPS:
        while len(flying) < FLYING:
            prompt = curriculum.draw(ticket)[0]
            number, size = prompt.tokens[0], prompt.rollouts or SIZE
            times[number] += 1
            rollouts += size
            rate = 1 / (1 + math.exp(-logits[number]))
            flying.append((ticket, number, tuple(float(chance.random() < rate) for _ in range(size))))
            ticket += 1
        ended, number, rewards = flying.pop(chance.randrange(FLYING // 2))
        flat = len(set(rewards)) == 1
        quarters[4 * trained // (STEPS * GROUPS)][flat] += 1
        if flat:
            curriculum.count(GoneRecord(0.0, ended, "dropped", "no_contrast", rewards=rewards))
            continue
        parts = tuple(scored(completion([1]), reward) for reward in rewards)
        curriculum.count(ReadyRecord(0.0, replace(group(ended, row([1])), scored=parts)))
        trained += 1
        logits[number] += OWN
        logits = [logit + ALL + (chance.gauss(0, WOBBLE) if trained % GROUPS == 0 else 0.0) for logit in logits]
    total = sum(times.values())
    return Drawn(
        flat=sum(quarter[True] for quarter in quarters) / sum(quarter.total() for quarter in quarters),
        quarters=[quarter[True] / quarter.total() for quarter in quarters],
        effective=total * (total - 1) / sum(n * (n - 1) for n in times.values()),
        draws=total,
        rollouts=rollouts,
        solved=statistics.mean(1 / (1 + math.exp(-logit)) for logit in logits),
    )


def line(name: str, config: CurriculumConfig) -> str:
    runs = [simulate(config, seed) for seed in range(SEEDS)]
    mean = lambda values: statistics.mean(values)  # noqa: E731
    quarters = " | ".join(f"{mean(run.quarters[i] for run in runs):.0%}" for i in range(4))
    flat, spread = mean(run.flat for run in runs), statistics.stdev(run.flat for run in runs)
    return (
        f"| {name} | {flat:.0%} ± {spread:.0%} | {quarters} | {mean(run.draws for run in runs):.0f} "
        f"| {mean(run.rollouts for run in runs):.0f} | {mean(run.effective for run in runs):.0f} | {mean(run.solved for run in runs):.3f} |"
    )


def main() -> None:
    print(
        "| curriculum | without contrast | steps 1-10 | 11-20 | 21-30 | 31-40 | groups drawn | rollouts drawn | effective prompts | solved |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    print(line("uniform", CurriculumConfig()), flush=True)
    for candidates in (16, 64):
        for rest in (128, 512, 2048):
            pools = CurriculumConfig(kind="pools", candidates=candidates, rest=rest)
            print(line(f"pools, {candidates} candidates, rest {rest}", pools), flush=True)
    for least in (0.3, 0.5, 0.7):
        contrast = CurriculumConfig(kind="contrast", least_chance=least)
        print(line(f"contrast, least chance {least}", contrast), flush=True)
    for largest in (16, 32):
        grown = CurriculumConfig(kind="contrast", least_chance=0.7, largest_group=largest)
        print(line(f"contrast, least chance 0.7, groups of up to {largest}", grown), flush=True)


if __name__ == "__main__":
    main()
