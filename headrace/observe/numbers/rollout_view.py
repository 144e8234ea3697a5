"""One rollout, as `headrace inspect` and the report show it: its tokens with everything that is known of each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headrace.durable.journal import JournalStep
from headrace.observe.records import answer_of
from headrace.types import Completion, Group, Row, Struct, VersionSpan

Pieces = Callable[[Sequence[int]], list[str]]
"""Tokens -> the text of each. Joined, they are the text."""

Place = tuple[int, int]
"""Ticket and number of a rollout."""


class Look(Struct, frozen=True):
    """The last turn of one rollout. Columns are [T] over its sampled tokens."""

    step: int
    """That trained it, counted from 1."""
    ticket: int
    rollout: int
    prompt_id: str
    prompt: str
    reward: float
    rewards: dict[str, float]
    """By the function that gave it."""
    stop: str
    turns: int
    spans: tuple[VersionSpan, ...]
    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    """Text of each token; its number where the model's tokenizer is not there."""
    decoded: bool
    text: str
    logprobs: tuple[float, ...]
    """The sampler's."""
    lags: tuple[int, ...]
    mixed: tuple[bool, ...]
    """Sampled while an update was streamed in."""
    advantages: tuple[float, ...]
    """Empty where it was not trained."""
    left_out: tuple[str, ...]
    """Why a token is not in the loss; empty where it is."""
    trainer: tuple[float, ...] = ()
    """The trainer's log-probs before the step, where it was asked for them."""
    answer: str = ""
    """The right one, where the row has one."""
    extracted: dict[str, str] = {}
    """What a reward function was given of the text, by its name, where that is not all of it."""

    @property
    def advantage(self) -> float:
        """Mean; NaN where it was not trained."""
        return sum(self.advantages) / len(self.advantages) if self.advantages else math.nan

    @property
    def reasons(self) -> dict[str, int]:
        return dict(Counter(reason for reason in self.left_out if reason))

    @property
    def gap(self) -> float:
        """Mean |trainer - sampler|; NaN where the trainer was not asked."""
        gaps = [abs(a - b) for a, b in zip(self.trainer, self.logprobs, strict=False) if math.isfinite(a - b)]
        return sum(gaps) / len(gaps) if gaps else math.nan


def look(
    step: JournalStep,
    group: Group,
    rollout: int,
    pieces: Pieces | None = None,
    oldest: int | None = None,
    trainer: Sequence[float] = (),
) -> Look:
    """`oldest`: version that a token needs at least to stay in the loss (`staleness.overdue = "trim"`)."""
    one = group.scored[rollout]
    done = one.episode.last
    row, count = row_of(group, rollout), len(done.tokens)
    told = pieces(done.tokens) if pieces else [f"{token} " for token in done.tokens]
    return Look(
        step=step.step + 1,
        ticket=group.ticket,
        rollout=rollout,
        prompt_id=group.prompt.id,
        prompt=group.prompt.text,
        reward=one.reward,
        rewards=one.rewards,
        stop=done.stop,
        turns=len(one.episode.turns),
        spans=done.spans,
        tokens=done.tokens,
        pieces=tuple(told),
        decoded=pieces is not None,
        text=done.text,
        logprobs=done.logprobs,
        lags=tuple(step.step - version for version in done.versions()),
        mixed=_mixed(done),
        advantages=row.advantages[-count:] if row and count else (),
        left_out=_left_out(done, row, oldest),
        trainer=tuple(trainer),
        answer=answer_of(group.prompt),
        extracted=one.extracted,
    )


def looks_at(
    step: JournalStep,
    pieces: Pieces | None = None,
    oldest: int | None = None,
    trainer: Mapping[Place, Sequence[float]] | None = None,
) -> list[Look]:
    """Every rollout of a step, in the order in which they were trained."""
    known = trainer or {}
    return [
        look(step, group, rollout=i, pieces=pieces, oldest=oldest, trainer=known.get((group.ticket, i), ()))
        for group in step.groups
        for i in range(len(group.scored))
    ]


def trimmed_below(settings: Mapping[str, object], step: int) -> int | None:
    """The oldest version in the loss of a step (counted from 0), by the run's settings; None where none is taken out."""
    staleness = settings.get("staleness")
    if not isinstance(staleness, Mapping) or staleness.get("overdue") != "trim":
        return None
    return step - int(staleness.get("max_lag", 1))


def row_of(group: Group, rollout: int) -> Row | None:
    """The training row that ends with a rollout's last completion. Rows of single-turn rollouts have their order."""
    done = group.scored[rollout].episode.last
    count = len(done.tokens)
    candidates = [group.rows[rollout]] if len(group.rows) == len(group.scored) else list(group.rows)
    for row in candidates:
        if (row.tokens[-count:], row.logprobs[-count:]) == (done.tokens, done.logprobs):
            return row
    return None


def _mixed(done: Completion) -> tuple[bool, ...]:
    ends = [*(span.start for span in done.spans[1:]), len(done.tokens)]
    return tuple(span.mixed for span, end in zip(done.spans, ends, strict=False) for _ in range(span.start, end))


def _left_out(done: Completion, row: Row | None, oldest: int | None) -> tuple[str, ...]:
    count = len(done.tokens)
    if row is None:
        return ("not trained",) * count
    mask = row.mask[len(row.mask) - count :]
    why = "overlong" if done.stop == "length" and not any(mask) else "masked"
    return tuple(
        why if not kept
        else "no finite log-prob" if not math.isfinite(logprob)
        else "overdue" if oldest is not None and version < oldest
        else ""
        for kept, logprob, version in zip(mask, done.logprobs, done.versions(), strict=True)
    )  # fmt: skip


def settings_of(run_dir: Path) -> dict[str, object]:
    """Of a run's config, as plain values; nothing where it has none."""
    import tomllib

    path = run_dir / "config.toml"
    return tomllib.loads(path.read_text()) if path.is_file() else {}


def told_of(one: Look, place: int) -> str:
    """All that is known of one token, for a tooltip."""
    parts = [f"token {place}, id {one.tokens[place]}", f"log-prob {one.logprobs[place]:.4f}"]
    if one.trainer:
        parts.append(f"trainer {one.trainer[place]:.4f} (difference {one.trainer[place] - one.logprobs[place]:+.4f})")
    parts.append(f"lag {one.lags[place]}" + (", mixed weights" if one.mixed[place] else ""))
    parts += [f"advantage {one.advantages[place]:+.3f}"] if one.advantages else []
    parts += [f"not in the loss: {one.left_out[place]}"] if one.left_out[place] else []
    return "\n".join(parts)


def spans_told(one: Look) -> str:
    """Versions of the tokens, and of the oldest KV entries they attended to."""
    ends = [*(span.start for span in one.spans[1:]), len(one.tokens)]
    return ", ".join(
        f"{span.start}-{end - 1} version {span.version}"
        + (f" over KV of {span.kv_version}" if span.kv_version != span.version else "")
        + (" (mixed)" if span.mixed else "")
        for span, end in zip(one.spans, ends, strict=False)
        if end > span.start
    )
