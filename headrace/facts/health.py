"""The health of a run: one verdict with the one thing to do, and the six questions of `docs/healthy.md` as rows of numbers. Board, report,
notebook and `headrace status` draw these values and decide nothing themselves; the limits are those of the advice (`thresholds.py`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from headrace.facts import run_state, verdicts
from headrace.facts.facts import Evaluated, HeldOutLook
from headrace.facts.number_tables import MINUTES, StepColumns, merged
from headrace.facts.records import StepRow
from headrace.facts.run_state import RunState
from headrace.facts.texts import clip, dollars, number, percent, plural, reward_text, short_time, with_error
from headrace.facts.thresholds import EARLY, ERRORS, LAST, LEAST, LIMITS, WARM, Mark, worst
from headrace.facts.waits import is_wait

CURVE = 24
"""Points of the curve of a number at most."""
RECENT = 10
"""Steps over which `run_state` takes the drawn reward and the time that the trainer waits."""


class Figure(NamedTuple):
    """One number of a row."""

    name: str
    text: str
    window: str = ""
    """The part of the run that it is of: `last 20 steps`; empty where that is clear."""
    mark: Mark = "unknown"
    """Unknown: too little of it, or it is not judged."""
    trouble: str = ""
    """A clause about what is wrong; empty if nothing is."""
    remedy: str = ""
    curve: tuple[float, ...] = ()
    """Its values over the steps of the whole run."""
    most: float = 0.0
    """The largest value that it can have; 0 if there is none."""
    bars: bool = False
    """Whether the curve is a histogram."""

    @property
    def scale(self) -> tuple[float, float]:
        """The values of the lowest and the highest point of its curve."""
        return min((0.0, *self.curve)), self.most or max((0.0, *self.curve)) or 1.0


class HealthRow(NamedTuple):
    """One question, with the numbers that answer it."""

    key: Literal["moves", "learnable", "learns", "stable", "tokens", "lost"]
    title: str
    question: str
    figures: tuple[Figure, ...]

    @property
    def mark(self) -> Mark:
        return worst([figure.mark for figure in self.figures])

    @property
    def worst(self) -> Figure | None:
        """The first of its worst numbers; None if nothing is wrong."""
        mark = self.mark
        return (
            next((figure for figure in self.figures if figure.mark == mark), None) if mark in ("warn", "bad") else None
        )

    @property
    def remedy(self) -> str:
        return self.worst.remedy if self.worst else ""


class ThenAndNow(NamedTuple):
    """One held-out prompt at the first evaluation and at the last one."""

    prompt: str
    then: HeldOutLook
    then_step: int
    now: HeldOutLook | None
    """None while there is only one evaluation."""
    now_step: int


class Standing(NamedTuple):
    """The state of a run's process, as whoever holds its lock knows it."""

    words: str
    mark: Mark


Kind = Literal["learning", "learned", "not learning", "broken", "too early to say"]


class Health(NamedTuple):
    kind: Kind
    sentence: str
    """The verdict: the kind, and why."""
    remedy: str
    """The one thing to do; empty if there is nothing."""
    mark: Mark
    rows: tuple[HealthRow, ...]
    prompt: ThenAndNow | None


def health(state: RunState, columns: StepColumns | None = None, standing: Standing | None = None) -> Health:
    """Judges a run. `columns`: its numbers by step, for the curves; without them there are none. `standing`: None where nothing is known but
    the facts, as in a file."""
    draw = _curves(columns)
    rows = (
        HealthRow("moves", "moves", "Does anything move?", tuple(_moves(state, draw, standing))),
        HealthRow("learnable", "learnable", "Is there anything to learn from?", tuple(_learnable(state, draw))),
        HealthRow("learns", "learns", "Does it learn, or does only the reward rise?", tuple(_learns(state, draw))),
        HealthRow("stable", "stable", "Is the step stable?", tuple(_stable(state, draw))),
        HealthRow("tokens", "tokens true", "Are the tokens what they claim to be?", tuple(_tokens(state, draw))),
        HealthRow("lost", "nothing lost", "Is anything lost?", tuple(_lost(state))),
    )
    kind, mark, sentence, remedy = _verdict(state, {row.key: row for row in rows})
    prompt = then_and_now(state.evals)
    return Health(kind=kind, sentence=sentence, remedy=remedy, mark=mark, rows=rows, prompt=prompt)


