"""What may go wrong before a run stops: outages, faults of data or reward, and groups that teach nothing, each with its own budget.

They are counted apart, because they are mended apart. An outage (engine, network) passes by itself or does not: so many groups in
a row. A fault of data or reward stays until somebody mends it, and what it takes away is not random: a share. A group without
contrast is no failure at all, but a task that is too hard or too easy: so many in a row.

The share is one of the last 64 rollouts, as people think of it, but three things about it are not obvious.

It is compared at every group that ends, with `>=`. So a reward that fails on 45 to 50 % of the prompts cannot slip through: its
share wanders around its mean and soon touches one half.

It is compared from the 8th prompt on, and not only when 64 rollouts are there; until then it is that of the last 8 prompts. So small
configs, whose two steps have fewer than 64 rollouts, stop early too.

Rollouts of one prompt fail together, so that 64 rollouts in groups of 8 are no more than 8 observations. Where 10 % of the prompts
fail, chance alone brings half of 8 together 16 times in 8,000 prompts. So failures must also not be rare in the long run: half of
that share, of the last 512 rollouts and at least 64 prompts (or of what there is). Then 1 such run in 7 pauses once (simulated, 200
runs each), and nothing is delayed at the start, where the long run is short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from headrace.errors import RunPaused, TrainingError
from headrace.observe.facts import Fact, GroupEnded, Warned
from headrace.observe.numbers.shares import PROMPTS, WINDOW, Recent
from headrace.observe.text import counted, percent
from headrace.orchestration.loops.outcomes import Firsts, Rolled
from headrace.settings.process_config import WatchConfig
from headrace.types import Failure

_LONG = 8
"""Windows that the long run has."""

_BARREN = {
    "no_contrast": "All rewards of the group were equal: the task is too hard or too easy for this model; change the task, the reward, "
    "or raise rollout.group_size. ",
    "overlong": "All completions were cut off, which algo.overlong = mask leaves out: raise rollout.max_tokens. ",
    "no_teacher": "No teacher takes such prompts, and there is nothing else to learn from: widen the route of a [[teachers]] table. ",
}
_FAILED = {
    "prompt_too_long": "Raise engine.context_length, lower rollout.max_tokens, or take such rows out of the task",
    "reward_timeout": "Make the reward faster, or raise reward.timeout",
    "reward_worker_died": "Look at what the reward function does to its process (memory, native code); its output is in the logs",
    "request_refused": "Change what the engine refuses",
    "environment_raised": "Mend the environment, or the rows that it cannot play",
    "environment_timeout": "Make the environment faster, or raise its limit",
    "environment_turns": "Mend the environment, or raise its limit of turns",
    "environment_reward": "Mend the rewards that the environment returns",
    "teacher_refused": "Narrow the route of a [[teachers]] table, or take such rows out of the task",
}
_MEND = "Mend the reward function, or the rows that it cannot read"


class Budgets:
    """Of one process: a run that goes on begins with whole ones."""

    def __init__(
        self, watch: WatchConfig, patience: int, record: Callable[[Fact], None], clock: Callable[[], float]
    ) -> None:
        """`patience`: groups in a row that teach nothing."""
        self._watch, self._patience, self._record, self._clock = watch, patience, record, clock
        self._firsts = Firsts(record, clock)
        self._few, self._recent, self._long = Recent(1, PROMPTS), Recent(), Recent(_LONG * WINDOW, _LONG * PROMPTS)
        self._first: dict[str, Failure] = {}
        """By kind."""
        self._barren = self._outages = 0
        self._warned = False

    def spend(self, rolled: Rolled, fact: GroupEnded) -> None:
        """Of a group that ended, whatever it came to; `fact` says so and is recorded. Raises `TrainingError` for a budget that is spent."""
        self._firsts.tell(rolled.failures, rolled.prompt.id)
        for failure in rolled.failures:
            self._first.setdefault(failure.kind, failure)
        if rolled.scored or not all(
            failure.outage for failure in rolled.failures
        ):  # else it says nothing of the reward
            for window in (self._few, self._recent, self._long):
                window.add(fact)
        self._outage(rolled)
        self._faults()
        self._teaches(rolled, fact)

    def _outage(self, rolled: Rolled) -> None:
        if rolled.scored:
            self._outages = 0
        elif lost := [failure for failure in rolled.failures if failure.outage]:
            self._outages += 1
            if self._outages >= self._watch.outages:
                raise RunPaused(
                    f"paused: {self._outages} groups in a row had no rollout, because of {lost[0].reason} ({lost[0].detail}). See that it "
                    "answers again, then resume; watch.outages sets how many groups may pass"
                )

    def _faults(self) -> None:
        watch, window = self._watch, self._recent if self._recent.rollouts >= WINDOW else self._few
        share, long = window.fault_share, self._long.fault_share
        if window.groups < PROMPTS or share is None or long is None:
            return
        if share >= watch.failed_pause and long >= watch.failed_pause / 2:
            raise self._pause(window)
        if share > watch.failed_warn and not self._warned:
            self._record(Warned(self._clock(), f"{self._said(window)}; they are not trained. {self._remedy(window)}"))
        # Not again for every rollout more or less: only when it was mended meanwhile.
        self._warned = share > watch.failed_warn / 2 and (self._warned or share > watch.failed_warn)

    def _pause(self, window: Recent) -> RunPaused:
        first = self._commonest(window)
        error = RunPaused(
            f"paused: {self._said(window)}. The first {first.reason}: {first.detail}. {self._remedy(window)}, then resume; "
            f"watch.failed_pause = {self._watch.failed_pause:g} sets how many may fail"
        )
        if first.traceback:
            error.add_note(first.traceback)
        return error

    def _said(self, window: Recent) -> str:
        """`31 of the last 64 rollouts failed (48 %: KeyError 31)`"""
        faults = {kind: count for kind, count in window.kinds.items() if count > 0 and self._mine(kind)}
        last = window.rollouts - window.outages
        return f"{window.faults} of the last {last} rollouts failed ({percent(window.fault_share)}: {counted(faults)})"

    def _commonest(self, window: Recent) -> Failure:
        """The first failure of the kind that is commonest now."""
        kinds = Counter({kind: count for kind, count in window.kinds.items() if self._mine(kind)})
        return self._first[kinds.most_common(1)[0][0]]

    def _mine(self, kind: str) -> bool:
        return kind in self._first and not self._first[kind].outage

    def _remedy(self, window: Recent) -> str:
        return _FAILED.get(self._commonest(window).reason, _MEND)

    def _teaches(self, rolled: Rolled, fact: GroupEnded) -> None:
        if fact.outcome == "ready":
            self._barren = 0
        elif fact.outcome == "dropped":
            self._barren += 1
            if self._barren >= self._patience:
                raise TrainingError(
                    f"{self._barren} groups in a row could not be trained; the last one: {fact.reason}. "
                    f"{_BARREN.get(fact.reason, '')}rollout.patience sets how many groups may pass."
                )
