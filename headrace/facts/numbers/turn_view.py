"""The turns of an episode as people see them: what was heard and said, tools with their outcome, versions, rewards; and their lanes in a graph."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.algo.training_rows import paths_of
from headrace.core.batches import Group, Row
from headrace.core.types import Completion, Episode, Scored, Struct, Turn
from headrace.durable.journal import JournalStep
from headrace.facts.texts import clip

LONG = 200
"""Characters of a message or of a call's arguments in a line of text."""


class HeardMessage(Struct, frozen=True):
    """A message that is new before a turn."""

    who: str
    """The name of the tool whose result it is, or the role of its author."""
    text: str
    tool: bool = False
    problem: str = ""
    """The reason why there is no result (`malformed`, `unknown_tool`, `raised`, ...); empty if there is one."""


class AgedTokens(Struct, frozen=True):
    """Consecutive tokens that the same weights sampled."""

    count: int
    version: int
    lag: int
    """Its value at the step that trained them."""
    mixed: bool = False


class TurnView(Struct, frozen=True, kw_only=True):
    """One turn."""

    agent: str
    """Its role; empty for the only agent, or the first."""
    parents: tuple[int, ...]
    """Places of turns in the episode."""
    lane: int
    """Its column in the graph. A turn has its parent's, unless another turn has continued there."""
    rewritten: bool
    """Whether it begins another path of its agent, because the messages before it were changed."""
    heard: tuple[HeardMessage, ...]
    said: str
    """The text, without its tool calls."""
    calls: tuple[str, ...]
    tokens: tuple[AgedTokens, ...]
    stop: str
    rewards: dict[str, float]
    advantage: float
    """The mean over the tokens in the loss; NaN if none is."""

    @property
    def sampled(self) -> int:
        return sum(part.count for part in self.tokens)


def view_turns(step: JournalStep, group: Group, rollout: int) -> tuple[TurnView, ...]:
    """Returns the turns of one rollout."""
    one = group.scored[rollout]
    turns = one.episode.turns
    placed, advantages = lanes(one.episode), _advantages(group, rollout)
    given = [dict(rewards) for rewards in one.turn_rewards or ({},) * len(turns)]
    for branch in one.branches:
        given[branch.end - 1] |= {
            name: value for name, value in branch.rewards.items() if name not in given[branch.end - 1]
        }
    return tuple(
        TurnView(
            agent=turn.agent,
            parents=turn.parents,
            lane=placed[number],
            rewritten=_is_rewritten(turns, number),
            heard=tuple(map(_heard, turn.messages)),
            said=said_of(turn),
            calls=calls_of(turn),
            tokens=tuple(_aged(turn.completion, step.step)),
            stop=turn.completion.stop,
            rewards=given[number],
            advantage=advantages.get(number, math.nan),
        )
        for number, turn in enumerate(turns)
    )


def lanes(episode: Episode) -> list[int]:
    """Returns the lane of each turn: that of its parent for the first turn that continues there, a new one for each other."""
    placed: list[int] = []
    continued: set[int] = set()
    count = 0
    for turn in episode.turns:
        parent = turn.parents[0] if turn.parents else None
        if parent is not None and parent not in continued:
            continued.add(parent)
            placed.append(placed[parent])
        else:
            placed.append(count)
            count += 1
    return placed


def said_of(turn: Turn) -> str:
    return str(turn.reply.get("content", turn.completion.text)).strip()


def calls_of(turn: Turn) -> tuple[str, ...]:
    called = [call["function"] for call in turn.reply.get("tool_calls", ())]
    return tuple(f"{call['name']}({clip(json.dumps(call['arguments']), LONG)})" for call in called)


def story(one: Scored) -> Iterator[str]:
    """Yields lines about the turns of a chat. Single completions have none."""
    turns = one.episode.turns
    for number, turn in enumerate(turns if len(turns) > 1 or one.turn_rewards else ()):
        begins = (f" of {turn.agent}" if turn.agent else "") + ("" if turn.trained else ", which is not trained")
        if _is_rewritten(turns, number):
            begins += ", on a path of its own: the chat template rewrites earlier messages"
        for message in map(_heard, turn.messages if number else ()):
            yield f"{message.who}{' returned' if message.tool else ''}: {clip(message.text, LONG)}"
        called, said = [f"calls {call}" for call in calls_of(turn)], said_of(turn)
        given = one.turn_rewards[number] if one.turn_rewards else {}
        rewards = ", ".join(f"{name} {value:g}" for name, value in given.items())
        words = (
            [clip(said, LONG)] * bool(said) + ["; ".join(called)] * bool(called) + [f"reward {rewards}"] * bool(rewards)
        )
        yield f"turn {number + 1}{begins}: {' · '.join(words) or '(nothing)'}"
    if one.episode.cut:
        yield f"cut off at its limit of {one.episode.cut}"


def _is_rewritten(turns: Sequence[Turn], number: int) -> bool:
    turn = turns[number]
    return not turn.parents and turn.agent in {one.agent for one in turns[:number]}


def _heard(message: Mapping[str, Any]) -> HeardMessage:
    tool = message.get("role") == "tool"
    who = str(message.get("name" if tool else "role") or "")
    return HeardMessage(who, str(message.get("content")), tool, str(message.get("problem", "")))


def _aged(done: Completion, step: int) -> Iterator[AgedTokens]:
    ends = [*(span.start for span in done.spans[1:]), len(done.tokens)]
    for span, end in zip(done.spans, ends, strict=False):
        if end > span.start:
            yield AgedTokens(end - span.start, span.version, step - span.version, span.mixed)


def _advantages(group: Group, rollout: int) -> dict[int, float]:
    """Returns the mean advantage of each turn that is trained. The rows of a group are in the order of its rollouts and their paths."""
    paths = [list(paths_of(one.episode)) for one in group.scored]
    if sum(map(len, paths)) != len(group.rows):
        return {}
    first = sum(map(len, paths[:rollout]))
    found: dict[int, float] = {}
    for path, row in zip(paths[rollout], group.rows[first:], strict=False):
        start = 0
        for place, number in enumerate(path):
            turn = group.scored[rollout].episode.turns[number]
            start += len(turn.context) if place else 0
            end = start + len(turn.completion.tokens)
            if any(row.mask[start:end]):
                found[number] = _mean(row, start, end)
            start = end
    return found


def _mean(row: Row, start: int, end: int) -> float:
    kept = [value for value, kept in zip(row.advantages[start:end], row.mask[start:end], strict=True) if kept]
    return sum(kept) / len(kept)
