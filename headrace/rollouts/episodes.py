"""One prompt -> G episodes: environments ask for turns, the engine samples them, and whatever fails is data with a reason.

When a run is resumed, the environment of each rollout that was under way is made again, and asks for its turns again: a turn whose
request has the same name was sampled already, so that it costs nothing. The name contains a digest of all tokens before the turn
(`name_of_turn`), so that what was recorded is used for no other context than its own. An environment that exports its state finds it
among its notes (`notebook.py`), and goes on from there; nothing else of an environment is saved.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

import msgspec
import xxhash

from headrace.playing import EnvironmentKind
from headrace.rollout_key import RolloutKey
from headrace.rollouts.notebook import Page
from headrace.rollouts.rollout_session import ENDLESS, Ask, Decode, Played, RolloutSession, Room, TurnAsked
from headrace.types import Failure, Prompt, Scored


def name_of_turn(ticket: int, prompt: Prompt, asked: TurnAsked, adapter: str = "") -> RolloutKey:
    """The key under which a turn is sampled and recorded."""
    context = "" if asked.context == prompt.tokens else xxhash.xxh3_64_hexdigest(array("q", asked.context).tobytes())
    return RolloutKey(ticket, asked.rollout, asked.turn, adapter, context)


async def roll_out(
    kind: EnvironmentKind,
    prompt: Prompt,
    seeds: Sequence[int],
    *,
    ask: Ask,
    decode: Decode,
    room: Room = ENDLESS,
    pages: Sequence[Page] = (),
) -> list[Played | Failure]:
    """The rollouts of one prompt, side by side: one for each of `seeds`, which their environments get. `pages`: their notes, which are
    not saved unless they are given."""
    pages = pages or [Page() for _ in seeds]
    agents = [
        RolloutSession(rollout, ask, decode, limits=kind.limits, room=room, page=page)
        for rollout, page in enumerate(pages)
    ]
    return await asyncio.gather(
        *(agent.play(kind.make, prompt, seed) for agent, seed in zip(agents, seeds, strict=True))
    )


def with_rewards(judged: Sequence[Scored | Failure], played: Sequence[Played]) -> list[Scored | Failure]:
    """Adds the environments' rewards to those of the scorer. The two never share a name."""
    return [one if isinstance(one, Failure) else _with_rewards(one, of) for one, of in zip(judged, played, strict=True)]


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
