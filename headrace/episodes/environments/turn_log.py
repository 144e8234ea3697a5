"""The turns of a rollout as its environment keeps them: what it asked for, with its state before each, so that another process goes on.

A note is written when a turn is asked for, and holds all that has happened since the turn before: one step of the environment is there as a
whole or not at all. When a rollout goes on, the conversation is led again from the notes. Its turns are recorded, so that only the last
one may still have to be sampled; the user's code is called again with the state and the reply of that one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import xxhash

from headrace.core.protocols import Agent
from headrace.core.types import Struct
from headrace.episodes.environments.workers.episode_frames import ChatAsked, Rewarded, RolloutDone, ToolAnswered


class TurnNote(Struct, frozen=True, tag="turn"):
    number: int
    """Its place among the turns, from 0. It replaces an earlier note of that number, and all behind it."""
    asked: ChatAsked
    rewards: tuple[Rewarded, ...]
    """The rewards that were given since the turn before was sampled."""
    after: str
    """A digest of all completions before it. It belongs to no others."""


class CallNote(Struct, frozen=True, tag="call"):
    """The result of a tool call of the last turn, where each is kept."""

    answered: ToolAnswered
    after: str
    """The digest, like that of a turn."""


class EndNote(Struct, frozen=True, tag="end"):
    """The end of the rollout, which may be killed again before its group is scored."""

    ended: RolloutDone
    rewards: tuple[Rewarded, ...]
    """Those since the last turn was sampled."""
    after: str


AnyNote = TurnNote | CallNote | EndNote
_decoder = msgspec.msgpack.Decoder(AnyNote)


class TurnLog:
    """The notes of one rollout."""

    def __init__(self, agent: Agent) -> None:
        """Reads what was kept."""
        self._agent = agent
        self._turns: list[TurnNote] = []
        self._calls: list[CallNote] = []
        self._end: EndNote | None = None
        for data in agent.kept:
            self._add(_decoder.decode(data))
        self._rewards: list[Rewarded] = []
        self._said = xxhash.xxh3_64()

    @property
    def turns(self) -> tuple[TurnNote, ...]:
        return tuple(self._turns)

    @property
    def results(self) -> tuple[dict[str, Any], ...]:
        """The results of the tool calls of the last turn."""
        return tuple(one.answered.message for one in self._calls if one.after == self.after)

    @property
    def after(self) -> str:
        """The digest of the completions so far."""
        return self._said.hexdigest()

    def said(self, tokens: Sequence[int]) -> None:
        """Counts a completion."""
        self._said.update(array("q", tokens).tobytes() + b"|")

    def rewarded(self, given: Rewarded) -> None:
        self._rewards.append(given)

    def asked(self, asked: ChatAsked) -> None:
        """Keeps a turn, before it is sampled."""
        self._keep(TurnNote(len(self._turns), asked, tuple(self._rewards), self.after))
        self._rewards.clear()

    def answered(self, given: ToolAnswered) -> None:
        self._keep(CallNote(given, self.after))

    def cut(self, number: int) -> None:
        """Forgets the turns from `number` on: they follow completions that are lost."""
        del self._turns[number:]
        self._calls.clear()
        self._end = None

    def ended(self, ended: RolloutDone) -> None:
        self._keep(EndNote(ended, tuple(self._rewards), self.after))

    @property
    def end(self) -> EndNote | None:
        """The end, if the rollout has ended behind these completions."""
        return self._end if self._end and self._end.after == self.after else None

    def _keep(self, note: AnyNote) -> None:
        self._agent.keep(msgspec.msgpack.encode(note))
        self._add(note)

    def _add(self, note: AnyNote) -> None:
        match note:
            case TurnNote():
                self.cut(note.number)
                self._turns.append(note)
            case CallNote():
                self._calls.append(note)
            case EndNote():
                self._end = note
