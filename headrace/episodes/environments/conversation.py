"""Chat to tokens and back, for one rollout: what was sampled stays as it was sampled, and only new messages are rendered (C5).

A chat template is a program of the model's author, and may write earlier messages differently when later ones follow: some drop the
thinking of earlier turns, some trim white space. So the whole conversation is rendered at each turn, with the replies exactly as they
were sampled. If the text begins with the text that the path stands for, the rest is the new part: it alone becomes tokens, behind the
tokens that were sampled. If it does not, the template has rewritten history: a new path begins with the tokens of the whole text, as
the model would be asked in use, and the turn is counted as forked (a turn without parents).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from headrace.core.chat.message_images import IMAGES, with_image_parts
from headrace.core.chat.messages import TemplateUse, Tool, begins_answer, described
from headrace.core.chat.reading import CLOSING, CallReader, is_open_in, is_opened_by, read_calls
from headrace.core.chat.token_text import StreamedText
from headrace.core.chat.tool_calls import HERMES, CallFormat
from headrace.core.errors import ConfigError
from headrace.core.protocols import Agent
from headrace.core.types import Completion, Constraint
from headrace.episodes.environments.config import ToolPlace
from headrace.episodes.environments.workers.episode_frames import PROBLEM, SPECIALS, ChatReply, WrittenCall
from headrace.models.chat import off_loop
from headrace.models.control_tokens import Written, texts_of
from headrace.models.images import KnownImages
from headrace.web.formats.followed_turn import TurnPiece

# --- A turn that is read while it is sampled
# Its tokens come from the engine, and its text leaves in pieces that later tokens cannot change.


class TurnStream:
    def __init__(self) -> None:
        self.changed = asyncio.Event()
        """Set when there is a token that no piece has."""
        self.prompt_tokens = 0
        """Tokens before the turn."""
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._given = 0
        """Number of tokens in earlier pieces."""
        self._text: StreamedText | None = None
        self._calls: CallReader | None = None

    def begin(self, text: StreamedText, calls: CallReader | None, prompt_tokens: int) -> None:
        """Called before the turn is sampled. `calls`: reads the tool calls in its text; None if the model is shown no tools."""
        self._text, self._calls, self.prompt_tokens = text, calls, prompt_tokens

    def heard(self, token: int, logprob: float) -> None:
        """Takes the next token. It is only kept, because it is called within the engine's pass."""
        self._tokens.append(token)
        self._logprobs.append(logprob)
        self.changed.set()

    def new(self) -> TurnPiece:
        """Returns what was heard since the last piece."""
        return self._piece(self._tokens, self._logprobs, last=False)

    def rest(self, done: Completion) -> TurnPiece:
        """Returns the last piece. `done`: the whole turn, of which the engine may have reported nothing so far."""
        assert list(done.tokens[: len(self._tokens)]) == self._tokens, "a stream has other tokens than its turn"
        return self._piece(done.tokens, done.logprobs, last=True)

    def _piece(self, tokens: Sequence[int], logprobs: Sequence[float], last: bool) -> TurnPiece:
        assert self._text is not None, "a turn is sampled before its stream has begun"
        new, of_new = tokens[self._given :], logprobs[self._given :]
        self._given = len(tokens)
        text = self._text.push(new, last)
        if self._calls is not None:
            text = "".join(event for event in self._calls.push(text, last) if isinstance(event, str))
        return TurnPiece(text, new, of_new)


# --- conversation ------------------------------------------------------------


Message = Mapping[str, Any]

NO_ARGUMENTS: Mapping[str, Any] = {}
ROW = TemplateUse()
"""Nothing beside what the row asks."""


class TurnEncoder(Protocol):
    """The part of `models.chat.ChatEncoder` that conversations use."""

    @property
    def call_format(self) -> CallFormat: ...

    @property
    def images(self) -> KnownImages | None: ...

    def argument_problem(self, names: Iterable[str]) -> str: ...

    def write(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        arguments: Mapping[str, Any] = ...,
        continues: bool | None = None,
    ) -> Written: ...

    def encode(self, written: Written) -> tuple[int, ...]: ...

    def specials_in(self, messages: Sequence[Message]) -> set[str]: ...

    def surely_longer(self, text: str, most: int) -> bool: ...

    def most_characters(self, tokens: int) -> int: ...

    def written_messages(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), arguments: Mapping[str, Any] = ...
    ) -> str: ...

    def encode_completion(self, text: str, ended: bool) -> tuple[int, ...]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def decode_showing(self, markers: Collection[str]) -> Callable[[Sequence[int]], str]: ...

    def written(self, tokens: Sequence[int]) -> str: ...

    def has_ended(self, completion: Completion) -> bool: ...


