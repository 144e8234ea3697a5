"""The experts of a rollout of many turns: each position is kept once, and rows are the same as with whole traces."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.algo.training_rows import rows_of
from headrace.core.protocols import Limits
from headrace.core.types import Completion, Prompt, RoutingTrace, Scored, VersionSpan
from headrace.episodes.rollout_session import Played, RolloutSession, TurnAsked

TURNS, LAYERS, K = 10, 3, 2
PROMPT = Prompt("p", "?", (1, 2, 3))


class Branching:
    """Protocol `Environment`: ten turns in a row, and a second one behind the first."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        pass

    async def play(self, agent: Any) -> Mapping[str, float]:
        first = await agent.turn(PROMPT.tokens)
        for number in range(1, TURNS):
            await agent.turn((50 + number, 60))
        await agent.turn((90,), after=first)
        return {"won": 1.0}


def played(whole: list[Completion]) -> Played:
    async def ask(asked: TurnAsked) -> Completion:
        """Reports the experts of all positions; those of other requests differ, as after a swap that computes them again."""
        tokens = (7 + asked.turn, 8)
        size = (len(asked.context) + len(tokens) - 1) * LAYERS * K
        routing = RoutingTrace(LAYERS, K, 1, bytes((asked.turn * 31 + place) % 250 for place in range(size)))
        done = Completion(tokens, (-1.0, -2.0), (VersionSpan(0, 0, 0),), "stop", routing=routing)
        whole.append(done)
        return done

    session = RolloutSession(0, ask, lambda tokens: "", limits=Limits(turns=TURNS + 1))
    found = asyncio.run(session.play(Branching, PROMPT, 0))
    assert isinstance(found, Played)
    return found


def test_positions_of_a_long_rollout_are_kept_once() -> None:
    whole: list[Completion] = []
    turns = played(whole).episode.turns
    kept = [turn.completion.routing for turn in turns[:TURNS]]
    assert sum(len(one.experts) for one in kept if one) == len(whole[TURNS - 1].routing.experts)  # type: ignore[union-attr]
    assert [one.start for one in kept if one] == [0, *(4 * number for number in range(1, TURNS))]
    assert sum(len(one.routing.experts) for one in whole[:TURNS]) > 5 * len(whole[TURNS - 1].routing.experts)  # type: ignore[union-attr]


def test_rows_are_those_of_whole_traces() -> None:
    whole: list[Completion] = []
    episode = played(whole).episode
    full = tuple(
        msgspec.structs.replace(turn, completion=done) for turn, done in zip(episode.turns, whole, strict=True)
    )
    rows = [
        [row for _, row in rows_of(PROMPT, Scored(msgspec.structs.replace(episode, turns=turns), 1.0, {}), 0.5)]
        for turns in (episode.turns, full)
    ]
    assert len(rows[0]) == 2 and rows[0] == rows[1]
    for row in rows[0]:
        assert row.routing and row.routing.start == 0
        assert len(row.routing.experts) == (len(row.prompt) + len(row.tokens) - 1) * LAYERS * K
