"""Three budgets that stop a run: for outages, for faults of data or reward, and for groups without a training signal.

They are counted separately, because they have different remedies. An outage (engine, network) may end by itself, so its budget is a
number of groups in a row. A fault of data or reward lasts until somebody fixes it, and the rollouts that it removes are not random, so
its budget is a share. A group without contrast is no failure: the task is too hard or too easy. Its budget is a number of groups in a row.

The share refers to the last 64 rollouts. Three details are not obvious.

It is compared with `>=` whenever a group ends. So a reward that fails on 45 to 50 % of the prompts is caught: its share varies around the
mean and soon reaches one half.

It is compared from the 8th prompt on, not only after 64 rollouts; until then it is the share of the last 8 prompts. So small configs,
whose first two steps have fewer than 64 rollouts, stop early too.

Rollouts of one prompt fail together, so 64 rollouts in groups of 8 are only 8 observations. If 10 % of the prompts fail, half of 8 fail by
chance alone 16 times in 8,000 prompts. So failures must also be frequent in the long run: at least half of that share among the last 512
rollouts and at least 64 prompts (or as many as there are). With that, 1 such run in 7 pauses once (simulated, 200 runs each), and nothing
is delayed at the start, when the long window is still short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from headrace.core.batches import Failure
from headrace.core.errors import RunPaused, TrainingError
from headrace.facts.facts import Fact, GroupEnded, Warned
from headrace.facts.group_numbers import PROMPTS, WINDOW, Recent
from headrace.facts.texts import counted, percent
from headrace.loop.outcomes import Firsts, Rolled
from headrace.settings.process_config import WatchConfig

_LONG = 8
"""Length of the long window, in short windows."""

_BARREN = {
    "no_contrast": "All rewards of the group were equal: the task is too hard or too easy for this model; change the task, the reward, "
    "or raise rollout.group_size. ",
    "overlong": "All completions were cut off, which algo.overlong = mask leaves out: raise rollout.max_tokens. ",
    "no_teacher": "No teacher takes such prompts, so there is nothing to learn from them: widen the route of a [[teachers]] table. ",
}
_FAILED = {
    "prompt_too_long": "Raise engine.context_length, lower rollout.max_tokens, or remove such rows from the task",
    "reward_timeout": "Make the reward faster, or raise reward.timeout",
    "reward_worker_died": "Check what the reward function does to its process (memory, native code); its output is in the logs",
    "request_refused": "Change what the engine refuses",
    "engine_died": "Find out what in these prompts ends the engine (logs/engine.log has its last words), or remove such rows from the task",
    "environment_raised": "Mend the environment, or the rows that it cannot play",
    "environment_timeout": "Make the environment faster, or raise its limit",
    "environment_memory": "Let the environment hold less memory, or raise environment.memory_gib",
    "environment_turns": "Mend the environment, or raise its limit of turns",
    "environment_reward": "Mend the rewards that the environment returns",
    "agent_exit": "Mend the agent; its output is in logs/environment.log",
    "agent_failed": "Mend the agent, which said that it had failed",
    "not_posted": "Let the environment post all of its groups; for one that keeps groups back on purpose set watch.failed_pause = 1 and "
    "shorter environment.seconds (docs/atropos.md)",
    "teacher_refused": "Narrow the route of a [[teachers]] table, or remove such rows from the task",
}
_FIX = "Fix the reward function, or the rows that it cannot read"


class Budgets:
    """The budgets of one process: a resumed run starts with full ones."""

    def __init__(
        self, watch: WatchConfig, patience: int, record: Callable[[Fact], None], clock: Callable[[], float]
    ) -> None:
        """`patience`: number of groups in a row that may end without a training signal."""
        self._watch, self._patience, self._record, self._clock = watch, patience, record, clock
        self._firsts = Firsts(record, clock)
        self._few, self._recent, self._long = (
            Recent(window=1),
            Recent(),
            Recent(window=_LONG * WINDOW, prompts=_LONG * PROMPTS),
        )
        self._first: dict[str, Failure] = {}
        """The first failure of each kind."""
        self._barren = self._outages = 0
        self._warned = False

    def spend(self, rolled: Rolled, fact: GroupEnded) -> None:
        """Counts a group that ended. `fact`: its recorded outcome. Raises `TrainingError` if a budget is spent."""
        self._firsts.report(rolled.failures, rolled.prompt.id)
        for failure in rolled.failures:
            self._first.setdefault(failure.kind, failure)
        if rolled.scored or not all(
            failure.outage for failure in rolled.failures
        ):  # a group that only had outages says nothing about the reward
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
                    f"paused: {self._outages} groups in a row had no rollout, because of {lost[0].reason} ({lost[0].detail}). Make it "
                    "available again, then resume; watch.outages sets how many groups may fail so"
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
        # Warns again only after the share fell below half of the threshold, not for every change around it.
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
        """The first failure of the kind that is most frequent now."""
        kinds = Counter({kind: count for kind, count in window.kinds.items() if self._mine(kind)})
        return self._first[kinds.most_common(1)[0][0]]

    def _mine(self, kind: str) -> bool:
        return kind in self._first and not self._first[kind].outage

    def _remedy(self, window: Recent) -> str:
        return _FAILED.get(self._commonest(window).reason, _FIX)

    def _teaches(self, rolled: Rolled, fact: GroupEnded) -> None:
        if fact.outcome == "ready":
            self._barren = 0
        elif fact.outcome == "dropped":
            self._barren += 1
            if self._barren >= self._patience:
                raise TrainingError(
                    f"{self._barren} groups in a row could not be trained; the last one: {fact.reason}. "
                    f"{_BARREN.get(fact.reason, '')}rollout.patience sets how many such groups are allowed."
                )
