"""Folds facts into the numbers that terminal, summary and report show. Reads no clock and no files."""

from __future__ import annotations

import math
from collections import Counter

from msgspec import field
from msgspec.structs import replace

from headrace.facts.facts import (
    Accounting,
    CheckpointSaved,
    EngineSample,
    Evaluated,
    FilesChecked,
    FirstFailure,
    FirstText,
    FleetSample,
    GroupEnded,
    IdentityChecked,
    MemberMoved,
    MemberSample,
    Planned,
    ProcessesUsed,
    PromptChosen,
    RunEnded,
    RunStarted,
    ScorerAsked,
    Slept,
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
from headrace.facts.group_numbers import Choices, Fates, Shares, Sieve, Tickets, discarded, solve_rate
from headrace.facts.records import MetricsFact, Sample, StepRow
from headrace.facts.run_totals import (
    ENGINE,
    Costs,
    EngineUse,
    Naps,
    ProbeTotals,
    RunSums,
    ScorerUse,
    StepTotals,
    SwapTotals,
    Window,
    counter,
)

SHOWN = 256
"""Steps of a long run that its curves are drawn from where not all are known, at most."""


def stride_of(steps: int) -> int:
    """Returns the smallest power of two by which the numbers of at most SHOWN of so many steps can be divided; of the steps that are kept for
    one stride, those of the next are a part.

    >>> stride_of(256), stride_of(257), stride_of(100_000)
    (1, 2, 512)
    """
    return 1 << max(0, -(-steps // SHOWN) - 1).bit_length()


class WaitTotal(RunSums):
    """Count and seconds of all waits of one owner for one thing."""

    count: int = 0
    seconds: float = 0.0
    longest: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)


class RunState(RunSums):
    """The sum of all facts so far. `run_state.py` and `facts/verdicts.py` draw conclusions from it."""

    now: float = 0.0
    started: RunStarted | None = None
    ended: RunEnded | None = None
    sessions: list[float] = []
    """Start time of every process of this run; more than one after a resume."""
    windows: list[Window] = []
    """Intervals of training: from the first ticket of a process to its last step."""
    training: bool = False
    """Whether the last of these intervals goes on."""
    whole: bool = True
    """Whether the lists here have all of the run. A state that was read from a digest (`facts/index_file.py`) has only some of its steps,
    swaps, probes and samples of the engine; all sums are complete."""
    rows: list[StepRow] = []
    drawn_rewards: list[float] = []
    """Rewards of the rollouts whose groups ended since the last step."""
    lags: Counter[int] = counter()
    ages: Counter[int] = counter()
    """Lags of the trained tokens of good rollouts of earlier groups, for which there is no bound."""
    uncommon: Counter[str] = counter()
    """Number of `StepRow.uncommon` -> steps in which it was not 0."""
    lengths: Sieve = field(default_factory=Sieve)
    """Tokens of completions."""
    solve_rates: Sieve = field(default_factory=Sieve)
    """Mean rewards of groups."""
    fates: Fates = field(default_factory=Fates)
    shares: Shares = field(default_factory=Shares)
    choices: Choices = field(default_factory=Choices)
    costs: Costs = field(default_factory=Costs)
    scorers: dict[str, ScorerUse] = {}
    """The parts of the reward by name."""
    failures: dict[str, FirstFailure] = {}
    """The first failed rollout of each kind; `shares` has the counts."""
    tickets: Tickets = field(default_factory=Tickets)
    engine: EngineUse = field(default_factory=EngineUse)
    naps: Naps = field(default_factory=Naps)
    totals: StepTotals = field(default_factory=StepTotals)
    swapped: SwapTotals = field(default_factory=SwapTotals)
    probed: ProbeTotals = field(default_factory=ProbeTotals)
    evals: list[Evaluated] = []
    """Evaluations of the held-out prompts."""
    sets: dict[str, list[Evaluated]] = {}
    """Evaluations of the further sets, by name."""
    checks: list[IdentityChecked] = []
    files: FilesChecked | None = None
    """The newest preflight of the model's files."""
    warm: WarmStarted | None = None
    """The training on demonstrations before the run."""
    swaps: list[WeightsLive] = []
    checkpoints: list[CheckpointSaved] = []
    deaths: list[WorkerLost] = []
    joined: dict[str, WorkerJoined] = {}
    """The newest worker of each seat that workers take from elsewhere; one that was lost is not in it."""
    used: ProcessesUsed | None = None
    """The newest reading of cores and memory."""
    members: tuple[MemberSample, ...] = ()
    """The engines of a fleet; empty where there is one engine."""
    moves: list[MemberMoved] = []
    """The engines that left the fleet or came back, in order."""
    warnings: list[Warned] = []
    withdrawn: dict[str, float] = {}
    """The time at which the warnings of a key were withdrawn last."""
    waits: dict[tuple[str, str], WaitTotal] = {}
    """Keys: the owner, and what it waits for."""
    samples: tuple[Sample, ...] = ()
    """Samples of the last step. The recorder sets them, because only it sees texts."""
    planned: list[Planned] = []
    """Changes of the number of steps, in order."""
    first_text: FirstText | None = None

    def _warn(self, fact: Warned | Withdrawn) -> None:
        if isinstance(fact, Warned):
            self.warnings.append(fact)
        elif any(warning.key == fact.key for warning in open_warnings(self)):
            self.withdrawn[fact.key] = fact.t

    def _check(self, fact: IdentityChecked | TrialChecked) -> None:
        if isinstance(fact, TrialChecked):
            self.probed.tried(fact)
            return
        self.checks.append(fact)
        self.probed.add(fact)

    def fold(self, fact: MetricsFact) -> None:
        self.now = max(self.now, fact.t)
        self.costs.fold(fact)
        match fact:
            case RunStarted():
                self._start(fact)
            case TicketDrawn():
                self._draw(fact)
            case PromptChosen():
                self.choices.choose(fact)
            case GroupEnded():
                self._end(fact)
            case StepRow():
                self._step(fact)
            case EngineSample():
                self.engine.fold(fact.t, fact.stats, self._open_windows())
            case FleetSample() | ProcessesUsed():
                self._sample(fact)
            case MemberMoved():
                self.moves.append(fact)
            case Waited():
                self.waits.setdefault((fact.owner, fact.what), WaitTotal()).add(fact.seconds)
            case RunEnded():
                self.ended, self.training = fact, False
            case FirstFailure():
                self.failures.setdefault(fact.kind, fact)
            case Evaluated():
                self._evaluate(fact)
            case FilesChecked() | WarmStarted():
                self._prepare(fact)
            case IdentityChecked() | TrialChecked():
                self._check(fact)
            case ScorerAsked():
                self.scorers.setdefault(fact.scorer, ScorerUse(fact.what)).add(fact)
            case WeightsLive():
                self.swaps.append(fact)
                self.swapped.swap(fact, self._trained_at(fact.t))
            case CheckpointSaved():
                self.checkpoints.append(fact)
                self.swapped.save(fact, self._trained_at(fact.t))
            case WorkerLost():
                self.deaths.append(fact)
                self.joined.pop(fact.who, None)
            case WorkerJoined():
                self.joined[fact.who] = fact
            case Slept():
                self.naps.sleep(fact)
            case Woke():
                self.naps.wake(fact)
            case Warned() | Withdrawn():
                self._warn(fact)
            case Planned():
                self.planned.append(fact)
                self.started = self.started and replace(self.started, steps=fact.steps)
            case FirstText():
                self.first_text = self.first_text or fact
        if self.training:
            self.windows[-1] = (self.windows[-1][0], max(fact.t, self.windows[-1][1]))
        if self.started and self.step >= self.started.steps:
            self.training = False

    def _prepare(self, fact: FilesChecked | WarmStarted) -> None:
        if isinstance(fact, FilesChecked):
            self.files = fact
        else:
            self.warm = fact

    def _sample(self, fact: FleetSample | ProcessesUsed) -> None:
        if isinstance(fact, FleetSample):
            self.members = fact.members
        else:
            self.used = fact

    def _evaluate(self, fact: Evaluated) -> None:
        """A further set may have been measured twice, because a run that was killed before its held-out prompts were measures all sets again."""
        if not fact.beside:
            self.evals.append(fact)
            return
        known = self.sets.setdefault(fact.name, [])
        if known and (known[-1].step, known[-1].phase) == (fact.step, fact.phase):
            known.pop()
        known.append(fact)

    def _start(self, fact: RunStarted) -> None:
        if self.started or fact.resumed_at:
            self.engine.restart()
            self.naps.restart()
        if fact.books:
            self.tickets.resume(fact.books)
        self.started, self.ended, self.training = fact, None, False
        self.sessions.append(fact.t)

    def _draw(self, fact: TicketDrawn) -> None:
        self.tickets.draw(fact)
        if not self.training:
            self.windows.append((fact.t, fact.t))
            self.training = True

    def _end(self, fact: GroupEnded) -> None:
        if self.tickets.end(fact):
            self.lengths.draw(fact.lengths, fact.outcome == "ready")
            self.solve_rates.draw(solve_rate(fact), fact.outcome == "ready")
            self.drawn_rewards += fact.rewards
        self.fates.end(fact, self._group_size)
        self.shares.end(fact)
        self.choices.end(fact)

    def _open_windows(self) -> list[Window]:
        """Returns the intervals of training so far; the last one has no end while it goes on."""
        if not self.training:
            return self.windows
        return [*self.windows[:-1], (self.windows[-1][0], math.inf)]

    def _trained_at(self, t: float) -> bool:
        return any(start <= t <= end for start, end in self._open_windows())

    def _step(self, row: StepRow) -> None:
        self.rows.append(row)
        self.totals.add(row, self.started.max_lag if self.started else math.inf)
        self.costs.end_step()
        self.drawn_rewards.clear()
        self.lags.update(row.lags)
        self.ages.update(row.ages)
        self.uncommon.update(name for name, count in row.uncommon.items() if count)
        for group in self.fates.train(row.tickets, self._group_size):
            self.lengths.trained.add(group.lengths)
            self.solve_rates.trained.add(solve_rate(group))
        self.tickets.train(row.tickets)
        self.shares.train(row.tickets)

    @property
    def spread(self) -> list[StepRow]:
        """All steps, or of a long run those at equal distances that every state has, read from a digest or not."""
        stride = stride_of(self.totals.steps)
        return [row for row in self.rows if row.report.step % stride == 0]

    @property
    def _group_size(self) -> int:
        return self.started.group_size if self.started else 1

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        if self.rows:
            return self.rows[-1].report.version
        return self.started.resumed_at if self.started else 0

    @property
    def accounting(self) -> Accounting:
        """The controller's own count if the run has ended; else, or if it was killed, the count from the facts."""
        return self.ended.accounting if self.ended else self.tickets.accounting()


# --- Numbers computed from a `RunState`
# Rates, idle shares, time left. None means that the facts do not say.


def open_warnings(state: RunState) -> list[Warned]:
    """Returns the warnings that are still true."""
    return [warning for warning in state.warnings if not is_withdrawn(state, warning)]


def is_withdrawn(state: RunState, warning: Warned) -> bool:
    return bool(warning.key) and warning.t <= state.withdrawn.get(warning.key, -math.inf)


def phase(state: RunState) -> str:
    """Returns what the run is doing, in words."""
    if state.started is None:
        return "loading the model"
    if state.ended:
        return state.ended.reason if state.ended.reason in ("finished", "interrupted") else "stopped"
    if state.training:
        return "training"
    if state.rows and state.step >= state.started.steps:
        if state.checkpoints and state.checkpoints[-1].error:
            return "waiting for disk space for the last checkpoint"
        measured_before = any(evaluation.phase == "before" for evaluation in state.evals)
        return "measuring held-out reward (after)" if measured_before else "finishing"
    running = state.engine.last.running if state.engine.last else 0
    return "measuring held-out reward (before)" if running else "starting"


def saved_step(state: RunState) -> int | None:
    """Returns the step of the newest checkpoint on the disk."""
    return next((checkpoint.step for checkpoint in reversed(state.checkpoints) if not checkpoint.error), None)


def cost_numbers(state: RunState) -> dict[str, float]:
    """Returns the cost of the run in dollars by name: in all, of each pool that has a price, a step, a million trained tokens; empty if no
    price was set. Steps and tokens bear all of it, evaluations and loading included."""
    costs = state.costs
    if not costs.prices:
        return {}
    found = {"cost": costs.total} | {
        f"cost of the {pool}{'s' * (pool == ENGINE)}": costs.spent[pool] for pool in costs.prices
    }
    steps, tokens = state.totals.steps, state.totals.tokens
    found |= {"cost a step": costs.total / steps} if steps else {}
    return found | ({"cost of a million trained tokens": 1e6 * costs.total / tokens} if tokens else {})


def step_seconds(state: RunState, recent: int = 20) -> float | None:
    """Returns the seconds from one step's end to the next, the mean of the last ones of this process; None before its first step."""
    tail = session_rows(state)[-recent - 1 :]
    if len(tail) > 1:
        return (tail[-1].t - tail[0].t) / (len(tail) - 1)
    return tail[0].t - (state.windows[-1][0] if state.windows else state.sessions[-1]) if tail else None


def seconds_left(state: RunState, recent: int = 20) -> float | None:
    """Returns the seconds left at the pace of the last steps of this process; None before its first step."""
    pace = step_seconds(state, recent)
    if pace is None or state.started is None or state.ended:
        return None
    return max(0.0, (state.started.steps - state.step) * pace - (state.now - state.rows[-1].t))


def session_rows(state: RunState) -> list[StepRow]:
    since = state.sessions[-1] if state.sessions else 0.0
    return [row for row in state.rows[-200:] if row.t >= since]


def train_seconds(state: RunState) -> float:
    return sum(end - start for start, end in state.windows)


def trainer_idle(state: RunState) -> float | None:
    """Returns the share of training time in which the trainer neither stepped, nor published, nor saved."""
    total = train_seconds(state)
    if not state.rows or not total:
        return None
    return max(0.0, 1 - (state.totals.seconds + state.swapped.busy) / total)


def idle_shares(state: RunState) -> tuple[float | None, float | None]:
    """Returns the idle shares of engine and trainer: those that the controller measured if they cover the whole run, else those of the
    samples."""
    if state.ended and len(state.sessions) == 1 and state.rows:
        return state.ended.engine_idle, state.ended.trainer_idle
    return state.engine.idle, trainer_idle(state)


def recent_trainer_idle(state: RunState, recent: int = 10) -> float | None:
    """Returns the share of the last steps' time in which the trainer waited for groups."""
    rows = session_rows(state)[-recent:]
    if not rows:
        return None
    total = rows[-1].t - (rows[0].t - rows[0].report.seconds - rows[0].wait_seconds)
    return min(1.0, sum(row.wait_seconds for row in rows) / total) if total > 0 else None


def trainer_rate(state: RunState, recent: int | None = None) -> float | None:
    """Returns trained tokens per second: over all training time, or over the last `recent` steps."""
    if recent is None:
        total = train_seconds(state)
        return state.totals.tokens / total if total and state.rows else None
    rows = session_rows(state)[-recent - 1 :]
    if len(rows) < 2 or rows[-1].t <= rows[0].t:
        return None
    return sum(row.report.loss_tokens for row in rows[1:]) / (rows[-1].t - rows[0].t)


def recent_reward(state: RunState, recent: int = 10) -> float | None:
    """Returns the mean reward of all drawn rollouts. That of the trained groups would leave out the easy prompts."""
    rows = state.rows[-recent:]
    return sum(row.reward_drawn for row in rows) / len(rows) if rows else None


def mean_lag(state: RunState) -> float | None:
    tokens = state.lags.total()
    return sum(lag * count for lag, count in state.lags.items()) / tokens if tokens else None


def mean_swap(state: RunState) -> float | None:
    """Returns the mean seconds for which a swap stopped generation."""
    return state.swapped.swap_seconds / state.swapped.count if state.swapped.count else None


def version_spread(state: RunState) -> tuple[float, int] | None:
    """Returns the number of versions between the oldest and the newest token of a batch: mean and maximum over the steps."""
    totals = state.totals
    return (totals.widths / totals.lagged, totals.widest) if totals.lagged else None


def swapped_share(state: RunState) -> float | None:
    """Returns the share of trained completions that were sampled by more than one version."""
    return state.totals.swapped / state.totals.completions if state.totals.completions else None


def trimmed_tokens(state: RunState) -> int:
    return state.totals.trimmed


def lost_tokens(state: RunState) -> int:
    """Returns the sampled tokens of groups that were discarded for their age."""
    return sum(fate.tokens for fate in discarded(state.fates))


def mean_pause(state: RunState) -> float | None:
    """Returns the mean seconds per swap for which generation was held back or stopped."""
    return state.swapped.pauses / state.swapped.count if state.swapped.count else None
