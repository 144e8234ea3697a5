"""Teachers and the reference as a stage of scoring: other models' log-probs of the tokens that the policy sampled.

    TraceScorer(TextScorer(FunctionScorer))      rewards, then rewards of teachers that read text (`text_teacher.py`), then log-probs by token

Each wraps the scorer inside it and runs concurrently with it. Engines form batches: every path of every rollout is one request.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from headrace.core.batches import Failure
from headrace.core.errors import ConfigError, PoisonedRequest
from headrace.core.protocols import Engine, Scorer
from headrace.core.types import Completion, Episode, Prompt, Request, Sampling, Scored, TeacherTrace, TopLogprobs
from headrace.facts.waits import Waits

# --- Checks whether two models give the same token ids the same meaning
# Nothing here reads weights.


Vocabulary = Mapping[str, int]


def vocabulary_problem(student: Vocabulary, other: Vocabulary, who: str = "teacher") -> str:
    """Describes the first difference; empty if every id is the same string in both. `who`: what the other model is to the student."""
    if student == other:
        return ""
    mine, theirs = {i: text for text, i in student.items()}, {i: text for text, i in other.items()}
    differing = [i for i in sorted(mine.keys() | theirs.keys()) if mine.get(i) != theirs.get(i)]
    if not differing:  # one text has several ids in one of them
        return f"{len(student)} entries against {len(other)}"
    first = differing[0]
    return (
        f"{len(differing)} of {max(len(mine), len(theirs))} ids differ, the first: {first} is {mine.get(first)!r} for the "
        f"student and {theirs.get(first)!r} for the {who}"
    )


def width_of(model_dir: Path) -> int:
    """Returns the rows of the model's vocabulary, padding included; 0 if its config does not have the number."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    return int(config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 0)


# --- stage ------------------------------------------------------------


Takes = Callable[[Prompt], bool]

FAILED, REFUSED = "teacher_error", "teacher_refused"
"""Reasons of failures: the teacher's engine failed, or the tokens or the text cannot be scored by any engine."""
_NUMBERS = itertools.count()
"""Numbers of requests, so that ids are unique in an engine that is shared."""


class Shows(Protocol):
    """The part of `own_prompt.OwnPrompt` that the stage uses."""

    reads_sibling: bool
    right: float

    def tokens(self, prompt: Prompt, sibling: str = "") -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Teacher:
    name: str
    engine: Engine
    takes: Takes
    top: int = 0
    """The number k of most probable tokens at every position; 0 asks for the sampled token alone."""
    shows: Shows | None = None
    """Writes the prompt that it reads instead of the policy's; None: it reads the policy's."""


class TeacherScores(NamedTuple):
    """The scores that another model gives the tokens of a turn."""

    version: int
    logprobs: tuple[float, ...]
    """[T] at temperature 1."""
    top: TopLogprobs | None = None


async def ask(engine: Engine, tokens: Sequence[int], top: int = 0) -> Completion | Failure:
    """Returns the log-probs of `tokens` but the first. A refusal or an error of the engine is a `Failure`; a lost engine raises.

    If an engine also samples the run's rollouts, `Interrupts` may abort all of its requests; then the request is sent again."""

    stop = "interrupted"
    while stop == "interrupted":
        request = Request(
            f"ask/{next(_NUMBERS)}",
            tuple(tokens),
            Sampling(max_tokens=0),
            priority=-1,  # first: in an engine that also samples rollouts, a score that waits for them would delay its own group
            prompt_logprobs=True,
            top_logprobs=top,
        )
        try:
            done = await engine.generate(request)
        except (ValueError, PoisonedRequest) as error:
            return Failure(REFUSED, str(error))
        stop = done.stop
    if done.stop == "error" or done.prompt_logprobs is None:
        return Failure(FAILED, done.error or f"the engine ended with {done.stop} and no scores")
    return done