class TokenPath(NamedTuple):
    """All tokens up to the end of a turn. It shares those of the turns before: a copy of a long history for each turn would cost most of a call."""

    before: TokenPath | None
    own: tuple[int, ...]
    """Tokens of the turn: its context, and its completion."""
    size: int
    """The number of all."""

    def tokens(self) -> tuple[int, ...]:
        pieces, path = [self.own], self.before
        while path is not None:
            pieces.append(path.own)
            path = path.before
        found: list[int] = []
        for piece in reversed(pieces):
            found += piece
        return tuple(found)


def extended(before: TokenPath | None, own: tuple[int, ...]) -> TokenPath:
    """Returns the path with the tokens of another turn; `before`: None where it begins."""
    return TokenPath(before, own, len(own) + (before.size if before else 0))


class _Past(NamedTuple):
    """A message that the path holds."""

    sampled: Message
    """A reply has its text as it was sampled."""
    parsed: Message
    """A reply has the calls that were read from it."""


class _Place(NamedTuple):
    """A turn that is about to be sampled: what goes before it."""

    added: Sequence[Message]
    given: Sequence[Message]
    """The new messages, as they are kept and as the template sees them."""
    text: str
    """The whole conversation as the template writes it."""
    context: tuple[int, ...]
    """The tokens behind the path, or of the whole conversation if a path begins (`fresh`); none if they are too many."""
    fresh: bool
    continues: bool
    """Whether the last message is the begin of the answer."""
    size: int
    """The number of tokens of the context."""
    images: tuple[str, ...] = ()
    """The digests of the images of all messages, the new ones too."""