# --- The verdict


FIRST = ("learnable", "moves", "stable", "tokens", "lost")
"""The order in which rows are looked at for what is wrong: without anything to learn from, no other number says much."""


def _verdict(state: RunState, rows: dict[str, HealthRow]) -> tuple[Kind, Mark, str, str]:
    """Returns kind, mark, sentence and remedy."""
    learned = _learned(state)
    wrong = [found for key in FIRST if (found := rows[key].worst) and found.mark == "bad"]
    looks = [found for key in (*FIRST, "learns") if (found := rows[key].worst) and found.mark == "warn"]
    if wrong:
        earned = any(reward for group in state.shares.recent.held for reward in group.rewards)
        return _of_no_use(wrong, learned, earned=earned)
    if math.isnan(learned.changed):
        besides = [looks[0].trouble] if looks else []
        sentence = _sentence("too early to say", [learned.words, *besides])
        return "too early to say", "warn" if looks else "unknown", sentence, looks[0].remedy if looks else ""
    if learned.changed <= 0:
        causes = [found for found in looks if found.trouble != learned.words][:1]
        mark: Mark = "bad" if learned.changed < 0 else "warn"
        sentence = _sentence("not learning", [learned.words, *(found.trouble for found in causes)])
        return "not learning", mark, sentence, causes[0].remedy if causes else READ
    if looks:
        return "learning", "warn", _sentence("learning", [learned.words, f"but {looks[0].trouble}"]), looks[0].remedy
    return "learning", "good", _sentence("learning", [learned.words]), ""


def _of_no_use(wrong: Sequence[Figure], learned: Change, *, earned: bool) -> tuple[Kind, Mark, str, str]:
    """Judges a run with a number with which it is of no use, which is said first whatever else is so. `earned`: whether any of the last completions
    has a reward: those of a solved task have."""
    troubles = [figure.trouble for figure in wrong]
    if not all(figure.name in BARREN for figure in wrong):
        return "broken", "bad", _sentence("broken", troubles), wrong[0].remedy
    if not learned.changed > 0:
        return "not learning", "bad", _sentence("not learning", troubles), wrong[0].remedy
    if wrong[0].name == "no contrast" and earned:
        return "learned", "warn", _sentence("learned", [learned.words, *troubles]), wrong[0].remedy
    return "learning", "bad", _capital("; ".join([*troubles, learned.words])) + ".", wrong[0].remedy


READ = "read rollouts before curves: headrace inspect RUN"
BARREN = ("cut off", "no contrast", "dropped", "new prompts")
"""Numbers of the second row with which a run computes as it should, and learns nothing."""


def _sentence(kind: Kind, why: Sequence[str]) -> str:
    return f"{_capital(kind)}: {'; '.join(text.rstrip('.') for text in why)}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# --- Does anything move?


Draw = Callable[..., tuple[float, ...]]


def _curves(columns: StepColumns | None) -> Draw:
    """Returns the function that returns the values of a number over the run; without columns none."""

    def draw(name: str, value: Callable[[np.ndarray], np.ndarray] = lambda values: values) -> tuple[float, ...]:
        if columns is None:
            return ()
        values = value(columns.series(name)[1])
        values = values[np.isfinite(values)]
        return tuple(merged(values, values, CURVE).y.tolist())

    return draw


