"""Teachers that read what the policy wrote as text, with a vocabulary of their own. Their judgement is a reward."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.core.batches import Failure
from headrace.core.protocols import Engine, Scorer
from headrace.core.types import Completion, Episode, Prompt, Scored, Turn
from headrace.episodes.scoring.teacher.stage import REFUSED, Takes, ask, slice_of
from headrace.facts.waits import Waits

Message = dict[str, Any]
_FOR_TEMPLATES = ("role", "content", "tool_calls", "tool_call_id", "name")
"""The fields of a message that chat templates know."""


@dataclass(frozen=True, kw_only=True)
class TextTeacher:
    """A model with any vocabulary. It reads prompt and completions as text; the policy's tokens stay as they are (C5)."""

    name: str
    engine: Engine
    takes: Takes
    weight: float
    encode_prompt: Callable[[Prompt], tuple[int, ...]]
    """Encodes a prompt with the teacher's chat template and tokenizer."""
    encode_messages: Callable[[Sequence[Message], Prompt], tuple[int, ...]]
    """Encodes a conversation that began with a prompt, with the assistant's turn opened. Raises ValueError if the template refuses it."""
    encode_completion: Callable[[str, bool], tuple[int, ...]]
    """Encodes a text and, if the flag says so, the end of an answer in the teacher's template."""
    has_ended: Callable[[Completion], bool]
    """Whether the policy itself has written an end: a stop string is none, and a teacher that expects more text would punish it."""

    async def judge(self, prompt: Prompt, episode: Episode) -> float | Failure:
        """Returns the mean log-prob in nats per byte of UTF-8, of the completions of all turns; the end of a turn counts as one byte.

        A mean per byte does not depend on how the vocabulary divides the text, so that teachers with different vocabularies are on one
        scale, as in the comparison of compressors (bits per byte).
        """
        try:
            read = self._read(prompt, episode)
        except ValueError as error:  # its chat template refuses the messages
            return Failure(REFUSED, f"{self.name}: {error}")
        if not read:
            return Failure(REFUSED, f"{self.name}: the completion has no text to score")
        answers = await asyncio.gather(*(ask(self.engine, path.tokens) for path in read))
        total = 0.0
        for path, answer in zip(read, answers, strict=True):
            if isinstance(answer, Failure):
                return Failure(answer.reason, f"{self.name}: {answer.detail}")
            total += sum(sum(slice_of(answer, start, count).logprobs) for start, count in path.scored)
        return total / sum(map(self._bytes, episode.turns))

    def _read(self, prompt: Prompt, episode: Episode) -> list[_ReadPath]:
        """Returns the teacher's tokens of the episode in few paths: a turn lengthens the path of the turn before it where the template writes
        that one again as it was read."""
        paths: list[_ReadPath] = []
        path_of: dict[int, _ReadPath] = {}
        for number, turn in enumerate(episode.turns):
            front = self._front(prompt, episode, number)
            behind = self.encode_completion(turn.completion.text, self.has_ended(turn.completion))
            if not behind:
                continue
            before = next(iter((*turn.parents, *turn.rewrites)), -1)
            path = path_of.get(before)
            if path is None or front[: len(path.tokens)] != path.tokens:
                path = _ReadPath()
                paths.append(path)
            path.scored.append((len(front), len(behind)))
            path.tokens = (*front, *behind)
            path_of[number] = path
        return paths

    def _bytes(self, turn: Turn) -> int:
        return len(turn.completion.text.encode()) + self.has_ended(turn.completion)

    def _front(self, prompt: Prompt, episode: Episode, number: int) -> tuple[int, ...]:
        if len(episode.turns) == 1 and not episode.turns[0].messages:
            return self.encode_prompt(prompt)
        if not all(turn.messages for turn in episode.turns):
            raise ValueError("the rollout is not a conversation of messages, and has several turns")
        try:
            return self.encode_messages(_conversation(episode, number, as_calls=False), prompt)
        except ValueError:  # some templates allow no result of a tool without the call
            return self.encode_messages(_conversation(episode, number, as_calls=True), prompt)


@dataclass
class _ReadPath:
    """A request to the teacher."""

    tokens: tuple[int, ...] = ()
    scored: list[tuple[int, int]] = field(default_factory=list)
    """The first token and the number of tokens of each completion."""


def _conversation(episode: Episode, number: int, *, as_calls: bool) -> list[Message]:
    """Returns the messages before the completion of a turn. `as_calls`: replies have the calls that were read from them, instead of the text
    that was sampled."""
    turn = episode.turns[number]
    messages = [{key: message[key] for key in _FOR_TEMPLATES if key in message} for message in turn.messages]
    for before in (*turn.parents, *turn.rewrites)[:1]:
        earlier = episode.turns[before]
        reply = dict(earlier.reply) if as_calls else {"role": "assistant", "content": earlier.completion.text}
        return [*_conversation(episode, before, as_calls=as_calls), reply, *messages]
    return messages


class TextScorer:
    """Adds the weighted scores of text-level teachers to the reward, each under its name."""

    def __init__(self, inner: Scorer, teachers: Sequence[TextTeacher], waits: Waits) -> None:
        self._inner, self._teachers, self._waits = inner, teachers, waits

    async def score(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[Scored | Failure]:
        asked = [teacher for teacher in self._teachers if teacher.takes(prompt)]
        judged, columns = await asyncio.gather(
            self._inner.score(prompt, episodes),
            asyncio.gather(*(self._column(teacher, prompt, episodes) for teacher in asked)),
        )
        return [_weighed(rollout, asked, [column[i] for column in columns]) for i, rollout in enumerate(judged)]

    async def close(self) -> None:
        await self._inner.close()

    async def _column(self, teacher: TextTeacher, prompt: Prompt, episodes: Sequence[Episode]) -> list[float | Failure]:
        async with self._waits.named("scoring", f"the teacher {teacher.name}"):
            return await asyncio.gather(*(teacher.judge(prompt, episode) for episode in episodes))


def _weighed(
    judged: Scored | Failure, teachers: Sequence[TextTeacher], values: Sequence[float | Failure]
) -> Scored | Failure:
    if isinstance(judged, Failure):
        return judged
    reward, rewards = judged.reward, dict(judged.rewards)
    for teacher, value in zip(teachers, values, strict=True):
        if isinstance(value, Failure):
            return value
        if not math.isfinite(value):
            return Failure("reward_nan", f"{teacher.name} gave {value}")
        rewards[teacher.name] = value
        reward += teacher.weight * value
    return msgspec.structs.replace(judged, reward=reward, rewards=rewards)


def with_system(messages: Sequence[Mapping[str, Any]], system: str) -> list[Message]:
    """Returns the conversation with the teacher's own system message, if it has one, instead of the policy's."""
    rest: Iterable[Mapping[str, Any]] = messages
    if not system:
        return list(map(dict, rest))
    if messages and messages[0].get("role") == "system":
        rest = messages[1:]
    return [{"role": "system", "content": system}, *map(dict, rest)]
