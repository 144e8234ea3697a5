"""One call of a reward function or service for one group: its arguments, and how its result is read."""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.core.batches import Failure
from headrace.core.rewards import Unusable, number_of, shown
from headrace.core.types import Episode, Struct
from headrace.processes.health.patience import within
from headrace.processes.health.user_prints import SCREEN, bounded_prints
from headrace.settings.user_code import one_line, traceback_of, unreachable

# --- Reward functions written for TRL, called as TRL's trainers call them.
#
# The convention differs from ours in three points: if the row's prompt is a conversation, prompts and completions are conversations too;
# tokens are passed as `completion_ids`; and a reward of None means that the function does not apply to the row.


ONLY_THERE = ("trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that TRL passes and headrace cannot."""


class TrlReward:
    """Marks a function that is called by TRL's convention. It can be called like the function, and has its name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.function(*given, **named)


def trl_reward(function: Callable[..., Any]) -> TrlReward:
    """Marks a reward function as one written for TRL: `reward=headrace.trl_reward(fn)`, or a decorator in a file of rewards."""
    return TrlReward(function)


def conversation(text: str) -> list[dict[str, str]]:
    """Returns a completion in the form that TRL passes to functions if the prompt is a conversation."""
    return [{"role": "assistant", "content": text}]


# --- job ------------------------------------------------------------


Values = list[float | tuple[float, ...] | Failure | None]
"""One per completion: a finite number, one for each of its segments, a failure, or None if a function written for TRL does not apply."""


class ScoringJob(Struct, frozen=True):
    prompt: str
    completions: tuple[str, ...]
    completion_tokens: tuple[tuple[int, ...], ...]
    columns: dict[str, Any]
    """One value per column: all completions of a group share their row."""
    chat: str = ""
    """The column that holds the prompt as a conversation; empty if the prompt is text."""
    transcripts: tuple[list[dict[str, Any]], ...] = ()
    """The messages of each rollout, with tool calls and their results, if an environment talked with the model."""
    rivals: tuple[str, ...] = ()
    """The completion that each of `completions` is compared with, in a comparison (`scoring/parts.py`)."""
    segments: tuple[tuple[str, ...], ...] = ()
    """The steps of each completion, if each of them gets a score (`scoring/extract.py`)."""


@dataclass
class Effort:
    """The costs of one call for one group, beside its time. They are added up while the call goes on."""

    attempts: int = 0
    """Requests over the network."""
    retries: int = 0
    """Requests that repeated one that had failed."""
    waited: float = 0.0
    """Seconds for which requests waited for their turn, added up."""
    tokens: int = 0
    """Tokens that a judge read and wrote, if its server says so."""


Ask = Callable[[ScoringJob, Effort], Awaitable[Values]]
"""Whatever gives rewards to a group: the call of a function, a service, or a judge."""


class LoadedReward(Struct, frozen=True):
    """A reward function that a worker has loaded."""

    name: str
    is_async: bool


def transcript_of(episode: Episode) -> list[dict[str, Any]]:
    """Returns all messages of a chat, in their order; empty if the episode was none."""
    return [message for turn in episode.turns for message in (*turn.messages, turn.reply) if message]


def fail_all(job: ScoringJob, reason: str, detail: str) -> Values:
    return [Failure(reason, detail)] * len(job.completions)


def fail_raised(error: BaseException) -> Failure:
    """The failure of a rollout whose reward function raised."""
    reason = "reward_unreachable" if unreachable(error) else "reward_raised"
    return Failure(reason, one_line(error), traceback_of(error))


def name_of(function: Callable[..., Any]) -> str:
    inner = function.function if isinstance(function, TrlReward) else function
    inner = inner.func if isinstance(inner, functools.partial) else inner
    name = getattr(inner, "__name__", type(inner).__name__)
    return "reward" if name == "<lambda>" else name


def is_async(function: Callable[..., Any]) -> bool:
    if isinstance(function, TrlReward):
        return is_async(function.function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def signature_problem(function: Any) -> str:
    """Says why the function cannot be called as `fn(prompts=, completions=, **columns)`; empty if it can."""
    if not callable(function):
        return f"is a {type(function).__name__}, which cannot be called"
    for parameter in _parameters(function):
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            return f"takes {parameter.name} by position only; it is called as fn(prompts=[...], completions=[...], **columns)"
        if isinstance(function, TrlReward) and parameter.name in ONLY_THERE and parameter.default is parameter.empty:
            return (
                f"needs {parameter.name}, which only TRL's trainers have; give the parameter a default, or take it out"
            )
    return ""


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some functions written in C have no signature
        return [inspect.Parameter("anything", inspect.Parameter.VAR_KEYWORD)]


def arguments(function: Callable[..., Any], job: ScoringJob) -> dict[str, Any]:
    """Returns the lists of `offered`, or of `_offered_by_trl`.

    Only arguments that the function's signature names are returned, unless it takes `**columns`.
    """
    given = _offered_by_trl(job) if isinstance(function, TrlReward) else offered(job)
    parameters = _parameters(function)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return given
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    missing = [p.name for p in parameters if p.name in named - given.keys() and p.default is p.empty]
    if missing:
        raise TypeError(
            f"it needs {', '.join(missing)}, which is not a column of the task; there are: {', '.join(given)}{_hint(missing)}"
        )
    return {name: value for name, value in given.items() if name in named}


def offered(job: ScoringJob) -> dict[str, Any]:
    """Returns lists of equal length: `prompts`, `completions`, `completion_tokens`, `transcripts` where an environment talked with the model,
    `segments` where each of them gets a score, and every column. In a comparison there are `first` and `second` instead of completions.
    """
    prompts = {"prompts": [job.prompt] * len(job.completions)}
    if job.rivals:
        return _columns(job) | prompts | {"first": list(job.completions), "second": list(job.rivals)}
    return (
        _columns(job)
        | prompts
        | {
            "completions": list(job.completions),
            "completion_tokens": [list(tokens) for tokens in job.completion_tokens],
            **({"transcripts": copy.deepcopy(list(job.transcripts))} if job.transcripts else {}),
            **({"segments": [list(segments) for segments in job.segments]} if job.segments else {}),
        }
    )


def _offered_by_trl(job: ScoringJob) -> dict[str, Any]:
    """Returns the arguments of TRL's `GRPOTrainer._calculate_rewards`: every column but the prompt, which is passed as `prompts`."""
    columns = _columns(job)
    chats = columns.pop(job.chat) if job.chat else None
    return columns | {
        "prompts": chats or [job.prompt] * len(job.completions),
        "completions": [conversation(text) if chats else text for text in job.completions],
        "completion_ids": [list(tokens) for tokens in job.completion_tokens],
    }


def _columns(job: ScoringJob) -> dict[str, Any]:
    return {
        name: [copy.deepcopy(value) for _ in job.completions]  # a copy: the function may change it
        for name, value in job.columns.items()
    }


def _hint(missing: Sequence[str]) -> str:
    of_trl = {"completion_ids", *ONLY_THERE} & set(missing)
    return ". A function written for TRL has to be marked: headrace.trl_reward(function)" if of_trl else ""


def call(function: Callable[..., Any], job: ScoringJob, prints: int = SCREEN) -> Values:
    """Runs a function that is not async until it returns. `prints`: the characters that it may print. What it raises, KeyboardInterrupt and the like too, is the failure of its group: it
    would end the thread that waits for its answer."""
    try:
        with bounded_prints(f"the reward {name_of(function)}", prints):
            return _read(function, function(**arguments(function, job)), job)
    except BaseException as error:
        return [fail_raised(error)] * len(job.completions)


async def call_async(function: Callable[..., Any], job: ScoringJob, seconds: float, prints: int = SCREEN) -> Values:
    """Cancels a function that is not done within `seconds`, and does not wait until it has ended."""
    try:
        return await within(threading.get_native_id(), seconds, _awaited(function, job, prints))
    except TimeoutError:  # a TimeoutError of the function itself is a Failure that `_awaited` returns
        return too_late(job, seconds)


async def _awaited(function: Callable[..., Any], job: ScoringJob, prints: int) -> Values:
    import asyncio  # loaded by whoever runs this

    task = asyncio.current_task()
    try:
        with bounded_prints(f"the reward {name_of(function)}", prints):
            return _read(function, await function(**arguments(function, job)), job)
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and task and task.cancelling():
            raise  # of `call_async`, not of the function
        return [fail_raised(error)] * len(job.completions)


def too_late(job: ScoringJob, seconds: float, then: str = "it was cancelled") -> Values:
    detail = f"no answer within {seconds:g} s (reward.timeout); {then}"
    return fail_all(job, "reward_timeout", detail)


def _read(function: Callable[..., Any], result: Any, job: ScoringJob) -> Values:
    values = read_values(result, len(job.completions), [len(segment) for segment in job.segments])
    if not isinstance(function, TrlReward) or not isinstance(result, (list, tuple)) or len(result) != len(values):
        return values
    return [None if given is None else value for given, value in zip(result, values, strict=True)]


def read_values(result: Any, count: int, segments: Sequence[int] = ()) -> Values:
    """Reads a function's result as numbers or failures. A missing number is never replaced by zero. `segments`: the number of segments of
    each completion, if each of them has a number."""
    if result is None:
        return [
            Failure("reward_none", "the function returned None instead of a list; is its return statement missing?")
        ] * count
    values = result.tolist() if hasattr(result, "tolist") else result  # NumPy arrays and torch tensors
    if not isinstance(values, (list, tuple)):
        if inspect.iscoroutine(values):
            values.close()
        detail = f"the function returned {shown(result)} where a list of {count} numbers is needed"
        return [Failure("reward_wrong_type", detail)] * count
    if len(values) != count:
        return [Failure("reward_wrong_count", f"{len(values)} rewards came back for {count} completions")] * count
    if segments:
        return [_read_segments(value, number) for value, number in zip(values, segments, strict=True)]
    return [_read_one(value) for value in values]


def _read_segments(value: Any, count: int) -> tuple[float, ...] | Failure:
    if isinstance(value, Failure):
        return value
    numbers = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(numbers, (list, tuple)):
        return Failure(
            "reward_wrong_type",
            f"{shown(value)} stands where a list of {count} numbers is needed, one for each segment",
        )
    if len(numbers) != count:
        return Failure("reward_wrong_count", f"{len(numbers)} scores came back for {count} segments")
    scores = [_read_one(number) for number in numbers]
    failed = next((score for score in scores if isinstance(score, Failure)), None)
    return failed or tuple(score for score in scores if not isinstance(score, Failure))


def _read_one(value: Any) -> float | Failure:
    if isinstance(value, Failure):
        return value
    number = number_of(value)
    return Failure(f"reward_{number.reason}", f"the reward {number.said}") if isinstance(number, Unusable) else number
