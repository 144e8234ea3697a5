"""The loads of engine.py: the requests to an engine, and how many are in flight. Standard library only, so that
contenders of every environment can import it.

All loads are closed loops: `in_flight` requests are under way from the start, and each that ends makes room for the
next one. A request samples exactly its number of tokens (end-of-sequence is ignored), so that every contender does the
same work.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

Prompt = list[int]

MEMORY_ROOM = 20
"""Number of sequences of the memory load that the KV budget holds at full length."""


@dataclass(frozen=True)
class Ask:
    prompt: Prompt
    tokens: int


@dataclass(frozen=True)
class Load:
    name: str
    about: str
    asks: list[Ask]
    in_flight: int
    context: int
    """Tokens of the longest request possible, prompt and completion."""
    running: int = 0
    """Sequences that an engine may decode at once; 0: as many as are in flight."""
    kv_tokens: int = 0
    """Tokens that the KV cache may hold; 0: as many as the load needs."""

    @property
    def at_once(self) -> int:
        return self.running or self.in_flight

    @property
    def tokens(self) -> int:
        return sum(ask.tokens for ask in self.asks)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> Load:
        fields = json.loads(line)
        return Load(**{**fields, "asks": [Ask(**ask) for ask in fields["asks"]]})


def warm_up(load: Load, asks: list[Ask]) -> Load:
    """Returns a load of the same shape with the prompts of `asks` and few tokens: the load itself cannot reuse any of
    it."""
    count = min(load.in_flight, 2 * load.at_once)
    return replace(load, asks=[Ask(ask.prompt, min(ask.tokens, 8)) for ask in asks[:count]])


def run_closed_loop(load: Load, add: Callable[[int, Ask], None], step: Callable[[], int]) -> float:
    """Returns the seconds from the first `add` to the last request's end. `step` returns how many requests ended in it."""
    started = time.perf_counter()
    sent = left = 0
    while sent < load.in_flight and sent < len(load.asks):
        add(sent, load.asks[sent])
        sent += 1
    left = len(load.asks)
    while left:
        ended = step()
        left -= ended
        for _ in range(min(ended, len(load.asks) - sent)):
            add(sent, load.asks[sent])
            sent += 1
    return time.perf_counter() - started


# --- the loads: lengths are the same in every round, prompts are not ---------------------------------------------------


class Text:
    """Cuts prompts out of a long text at random places: real language, and almost never the same twice."""

    def __init__(self, tokens: list[int], seed: int) -> None:
        self._tokens, self._random = tokens, random.Random(seed)

    def cut(self, length: int) -> Prompt:
        start = self._random.randrange(len(self._tokens) - length)
        return self._tokens[start : start + length]


def _fixed(text: Text, in_flight: int) -> Load:
    asks = [Ask(text.cut(32), 128) for _ in range(in_flight)]
    return Load(str(in_flight), f"{in_flight} prompts of 32 tokens, 128 new ones", asks, in_flight, 160)


def _group(text: Text) -> Load:
    lengths = random.Random(0)
    prompts = [text.cut(lengths.randint(180, 220)) for _ in range(16)]
    asks = [Ask(prompt, 128) for prompt in prompts for _ in range(16)]
    return Load("group", "16 prompts of about 200 tokens, 16 samples of each, 128 new tokens", asks, 256, 348)


def _documents(text: Text, count: int, length: int) -> Load:
    """Returns loads in which nearly all work is reading prompts: documents, conversations, agents."""
    asks = [Ask(text.cut(length), 8) for _ in range(count)]
    about = f"{count} prompt{'s' if count > 1 else ''} of {length:,} tokens, 8 new ones"
    return Load(f"{count}x{length // 1000}k", about, asks, count, length + 8)


def _ragged(text: Text) -> Load:
    """Returns log-normal completion lengths with a median of 120: like real ones, with a tail of few long ones."""
    lengths = random.Random(0)

    def ask() -> Ask:
        new = round(lengths.lognormvariate(4.79, 0.7))
        return Ask(text.cut(lengths.randint(20, 200)), max(20, min(512, new)))

    asks = [ask() for _ in range(192)]
    return Load("ragged", "192 requests, 64 in flight, prompts 20-200, 20-512 new tokens", asks, 64, 712)


def _memory(text: Text) -> Load:
    """Makes loads in which the engine may run more sequences than the KV budget holds, so that only the budget limits
    them."""
    lengths = random.Random(0)
    asks = [Ask(text.cut(32), lengths.randint(16, 96)) for _ in range(1000)]
    about = f"1,000 requests waiting, KV for {MEMORY_ROOM}, prompts of 32, 16-96 new tokens"
    return Load("memory", about, asks, 1000, 128, running=64, kv_tokens=MEMORY_ROOM * 128)


def _unbounded(text: Text) -> Load:
    about = f"the same requests, {MEMORY_ROOM} running at once, KV for all"
    return replace(_memory(text), name="unbounded", about=about, running=MEMORY_ROOM, kv_tokens=0)


LOADS: dict[str, Callable[[Text], Load]] = {
    "1": lambda text: _fixed(text, 1),
    "16": lambda text: _fixed(text, 16),
    "64": lambda text: _fixed(text, 64),
    "256": lambda text: _fixed(text, 256),
    "group": _group,
    "ragged": _ragged,
    "16x2k": lambda text: _documents(text, 16, 2000),
    "1x8k": lambda text: _documents(text, 1, 8000),
    "memory": _memory,
    "unbounded": _unbounded,
}

OURS_ALONE = ("memory", "unbounded")
"""Loads that the other contenders do not run."""