def _moves(state: RunState, draw: Draw, standing: Standing | None) -> Iterable[Figure]:
    yield _state(state, standing)
    pace = run_state.step_seconds(state, LAST)
    if pace is not None:
        steps = draw(MINUTES, lambda minutes: 60 * np.diff(minutes))
        yield Figure("a step takes", short_time(pace), _last_steps(state), curve=steps)
    if state.ended and state.rows:
        (engine, trainer), window, busy = run_state.idle_shares(state), "while it trained", "while it trained"
    else:
        engine, trainer = state.engine.recent()[0], run_state.recent_trainer_idle(state, RECENT)
        window, busy = "last 30 s", f"last {RECENT} steps"
    if engine is not None:
        trains = len(state.rows) > 2 and (state.training or state.ended is not None)
        yield _judged(
            "engine idle",
            percent(engine),
            window,
            LIMITS["time/engine_idle"].mark(engine if trains else None),
            trouble=f"the engine is idle {percent(engine)} of the time",
            remedy="raise staleness.max_lag or staleness.groups_per_step, or give the trainer more; headrace plan computes both",
            curve=draw("time/engine_idle"),
            most=1.0,
        )
    if trainer is not None:
        yield Figure("trainer waits", percent(trainer), busy)
    late = [warning for warning in run_state.open_warnings(state) if is_wait(warning.key)] if not state.ended else []
    if late:
        yield _judged(
            "a wait",
            short_time(state.now - late[-1].t),
            "since the warning",
            "warn",
            trouble=late[-1].message,
            remedy="headrace status shows who waits for whom, and --stacks where each process is",
        )


def _state(state: RunState, standing: Standing | None) -> Figure:
    """Returns what the process of the run does, or how it ended."""
    reason = state.ended.reason if state.ended else ""
    if standing is None and state.ended:
        standing = Standing(clip(reason, 400), "good" if reason in ("finished", "interrupted") else "bad")
    if standing is None:
        return Figure("state", "no end is recorded", mark="unknown")
    if standing.mark not in ("warn", "bad"):
        return Figure("state", standing.words, mark=standing.mark)
    remedy = (
        "read the last lines of its output" if standing.mark == "bad" else "headrace status --stacks shows where it is"
    )
    if standing.mark == "bad" and run_state.saved_step(state) is not None:
        remedy = "mend the cause, then headrace train --resume"
    return _judged(
        "state", standing.words, "", standing.mark, trouble=f"the run {_said(standing.words)}", remedy=remedy
    )


def _said(words: str) -> str:
    if words.startswith("died"):
        return words
    return f"is {words}" if words.startswith(("alive", "paused")) else f"stopped: {words}"


def _last_steps(state: RunState) -> str:
    return f"last {plural(min(LAST, max(1, len(run_state.session_rows(state)) - 1)), 'step')}"


# --- Is there anything to learn from?


def _learnable(state: RunState, draw: Draw) -> Iterable[Figure]:
    recent, failing = state.shares.recent, state.shares.failing
    groups, rollouts = f"last {plural(recent.groups, 'group')}", f"last {plural(recent.rollouts, 'rollout')}"
    known = state.started is not None and verdicts.enough(recent)
    parts = (
        ("failed", "share/failed", failing.failed_share, f"last {plural(failing.rollouts, 'rollout')}"),
        ("cut off", "share/truncated", recent.truncated_share, rollouts),
        ("no contrast", "share/no_contrast", recent.no_contrast_share, groups),
        ("dropped", "share/dropped", recent.dropped_share, groups),
        ("new prompts", "prompts/new", verdicts.new_share(state.choices), "all draws of the curriculum"),
    )
    given = {ADVISED.get(advice.name, advice.name): advice for advice in verdicts.advices(state)}
    for name, limit, share, window in parts:
        if share is None:
            continue
        mark = LIMITS[limit].mark(share) if known else "unknown"
        advice = given.get(name) or next(iter(given.values()), None)  # without its own, the first includes it
        trouble, remedy = (advice.trouble, advice.remedy) if advice else ("", "")
        yield _judged(name, percent(share), window, mark, trouble=trouble, remedy=remedy, curve=draw(limit), most=1.0)
    rates = [mean for group in recent.held for mean in verdicts.solve_rate(group)]
    if rates:
        yield Figure("solve rates", _histogram(rates), groups, curve=_bars(rates), bars=True)


