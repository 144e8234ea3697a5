"""`metrics.jsonl`: every fact in a small form, so that all can be kept. `durable/journal.py` has the complete groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec
from msgspec.structs import replace

from headrace.core.batches import Group
from headrace.core.reports import TrainReport
from headrace.core.types import Completion, Prompt, Scored, Struct, VersionSpan
from headrace.durable.atomic_files import read_lines
from headrace.facts.facts import (
    CheckpointSaved,
    EngineSample,
    Evaluated,
    Fact,
    FilesChecked,
    FirstFailure,
    FirstText,
    FleetSample,
    GroupEnded,
    IdentityChecked,
    MemberMoved,
    Planned,
    ProcessesUsed,
    PromptChosen,
    RunEnded,
    RunStarted,
    ScorerAsked,
    Slept,
    StepTrained,
    TicketDrawn,
    TrialChecked,
    Waited,
    WarmStarted,
    Warned,
    WeightsLive,
    Withdrawn,
    Woke,
    WorkerJoined,
    WorkerLost,
)

METRICS, REPORT = "metrics.jsonl", "report.html"


class StepRow(Fact, frozen=True, tag="StepTrained"):
    """`StepTrained` without its tokens: the numbers that metrics, terminal and report need."""

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
    """Lag -> tokens of the trained groups that are context and not in the loss. Those above the lag bound were trimmed."""
    swapped: int = 0
    """Completions that were sampled by more than one version."""
    mixed_tokens: int = 0
    """Tokens that were sampled while an update was streamed in."""
    old_cache_tokens: int = 0
    """Tokens that were sampled with a KV cache of which older weights had computed a part."""
    ages: dict[int, int] = {}
    """Lag -> number of trained tokens of good rollouts of earlier groups, which are not in `lags`."""

    @property
    def uncommon(self) -> dict[str, float]:
        """Counts and shares that are 0 in all steps of most runs, by the names that they have on dashboards."""
        again, tokens = sum(self.ages.values()), sum(self.lags.values())
        return {
            **{f"train/{name}": getattr(self.report, name) for name in _UNCOMMON},
            "lag/outside_tokens": sum(self.outside.values()),
            "lag/mixed_tokens": self.mixed_tokens,
            "lag/old_cache_tokens": self.old_cache_tokens,
            "experience/tokens": again,
            "experience/share": again / (again + tokens) if again else 0.0,
        }


_UNCOMMON = (
    "pairs",
    "outside_tokens",
    "missing_routes",
    "routing_conflicts",
    "dropped_tokens",
    "graphs",
    "left_out",
    "demonstration_tokens",
)


class Sample(Struct, frozen=True):
    """One rollout to be read by people."""

    step: int
    prompt: str
    text: str
    reward: float
    rewards: dict[str, float]
    tokens: int
    stop: str
    first_version: int
    last_version: int
    answer: str = ""
    """The right answer, if the row has one."""
    extracted: dict[str, str] = {}
    """The part of the text that each reward function was given, unless that is the whole text."""


MetricsFact = (
    RunStarted
    | TicketDrawn
    | PromptChosen
    | GroupEnded
    | FirstFailure
    | StepRow
    | WeightsLive
    | IdentityChecked
    | FilesChecked
    | WarmStarted
    | TrialChecked
    | ScorerAsked
    | EngineSample
    | FleetSample
    | ProcessesUsed
    | MemberMoved
    | Evaluated
    | CheckpointSaved
    | WorkerLost
    | WorkerJoined
    | Slept
    | Woke
    | Waited
    | Warned
    | Withdrawn
    | Planned
    | FirstText
    | RunEnded
)

# strict=False decodes "nan" as a float if the field is a float, and leaves it a string if the field is one.
_metrics_decoder: msgspec.json.Decoder[MetricsFact] = msgspec.json.Decoder(MetricsFact, strict=False)


def summarise(fact: StepTrained) -> StepRow:
    scored = [rollout for group in fact.groups for rollout in group.scored]
    completions = [turn.completion for rollout in scored for turn in rollout.episode.turns]
    return StepRow(
        t=fact.t,
        report=replace(fact.report, token_numbers=()),
        lags=fact.lags,
        reward_mean=fact.reward_mean,
        reward_std=fact.reward_std,
        reward_drawn=fact.reward_drawn,
        wait_seconds=fact.wait_seconds,
        tickets=tuple(group.ticket for group in fact.groups),
        components=_component_means(scored),
        lengths=tuple(len(completion.tokens) for completion in completions),
        truncated=sum(completion.stop == "length" for completion in completions),
        outside=_outside(fact),
        swapped=sum(len({span.version for span in completion.spans}) > 1 for completion in completions),
        mixed_tokens=sum(_tokens_of(completion, lambda span: span.mixed) for completion in completions),
        old_cache_tokens=sum(
            _tokens_of(completion, lambda span: span.kv_version < span.version) for completion in completions
        ),
        ages=fact.ages,
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
    counts = Counter(chain.from_iterable(rollout.rewards for rollout in scored))
    return {
        name: sum(rollout.rewards.get(name, 0.0) for rollout in scored) / count
        for name, count in sorted(counts.items())
    }


def sample_of(step: int, group: Group, index: int) -> Sample:
    """Returns the last turn of the `index`-th rollout of a group."""
    rollout = group.scored[index]
    last: Completion = rollout.episode.last
    versions = [span.version for span in last.spans] or [0]
    return Sample(
        step=step,
        prompt=group.prompt.text,
        text=last.text,
        reward=rollout.reward,
        rewards=rollout.rewards,
        tokens=len(last.tokens),
        stop=last.stop,
        first_version=versions[0],
        last_version=versions[-1],
        answer=answer_of(group.prompt),
        extracted=rollout.extracted,
    )


_ANSWERS = ("answer", "solution", "target", "ground_truth", "label", "expected")
"""Columns of data sets with the right answer, the commonest name first."""


def answer_of(prompt: Prompt) -> str:
    """Returns the right answer as text; empty if the row has none."""
    named = {name.lower(): value for name, value in prompt.columns.items()}
    found = next((named[name] for name in _ANSWERS if named.get(name) is not None), "")
    return found if isinstance(found, str) else str(found)


def pick_samples(fact: StepTrained, most: int = 8) -> list[Sample]:
    """Picks one rollout of each of at most `most` groups. The places in the batch change with every step, so that neither good nor bad
    rollouts are favoured."""
    groups, step = [group for group in fact.groups if group.scored], fact.report.step
    picked = [groups[(step + i) % len(groups)] for i in range(min(most, len(groups)))]
    return [sample_of(step, group, (7 * step + i) % len(group.scored)) for i, group in enumerate(picked)]


def read_metrics(run_dir: Path) -> list[MetricsFact]:
    """Returns all facts of a run in order; none if there is no file. A torn last line is left out. So are lines that cannot be read, and
    a `Warned` at the end names them."""
    lines = read_metrics_lines(run_dir)
    facts = [fact for fact in lines if fact is not None]
    unreadable = [number for number, fact in enumerate(lines, 1) if fact is None]
    return [*facts, left_out(unreadable, max((fact.t for fact in facts), default=0.0))] if unreadable else facts


class _Version(msgspec.Struct):
    version: int


class _Done(msgspec.Struct):
    """A step fact, decoded only as far as the version it made."""

    report: _Version


def steps_done(run_dir: Path) -> int:
    """Returns the optimizer steps that the run has done: the larger of the counts in its journal and its metrics, because a kill, a loss
    of power or an edit may have removed the end of one of them. Damaged lines are skipped."""
    from headrace.durable.journal import count_steps  # here: the process that watches a run loads no numpy

    counts = [count_steps(run_dir)]
    for line in read_lines(run_dir / METRICS):
        if b'"fact":"StepTrained"' in line[:80]:
            with suppress(msgspec.MsgspecError):
                counts.append(msgspec.json.decode(line, type=_Done).report.version)
    return max(counts)


def read_metrics_lines(run_dir: Path, start: int = 0) -> list[MetricsFact | None]:
    """Returns the fact of every complete line behind the first `start` bytes; None for a line that cannot be read."""
    return [decode_metrics(line) for line in read_lines(run_dir / METRICS, start)]


def decode_metrics(line: bytes) -> MetricsFact | None:
    """Decodes a line; None if it is damaged or was written by another version of headrace."""
    try:
        return _metrics_decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def left_out(lines: Sequence[int], t: float) -> Warned:
    """Returns the warning about lines that cannot be read. `lines`: their numbers, counted from 1."""
    shown = ", ".join(map(str, lines[:5])) + (", ..." if len(lines) > 5 else "")
    single = len(lines) == 1
    return Warned(
        t,
        f"{len(lines)} line{'' if single else 's'} of {METRICS} cannot be read and {'is' if single else 'are'} left out (line {shown}): "
        "numbers and curves lack their content; checkpoints and journal are not affected",
    )


# --- One continuous history
# A resumed run keeps the metrics of the process before it, as far as the journal confirms them.


@dataclass(frozen=True, kw_only=True)
class Resume:
    """The position of a resumed run, from its checkpoint and the journal after it.

    The journal is written before the facts. So a fact that the journal does not have means that the journal was cut: just now, or by a
    process that was killed before it had cut the metrics as well. Deriving the cut from the journal handles both cases.
    """

    step: int
    """Optimizer steps that are done."""
    saved: int | None = None
    """Steps of the checkpoint; None if there is none."""
    next_ticket: int = 0
    flying: frozenset[int] = frozenset()
    """Tickets whose groups are not finished."""
    ready: frozenset[int] = frozenset()
    """Tickets whose groups wait for a step."""
    anew: bool = False
    """Whether all earlier metrics are discarded."""
    digest: Path | None = None
    """The file with the sums of the facts until the checkpoint, all of which are kept; None if there is no checkpoint."""

    def knows(self, fact: MetricsFact | None) -> bool:
        """Returns whether checkpoint and journal confirm this fact."""
        match fact:
            case TicketDrawn() | PromptChosen():
                return fact.ticket < self.next_ticket
            case GroupEnded():
                unfinished = fact.ticket in self.flying or (fact.outcome != "ready" and fact.ticket in self.ready)
                return fact.ticket < self.next_ticket and not unfinished
            case StepRow():
                return fact.report.version <= self.step
            case WeightsLive():
                return fact.update.version <= self.step
            case Evaluated() | CheckpointSaved():
                return fact.step <= self.step
        return True


def kept_of(facts: Sequence[MetricsFact | None], resume: Resume) -> list[bool]:
    """Returns for each line of the metrics whether a resumed run keeps it: the readable lines before the first one that the journal does
    not confirm, and the fact of the checkpoint.

    Generation goes on while a checkpoint is written, so the fact of the checkpoint may come after unconfirmed ones."""
    if resume.anew:
        return [False] * len(facts)
    end = next((i for i, fact in enumerate(facts) if not resume.knows(fact)), len(facts))
    saved = next(
        (i for i, fact in enumerate(facts) if fact and _is_of(fact, resume.saved)), -1
    )  # the first, if a kill left two
    return [fact is not None and (i < end or i == saved) for i, fact in enumerate(facts)]


def _is_of(fact: MetricsFact, saved: int | None) -> bool:
    return isinstance(fact, CheckpointSaved) and fact.step == saved and not fact.error
