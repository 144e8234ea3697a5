"""The conversations of one rollout as a tree: a client sends the whole history with every request, and the tree finds the reply that it
continues.

A request whose messages begin with those of an earlier turn and its reply extends that turn's sampled tokens (C5); only the messages
behind them are rendered. So several requests may continue one reply, at the same time too. A request that continues none, because
the client has edited the history or talks about something else, begins a path of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from headrace.core.chat.messages import Message as ChatMessage
from headrace.core.chat.messages import TemplateUse, for_template
from headrace.core.types import Completion, Constraint
from headrace.episodes.environments.conversation import Conversation, TokenPath
from headrace.episodes.environments.turn_stream import TurnStream
from headrace.episodes.environments.workers.episode_frames import ChatReply

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
        sent = reply_as_sent(reply)
        self._after[_digest(digests[-1], sent)] = talk
        if asked.continues:  # clients send the begin and what was added as one message, or as two
            whole = {**sent, "content": given[-1]["content"] + sent["content"]}
            self._after[_digest(digests[-2], whole)] = talk
        return TreeReply(reply, talk.last, talk.prompt_tokens, talk.path)

    def continues(self, messages: Sequence[ChatMessage]) -> bool:
        """Whether the messages begin with those of an earlier turn and its reply."""
        return self._known(_digests(for_template(messages))) > 0

    def _known(self, digests: Sequence[bytes]) -> int:
        """The number of messages up to the last known reply that others follow; 0 if there is none."""
        return next((place for place in range(len(digests) - 2, 0, -1) if digests[place] in self._after), 0)


def reply_as_sent(reply: ChatReply) -> dict[str, Any]:
    """The reply as a message that the client gets, and sends back with the next request."""
    calls = [
        {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
        for one in reply.calls
        if not one.problem
    ]
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    return message | ({"tool_calls": calls} if calls else {})


def _digests(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Returns the digest of the first n messages for each n from 0 on."""
    digests = [b""]
    for message in messages:
        digests.append(_digest(digests[-1], message))
    return digests


def _digest(before: bytes, message: Mapping[str, Any]) -> bytes:
    """Digests what a message says. Clients write calls with other white space, and leave out empty fields."""
    calls = [
        (one["id"], one["function"]["name"], _plain(one["function"]["arguments"]))
        for one in message.get("tool_calls", ())
    ]
    # Frameworks name their replies. The name in the answer of a tool is that of its call.
    name = message.get("name") if message["role"] not in ("assistant", "tool") else None
    said = [message["role"], message.get("content") or "", message.get("tool_call_id"), name]
    said += [thought] if (thought := message.get("reasoning_content")) else []
    # Every request has all messages of its conversation, and few of them make calls, whose numbers may be of any size.
    made = json.dumps(calls, sort_keys=True).encode() if calls else b""
    return blake2b(before + msgspec.json.encode(said) + made, digest_size=16).digest()


def _plain(arguments: Any) -> Any:
    return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