ADVISED = {"curriculum": "new prompts", "no reward": "no contrast"}
"""Names of numbers where they are not those of their advice."""
BARS = 7


def _bars(rates: Sequence[float]) -> tuple[float, ...]:
    """Returns how many of the groups have each mean reward, from the lowest to the highest."""
    counts, _ = np.histogram(rates, BARS, (min(0.0, *rates), max(1.0, *rates)))
    return tuple(counts.tolist())


def _histogram(rates: Sequence[float]) -> str:
    return f"{reward_text(min(rates))} to {reward_text(max(rates))}"


# --- Does it learn, or does only the reward rise?


class Change(NamedTuple):
    """A change of the reward over a run."""

    changed: float
    """1 if it has risen by more than its error, -1 if it has fallen, 0 if neither, NaN while it is too early to say."""
    words: str
    held_out: bool
    """Whether it is that of held-out prompts."""


def _learned(state: RunState) -> Change:
    """Compares the held-out reward before training with the last one; where there are not two, the drawn rewards of first and last steps."""
    before, since = verdicts.before_and_after(state)
    drawn = drawn_change(state.spread) if not state.choices.draws else Change(math.nan, "", False)
    if before and since:
        gain, error = since.reward_mean - before.reward_mean, math.hypot(before.reward_sem, since.reward_sem)
        words = f"held out {reward_text(before.reward_mean)} → {_mean(since)} at step {since.step}"
        if math.isfinite(gain) and math.isfinite(error):
            errors = ERRORS if state.step >= EARLY else 2 * ERRORS
            changed = 0 if abs(gain) < errors * error or not gain else math.copysign(1, gain)
            if changed == 0:
                words += f", within {errors:g} standard errors"
                words += ", although the drawn reward rises" if drawn.changed > 0 else ""
                if state.step < EARLY:
                    changed = math.nan
            return Change(changed, words, True)
        return Change(0.0, f"{words}: a measurement that says nothing", True)
    if math.isnan(drawn.changed):
        return Change(math.nan, _too_early(state), False)
    missing = "held-out reward was not measured" + (" since" if before else "")
    return drawn._replace(words=f"{drawn.words}; {missing}")


def drawn_change(rows: Sequence[StepRow]) -> Change:
    """Compares the drawn rewards of the first and the last quarter of the steps, by the spread of the steps in each."""
    rewards = [row.reward_drawn for row in rows if math.isfinite(row.reward_drawn)]
    part = max(EARLY // 2, len(rewards) // 4)
    if len(rewards) < EARLY:
        return Change(math.nan, "", False)
    first, last = rewards[:part], rewards[-part:]
    gain = statistics.fmean(last) - statistics.fmean(first)
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / part)
    changed = 0.0 if abs(gain) < ERRORS * error or not gain else math.copysign(1, gain)
    what = {1.0: "has risen", -1.0: "has fallen", 0.0: "has not changed"}[changed]
    means = f"{reward_text(statistics.fmean(first))} → {reward_text(statistics.fmean(last))}"
    return Change(
        changed, f"the drawn reward {what} ({means}, first and last {part} of {plural(len(rewards), 'step')})", False
    )


def _too_early(state: RunState) -> str:
    recent = state.shares.recent
    if state.started is None:
        return run_state.phase(state)
    if not verdicts.enough(recent) and not state.rows:
        return f"{plural(recent.rollouts, 'rollout')} of {LEAST} have ended ({run_state.phase(state)})"
    ended = "the run ended after" if state.ended else "the reward is judged from"
    judged = plural(state.step, "step") if state.ended else f"{EARLY} steps on, this is step {state.step}"
    return f"{ended} {judged}"


