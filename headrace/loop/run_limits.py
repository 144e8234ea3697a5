"""The end of a run: three budgets that stop it, the time that it has, and the way out."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from headrace.core.batches import Failure
from headrace.core.errors import CheckpointError, RunPaused, TrainingError
from headrace.facts.facts import Fact, GroupEnded, Planned, Warned, Withdrawn
from headrace.facts.group_numbers import PROMPTS, WINDOW, Recent
from headrace.facts.texts import counted, duration, percent, plural
from headrace.facts.waits import Waits
from headrace.loop.buffer import Buffer
from headrace.loop.ledger import Firsts, Rolled
from headrace.settings.process_config import WatchConfig

# --- Three budgets that stop a run
# For outages, for faults of data or reward, and for groups without a training signal.
#
# They are counted separately, because they have different remedies. An outage (engine, network) may end by itself, so its budget is a
# number of groups in a row. A fault of data or reward lasts until somebody fixes it, and the rollouts that it removes are not random, so
# its budget is a share. A group without contrast is no failure: the task is too hard or too easy. Its budget is a number of groups in a row.
#
# The share refers to the last 64 rollouts. Three details are not obvious.
#
# It is compared with `>=` whenever a group ends. So a reward that fails on 45 to 50 % of the prompts is caught: its share varies around the
# mean and soon reaches one half.
#
# It is compared from the 8th prompt on, not only after 64 rollouts; until then it is the share of the last 8 prompts. So small configs,
# whose first two steps have fewer than 64 rollouts, stop early too.
#
# Rollouts of one prompt fail together, so 64 rollouts in groups of 8 are only 8 observations. If 10 % of the prompts fail, half of 8 fail by
# chance alone 16 times in 8,000 prompts. So failures must also be frequent in the long run: at least half of that share among the last 512
# rollouts and at least 64 prompts (or as many as there are). With that, 1 such run in 7 pauses once (simulated, 200 runs each), and nothing
# is delayed at the start, when the long window is still short.


_LONG = 8
"""Length of the long window, in short windows."""

_BARREN = {
    "no_contrast": "All rewards of the group were equal: the task is too hard or too easy for this model; change the task, the reward, "
    "or raise rollout.group_size. ",
    "overlong": "All completions were cut off, which algo.overlong = mask leaves out: raise rollout.max_tokens. ",
    "no_teacher": "No teacher scored them, so there is nothing to learn from them: either none takes such prompts (widen the route of a [[teachers]] "
    "table), or its prompt has {sibling} and no other completion of the group was right (lower its setting right, or show it a column of the row). ",
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


FAILING = "rollouts fail"
"""The key of warnings about them."""


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
            self._record(
                Warned(self._clock(), f"{self._said(window)}; they are not trained. {self._remedy(window)}", FAILING)
            )
        # Warns again only after the share fell below half of the threshold, not for every change around it.
        fewer = share <= watch.failed_warn / 2
        if fewer and self._warned:
            self._record(Withdrawn(self._clock(), FAILING))
        self._warned = not fewer and (self._warned or share > watch.failed_warn)

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


# --- The remaining time of a run with `train.minutes`
# How many steps still fit, and when the last one has to be over.
#
# The fit before the start uses the speeds of a short measurement. The first real steps show how long a step takes on this machine with
# everything else that runs on it, and how many groups have to be sampled to get enough with contrast. Both change while the model learns:
# completions become shorter, and fewer groups have contrast. So the number of steps is fitted again after `REFIT_AFTER` steps, and
# each time that their number has doubled. A run that becomes slower in between ends early, so that its last evaluation and its
# checkpoint are within the time.


REFIT_AFTER = 3
"""Steps of this process after which their number is fitted again for the first time."""
OFF = 0.15
"""Relative difference below which the number of steps is not changed."""
MARGIN = 1.25
"""Safety factor: one more step may take this many times the longest of the recent ones; so may the last evaluation and checkpoint."""
FIRST = 3.0
"""Safety factor of the first step, whose time is known from the short measurement alone."""
RECENT = 5
"""Steps over which the pace is averaged."""


@dataclass(kw_only=True)
class Allowance:
    """The time that one process of a run has. A resumed run has what the processes before it left. All times are in seconds of the
    run's clock."""

    end: float
    """The time at which the run must have ended."""
    steps: int
    """Steps that are planned."""
    most: int
    """Steps that the recipe asks for."""
    evaluation: float
    """Seconds that the last evaluation is expected to take."""
    save: float
    """Seconds that the last checkpoint is expected to take."""
    step: float
    """Seconds that a step is expected to take, until the first one is over."""
    _refit_after: int = REFIT_AFTER
    """Steps of this process after which their number is fitted next."""
    _began: float | None = None
    _ends: list[float] = field(default_factory=list)
    """The times at which the steps of this process ended."""

    def begin(self, now: float) -> None:
        """Marks the start of training."""
        self._began = now

    def measured(self, evaluation: float = 0.0, save: float = 0.0) -> None:
        """Replaces the expected seconds of an evaluation or a checkpoint by measured ones; 0 leaves them."""
        self.evaluation = max(evaluation, 0.0) or self.evaluation
        self.save = max(self.save, save)

    @property
    def refitted(self) -> bool:
        """Whether the number of steps has been fitted to real steps."""
        return self._refit_after > REFIT_AFTER

    @property
    def reserved(self) -> float:
        """Seconds reserved for the evaluation and the checkpoint after the last step."""
        return MARGIN * self.evaluation + MARGIN * self.save

    @property
    def pace(self) -> float:
        """Seconds of one step: the mean of the last `RECENT`, without the first, which waits for the pipeline to fill."""
        times = self._times()
        times = times[1:] if 1 < len(times) == len(self._ends) else times
        return sum(times) / len(times) if times else self.step

    def left(self, now: float) -> float:
        """Seconds that are left for steps."""
        return self.end - self.reserved - now

    def patience(self, now: float, doing: float) -> float:
        """Returns the seconds that may pass before a step of `doing` seconds has to begin."""
        return max(0.0, self.left(now) - MARGIN * doing)

    def another(self, now: float) -> bool:
        """Returns whether one more step fits."""
        times = self._times()
        return self.left(now) >= (MARGIN * max(times) if times else FIRST * self.step)

    def stepped(self, done: int, now: float) -> int | None:
        """Records the end of a step. `done`: steps of the whole run.

        Returns a new number of steps if the remaining time calls for one, else None."""
        self._ends.append(now)
        if len(self._ends) < self._refit_after:
            return None
        self._refit_after *= 2
        room = max(0, math.floor(self.left(now) / self.pace)) if self.pace > 0 else self.most
        steps = max(done, min(self.most, done + room))
        if abs(steps - self.steps) <= OFF * self.steps:
            return None
        self.steps = steps
        return steps

    def _times(self) -> list[float]:
        """Returns the seconds of the last steps, each from the end of the one before."""
        if self._began is None:
            return []
        ends = [self._began, *self._ends][-RECENT - 1 :]
        return [after - before for before, after in itertools.pairwise(ends)]


