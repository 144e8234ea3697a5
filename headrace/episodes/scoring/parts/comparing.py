"""Comparisons of two completions become rewards: the share of the others that a completion is better than.

Every two completions of a group are compared once. Which of them stands first is drawn from a digest of what is compared, so that the
preference of a judge for the first or the second place falls on all alike, and a comparison that is repeated is the same comparison.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import xxhash

from headrace.core.batches import Failure
from headrace.episodes.scoring.job import Ask, Effort, ScoringJob, Values

Pair = tuple[int, int]
"""The numbers of two completions: the first and the second place."""


def shuffled_by(key: str, items: Sequence[Any]) -> list[Any]:
    """Returns the items in an order that depends on `key` and their number alone."""
    return [item for _, item in sorted((_digest(f"{key}/{place}"), item) for place, item in enumerate(items))]


def key_of(job: ScoringJob) -> str:
    """Returns a digest of what is judged."""
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode((job.prompt, job.completions)))


def pairs_of(job: ScoringJob) -> list[Pair]:
    """Returns every two completions with different texts, each pair in the order in which it is compared."""
    key, texts = key_of(job), job.completions
    both = [(i, j) for i, j in itertools.combinations(range(len(texts)), 2) if texts[i] != texts[j]]
    return [(i, j) if _digest(f"{key}/{i}/{j}") & 1 else (j, i) for i, j in both]


def win_rates(count: int, pairs: Sequence[Pair], values: Values) -> Values:
    """Returns each completion's share of its comparisons with all others that it won; a tie counts half, and so does an equal text, which
    is not compared. `values`: 1 where the first of a pair is better, 0 where the second is, 0.5 for a tie. A comparison that failed fails both.
    """
    if count < 2:
        return [
            Failure("nothing_to_compare", "the group has one completion to compare, because the others failed")
        ] * count
    won = [0.5 * (count - 1)] * count  # as if all were ties
    failed: dict[int, Failure] = {}
    for (first, second), value in zip(pairs, values, strict=True):
        if not isinstance(value, float) or not 0 <= value <= 1:
            why = value if isinstance(value, Failure) else Failure("reward_out_of_range", _out_of_range(value))
            failed |= {first: why, second: why}
            continue
        won[first] += value - 0.5
        won[second] += 0.5 - value
    return [failed.get(i, won[i] / (count - 1)) for i in range(count)]


def compared(ask: Ask) -> Ask:
    """Makes rewards out of comparisons. `ask` gets a job with `rivals`."""

    async def call(job: ScoringJob, effort: Effort) -> Values:
        pairs = pairs_of(job)
        values: Values = []
        if pairs:
            values = await ask(of_pairs(job, pairs), effort)
        return win_rates(len(job.completions), pairs, values)

    return call


def of_pairs(job: ScoringJob, pairs: Sequence[Pair]) -> ScoringJob:
    """Returns the job of the comparisons."""
    first, second = (tuple(job.completions[pair[place]] for pair in pairs) for place in (0, 1))
    return msgspec.structs.replace(job, completions=first, rivals=second, completion_tokens=(), transcripts=())


def _digest(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


def _out_of_range(value: Any) -> str:
    return f"a comparison gave {value!r:.60}; it gives 1 if the first is better, 0 if the second is, and 0.5 for a tie"
