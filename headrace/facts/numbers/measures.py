"""Numbers computed from a `RunState`: rates, idle shares, time left. None means that the facts do not say."""

from __future__ import annotations

from headrace.facts.costs import ENGINE
from headrace.facts.numbers.fates import discarded
from headrace.facts.numbers.state import RunState
from headrace.facts.records import StepRow


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
        measured_before = any(one.phase == "before" for one in state.evals)
        return "measuring held-out reward (after)" if measured_before else "finishing"
    running = state.engine.last.running if state.engine.last else 0
    return "measuring held-out reward (before)" if running else "starting"


def saved_step(state: RunState) -> int | None:
    """Returns the step of the newest checkpoint on the disk."""
    return next((one.step for one in reversed(state.checkpoints) if not one.error), None)


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
