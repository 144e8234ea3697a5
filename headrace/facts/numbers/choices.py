"""The bias of a curriculum: which prompts were drawn, and which were offered by the task.

Every draw looks at candidates in the order of the task. Uniform drawing would take one of them at random, so the pools of all candidates
are those of uniform draws, and the difference is the bias of the choice.
"""

from __future__ import annotations

import math
from collections import Counter

from headrace.facts.facts import GroupEnded, PromptChosen
from headrace.facts.numbers.shares import NO_CONTRAST
from headrace.facts.run_sums import RunSums, counter

POOLS = ("new", "mixed", "solved", "hopeless", "failed")


class Choices(RunSums):
    """The counts over the whole run; all zero for a run without a curriculum."""

    draws: int = 0
    known: int = 0
    """Different prompts."""
    most: int = 0
    """How often the commonest one was drawn."""
    drawn: Counter[str] = counter()
    """Draws by the pool of the prompt."""
    offered: Counter[str] = counter()
    """Candidates by their pool."""
    flat: Counter[str] = counter()
    """Groups without contrast, by the pool of the prompt when it was drawn."""
    sizes: Counter[int] = counter()
    """Groups by their number of rollouts, if that was chosen too."""
    twins: int = 0
    """Ordered pairs of draws of one prompt."""
    means: tuple[int, float, float] = (0, 0.0, 0.0)
    """Draws for which both are known; sum of the mean reward of the prompt's last group; the same over the candidates."""
    pending: dict[int, str] = {}
    """The pool by ticket, until its group has ended."""

    def choose(self, fact: PromptChosen) -> None:
        one = fact.choice
        self.draws += 1
        self.known, self.most = one.known, max(self.most, one.drawn)
        self.drawn[one.pool] += 1
        self.offered.update(one.looked)
        self.twins += 2 * (one.drawn - 1)
        if math.isfinite(one.mean) and math.isfinite(one.offered):
            count, drawn, offered = self.means
            self.means = (count + 1, drawn + one.mean, offered + one.offered)
        self.pending[fact.ticket] = one.pool

    def end(self, fact: GroupEnded) -> None:
        pool = self.pending.pop(fact.ticket, None)
        if pool and fact.reason == NO_CONTRAST:
            self.flat[pool] += 1
        if pool and fact.rollouts:
            self.sizes[fact.rollouts] += 1

    @property
    def distance(self) -> float | None:
        """Total variation distance between the pools of drawn and of offered prompts: 0 if the choice is uniform, at most 1."""
        if not self.draws:
            return None
        offered = self.offered.total()
        return sum(abs(self.drawn[pool] / self.draws - self.offered[pool] / offered) for pool in POOLS) / 2

    @property
    def effective(self) -> float | None:
        """The number of equally likely prompts that would be drawn as unevenly: the inverse of the probability that two draws are of one
        prompt, estimated without bias by D (D - 1) / sum of n (n - 1) over prompts drawn n times (Simpson 1949, Measurement of Diversity).
        None if no prompt was drawn twice."""
        return self.draws * (self.draws - 1) / self.twins if self.twins else None

    @property
    def rewards(self) -> tuple[float, float] | None:
        """Mean reward of the last group of the drawn prompts, and of the offered ones."""
        count, drawn, offered = self.means
        return (drawn / count, offered / count) if count else None
