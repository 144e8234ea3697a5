"""A service that gives rewards: the body that it is sent, and how its answer is read (docs/scoring.md)."""

from __future__ import annotations

from typing import Any

from headrace.core.batches import Failure
from headrace.episodes.scoring.job import Effort, ScoringJob, Values, offered, read_values
from headrace.episodes.scoring.services.config import ServiceConfig
from headrace.episodes.scoring.services.endpoint import BadAnswer, Endpoint
from headrace.episodes.scoring.services.http_post import Poster


class HttpService:
    """One request for each group. Its answer is `{"scores": [...]}`, in the order of the completions."""

    def __init__(self, config: ServiceConfig, poster: Poster) -> None:
        self._config, self._endpoint = config, Endpoint(config, "", poster)

    async def call(self, job: ScoringJob, effort: Effort) -> Values:
        body = {"scorer": self._config.name, **offered(job)}
        values = await self._endpoint.ask(body, lambda answer: _scores(answer, job), effort)
        return [values] * len(job.completions) if isinstance(values, Failure) else values


def _scores(answer: Any, job: ScoringJob) -> Values:
    """Raises BadAnswer unless every completion has a score (a number, or one for each segment), or an error of its own."""
    if not isinstance(answer, dict) or "scores" not in answer:
        raise BadAnswer("reward_bad_answer", f'the answer has no "scores": {answer!r:.120}')
    scores = answer["scores"]
    given = [_one(value) for value in scores] if isinstance(scores, list) else scores
    values = read_values(given, len(job.completions), [len(one) for one in job.segments])
    for value in values:
        if isinstance(value, Failure) and value.reason != "reward_failed":
            raise BadAnswer(value.reason, value.detail)
    return values


def _one(value: Any) -> Any:
    """A service may refuse single completions: `{"error": "why"}` in place of a score. It is data, and not asked for again."""
    if isinstance(value, dict) and value.keys() == {"error"}:
        return Failure("reward_failed", str(value["error"])[:300])
    return value
