"""The histories of one rollout as trees: a client sends its whole conversation, or its whole text, with every request, and what it continues was
sampled before.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from headrace.core.chat.messages import Message as ChatMessage
from headrace.core.chat.messages import TemplateUse, for_template
from headrace.core.chat.token_text import StreamedText
from headrace.core.errors import RolloutOver
from headrace.core.protocols import Agent
from headrace.core.types import Completion, Constraint
from headrace.episodes.environments.conversation import Conversation, TokenPath, TurnStream, extended
from headrace.episodes.environments.workers.episode_frames import ChatReply
from headrace.models.chat import off_loop
from headrace.processes.health.patience import within
from headrace.web.errors import Refused
from headrace.web.formats.responses import StoredResponses

# --- The conversations of one rollout as a tree
# A client sends the whole history with every request, and the tree finds the reply that it continues.
#
# A request whose messages begin with those of an earlier turn and its reply extends that turn's sampled tokens (C5); only the messages
# behind them are rendered. So several requests may continue one reply, at the same time too. A request that continues none, because
# the client has edited the history or talks about something else, begins a path of its own.


ANSWER = TemplateUse(continues=False)
"""An answer of its own, also after a message of the assistant, which may be another agent's."""

LIMIT_REPLIES = 8
"""Requests at a limit that are answered with an empty reply, because a client may have several in progress. The next one has failed."""


class TreeReply(NamedTuple):
    """The answer to one request."""

    reply: ChatReply
    completion: Completion | None
    """None if nothing was sampled, because the rollout is at a limit."""
    prompt_tokens: int
    path: TokenPath | None = None
    """The tokens up to the end of the completion; None if nothing was sampled."""


class ChatTree:
    def __init__(self, begin: Callable[[], Conversation]) -> None:
        """`begin`: makes an empty conversation."""
        self._begin = begin
        self._after: dict[bytes, Conversation] = {}
        """The conversation after each reply, by a digest of the messages up to that reply."""
        self._newest: Conversation | None = None
        """The one after the last reply."""
        self._limit_replies = 0

    async def ask(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        most: int,
        stream: TurnStream | None = None,
        *,
        asked: TemplateUse = ANSWER,
        constraint: Constraint | None = None,
    ) -> TreeReply:
        """Samples the answer to the last message. `tools`: their schemas; `most`: the most tokens of the answer, 0 for rollout.max_tokens;
        `stream`: follows the answer while it is sampled; `asked`: of the template; `constraint`: the language
        of the answer.

        Raises ConfigError for messages that the chat template refuses, and what `Agent.turn` raises."""
        given = for_template(messages)
        digests = _digests(given)
        known = self._known(digests)
        talk = self._after[digests[known]].branch() if known else self._begin()
        talk.limit_said = self._limit_replies >= LIMIT_REPLIES
        reply = await talk.say(given[known:], list(tools), most, stream, asked=asked, constraint=constraint)
        if reply.over:
            self._limit_replies += 1
            return TreeReply(reply, None, talk.prompt_tokens)
        sent, self._newest = reply_as_sent(reply), talk
        self._after[_digest(digests[-1], sent)] = talk
        if asked.continues:  # clients send the begin and what was added as one message, or as two
            whole = {**sent, "content": given[-1]["content"] + sent["content"]}
            self._after[_digest(digests[-2], whole)] = talk
        return TreeReply(reply, talk.last, talk.prompt_tokens, talk.path)

    def continues(self, digests: Sequence[bytes]) -> bool:
        """Whether messages begin with those of an earlier turn and its reply. `digests`: `digests_of` them, which are read once for all trees."""
        return self._known(digests) > 0

    def continues_last(self, digests: Sequence[bytes]) -> bool:
        """Whether the messages continue the newest turn."""
        return self.continues(digests) and self._after[digests[self._known(digests)]] is self._newest

    def _known(self, digests: Sequence[bytes]) -> int:
        """The number of messages up to the last known reply that others follow; 0 if there is none."""
        return next((place for place in range(len(digests) - 2, 0, -1) if digests[place] in self._after), 0)


def reply_as_sent(reply: ChatReply) -> dict[str, Any]:
    """The reply as a message that the client gets, and sends back with the next request."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in reply.calls
        if not call.problem
    ]
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    return message | ({"tool_calls": calls} if calls else {})


def digests_of(messages: Sequence[ChatMessage]) -> list[bytes]:
    """Returns what `ChatTree.continues` takes."""
    return _digests(for_template(messages))


def _digests(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Returns the digest of the first n messages for each n from 0 on."""
    digests = [b""]
    for message in messages:
        digests.append(_digest(digests[-1], message))
    return digests


