"""Staleness (C1): how many tickets may be out, in which order groups are trained, what becomes of tokens that are too old."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from headrace.core.batches import Group, Row
from headrace.settings.strict import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StalenessConfig:
    """`max_lag` is a guarantee, not a target: no token with a larger lag is ever trained. (Good rollouts of earlier groups, `Group.again`, are no tokens of
    the group: they are kept on purpose, and exempt by that name.)

    **By pacing** (`overdue = "wait"`, the default): nothing is discarded to keep the guarantee.

    *The rule.* A ticket is drawn before a prompt is sampled. It is given back when the weights that its group trained
    are live in the engine, or when the group has ended otherwise (dropped, failed). At most `slots` tickets are out. The
    trainer takes P = `groups_per_step` groups per step, and only groups whose ticket lies less than W = `window` places
    after the oldest ticket not taken yet.

    *The proof.* Let group g be admitted with ticket n while version v is live, and be trained at step s (s optimizer
    steps were done before). Its tokens are sampled at v or later, so its lag is at most s - v. Each of the steps
    v, ..., s - 1 trained P groups whose weights were not live when g was admitted. Such a group either held a ticket at
    that moment, which at most slots - 1 groups did, since g holds one; or it was admitted later, with a ticket m > n, and
    was taken before g. Then m < a + W, where a <= n is the oldest ticket not taken (g itself is not taken yet), so m is
    one of n+1, ..., n+W-1: at most W - 1 groups. Hence (s - v) P <= slots - 1 + W - 1, that is
    lag <= (slots + W - 2) // P.

    With `slots = (max_lag + 1) P - (W - 1)` the bound is exactly `max_lag`. Slots alone would not bound it: if groups
    are taken in the order of completion, a slow group can be passed without end. The proof does not depend on which ready
    group inside the window is taken first (`order`).

    *A fleet of engines* (`engine/fleet/`): version v is live when every engine in the rotation has it, and an engine enters the
    rotation only with the newest version. So a group that is admitted while v is live is sampled at v or later, whichever engine
    its requests are on and wherever they move, and the proof holds word for word. An engine that cannot be brought to v in time
    leaves the rotation first, and what it samples after that is not accepted.

    *A killed run* is resumed with the same tickets, and every token keeps the version that sampled it. The proof does not
    depend on which process did a step.

    *Progress.* slots >= P, so that a batch can fill: its k < P groups hold k tickets, and the others are ready, in flight
    or free. The oldest ready group may always be taken, and tickets of trained groups are given back with the swap.

    **By version control** (`trim`, `drop`, `cancel`): generation is not paced by the trainer. `in_flight` groups are
    generated at once, and `stored` finished ones may wait (0: an unbounded stream). When a group is taken for step s, the
    age of every token is checked: it is trained only if s - version <= max_lag, so this bound holds by construction too.
    The cost is the discarded tokens, more of them from rollouts that take long. No group is admitted while the live
    weights are too old themselves.

    *Progress.* Ages grow with optimizer steps alone. While the trainer waits for the batch of step s, version s goes live
    (its delivery waits for nothing), and no group admitted after that is overdue at s.
    """

    groups_per_step: int = Field(default=8, gt=0)
    """P: groups (prompts) of one optimizer step."""
    max_lag: int = Field(default=1, ge=0)
    """The largest lag of a trained token, in steps; 0 is synchronous."""
    window: int = Field(default=1, gt=0)
    """W: 1 trains groups strictly in the order of admission. With more, fast groups may pass slow ones, at the cost of
    W - 1 slots."""
    order: Literal["stalest", "finished"] = "stalest"
    """The finished group taken first: stalest: the one admitted first; finished: the one that finished first."""
    overdue: Literal["wait", "trim", "drop", "cancel"] = "wait"
    """wait: generation is paced so that nothing is ever too old. The others discard (docs/staleness.md)."""
    in_flight: int = Field(default=0, ge=0)
    """trim, drop, cancel: groups generated and scored at once. 0: (max_lag + 1) P."""
    stored: int = Field(default=0, ge=0)
    """trim, drop, cancel: finished groups that may wait for the trainer. 0: no limit."""

    @model_validator(mode="after")
    def _window_leaves_a_batch(self) -> StalenessConfig:
        if self.slots < self.groups_per_step:
            raise ValueError(
                f"staleness.window = {self.window} leaves {self.slots} slots for batches of {self.groups_per_step} groups; "
                f"with max_lag = {self.max_lag} use a window of at most {self.max_lag * self.groups_per_step + 1}"
            )
        return self

    @model_validator(mode="after")
    def _paced_or_not(self) -> StalenessConfig:
        if self.paced and (self.in_flight or self.stored):
            raise ValueError(
                'staleness.in_flight and staleness.stored are for generation that is not paced; with overdue = "wait" the slots '
                "follow from max_lag and window: remove them, or set overdue to trim, drop or cancel"
            )
        if not self.paced and self.window != 1:
            raise ValueError(
                f'staleness.window = {self.window} belongs to overdue = "wait"; with overdue = "{self.overdue}" every finished '
                "group may be taken: remove it"
            )
        if not self.paced and 0 < self.stored < self.groups_per_step:
            raise ValueError(
                f"staleness.stored = {self.stored} never holds a batch of {self.groups_per_step} groups; raise it, or set 0"
            )
        return self

    @property
    def paced(self) -> bool:
        """Whether generation waits for the trainer, so that nothing is ever overdue."""
        return self.overdue == "wait"

    @property
    def slots(self) -> int:
        """The number of tickets that may be out at once if generation is paced."""
        return (self.max_lag + 1) * self.groups_per_step - (self.window - 1)

    @property
    def generating(self) -> int:
        """The number of groups that may be in flight at once."""
        return self.slots if self.paced else self.in_flight or self.slots

    @property
    def lag_bound(self) -> int:
        """The largest lag that a trained token can have."""
        return (self.slots + self.window - 2) // self.groups_per_step if self.paced else self.max_lag


def time_limit_problems(config: StalenessConfig, minutes: float, minibatches: int) -> Iterator[str]:
    """Yields a sentence for each setting that counts on a number of groups in a step, which a time limit may lower."""
    if minutes and minibatches > 1:
        yield (
            f"train.minutes = {minutes:g} may lower staleness.groups_per_step to a number that train.minibatches = {minibatches} does not divide; set "
            "train.steps instead, or remove train.minibatches (train.epochs goes with it)"
        )
    if minutes and config.window > 1:
        yield (
            f"train.minutes = {minutes:g} may lower staleness.groups_per_step, on which staleness.window = {config.window} depends; remove one of the two"
        )


def still_bounded(old: StalenessConfig, new: StalenessConfig) -> bool:
    """Whether the new bound holds for groups that were admitted under the old settings: the proof above, with the old slots and the
    larger window. Both settings have the same number of groups a step."""
    if not new.paced:
        return True
    window = max(old.window, new.window)
    return old.paced and (old.slots + window - 2) // new.groups_per_step <= new.lag_bound


def first_version(group: Group) -> int:
    """The version that sampled the oldest token in the loss."""
    return min(version for row in group.rows for version, kept in zip(row.versions, row.mask, strict=True) if kept)


def judge(group: Group, step: int, config: StalenessConfig) -> Group | None:
    """Returns the part of a finished group that may be trained at `step`, or None if the group is dropped as overdue."""
    oldest = step - config.max_lag
    if first_version(group) >= oldest:
        return group
    assert not config.paced, f"ticket {group.ticket} is older than pacing allows: the proof above is wrong"
    if config.overdue != "trim":
        return None
    rows = tuple(_trimmed(row, oldest) for row in group.rows)
    if any(row.turns for row in rows):  # a critic's, whose rewards lie on tokens
        rows = _with_rewards_kept(group.rows, rows)
    return msgspec.structs.replace(group, rows=rows) if any(any(row.mask) for row in rows) else None


def _trimmed(row: Row, oldest: int) -> Row:
    mask = tuple(kept and version >= oldest for kept, version in zip(row.mask, row.versions, strict=True))
    return row if mask == row.mask else msgspec.structs.replace(row, mask=mask)


def _with_rewards_kept(rows: Sequence[Row], trimmed: Sequence[Row]) -> tuple[Row, ...]:
    """Returns the rows of a group that `trimmed` is of `rows`, after tokens were taken out of the loss, with the rewards of these where there is a critic:
    at the last token before them, in the order of their trajectory, that is left. Turns that are asked for at once are sampled by weights of any order,
    so that the last one of a trajectory may be too old while tokens before it are not."""
    rewards = [list(row.advantages) for row in trimmed]
    last: dict[int, tuple[int, int]] = {}
    for trajectory, _, number, place in sorted(_chain(rows)):
        if trimmed[number].mask[place]:
            last[trajectory] = number, place
            continue
        value, rewards[number][place] = rewards[number][place], 0.0
        if trajectory in last:
            row, token = last[trajectory]
            rewards[row][token] += value
    return tuple(msgspec.structs.replace(row, advantages=tuple(own)) for row, own in zip(trimmed, rewards, strict=True))


def _chain(rows: Sequence[Row]) -> Iterator[tuple[int, int, int, int]]:
    """Yields trajectory, turn, row and place of each token in the loss."""
    for number, row in enumerate(rows):
        for place, kept in enumerate(row.mask):
            if kept and math.isfinite(row.logprobs[place]):
                trajectory, turn = (column[place if len(column) > 1 else 0] for column in (row.trajectories, row.turns))
                yield trajectory, turn, number, place
