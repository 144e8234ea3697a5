"""One prompt -> G episodes: environments ask for turns, the engine samples them, and whatever fails is data with a reason.

When a run is resumed, the environment of each rollout that was under way is made again, and asks for its turns again: a turn whose
request has the same name was sampled already, so that it costs nothing. The name contains a digest of all tokens before the turn
(`name_of_turn`), so that what was recorded is used for no other context than its own. An environment that exports its state finds it
among its notes (`rollout_session.py`), and goes on from there; nothing else of an environment is saved.
"""

from __future__ import annotations

import asyncio
import dataclasses
from array import array
from collections.abc import Callable, Sequence

import msgspec
import xxhash

from headrace.core.batches import Failure
from headrace.core.protocols import EnvironmentKind
from headrace.core.rewards import usable
from headrace.core.types import Completion, Episode, Prompt, RolloutKey, Scored
from headrace.episodes.rollout import ForksConfig, as_tree, path_to, pivot_of
from headrace.episodes.rollout_session import (
    ENDLESS,
    Ask,
    Decode,
    Note,
    NotebookPage,
    Played,
    RolloutSession,
    Room,
    TurnAsked,
)

OpenPage = Callable[[int, Sequence[Note]], NotebookPage]
"""Opens the page of a rollout, behind the notes of another one."""


def name_of_turn(ticket: int, prompt: Prompt, asked: TurnAsked, adapter: str = "") -> RolloutKey:
    """The key under which a turn is sampled and recorded."""
    held = msgspec.json.encode(asked.constraint) if asked.constraint else b""
    plain = asked.context == prompt.tokens and not held
    context = "" if plain else xxhash.xxh3_64_hexdigest(array("q", asked.context).tobytes() + held)
    return RolloutKey(ticket, asked.rollout, asked.turn, adapter, context)


def _unheard(rollout: int) -> None:
    pass


def _unsaved(rollout: int, before: Sequence[Note]) -> NotebookPage:
    return NotebookPage(before=before)


async def roll_out(
    kind: EnvironmentKind,
    prompt: Prompt,
    seeds: Sequence[int],
    *,
    ask: Ask,
    decode: Decode,
    room: Room = ENDLESS,
    page: OpenPage = _unsaved,
    forks: ForksConfig | None = None,
    ended: Callable[[int], None] = _unheard,
) -> list[Played | Failure]:
    """The rollouts of one prompt, side by side: one for each of `seeds`, which their environments get, and behind each its alternatives.
    `page`: opens the notes of a rollout, which are not saved unless it is given. `ended`: called with the number of each rollout and
    alternative when it asks for no more turns."""
    players = _Players(kind, prompt, seeds, ask=ask, decode=decode, room=room, page=page, ended=ended)
    each = await asyncio.gather(*(players.family(rollout, forks) for rollout in range(len(seeds))))
    return [played_rollout for family in each for played_rollout in family]


class _Players:
    """Plays the rollouts of one prompt."""

    def __init__(
        self,
        kind: EnvironmentKind,
        prompt: Prompt,
        seeds: Sequence[int],
        *,
        ask: Ask,
        decode: Decode,
        room: Room,
        page: OpenPage,
        ended: Callable[[int], None],
    ) -> None:
        self._kind, self._prompt, self._seeds = kind, prompt, seeds
        self._ask, self._decode, self._room, self._page, self._ended = ask, decode, room, page, ended

    async def family(self, rollout: int, forks: ForksConfig | None) -> list[Played | Failure]:
        """Plays one rollout, and then its alternatives."""
        page = self._page(rollout, ())
        done = await self._play(rollout, rollout, page, self._ask)
        if isinstance(done, Failure) or forks is None or not forks.alternatives:
            return [done if isinstance(done, Failure) else dataclasses.replace(done, rollout=rollout)]
        pivot, turns = pivot_of(done.episode, forks, self._seeds[rollout]), done.episode.turns
        before = page.until(pivot)
        first = len(self._seeds) + rollout * forks.alternatives

        async def alternative(number: int) -> Played | Failure:
            ask = _Continued(self._ask, done.episode, pivot)
            return await self._play(number, rollout, self._page(number, before), ask)

        others = await asyncio.gather(*(alternative(first + i) for i in range(forks.alternatives)))
        shared = [
            played_rollout
            for played_rollout in others
            if isinstance(played_rollout, Failure) or played_rollout.episode.turns[:pivot] == turns[:pivot]
        ]
        assert len(shared) == len(others), "an alternative has other turns before its fork"
        return [
            played_rollout
            if isinstance(played_rollout, Failure)
            else dataclasses.replace(played_rollout, rollout=rollout, pivot=pivot)
            for played_rollout in (done, *others)
        ]

    async def _play(self, number: int, rollout: int, page: NotebookPage, ask: Ask) -> Played | Failure:
        """`rollout`: the one whose seed the environment gets."""
        session = RolloutSession(number, ask, self._decode, limits=self._kind.limits, room=self._room, page=page)
        try:
            return await session.play(self._kind.make, self._prompt, self._seeds[rollout])
        finally:
            self._ended(number)


class _Continued:
    """Answers the turns before a fork with those of the rollout that branches, and asks for the others."""

    def __init__(self, ask: Ask, episode: Episode, pivot: int) -> None:
        self._ask, self._episode, self._pivot = ask, episode, pivot

    async def __call__(self, asked: TurnAsked) -> Completion:
        if asked.turn >= self._pivot:
            return await self._ask(asked)
        if asked.context != path_to(self._episode, asked.turn):
            raise ValueError("an environment that was restored asks for other turns than before its fork")
        return self._episode.turns[asked.turn].completion


def with_rewards(judged: Sequence[Scored | Failure], played: Sequence[Played]) -> list[Scored | Failure]:
    """Adds the environments' rewards to those of the scorer. The two never share a name. Fails rollouts that cannot be calculated with."""
    both = [
        rollout if isinstance(rollout, Failure) else _with_rewards(rollout, of)
        for rollout, of in zip(judged, played, strict=True)
    ]
    return [result if isinstance(result, Failure) else usable(result) for result in both]


def as_trees(judged: Sequence[Scored | Failure], played: Sequence[Played]) -> list[Scored | Failure]:
    """Joins the rollouts that branch from one turn. Alternatives that failed are left out of their tree, and stay as failures."""
    families: dict[int, list[Scored]] = {}
    pivots = {of.rollout: of.pivot for of in played}
    for rollout, of in zip(judged, played, strict=True):
        if isinstance(rollout, Scored):
            families.setdefault(of.rollout, []).append(rollout)
    failures = [rollout for rollout in judged if isinstance(rollout, Failure)]
    return [*(as_tree(family, pivots[rollout]) for rollout, family in families.items()), *failures]


def _with_rewards(scored: Scored, played: Played) -> Scored | Failure:
    rewards = dict(played.rewards)
    for given in played.turn_rewards:
        for name, value in given.items():
            if name in played.rewards:
                return Failure("environment_reward", f"it gives {name} to turns and returns it too; rename one")
            rewards[name] = rewards.get(name, 0.0) + value
    if not rewards:
        return scored
    if both := sorted(scored.rewards.keys() & rewards.keys()):
        return Failure("environment_reward", f"the environment and a reward function both give {both[0]}; rename one")
    total = scored.reward + sum(rewards.values())
    return msgspec.structs.replace(
        scored, reward=total, rewards={**scored.rewards, **rewards}, turn_rewards=played.turn_rewards
    )
