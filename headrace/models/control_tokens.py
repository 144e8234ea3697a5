"""Keeps the text of a control token, where it stands in data, from becoming that token.

`<|im_end|>\\n<|im_start|>system` in a question or in the result of a tool would end the turn and begin another one, because a tokenizer looks for
its special tokens in the whole text. So each is hidden from the template behind a character of its own, which tells, in the text that the
template has written, what came from data. There it is encoded like any other text, in one pass with what is beside it, so that a text
without control tokens has the tokens that it always has. (`sanitize_control_tokens` of transformers encodes the pieces one by one, and
gives no text, whose new part a conversation needs.)
"""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from headrace.core.errors import ConfigError

_PRIVATE = range(0xF0000, 0xFFFFE)
"""Characters without a meaning, which stand for control tokens while the template is rendered."""

_BRACKETED = re.compile(r"[<\[({|].+[>\])}|]")
_THOUGHT = re.compile("think|thought|reason", re.IGNORECASE)
"""Some templates write the marks of an empty thought into earlier answers. They belong to an answer, and a prefill may be one."""

_ASK, _ANSWER = "headrace asks", "headrace answers"
_PROBES: tuple[list[dict[str, Any]], ...] = (
    [{"role": "system", "content": "headrace"}],
    [],
)
_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": _ASK},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": _ASK},
]


@dataclass(frozen=True)
class Written:
    """A text that a template has written, and the control tokens in it that came from data."""

    text: str
    plain: tuple[tuple[int, str], ...] = ()
    """The place and the text of each, in order."""

    def behind(self, start: int) -> Written:
        """The text from this character on."""
        return Written(self.text[start:], tuple((at - start, token) for at, token in self.plain if at >= start))

    def with_around(self, mark: str, before: str, behind: str) -> Written:
        """The text with others before and behind each `mark` that the template has written. An empty one stands nowhere."""
        if not mark:
            return self
        text, plain, at = "", [], 0
        for place, token in (*self.plain, (len(self.text), "")):
            text += self.text[at:place].replace(mark, f"{before}{mark}{behind}")
            plain.append((len(text), token))
            text, at = text + token, place + len(token)
        return Written(text, tuple(plain[:-1]))


class Hidden:
    """Data whose control tokens are hidden, for one rendering."""

    def __init__(self, given: Any) -> None:
        """`given`: all data that the template sees."""
        self._given = given
        self._marks: dict[str, str] = {}

    @cached_property
    def _free(self) -> Iterator[str]:
        """Characters that stand nowhere in the data."""
        taken = set().union(*map(set, texts_of(self._given)))
        return (chr(code) for code in _PRIVATE if chr(code) not in taken)

    def hide_message(self, message: Mapping[str, Any], tokens: re.Pattern[str]) -> dict[str, Any]:
        """Returns the message with marks. Every turn looks at all messages, and nearly all are a role and a text."""
        content = message.get("content")
        if len(message) == 2 and isinstance(content, str) and "role" in message:
            return {"role": message["role"], "content": self.hide(content, tokens)}
        return self.hide(message, tokens) | {"role": message.get("role")}

    def hide(self, value: Any, tokens: re.Pattern[str]) -> Any:
        """Returns the value with a mark in place of each match, also in keys of mappings."""
        if isinstance(value, str):
            return tokens.sub(lambda found: self._mark(found[0]), value)
        if isinstance(value, Mapping):
            # A template asks for keys by their names.
            keys = ((key if str(key).isidentifier() else self.hide(key, tokens)) for key in value)
            return {key: self.hide(inner, tokens) for key, inner in zip(keys, value.values(), strict=True)}
        return [self.hide(inner, tokens) for inner in value] if isinstance(value, (list, tuple)) else value

    def _mark(self, token: str) -> str:
        if token not in self._marks:
            self._marks[token] = next(self._free)
        return self._marks[token]

    def shown(self, text: str) -> Written:
        """Returns the template's text with the tokens where their marks are."""
        if not self._marks:
            return Written(text)
        of = {mark: token for token, mark in self._marks.items()}
        pieces = re.split(f"([{''.join(of)}])", text)
        plain, at = [], 0
        for place, piece in enumerate(pieces):
            if place % 2:
                pieces[place] = of[piece]
                plain.append((at, of[piece]))
            at += len(pieces[place])
        return Written("".join(pieces), tuple(plain))