# --- The allowance in a pipeline
# Connects it to buffer, facts and settings.


Keep = Callable[[int, int], None]
"""Saves the new number of steps of the run, and the step at which that was decided."""


SHORT = "train.minutes is too short"
"""The key of the warning that a run begins with if not even the least useful number of steps seems to fit."""


class Minutes:
    """The time limit of a run. Without an allowance it does nothing."""

    def __init__(
        self,
        allowance: Allowance | None = None,
        keep: Keep = lambda steps, step: None,
        record: Callable[[Fact], None] = lambda fact: None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._allowance, self._keep, self._record, self._clock = allowance, keep, record, clock
        self._training = 0.0
        """Seconds of the trainer's longest step."""
        self._first = allowance.steps if allowance else 0
        """Steps that were planned before the first one was measured; 0 once they have been judged."""

    def begin(self, step: int) -> None:
        """Called when training begins, with the number of steps done."""
        if self._allowance is None:
            return
        self._allowance.begin(self._clock())
        if step and not self._allowance.another(self._clock()):
            message = (
                "the time of train.minutes is over, so no more steps are done; to continue, raise it, or set it to 0"
            )
            self._record(Warned(self._clock(), message))

    def measured(self, evaluation: float = 0.0, save: float = 0.0) -> None:
        """Takes measured seconds of an evaluation or a checkpoint."""
        if self._allowance:
            self._allowance.measured(evaluation, save)

    def another(self, step: int) -> bool:
        """Whether one more step fits. The first one always does, because a run must have a step."""
        return self._allowance is None or step == 0 or self._allowance.another(self._clock())

    @contextmanager
    def curfew(self, step: int, buffer: Buffer) -> Iterator[None]:
        """Closes the buffer, while the trainer waits for a batch, when it is too late to train one."""
        if self._allowance is None or step == 0:
            yield
            return
        patience = self._allowance.patience(self._clock(), self._training)
        timer = asyncio.get_running_loop().call_later(patience, buffer.close)
        try:
            yield
        finally:
            timer.cancel()

    def stepped(self, step: int, seconds: float) -> int | None:
        """Called after a step that took `seconds`. Returns the number of steps that fit, if it has changed; else None."""
        if self._allowance is None:
            return None
        self._training = max(self._training, seconds)
        before, steps = self._allowance.steps, self._allowance.stepped(step, self._clock())
        if self._first and self._allowance.refitted:
            if self._allowance.steps >= self._first:
                self._record(Withdrawn(self._clock(), SHORT))
            self._first = 0
        if steps is not None:
            self.changed(step, steps, f"a step takes {self._allowance.pace:.3g} s here, so {_instead(steps, before)}")
        return steps

    def over(self, step: int) -> None:
        """Called when the run ends before its last planned step."""
        assert self._allowance is not None
        left = self._allowance.end - self._clock()
        rest = f"need the remaining {duration(left)}" if left > 0 else "are still done, although the time is over"
        message = (
            f"no more steps: the last evaluation and the checkpoint {rest} ({_instead(step, self._allowance.steps)})"
        )
        self.changed(step, step, message)

    def changed(self, step: int, steps: int, message: str) -> None:
        """Saves and reports a new number of steps. It is on the disk before anything acts on it."""
        self._keep(steps, step)
        self._record(Planned(self._clock(), steps, message))


def _instead(steps: int, before: int) -> str:
    return f"{plural(steps, 'step')} instead of {before}"


# --- The end of a run
# Waits that an interrupt cuts short, and the last checkpoint, without which a run is not finished.


T = TypeVar("T")

LONGEST_PAUSE = 60.0
"""Longest pause between two tries to write the last checkpoint, in seconds."""


class Leaving:
    """Whether the run was interrupted, and waits that end when it is."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()

    def begin(self) -> None:
        self._begun.set()

    @property
    def begun(self) -> bool:
        return self._begun.is_set()

    async def unless(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Awaits `work` until it is done or the run is interrupted, since an engine for which it waits may hang. After an interrupt it
        cancels the work, including what that awaits, and returns None.

        Consumes: nothing.
        Waits for: the work.
        Unblocked by: the end of the work; `begin`.
        """
        doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(self._begun.wait())
        try:
            await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            doing.cancel()
        await asyncio.wait((doing,))
        return None if doing.cancelled() and self.begun else await doing


async def until_saved(
    save: Callable[[], Awaitable[str]],
    step: int,
    patience: float,
    *,
    waits: Waits,
    leaving: Leaving,
    warn: Callable[[str], None],
) -> None:
    """Saves the last checkpoint. If the disk cannot be written, it tries again for `patience` seconds or until an interrupt. `save` returns
    the error, or an empty string. Raises CheckpointError when `patience` is over.

    Consumes: `patience`, by pauses that double up to `LONGEST_PAUSE`.
    Waits for: the checkpoint on the disk.
    Unblocked by: room on the disk, at the next try; an interrupt, at once.
    """
    left, pause = patience, 1.0
    while not leaving.begun and (failure := await save()):
        if left <= 0:
            raise CheckpointError(
                f"all {step} steps are done, but the run is not finished, because its weights are not on the disk: {failure}. Then "
                "resume with --resume, which repeats the steps that are in no checkpoint from the journal"
            )
        warn(
            f"the run is not finished before the checkpoint of step {step} is on the disk: free disk space; it is tried again in "
            f"{min(pause, left):.0f} s, and for {left:.0f} s in all"
        )
        await leaving.unless(_pause(waits, min(pause, left)))
        left, pause = left - pause, min(2 * pause, LONGEST_PAUSE)


async def _pause(waits: Waits, seconds: float) -> None:
    async with waits.named("controller", "room on the disk for the last checkpoint"):
        await asyncio.sleep(seconds)
