"""The numbers of a run as arrays, by step and by group: all that curves and sample browser need, small enough that 10⁷ rollouts can be
filtered at once.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from headrace.facts.facts import Evaluated, GroupEnded, IdentityChecked, ProcessesUsed, WarmStarted, WeightsLive
from headrace.facts.group_numbers import Choices, Tally
from headrace.facts.records import MetricsFact, StepRow
from headrace.facts.run_state import RunState
from headrace.facts.run_totals import Costs, EngineUse

# --- Arrays that are appended to, or set at places that may lie behind their end.


START = 256
"""Elements that an array has room for at first."""


class Growing:
    """An array [n] whose room doubles when it is full. The first `n` elements are never moved under a reader: a view stays valid."""

    def __init__(self, dtype: Any) -> None:
        self._room = np.zeros(START, dtype)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def view(self) -> np.ndarray:
        """[n] the elements so far."""
        return self._room[: self._count]

    def append(self, value: Any) -> None:
        self.put(self._count, value)

    def put(self, place: int, value: Any) -> None:
        """Sets the element at `place`. Elements between the end and `place` become zeros."""
        self._make_room(place + 1)
        with np.errstate(over="ignore"):  # metrics of a version without `headrace.core.rewards` may hold any number
            self._room[place] = value
        self._count = max(self._count, place + 1)

    def extend(self, values: np.ndarray) -> None:
        self.put_all(np.arange(self._count, self._count + len(values)), values)

    def put_all(self, places: np.ndarray, values: np.ndarray) -> None:
        """Sets elements as `put` does. `places` and `values`: [n]."""
        end = int(places.max(initial=-1)) + 1
        self._make_room(end)
        self._room[places] = values
        self._count = max(self._count, end)

    def _make_room(self, count: int) -> None:
        if count > len(self._room):
            room = np.zeros(max(START, 2 * len(self._room), count), self._room.dtype)
            room[: self._count] = self.view
            self._room = room


# --- Numbers by optimizer step
# One series for each name of `scalars` (above), and what the page asks of them.


STEP, MINUTES, TOKENS = "step", "minutes", "tokens"
"""Axes that every series can be drawn over: steps done, minutes since the start, tokens trained."""
RARE = ("held_out/", "identity/")
"""Numbers that are measured now and then, each from many rollouts or tokens: a mean over several would be of different policies."""


class Curve(NamedTuple):
    """A series as it is drawn; all are [n]. Where several steps share a point, `y` is their mean, `low` and `high` their range."""

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    merged: int
    """Steps that a point stands for, at most."""


class StepColumns:
    """Every number of a run by its name, in order of time."""

    def __init__(self) -> None:
        self._series: dict[str, tuple[Growing, Growing]] = {}

    def add(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            steps, known = self._of(name)
            known.append(value)
            steps.append(step)

    def extend(self, name: str, steps: np.ndarray, values: np.ndarray) -> None:
        """Adds several values [n] of one number."""
        known_steps, known = self._of(name)
        known.extend(values)
        known_steps.extend(steps)

    def _of(self, name: str) -> tuple[Growing, Growing]:
        if name not in self._series:
            self._series[name] = Growing(np.int32), Growing(np.float64)
        return self._series[name]

    @property
    def names(self) -> list[str]:
        """The names of the numbers, without those of the axes."""
        return sorted(name for name in self._series if name not in (MINUTES, TOKENS))

    def items(self) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
        """Yields steps and values, as they were added."""
        for name, (steps, values) in list(self._series.items()):
            yield name, (steps.view, values.view)

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns steps [n], which rise, and values [n]; empty if there is no such number. A step that a resumed run did again counts
        with its last value."""
        if name not in self._series:
            return np.zeros(0, np.int32), np.zeros(0)
        steps, values = self._series[name][0].view, self._series[name][1].view
        count = min(len(steps), len(values))
        steps, values = steps[:count], values[:count]
        if np.all(steps[1:] > steps[:-1]):
            return steps, values
        order = np.argsort(steps, kind="stable")
        last = np.append(steps[order][1:] != steps[order][:-1], True)
        return steps[order][last], values[order][last]

    def last(self, name: str) -> float | None:
        values = self.series(name)[1]
        return float(values[-1]) if len(values) else None

    def drawn(
        self,
        name: str,
        over: str,
        *,
        window: int = 1,
        within: tuple[float, float] = (-np.inf, np.inf),
        points: int = 1000,
    ) -> Curve:
        """Returns a series over an axis or another number. `window`: values of which each point shows the mean, itself and those before
        it; measurements (RARE) are never smoothed. `within`: the range of x. `points`: how many to return at most; neighbours are merged."""
        steps, y = self.series(name)
        x, here = self._over(steps, over)
        x, y = x[here], trailing_mean(y, 1 if name.startswith(RARE) else window)[here]
        if over not in (STEP, MINUTES, TOKENS):
            order = np.argsort(x, kind="stable")
            x, y = x[order], y[order]
        inside = (x >= within[0]) & (x <= within[1])
        return merged(x[inside], y[inside], points)

    def _over(self, steps: np.ndarray, over: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns x [n] for each step, and where it is known [n]."""
        if over == STEP:
            return steps.astype(np.float64), np.ones(len(steps), bool)
        known, values = self.series(over)
        if not len(known):
            return np.zeros(len(steps)), np.zeros(len(steps), bool)
        if over in (MINUTES, TOKENS):
            return np.interp(steps, known, values, left=0.0), np.ones(len(steps), bool)  # step 0 is before all of them
        place = np.minimum(np.searchsorted(known, steps), len(known) - 1)
        return values[place], known[place] == steps


def trailing_mean(y: np.ndarray, window: int) -> np.ndarray:
    """Returns the mean of each value and of up to `window - 1` values before it, [n]."""
    if window <= 1 or not len(y):
        return y
    total = np.concatenate([[0.0], np.cumsum(y)])
    ends = np.arange(1, len(y) + 1)
    starts = np.maximum(0, ends - window)
    return (total[ends] - total[starts]) / (ends - starts)


def merged(x: np.ndarray, y: np.ndarray, points: int) -> Curve:
    """Merges neighbours so that at most `points` remain."""
    per = -(-len(x) // max(1, points))
    if per <= 1:
        return Curve(x, y, y, y, 1)
    starts = np.arange(0, len(x), per)
    counts = np.diff(np.append(starts, len(x)))
    low, high = np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)
    return Curve(np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts, low, high, per)


# --- Numbers of every group by its ticket
# Numbers of every group by its ticket, small enough that 10⁷ rollouts can be filtered at once.


ROW = np.dtype(
    [
        ("outcome", "i1"),
        ("reason", "i2"),
        ("cut", "i4"),
        ("failed", "i4"),
        ("size", "i4"),
        ("worst", "f4"),
        ("best", "f4"),
        ("mean", "f4"),
        ("longest", "i4"),
        ("step", "i4"),
    ]
)
"""One group. `outcome`: a place in OUTCOMES. `cut`, `failed`, `size`: rollouts. `step`: the step that trained it, from 1; 0 if none."""
OUTCOMES = ("", "ready", "dropped", "failed")
FARTHEST = 1 << 22
"""A ticket that lies further behind the last known one is damage: tickets are drawn one after the other."""

Order = Literal["newest", "oldest", "worst", "best", "longest"]


class Wanted(NamedTuple):
    """A question for groups. Ranges include their ends."""

    steps: tuple[float, float] = (0, math.inf)
    rewards: tuple[float, float] = (-math.inf, math.inf)
    """The range in which at least one rollout has its reward."""
    cut: bool = False
    """Only groups with a rollout that was cut off."""
    failed: bool = False
    """Only groups with a rollout that failed."""
    gone: bool = False
    """Groups that will not be trained, instead of the others."""


class GroupTable:
    def __init__(self) -> None:
        self.rows = Growing(ROW)
        self.reasons = [""]
        """The reasons of outcomes; `reason` is a place in it."""

    def end(self, fact: GroupEnded) -> None:
        """Takes the outcome of a group. A ready group that is dropped later keeps only its last outcome."""
        if not 0 <= fact.ticket < len(self.rows) + FARTHEST:
            return
        if fact.reason not in self.reasons:
            self.reasons.append(fact.reason)
        rewards = [reward for reward in fact.rewards if math.isfinite(reward)]
        worst, best, mean = (min(rewards), max(rewards), sum(rewards) / len(rewards)) if rewards else (math.nan,) * 3
        outcome, reason = OUTCOMES.index(fact.outcome), self.reasons.index(fact.reason)
        lost, size, longest = sum(fact.failures.values()), len(fact.lengths), max(fact.lengths, default=0)
        row = (outcome, reason, fact.truncated, lost, size, worst, best, mean, longest, 0)
        self.rows.put(fact.ticket, row)

    def begin_at(self, count: int, reasons: Sequence[str], ready: Iterable[GroupEnded]) -> None:
        """Makes `count` rows of which only those of the `ready` groups are filled: what else can change was written before."""
        self.reasons = list(reasons)
        if count:
            self.rows.put(count - 1, 0)
        for fact in ready:
            self.end(fact)

    def train(self, tickets: Iterable[int], step: int) -> None:
        rows = self.rows.view
        for ticket in tickets:
            if 0 <= ticket < len(rows):
                rows["step"][ticket] = step

    def find(self, wanted: Wanted, order: Order = "newest") -> np.ndarray:
        """Returns the tickets [n] of the groups that may hold what is wanted."""
        rows = self.rows.view
        gone = rows["outcome"] >= OUTCOMES.index("dropped")
        here = gone if wanted.gone else rows["outcome"] == OUTCOMES.index("ready")
        least, most = wanted.rewards
        if least > -math.inf or most < math.inf:
            here = here & (rows["best"] >= least) & (rows["worst"] <= most)
        if not wanted.gone:
            here = here & (rows["step"] >= wanted.steps[0]) & (rows["step"] <= wanted.steps[1])
        if wanted.cut:
            here = here & (rows["cut"] > 0)
        if wanted.failed:
            here = here & (rows["failed"] > 0)
        tickets = np.flatnonzero(here)
        found = rows[tickets]
        key = {
            "newest": lambda: (-tickets, -found["step"]),
            "oldest": lambda: (tickets, found["step"]),
            "worst": lambda: (tickets, np.nan_to_num(found["worst"], nan=np.inf)),
            "best": lambda: (tickets, -np.nan_to_num(found["best"], nan=-np.inf)),
            "longest": lambda: (tickets, -found["longest"]),
        }[order]()
        return tickets[np.lexsort(key)]


# --- The numbers that dashboards show
# The same names in all of them, and one value per optimizer step.


def scalars(fact: MetricsFact, state: RunState) -> tuple[int, dict[str, float]]:
    """Returns the step that a fact belongs to, and its finite numbers; none for facts without numbers."""
    match fact:
        case StepRow():
            step, values = fact.report.version, _step_scalars(fact, state.engine, state.uncommon)
            values |= _share_scalars(state.shares.recent)
            values |= _choice_scalars(state.choices) | _cost_scalars(state.costs, fact.report.loss_tokens)
        case Evaluated():
            values = {"held_out/reward": fact.reward_mean, "held_out/length": fact.length_mean}
            values |= {"held_out/failed_prompts": float(fact.failed_prompts)} if fact.asked else {}
            if fact.beside:
                values = {name.replace("/", f"/{fact.name}/"): value for name, value in values.items()}
            step = fact.step
        case WeightsLive():
            step = fact.update.version
            values = {"sync/publish_seconds": fact.update.seconds, "sync/swap_seconds": fact.load.swap_seconds}
            values |= {"sync/pause_seconds": fact.pause, "sync/interrupted": float(fact.interrupted)}
        case IdentityChecked():
            step, values = fact.version, {"identity/mean_abs_diff": fact.mean_abs_diff}
            values |= {"identity/kl": fact.kl} if fact.tokens else {}
        case ProcessesUsed():
            step, values = state.step, _use_scalars(fact)
        case _:
            return 0, {}
    return step, {name: value for name, value in values.items() if math.isfinite(value)}


def warm_scalars(fact: WarmStarted) -> Iterator[tuple[int, dict[str, float]]]:
    """Yields the finite losses of a warm start, by its own steps, which come before step 1 of the run."""
    for step, loss in enumerate(fact.losses, 1):
        if math.isfinite(loss):
            yield step, {"warm_start/loss": loss}
    for epoch, loss in enumerate(fact.held_out):
        if math.isfinite(loss):
            agreed = {"warm_start/agreed": fact.agreed[epoch]} if fact.agreed else {}
            yield fact.steps * epoch // fact.epochs, {"warm_start/held_out_loss": loss, **agreed}


TITLES = {
    "cost/dollars": "Cost so far, dollars",
    "cost/dollars_per_million_tokens": "Cost of a million trained tokens, dollars",
    "cost/dollars_per_step": "Cost of a step, dollars",
    "experience/age_max": "Good rollouts of earlier groups: oldest trained token, steps",
    "experience/age_mean": "Good rollouts of earlier groups: mean age of their trained tokens, steps",
    "experience/share": "Good rollouts of earlier groups: share of the trained tokens",
    "experience/tokens": "Good rollouts of earlier groups: trained tokens",
    "held_out/failed_prompts": "Held-out prompts without a reward",
    "held_out/length": "Length of held-out completions, tokens",
    "held_out/reward": "Held-out reward, mean",
    "identity/kl": "Engine against trainer in probes: KL, nats a token",
    "identity/mean_abs_diff": "Engine against trainer in probes: mean difference of a log-prob, nats",
    "lag/max": "Lag, oldest trained token, steps",
    "lag/mean": "Lag, mean over trained tokens, steps",
    "lag/min": "Lag, newest trained token, steps",
    "lag/mixed_tokens": "Tokens sampled while new weights were streamed in",
    "lag/old_cache_tokens": "Tokens sampled over keys and values of older weights",
    "lag/outside_tokens": "Tokens of trained groups that are not in the loss",
    "lag/rollouts_swapped": "Rollouts that met new weights, share",
    "length/mean": "Length of completions in trained groups, tokens",
    "length/p10": "Length of completions in trained groups, 10th percentile, tokens",
    "length/p50": "Length of completions in trained groups, median, tokens",
    "length/p90": "Length of completions in trained groups, 90th percentile, tokens",
    "length/truncated_share": "Completions cut off in trained groups, share",
    "prompts/distance": "Curriculum: distance from uniform draws",
    "prompts/effective": "Curriculum: effective number of prompts",
    "reward/drawn": "Reward of all drawn rollouts, mean",
    "reward/std": "Reward within the step, standard deviation",
    "reward/trained": "Reward of trained groups, mean",
    "share/dropped": "Groups dropped, share of the last ones",
    "share/failed": "Rollouts failed, share of the last ones",
    "share/no_contrast": "Groups without contrast, share of the last ones",
    "share/truncated": "Completions cut off, share of the last ones",
    "sync/interrupted": "Requests interrupted by new weights",
    "sync/pause_seconds": "Generation paused for new weights, seconds",
    "sync/publish_seconds": "Publishing weights, seconds",
    "sync/swap_seconds": "Swapping weights, seconds",
    "time/engine_idle": "Engine idle, share",
    "time/engine_tokens_per_second": "Sampled tokens a second",
    "time/step_seconds": "A step of the trainer, seconds",
    "time/train_tokens_per_second": "Trained tokens a second, while it trains",
    "time/wait_seconds": "Trainer waited for rollouts, seconds",
    "train/advantage_std": "Critic: standard deviation of advantages, before whitening",
    "train/clip_fraction": "Tokens beyond a bound of the ratio, share",
    "train/divergence": "Policy against teacher: divergence of the loss, nats a token",
    "train/dropped_tokens": "Tokens without a log-prob of the sampler, left out",
    "train/entropy": "Entropy of the policy, nats a token",
    "train/grad_norm": "Norm of the gradient, before it is scaled down",
    "train/explained_variance": "Critic: variance of returns that values explain, share",
    "train/graphs": "Shapes that were compiled",
    "train/left_out": "Updates of a step that were left out",
    "train/demonstration_tokens": "Given answers: tokens",
    "train/demonstration_loss": "Given answers: negative log-likelihood, nats a token",
    "train/demonstration_share": "Given answers: their share of the loss",
    "train/kl": "Trainer against sampler: KL, nats a token",
    "train/loss": "Loss",
    "train/lr": "Learning rate",
    "train/missing_routes": "Routes without recorded experts, tokens times layers",
    "train/outside_tokens": "Tokens outside of what the sampler kept",
    "train/pair_margin": "Preferences: mean margin",
    "train/pairs": "Preferences: pairs",
    "train/pairs_agreed": "Preferences: pairs that the policy agrees with, share",
    "train/process_accuracy": "Process reward: rollouts that it takes for what they are, share",
    "train/process_loss": "Process reward: its loss",
    "train/process_reward": "Process reward: mean of a token",
    "train/ratio_max": "Largest ratio to the sampler",
    "train/ratio_mean": "Mean ratio to the sampler",
    "train/reference_kl": "Policy against reference: KL, nats a token",
    "train/return_mean": "Critic: mean return of a token",
    "train/routing_conflicts": "Tokens whose siblings went to other experts",
    "train/teacher_kl": "Policy against teacher: KL, nats a token",
    "train/value_loss": "Critic: loss of values",
    "train/value_mean": "Critic: mean value of a token",
    "warm_start/agreed": "Warm start: held-out pairs whose preferred answer is preferred, share",
    "warm_start/held_out_loss": "Warm start: loss of held-out rows",
    "warm_start/loss": "Warm start: loss",
}
_OF_LAG = {
    "clipped": "beyond a bound of the ratio, share",
    "ess": "effective sample size, share",
    "kl": "KL to the sampler, nats a token",
    "max": "largest difference of a log-prob, nats",
    "p50": "median difference of a log-prob, nats",
    "p90": "difference of a log-prob, 90th percentile, nats",
    "p99": "difference of a log-prob, 99th percentile, nats",
    "ratio": "mean ratio to the sampler",
}


_OF_USE = {
    "cores": "Cores that {} uses",
    "gib": "Memory that {} holds, GiB",
    "busy": "Time in which {} computes, share",
}


def title_of(name: str) -> str:
    """Returns what a number is, with its unit. A name that is not known, of another version, is its own title."""
    room, _, leaf = name.partition("/")
    if name in TITLES:
        return TITLES[name]
    if room == "reward":
        return f"Reward {leaf}, mean of trained groups"
    if room == "use" and (unit := _OF_USE.get(leaf.rpartition("_")[2])):
        return unit.format(leaf.rpartition("_")[0])
    of, _, what = leaf.rpartition("/")
    if room == "held_out" and of and (known := TITLES.get(f"held_out/{what}")):
        return f"{known} ({of})"
    if lag := room.removeprefix("by_lag_") if room.startswith("by_lag_") else "":
        said = (
            f"taken out by {leaf.removeprefix('masked_')}, share"
            if leaf.startswith("masked_")
            else _OF_LAG.get(leaf, "")
        )
        whose = f"Tokens of lag {lag}" if lag[:1].isdigit() else f"Tokens of {lag} rollouts"
        return f"{whose}: {said}" if said else name
    return name


def _beside(name: str, others: Container[str]) -> str:
    """Returns a name that no other number has: reward functions may have any."""
    return f"{name}#2" if name in others else name


def _step_scalars(row: StepRow, engine: EngineUse, known: Container[str]) -> dict[str, float]:
    """`known`: the uncommon numbers that the run has had, which have a value at every step from then on."""
    report = row.report
    names = ("loss", "grad_norm", "lr", "entropy", "ratio_mean", "ratio_max", "clip_fraction", "kl")
    values = {f"train/{name}": float(getattr(report, name)) for name in names}
    extras = ["reference_kl", "teacher_kl", "divergence"]
    values |= {f"train/{name}": float(value) for name in extras if (value := getattr(report, name))}
    measured = ["pairs_agreed", "pair_margin"] * bool(report.pairs)
    measured += ["demonstration_loss", "demonstration_share"] * bool(report.demonstration_tokens)
    values |= {f"train/{name}": float(getattr(report, name)) for name in measured}
    for judge in (report.critic, report.process):
        values |= {f"train/{name}": getattr(judge, name) for name in judge.__struct_fields__} if judge else {}
    for stats in report.lags:
        numbers = {"kl": stats.kl, "ratio": stats.ratio, "ess": stats.ess, "clipped": stats.clipped, **stats.gaps}
        values |= {f"by_lag_{stats.name}/{name}": value for name, value in numbers.items()}
        values |= {f"by_lag_{stats.name}/masked_{rule}": share for rule, share in stats.masked.items()}
    own = {"reward/drawn": row.reward_drawn, "reward/trained": row.reward_mean, "reward/std": row.reward_std}
    values |= {_beside(f"reward/{name}", own): mean for name, mean in row.components.items()} | own
    tokens = sum(row.lags.values())
    if tokens:
        values["lag/mean"] = sum(lag * count for lag, count in row.lags.items()) / tokens
        values["lag/max"] = float(max(row.lags))
        values["lag/min"] = float(min(row.lags))
    if row.ages:
        again = sum(row.ages.values())
        values["experience/age_mean"] = sum(age * count for age, count in row.ages.items()) / again
        values["experience/age_max"] = float(max(row.ages))
    if row.lengths:
        values["length/mean"] = sum(row.lengths) / len(row.lengths)
        tenth, middle, ninth = np.percentile(row.lengths, (10, 50, 90)).tolist()
        values |= {"length/p10": tenth, "length/p50": middle, "length/p90": ninth}
        values["length/truncated_share"] = row.truncated / len(row.lengths)
        values["lag/rollouts_swapped"] = row.swapped / len(row.lengths)
    values |= {name: float(count) for name, count in row.uncommon.items() if name in known}
    values |= {"time/step_seconds": report.seconds, "time/wait_seconds": row.wait_seconds}
    if report.seconds:
        values["time/train_tokens_per_second"] = report.loss_tokens / report.seconds
    idle, rate = engine.recent()
    if idle is not None and rate is not None:
        values |= {"time/engine_idle": idle, "time/engine_tokens_per_second": rate}
    return values


def _use_scalars(fact: ProcessesUsed) -> dict[str, float]:
    found = {f"use/{kind}_cores": use.cores for kind, use in fact.processes.items()}
    found |= {f"use/{kind}_gib": use.memory / 2**30 for kind, use in fact.processes.items()}
    for gpu in fact.gpus:
        found |= {f"use/gpu{gpu.index}_gib": gpu.memory / 2**30}
        found |= {f"use/gpu{gpu.index}_busy": gpu.busy} if gpu.busy >= 0 else {}
    return found


def _share_scalars(recent: Tally) -> dict[str, float]:
    """Returns shares over the last groups."""
    found = {
        "share/truncated": recent.truncated_share,
        "share/no_contrast": recent.no_contrast_share,
        "share/dropped": recent.dropped_share,
        "share/failed": recent.failed_share,
    }
    return {name: share for name, share in found.items() if share is not None}


def _choice_scalars(choices: Choices) -> dict[str, float]:
    """Returns the bias of a curriculum over the whole run."""
    found = {"prompts/distance": choices.distance, "prompts/effective": choices.effective}
    return {name: value for name, value in found.items() if value is not None}


def _cost_scalars(costs: Costs, tokens: int) -> dict[str, float]:
    """`tokens`: trained by the step."""
    if not costs.prices:
        return {}
    found = {"cost/dollars": costs.total, "cost/dollars_per_step": costs.of_step}
    return found | ({"cost/dollars_per_million_tokens": 1e6 * costs.of_step / tokens} if tokens else {})


# --- Everything that curves and sample browser need to know of a run
# Everything that curves and sample browser need to know of a run, counted from its facts.


class Numbers:
    def __init__(self) -> None:
        self.columns, self.groups = StepColumns(), GroupTable()
        self.size = 0
        """Bytes of `metrics.jsonl` that they were counted from; set by whoever reads or writes that file."""
        self._tokens = 0

    def go_on(self) -> None:
        """Prepares numbers that were read from an index for further facts."""
        self._tokens = int(self.columns.last(TOKENS) or 0)

    def begin_at(self, size: int, state: RunState, groups: int, reasons: Sequence[str]) -> None:
        """Prepares empty numbers for the facts behind `size` bytes, without those before. `state` counts the facts before; `groups`: rows of the
        groups until then; `reasons`: of their outcomes."""
        self.size, self._tokens = size, state.totals.tokens
        self.groups.begin_at(groups, reasons, state.fates.ready.values())

    def take(self, fact: MetricsFact, state: RunState) -> None:
        """Counts a fact. `state` already includes it."""
        step, values = scalars(fact, state)
        if isinstance(fact, GroupEnded):
            self.groups.end(fact)
        elif isinstance(fact, StepRow):
            self._tokens += fact.report.loss_tokens
            values |= {MINUTES: fact.t / 60, TOKENS: float(self._tokens)}
            self.groups.train(fact.tickets, fact.report.step + 1)
        if values:
            self.columns.add(step, values)
