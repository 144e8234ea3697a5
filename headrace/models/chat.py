"""Converts messages to tokens and back, with the model's own chat template and tokenizer. Imports transformers at first use."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from headrace.core.chat.messages import Rendering, begins_answer, role_problem
from headrace.core.chat.reading import format_of, is_known_to, tools_problem
from headrace.core.chat.token_text import TokenPlaces, bytes_of_piece
from headrace.core.chat.tool_calls import CallFormat
from headrace.core.errors import ConfigError, nearest
from headrace.core.types import Completion, Constraint
from headrace.models.control_tokens import ControlTokens, Written
from headrace.models.images import KnownImages, known_images
from headrace.models.resolve import resolve_model
from headrace.models.tokenizer import Endings, as_parts, decoder_of, endings_of, load_tokenizer, writes_parts_alone

SpecialTokens = Literal["show", "hide"]
Message = Mapping[str, Any]
"""`{"role": "system" | "user" | "assistant", "content": text}`; with tools, those that `headrace.core.chat.messages.for_template` returns."""

NONE: Mapping[str, Any] = {}

T = TypeVar("T")

LONG = 1 << 14
"""Characters whose tokens take longer (about 10 ms) than an event loop should be held up."""
_USUAL = 8
"""Characters of a token that texts rarely exceed. A text of fewer is encoded whole; a longer one is counted first."""
_PIECE, _SLACK = 1 << 16, 64
"""Characters that are counted at once, and tokens that a cut between two pieces may add."""
_threads = ThreadPoolExecutor(2, "tokens")


async def off_loop(characters: int, work: Callable[[], T]) -> T:
    """Does work on a text that long: in a thread where it would hold up the event loop. Tokenizers release the interpreter's lock."""
    if characters < LONG:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_threads, work)


