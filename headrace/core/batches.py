"""The values of training: rollouts that failed, training rows, groups with their advantages, and the batch of a step.

The examples go on with the values of those in `types.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import force_setattr

from headrace.core.errors import encodable
from headrace.core.types import Prompt, RoutingTrace, SamplingMask, Scored, Struct, TeacherTrace

OUTAGES = ("engine_error", "teacher_error", "reference_error", "reward_unreachable")
"""Reasons of failures that neither the data nor the reward function caused."""


class Failure(Struct, frozen=True):
    """A rollout that could not be sampled or scored. It is data with a reason (C2), never a reward of zero.

    >>> failure = Failure("reward_raised", traceback="rewards.py:3, in exact\\nKeyError: 'b'")
    >>> failure.kind, failure.outage
    ('KeyError', False)
    """

    reason: str
    """A short stable name: `reward_raised`, `reward_timeout`, `reward_nan`, `engine_error`, `prompt_too_long`, ..."""
    detail: str = ""
    traceback: str = ""
    """The frames of the user's own function, and the exception as the last line; empty if nothing was raised."""

    def __post_init__(self) -> None:
        for name in ("detail", "traceback"):  # they may quote anything, and are sent and written down
            if (text := getattr(self, name)) != (written := encodable(text)):
                force_setattr(self, name, written)

    @property
    def kind(self) -> str:
        """The name of the exception, if one was raised; else the reason."""
        return self.traceback.rpartition("\n")[2].partition(":")[0] or self.reason

    @property
    def outage(self) -> bool:
        """Whether the engine or the network failed, not the data or the reward: trying again later may help."""
        return self.reason in OUTAGES


class Row(Struct, frozen=True):
    """One training row: a root-to-leaf path of an episode. All fields but `prompt` are [T] over the tokens behind the prompt.

    >>> row = Row(prompt.tokens, (20, 9, 2), (-0.1, -0.7, -0.2), advantages=(0.5,) * 3, mask=(True,) * 3, versions=(4, 4, 5))
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The sampler's. A token whose log-prob is not finite is left out of numerator and denominator, and is counted."""
    advantages: tuple[float, ...]
    """Rewards of the tokens where there is a critic or a process reward (`turns` is given): the trainer makes advantages of them (`algo/critic.py`, `algo/implicit.py`)."""
    mask: tuple[bool, ...]
    """False keeps a token as context and takes it out of the loss and its denominator."""
    versions: tuple[int, ...]
    sampling_mask: SamplingMask | None = None
    """[T] the vocabulary that was left at each position; rows are empty where nothing was cut, and for context."""
    routing: RoutingTrace | None = None
    """[T', layers, k] from the prompt's first token on; positions after the T'th were not recorded."""
    teacher: TeacherTrace | None = None
    """[T]"""
    kv_versions: tuple[int, ...] = ()
    """[T] the oldest weights that computed any of the cache entries each token was sampled over; empty: those of `versions`."""
    temperature: float = 0.0
    """The temperature that it was sampled at. 0: that of its batch, in rows of earlier versions."""
    trajectories: tuple[int, ...] = ()
    """The trajectories that its tokens belong to, by their numbers in the group: one number for all tokens, or [T] where turns of several
    agents lie on its path. Empty: the row is a trajectory by itself, in rows of earlier versions."""
    turns: tuple[int, ...] = ()
    """The turns of the episode that its tokens belong to: one number for all tokens, or [T]. Only where the trainer makes advantages of rewards: it takes the
    tokens of a trajectory in the order of their turns."""
    again: bool = False
    """Whether it is of a good rollout of an earlier group, of any age (`Group.again`)."""


