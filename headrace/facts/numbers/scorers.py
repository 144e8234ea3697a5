"""The time that each part of the reward took, its retries and its failures."""

from __future__ import annotations

from collections import Counter

from headrace.facts.facts import ScorerAsked
from headrace.facts.run_sums import RunSums, counter
from headrace.facts.texts import counted, plural, short_time


class ScorerUse(RunSums):
    """All calls of one part of the reward."""

    what: str
    """A function, a service, a judge."""
    calls: int = 0
    """Each for a group."""
    completions: int = 0
    attempts: int = 0
    """Requests over the network."""
    retries: int = 0
    tokens: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    longest: float = 0.0
    failures: Counter[str] = counter()
    """Completions without a score, by reason."""

    def add(self, one: ScorerAsked) -> None:
        self.calls += 1
        self.completions += one.completions
        self.attempts += one.attempts
        self.retries += one.retries
        self.tokens += one.tokens
        self.seconds += one.seconds
        self.waited += one.waited
        self.longest = max(self.longest, one.seconds)
        self.failures.update(one.failures)

    @property
    def words(self) -> str:
        """One line: `12 groups, 1.3 s each (longest 4 s), 2 repeated requests, 300 tokens, failed: 4 reward_timeout`."""
        parts = [
            plural(self.calls, "group"),
            f"{short_time(self.seconds / self.calls)} each (longest {short_time(self.longest)})",
        ]
        parts += [plural(self.retries, "repeated request")] if self.retries else []
        parts += [f"{self.tokens:,} tokens"] if self.tokens else []
        parts += [f"failed: {counted(self.failures)}"] if self.failures else []
        return ", ".join(parts)
