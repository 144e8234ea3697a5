"""One rollout as `headrace inspect` and the report show it: its tokens with everything that is known about each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headrace.durable.journal import JournalStep
from headrace.observe.records import answer_of
from headrace.types import Completion, Group, Row, Struct, VersionSpan

Pieces = Callable[[Sequence[int]], list[str]]
"""Returns the text of each token; joined, they are the whole text."""

Place = tuple[int, int]
"""Ticket and number of a rollout."""


class RolloutView(Struct, frozen=True, kw_only=True):
    """The last turn of one rollout. Tuples are [T] over its sampled tokens."""

    step: int
    """The step that trained it, counted from 1."""
    ticket: int
    rollout: int
    prompt_id: str
    prompt: str
    reward: float
    rewards: dict[str, float]
    """Rewards by the name of the reward function."""
    stop: str
    turns: int
    spans: tuple[VersionSpan, ...]
    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    """Text of each token, or its id if the tokenizer is not available."""
    decoded: bool
    """Whether `pieces` are text."""
    text: str
    logprobs: tuple[float, ...]
    """Log-probs of the sampler."""
    lags: tuple[int, ...]
    mixed: tuple[bool, ...]
    """Sampled while an update was streamed in."""
    advantages: tuple[float, ...]
    """Empty if the rollout was not trained."""
    left_out: tuple[str, ...]
    """The reason why each token is not in the loss; an empty string if it is."""
    trainer: tuple[float, ...] = ()
    """Log-probs of the trainer before the step, if they were computed."""
    answer: str = ""
    """The right answer, if the row has one."""
    extracted: dict[str, str] = {}
    """The part of the text that each reward function was given, unless that is the whole text."""

    @property
    def advantage(self) -> float:
        """Mean over the tokens; NaN if the rollout was not trained."""
        return sum(self.advantages) / len(self.advantages) if self.advantages else math.nan

    @property
    def reasons(self) -> dict[str, int]:
        return dict(Counter(reason for reason in self.left_out if reason))

    @property
    def gap(self) -> float:
        """Mean |trainer - sampler| log-prob; NaN if the trainer's are not known."""
        gaps = [abs(a - b) for a, b in zip(self.trainer, self.logprobs, strict=False) if math.isfinite(a - b)]
        return sum(gaps) / len(gaps) if gaps else math.nan


def view_rollout(
    step: JournalStep,
    group: Group,
    rollout: int,
    *,
    pieces: Pieces | None = None,
    oldest: int | None = None,
    trainer: Sequence[float] = (),
) -> RolloutView:
    """Returns the view of one rollout. `oldest`: the oldest version that stays in the loss (`staleness.overdue = "trim"`)."""
    one = group.scored[rollout]
    done = one.episode.last
    row, count = row_of(group, rollout), len(done.tokens)
    texts = pieces(done.tokens) if pieces else [f"{token} " for token in done.tokens]
    return RolloutView(
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
        pieces=tuple(texts),
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


def view_step(
    step: JournalStep,
    pieces: Pieces | None = None,
    oldest: int | None = None,
    trainer: Mapping[Place, Sequence[float]] | None = None,
) -> list[RolloutView]:
    """Returns the views of all rollouts of a step, in the order in which they were trained."""
    known = trainer or {}
    return [
        view_rollout(step, group, rollout=i, pieces=pieces, oldest=oldest, trainer=known.get((group.ticket, i), ()))
        for group in step.groups
        for i in range(len(group.scored))
    ]


def trimmed_below(settings: Mapping[str, object], step: int) -> int | None:
    """Returns the oldest version in the loss of a step (counted from 0), by the run's settings; None if tokens are not trimmed."""
    staleness = settings.get("staleness")
    if not isinstance(staleness, Mapping) or staleness.get("overdue") != "trim":
        return None
    return step - int(staleness.get("max_lag", 1))


def row_of(group: Group, rollout: int) -> Row | None:
    """Returns the training row that ends with the rollout's last completion. Rows of single-turn rollouts are in the order of the
    rollouts."""
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
    """Returns the config of a run as plain values; empty if it has none."""
    import tomllib

    path = run_dir / "config.toml"
    return tomllib.loads(path.read_text()) if path.is_file() else {}


def token_details(one: RolloutView, place: int) -> str:
    """Returns everything that is known about one token, for a tooltip."""
    parts = [f"token {place}, id {one.tokens[place]}", f"log-prob {one.logprobs[place]:.4f}"]
    if one.trainer:
        parts.append(f"trainer {one.trainer[place]:.4f} (difference {one.trainer[place] - one.logprobs[place]:+.4f})")
    parts.append(f"lag {one.lags[place]}" + (", mixed weights" if one.mixed[place] else ""))
    parts += [f"advantage {one.advantages[place]:+.3f}"] if one.advantages else []
    parts += [f"not in the loss: {one.left_out[place]}"] if one.left_out[place] else []
    return "\n".join(parts)


def span_list(one: RolloutView) -> str:
    """Formats the versions of the tokens, and of the oldest KV entries they attended to."""
    ends = [*(span.start for span in one.spans[1:]), len(one.tokens)]
    return ", ".join(
        f"{span.start}-{end - 1} version {span.version}"
        + (f" over KV of {span.kv_version}" if span.kv_version != span.version else "")
        + (" (mixed)" if span.mixed else "")
        for span, end in zip(one.spans, ends, strict=False)
        if end > span.start
    )
