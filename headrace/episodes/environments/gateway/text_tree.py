"""The completions of one rollout that are asked for with a text or with tokens instead of messages.

A text that begins with an earlier prompt and its completion continues the tokens that were sampled (C5), and only the rest becomes tokens.
A completion that the model ended by itself has a token at its end that its text does not show, and that the client did not keep: its
continuation is a path of its own, whose context are the tokens without that one. So is a text that continues nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from headrace.core.chat.token_text import StreamedText
from headrace.core.protocols import Agent
from headrace.core.types import Completion, Constraint
from headrace.episodes.environments.conversation import extended
from headrace.episodes.environments.gateway.chat_tree import LIMIT_REPLIES, TreeReply
from headrace.episodes.environments.turn_stream import TurnStream
from headrace.episodes.environments.workers.episode_frames import ChatReply
from headrace.models.chat import off_loop
from headrace.web.errors import Refused


class TextEncoder(Protocol):
    """The part of `models.chat.ChatEncoder` that completions of texts use."""

    def encode_text(self, text: str) -> tuple[int, ...]: ...

    def encode_completion(self, text: str, ended: bool) -> tuple[int, ...]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def written(self, tokens: Sequence[int]) -> str: ...

    def has_ended(self, completion: Completion) -> bool: ...

    def surely_longer(self, text: str, most: int) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class _Path:
    """A completion, and all before it."""

    text: str
    """The text of both, with the stop string; empty if the prompt was tokens."""
    tokens: tuple[int, ...]
    """Prompt and completion."""
    ended: bool
    """Whether the last token is one that the text does not show."""
    completion: Completion


class _Next(NamedTuple):
    """The place of a turn."""

    context: tuple[int, ...]
    after: _Path | None
    """The completion that it extends; None: the context is all before it."""

    @property
    def before(self) -> tuple[int, ...]:
        return (*self.after.tokens, *self.context) if self.after else self.context


class TextTree:
    def __init__(self, agent: Agent, encoder: TextEncoder, stops: Sequence[str], role: str = "") -> None:
        """`stops`: the strings that end a completion. Its text is without them. `role`: the agent whose completions they are."""
        self._agent, self._encoder, self._stops, self._role = agent, encoder, tuple(stops), role
        self._paths: list[_Path] = []
        self._limit_replies = 0

    async def ask(
        self,
        prompt: str | Sequence[int],
        most: int,
        stream: TurnStream | None = None,
        constraint: Constraint | None = None,
    ) -> TreeReply:
        """Samples the completion of a text or of tokens. `most`: the most tokens of it, 0 for rollout.max_tokens. `constraint`: its language.

        Raises Refused for an empty prompt, and what `Agent.turn` raises."""
        place, count, size = await off_loop(len(prompt), partial(self._place, prompt))
        if not count:
            raise Refused(400, "the prompt has no tokens; begin with a start token at least")
        fresh, after = place.after is None, place.after.completion if place.after else None
        if limit := self._agent.cut_off(size, fresh=fresh, after=after):
            self._limit_replies += 1
            if self._limit_replies <= LIMIT_REPLIES:
                return TreeReply(ChatReply(over=limit), None, count)
        if stream:
            stream.begin(StreamedText(self._encoder.decode, self._stops), None, count)
        done = await self._agent.turn(
            place.context,
            fresh=fresh,
            after=after,
            most=most,
            role=self._role,
            messages=[{"role": "user", "content": self._encoder.written(place.context)}],
            read=self._as_message,
            heard=stream.heard if stream else None,
            constraint=constraint,
        )
        self._keep(prompt, place, done)
        stop = "length" if done.stop == "length" else "stop"
        reply = ChatReply(text=self._said(done), stop=stop, tokens=len(done.tokens))
        return TreeReply(reply, done, count, extended(None, place.before + done.tokens))

    def continues(self, prompt: str | Sequence[int]) -> bool:
        """Whether the prompt begins with an earlier one and its completion."""
        return bool(self._with_text(prompt) if isinstance(prompt, str) else self._with_tokens(tuple(prompt)))

    def _place(self, prompt: str | Sequence[int]) -> tuple[_Next, int, int]:
        """Returns the place of a turn, the number of its tokens and of those of its context. A text that is longer than any path becomes no
        tokens."""
        if isinstance(prompt, str) and self._encoder.surely_longer(prompt, self._agent.longest):
            return _Next((), None), self._agent.longest + 1, self._agent.longest + 1
        place = self._of_text(prompt) if isinstance(prompt, str) else self._of_tokens(tuple(prompt))
        return place, len(place.before), len(place.context)

    def _of_text(self, prompt: str) -> _Next:
        if not (known := self._with_text(prompt)):
            return _Next(self._encoder.encode_text(prompt), None)
        path = max(known, key=lambda one: len(one.text))
        glue = self._encoder.encode_completion(prompt[len(path.text) :], False)
        return _Next((*path.tokens[:-1], *glue), None) if path.ended else _Next(glue, path)

    def _of_tokens(self, prompt: tuple[int, ...]) -> _Next:
        if not (known := self._with_tokens(prompt)):
            return _Next(prompt, None)
        path = max(known, key=lambda one: len(one.tokens))
        return _Next(prompt[len(path.tokens) :], path)

    def _with_text(self, prompt: str) -> list[_Path]:
        return [one for one in self._paths if one.text and prompt.startswith(one.text)]

    def _with_tokens(self, prompt: tuple[int, ...]) -> list[_Path]:
        return [one for one in self._paths if prompt[: len(one.tokens)] == one.tokens]

    def _keep(self, prompt: str | Sequence[int], place: _Next, done: Completion) -> None:
        text, ended = self._encoder.decode(done.tokens), self._encoder.has_ended(done)
        whole = prompt + text if isinstance(prompt, str) else ""
        self._paths.append(_Path(text=whole, tokens=(*place.before, *done.tokens), ended=ended, completion=done))

    def _said(self, done: Completion) -> str:
        return StreamedText(self._encoder.decode, self._stops).push(done.tokens, last=True)

    def _as_message(self, done: Completion) -> dict[str, Any]:
        return {"role": "assistant", "content": self._said(done)}
