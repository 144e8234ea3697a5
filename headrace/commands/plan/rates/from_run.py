"""Rates from the metrics of a run: the times of its engine and trainer, as far as the metrics show them. The parts worked at
the same time in that run, so nothing is added for their slowing each other down.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from headrace.commands.plan.rates.rates import EngineRates, Rates, TrainerRates
from headrace.core.errors import ConfigError
from headrace.facts.facts import EngineSample, GroupEnded, Waited, WeightsLive
from headrace.facts.records import MetricsFact, StepRow, read_metrics
from headrace.loop.world.surroundings import Distribution, empirical, fixed
from headrace.models.resolve import short_name
from headrace.run.config import RunConfig, config_of_run, read_config

F = TypeVar("F")


def rates_of_run(run_dir: Path, config: RunConfig) -> tuple[Rates, float]:
    """Returns the run's rates, and the share of its groups that had contrast. Raises ConfigError if the run was too short."""
    was = read_config(config_of_run(run_dir))
    branches = bool(was.rollout.forks.alternatives)
    return rates_of_facts(read_metrics(run_dir), config, run_dir.name, branches, was.train.epochs)


def rates_of_facts(
    facts: Sequence[MetricsFact], config: RunConfig, name: str, branches: bool = False, epochs: int = 1
) -> tuple[Rates, float]:
    """Returns the same from the metrics of a run, or of a part of it. `branches`: whether its rollouts fork. `epochs`: its `train.epochs`."""
    steps, groups = _of(facts, StepRow), _of(facts, GroupEnded)
    samples, live = _of(facts, EngineSample), _of(facts, WeightsLive)
    if len(steps) < 3 or len(samples) < 5:
        raise ConfigError(
            f"{name} has {len(steps)} steps and {len(samples)} samples of its engine, too few to take rates from; let it run "
            "on, or plan from its config.toml with --calibrate"
        )
    sampled = [group for group in groups if group.lengths]
    turns, tools, results = (
        (None, None, None) if branches else _between_turns(sampled)
    )  # those of trees are of no rollout
    read = statistics.mean(sum(group.read) for group in sampled)
    # Tokens forwarded in addition to the completions and to what lies between them: less than the prompt if rollouts begin alike.
    prompt = statistics.mean(
        max(1.0, (step.report.forward_tokens / epochs - sum(step.lengths)) / len(step.tickets) - read) for step in steps
    )
    before = samples[0].stats.prompt_tokens if steps[0].report.step else 0
    computed = (samples[-1].stats.prompt_tokens - before) / max(1, len(groups))
    waits = [wait for wait in _of(facts, Waited) if wait.t > steps[0].t]  # in the first step memory is allocated
    engine = _engine(samples, live, config.engine.sizes.max_running, _outside(samples, _of(facts, Waited), live))
    rates = Rates(
        msgspec.structs.replace(engine, prefill=engine.prefill * computed / (prompt + read)),
        _trainer(steps, waits, live),
        overhead=_waited(waits, "rollouts", "the scorer"),
        completions=_completions(sampled),
        prompts=fixed(round(prompt)),
        turns=turns,
        tools=tools,
        results=results,
        source=f"metrics of the run {name}",
        model=short_name(config.model.path),
    )
    barren = sum(group.reason == "no_contrast" for group in groups)
    return rates, 1 - barren / max(1, sum(group.outcome != "failed" for group in groups))


def _completions(groups: Sequence[GroupEnded]) -> Distribution:
    """Returns the tokens of a turn: each turn of a rollout counts as its mean."""
    means = [[length / count for length, count in zip(group.lengths, _turns(group), strict=True)] for group in groups]
    values = [
        mean
        for group, of_rollouts in zip(groups, means, strict=True)
        for mean, count in zip(of_rollouts, _turns(group), strict=True)
        for _ in range(count)
    ]
    return empirical(values, alike(means))


def _turns(group: GroupEnded) -> Sequence[int]:
    return group.turns or (1,) * len(group.lengths)


def _between_turns(
    groups: Sequence[GroupEnded],
) -> tuple[Distribution | None, Distribution | None, Distribution | None]:
    """Returns the turns of a rollout, and the seconds and tokens between two turns; None if all rollouts have one turn."""
    several = [group for group in groups if group.turns]
    if not several:
        return None, None, None
    counts = [list(map(float, _turns(group))) for group in groups]
    seconds = _per_gap((group.turns, group.between) for group in several if group.between)
    tokens = _per_gap((group.turns, group.read) for group in several)
    each = empirical([count for group in counts for count in group], alike(counts))
    return each, empirical(seconds or [0.0]), empirical(tokens or [1.0])


def _per_gap(of: Iterable[tuple[Sequence[int], Sequence[float]]]) -> list[float]:
    """Returns a value for each gap between two turns: the rollout's mean."""
    return [
        value / (count - 1)
        for turns, values in of
        for count, value in zip(turns, values, strict=True)
        for _ in range(count - 1)
    ]


def _of(facts: Iterable[MetricsFact], kind: type[F]) -> list[F]:
    return [fact for fact in facts if isinstance(fact, kind)]