async def score_episode(
    engine: Engine, prompt: Prompt, episode: Episode, top: int = 0, front: tuple[int, ...] = ()
) -> tuple[TeacherScores, ...] | Failure:
    """Scores the tokens of each turn, given the whole path before them. One request scores all turns on a path. `front`: the tokens that the
    teacher reads in the place of the prompt's, if others; the sampled ones behind them are the same (C5)."""
    paths = list(_paths(prompt, episode, front))
    answers = await asyncio.gather(*(ask(engine, path.tokens, top) for path in paths))
    found: dict[int, TeacherScores] = {}
    for path, answer in zip(paths, answers, strict=True):
        if isinstance(answer, Failure):
            return answer
        for turn, start in path.starts.items():
            found.setdefault(turn, slice_of(answer, start, len(episode.turns[turn].completion.tokens)))
    return tuple(found[turn] for turn in range(len(episode.turns)))


class _Path(NamedTuple):
    tokens: tuple[int, ...]
    starts: dict[int, int]
    """The index in `tokens` at which each turn's completion begins, by turn."""


def _paths(prompt: Prompt, episode: Episode, front: tuple[int, ...] = ()) -> Iterator[_Path]:
    """Yields the fewest paths that hold every turn. A turn with several parents follows the first, as in training."""
    before = [turn.parents[0] if turn.parents else None for turn in episode.turns]
    for last in sorted(set(range(len(before))) - set(before)):
        chain: list[int] = []
        number: int | None = last
        while number is not None:
            chain.insert(0, number)
            number = before[number]
        tokens: list[int] = []
        starts: dict[int, int] = {}
        for place, number in enumerate(chain):
            turn = episode.turns[number]
            tokens += turn.context if place else (front or turn.context or prompt.tokens)
            starts[number] = len(tokens)
            tokens += turn.completion.tokens
        yield _Path(tuple(tokens), starts)


def slice_of(answer: Completion, start: int, count: int) -> TeacherScores:
    """Returns the scores of `count` tokens from `start` on. Entry i of the answer belongs to token i + 1."""
    assert answer.prompt_logprobs is not None and start > 0
    first, end = start - 1, start - 1 + count
    top = answer.prompt_top
    if top:
        row = 4 * top.k
        top = TopLogprobs(top.k, top.tokens[first * row : end * row], top.logprobs[first * row : end * row])
    return TeacherScores(answer.spans[0].version, answer.prompt_logprobs[first:end], top)


Judging = asyncio.Future[list[Scored | Failure]]
"""The rewards of a group, which may still be on their way."""