class ChatEncoder:
    """Encodes prompts once, before they are sampled from, and decodes completions for rewards (C5)."""

    def __init__(self, model_dir: str | Path) -> None:
        """Raises ConfigError if `model_dir` holds no tokenizer that can be loaded."""
        self.directory = Path(model_dir)
        self._tokenizer = load_tokenizer(self.directory)
        self._decode = decoder_of(self._tokenizer)
        self.images: KnownImages | None = known_images(self.directory)
        """The images that the model can be shown; None if it sees none."""
        self._rendering = Rendering()
        self._special: SpecialTokens = "show"

    def using(self, rendering: Rendering) -> ChatEncoder:
        """Returns an encoder with the same tokenizer and template, which uses the template so."""
        other = copy.copy(self)
        other._rendering = rendering
        return other

    def of_same(self, directory: Path) -> ChatEncoder:
        """Returns the encoder for another model's directory that holds the same files of tokenizer and template."""
        other = copy.copy(self)
        other.directory = directory
        return other

    def with_special_tokens(self, special: SpecialTokens) -> ChatEncoder:
        """Returns an encoder of the same tokenizer, which shows or hides special tokens in the text that it decodes."""
        other = copy.copy(self)
        other._special = special
        vars(other).pop("_hidden", None)
        return other

    @property
    def has_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def template(self) -> str:
        """The chat template, a program in Jinja; empty without one."""
        return str(self._tokenizer.chat_template or "")

    @cached_property
    def call_format(self) -> CallFormat:
        """The format in which the model writes tool calls. Raises ConfigError if the template shows it no tools."""
        self._check_template()
        return format_of(self._probe, str(self.directory))

    @cached_property
    def shows_tools(self) -> str:
        """The reason why the template shows the model no tools; empty if it does."""
        return tools_problem(self._probe, str(self.directory))

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The values of the template's variables that the run sets (`task.template`)."""
        return self._rendering.arguments

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables of the template that a task, a row or a request may set."""
        return template_variables(self._tokenizer)

    def argument_problem(self, names: Iterable[str]) -> str:
        """Says which of these arguments the template does not read; empty if it reads all."""
        self._check_template()
        unknown = sorted(set(names) - self.variables)
        if not unknown:
            return ""
        known = f"it reads {', '.join(sorted(self.variables))}" if self.variables else "it reads none"
        return (
            f"{unknown[0]} is not an argument of the chat template of {self.directory}{nearest(unknown[0], self.variables)}; {known}. "
            "Others would change nothing: remove it"
        )

    def encode_messages(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] = NONE,
        continues: bool | None = None,
    ) -> tuple[str, tuple[int, ...]]:
        """Returns what `write` does as text, and its tokens."""
        written = self.write(messages, tools, arguments, continues)
        return written.text, self.encode(written)

    def write(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] = NONE,
        continues: bool | None = None,
    ) -> Written:
        """Returns the conversation as the template writes it, with the assistant's turn opened.

        `tools`: as `headrace.core.chat.messages.described` returns them, for a template that shows them. `arguments`: values of its variables,
        beside those of the run. `continues`: whether the last message is the begin of the answer, instead of a turn that is over; None: it is
        if the assistant says it. Raises ConfigError if there is no template, or the template refuses the messages.
        """
        self._check_template()
        if problem := role_problem(messages):
            raise ConfigError(problem)
        if continues is None:
            continues = begins_answer(messages)
        try:
            return self._rendered(messages, tools, arguments, opened=not continues, continues=continues)
        except Exception as error:  # a template is a program of the model's author and may raise anything
            raise ConfigError(self._refused(messages, tools, arguments, error, continues)) from None

    def _refused(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        error: Exception,
        continues: bool,
    ) -> str:
        roles = ", ".join(str(message.get("role")) for message in messages)
        sentence = f"the chat template of {self.directory} refuses messages with the roles {roles}: {error}"

        def accepts(changed: Sequence[Message], tools: Sequence[Mapping[str, Any]] = tools) -> bool:
            try:
                self._rendered(changed, tools, arguments, opened=not continues, continues=continues)
            except Exception:  # as above
                return False
            return bool(changed)

        pairs = zip(messages, [{}, *messages], strict=False)
        joined = [message for message, before in pairs if message.get("role") != before.get("role")]
        system = [message for message in messages if message.get("role") != "system"]
        if len(joined) < len(messages) and accepts(joined):
            return f"{sentence}. It wants users and assistants to take turns: make one message of those that follow each other with the same role"
        if len(system) < len(messages) and accepts(system):
            return f"{sentence}. It has no system role: put that text (task.system) into the first question"
        if tools and accepts(messages, ()):
            return f'{sentence}. It shows no tools: set environment.tools = "hermes", which writes them into the system message'
        if continues:
            return f"{sentence}. The last message is one of the assistant, which the answer continues; some templates cannot begin an answer so"
        return sentence

    def encode(self, written: Written) -> tuple[int, ...]:
        """Returns the tokens of what `write` returned, or of a part of it. The template has already written the special tokens: adding
        them again would double the start token."""
        if self.images is not None:
            written = self.images.surrounded(written)
        if written.plain:
            return self._control_tokens.encode(written)
        return self._tokens(written.text, add_special_tokens=False)

    def surely_longer(self, text: str, most: int) -> bool:
        """Whether a text has more than `most` tokens; False where only its encoding would tell. The work grows with `most` and not with the
        text, which anybody may have sent: by its characters first (at most those of the longest token each), then by counting pieces."""
        if len(text) <= _USUAL * most:
            return False
        if len(text) > self.most_characters(most):
            return True
        count = 0
        for start in range(0, len(text), _PIECE):
            count += len(self._tokens(text[start : start + _PIECE], add_special_tokens=False)) - _SLACK
            if count > most:
                return True
        return False

    def most_characters(self, tokens: int) -> int:
        """Returns the most characters that so many tokens can stand for."""
        return tokens * self._longest_token

    @cached_property
    def _longest_token(self) -> int:
        return max(_USUAL, *map(len, self._tokenizer.get_vocab()))

    def specials_in(self, messages: Sequence[Message]) -> set[str]:
        """Returns the texts of control tokens that messages hold, and that do not become these tokens."""
        return set() if self._rendering.allows_specials else self._control_tokens.found(messages)

    def written_messages(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] = NONE,
    ) -> str:
        """Returns the conversation as the template writes it, without opening another turn. For messages that `write` accepts."""
        return self._rendered(messages, tools, arguments).text

    def _check_template(self) -> None:
        if not self.has_template:
            raise ConfigError(
                f"{self.directory} has no chat template; use an instruct model, add its chat_template.jinja, or set "
                "task.chat = false and write prompts as plain text"
            )

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        return ControlTokens(self._tokenizer, lambda messages: self._applied(messages, (), {}))

    def _probe(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
        return self._applied(messages, tools, NONE)

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        *,
        opened: bool = False,
        continues: bool = False,
    ) -> Written:
        everything = {**self._rendering.arguments, **arguments}
        if self._rendering.allows_specials:
            return Written(self._applied(messages, tools, everything, opened=opened, continues=continues))
        hidden, shown, known, values = self._control_tokens.hidden(messages, tools, everything)
        return hidden.shown(self._applied(shown, known, values, opened=opened, continues=continues))

    def _applied(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        arguments: Mapping[str, Any],
        *,
        opened: bool = False,
        continues: bool = False,
    ) -> str:
        given = [dict(message) for message in messages]
        if self.images is not None or self._writes_parts_alone:
            given = [as_parts(message) for message in given]
        shown = list(tools or ()) or None  # templates ask whether there are tools, and an empty list is one for some
        values = {**self._tokenizer.special_tokens_map, **arguments}
        usual = given and not continues and "documents" not in values
        if usual and all(map(is_plain_message, given)) and is_plain([shown, values]):
            return self._rendered_plainly(given, shown, opened, values)
        text: str = self._tokenizer.apply_chat_template(
            given,
            tools=shown,
            add_generation_prompt=opened,
            continue_final_message=continues,
            tokenize=False,
            **arguments,
        )
        return text

    @cached_property
    def _writes_parts_alone(self) -> bool:
        return writes_parts_alone(self._tokenizer)

    def _rendered_plainly(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, opened: bool, values: Mapping[str, Any]
    ) -> str:
        """Renders as `apply_chat_template` does. That looks at each value of a conversation several times, for objects that a template must not
        see, and takes longer than the template: here are values that were found to be plain."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        compiled = _compile_jinja_template(self._tokenizer.get_chat_template(None, tools))
        own = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": opened}
        text: str = compiled.render({**values, **own})
        return text

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of plain text, with the special tokens that the tokenizer adds (usually a start token). A start token that the text
        begins with is not added once more."""
        tokens = self._tokens(text, add_special_tokens=True)
        return tokens[1:] if self.bos is not None and tokens[:2] == (self.bos, self.bos) else tokens

    @property
    def bos(self) -> int | None:
        """The start token; None if the tokenizer has none."""
        return self._tokenizer.bos_token_id

    def encode_completion(self, text: str, ended: bool) -> tuple[int, ...]:
        """Returns the tokens of an assistant's answer, which follow those of `encode_messages`. `ended`: whether to add the end of turn."""
        end = self.endings.written if ended else None
        return (*self._tokens(text, add_special_tokens=False), *(() if end is None else (end,)))

    @property
    def unknown(self) -> int | None:
        """The token that stands for what the vocabulary lacks; None if no token does."""
        found: int | None = self._tokenizer.unk_token_id
        return found

    def lacking(self, characters: Iterable[str]) -> set[str]:
        """Returns those characters that no token stands for but the unknown one: a model reads them all alike."""
        if (unknown := self.unknown) is None:
            return set()
        return {character for character in characters if unknown in self._tokens(character, add_special_tokens=False)}

    @cached_property
    def endings(self) -> Endings:
        """The tokens that end a completion, by the files of the model."""
        return endings_of(self.directory, self._tokenizer)

    def end_tokens(self) -> frozenset[int]:
        """Returns every token that ends a completion."""
        return self.endings.all

    def try_constraint(self, constraint: Constraint) -> None:
        """Raises ConfigError if no completion in these tokens can be held to it."""
        from headrace.models.grammars import Grammars

        try:
            Grammars(self._tokenizer, len(self._tokenizer), self.end_tokens()).matcher(constraint)
        except ValueError as error:
            raise ConfigError(
                f"rollout.constraint: {error}; remove rollout.constraint, or choose another model"
            ) from None

    def has_ended(self, completion: Completion) -> bool:
        """Whether the model itself has written an end, rather than a stop string or the limit of tokens."""
        return completion.stop == "stop" and not self.endings.all.isdisjoint(completion.tokens[-1:])

    def vocabulary(self) -> dict[str, int]:
        """Returns the id of every token, added tokens included."""
        return dict(self._tokenizer.get_vocab())

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns text for rewards, environments and reports: without the tokens that end a completion and, if they are hidden, without all
        special tokens; otherwise unchanged."""
        return self.written([token for token in tokens if token not in self._hidden])

    def decode_showing(self, markers: Collection[str]) -> Callable[[Sequence[int]], str]:
        """Returns `decode` that also shows special tokens with these texts, such as those that mark a tool call."""
        hidden = frozenset(token for token in self._hidden if self.special.get(token) not in markers)
        return lambda tokens: self.written([token for token in tokens if token not in hidden])

    @cached_property
    def thinks(self) -> bool:
        """Whether the template tells the model's thinking from its answers."""
        return is_known_to(self.template)

    @cached_property
    def special(self) -> Mapping[int, str]:
        """The tokenizer's special tokens, by id."""
        added = {
            token: added_token.content
            for token, added_token in self._tokenizer.added_tokens_decoder.items()
            if added_token.special
        }
        return added | dict(zip(self._tokenizer.all_special_ids, self._tokenizer.all_special_tokens, strict=True))

    @cached_property
    def _hidden(self) -> frozenset[int]:
        return self.endings.all | (frozenset(self.special) if self._special == "hide" else frozenset())

    def written(self, tokens: Sequence[int]) -> str:
        """Returns text with the special tokens: exactly what the model is given."""
        return self._decode(tokens if self.images is None else self.images.in_vocabulary(tokens))

    def places(self, begin: int = 0) -> TokenPlaces:
        """Places in the text that `decode` returns. `begin`: that of its first character."""
        return TokenPlaces(lambda token: b"" if token in self._hidden else self.token_bytes(token), self.decode, begin)

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes that a token stands for. They are no text where a character is made of several tokens."""
        if (known := self._bytes.get(token)) is None:
            piece = str(self._tokenizer.convert_ids_to_tokens(token) or "")
            known = self._bytes[token] = bytes_of_piece(piece, self.written([token]))
        return known

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        return {}

    def _tokens(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


_SCALARS = (str, int, float, bool, type(None))
_ALIASED = {"reasoning_content", "reasoning", "thinking"}
"""Keys of a message that transformers gives templates under several names."""


def is_plain(value: Any) -> bool:
    """Whether a value is of JSON's types, and of no class derived from them: its methods are then known to the sandbox of templates."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind is dict:
        return all(type(key) is str and (type(inner) is str or is_plain(inner)) for key, inner in value.items())
    return kind is list and all(map(is_plain, value))


def is_plain_message(message: dict[str, Any]) -> bool:
    """Whether transformers would give a template exactly this message."""
    return is_plain(message) and None not in message.values() and _ALIASED.isdisjoint(message)


def template_variables(tokenizer: Any) -> frozenset[str]:
    """Returns the variables that the chat template of a tokenizer reads, without those that transformers sets."""
    from jinja2 import meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    template = tokenizer.chat_template or {}
    sources = template.values() if isinstance(template, dict) else [template]
    own = set(inspect.signature(tokenizer.apply_chat_template).parameters) - {"documents", "kwargs"}
    own |= {"messages", *tokenizer.special_tokens_map}
    read: set[str] = set()
    for source in sources:
        environment = _compile_jinja_template(source).environment
        read |= meta.find_undeclared_variables(environment.parse(source)) - set(environment.globals)
    return frozenset(read - own)


async def open_model(path: str, special: SpecialTokens = "show") -> tuple[Path, ChatEncoder]:
    """Returns the model's directory (fetched if it is not in the cache) and its tokenizer."""
    model_dir = await asyncio.to_thread(resolve_model, path)
    return model_dir, (await asyncio.to_thread(ChatEncoder, model_dir)).with_special_tokens(special)
