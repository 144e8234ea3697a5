"""The content of a completion decides: by the strings and tokens that end it, and by the language that it is held to."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from headrace.core.sampling_masks import Bits, encode_set
from headrace.core.types import Constraint, Sampling
from headrace.models.grammars import Grammars, broken_by
from headrace.native.uploads import uploaded

# --- Ends of completions by their content
# Token ids, and strings found while detokenising step by step.


Decode = Callable[[Sequence[int]], str]

LONGEST_CHARACTER = 8
"""Tokens after which text that still ends in half a character is taken as it is: no character has more than four bytes."""


class Text:
    """The text of a growing list of tokens, decoded in small windows.

    Decoding tokens one by one is wrong (a character may take several tokens, a leading space may vanish), and decoding all
    of them at every step is quadratic. So a window of tokens whose text is settled is decoded with and without what came
    after it; what the second has more than the first is new, unless it ends in the middle of a character.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._window = self._settled = 0

    def push(self, token: int) -> tuple[str, bool]:
        """The text that is not settled yet, and whether this token settled it (the next call starts after it)."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._window : self._settled])
        after = self._decode(self._tokens[self._window :])
        fresh = after[len(before) :]
        if (not fresh or fresh.endswith("\ufffd")) and len(self._tokens) - self._settled < LONGEST_CHARACTER:
            return fresh.rstrip("\ufffd"), False
        self._window, self._settled = self._settled, len(self._tokens)
        return fresh, True


class Stopper:
    """Watches one completion for its own stop tokens and stop strings."""

    def __init__(self, token_ids: Iterable[int], strings: Sequence[str], decode: Decode | None) -> None:
        self._token_ids = frozenset(token_ids)
        self._strings = tuple(strings)
        self._reach = max((len(string) for string in self._strings), default=1) - 1
        self._text = Text(decode) if decode and self._strings else None
        self._tail = ""
        """The end of the settled text, in which a stop string could begin."""

    def push(self, token: int) -> bool:
        """True when the completion ends with this token."""
        return self._says_stop(token) or token in self._token_ids

    def _says_stop(self, token: int) -> bool:
        if self._text is None:
            return False
        fresh, settled = self._text.push(token)
        seen = self._tail + fresh
        if settled:
            self._tail = seen[-self._reach :] if self._reach else ""
        return any(string in seen for string in self._strings)


# --- Guides
# The state of each constrained sequence in its language, and the tokens that may follow.
#
#     token drawn ──▶ advance: a thread reads it and computes the next set ──┐
#     next forward pass ─────────────────────────────────────────────────────┴─▶ ruled out: -inf added to the other logits ──▶ draw
#
# The work runs beside the forward pass, and is awaited before the draw. A guide is a function of the constraint and of the tokens since its
# beginning: one that is preempted keeps it, one that is continued by another engine reads its prefix again.


KEPT = 64
"""Different sets that are kept as numbers to add: 4 bytes a token of the vocabulary each."""


@dataclass(frozen=True)
class AllowedSet:
    """The tokens that may come next."""

    name: bytes
    """A digest of them."""
    bits: Bits
    """[vocabulary / 8]"""
    count: int


@dataclass(eq=False)
class Guide:
    """One sequence's place in its language."""

    matcher: Any
    """An `llguidance.LLMatcher`, which one thread uses at a time."""
    opening: Stopper | None
    """Finds the text behind which the constraint holds; None once it does."""
    allowed: AllowedSet | None = None
    """None before the first set is known, and for a guide with a problem."""
    problem: str = ""
    """The reason why no token can follow; empty if one can."""
    sent: set[bytes] = field(default_factory=set)
    """Names of the sets that were reported."""