def _learns(state: RunState, draw: Draw) -> Iterable[Figure]:
    before, since = verdicts.before_and_after(state)
    change = _learned(state)
    mark: Mark = (
        "unknown"
        if math.isnan(change.changed)
        else "good"
        if change.changed > 0
        else "bad"
        if change.changed < 0
        else "warn"
    )
    remedy = READ if mark in ("warn", "bad") else ""
    if mark == "good" and not change.held_out and not before:
        mark, remedy = (
            "warn",
            "set eval.prompts and eval.every: what the drawn reward gains may be had in a way that you did not mean",
        )
    trouble = change.words if mark in ("warn", "bad") else ""
    if mark == "warn" and change.changed > 0:
        trouble = "no held-out reward was measured"
    last = since or before
    text, window, curve = verdicts.gain_of(state.evals), _of(last) if last else "", draw("held_out/reward")
    name = (last.name if last and state.sets else "") or "held out"
    yield _judged(name, text, window, mark, trouble=trouble, remedy=remedy, curve=curve)
    for name, evals in state.sets.items():
        yield Figure(name, verdicts.gain_of(evals), _of(evals[-1]), curve=draw(f"held_out/{name}/reward"))
    if last and last.failed_prompts:
        lost = f"{plural(last.failed_prompts, 'held-out prompt')} of {last.asked} failed"
        failed = str(last.failed_prompts)
        remedy = "mend the reward: theirs is unknown"
        yield _judged("held out failed", failed, window, "warn", trouble=lost, remedy=remedy)
    if (recent := run_state.recent_reward(state, RECENT)) is not None:
        yield Figure("drawn", reward_text(recent), f"last {RECENT} steps", curve=draw("reward/drawn"))
    lengths = [length for row in state.rows[-LAST:] for length in row.lengths]
    if lengths:
        top = sorted(lengths)[math.ceil(0.95 * len(lengths)) - 1]
        text = f"{statistics.fmean(lengths):.1f} (p95 {top})"
        yield Figure("length", text, f"tokens, trained, last {LAST} steps", curve=draw("length/mean"))


def _of(evaluation: Evaluated) -> str:
    return f"{verdicts.measured_on(evaluation)}, step {evaluation.step}"


def _mean(evaluation: Evaluated) -> str:
    return with_error(evaluation.reward_mean, evaluation.reward_sem)


def then_and_now(evals: Sequence[Evaluated]) -> ThenAndNow | None:
    """Returns the first prompt that was scored in the first and in the last evaluation; with one evaluation the first one scored. None if no
    prompt was recorded."""
    if not (evals := verdicts.comparable(evals)):
        return None
    first, last = evals[0], evals[-1]
    later = {look.prompt_id: look for look in last.looks if look.rewards} if len(evals) > 1 else {}
    scored = [look for look in first.looks if look.rewards]
    for look in scored:
        if look.prompt_id in later:
            return ThenAndNow(look.prompt, look, first.step, later[look.prompt_id], last.step)
    return ThenAndNow(scored[0].prompt, scored[0], first.step, None, first.step) if scored else None


# --- Is the step stable?


def _stable(state: RunState, draw: Draw) -> Iterable[Figure]:
    rows = state.rows[-LAST:]
    if not rows:
        return
    window = f"last {plural(len(rows), 'step')}"
    yield _entropy(state, window, draw)
    yield _gradient(state, window, draw)
    kl = _mean_of(rows, lambda row: row.report.kl)
    yield _judged(
        "KL to the sampler",
        number(kl),
        window,
        LIMITS["train/kl"].mark(kl),
        trouble=f"engine and trainer differ by {number(kl)} nats a token (KL, sampler to trainer)",
        remedy='a smaller staleness.max_lag or train.learning_rate; at lag 0, engine.path = "hf"',
        curve=draw("train/kl"),
    )
    if reference := _mean_of(rows, lambda row: row.report.reference_kl):
        yield Figure("KL to the reference", number(reference), window, curve=draw("train/reference_kl"))
    yield from _critic(state, window, draw)
    if skipped := [row.report.skipped for row in rows if row.report.skipped]:
        yield _judged(
            "no change",
            plural(len(skipped), "step"),
            window,
            LIMITS["train/skipped"].mark(len(skipped) / len(rows)),
            trouble=f"{len(skipped)} of the {window} changed no weight ({skipped[-1]})",
            remedy="a smaller train.learning_rate",
        )


