"""Turns of a group that began in one state of the environment (`algo.credit = "state"`). Plain floats, no torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence

from headrace.core.chat.message_images import IMAGES, PLACES
from headrace.core.types import Episode, Turn

STATE_WEIGHT = 1.0
"""The weight of advantages among turns in one state, if `algo.state_weight` is not given."""


def state_advantages(
    returns: Sequence[Sequence[float]],
    states: Sequence[Sequence[Hashable]],
    compare: Callable[[tuple[float, ...]], list[float]],
) -> list[list[float]]:
    """Returns advantages per rollout and turn: each turn is compared with all turns of the group that began in the same state, of its own rollout too (GiGPO,
    arXiv 2505.10978, eq. 6 and 7).

    `compare`: an advantage function of numbers. A turn in a state in which no other began is compared with nothing."""
    places: defaultdict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    for rollout, of_turns in enumerate(states):
        for turn, state in enumerate(of_turns):
            places[state].append((rollout, turn))
    advantages = [[0.0] * len(of_turns) for of_turns in returns]
    for there in places.values():
        compared = compare(tuple(returns[rollout][turn] for rollout, turn in there))
        for (rollout, turn), advantage in zip(there, compared, strict=True):
            advantages[rollout][turn] = advantage
    return advantages


def states_of(episode: Episode) -> list[Hashable]:
    """Returns the state of the environment in which each turn began, as something to be compared within a group: the name that the environment gave it, or
    else what the agent was told before the turn, behind the conversation so far."""
    return [(turn.agent, turn.state or _observation(turn)) for turn in episode.turns]


def _observation(turn: Turn) -> Hashable:
    """The texts of its new messages, without ids of tool calls, which differ where nothing else does. The tokens before a turn that is no chat."""
    if not turn.messages:
        return turn.context
    keys = ("role", "name", "content", PLACES, IMAGES)
    texts = [[str(message.get(key, "")) for key in keys] for message in turn.messages]
    return tuple(map(tuple, texts))


def met_again(episodes: Sequence[Episode]) -> tuple[int, int]:
    """Returns the number of turns of a group behind the first of their rollout, and of those of them that began in a state in which another turn began."""
    states = [states_of(episode) for episode in episodes]
    counts = Counter(state for of_turns in states for state in of_turns)
    later = [state for of_turns in states for state in of_turns[1:]]
    return len(later), sum(counts[state] > 1 for state in later)
