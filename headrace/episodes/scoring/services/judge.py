"""A language model as a judge: it scores single completions, ranks all of a group, or compares two at a time.

Equal texts are judged once. The order in which a judge sees completions is drawn from a digest of their texts (`parts/comparing.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from headrace.core.batches import Failure
from headrace.episodes.scoring.job import Ask, Effort, ScoringJob, Values
from headrace.episodes.scoring.parts.comparing import compared, key_of, shuffled_by
from headrace.episodes.scoring.services.config import JudgeConfig
from headrace.episodes.scoring.services.endpoint import Endpoint
from headrace.episodes.scoring.services.http_post import Poster
from headrace.episodes.scoring.services.judge_answers import (
    ask_for_ranking,
    ask_for_score,
    ask_for_verdict,
    read_ranking,
    read_reply,
    read_score,
    read_verdict,
    system_message,
)

T = TypeVar("T")


class Judge:
    def __init__(self, config: JudgeConfig, poster: Poster) -> None:
        self._config, self._endpoint = config, Endpoint(config, "/chat/completions", poster)
        ways: dict[str, Ask] = {"score": self._scored, "rank": self._ranked, "compare": compared(self._verdicts)}
        self._way = ways[config.mode]

    async def call(self, job: ScoringJob, effort: Effort) -> Values:
        return await self._way(_as_texts(job), effort)

    async def _scored(self, job: ScoringJob, effort: Effort) -> Values:
        texts = list(dict.fromkeys(job.completions))
        config, ask = self._config, self._ask
        scores = await asyncio.gather(
            *(
                ask(ask_for_score(job.prompt, text, config), lambda said: read_score(said, config), effort)
                for text in texts
            )
        )
        by_text = dict(zip(texts, scores, strict=True))
        return [by_text[text] for text in job.completions]

    async def _ranked(self, job: ScoringJob, effort: Effort) -> Values:
        texts = shuffled_by(key_of(job), list(dict.fromkeys(job.completions)))
        if len(job.completions) < 2:
            return [Failure("nothing_to_compare", "the group has one completion to rank, because the others failed")]
        if len(texts) == 1:
            return [0.5] * len(job.completions)
        ranks = await self._ask(ask_for_ranking(job.prompt, texts), lambda said: read_ranking(said, len(texts)), effort)
        if isinstance(ranks, Failure):
            return [ranks] * len(job.completions)
        by_text = dict(zip(texts, ranks, strict=True))
        return list(rewards_of_ranks([by_text[text] for text in job.completions]))

    async def _verdicts(self, job: ScoringJob, effort: Effort) -> Values:
        pairs = zip(job.completions, job.rivals, strict=True)
        asked = (self._ask(ask_for_verdict(job.prompt, *pair), read_verdict, effort) for pair in pairs)
        return list(await asyncio.gather(*asked))

    async def _ask(self, question: str, read: Callable[[str], T], effort: Effort) -> T | Failure:
        config = self._config
        messages = [{"role": "system", "content": system_message(config)}, {"role": "user", "content": question}]
        body = {
            "model": config.model,
            "messages": messages,
            "max_completion_tokens": config.max_tokens,
            "temperature": config.temperature,
        }

        def read_it(answer: Any) -> T:
            text, tokens = read_reply(answer)
            effort.tokens += tokens
            return read(text)

        return await self._endpoint.ask(body, read_it, effort)


def rewards_of_ranks(ranks: Sequence[int]) -> list[float]:
    """[G] the share of the others that each is better than; equally good ones count half."""
    others = len(ranks) - 1
    return [
        (sum(rank < other for other in ranks) + 0.5 * (sum(rank == other for other in ranks) - 1)) / others
        for rank in ranks
    ]


def _as_texts(job: ScoringJob) -> ScoringJob:
    """Puts conversations, where there are any, in place of the last question and the last reply."""
    chat = job.columns.get(job.chat) if job.chat else None
    prompt = _told(chat) if isinstance(chat, list) else job.prompt
    completions = tuple(map(_told, job.transcripts)) if job.transcripts else job.completions
    return replace(job, prompt=prompt, completions=completions, transcripts=())


def _told(messages: Sequence[Any]) -> str:
    lines = [
        (str(message.get("role", "")), message.get("content")) for message in messages if isinstance(message, dict)
    ]
    return "\n".join(f"{role}: {content}" for role, content in lines if content)
