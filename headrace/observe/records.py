"""What is written to disk, and how it is read back: `metrics.jsonl` (small) and `journal.jsonl` (complete).

JSON has no NaN and no infinity. Where a value holds one it is written as the string "nan", "inf" or "-inf", and read
back as the float. (In `Prompt.columns`, whose types only the task knows, it stays a string.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import HeadraceError
from headrace.observe.facts import (
    CheckpointSaved,
    EngineSample,
    Evaluated,
    Fact,
    GroupEnded,
    IdentityChecked,
    RunEnded,
    RunStarted,
    StepTrained,
    TicketDrawn,
    Waited,
    Warned,
    WeightsLive,
    WorkerLost,
)
from headrace.observe.files import read_lines
from headrace.reports import TrainReport
from headrace.types import Completion, Group, Scored, Struct

METRICS, JOURNAL, REPORT = "metrics.jsonl", "journal.jsonl", "report.html"


class StepRow(Fact, frozen=True, tag="StepTrained"):
    """`StepTrained` without its tokens: what metrics, terminal and report need of a step."""

    report: TrainReport
    lags: dict[int, int]
    """Lag -> number of trained tokens."""
    reward_mean: float
    reward_std: float
    reward_drawn: float
    wait_seconds: float
    tickets: tuple[int, ...]
    components: dict[str, float]
    """Mean of each reward function over the rollouts."""
    lengths: tuple[int, ...]
    """Tokens of each trained completion."""
    truncated: int
    """Completions that ended at max_tokens."""


class JournalStep(Struct, frozen=True):
    """What one optimizer step consumed, in order: with the checkpoint before it and the config, enough to run it again."""

    step: int
    t: float
    version: int
    """The version the step made."""
    groups: tuple[Group, ...]


class Sample(Struct, frozen=True):
    """One rollout for people to read."""

    step: int
    prompt: str
    text: str
    reward: float
    rewards: dict[str, float]
    tokens: int
    stop: str
    first_version: int
    last_version: int


MetricsFact = (
    RunStarted
    | TicketDrawn
    | GroupEnded
    | StepRow
    | WeightsLive
    | IdentityChecked
    | EngineSample
    | Evaluated
    | CheckpointSaved
    | WorkerLost
    | Waited
    | Warned
    | RunEnded
)

# strict=False turns "nan" back into a float where the type says float, and leaves strings where it says str.
_metrics_decoder: msgspec.json.Decoder[MetricsFact] = msgspec.json.Decoder(MetricsFact, strict=False)
_journal_decoder = msgspec.json.Decoder(JournalStep, strict=False)


def encode(value: Struct) -> bytes:
    """One JSON line without its newline."""
    line = msgspec.json.encode(value)
    if b"null" in line:  # the encoder writes non-finite floats as null; the slow path is rare, so tokens stay cheap
        line = msgspec.json.encode(_spelled(msgspec.to_builtins(value)))
    return line


def _spelled(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _spelled(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled(one) for one in value]
    return value


def summarise(fact: StepTrained) -> StepRow:
    scored = [one for group in fact.groups for one in group.scored]
    completions = [turn.completion for one in scored for turn in one.episode.turns]
    return StepRow(
        fact.t,
        fact.report,
        fact.lags,
        fact.reward_mean,
        fact.reward_std,
        fact.reward_drawn,
        fact.wait_seconds,
        tuple(group.ticket for group in fact.groups),
        _component_means(scored),
        tuple(len(completion.tokens) for completion in completions),
        sum(completion.stop == "length" for completion in completions),
    )


def _component_means(scored: list[Scored]) -> dict[str, float]:
    counts = Counter(chain.from_iterable(one.rewards for one in scored))
    return {name: sum(one.rewards.get(name, 0.0) for one in scored) / count for name, count in sorted(counts.items())}


def journal_step(fact: StepTrained) -> JournalStep:
    return JournalStep(fact.report.step, fact.t, fact.report.version, fact.groups)


def sample_of(step: int, group: Group, index: int) -> Sample:
    """The `index`-th rollout of a group, its last turn."""
    one = group.scored[index]
    last: Completion = one.episode.last
    versions = [span.version for span in last.spans] or [0]
    return Sample(
        step,
        group.prompt.text,
        last.text,
        one.reward,
        one.rewards,
        len(last.tokens),
        last.stop,
        versions[0],
        versions[-1],
    )


def pick_sample(fact: StepTrained) -> Sample | None:
    """Another place in the batch at every step, so that neither the good nor the bad ones are favoured."""
    every = [(group, index) for group in fact.groups for index in range(len(group.scored))]
    return sample_of(fact.report.step, *every[fact.report.step * 7 % len(every)]) if every else None


def read_metrics(run_dir: Path) -> list[MetricsFact]:
    """All facts of a run in order. A torn last line is left out; no file is an empty run."""
    path = run_dir / METRICS
    return [decode_metrics(line, path, number) for number, line in enumerate(read_lines(path), 1)]


def decode_metrics(line: bytes, path: Path, number: int) -> MetricsFact:
    """Raises `HeadraceError` naming file and line when it was not written by this version of headrace, or was damaged."""
    try:
        return _metrics_decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise HeadraceError(f"{path}, line {number} cannot be read: {error}") from error


def read_journal(run_dir: Path, steps: set[int] | None = None) -> Iterator[JournalStep]:
    """The journal's steps in order; `steps` picks by position in the file (0 is the first), without decoding the others."""
    path = run_dir / JOURNAL
    for position, line in enumerate(read_lines(path)):
        if steps is not None and position not in steps:
            continue
        try:
            yield _journal_decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise HeadraceError(f"{path}, line {position + 1} cannot be read: {error}") from error
