"""The first rows of a task, tried before a model is loaded: their lengths, what the model and the reward see of them, the reward itself, and an episode."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.core.batches import Failure
from headrace.core.errors import ConfigError
from headrace.core.protocols import EnvironmentKind, Scorer, Task
from headrace.core.reports import Sight, TextPart
from headrace.core.types import Completion, Episode, Prompt, Scored, Turn, VersionSpan
from headrace.episodes.episodes import roll_out
from headrace.episodes.rollout_session import Decode, Played, TurnAsked
from headrace.episodes.scoring.extract import written
from headrace.episodes.scoring.job import is_async
from headrace.models.chat import ChatEncoder

# --- The lengths of the first prompts of a task, with the chat template applied.


LOOKED_AT = 128
"""Prompts that are looked at, in the order of the run."""


class PromptLengths(NamedTuple):
    """Tokens of the prompts that were looked at, and how many are too long."""

    shortest: int
    median: int
    longest: int
    too_long: int
    looked_at: int


def first_prompts(task: Task, held_out: int) -> list[Prompt]:
    """Returns the first prompts to be trained on, then held-out ones. The state of the task is restored."""
    state = task.state()
    drawn = [task.draw() for _ in range(LOOKED_AT)]
    distinct: dict[tuple[int, ...], Prompt] = {}
    for prompt in drawn:
        distinct.setdefault(prompt.tokens, prompt)  # a short file starts over
    task.restore(state)
    return [*distinct.values(), *itertools.islice(task.held_out(held_out), LOOKED_AT)]


def lengths(prompts: Sequence[Prompt], room: int) -> PromptLengths:
    """Summarises the lengths. `room`: tokens that a prompt may have."""
    counts = [len(prompt.tokens) for prompt in prompts]
    long = sum(count > room for count in counts)
    return PromptLengths(min(counts), int(statistics.median(counts)), max(counts), long, len(counts))


def length_problem(found: PromptLengths, max_tokens: int, context: int, positions: int) -> str:
    """Returns an empty string, or a sentence about prompts that are too long. `context`: engine.context_length; `positions`: those of the
    model, 0 if unknown."""
    if not found.too_long:
        return ""
    wanted = found.longest + max_tokens
    beyond = positions and wanted > positions
    how = f"this model has {positions} positions: " if beyond else f"raise engine.context_length to {wanted}, "
    which = "all" if found.too_long == found.looked_at else f"{found.too_long} of {found.looked_at}"
    return (
        f"{which} prompts that were looked at are too long ({found.shortest} to {found.longest} tokens with the chat template, median "
        f"{found.median}): with rollout.max_tokens = {max_tokens} they do not fit into {min(context, positions or context)} tokens; {how}"
        "shorten the prompts, or lower rollout.max_tokens"
    )


def angles_problem(context: int, steady: int) -> str:
    """Returns an empty string, or a sentence about texts whose rotary angles would depend on others. `context`: engine.context_length; `steady`:
    `ModelShape.steady`."""
    if not steady or context <= steady:
        return ""
    return (
        f"engine.context_length = {context} goes beyond the {steady} positions up to which this model's rotary angles are those of the position: with a "
        f"longer text in a pass all texts have other angles, so that what was sampled is not what is trained; set engine.context_length = {steady} or less"
    )


# --- One real row side by side: what the model sees, and what the reward sees.


def sight_of(
    encoder: ChatEncoder,
    prompt: Prompt,
    completion: Sequence[int],
    *,
    system: str = "",
    given: str | None = None,
    reward: str = "",
) -> Sight:
    """`completion`: tokens; `system`: task.system; `given`: the part of the completion's text that the reward function receives, if not all of
    it; `reward`: what it gave, in words."""
    messages = prompt.columns.get(prompt.chat) if prompt.chat else None
    known: list[Mapping[str, Any]] = [{"role": "system", "content": system}] if system else []
    known += messages if isinstance(messages, list) else [{"role": "user", "content": prompt.text}]
    text = encoder.decode(completion)
    return Sight(
        row=prompt.id,
        asked=tuple(_parts(encoder, prompt.tokens, known)),
        answered=tuple(_parts(encoder, completion, [{"role": "assistant", "content": text}])),
        prompt=prompt.text,
        completion=text if given is None else given,
        reward=reward,
    )


def _parts(encoder: ChatEncoder, tokens: Sequence[int], known: Sequence[Mapping[str, Any]]) -> Iterator[TextPart]:
    """Cuts the text of tokens at special tokens, and the rest into what the messages say and what the template wrote."""
    groups = [
        (special, list(some)) for special, some in itertools.groupby(tokens, lambda token: token in encoder.special)
    ]
    texts = [(special, encoder.written(some)) for special, some in groups]
    plain = "".join("\0" * len(text) if special else text for special, text in texts)
    places = list(_places(plain, known))
    at = 0
    for special, text in texts:
        end = at + len(text)
        if special:
            yield TextPart(text, "special")
        else:
            borders = sorted(
                {at, end, *(min(max(place, at), end) for start, stop, _ in places for place in (start, stop))}
            )
            for start, stop in itertools.pairwise(borders):
                role = next((speaker for first, last, speaker in places if first <= start < last), "template")
                yield TextPart(plain[start:stop], role)
        at = end


def _places(text: str, known: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int, str]]:
    """Finds each message in the text: begin, end and role. A message that the template has changed is left out."""
    at = 0
    for message in known:
        content = message["content"].strip() if isinstance(message.get("content"), str) else ""
        if content and (start := text.find(content, at)) >= 0:
            at = start + len(content)
            yield start, at, str(message["role"])


# --- Calls the reward once on a real row
# Calls the reward once on a real row, as the run will call it, before a model is loaded.
#
# The completions are the row's own answer, so that the result shows what a right answer earns; a row without an answer gets a fixed
# sentence. A reward function must be able to judge any text that a model writes.


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
    failed = next((result for result in results if isinstance(result, Failure)), None)
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


# --- Plays one episode of the user's environment before a model is loaded
# Each reply is a fixed text, so that nothing is sampled.


async def try_environment(
    kind: EnvironmentKind, prompt: Prompt, seed: int, *, answer: str, encode: Encode, decode: Decode
) -> Played:
    """Plays one rollout. The text of each reply is the row's own answer, or a fixed sentence. `answer`: the column of the right answer.

    Raises ConfigError with the traceback if the rollout fails."""
    text, _ = stand_in(prompt, answer=answer)

    async def ask(asked: TurnAsked) -> Completion:
        tokens = encode(text, True)
        return Completion(tokens, (0.0,) * len(tokens), (VersionSpan(0, 0, 0),), "stop")

    (played,) = await roll_out(kind, prompt, [seed], ask=ask, decode=decode)
    if isinstance(played, Failure):
        message = f"the environment fails on row {prompt.id}, with {text!r:.60} in place of each reply: {played.detail}"
        raise ConfigError("\n".join([message, *played.traceback.splitlines()]))
    return played


def episode_lines(played: Played, text: str, credit: str) -> Iterator[tuple[str, str]]:
    """Yields the lines of the page. `text`: the tokens of the last turn's path, as the model is given them; `credit`: `algo.credit`."""
    turns, rewards = played.episode.turns, ", ".join(f"{name} = {value:g}" for name, value in played.rewards.items())
    given = ", ".join(f"{name} = {value:g}" for turn in played.turn_rewards for name, value in turn.items())
    yield "returned", f"{rewards or 'no reward of its own'}{f'; to turns: {given}' if given else ''}"
    cut = f", cut off at its limit of {played.episode.cut}" if played.episode.cut else ""
    yield "", f"for {turns[-1].completion.text!r:.60} as each reply, after {len(turns)} turn(s){cut}"
    agents = dict.fromkeys(turn.agent or "the first" for turn in turns)
    if len(agents) > 1:
        sums = (
            '. All share the sum of the rewards; algo.credit = "agent" gives each its own' if credit != "agent" else ""
        )
        yield "agents", f"{', '.join(agents)}{sums}"
    yield "the first turn", text