class Guides:
    """The guides of an engine."""

    def __init__(
        self, grammars: Callable[[], Grammars] | None, decode: Decode | None, vocabulary: int, ends: frozenset[int]
    ) -> None:
        """`grammars`: None for a model without a tokenizer. It is called in a thread, at the first constraint."""
        self._make, self._decode, self._vocabulary = grammars, decode, vocabulary
        self._ends = np.array(sorted(ends), np.int64)
        self._grammars: Grammars | None = None
        self._compilers = ThreadPoolExecutor(max(1, min(2, (os.cpu_count() or 1) - 1)), "constraints")
        self._steps = ThreadPoolExecutor(1, "masks")
        self._step: Future[None] | None = None
        self._rows: OrderedDict[bytes, torch.Tensor] = OrderedDict()

    # -- beginnings ---------------------------------------------------------------------------------------------------------

    def check(self, sampling: Sampling) -> None:
        """Raises ValueError if no constraint can be followed here."""
        if sampling.constraint and self._make is None:
            raise ValueError("a constraint needs the model's tokenizer, which its directory lacks; leave it out")
        if sampling.constraint and sampling.ignore_eos:
            raise ValueError("a constraint ends a completion where it is satisfied; leave ignore_eos out")

    def begin(self, constraint: Constraint, tokens: Sequence[int]) -> Future[Guide]:
        """Compiles in a thread. `tokens`: those of its completion so far. The future raises ValueError with the reason for a constraint that
        cannot be followed, or that the tokens do not fit."""
        return self._compilers.submit(self._begun, constraint, tokens)

    def _begun(self, constraint: Constraint, tokens: Sequence[int]) -> Guide:
        if self._grammars is None:
            assert self._make is not None
            self._grammars = self._make()
        opening = Stopper((), (constraint.after,), self._decode) if constraint.after else None
        guide = Guide(self._grammars.matcher(constraint), opening)
        self._follow(guide, tokens)
        if tokens and guide.problem:
            raise ValueError(f"the {len(tokens)} tokens before do not fit the constraint: {guide.problem}")
        return guide

    # -- steps --------------------------------------------------------------------------------------------------------------

    def advance(self, drawn: Sequence[tuple[Guide, int]]) -> None:
        """Begins to compute what may follow each one's token."""
        if drawn:
            self._step = self._steps.submit(self._advance, drawn)

    def _advance(self, drawn: Sequence[tuple[Guide, int]]) -> None:
        for guide, token in drawn:
            self._follow(guide, (token,))

    def _follow(self, guide: Guide, tokens: Sequence[int]) -> None:
        """Reads tokens and finds what may come next. Whatever fails in it is the problem of this sequence alone."""
        try:
            for token in tokens:
                self._read(guide, token)
            self._look(guide)
        except BaseException as error:
            guide.allowed, guide.problem = None, f"the constraint made llguidance fail: {broken_by(error)}"

    def wait(self) -> None:
        """Waits until what may follow is known."""
        step, self._step = self._step, None
        if step is not None:
            step.result()

    def _read(self, guide: Guide, token: int) -> None:
        if guide.opening is None:
            guide.matcher.consume_token(token)
        elif guide.opening.push(token):
            guide.opening = None

    def _look(self, guide: Guide) -> None:
        matcher = guide.matcher
        guide.allowed = None
        flags = np.zeros(-(-self._vocabulary // 8) * 8, np.uint8)
        if guide.opening is not None:
            flags[: self._vocabulary] = 1
            flags[self._ends] = 0
        else:
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            if matcher.is_error():
                guide.problem = f"the constraint cannot be followed further: {matcher.get_error().strip()[:400]}"
                return
            found = np.unpackbits(mask, bitorder="little")[: self._vocabulary]
            flags[: len(found)] = found
            flags[self._ends] = matcher.is_accepting()
        if not (count := int(flags.sum())):
            guide.problem = "the constraint leaves no token of this tokenizer to go on with"
            return
        bits = np.packbits(flags, bitorder="little")
        guide.allowed = AllowedSet(hashlib.blake2b(bits.tobytes(), digest_size=8).digest(), bits, count)

    # -- logits -------------------------------------------------------------------------------------------------------------

    def rule_out(self, logits: torch.Tensor, places: Sequence[int], sets: Sequence[AllowedSet]) -> None:
        """Adds -inf to the logits [R, V] of rows `places`, in place, except where their sets are. What is not a number stays none."""
        rows = torch.stack([self._row(allowed, logits.device) for allowed in sets]).to(logits.dtype)
        logits.index_add_(0, uploaded(np.array(places, np.int64), logits.device), rows)

    def _row(self, allowed: AllowedSet, device: torch.device) -> torch.Tensor:
        row = self._rows.pop(allowed.name, None)
        if row is None:
            flags = np.unpackbits(allowed.bits, bitorder="little")[: self._vocabulary]
            row = torch.from_numpy(np.where(flags, np.float32(0), np.float32(-np.inf))).to(device)
        self._rows[allowed.name] = row
        if len(self._rows) > KEPT:
            self._rows.popitem(last=False)
        return row


def reported(guide: Guide) -> tuple[bytes, bytes]:
    """Returns name and encoding of the set that was drawn from; the encoding is empty if it was reported before."""
    assert guide.allowed is not None
    name = guide.allowed.name
    if name in guide.sent:
        return name, b""
    guide.sent.add(name)
    return name, encode_set(guide.allowed.bits)