def _outside(samples: Sequence[EngineSample], waits: Sequence[Waited], live: Sequence[WeightsLive]) -> float:
    """The factor by which completions last longer than the engine's passes, which alone count as its work: between two of them it reads
    messages and sends tokens, and a core may be taken. 1 if it cannot be found, as where waits for the engine include those for tools."""
    begin, end = samples[0].t, samples[-1].t
    asked, until = 0.0, begin
    for wait in sorted(waits, key=lambda wait: wait.t - wait.seconds):
        if (wait.owner, wait.what) == ("rollouts", "the engine"):
            since, last = max(until, wait.t - wait.seconds), min(end, wait.t)
            asked, until = asked + max(0.0, last - since), max(until, last)
    asked -= sum(update.pause for update in live if begin < update.t <= end)
    busy = samples[-1].stats.busy_seconds - samples[0].stats.busy_seconds
    return max(1.0, asked / busy) if busy > 0 else 1.0


def _engine(
    samples: Sequence[EngineSample], live: Sequence[WeightsLive], max_running: int, outside: float
) -> EngineRates:
    """Seconds of work between two samples = a · passes + b · tokens sampled + c · prompt tokens, by least squares; and `outside` times as
    long for whoever waits."""
    rows, busy = [], []
    for before, after in itertools.pairwise(samples):
        old, new = before.stats, after.stats
        if new.steps > old.steps and new.busy_seconds > old.busy_seconds:  # a smaller number belongs to a new process
            sampled, prompt = new.sampled_tokens - old.sampled_tokens, new.prompt_tokens - old.prompt_tokens
            rows.append((new.steps - old.steps, sampled, prompt))
            busy.append(new.busy_seconds - old.busy_seconds)
    a, b, c = (outside * float(coefficient) for coefficient in nonnegative(np.array(rows, float), np.array(busy)))
    return EngineRates(
        ((1.0, a + b), (float(max(2, max_running)), a + b * max(2, max_running))),
        c,
        max_running=max_running,
        verify=statistics.mean(update.load.verify_seconds for update in live),
        swap=statistics.mean(update.load.swap_seconds for update in live),
    )


def _trainer(steps: Sequence[StepRow], waits: Sequence[Waited], live: Sequence[WeightsLive]) -> TrainerRates:
    fixed_part, token = line([(float(step.report.forward_tokens), step.report.seconds) for step in steps[1:]])
    computed = [step.report.updates + step.report.left_out for step in steps[1:] if not step.report.skipped]
    fixed_part /= statistics.mean(computed) if computed else 1
    inside = statistics.mean(step.report.seconds for step in steps[1:])
    messages = max(0.0, _waited(waits, "controller", "the trainer (step)") - inside)
    publish = _waited(waits, "controller", "the trainer (publish)")
    score = _waited(waits, "controller", "the trainer (probe)")
    published = publish or statistics.mean(update.update.seconds for update in live)
    send = _waited(waits, "delivery", "the trainer (the published weights)")
    return TrainerRates(token, fixed_part + messages, published, send=send, score=score)


def _waited(waits: Sequence[Waited], owner: str, what: str) -> float:
    """Mean seconds; 0 where waits were too short to be recorded. A run takes the sum of its waits, so the long ones count."""
    return statistics.mean([wait.seconds for wait in waits if (wait.owner, wait.what) == (owner, what)] or [0.0])


# --- Fits of measurements ---------------------------------------------------------------------------------------------


T = TypeVar("T")


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(Value at 0, slope) of the least squares line; neither is negative."""
    x = np.array([[1.0, at] for at, _ in points])
    a, b = nonnegative(x, np.array([value for _, value in points]))
    return float(a), float(b)


def nonnegative(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[k] coefficients >= 0 that minimise |x c - y|², for [n, k] `x` with few columns: the best of all subsets of them."""
    columns = x.shape[1]
    best, found = np.inf, np.zeros(columns)
    for size in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), size):
            part = np.linalg.lstsq(x[:, chosen], y, rcond=None)[0]
            error = float(((x[:, chosen] @ part - y) ** 2).sum())
            if (part >= 0).all() and error < best * (1 - 1e-12):
                best, found = error, np.zeros(columns)
                found[list(chosen)] = part
    return found


def alike(groups: Sequence[Sequence[float]]) -> float:
    """Intraclass correlation of one-way groups (ICC(1), Shrout and Fleiss, 1979), from 0 to 1; 0 if it cannot be computed."""
    full = [np.asarray(group, float) for group in groups if len(group) > 1]
    if len(full) < 2:
        return 0.0
    size = float(np.mean([len(group) for group in full]))
    grand = np.concatenate(full).mean()
    between = sum(len(group) * (group.mean() - grand) ** 2 for group in full) / (len(full) - 1)
    within = sum(((group - group.mean()) ** 2).sum() for group in full) / sum(len(group) - 1 for group in full)
    total = between + (size - 1) * within
    return float(min(1.0, max(0.0, (between - within) / total))) if total > 0 else 0.0


def newly_computed(computed: float, prompts: Sequence[int], together: int) -> float:
    """The share of prompt tokens that is computed where `together` prompts follow new weights. `computed`: tokens computed for all of
    `prompts`, given by their lengths, under the same weights. Prompts of a task often share a beginning, which is computed once under
    each version: the fewer prompts a version has, the larger a share that is."""
    count, whole = len(prompts), float(sum(prompts))
    if count < 2:
        return 1.0
    shared = min(whole / count, max(0.0, (whole - computed) / (count - 1)))
    return 1 - shared * (together - 1) / together * count / whole


def rotated(values: Sequence[T], sizes: Sequence[int]) -> Iterator[Sequence[T]]:
    """Yields as many values as each size says, each time those that follow, from the first again after the last."""
    start = 0
    for size in sizes:
        yield [values[(start + i) % len(values)] for i in range(size)]
        start += size