class Conversation:
    """The messages of one rollout, and the tokens that stand for them."""

    def __init__(
        self,
        agent: Agent,
        encoder: TurnEncoder,
        *,
        system: str,
        tools: ToolPlace,
        role: str = "",
        stops: Sequence[str] = (),
        arguments: Mapping[str, Any] = NO_ARGUMENTS,
    ) -> None:
        """`system`: begins a conversation that has no system message of its own. `tools`: the place where tools are described. `role`: the
        agent that replies, if the rollout has several. `stops`: strings that end a completion and are left out of the reply's text.
        `arguments`: those of the row for the chat template."""
        self._agent, self._encoder, self._system, self._place, self._role = agent, encoder, system, tools, role
        self._stops = tuple(stops)
        self._arguments = self._all_arguments = dict(arguments)
        self._past: list[_Past] = []
        self._as_calls = False
        """Whether the template is given replies as parsed: some allow no result of a tool without the call."""
        self._opened = self._text = ""
        """The template's text before the last reply; this and the reply, for which the path stands."""
        self._end = ""
        """The end of the last reply's turn."""
        self._images: tuple[str, ...] = ()
        """The digests of the images of all messages so far."""
        self._tools: Sequence[Message] = ()
        self._calls = 0
        self.limit_said = False
        """Whether a reply has said that the rollout is at a limit. Whoever asks again has failed, or it would ask for ever."""
        self.last: Completion | None = None
        """The completion of the last reply."""
        self.prompt_tokens = 0
        """Tokens before it."""
        self.path: TokenPath | None = None
        """The tokens up to the end of the last reply; None before the first."""

    def branch(self) -> Conversation:
        """Returns a conversation that continues after the last reply, as this one still can."""
        other = copy.copy(self)
        other._past = list(self._past)
        return other

    async def say(
        self,
        new: Sequence[Message],
        tools: Sequence[Message] | None,
        most: int = 0,
        stream: TurnStream | None = None,
        *,
        asked: TemplateUse = ROW,
        constraint: Constraint | None = None,
        state: str = "",
    ) -> ChatReply:
        """Samples the answer to new messages. `tools`: their schemas; None: those of the turn before. `most`: the most tokens of the
        answer; 0: rollout.max_tokens. `stream`: follows the answer while it is sampled. `asked`: of the template.
        `constraint`: the language that the answer is held to, in place of the run's. `state`: the name of the environment's state.

        Raises ConfigError if the chat template refuses the messages or has no place for tools."""
        if problem := self._encoder.argument_problem(asked.arguments) if asked.arguments else "":
            raise ConfigError(problem)
        self._all_arguments = {**self._arguments, **asked.arguments}
        self._tools = self._tools if tools is None else tools
        format = self._format() if self._tools else None
        characters = sum(map(len, texts_of([*new, *(tools or ())])))
        place = await off_loop(characters, partial(self._next, new, asked, characters))
        if (limit := self._agent.cut_off(place.size, fresh=place.fresh, after=self.last)) and not self.limit_said:
            self.limit_said = True
            return ChatReply(over=limit)
        before = None if place.fresh else self.path
        self.prompt_tokens = place.size + (before.size if before else 0)
        if stream:
            stream.begin(self._text_of(format), CallReader(format, self._tools) if format else None, self.prompt_tokens)
        replies: list[ChatReply] = []

        def read(done: Completion) -> dict[str, Any]:
            replies.append(self._read(done, format, place.given))
            return _as_message(replies[-1])

        begun = str(place.given[-1]["content"]) if place.continues else ""
        if constraint and (is_open_in(begun) if begun else is_opened_by(place.text)):
            constraint = msgspec.structs.replace(constraint, after=CLOSING)
        done = await self._agent.turn(
            place.context,
            fresh=place.fresh,
            after=self.last,
            most=most,
            role=self._role,
            messages=place.added,
            read=read,
            heard=stream.heard if stream else None,
            constraint=constraint,
            state=state,
        )
        self.last, self.path = done, extended(before, place.context + done.tokens)
        given = place.given[:-1] if place.continues else place.given
        self._images = place.images
        self._keep(given, place.text, done, replies[-1], begun)
        return replies[-1]

    def _next(self, new: Sequence[Message], asked: TemplateUse, characters: int) -> _Place:
        """Returns the place of the turn behind new messages with so many characters. It changes nothing but what a template is found to
        insist on, and may run beside the event loop."""
        longest = self._agent.longest
        too_long = _Place((), (), "", (), fresh=True, continues=False, size=longest + 1)
        if characters > self._encoder.most_characters(longest):
            return too_long
        added = [self._marked(message) for message in (new if self._past else [*self._front(new), *new])]
        bare = ({key: value for key, value in message.items() if key not in (PROBLEM, SPECIALS)} for message in added)
        given = [with_image_parts(message) for message in bare]
        continues = begins_answer(given) if asked.continues is None else asked.continues
        written, glue = self._rendered(given, continues)
        behind = written if glue is None else glue
        if self._encoder.surely_longer(behind.text, longest):
            return too_long
        images = self._images_of(added)
        context = self._encoder.encode(behind)
        if self._encoder.images is not None:
            context = self._encoder.images.placed(context, images if glue is None else images[len(self._images) :])
        return _Place(
            added=added,
            given=given,
            text=written.text,
            context=context,
            fresh=glue is None,
            continues=continues,
            size=len(context),
            images=images,
        )

    def _images_of(self, added: Sequence[Message]) -> tuple[str, ...]:
        """Returns the digests of the images of the conversation with messages behind it."""
        files = [file for message in added for file in message.get(IMAGES, ())]
        if not files:
            return self._images
        if self._encoder.images is None:
            raise ConfigError(
                "a message shows an image, and the model is shown none: name the column of the images in task.images (docs/vision.md)"
            )
        return (*self._images, *map(self._encoder.images.digest_of, files))

    def _marked(self, message: Message) -> Message:
        """The message, with the texts of control tokens that it holds."""
        found = sorted(self._encoder.specials_in([message]))
        return {**message, SPECIALS: found} if found else message

    def _front(self, new: Sequence[Message]) -> list[Message]:
        has_own = bool(new) and new[0].get("role") == "system"
        return [{"role": "system", "content": self._system}] if self._system and not has_own else []

    # -- rendering --------------------------------------------------------------------------------------------------------

    def _rendered(self, given: Sequence[Message], continues: bool) -> tuple[Written, Written | None]:
        """Returns the text of the conversation with `given` behind it, and its part behind the path; None if it does not extend the
        path."""
        if self._as_calls or all(message.sampled == message.parsed for message in self._past):
            return self._as_given(given, continues)
        with contextlib.suppress(ConfigError):
            written, behind = self._as_given(given, continues)
            if behind is not None:
                return written, behind
        self._as_calls = True
        return self._as_given(given, continues)

    def _as_given(self, given: Sequence[Message], continues: bool) -> tuple[Written, Written | None]:
        written = self._encoder.write(*self._shown(given), continues=continues)
        if self._as_calls and "tool_calls" in self._past[-1].parsed:
            return written, self._behind_calls(written)
        extends = self._text and written.text.startswith(self._text)
        return written, written.behind(len(self._text)) if extends else None

    def _behind_calls(self, written: Written) -> Written | None:
        """The part of the text behind the path, where the last reply is written as calls: it follows the end of that reply."""
        answered, end = self._encoder.written_messages(*self._shown(())), self._end
        place = answered.rfind(end, len(self._opened)) if end else -1
        if place < 0 or not answered.startswith(self._opened) or not written.text.startswith(answered):
            return None
        return written.behind(place + (len(end) if self._text.endswith(end) else 0))

    def _shown(self, given: Sequence[Message]) -> tuple[list[Message], Sequence[Message], Mapping[str, Any]]:
        """Messages, tools and arguments of the template."""
        past = [message.parsed if self._as_calls else message.sampled for message in self._past]
        if self._place == "template":
            return [*past, *given], described(msgspec.convert(list(self._tools), list[Tool])), self._all_arguments
        return with_tools([*past, *given], self._tools), (), self._all_arguments

    # -- replies ----------------------------------------------------------------------------------------------------------

    def _format(self) -> CallFormat:
        if self._place == "hermes":
            return HERMES
        try:
            return self._encoder.call_format
        except ConfigError as error:
            raise ConfigError(f'{error}. environment.tools = "hermes" does that') from None

    def _read(self, done: Completion, format: CallFormat | None, given: Sequence[Message]) -> ChatReply:
        stop, count = "length" if done.stop == "length" else "stop", len(done.tokens)
        text = self._text_of(format).push(done.tokens, last=True)
        if format is None:
            return ChatReply(text=text, stop=stop, tokens=count)
        reply = read_calls(text, format, self._tools)
        ids = self._ids(given) if reply.calls or reply.malformed else iter(())
        calls = [WrittenCall(name=call.name, arguments=call.arguments, id=next(ids)) for call in reply.calls]
        calls += [
            WrittenCall(name="", arguments=section.text, problem=section.why, id=next(ids))
            for section in reply.malformed
        ]
        return ChatReply(text=reply.content, calls=tuple(calls), stop=stop, tokens=count)

    def _text_of(self, format: CallFormat | None) -> StreamedText:
        """The text of a reply, calls included, which has no token yet."""
        shown = format.markers if format and self._place == "template" else ()
        decode = self._encoder.decode_showing(shown) if shown else self._encoder.decode
        return StreamedText(decode, self._stops)

    def _ids(self, given: Sequence[Message]) -> Iterator[str]:
        """Yields ids that no call of the conversation has: those that a client wrote may be of another conversation, before it edited that."""
        taken = {
            call.get("id")
            for message in [*(past.parsed for past in self._past), *given]
            for call in message.get("tool_calls") or ()
        }
        while True:
            self._calls += 1
            if (name := f"call{self._calls:05d}") not in taken:  # Mistral's templates want nine letters and digits
                yield name

    def _keep(self, given: Sequence[Message], text: str, done: Completion, reply: ChatReply, begun: str) -> None:
        """`begun`: the begin of the answer that was given. Template and reply write it as one message."""
        last = done.tokens[-1:]
        ended = self._encoder.has_ended(done)
        begun = begun if text.endswith(begun) else begun.rstrip()  # templates trim it
        content = begun + self._encoder.written(done.tokens[:-1] if ended else done.tokens)
        self._past += [_Past(message, message) for message in given]
        sampled, parsed = {"role": "assistant", "content": content}, _as_message(reply, begun)
        self._past.append(_Past(sampled, parsed if "tool_calls" in parsed else sampled))
        self._opened, self._text = text, text + self._encoder.written(done.tokens)
        self._end = self._encoder.written(last if ended else self._encoder.encode_completion("", True))


def _as_message(reply: ChatReply, begun: str = "") -> dict[str, Any]:
    """The reply as a message in OpenAI's form, with the arguments of calls as objects, as chat templates expect them."""
    message: dict[str, Any] = {"role": "assistant", "content": begun + reply.text}
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
        for call in reply.calls
        if not call.problem
    ]
    return message | ({"tool_calls": calls} if calls else {})


def with_tools(messages: Sequence[Message], tools: Sequence[Message]) -> list[Message]:
    """Writes tools into the system message, for chat templates that show none. The form is that which Hermes' models were trained with
    (https://github.com/NousResearch/Hermes-Function-Calling); the sentences are ours."""
    if not tools:
        return list(messages)
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    message = (
        f"You can call these functions:\n<tools>\n{listed}\n</tools>\nTo call one, write its name and arguments as JSON:\n"
        '<tool_call>{"name": "...", "arguments": {...}}</tool_call>'
    )
    if messages and messages[0].get("role") == "system":
        first, *rest = messages
        return [{**first, "content": f"{first['content']}\n\n{message}"}, *rest]
    return [{"role": "system", "content": message}, *messages]