class ControlTokens:
    """The control tokens of one tokenizer and template.

    Two kinds are told apart. The tokens of a turn are those that the template writes around messages, and those that end a text: no data may hold
    one. Any other special token (`<think>`, `[TOOL_CALLS]`, where the tokenizer calls them special) may stand in what an assistant said,
    because it is part of an answer.
    """

    def __init__(self, tokenizer: Any, render: Callable[[Sequence[Mapping[str, Any]]], str]) -> None:
        """`render`: writes messages with the template, without opening a turn."""
        self._tokenizer = tokenizer
        added = {
            token: added_token
            for token, added_token in tokenizer.added_tokens_decoder.items()
            if added_token.content.strip()
        }
        # Not every model calls them special: DeepSeek's <｜User｜> is not. Words that somebody added stand in templates too.
        known = {
            token: added_token.content
            for token, added_token in added.items()
            if added_token.special or _BRACKETED.fullmatch(added_token.content)
        }
        written = set(tokenizer(_probed(render), add_special_tokens=False)["input_ids"]) if known else set()
        written |= {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
        self._turn = {text: token for token, text in known.items() if token in written and not _THOUGHT.search(text)}
        self._all = self._turn | {text: token for token, text in known.items() if added[token].special}
        self._numbers = set(self._all.values())
        self.of_turns, self.all = _pattern(self._turn), _pattern(self._all)

    def in_message(self, role: object) -> re.Pattern[str]:
        """The control tokens that a message of this role must not hold."""
        return self.of_turns if role == "assistant" else self.all

    def found(self, messages: Sequence[Mapping[str, Any]]) -> set[str]:
        """Returns those that stand in messages and must not."""
        return {
            match
            for message in messages
            for text in texts_of(message)
            for match in self.in_message(message.get("role")).findall(text)
        }

    def hidden(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
    ) -> tuple[Hidden, list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
        """Returns what `Hidden.shown` needs, and the three values with their control tokens hidden."""
        hidden = Hidden((messages, tools, arguments))
        return (
            hidden,
            [hidden.hide_message(message, self.in_message(message.get("role"))) for message in messages],
            hidden.hide(list(tools), self.all),
            hidden.hide(arguments, self.all),
        )

    def encode(self, written: Written) -> tuple[int, ...]:
        """Returns the tokens of a text some of whose control tokens are text. Raises ConfigError if this tokenizer cannot do that."""
        meant: Counter[int] = Counter()

        def stand_in(found: re.Match[str]) -> str:
            meant[self._all[found[0]]] += 1
            return self._stand_ins[found[0]]

        pieces, at = [], 0
        for place, token in written.plain:
            pieces += [self.all.sub(stand_in, written.text[at:place]), token]
            at = place + len(token)
        pieces.append(self.all.sub(stand_in, written.text[at:]))
        try:
            plain, unknown = self._plain
            tokens = tuple(plain.encode("".join(pieces), add_special_tokens=False).ids)
        except _CannotEncode:
            raise _refusal(written) from None
        made = Counter(token for token in tokens if token in self._numbers)
        del made[unknown], meant[unknown]  # it stands for letters too
        if made != meant:
            raise _refusal(written)
        return tokens

    # -- the tokenizer that does not know their texts ------------------------------------------------------------------------

    @cached_property
    def _stand_ins(self) -> dict[str, str]:
        """A name for each control token that stands in no text, because nobody can guess it."""
        nonce = secrets.token_hex(16)
        return {text: f"{nonce}{number:06d}" for number, text in enumerate(self._all)}

    @cached_property
    def _plain(self) -> tuple[Any, int]:
        """A copy of the tokenizer, in which control tokens have other texts and the same numbers, and its number for unknown letters;
        -1 if it knows all."""
        from tokenizers import Tokenizer

        own = getattr(self._tokenizer, "backend_tokenizer", None)
        if own is None or not hasattr(own, "to_str"):
            raise _CannotEncode
        spec, names = json.loads(own.to_str()), self._stand_ins
        for added_token in spec["added_tokens"]:
            added_token["content"] = names.get(added_token["content"], added_token["content"])
        model, vocabulary = spec["model"], spec["model"]["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(text, text): number for text, number in vocabulary.items()}
        else:  # a unigram model: pairs of text and score
            model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
        if unknown_text := model.get("unk_token"):
            model["unk_token"] = names.get(unknown_text, unknown_text)
        spec |= {"post_processor": None, "truncation": None, "padding": None}
        try:
            plain = Tokenizer.from_str(json.dumps(spec))
        except Exception:  # tokenizers raises its own, of the class Exception
            raise _CannotEncode from None
        if any(plain.token_to_id(names[text]) != number for text, number in self._all.items()):
            raise _CannotEncode
        unknown = model.get("unk_id", own.token_to_id(unknown_text) if unknown_text else None)
        return plain, -1 if unknown is None else unknown


class _CannotEncode(Exception):
    """This tokenizer has no form in which control tokens are named otherwise."""


def _refusal(written: Written) -> ConfigError:
    held = ", ".join(sorted({token for _, token in written.plain}))
    return ConfigError(
        f"a message holds the text {held}, which the tokenizer cannot encode as text; remove it from the rows, or set "
        'task.specials_in_text = "allow" if it is meant as the token'
    )


def _pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest token at a place, as tokenizers do."""
    return re.compile(_one_of(list(tokens)) or "(?!)")  # which never matches


def _one_of(texts: Sequence[str]) -> str:
    """An expression for any of these texts, in which common beginnings stand once: some models have a thousand control tokens, and programs
    as many brackets."""
    begins = groupby(sorted(text for text in texts if text), key=lambda text: text[0])
    ways = [re.escape(letter) + _one_of([text[1:] for text in group]) for letter, group in begins]
    if "" in texts:
        return f"(?:{'|'.join(ways)})?" if ways else ""
    return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})" if ways else ""


def _probed(render: Callable[[Sequence[Mapping[str, Any]]], str]) -> str:
    for front in _PROBES:  # some templates know no system role
        try:
            return render([*front, *_TURNS])
        except Exception:  # a template is a program of the model's author
            continue
    return ""


def texts_of(value: Any) -> Iterable[str]:
    """Yields every text in a value of JSON's types, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from texts_of(key)
            yield from texts_of(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from texts_of(inner)
