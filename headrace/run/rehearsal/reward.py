"""Calls the reward once on a real row, as the run will call it, before a model is loaded.

The completions are the row's own answer, so that the result shows what a right answer earns; a row without an answer gets a fixed
sentence. A reward function must be able to judge any text that a model writes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from headrace.core.batches import Failure
from headrace.core.errors import ConfigError
from headrace.core.protocols import Scorer, Task
from headrace.core.types import Completion, Episode, Prompt, Scored, Turn, VersionSpan
from headrace.episodes.scoring.extract import written
from headrace.episodes.scoring.job import is_async
from headrace.run.rehearsal.prompt_lengths import first_prompts

SENTENCE = "This sentence stands where a completion will be."
Encode = Callable[[str, bool], tuple[int, ...]]


class RewardTrial(NamedTuple):
    """The result of calling the reward on one row."""

    prompt: Prompt
    text: str
    """The text that stood for every completion."""
    is_answer: bool
    """Whether `text` is the row's own answer."""
    reward: float
    rewards: dict[str, float]

    @property
    def words(self) -> str:
        """The rewards by name, and their weighted sum if there are several."""
        parts = ", ".join(f"{name} = {value:g}" for name, value in self.rewards.items())
        return parts + (f"; weighted sum {self.reward:g}" if len(self.rewards) > 1 else "")


def stand_in(prompt: Prompt, *, answer: str, extracts: Collection[str] = ()) -> tuple[str, bool]:
    """Returns the text that stands for a completion, and whether it is the row's own answer. `extracts`: kinds of `scoring.extract` that
    must find it."""
    right = prompt.columns.get(answer)
    is_answer = isinstance(right, str | int | float) and not isinstance(right, bool) and str(right) != ""
    return (written(str(right), extracts) if is_answer else SENTENCE), is_answer


async def try_reward(
    scorer: Scorer,
    prompt: Prompt,
    *,
    answer: str,
    extracts: Collection[str],
    group_size: int,
    encode: Encode,
    episode: Episode | None = None,
    compares: bool = False,
    services: Collection[str] = (),
) -> RewardTrial:
    """Scores one group whose completions are all the same text. `answer`: the column of the right answer; `extracts`: the kinds of
    extraction that must find it; `episode`: the rollout, if an environment has played one; `compares`: whether completions are compared,
    so that one of them has to be another text; `services`: the names of rewards that come over HTTP.

    Raises ConfigError with the traceback if a function does not return a number.
    """
    text, is_answer = stand_in(prompt, answer=answer, extracts=extracts)
    if episode:
        text, is_answer = episode.last.text, False
    else:
        episode = _written(text, prompt, encode)
    other = _written(f"{SENTENCE} {text}", prompt, encode) if compares else episode
    results = await scorer.score(prompt, [episode] * (group_size - 1) + [other])
    failed = next((one for one in results if isinstance(one, Failure)), None)
    if failed:
        raise ConfigError(_refusal(failed, prompt, text, is_answer, services))
    first = results[0]
    assert isinstance(first, Scored)
    return RewardTrial(prompt, text, is_answer, first.reward, first.rewards)


def _written(text: str, prompt: Prompt, encode: Encode) -> Episode:
    tokens = encode(text, True)
    completion = Completion(tokens, (0.0,) * len(tokens), (VersionSpan(0, 0, 0),), "stop", text)
    return Episode((Turn(prompt.tokens, completion),))


async def try_in_loop(
    rewards: Sequence[Callable[..., Any]], scorer: Scorer, task: Task, *, answer: str, group_size: int, encode: Encode
) -> None:
    """Tries async functions that were passed from Python. Their open connections belong to one event loop, so they are called in the
    run's loop and not in the rehearsal's; all other functions were called there."""
    if any(map(is_async, rewards)):
        await try_reward(
            scorer, first_prompts(task, 0)[0], answer=answer, extracts=(), group_size=group_size, encode=encode
        )


def _refusal(failed: Failure, prompt: Prompt, text: str, is_answer: bool, services: Collection[str]) -> str:
    given = "its own answer" if is_answer else "a sentence"
    name = failed.detail.partition(":")[0]
    remedy = (
        f"correct the function: it is called with prompts, completions and the row's columns ({_columns(prompt)}), and returns a "
        "number for each completion, whatever the model wrote"
    )
    if name in services:
        remedy = f"start {name}, or correct its settings in reward.services or reward.judges (docs/scoring.md has the form of its answers)"
    return "\n".join(
        [
            f"the reward fails on row {prompt.id}, with {given} in place of the completion ({_short(text)}): {failed.detail}",
            *failed.traceback.splitlines(),
            remedy,
        ]
    )


def _columns(prompt: Prompt) -> str:
    return ", ".join(prompt.columns) or "it has none"


def _short(text: str, most: int = 60) -> str:
    shown = repr(text)
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def reward_lines(tried: RewardTrial, named: Sequence[str] = ()) -> list[str]:
    """Returns the lines of the page."""
    given = "the row's own answer" if tried.is_answer else "a sentence"
    return [tried.words, f"for {given} as the completion, {_short(tried.text)} (row {tried.prompt.id})", *named]