def _digest(before: bytes, message: Mapping[str, Any]) -> bytes:
    """Digests what a message says. Clients write calls with other white space, and leave out empty fields."""
    calls = [
        (call["id"], call["function"]["name"], _plain(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]
    # Frameworks name their replies. The name in the answer of a tool is that of its call.
    name = message.get("name") if message["role"] not in ("assistant", "tool") else None
    parts = [message["role"], message.get("content") or "", message.get("tool_call_id"), name]
    parts += [thought] if (thought := message.get("reasoning_content")) else []
    # Every request has all messages of its conversation, and few of them make calls, whose numbers may be of any size.
    made = json.dumps(calls, sort_keys=True).encode() if calls else b""
    return blake2b(before + msgspec.json.encode(parts) + made, digest_size=16).digest()


def _plain(arguments: Any) -> Any:
    return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments


# --- The completions of one rollout that are asked for with a text or with tokens instead of messages.
#
# A text that begins with an earlier prompt and its completion continues the tokens that were sampled (C5), and only the rest becomes tokens.
# A completion that the model ended by itself has a token at its end that its text does not show, and that the client did not keep: its
# continuation is a path of its own, whose context are the tokens without that one. So is a text that continues nothing.


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
        return bool(self._known(prompt))

    def continues_last(self, prompt: str | Sequence[int]) -> bool:
        """Whether the prompt continues the newest completion."""
        return self._paths[-1:] == self._known(prompt)[-1:] != []

    def _known(self, prompt: str | Sequence[int]) -> list[_Path]:
        return self._with_text(prompt) if isinstance(prompt, str) else self._with_tokens(tuple(prompt))

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
        path = max(known, key=lambda path: len(path.text))
        glue = self._encoder.encode_completion(prompt[len(path.text) :], False)
        return _Next((*path.tokens[:-1], *glue), None) if path.ended else _Next(glue, path)

    def _of_tokens(self, prompt: tuple[int, ...]) -> _Next:
        if not (known := self._with_tokens(prompt)):
            return _Next(prompt, None)
        path = max(known, key=lambda path: len(path.tokens))
        return _Next(prompt[len(path.tokens) :], path)

    def _with_text(self, prompt: str) -> list[_Path]:
        return [path for path in self._paths if path.text and prompt.startswith(path.text)]

    def _with_tokens(self, prompt: tuple[int, ...]) -> list[_Path]:
        return [path for path in self._paths if prompt[: len(path.tokens)] == path.tokens]

    def _keep(self, prompt: str | Sequence[int], place: _Next, done: Completion) -> None:
        text, ended = self._encoder.decode(done.tokens), self._encoder.has_ended(done)
        whole = prompt + text if isinstance(prompt, str) else ""
        self._paths.append(_Path(text=whole, tokens=(*place.before, *done.tokens), ended=ended, completion=done))

    def _said(self, done: Completion) -> str:
        return StreamedText(self._encoder.decode, self._stops).push(done.tokens, last=True)

    def _as_message(self, done: Completion) -> dict[str, Any]:
        return {"role": "assistant", "content": self._said(done)}


# --- One rollout as the gateway sees it
# The secret that names it, its agents with their conversations, and its requests in progress.


T = TypeVar("T")

SECRET_BYTES = 24
"""192 random bits, which nobody guesses."""
MOST_SPEAKERS = 256
"""Agents of one rollout."""

NUMBER = "headrace.number"
"""The key under which a request's scope has its number in its rollout."""


class LastAnswer(NamedTuple):
    """The answer to a request beside which no other one was under way."""

    number: int
    to: Speaker
    digest: bytes
    """The digest of the request (`web.sending.attempt_of`)."""
    answer: TreeReply


Talks = Callable[[str], tuple[ChatTree, TextTree]]
"""Makes the conversations and the texts of an agent, by its name."""


class Speaker:
    """One agent of a rollout: the policy in a role, with conversations of its own."""

    def __init__(self, name: str, rollout: GatewayRollout, talks: Talks) -> None:
        self.name, self.rollout = name, rollout
        self.chats, self.texts = talks(name)
        self.last: Completion | None = None
        """The completion of its last turn."""

    def answered(self, answer: TreeReply) -> None:
        """Takes note of a turn."""
        self.rollout.answered += 1
        self.last = answer.completion or self.last


class GatewayRollout:
    def __init__(self, talks: Talks) -> None:
        self.secret = secrets.token_urlsafe(SECRET_BYTES)
        self._talks = talks
        self._speakers: dict[tuple[str, str], Speaker] = {}
        """Its agents by the role and the session that their requests name."""
        self.responses = StoredResponses()
        self.answered = 0
        """Requests for a turn that were answered."""
        self.said_last: LastAnswer | None = None
        self._numbers = itertools.count()
        self.error = ""
        """The last refusal, in words; empty if every request was served."""
        self.over = asyncio.Event()
        """Set when a request has failed in a way that ends the rollout or the run."""
        self.broken: Exception | None = None
        """The error of that request, if it was not the agent's."""
        self._closed = False
        self._working: set[asyncio.Task[Any]] = set()
        self.changed = asyncio.Event()
        """Set when the first request begins, and when the last one ends."""

    @property
    def asking(self) -> int:
        """Requests in progress."""
        return len(self._working)

    def speaker(self, role: str = "", session: str = "") -> Speaker:
        """Returns the agent that a request names. An agent that comes after another one of its role has a number in its name: `solver`,
        `solver 2`. `role`: empty for the only one. `session`: tells those of one role apart. Raises Refused if there are too many."""
        if found := self._speakers.get((role, session)):
            return found
        if len(self._speakers) >= MOST_SPEAKERS:
            raise Refused(400, f"the rollout has {MOST_SPEAKERS} agents already; ask in one of their roles")
        number = 1 + sum(other == role for other, _ in self._speakers)
        name = f"{role or 'agent'} {number}" if number > 1 else role
        while self.speaker_named(name):  # `solver 2` may be a role, or the second agent of `solver`
            if number == 1:
                raise Refused(400, f"the rollout has another agent of the name {name}; give the role another name")
            number += 1
            name = f"{role or 'agent'} {number}"
        self._speakers[role, session] = speaker = Speaker(name, self, self._talks)
        return speaker

    def speaker_named(self, name: str) -> Speaker | None:
        return next((speaker for speaker in self._speakers.values() if speaker.name == name), None)

    def speaker_in(self, session: str) -> Speaker | None:
        """Returns the agent whose requests named this session."""
        return next((speaker for (_, named), speaker in self._speakers.items() if named == session), None)

    def next_number(self) -> int:
        """Returns the number of the request that has come."""
        return next(self._numbers)

    def said_before(self, number: int, to: Speaker, digest: bytes) -> TreeReply | None:
        """Returns the answer to the request before this one if it asked for the same: its client has lost the answer and asks again, and a turn that
        nobody has read would be trained with the rollout's reward. None where other requests came between: an agent may ask several times at once
        for the same, and which answer was lost is not known."""
        last = self.said_last
        if last is None or (last.number, last.to, last.digest) != (number - 1, to, digest):
            return None
        self.said_last = last._replace(number=number)
        return last.answer

    def refused(self, refusal: Refused) -> Refused:
        """Notes why a request was refused."""
        self.error = refusal.message
        return refusal

    async def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs the work of one request. Raises what it raises, and RolloutOver if the rollout is closed meanwhile."""
        task = asyncio.ensure_future(work)
        self._working.add(task)
        self.changed.set()
        try:
            return await task
        except asyncio.CancelledError:
            if self._closed:
                raise RolloutOver("its agent has ended") from None
            raise
        finally:
            self._working.discard(task)
            self.changed.set()

    async def until(self, ended: asyncio.Future[T], seconds: float, who: int) -> T | None:
        """Waits for the end of what plays the rollout, and returns its result; None if the rollout has failed before. `seconds`: the time
        that it may take between its turns, 0 for any; sampling does not count. `who`: the process that takes this time.

        Raises TimeoutError when they are used up, what ended the engine, and what `ended` raises."""
        over = asyncio.ensure_future(self.over.wait())
        left, clock = seconds, asyncio.get_running_loop().time
        try:
            while not (ended.done() or over.done()):
                self.changed.clear()
                since, asking = clock(), self.asking > 0
                changed = asyncio.ensure_future(self.changed.wait())
                awaited: set[asyncio.Future[Any]] = {ended, over, changed}
                first = asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                try:
                    await (first if asking or not left else within(who, left, first))
                except TimeoutError:
                    if not (ended.done() or over.done()):  # whoever ended it in the last moment was told that it counts
                        raise
                finally:
                    changed.cancel()
                if left and not asking:
                    left = max(left - (clock() - since), 1e-3)
            if self.broken:
                raise self.broken
            return ended.result() if ended.done() else None
        finally:
            over.cancel()

    async def close(self) -> None:
        """Ends the requests in progress."""
        self._closed = True
        tasks = list(self._working)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