def _entropy(state: RunState, window: str, draw: Draw) -> Figure:
    """Returns the entropy, which may fall as far as it likes while the reward rises."""
    now = _mean_of(state.rows[-LAST:], lambda row: row.report.entropy)
    start = _mean_of(state.rows[: EARLY // 2], lambda row: row.report.entropy)
    least = min(start, now)
    times = max(start, now) / least if least > 0 and len(state.rows) > EARLY else 1.0
    mark = LIMITS["train/entropy"].mark(times if math.isfinite(now) else now)
    if mark == "warn" and _learned(state).changed > 0:
        mark = "good"
    moved = f"the entropy has {'fallen' if now < start else 'risen'} from {number(start)} to {number(now)} nats"
    return _judged(
        "entropy",
        f"{number(now)} nats",
        window,
        mark,
        trouble=f"{moved} and the reward has not risen",
        remedy="another algorithm, or a smaller train.learning_rate",
        curve=draw("train/entropy"),
    )


def _gradient(state: RunState, window: str, draw: Draw) -> Figure:
    """Returns the norm of the gradient, which is compared with that of the steps before."""
    now, earlier = _mean_of(state.rows[-LAST:], lambda row: row.report.grad_norm), state.rows[:-LAST]
    usual = statistics.median(row.report.grad_norm for row in earlier) if len(earlier) >= EARLY else 0.0
    times = now / usual if usual > 0 else 1.0
    return _judged(
        "gradient",
        number(now),
        window,
        LIMITS["train/grad_norm"].mark(times if math.isfinite(now) else now),
        trouble=f"the gradient is {number(times)} times its usual size",
        remedy="a smaller train.learning_rate, from the last good checkpoint",
        curve=draw("train/grad_norm"),
    )


def _critic(state: RunState, window: str, draw: Draw) -> Iterable[Figure]:
    """Yields the part of the returns' variance that a critic explains. Steps count whose returns differ: in others there is nothing to explain, and it is 0."""
    found = [critic for row in state.rows[-LAST:] if (critic := row.report.critic)]
    if not found:
        return
    explained = [critic.explained_variance for critic in found if critic.explained_variance != 0.0]
    share = statistics.fmean(explained) if explained else math.nan
    judged = bool(explained) and len(state.rows) >= WARM
    mark = LIMITS["train/explained_variance"].mark(1 - share if judged else None)
    if mark == "warn" and _learned(state).changed > 0:
        mark = "good"
    more = (
        "no more than a constant would" if share > -0.05 else "and mislead: a constant would be nearer to the returns"
    )
    yield _judged(
        "values",
        f"{number(share)} explained" if explained else "returns do not differ",
        f"of the returns' variance, value loss {number(statistics.fmean(critic.value_loss for critic in found))}, {window}",
        mark,
        trouble=f"the critic's values explain {number(share)} of the variance of returns, {more}, and the reward has not risen",
        remedy='another algo.critic.learning_rate, algo.critic.trunk = 0.1, or a group\'s mean instead: algo.name = "grpo"',
        curve=draw("train/explained_variance"),
    )


def _mean_of(rows: Sequence[StepRow], value: Callable[[StepRow], float]) -> float:
    """Returns the mean of a number over the rows; NaN if it is not finite in the last of them."""
    values = [value(row) for row in rows]
    return statistics.fmean(filter(math.isfinite, values)) if math.isfinite(values[-1]) else math.nan


def _judged(
    name: str,
    text: str,
    window: str,
    mark: Mark,
    *,
    trouble: str,
    remedy: str,
    curve: tuple[float, ...] = (),
    most: float = 0.0,
) -> Figure:
    """Returns a number that says what is wrong only if something is."""
    wrong = mark in ("warn", "bad")
    return Figure(name, text, window, mark, trouble=trouble * wrong, remedy=remedy * wrong, curve=curve, most=most)


# --- Are the tokens what they claim to be? Is anything lost?


MOODS: dict[str, Mark] = {"good": "good", "plain": "good", "bad": "bad", "unknown": "unknown"}


BELIEVE = "do not believe the numbers of this run, and report it"


def _tokens(state: RunState, draw: Draw) -> Iterable[Figure]:
    lag, identity, record = verdicts.lag(state), verdicts.identity(state), verdicts.record(state)
    bound = state.started.max_lag if state.started else 0
    yield _judged(
        "lag",
        f"{lag.value} of {bound}" if lag.mood != "unknown" else lag.value,
        "all trained tokens",
        MOODS[lag.mood],
        trouble=f"a token is older than the bound of {bound} ({lag.value})",
        remedy=BELIEVE,
        curve=draw("lag/max"),
    )
    yield _judged(
        "policy identity",
        identity.value,
        "all versions",
        MOODS[identity.mood],
        trouble=f"the engine does not serve the weights that were trained ({identity.value}: {identity.detail})",
        remedy='engine.path = "hf"',
        curve=draw("identity/mean_abs_diff"),
    )
    yield _judged(
        "record",
        record.value,
        "all trained tokens",
        "warn" if record.mood == "plain" else MOODS[record.mood],
        trouble=f"the sampler's record has gaps: {record.detail}",
        remedy="see What became of every prompt in the report",
    )
    bias = verdicts.bias(state)
    yield _judged(
        "selection bias",
        bias.value,
        "all groups",
        "warn" if bias.mood == "bad" else MOODS[bias.mood],
        trouble=clip(bias.detail, 300),
        remedy="mend the rollouts that fail" if state.shares.total.failed_share else 'staleness.overdue = "wait"',
    )


def _lost(state: RunState) -> Iterable[Figure]:
    counts, verdict = state.accounting, verdicts.accounting(state)
    ended = sum(counts.dropped.values()) + sum(counts.failed.values())  # failed groups are not trained either
    kept = counts.in_pipeline + counts.in_checkpoint
    yield _judged(
        "prompts",
        f"{counts.drawn:,} = {counts.trained:,} trained + {ended:,} dropped + {kept:,} under way",
        "",
        MOODS[verdict.mood],
        trouble=f"prompts are not accounted for: {verdict.detail}",
        remedy=BELIEVE,
    )
    began = state.rows[-LAST].t if len(state.rows) >= LAST else 0.0
    late = [death for death in state.deaths if death.t >= began]
    yield _judged(
        "deaths",
        str(len(state.deaths)),
        "",
        "warn" if late else "good",
        trouble=f"a process died: the {late[-1].who} {late[-1].how}" if late else "",
        remedy="look for the cause in the run's logs/",
    )
    if state.checkpoints:
        last, saved = state.checkpoints[-1], run_state.saved_step(state)
        yield _judged(
            "checkpoint",
            "none" if saved is None else f"step {saved}",
            "",
            "warn" if last.error else "good",
            trouble=f"the checkpoint of step {last.step} could not be written: {clip(last.error, 200)}",
            remedy="make room on the disk",
        )
    if len(state.sessions) > 1:
        yield Figure("resumes", str(len(state.sessions) - 1))
    if costs := run_state.cost_numbers(state):
        yield Figure("cost", dollars(costs["cost"]))
