"""A model whose replies are written down, in tokens of its own choice, and the check that training gets exactly these tokens (C5)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.algo.training_rows import rows_of
from headrace.core.types import Completion, Prompt, Scored, VersionSpan
from headrace.episodes.episodes import Played
from headrace.episodes.rollout_session import TurnAsked
from headrace.models.chat import ChatEncoder
from support import tool_chats

ENDS = ("<|im_end|>", "</s>", "<|eot_id|>")
MERGED = ["to", "ol", "ll", " 1", "add", "ar", "\n<", '{"', '": ', "}}"]
"""Tokens of several characters: the tokenizer prefers them, and a model need not."""


def encoder_of(directory: Path, template: str) -> ChatEncoder:
    tool_chats.save_tokenizer(directory, template)
    encoder = ChatEncoder(directory)
    encoder._tokenizer.add_tokens(MERGED)
    return encoder


def as_sampled(encoder: ChatEncoder, text: str, rng: random.Random) -> tuple[int, ...]:
    """Tokens that spell the text, but not those that the tokenizer would choose."""
    vocabulary, tokens = encoder.vocabulary(), []
    while text:
        words = [word for word in (*tool_chats.SPECIAL, *MERGED) if text.startswith(word)]
        special = [word for word in words if word in tool_chats.SPECIAL]
        word = special[0] if special else rng.choice([*words, text[0]])
        tokens.append(vocabulary[word])
        text = text[len(word) :]
    return tuple(tokens)


@dataclass
class Model:
    """An engine that says what is written down, in tokens of its own choice."""

    encoder: ChatEncoder
    says: Sequence[str]
    seed: int = 0
    asked: list[TurnAsked] = field(default_factory=list)
    sampled: list[Completion] = field(default_factory=list)

    async def __call__(self, asked: TurnAsked) -> Completion:
        rng = random.Random(f"{self.seed}/{asked.turn}")
        self.asked.append(asked)
        tokens = as_sampled(self.encoder, self.says[asked.turn], rng)
        stop: Any = "stop" if self.says[asked.turn].endswith(ENDS) else "length"
        logprobs = tuple(-rng.random() for _ in tokens)
        spans = (VersionSpan(0, asked.turn, 0), *([VersionSpan(1, asked.turn + 1, 0)] if len(tokens) > 1 else []))
        self.sampled.append(Completion(tokens, logprobs, spans, stop))
        done = self.sampled[-1]
        for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            await self.before(place)
            if asked.heard:
                asked.heard(token, logprob)
        return done

    async def before(self, place: int) -> None:
        """Called before each token of a turn."""
        await asyncio.sleep(0)


def check_rows(played: Played, model: Model) -> None:
    """Every sampled token is trained once, with the numbers it was sampled with, behind the tokens it was sampled after."""
    scored = Scored(played.episode, 1.0, {})
    rows = [row for _, row in rows_of(Prompt("p", "?", (1,)), scored, 0.5)]
    trained = [
        (token, logprob, version)
        for row in rows
        for token, logprob, version, kept in zip(row.tokens, row.logprobs, row.versions, row.mask, strict=True)
        if kept
    ]
    assert sorted(trained) == sorted(  # rows are in the order of their leaves, not of sampling
        pair for one in model.sampled for pair in zip(one.tokens, one.logprobs, one.versions(), strict=True)
    )
    paths = [(*row.prompt, *row.tokens) for row in rows]
    for asked, done in zip(model.asked, model.sampled, strict=True):
        whole = (*asked.context, *done.tokens)
        assert any(path[: len(whole)] == whole for path in paths), (
            "a turn was sampled after other tokens than its row's"
        )