class TraceScorer:
    """Fills `Scored.teachers` from the first teacher that takes the prompt, and `Scored.references` from the reference."""

    def __init__(
        self,
        inner: Scorer,
        teachers: Sequence[Teacher],
        reference: Engine | None,
        waits: Waits,
        warn: Callable[[str], None],
    ) -> None:
        self._inner, self._teachers, self._reference = inner, teachers, reference
        self._waits, self._warn = waits, warn
        self.untaught = 0
        """The number of prompts that no teacher took."""

    async def score(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[Scored | Failure]:
        teacher = self._teacher_of(prompt)
        judging = asyncio.ensure_future(self._inner.score(prompt, episodes))
        judged, taught, referred = await asyncio.gather(
            judging,
            self._traces(teacher, prompt, episodes, judging),
            self._references(prompt, episodes),
        )
        return [_joined(*three) for three in zip(judged, taught, referred, strict=True)]

    async def close(self) -> None:
        await self._inner.close()

    def _teacher_of(self, prompt: Prompt) -> Teacher | None:
        teacher = next((teacher for teacher in self._teachers if teacher.takes(prompt)), None)
        if self._teachers and teacher is None:
            self.untaught += 1
            if (
                self.untaught & (self.untaught - 1) == 0
            ):  # at 1, 2, 4, ...: often enough to be seen, and not so often that it hides other messages
                self._warn(
                    f"no teacher takes the prompt {prompt.id} ({self.untaught} such prompts so far): it can learn from rewards alone; "
                    "widen the route of a [[teachers]] table, or take such rows out of the task"
                )
        return teacher

    async def _traces(
        self, teacher: Teacher | None, prompt: Prompt, episodes: Sequence[Episode], judging: Judging
    ) -> list[tuple[TeacherTrace, ...] | Failure]:
        """`judging`: the rewards, for which only a teacher that is shown right completions waits."""
        if teacher is None:
            return [_untaught(episode) if self._teachers else () for episode in episodes]
        shows, siblings = teacher.shows, list[str | None]([""] * len(episodes))
        if shows and shows.reads_sibling:
            siblings = _siblings(await judging, shows.right)
        async with self._waits.named("scoring", f"the teacher {teacher.name}"):
            return await asyncio.gather(
                *(self._trace(teacher, prompt, *one) for one in zip(episodes, siblings, strict=True))
            )

    async def _trace(
        self, teacher: Teacher, prompt: Prompt, episode: Episode, sibling: str | None
    ) -> tuple[TeacherTrace, ...] | Failure:
        """`sibling`: the completion that the teacher is shown; None: it needs one, and there is none."""
        if sibling is None:
            return _untaught(episode, teacher.name)
        try:
            front = teacher.shows.tokens(prompt, sibling) if teacher.shows else ()
        except ConfigError as error:
            return Failure(REFUSED, f"{teacher.name}: {error}")
        scored = await score_episode(teacher.engine, prompt, episode, teacher.top, front)
        if isinstance(scored, Failure):
            return Failure(scored.reason, f"{teacher.name}: {scored.detail}")
        return tuple(_trace_of(teacher.name, turn) for turn in scored)

    async def _references(
        self, prompt: Prompt, episodes: Sequence[Episode]
    ) -> list[tuple[tuple[float, ...], ...] | Failure]:
        if self._reference is None:
            return [() for _ in episodes]
        async with self._waits.named("scoring", "the reference"):
            scored = await asyncio.gather(*(score_episode(self._reference, prompt, e) for e in episodes))
        return [
            Failure(rollout.reason.replace("teacher", "reference"), rollout.detail)
            if isinstance(rollout, Failure)
            else tuple(s.logprobs for s in rollout)
            for rollout in scored
        ]


def _siblings(judged: Sequence[Scored | Failure], right: float) -> list[str | None]:
    """Returns the text of the first other completion with at least that reward, for each of a group. None where there is none, and for a
    rollout that has failed anyway."""
    first_two = [place for place, one in enumerate(judged) if isinstance(one, Scored) and one.reward >= right][:2]
    shown: list[str | None] = []
    for place, rollout in enumerate(judged):
        other = next((judged[right_one] for right_one in first_two if right_one != place), None)
        shown.append(other.episode.last.text if isinstance(rollout, Scored) and isinstance(other, Scored) else None)
    return shown


def _trace_of(name: str, turn: TeacherScores) -> TeacherTrace:
    return TeacherTrace(name, (turn.version,) * len(turn.logprobs), turn.logprobs, turn.top)


def _untaught(episode: Episode, name: str = "") -> tuple[TeacherTrace, ...]:
    """`name`: of the teacher that would have scored it, if one takes the prompt."""
    lengths = [len(turn.completion.tokens) for turn in episode.turns]
    return tuple(TeacherTrace(name, (0,) * n, (math.nan,) * n) for n in lengths)


def _joined(
    judged: Scored | Failure,
    taught: tuple[TeacherTrace, ...] | Failure,
    referred: tuple[tuple[float, ...], ...] | Failure,
) -> Scored | Failure:
    """Joins reward, teachers' and reference's log-probs. If one of them failed, so has the rollout."""
    for stage_answers in (judged, taught, referred):
        if isinstance(stage_answers, Failure):
            return stage_answers
    return msgspec.structs.replace(judged, teachers=taught, references=referred)


class NoReward:
    """The scorer of a run without rewards, which learns from teachers alone."""

    async def score(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[Scored | Failure]:
        return [Scored(episode, 0.0, {}) for episode in episodes]

    async def close(self) -> None:
        pass
