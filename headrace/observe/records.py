"""`metrics.jsonl`: every fact, small enough to keep all; `journal.py` has what is complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from pathlib import Path

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
from headrace.observe.journal import count_steps
from headrace.reports import TrainReport
from headrace.types import Completion, Group, Scored, Struct, VersionSpan

METRICS, REPORT = "metrics.jsonl", "report.html"


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
    outside: dict[int, int] = {}
    """Lag -> tokens of the trained groups that stayed as context, out of the loss: above the bound they were trimmed."""
    swapped: int = 0
    """Completions that more than one version sampled."""
    mixed_tokens: int = 0
    """Sampled while an update was streamed in."""
    old_cache_tokens: int = 0
    """Sampled from a cache of which older weights had computed a part."""


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
        _outside(fact),
        sum(len({span.version for span in completion.spans}) > 1 for completion in completions),
        sum(_tokens_of(completion, lambda span: span.mixed) for completion in completions),
        sum(_tokens_of(completion, lambda span: span.kv_version < span.version) for completion in completions),
    )


def _outside(fact: StepTrained) -> dict[int, int]:
    rows = [row for group in fact.groups for row in group.rows if not all(row.mask)]
    lags = (
        fact.report.step - version
        for row in rows
        for version, kept in zip(row.versions, row.mask, strict=True)
        if not kept
    )
    return dict(Counter(lags))


def _tokens_of(completion: Completion, chosen: Callable[[VersionSpan], bool]) -> int:
    spans, count = completion.spans, len(completion.tokens)
    ends = [*(span.start for span in spans), count][1:]
    return sum(end - span.start for span, end in zip(spans, ends, strict=True) if chosen(span))


def _component_means(scored: list[Scored]) -> dict[str, float]:
    counts = Counter(chain.from_iterable(one.rewards for one in scored))
    return {name: sum(one.rewards.get(name, 0.0) for one in scored) / count for name, count in sorted(counts.items())}


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


class _Version(msgspec.Struct):
    version: int


class _Done(msgspec.Struct):
    """Of a step no more than which version it made."""

    report: _Version


def steps_done(run_dir: Path) -> int:
    """Optimizer steps that the run has done, as its journal and its metrics tell, whichever tells of more: a kill, a loss of power
    or a hand may have taken the end of one. Damaged lines are passed over."""
    told = [count_steps(run_dir)]
    for line in read_lines(run_dir / METRICS):
        if b'"fact":"StepTrained"' in line[:80]:
            with suppress(msgspec.MsgspecError):
                told.append(msgspec.json.decode(line, type=_Done).report.version)
    return max(told)


def decode_metrics(line: bytes, path: Path, number: int) -> MetricsFact:
    """Raises `HeadraceError` naming file and line when it was not written by this version of headrace, or was damaged."""
    try:
        return _metrics_decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise HeadraceError(f"{path}, line {number} cannot be read: {error}") from error