class RewardsBefore(Struct, frozen=True):
    """The rewards that the question of a prompt had in earlier groups of the run.

    >>> RewardsBefore().after((1.0, 0.0)).after((1.0, 1.0))
    RewardsBefore(groups=2, rollouts=4, mean=0.75, variance=0.3125)
    """

    groups: int = 0
    rollouts: int = 0
    mean: float = 0.0
    """The mean of all these rewards."""
    variance: float = 0.0
    """The mean, over rollouts, of the variance within their group (with ddof = 1), and the variance of the groups' means: the form that DCPO's code
    carries on from step to step (arXiv 2509.02333)."""

    def after(self, rewards: Sequence[float]) -> RewardsBefore:
        """Returns them with those of another group, of two rollouts or more."""
        count = len(rewards)
        total, mean = self.rollouts + count, sum(rewards) / count
        within = sum((reward - mean) ** 2 for reward in rewards) / (count - 1)
        apart = self.rollouts * count * (mean - self.mean) ** 2 / total**2
        return RewardsBefore(
            groups=self.groups + 1,
            rollouts=total,
            mean=(self.rollouts * self.mean + count * mean) / total,
            variance=(self.rollouts * self.variance + count * within) / total + apart,
        )


class Group(Struct, frozen=True):
    """G scored rollouts of one prompt with their advantages: the value that the buffer holds and the trainer consumes.

    >>> wrong = Scored(Episode((Turn(prompt.tokens, Completion((8, 2), (-2.0, -0.3), (before,), "stop")),)), 0.0, {"exact": 0.0})
    >>> other = Row(prompt.tokens, (8, 2), (-2.0, -0.3), advantages=(-0.5,) * 2, mask=(True,) * 2, versions=(4, 4))
    >>> group = Group(ticket=12, prompt=prompt, scored=(right, wrong), rows=(row, other))  # advantage: reward - mean of rewards
    """

    ticket: int
    """Its number in the order of admission (C1)."""
    prompt: Prompt
    scored: tuple[Scored, ...]
    rows: tuple[Row, ...]
    failures: tuple[Failure, ...] = ()
    """Rollouts of this group that failed; the advantages compare the others among themselves."""
    pairs: tuple[tuple[int, int], ...] = ()
    """Its preferences: places in `scored` of a chosen and a rejected rollout. Only for losses of pairs (`algo/policy/pairs.py`)."""
    before: RewardsBefore | None = None
    """The rewards that its prompt had before, where the advantage asks for it (`advantages.smoothed`)."""
    experience: tuple[Scored, ...] = ()
    """Good rollouts of earlier groups of its prompt, which are trained again with it (`algo.experience`)."""
    again: tuple[Row, ...] = ()
    """Their rows, beside `rows`. They alone may be older than `staleness.max_lag`."""

    @property
    def all_rows(self) -> tuple[Row, ...]:
        return self.rows + self.again


class Demonstration(Struct, frozen=True):
    """A question, and the tokens of an answer that was given, with the end of turn. Nobody sampled it.

    >>> Demonstration((1, 5), (7, 2)).row(step=3).versions
    (3, 3)
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    advantage: float = 1.0
    """The advantage among the rollouts of its question (`algo.demonstrations.kind = compared`); else 1."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.answer

    def row(self, step: int) -> Row:
        """Returns its row for the trainer: every token of the answer has its advantage."""
        count = len(self.answer)
        return Row(
            prompt=self.prompt,
            tokens=self.answer,
            logprobs=(0.0,) * count,  # nobody sampled them, and what learns from them compares with nothing
            advantages=(self.advantage,) * count,
            mask=(True,) * count,
            versions=(step,) * count,
            temperature=1.0,
        )


class Batch(Struct, frozen=True):
    """The groups that one optimizer step consumes.

    >>> batch = Batch(step=5, groups=(group,))
    >>> [[batch.step - version for version in one.versions] for one in batch.rows]  # the lag of every token
    [[1, 1, 0], [1, 1]]
    """

    step: int
    """Number of optimizer steps done before this one, so that lag = step - version."""
    groups: tuple[Group, ...]
    temperature: float = 1.0
    """The temperature of rows that do not say theirs."""
    adapter: str = ""
    """The adapter that it trains; empty where all weights are trained."""
    skippable: bool = True
    """Whether the step is skipped if the algorithm rejects all its tokens; runs from before 2026-11-22 never skipped one."""
    steps: int = 0
    """Optimizer steps that the run plans at present, for the learning rate's schedule; 0: `train.steps`."""
    demonstrations: tuple[Demonstration, ...] = ()
    """Given answers that are trained beside the groups (`algo.demonstrations`)."""

    @property
    def rows(self) -> list[Row]:
        return [row for group in self.groups for row in group.all_rows]
